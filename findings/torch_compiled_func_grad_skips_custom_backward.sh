#!/usr/bin/env bash
# PyTorch 2.13.0, CPU: within torch.compile, torch.func's derivatives skip an autograd.Function's own backward and jvp, without an error.
#
# Dynamo looks into the Function's forward and differentiates what it finds there. So a straight-through estimator, whose backward
# hands the gradient on, has gradient 0 where torch.func.grad is compiled and 1 where it is not; backend "eager" does it too, and
# fullgraph=True is content. A Function that wraps a kernel, clips gradients or reverses them loses that. loss.backward() of a
# compiled forward, and torch.autograd.grad within a compiled function, keep the backward, so that most tests stay green.
#
# Seen here: the gradient of round() with an identity for a backward, by each way. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import torch


class Round(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad

    @staticmethod
    def jvp(ctx, tangent):
        return tangent.clone()


def backward(f, x):
    leaf = x.clone().requires_grad_()
    f(leaf).sum().backward()
    return leaf.grad


x = torch.tensor([0.4, 1.2])
ways = {
    "torch.func.grad": lambda x: torch.func.grad(lambda y: Round.apply(y).sum())(x),
    "torch.func.vjp": lambda x: torch.func.vjp(lambda y: Round.apply(y), x)[1](torch.ones(2))[0],
    "torch.func.jvp": lambda x: torch.func.jvp(lambda y: Round.apply(y), (x,), (torch.ones(2),))[1],
    "torch.func.jacrev": lambda x: torch.func.jacrev(lambda y: Round.apply(y))(x).diagonal(),
}
found = {}
for name, way in ways.items():
    found[name] = way(x).tolist(), torch.compile(way, backend="eager", fullgraph=True)(x).tolist()
found["backward()"] = backward(Round.apply, x).tolist(), backward(torch.compile(lambda x: Round.apply(x), backend="eager"), x).tolist()
for name, (eager, compiled) in found.items():
    print(f"torch {torch.__version__}, {name}: {eager} eager, {compiled} compiled")
assert found.pop("backward()") == ([1.0, 1.0], [1.0, 1.0])
assert all(pair == ([1.0, 1.0], [0.0, 0.0]) for pair in found.values()), found
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore "$folder/look.py"
