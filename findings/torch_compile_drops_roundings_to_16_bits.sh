#!/usr/bin/env bash
# PyTorch 2.13.0, CPU: torch.compile leaves out x.bfloat16().float() and x.half().float(), but not the round trip through 8 bits.
#
# Whoever writes a round trip wants the rounding: the high part of a number that is split into bf16 parts (three products of which
# make a float32 one), simulated quantisation, a scale that must be representable. Inductor fuses both casts away. The low part
# x - x.bfloat16().float() becomes exactly 0, so a split product has bf16's error, and 1e5 in half is 1e5 instead of infinity. The same
# through float8_e4m3fn is kept. torch._inductor.config.emulate_precision_casts=True gives the roundings back; the default is False.
#
# Seen here: low parts and an overflow, eager, compiled, and compiled with that option. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import torch
import torch._inductor.config as config


def low(dtype):
    return lambda x: x - x.to(dtype).float()


x = torch.randn(64, generator=torch.manual_seed(0))
large = torch.full((16,), 1e5)
dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
found = {}
for name, dtype in dtypes.items():
    found[name] = [low(dtype)(x).abs().max().item(), torch.compile(low(dtype))(x).abs().max().item()]
overflow = [large.half().float()[0].item(), torch.compile(lambda x: x.half().float())(large)[0].item()]
with config.patch(emulate_precision_casts=True):
    for name, dtype in dtypes.items():
        torch._dynamo.reset()
        found[name].append(torch.compile(low(dtype))(x).abs().max().item())
for name, values in found.items():
    said = ", ".join(f"{value:.2e} {how}" for value, how in zip(values, ("eager", "compiled", "with emulate_precision_casts")))
    print(f"torch {torch.__version__}, largest x - x.{name}: {said}")
print(f"torch {torch.__version__}, 1e5 in half: {overflow[0]} eager, {overflow[1]} compiled")
for name, (eager, compiled, emulated) in found.items():
    assert eager == emulated > 0 and compiled == (eager if name.startswith("float8") else 0.0), found
assert overflow == [float("inf"), 1e5], overflow
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore "$folder/look.py"
