#!/usr/bin/env bash
# PyTorch 2.13.0, gloo, CPU: the gradient of mse_loss over a DTensor is as many times too large as there are ranks that share its rows.
#
# A DTensor is to compute what one device would. With rows shared out evenly the loss itself is right, so a curve of losses looks as ever;
# the gradient is 2 times too large on 2 ranks and 4 times on 4, as each rank divides by its own rows. It is so of every loss that is one
# operator with a backward of its own: mse_loss, smooth_l1_loss, huber_loss, binary_cross_entropy, soft_margin_loss. l1_loss,
# binary_cross_entropy_with_logits, reduction="sum" and (x - y).square().mean() have the right gradient. Adam hides such a factor,
# clipping and SGD do not. Where rows do not divide by the ranks (5 rows on 4) these losses are wrong, too, or NaN; means are right.
#
# Seen here: gradients on 2 and 4 ranks over those of plain tensors, losses beside plain ones. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

right = {
    "square().mean()": lambda x, y: (x - y).square().mean(),
    "mse_loss, summed": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "l1_loss": F.l1_loss,
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y + 1),
}
wrong = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x / 10, y + 1),
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y + 1),
}


def value_and_gradient(loss, x):
    x = x.detach().requires_grad_()
    value = loss(x, torch.zeros_like(x))
    value.backward()
    return tuple(t.full_tensor() if hasattr(t, "full_tensor") else t for t in (value.detach(), x.grad))


def look(rank, ranks, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{ranks}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    even, uneven = torch.tensor([1.0] * (2 * ranks - 1) + [9.0])[:, None], torch.tensor([1.0] * ranks + [9.0])[:, None]
    found = []
    for name, loss in {**right, **wrong}.items():
        (value, slope), (other, steep) = value_and_gradient(loss, even), value_and_gradient(loss, distribute_tensor(even, mesh, [Shard(0)]))
        values = value_and_gradient(loss, uneven)[0], value_and_gradient(loss, distribute_tensor(uneven, mesh, [Shard(0)]))[0]
        found.append((name, torch.allclose(value, other), (steep / slope).flatten(), *(v.item() for v in values)))
    dist.destroy_process_group()
    for name, same, factors, value, other in found:
        if rank == 0:
            said = f"torch {torch.__version__}, {2 * ranks} rows on {ranks} ranks, {name}: loss {'right' if same else 'wrong'}"
            print(f"{said}, gradient {factors.mean():.3g} times the right one; {ranks + 1} rows: {other:.3g}, alone {value:.3g}")
        assert same and torch.allclose(factors, torch.tensor(1.0 if name in right else float(ranks))), (name, factors)
        assert name in right or not abs(other - value) < 0.01 * value, (name, value, other)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    for ranks in (2, 4):
        torch.multiprocessing.spawn(look, (ranks, sys.argv[1]), ranks)
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore "$folder/look.py" "$folder" 2> >(grep -v -e Gloo -e Warning -e "warnings.warn" -e alltoall >&2)
