"""The ops a model is made of; the only importer of the kernels package's ops."""

from jtrain_kernels.attention.api import attention
from jtrain_kernels.embedding_lookup.api import embedding_lookup
from jtrain_kernels.grouped_matmul.api import grouped_matmul
from jtrain_kernels.linear.api import linear
from jtrain_kernels.linear_cross_entropy.api import linear_cross_entropy
from jtrain_kernels.linear_cross_entropy.parts import NO_COLUMN, linear_cross_entropy_in_parts
from jtrain_kernels.rms_norm.api import rms_norm
from jtrain_kernels.rope.api import rope
from jtrain_kernels.swiglu.api import swiglu

__all__ = [
    "NO_COLUMN",
    "attention",
    "embedding_lookup",
    "grouped_matmul",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_in_parts",
    "rms_norm",
    "rope",
    "swiglu",
]
