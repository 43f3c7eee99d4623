#!/usr/bin/env bash
# PyTorch 2.13.0, CPU: run_decompositions() of an exported program takes out detach() and no_grad(), so gradients differ and values do not.
#
# The program that torch.export returns is one to train, and has the model's gradients. After ep.run_decompositions(), which makes of it the core
# operators that other tools read, each detach() is gone: x + (x.round() - x).detach(), a straight-through rounding as in quantised training and VQ-VAEs,
# has gradient 0 where the model's is 1, and a scale made under no_grad is differentiated. With an empty table of decompositions,
# run_decompositions({}), which decomposes nothing, detach() stays and no_grad() goes. A program that is saved, loaded and tuned on then learns something else.
#
# Seen here: values and gradients of the model, the program and both decompositions. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import torch


class Rounded(torch.nn.Module):
    def forward(self, x):
        return x + (x.round() - x).detach()


class Scaled(torch.nn.Module):
    def forward(self, x):
        with torch.no_grad():
            largest = x.abs().amax()
        return x * largest


x = torch.tensor([0.25, 1.5], requires_grad=True)
expected = {  # model: gradients of the model and the program, after run_decompositions(), after run_decompositions({})
    Rounded: ([1.0, 1.0], [0.0, 0.0], [1.0, 1.0]),
    Scaled: ([1.5, 1.5], [1.5, 3.25], [1.5, 3.25]),
}
for kind, (right, core, none) in expected.items():
    model = kind()
    program = torch.export.export(model, (x,))
    ways = {
        "the model": (model, right),
        "export": (program.module(), right),
        "run_decompositions()": (program.run_decompositions().module(), core),
        "run_decompositions({})": (program.run_decompositions({}).module(), none),
    }
    for name, (call, gradient) in ways.items():
        value = call(x)
        (found,) = torch.autograd.grad(value.sum(), x)
        print(f"torch {torch.__version__}, {kind.__name__}, {name}: values {value.tolist()}, gradient {found.tolist()}")
        assert torch.equal(value, model(x)) and found.tolist() == gradient, (name, found)
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore "$folder/look.py"
