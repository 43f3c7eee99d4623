"""Norms in whatever dtype their inputs have (float64: the truth), differentiated by autograd."""

from __future__ import annotations

from typing import Any

import torch


def norm_reference(
    tensors: dict[str, torch.Tensor],
    *,
    kind: str = "layer",
    eps: float = 1e-5,
    scale: float = 1.0,
    dropout_p: float = 0.0,
    zero_centered: bool = False,
    keeps: tuple[torch.Tensor, ...] = (),
    residual_dtype: torch.dtype | None = None,
    out_rows: int | None = None,
    **_: Any,
) -> dict[str, torch.Tensor]:
    """out, out1 (with weight1) and h of tensors named as `flashtile.kernels.ops.norm` names them.

    keeps: what dropout keeps of x and of x1, as booleans. residual_dtype: h is rounded to it.
    """
    t = tensors
    h = t["x"]
    if "x_subset" in t:
        index = t["x_subset"].long()
        h = torch.where((index > 0)[:, None], h[(index - 1).clamp(min=0)], 0.0)
    if "rowscale" in t:
        h = h * t["rowscale"][:, None]
    h = h * scale
    if keeps:
        h = torch.where(keeps[0], h / (1.0 - dropout_p), 0.0)
    if "colscale" in t:
        h = h * t["colscale"]
    if "x1" in t:
        h = h + (torch.where(keeps[1], t["x1"] / (1.0 - dropout_p), 0.0) if keeps else t["x1"])
    if "residual" in t:
        h = h + t["residual"]
    if residual_dtype is not None:
        h = h.to(residual_dtype)
    made = {"h": h}
    centred = h - h.mean(1, keepdim=True) if kind == "layer" else h
    normal = centred / (centred.square().mean(1, keepdim=True) + eps).sqrt()
    for tail in ("", "1"):
        if tail and "weight1" not in t:
            continue
        weight, bias = t.get(f"weight{tail}"), t.get(f"bias{tail}")
        out = normal if weight is None else normal * (weight + (1.0 if zero_centered else 0.0))
        if bias is not None:
            out = out + bias
        if "out_subset" in t:
            there = t["out_subset"] > 0
            place = out.new_zeros(out_rows or 0, out.shape[1])
            out = place.index_put((t["out_subset"][there].long() - 1,), out[there])
        made[f"out{tail}"] = out
    return made
