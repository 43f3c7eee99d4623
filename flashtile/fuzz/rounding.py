"""What rounding may do to gradients beside what plain PyTorch shows: that of lse where scores are as large as 10^6, and that of
sums which cancel.

A backward that forms p = exp(score - lse) of a float32 lse has one factor exp(x) as the error of a row's p. Between the largest
score and the exponent four roundings are made of numbers as large as lse (the largest score in units of the exponent, that by
ln 2, the sum with log(sum), lse times log2(e)), and both constants are rounded, by a quarter of that in all: |x| <= ROUNDINGS *
2^-24 * |lse|. Hopper's matrix units also start their sums from -lse: each of head_dim / 16 steps cuts off 2^-23 of its largest
term. The same factor is in ds, whose delta is of out, hence in all that gradients add up. Scores themselves are exact here
(make.py). Plain PyTorch keeps p, and has no such error.

dp is a sum over head_dim_v that a matrix unit forms, delta one that a thread and its neighbours do: a row that sees one key,
whose two are the same number, gets the difference of their roundings. Steps of a matrix unit cut off as above; a thread adds up
LOADED products, and log2(head_dim_v / LOADED) times a neighbour's sum, by a rounding of 2^-24 each. No partial sum is larger
than the sum of the products' magnitudes. Plain PyTorch forms delta of the very dp.
"""

from __future__ import annotations

from math import ceil, log2, prod

import torch

from flashtile.fuzz.case import Case
from flashtile.fuzz.formula import Scene, softmax
from flashtile.fuzz.make import Inputs
from flashtile.kernels.device.small import SMALL_FLOPS

ROUNDINGS = 4.3
STEP = 16  # terms of a product that Hopper's matrix units take at once
LOADED = 8  # elements of 16 bits in the widest load


def rounds_lse(case: Case, device: torch.device) -> bool:
    """Whether a case's backward knows one float32 of lse and no more: Hopper's, and the portable one of large 16-bit problems.

    Float32's grade has a row's maximum and sum; a walk over the keys finds what lse lacks in small problems, and for delta.
    """
    c = case
    return c.kind == "huge" and _knows_rows_alone(c, device)


def sums_twice(case: Case, device: torch.device) -> bool:
    """Whether a case's backward takes from dp a delta that it summed by itself, of out, and does not look at the difference."""
    return case.upstream != "lse" and _knows_rows_alone(case, device)


def _knows_rows_alone(c: Case, device: torch.device) -> bool:
    """Whether a case's backward has of a row what the forward and out say, and walks no keys to find what that is off by."""
    if (c.dtype == "fp32" and c.precision != "tf32") or c.upstream == "none":
        return False
    if c.backend == "hopper" or (not c.backend and device.type == "cuda"):
        return c.delta != "exact"
    flops = 2 * prod((1 if c.items else c.batch, c.heads_q, c.seqlen_q, c.seqlen_k, c.head_dim + c.head_dim_v))
    return c.backend == "triton" and c.delta != "exact" and flops > SMALL_FLOPS


def operands(inputs: Inputs, scene: Scene) -> tuple[torch.Tensor, ...]:
    """(q, k, v, dout, p before dropout, lse, what is left of each p) in float64, by item and query head; p of scores that no
    modifier changed."""
    c, s = inputs.case, scene
    hidden = {"q": ~s.sees[..., None], "k": ~s.seen[..., None], "v": ~s.seen[..., None], "dout": ~s.sees[..., None]}
    sides = {"q": s.queries, "k": s.keys, "v": s.keys, "dout": s.queries}
    given = {**{name: inputs.leaves[name] for name in "qkv"}, "dout": inputs.flows["dout"]}
    q, k, v, dout = (
        sides[name].take(tensor.double()).transpose(1, 2).repeat_interleave(c.heads_q // tensor.shape[-2], 1)
        .masked_fill(hidden[name], 0.0)
        for name, tensor in given.items()
    )  # fmt: skip
    scores = (q @ k.transpose(2, 3) * c.scale_value).masked_fill(~s.keep, -torch.inf)
    p, lse = softmax(scores.masked_fill(~s.sees[..., None], 0.0))
    p, lse = p.masked_fill(~s.keep, 0.0), lse.masked_fill(~s.sees, 0.0)
    return q, k, v, dout, p, lse, torch.ones_like(p) if s.undropped is None else s.undropped


def slack(inputs: Inputs, scene: Scene) -> dict[str, float]:
    """How far lse's rounding may put dq, dk and dv off, each in the element where it is most."""
    c, s = inputs.case, scene
    q, k, v, dout, p, lse, kept = operands(inputs, scene)
    dp = dout @ v.transpose(2, 3)
    if c.upstream == "lse":
        dp = torch.zeros_like(dp)
    dlse = torch.zeros_like(lse)
    if c.upstream in ("both", "lse"):
        flow = inputs.flows["dlse"].double()
        by_token = flow.transpose(0, 1) if c.items else flow.transpose(1, 2)
        dlse = s.queries.take(by_token[..., None])[..., 0].transpose(1, 2).masked_fill(~s.sees, 0.0)
    ds = p * (kept * dp - (p * kept * dp).sum(3, keepdim=True) + dlse[..., None])
    distance = lse.abs()[..., None]
    x = ROUNDINGS * 2.0**-24 * distance
    if c.backend != "triton":
        x = x + -(-c.head_dim // STEP) * 2.0**-23 * (q.abs() @ k.abs().transpose(2, 3) * abs(c.scale_value) + distance)
    factor = torch.expm1(x)
    dv = _of_group(c, (factor * p * kept).transpose(2, 3) @ dout.abs())
    return {**_of_scores(c, factor * ds.abs(), q, k), "dv": _most(dv) if c.upstream != "lse" else 0.0}


def apart(inputs: Inputs, scene: Scene) -> dict[str, float]:
    """How far dp and delta, each summed by itself, may put dq and dk off, likewise."""
    c = inputs.case
    q, k, v, dout, p, _, kept = operands(inputs, scene)
    sizes = kept * (dout.abs() @ v.abs().transpose(2, 3))
    steps, adds = ceil(c.head_dim_v / STEP), LOADED + ceil(log2(max(c.head_dim_v / LOADED, 1.0)))
    wrong = 2.0**-23 * steps * sizes + 2.0**-24 * adds * (p * sizes).sum(3, keepdim=True)
    return _of_scores(c, p * wrong, q, k)


def _of_scores(c: Case, wrong_ds: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> dict[str, float]:
    """What scores' gradients that are off by so much make of dq and dk."""
    wrong_ds = wrong_ds * abs(c.scale_value)
    return {"dq": _most(wrong_ds @ k.abs()), "dk": _most(_of_group(c, wrong_ds.transpose(2, 3) @ q.abs()))}


def _of_group(c: Case, sums: torch.Tensor) -> torch.Tensor:
    return sums.unflatten(1, (c.heads_kv, c.heads_q // c.heads_kv)).sum(2)


def _most(sums: torch.Tensor) -> float:
    return sums.amax().item() if sums.numel() else 0.0
