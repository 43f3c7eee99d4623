#!/usr/bin/env bash
# PyTorch 2.13.0: an operator made by torch.library.custom_op with register_autograd has derivative 0 in forward mode, without an error.
#
# torch.func.jvp and jacfwd of such an operator return zeros, and a dual number goes in with a tangent and comes out with none.
# Reverse mode is right, so is torch.autograd.functional.jvp, which runs two reverse passes, and torch.func.grad raises. A built-in
# operator without a forward formula raises as well ("not implemented for 'forward AD'"), so that one reads 0 as a derivative. There
# is no register_jvp: forward mode wants an autograd.Function with a `jvp`, or duals that are unpacked before the operator.
#
# Seen here: the derivative of x * x at 3, by each way. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import torch
from torch.autograd import forward_ad


@torch.library.custom_op("looked::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


square.register_autograd(
    lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def dual(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def refuses(f, *arguments):
    try:
        return f(*arguments)
    except (RuntimeError, NotImplementedError) as error:
        return type(error).__name__


x = torch.tensor([3.0], dtype=torch.float64)
leaf = x.clone().requires_grad_()
found = {
    "torch.autograd.grad": torch.autograd.grad(square(leaf), leaf)[0].item(),
    "torch.autograd.functional.jvp": torch.autograd.functional.jvp(square, x, torch.ones_like(x))[1].item(),
    "torch.func.jvp": torch.func.jvp(square, (x,), (torch.ones_like(x),))[1].item(),
    "torch.func.jacfwd": torch.func.jacfwd(square)(x).item(),
    "the tangent of forward_ad": dual(square, x),
    "torch.func.grad": refuses(torch.func.grad(lambda x: square(x).sum()), x),
}
q = torch.ones(1, 1, 4, 8)
with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
    builtin = refuses(dual, lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q), q)
for way, value in found.items():
    print(f"torch {torch.__version__}, the derivative of x * x at 3 by {way}: {value}")
print(f"a built-in operator without a forward formula: {builtin}")
assert list(found.values()) == [6.0, 6.0, 0.0, 0.0, None, "RuntimeError"], found
assert builtin == "NotImplementedError", builtin
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" "$folder/look.py"
