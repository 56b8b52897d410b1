"""What is sent instead of a whole tensor, and its bytes."""

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

__all__ = [
    "Grid",
    "accumulate_dct_",
    "basis",
    "chunk_size",
    "dct",
    "from_chunks",
    "grid",
    "inverse_dct",
    "mean_of_senders",
    "strongest",
    "to_chunks",
    "topk_bytes",
]
