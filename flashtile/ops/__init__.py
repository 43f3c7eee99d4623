"""The ops around attention, in PyTorch: each forward and backward, on a GPU by Triton kernels, on a CPU by plain torch."""

from flashtile.ops.head import linear_cross_entropy
from flashtile.ops.loss import cross_entropy
from flashtile.ops.norm import Branch, Dropout, Subset, layer_norm, rms_norm
from flashtile.ops.position import rotary
from flashtile.ops.scores import softmax

__all__ = [
    "Branch",
    "Dropout",
    "Subset",
    "cross_entropy",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "rotary",
    "softmax",
]
