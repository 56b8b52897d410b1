"""Training data: datasets, batches, text, and which node holds which examples."""

from vecgym.data.batches import Batches, EvalBatches, Examples, Factory, num_steps
from vecgym.data.partition import (
    Partition,
    flip_labels,
    partition_dirichlet,
    partition_iid,
    partition_quantity_skew,
    partition_shards,
)
from vecgym.data.source import Batch
from vecgym.data.text import TokenWindows, decode_text, encode_text

__all__ = [
    "Batch", "Batches", "EvalBatches", "Examples", "Factory", "Partition", "TokenWindows", "decode_text", "encode_text",
    "flip_labels", "num_steps", "partition_dirichlet", "partition_iid", "partition_quantity_skew", "partition_shards",
]  # fmt: skip
