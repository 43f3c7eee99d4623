#!/usr/bin/env bash
# PyTorch 2.13.0, CPU: LayerNorm's bias gradient of bfloat16 rows stops growing at 256 a thread, in a float32 bias too.
#
# The backward adds rows up in bfloat16, one partial sum a thread, and 256 + 1 is 256 there. So the gradient of a bias that 4,096
# rows of ones share is 256 with one thread and 512 with two, where 4096 is right and representable; in float16 it stops at 2048 a thread.
# A bias (and weight) in float32 beside bfloat16 input, which is what mixed precision keeps, gets the same sum. The neighbours in
# the same library add in float32: batch_norm, group_norm, a linear layer's bias and a broadcast sum give 4096.
#
# Seen here: these gradients. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import torch
import torch.nn.functional as F


def of_bias(f, dtype):
    bias = torch.zeros(8, dtype=dtype, requires_grad=True)
    f(bias).sum().backward()
    return bias.grad[0].item()


rows, found = 4096, {}
x = torch.randn(rows, 8, generator=torch.manual_seed(0))
for threads in (1, 2):
    torch.set_num_threads(threads)
    for dtype, of in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)):
        y, ones = x.to(dtype), torch.ones(8, dtype=of)
        kind = f"{str(dtype)[6:]} beside {str(of)[6:]}"
        found[kind, threads] = of_bias(lambda b: F.layer_norm(y, (8,), ones, b), of)
        print(f"torch {torch.__version__}, {threads} threads, layer_norm of {kind}: {found[kind, threads]:.0f} of {rows}")
y, ones = x.bfloat16(), torch.ones(8, dtype=torch.bfloat16)
others = dict(
    batch_norm=of_bias(lambda b: F.batch_norm(y, None, None, ones, b, True), torch.bfloat16),
    group_norm=of_bias(lambda b: F.group_norm(y.t()[None].contiguous(), 1, ones, b), torch.bfloat16),
    linear=of_bias(lambda b: F.linear(y, torch.eye(8, dtype=torch.bfloat16), b), torch.bfloat16),
    broadcast=of_bias(lambda b: y + b, torch.bfloat16),
)
print("bfloat16,", ", ".join(f"{name} {value:.0f}" for name, value in others.items()))
for (kind, threads), value in found.items():
    assert value == threads * (2048 if kind.startswith("float16") else 256), found
assert set(others.values()) == {rows}, others
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" "$folder/look.py"
