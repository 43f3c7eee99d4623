"""Gradients of 16-bit keys and values in float32: what is rounded otherwise, of every backend that runs here."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile import Band, Options
from flashtile.torch.routes.local import prepared
from tests.backends import VARIANTS_HERE

BAND, TAIL = Band(right=0), {"mask": Band(9, 0), "sink": torch.tensor([0.5, -1.0])}
ITEMS = {"cu_seqlens_q": torch.tensor([0, 7, 40]), "cu_seqlens_k": torch.tensor([0, 19, 40]), "mask": Band(right=0)}
CASES = {"causal": {"mask": BAND}, "window and sink": TAIL, "items": ITEMS, "lse": {"mask": BAND, "return_lse": True}}
WAYS = [(name, variant) for name, variants in VARIANTS_HERE.items() for variant in variants]


@pytest.mark.parametrize(("backend", "variant"), WAYS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_them_gives_the_others(backend: str, variant: str, case: str, dtype: torch.dtype) -> None:
    place = torch.device("cuda" if torch.cuda.is_available() and backend != "cpu" else "cpu")
    torch.manual_seed(0)
    given = [torch.randn(1, 40, heads, 16).to(place, dtype) for heads in (2, 1, 1)]
    told = {name: t.to(place) if isinstance(t, torch.Tensor) else t for name, t in CASES[case].items()}
    options = Options(backend=backend, backward=variant)  # pyright: ignore[reportArgumentType]
    call, others = prepared(*given, **told, options=options)
    kept = call.forward(tuple(given), others)
    dout = torch.randn(kept[0].shape).to(place, dtype)
    dlse = torch.randn(kept[1].shape).to(place) if "return_lse" in told else None
    needs = (True,) * 3 + (False,) * len(others)
    saved = (*given, *others, *kept)
    (dq, *wide), (dq_of_narrow, *narrow) = (call.gradients(saved, dout, dlse, needs, wide_keys=w) for w in (True, False))
    assert dq is not None
    assert dq_of_narrow is not None
    assert dq.dtype is dtype
    assert variant == "fused" or torch.equal(dq, dq_of_narrow)  # whose shares are added in any order
    for made, rounded in zip(wide[:2], narrow[:2], strict=True):
        assert made is not None
        assert rounded is not None
        assert made.dtype is torch.float32
        assert torch.equal(made.to(dtype), rounded)
        assert not torch.equal(made, made.to(dtype).float())
    flashtile.cache_clear()
