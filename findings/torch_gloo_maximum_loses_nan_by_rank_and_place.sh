#!/usr/bin/env bash
# PyTorch 2.13.0, gloo, CPU: of a maximum over ranks it depends on the rank and on the element's place whether a NaN is seen.
#
# torch.max, amax and maximum keep a NaN, whatever is beside it. all_reduce with ReduceOp.MAX or MIN does not. Four ranks, one of which has
# a tensor of NaN alone: some elements of the result are NaN, the others an ordinary number, which may be that of a rank that is not the
# largest. All ranks agree on it, so nobody notices. Sums keep every NaN. What stands on the maximum inherits this: DTensor.max() and the
# inf norm of a tensor whose rows are shared out, so that a search for NaN by these finds it on some ranks and not on others.
#
# Seen here: how many NaN of 64 are left, by the rank that had them; an amax by DTensor beside torch's. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def look(rank, ranks, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    left = {}
    for name in ("MAX", "MIN", "SUM"):
        for bad in range(ranks):
            x = torch.full((64,), float("nan") if rank == bad else float(rank))
            dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
            everyone = [torch.empty_like(x) for _ in range(ranks)]
            dist.all_gather(everyone, x)
            assert all(torch.equal(x.nan_to_num(-9.0), y.nan_to_num(-9.0)) for y in everyone)
            left[name, bad] = int(x.isnan().sum()), sorted(set(x[~x.isnan()].tolist()))
    mesh = init_device_mesh("cpu", (ranks,))
    amax = []
    for row in range(8):
        x = torch.arange(8.0)[:, None].repeat(1, 4)
        x[row, 1] = float("nan")
        shared = distribute_tensor(x, mesh, [Shard(0)])
        norm = torch.linalg.vector_norm(shared, ord=float("inf")).full_tensor().item()
        amax.append((x.max().item(), shared.max().full_tensor().item(), norm))
    dist.destroy_process_group()
    if rank:
        return
    for (name, bad), (nans, others) in left.items():
        print(f"torch {torch.__version__}, {name} over ranks 0 to 3, NaN at rank {bad}: {nans} of 64 are NaN, the others {others}")
    lost = [row for row, (whole, largest, norm) in enumerate(amax) if whole != whole and largest == largest and norm == norm]
    print(f"torch {torch.__version__}, 8 rows on 4 ranks, a NaN in one: DTensor.max() and the inf norm are numbers if it is in row {lost}")
    for name in ("MAX", "MIN"):
        found = [left[name, bad][0] for bad in range(ranks)]
        assert min(found) < 64 and max(found) > 0 and any(0 < nans < 64 for nans in found), found
    assert all(left["SUM", bad] == (64, []) for bad in range(ranks)), left
    assert 0 < len(lost) < 8, amax


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.multiprocessing.spawn(look, (4, sys.argv[1]), 4)
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore "$folder/look.py" "$folder" 2> >(grep -v -e Gloo -e Warning -e "warnings.warn" >&2)
