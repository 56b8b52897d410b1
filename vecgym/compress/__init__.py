"""What is sent instead of a whole tensor, and its bytes.

Codes:      Codec, the base; TopK, RandomK, Quantise, Sign; E3M0, floats of four bits; Chain, one after the other;
            PowerSGD, two averages; a Compressor is one of these
By name:    make_codec("topk"); check_fraction, check_bits
Cosines:    dct, inverse_dct, accumulate_dct_, in a basis
Chunks:     to_chunks, from_chunks, by the Grid that grid makes; chunk_size
Strongest:  strongest, mean_of_senders, topk_bytes
"""

from vecgym.compress.chain import Chain
from vecgym.compress.codecs import (
    Codec,
    Quantise,
    RandomK,
    Sign,
    TopK,
    check_bits,
    check_fraction,
)
from vecgym.compress.dct import (
    Grid,
    accumulate_dct_,
    basis,
    chunk_size,
    dct,
    from_chunks,
    grid,
    inverse_dct,
    mean_of_senders,
    strongest,
    to_chunks,
    topk_bytes,
)
from vecgym.compress.floats import E3M0
from vecgym.compress.methods import Compressor, make_codec
from vecgym.compress.powersgd import PowerSGD

__all__ = [
    "E3M0",
    "Chain",
    "Codec",
    "Compressor",
    "Grid",
    "PowerSGD",
    "Quantise",
    "RandomK",
    "Sign",
    "TopK",
    "accumulate_dct_",
    "basis",
    "check_bits",
    "check_fraction",
    "chunk_size",
    "dct",
    "from_chunks",
    "grid",
    "inverse_dct",
    "make_codec",
    "mean_of_senders",
    "strongest",
    "to_chunks",
    "topk_bytes",
]
