"""The norms in plain PyTorch, for the CPU."""

from __future__ import annotations

import torch

from flashtile.errors import InvalidProblem
from flashtile.kernels.ops.host import DTYPES, keep_elements
from flashtile.kernels.ops.norm_problem import Norm

Tensors = dict[str, torch.Tensor]


def _keeps(p: Norm, t: Tensors, branch: int) -> torch.Tensor:
    """What x (branch 0) or x1 (1) is multiplied by: 0 or 1 / (1 - dropout_p)."""
    kept = keep_elements(t["seed"], p.rows, p.hidden, p.dropout_p, branch)
    return kept.float() / (1.0 - p.dropout_p) if p.dropout_p < 1.0 else kept.float()


def _factors(p: Norm, t: Tensors) -> torch.Tensor | None:
    """What multiplies x before colscale; None where nothing does."""
    factor = None
    if p.has("rowscale"):
        factor = t["rowscale"].float()[:, None]
    if p.scale != 1.0:
        factor = t["x"].new_full((1, 1), p.scale, dtype=torch.float32) if factor is None else factor * p.scale
    if p.drops:
        factor = _keeps(p, t, 0) if factor is None else _keeps(p, t, 0) * factor
    return factor


def _take(source: torch.Tensor, subset: torch.Tensor) -> torch.Tensor:
    """Rows of a source by 1-based indices; 0 where there is none."""
    index = subset.long()
    taken = source[(index - 1).clamp(min=0)] if len(source) else source.new_zeros(len(index), source.shape[1])
    return torch.where((index > 0)[:, None], taken, 0.0)


def _check_rows(name: str, index: torch.Tensor | None, rows: int | None) -> None:
    """Raise InvalidProblem for indices without meaning; asked on the CPU alone, where looking costs nothing."""
    named = [] if index is None else [i for i in index.tolist() if i]
    wrong = next((i for i in named if not 0 < i <= (rows or 0)), None)
    if wrong is not None:
        raise InvalidProblem(f"{name} has the index {wrong}; it must be from 0 to {rows}.")
    if len(set(named)) < len(named):
        twice = next(i for i in named if named.count(i) > 1)
        raise InvalidProblem(f"{name} has the index {twice} twice; it must have none but 0 more than once.")


def _put(target: torch.Tensor, subset: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    there = subset > 0
    target[subset[there].long() - 1] = rows[there].to(target.dtype)
    return target


def forward(p: Norm, t: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """The outputs that are asked for."""
    _check_rows("subset.x", t.get("x_subset"), p["x"].shape[0])
    _check_rows("subset.out", t.get("out_subset"), p.out_rows)
    h = t["x"].float()
    if p.has("x_subset"):
        h = _take(h, t["x_subset"])
    factor = _factors(p, t)
    if factor is not None:
        h = h * factor
    if p.has("colscale"):
        h = h * t["colscale"].float()
    if p.has("x1"):
        x1 = t["x1"].float()
        h = h + (x1 * _keeps(p, t, 1) if p.drops else x1)
    if p.has("residual"):
        h = h + t["residual"].float()
    made: Tensors = {}
    if p.mixes:
        made["h"] = h.to(DTYPES[p.stored], copy=h is t["x"])
        h = made["h"].float()
    if p.kind == "layer":
        made["mean"] = h.mean(1)
        h = h - made["mean"][:, None]
    made["rstd"] = (h.square().mean(1) + p.eps).rsqrt()
    h = h * made["rstd"][:, None]
    for tail in ("", "1") if p.has("weight1") else ("",):
        out = h
        if p.has(f"weight{tail}"):
            out = out * (t[f"weight{tail}"].float() + p.zero_centered)
        if p.has(f"bias{tail}"):
            out = out + t[f"bias{tail}"].float()
        if p.has("out_subset"):
            out = _put(out.new_zeros(p.outputs()["out"].shape), t["out_subset"], out)
        made[f"out{tail}"] = out
    return {name: made[name] for name in outputs}


def backward(p: Norm, t: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """The gradients that are asked for, each with memory of its own: compilers write over what nobody reads again."""
    h = (t["h"] if p.mixes else t["x"]).float()
    if p.kind == "layer":
        h = h - t["mean"][:, None]
    h = h * t["rstd"][:, None]
    made: Tensors = {}
    grad = torch.zeros_like(h)
    for tail in ("", "1"):
        if f"dout{tail}" not in t:
            continue
        dout = t[f"dout{tail}"].float()
        if p.has("out_subset"):
            dout = _take(dout, t["out_subset"])
        made[f"dweight{tail}"], made[f"dbias{tail}"] = (dout * h).sum(0), dout.sum(0)
        weight = t.get(f"weight{tail}")
        grad = grad + (dout if weight is None else dout * (weight.float() + p.zero_centered))
    dh = grad - h * (grad * h).mean(1, keepdim=True)
    if p.kind == "layer":
        for _ in range(2):  # the second takes what the first one's rounding left of equal gradients
            dh -= dh.mean(1, keepdim=True)
    dh = dh * t["rstd"][:, None]
    if "dh" in t:
        dh = dh + t["dh"].float()
    made["dresidual"] = dh
    if "dx1" in outputs:
        made["dx1"] = dh * _keeps(p, t, 1) if p.drops else dh.clone()
    factor = _factors(p, t)
    dx = dh if factor is None else dh * factor
    if "dcolscale" in outputs:
        x = t["x"].float()
        made["dcolscale"] = (dx * (_take(x, t["x_subset"]) if p.has("x_subset") else x)).sum(0)
    if p.has("colscale"):
        dx = dx * t["colscale"].float()
    made["dx"] = _put(dx.new_zeros(p["x"].shape), t["x_subset"], dx) if p.has("x_subset") else dx
    return {name: made[name] if name in made else dx.new_zeros(p[name[1:]].shape) for name in outputs}
