"""Runs Hopper's kernel over caches in the emulator and prints, as JSON, how far its results are from float64's.

python -m tests.hopper.emulated_cached '{"seed": 3, "stored": true, "full": false, "latent": false, "even": false}' ...

A seed draws a call, over a cache of 8 bits where it is to be `stored`, with `full` tables or longer ones, over one of `latent`
keys: pages, lengths, a window, heads. `even`: blocks have whole items where lengths are alike, which one is not of odd seeds.
Rows and pages that nobody may look at hold NaN, entries of the table that belong to none are rubbish, and so is scratch that
was not written. Parts are added up by PyTorch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from tests.hopper.emulated import error, poisoned, report

# isort: split
from flashtile.kernels.device.decoding import alike
from flashtile.kernels.sm90.cached import plan as plans
from flashtile.kernels.sm90.cached.plan import plan_cached
from flashtile.kernels.sm90.host.choose_cached import CachedLaunch, candidates, may_turn, refusals
from flashtile.plan.call import KernelCall, Plan
from flashtile.plan.device import H100
from flashtile.problem.cache import CachedProblem
from flashtile.reference.cached import cached_reference
from flashtile.torch.call.stored import bytes_of
from flashtile.torch.execute.bound import Bound
from tests.cached.boxes import Tensors, cleaned, draw, given

TILES = tuple(CachedLaunch(block_k, stages) for block_k in (64, 128) for stages in (2, 3))
STORED_TILES = tuple(
    CachedLaunch(block_k, stages, places=places)
    for block_k, stages, places in ((64, 3, 0), (64, 3, 2), (32, 2, 0), (32, 2, 1), (128, 2, 0), (128, 2, 2), (64, 2, 3))
)


TURNED = tuple(CachedLaunch(block_k, stages, turned=True) for block_k, stages in ((64, 4), (128, 2), (64, 3)))


def added(problem: CachedProblem, split: int, made: Tensors, tensors: Tensors) -> Tensors:
    """out and lse of parts of `split` keys: of those that hold a key that some query of an item may see, and of no others."""
    p = problem.attention
    outs, sums = list[torch.Tensor](), list[torch.Tensor]()
    keys = tensors["seqused_k"] - tensors.get("first_k", torch.zeros(1, dtype=torch.int32))
    for i, count in enumerate(keys.tolist()):
        for row in range(p.seqlen_q):
            position = count - p.seqlen_q + row
            lo = 0 if p.band.left is None else min(max(position - p.band.left, 0), count)
            hi = count if p.band.right is None else min(max(position + p.band.right + 1, 0), count)
            some = slice(lo // split, max(-(-hi // split), lo // split))
            acc, top, total = (made[name][some, i * p.seqlen_q + row].double() for name in ("acc", "top", "total"))
            top = top * math.log(2)
            if "sink" in tensors:
                acc = torch.cat([acc, acc.new_zeros(1, *acc.shape[1:])])
                top = torch.cat([top, tensors["sink"].double()[None]])
                total = torch.cat([total, total.new_ones(1, p.heads_q)])
            lse = (top + total.log()).logsumexp(0) if len(top) else torch.full((p.heads_q,), -torch.inf, dtype=torch.float64)
            weight = (top - lse.where(lse > -torch.inf, 0.0)).exp()
            outs.append((acc * weight[:, :, None]).sum(0))
            sums.append(lse)
    shape = (p.batch, p.seqlen_q, p.heads_q)
    return {"out": torch.stack(outs).view(*shape, -1), "lse": torch.stack(sums).view(shape).transpose(1, 2)}


def assess(case: Any) -> dict[str, Any]:
    """The errors of a case's results."""
    seed, stored, latent = case["seed"], case["stored"], case["latent"]
    problem, tensors = draw(seed, stored, case["full"], latent, case["even"])
    before = tensors.get("first_k", torch.zeros(1, dtype=torch.int32))
    if case["even"] and seed % 2:  # one item's length is not like the others'
        tensors["seqused_k"][0] = before[0] + (0, 300)[seed // 2 % 2]
    keys = tensors["seqused_k"] - before
    assert not refusals(problem), refusals(problem)
    inputs, how = given(problem, cleaned(problem, tensors))
    exact, lse = cached_reference(*inputs, **how)
    if latent and seed % 2:  # the columns behind the values in a tensor of their own
        columns = problem.attention.head_dim_v
        problem = replace(problem, apart=True)
        tensors |= {"k": tensors["k"][..., columns:].clone(), "v": tensors["v"].clone()}
    tiles = candidates(problem) if latent else STORED_TILES if stored else TILES
    if may_turn(problem) and not latent:
        tiles = TURNED if case["even"] else (*TURNED, *tiles)
    launch = tiles[seed % len(tiles)]
    every, device = plans.group_of, replace(H100, sm_count=1 if case["even"] else (1, 30)[seed // 4 % 2])
    single = seed % 2 and not case["even"]  # borders that short windows cross
    with patch.object(plans, "group_of", lambda split: 1 if single else every(split)):
        plan = plan_cached(problem, device, "hopper", launch)
    buffers = tuple(replace(b, role="output") if b.role == "scratch" else b for b in plan.buffers)
    plan = Plan(problem, plan.backend, "", buffers, plan.calls[:1])
    inputs = {b.name: bytes_of(tensors[b.name]) for b in plan.named("input")}
    with patch.object(torch, "empty_strided", poisoned):
        made = Bound(plan, inputs, torch.device("cpu")).run(inputs)
    assert isinstance(plan.calls[0], KernelCall)
    (tile,) = (value for name, value in plan.calls[0].constants if name == "T")
    assert tile.whole or not case["even"], tile
    written = tile.direct or (tile.whole and bool(alike(keys.min(), keys.max())))
    if tile.split and not written:
        made = added(problem, tile.split * (tile.parts if tile.folds else 1), made, tensors)
    return {name: error(made[name], true) for name, true in (("out", exact), ("lse", lse))}


if __name__ == "__main__":
    report(assess)
