"""Backwards that are handed out and lse of more keys than they see, as a ring's are: the gradients that these imply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from flashtile import Options
from flashtile.compat import asked, flash_attn_3
from flashtile.compat import flash_attn_passes as passes
from flashtile.integrations import sdpa
from flashtile.torch.routes.eager import prepare
from tests.backends import OF_KERNELS, VARIANTS_HERE

KEYS = 40
DTYPES = [torch.float16, torch.bfloat16]
# Where the keys are cut. One key decides a row or two: the last part has little of what they take, and the first the rest.
CUTS = {"halves": (0, 20, 40), "single": (0, 39, 40), "uneven": (0, 3, 24, 40)}


@dataclass(frozen=True)
class Ring:
    """What a ring's last round knows, in float64 but for dtype; (seqlen, heads, head_dim), and lse (heads, seqlen)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def implied(self, part: slice) -> list[torch.Tensor]:
        """dq, dk, dv of a part of the keys: p = exp(score - lse), and delta of the rounded out."""
        q, k, v, dout, out = (t.double().transpose(0, 1) for t in (self.q, self.k[part], self.v[part], self.dout, self.out))
        p = (q @ k.mT * q.shape[2] ** -0.5 - self.lse[..., None]).exp()
        ds = p * (dout @ v.mT - (dout * out).sum(2, keepdim=True)) * q.shape[2] ** -0.5
        return [t.transpose(0, 1) for t in (ds @ k, ds.mT @ q, p.mT @ dout)]


def ring(dtype: torch.dtype, place: torch.device) -> Ring:
    q, dout, k, v = (torch.randn(n, 2, 16).to(place, dtype) for n in (30, 30, KEYS, KEYS))
    q[:2] *= 4.0
    s = torch.einsum("ihd,jhd->hij", q.double(), k.double()) / 4.0
    out = torch.einsum("hij,jhd->ihd", s.softmax(2), v.double()).to(dtype)
    return Ring(q, k, v, dout, out, s.logsumexp(2).float())


def by_passes(r: Ring, part: slice) -> list[torch.Tensor]:
    made = [torch.empty_like(t)[None] for t in (r.q, r.k[part], r.v[part])]
    given = [t[None].contiguous() for t in (r.dout, r.q, r.k[part], r.v[part], r.out, r.lse)]
    passes._flash_attn_backward(*given, *made, 0.0, None, False, -1, -1, 0.0, None, False)
    return [t[0] for t in made]


def by_passes_varlen(r: Ring, part: slice) -> list[torch.Tensor]:
    made = [torch.empty_like(t) for t in (r.q, r.k[part], r.v[part])]
    cu = [torch.tensor([0, len(t)], dtype=torch.int32, device=t.device) for t in (r.q, r.k[part])]
    given = (r.dout, r.q, r.k[part], r.v[part], r.out, r.lse)
    passes._flash_attn_varlen_backward(*given, *made, *cu, 30, KEYS, 0.0, None, False, -1, -1, 0.0, None, False)
    return made


def by_passes_3(r: Ring, part: slice) -> list[torch.Tensor]:
    dq, dk, dv = (torch.empty_like(t)[None] for t in (r.q, r.k[part], r.v[part]))
    given = [t[None].contiguous() for t in (r.dout, r.q, r.k[part], r.v[part], r.out, r.lse)]
    flash_attn_3._flash_attn_backward(*given, dq=dq, dk=dk, dv=dv)
    return [t[0] for t in (dq, dk, dv)]


def by_aten(r: Ring, part: slice) -> list[torch.Tensor]:
    """`_scaled_dot_product_flash_attention_backward`, as context parallelism calls it."""
    dout, q, k, v, out = (t.transpose(0, 1)[None] for t in (r.dout, r.q, r.k[part], r.v[part], r.out))
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    rest = None, None, 30, k.shape[2], 0.0, False, state, state
    return [t[0].transpose(0, 1) for t in sdpa._dense_backward(dout, q, k, v, out, r.lse[None], *rest)]


def by_aten_flash(r: Ring, part: slice) -> list[torch.Tensor]:
    """`_flash_attention_backward`."""
    given = [t[None] for t in (r.dout, r.q, r.k[part], r.v[part], r.out, r.lse)]
    state = torch.zeros(2, dtype=torch.uint64, device=r.q.device)
    return [t[0] for t in sdpa._flash_backward(*given, None, None, 30, KEYS, 0.0, False, state, state)]


Front = Callable[[Ring, slice], list[torch.Tensor]]
EVERYWHERE: tuple[Front, ...] = (by_passes, by_passes_varlen, by_passes_3)
ON_A_GPU: tuple[Front, ...] = (by_aten, by_aten_flash)  # aten has a CPU's attention as another op
FRONTS = [(backend, front) for backend in VARIANTS_HERE for front in EVERYWHERE]
FRONTS += [(backend, front) for backend in dict(OF_KERNELS) for front in ON_A_GPU]


def check(r: Ring, cuts: tuple[int, ...], front: Front) -> None:
    """To what sums of 16-bit products are off by: an error in delta would be 20 times as much."""
    unit = torch.finfo(r.q.dtype).eps
    for part in (slice(*ends) for ends in pairwise(cuts)):
        for got, true in zip(front(r, part), r.implied(part), strict=True):
            assert got.isfinite().all()
            assert (got.double() - true).abs().max() <= unit * max(1.0, true.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize(("backend", "front"), FRONTS, ids=lambda which: getattr(which, "__name__", which))
def test_a_part_of_the_keys_gets_its_share(
    backend: str, place: torch.device, monkeypatch: pytest.MonkeyPatch, front: Front, cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    ask = sdpa._ask
    monkeypatch.setattr(sdpa, "_ask", lambda *given, **how: ask(*given, **{**how, "options": Options(backend=backend)}))
    monkeypatch.setattr(asked, "DEFAULT", Options(backend=backend))
    check(ring(dtype, place), cuts, front)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize(("backend", "variant"), OF_KERNELS)
def test_each_backward_of_the_portable_kernels(
    backend: str, variant: Any, place: torch.device, cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Plans themselves: what `flashtile export` writes in C too."""

    def plan(r: Ring, part: slice) -> list[torch.Tensor]:
        q, k, v = (t[None].contiguous() for t in (r.q, r.k[part], r.v[part]))
        call, _ = prepare(q, k, v, return_lse=True, options=Options(backend=backend, backward=variant))
        found = call.gradients((q, k, v, r.out[None], r.lse[None]), r.dout[None], None, (True, True, True))
        return [t[0] for t in found if t is not None]

    check(ring(dtype, place), cuts, plan)
