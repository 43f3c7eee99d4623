"""The ops around attention, in PyTorch: each forward and backward, on a GPU by Triton kernels, on a CPU by plain torch."""

from flashtile.ops.cross_entropy import cross_entropy
from flashtile.ops.norm import Branch, Dropout, Subset, layer_norm, rms_norm
from flashtile.ops.rotary import rotary
from flashtile.ops.softmax import softmax

__all__ = ["Branch", "Dropout", "Subset", "cross_entropy", "layer_norm", "rms_norm", "rotary", "softmax"]
