"""Cases of `varlen.py`: NaN and Inf wherever nothing is visible, and results that must not change by a bit."""

from __future__ import annotations

import math
from typing import Any

import torch

import flashtile
from flashtile import Document, KeyPadding, Options

DEVICE = torch.device("cuda", 0)
KINDS = ("varlen", "varlen-causal", "varlen-used-softcap", "padded-causal", "padded-keys", "holes", "documents")


def tokens(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def lognormal_lengths(count: int = 64, mean: float = 1024.0, most: int = 16384, seed: int = 0) -> list[int]:
    """Lengths whose logarithm is normal with standard deviation 1, scaled to the mean and cut at the most."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.exp(torch.randn(count, generator=generator, dtype=torch.float64))
    return [max(1, min(most, round(n))) for n in (raw / raw.mean() * mean).tolist()]


def one_poisoned(kind: str, seed: int, backend: str | None) -> bool:
    """Whether the results of a poisoned case differ in any bit from those of the clean one."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    value = (math.nan, math.inf, -math.inf)[seed % 3]
    options = Options(backend=backend, deterministic=True)
    how: dict[str, Any] = {"options": options, "return_lse": True}
    if kind.startswith("varlen"):
        lengths = (torch.rand(6, generator=draw) ** 3 * 500).long().tolist()
        total, rows = sum(lengths) + 70, torch.zeros(sum(lengths) + 70, dtype=torch.bool)
        rows[: sum(lengths)] = True
        how.update(cu_seqlens_q=starts(lengths), causal="causal" in kind)
        if "used" in kind:
            used = [int(n * torch.rand(1, generator=draw).item()) for n in lengths]
            how.update(seqused_k=torch.tensor(used, device=DEVICE, dtype=torch.int32), score=(flashtile.Softcap(20.0),))
            keys = torch.zeros_like(rows)
            for first, count in zip(starts(lengths).tolist(), used, strict=False):
                keys[first : first + count] = True
        else:
            keys = rows
        shape_q, shape_k, function = (total, 4, 64), (total, 2, 64), flashtile.attention_varlen
    else:
        batch, seqlen = 3, 200 + int(torch.randint(0, 200, (1,), generator=draw))
        rows, keys = torch.ones(batch, seqlen, dtype=torch.bool), torch.ones(batch, seqlen, dtype=torch.bool)
        used = torch.randint(0, seqlen + 1, (batch,), generator=draw)
        inside = torch.arange(seqlen) < used[:, None]
        if kind == "padded-causal":
            rows = keys = inside
            how.update(seqused_q=used.to(DEVICE, torch.int32), seqused_k=used.to(DEVICE, torch.int32), causal=True)
        elif kind == "padded-keys":
            keys = inside
            how["seqused_k"] = used.to(DEVICE, torch.int32)
        elif kind == "holes":
            keys = torch.rand(batch, seqlen, generator=draw) < 0.5
            how["mask"] = KeyPadding(keys.to(DEVICE))
        else:  # keys of a document that no query has
            ids = torch.randint(0, 5, (batch, seqlen), generator=draw).to(torch.int32)
            keys = ids < 3
            how["mask"] = Document((ids % 3).to(DEVICE), ids.to(DEVICE))
        shape_q, shape_k, function = (batch, seqlen, 4, 64), (batch, seqlen, 2, 64), flashtile.attention
    rows, keys = rows.to(DEVICE), keys.to(DEVICE)
    q, k, v, dout = tokens(*shape_q), tokens(*shape_k), tokens(*shape_k), tokens(*shape_q)
    results: list[list[torch.Tensor]] = []
    for dirty in (False, True):
        leaves = [t.clone() for t in (q, k, v)]
        arriving = dout.clone()
        if dirty:
            leaves[0][~rows] = value
            leaves[1][~keys] = value
            leaves[2][~keys] = value
            arriving[~rows] = value
        leaves = [t.requires_grad_() for t in leaves]
        out, lse = function(*leaves, **how)
        results.append([out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, arriving)])
    return not all(torch.equal(a, b) for a, b in zip(*results, strict=True))
