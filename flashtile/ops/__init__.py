"""The ops around attention, in PyTorch: each forward and backward, on a GPU by Triton kernels, on a CPU by plain torch.

torch.func's grad, vjp and vmap of them, and each of the other, are as autograd and as a loop. Tangents of forward-mode
differentiation pass through plain torch where no gradient is wanted, but linear_cross_entropy's; everywhere else, and within
torch.func's transforms, NotSupported is raised, as for second derivatives.
"""

from flashtile.ops.dense import linear_act, mlp
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
    "linear_act",
    "linear_cross_entropy",
    "mlp",
    "rms_norm",
    "rotary",
    "softmax",
]
