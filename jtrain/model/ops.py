"""The ops a model is made of; the only importer of the kernels package's ops."""

from jtrain_kernels.attention.api import attention
from jtrain_kernels.attention.context import WHOLE_ROWS, RowSplit, context_attention
from jtrain_kernels.embedding_lookup.api import embedding_lookup
from jtrain_kernels.linear.api import linear
from jtrain_kernels.linear_cross_entropy.api import linear_cross_entropy, vocab_parallel_linear_cross_entropy
from jtrain_kernels.linear_cross_entropy.chunking import best_chunk
from jtrain_kernels.linear_cross_entropy.parts import NO_COLUMN, linear_cross_entropy_in_parts
from jtrain_kernels.overlap.api import all_gather_matmul, matmul_reduce_scatter
from jtrain_kernels.rms_norm.api import rms_norm, rms_norm_branch
from jtrain_kernels.rope.api import rope
from jtrain_kernels.swiglu.api import swiglu

__all__ = [
    "NO_COLUMN",
    "WHOLE_ROWS",
    "RowSplit",
    "all_gather_matmul",
    "attention",
    "best_chunk",
    "context_attention",
    "embedding_lookup",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_in_parts",
    "matmul_reduce_scatter",
    "rms_norm",
    "rms_norm_branch",
    "rope",
    "swiglu",
    "vocab_parallel_linear_cross_entropy",
]
