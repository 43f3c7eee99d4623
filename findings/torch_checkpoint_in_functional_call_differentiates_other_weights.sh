#!/usr/bin/env bash
# PyTorch 2.13.0, CPU: in a model that checkpoints, gradients through torch.func.functional_call are made with other weights than the loss.
#
# functional_call(model, weights, x) runs a model with weights that are given: inner steps of MAML, hypernetworks, ensembles. When the
# forward has ended, it puts the model's own weights back. checkpoint(use_reentrant=False), which is what gradient_checkpointing_enable()
# of transformers uses, runs its part again in backward(), and finds the model's own there. Shapes agree, so that nothing is raised:
# the loss is right, and its gradients are a mixture of both weights. While both are equal, as in a first step or a test, all is right.
# checkpoint's documentation warns of functions that read global variables; here the caller wrote none. torch.compile is right.
# Right is a checkpoint around functional_call, which is handed the weights as its arguments.
#
# Seen here: gradients of equal and other weights, by each way, beside those without a checkpoint. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint


class Model(torch.nn.Sequential):
    checkpoints = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False) if self.checkpoints else super().forward(x)


def plain(weights):
    loss = functional_call(model, weights, (x,)).square().mean()
    return loss, torch.autograd.grad(loss, list(weights.values()))


def outside(weights):
    model.checkpoints = False
    loss = checkpoint(lambda w: functional_call(model, w, (x,)), weights, use_reentrant=False).square().mean()
    return loss, torch.autograd.grad(loss, list(weights.values()))


torch.manual_seed(0)
model, x = Model(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)), torch.randn(32, 8)
ways = {"functional_call": plain, "compiled": torch.compile(plain, backend="aot_eager"), "checkpoint around functional_call": outside}
for factor in (1.0, 0.5, 2.0):
    weights = {name: (w.detach() * factor).requires_grad_() for name, w in model.named_parameters()}
    model.checkpoints = False
    right, exact = plain(weights)
    exact = torch.cat([g.flatten() for g in exact])
    for name, way in ways.items():
        model.checkpoints = True
        loss, found = way(weights)
        found = torch.cat([g.flatten() for g in found])
        off = ((found - exact).norm() / exact.norm()).item()
        said = f"loss {loss.item():.4f} of {right.item():.4f}, gradient off by {off:.0%} of its norm"
        print(f"torch {torch.__version__}, weights {factor} times the model's, checkpointed, {name}: {said}")
        assert torch.equal(loss, right)
        assert off > 0.1 if way is plain and factor != 1 else off < 1e-5
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore "$folder/look.py"
