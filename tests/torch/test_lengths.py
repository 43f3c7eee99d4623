"""Batches whose items differ in length: schedules, padding that holds anything, items by themselves, bad input."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashtile
from flashtile import InvalidProblem, Stored
from flashtile.kernels.device.varlen import most_tiles, schedule_tiles
from flashtile.problem.options import Variant
from flashtile.reference.attention import items
from tests.cases import Case, Tensors
from tests.judge import run, run_clean
from tests.torch.test_nan import VALUES, assert_same

UNEVEN = Case(
    "poisoned", seqlen_q=75, seqlen_k=90, heads_q=2, head_dim=5, head_dim_v=8, cu_q=(0, 33, 33, 70), cu_k=(0, 20, 37, 81)
)
PADDED = Case("poisoned-padding", batch=2, seqlen_q=36, seqlen_k=40, used_q=(36, 7), used_k=(33, 0), head_dim=8)
POISONED = (
    UNEVEN,
    replace(UNEVEN, causal=True, dtype="fp16"),
    replace(UNEVEN, used_q=(20, 0, 37), used_k=(20, 17, 3), window=(30, 0)),
    replace(UNEVEN, used_k=(1, 17, 40), score=("alibi-per-batch", "softcap"), heads_kv=2, dtype="bf16"),
    PADDED,
    replace(PADDED, used_k=None, causal=True, dtype="fp16"),
    replace(PADDED, used_q=None, score=("softcap",), causal=True),
    replace(PADDED, name="poisoned-holes", holes=True, causal=True),
)


CPU = flashtile.Options(backend="cpu")
KEEP = torch.tensor([[True, False, True, True, False, False, True, True], [False] * 7 + [True]])


def outside(case: Case, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows and which keys belong to no item or do not count: boolean like q's and k's first axes, or two."""
    varlen = case.cu_q is not None
    q, k = (tensors[name][None] if varlen else tensors[name] for name in "qk")
    masks = [torch.ones(t.shape[:2], dtype=torch.bool, device=t.device) for t in (q, k)]
    for places in items(q, k, case.lengths(q.device)):
        for mask, place in zip(masks, places, strict=True):
            mask[place] = False
    rows, keys = (mask[0] if varlen else mask for mask in masks)
    return rows, keys


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("case", POISONED, ids=range(len(POISONED)))
def test_padding_may_hold_anything(backend: str, place: torch.device, variant: Variant, case: Case, value: float) -> None:
    case = replace(case, backward=variant)
    clean = case.tensors(place)
    rows, keys = outside(case, clean)
    dirty = {name: t.clone() for name, t in clean.items()}
    for name in ("q", "dout"):
        dirty[name][rows] = value
    dirty["dlse"].transpose(-1, -2)[rows] = value
    for name in ("k", "v"):
        dirty[name][keys] = value
    got = run(backend, case, dirty)
    assert_same(case, got, run_clean(backend, case, place))
    assert (got["out"][rows] == 0).all()
    assert (got["lse"].transpose(-1, -2)[rows] == -math.inf).all()
    assert (got["dq"][rows] == 0).all()
    assert (got["dk"][keys] == 0).all()
    assert (got["dv"][keys] == 0).all()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_padded_queries_beside_a_key_that_is_not_finite(
    backend: str, place: torch.device, variant: Variant, value: float
) -> None:
    """A visible NaN goes where it is seen: not into padding of the same tile."""
    case = replace(PADDED, used_q=(20, 7), used_k=(33, 3), backward=variant)
    tensors = case.tensors(place)
    tensors["k"][0, 2], tensors["v"][0, 2] = value, value
    got = run(backend, case, tensors)
    assert (got["out"][0, 20:] == 0).all()
    assert (got["dq"][0, 20:] == 0).all()
    assert (got["dk"][0, 33:] == 0).all()
    assert got["dv"][1].isfinite().all()


def test_an_item_is_computed_as_by_itself(backend: str, place: torch.device, variant: Variant) -> None:
    """Whatever stands beside it; bitwise, but where a GPU adds dq in any order or chooses other products."""
    cu = (0, 17, 17, 60, 64)
    case = Case("items", seqlen_q=64, seqlen_k=64, cu_q=cu, causal=True, heads_q=4, heads_kv=2, dtype="fp16", backward=variant)
    tensors = case.tensors(place)
    whole = run(backend, case, tensors)
    for first, end in ((0, 17), (17, 60), (60, 64)):
        alone = replace(case, cu_q=None, seqlen_q=end - first, seqlen_k=end - first)
        mine = {name: (t[..., first:end] if name == "dlse" else t[first:end])[None] for name, t in tensors.items()}
        for name, tensor in run(backend, alone, mine).items():
            part = whole[name][..., first:end] if name == "lse" else whole[name][first:end]
            exact = backend == "triton" and not (name == "dq" and variant == "fused" and tensor.is_cuda)
            tolerance = 0.0 if exact else 4e-3
            torch.testing.assert_close(part, tensor[0], rtol=tolerance, atol=tolerance)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    sizes = st.lists(st.integers(0, 90), max_size=7)
    made: dict[str, Any] = {"q": draw(sizes)}
    made["k"] = [draw(st.integers(0, 90)) for _ in made["q"]]
    made["block"] = draw(st.sampled_from((16, 32, 64)))
    made["over_keys"], made["reversed"] = draw(st.booleans()), draw(st.booleans())
    made["rest"] = draw(st.integers(0, 70))
    return made


def test_schedules_hold_every_tile_once(device: torch.device) -> None:
    @settings(max_examples=25 if device.type == "cpu" else 200)
    @given(batches())
    def check(batch: dict[str, Any]) -> None:
        cu = {s: torch.tensor([0, *batch[s]]).cumsum(0).to(device, torch.int32) for s in "qk"}
        total = {s: sum(batch[s]) + batch["rest"] for s in "qk"}
        records = schedule(cu["q"], cu["k"], total["q"], total["k"], batch)
        side, block = ("k" if batch["over_keys"] else "q"), batch["block"]
        spans = [*batch[side], batch["rest"]]
        used = [r for r in records if r[3 if side == "q" else 6] > 0]
        assert sorted((r[1], r[0]) for r in used) == [(i, t) for i, n in enumerate(spans) for t in range(-(-n // block))]
        assert all(r == [0] * 8 for r in records if r not in used)
        assert all(r not in used for r in records[len(used) :]), "empty records come last"
        for r in used:
            lengths = [batch[s][r[1]] if r[1] < len(batch["q"]) else 0 for s in "qk"]
            starts = [cu[s][r[1]].item() for s in "qk"]
            assert [r[2], r[4], r[5], r[7]] == [starts[0], lengths[0], starts[1], lengths[1]]
        work = [(r[4] if side == "k" else r[7]) * bool(r[4] and r[7]) for r in used]
        before = [-(-spans[r[1]] // block) - 1 - r[0] if batch["reversed"] else r[0] for r in used]
        assert work == sorted(work, reverse=True), "the longest first"
        for i, tiles in enumerate(-(-n // block) for n in spans):
            places = [at for at, r in enumerate(used) if r[1] == i]
            assert [before[at] for at in places] == list(range(tiles))
            assert places == list(range(places[0], places[0] + tiles)) if places else tiles == 0, "one after another"

    check()


def schedule(cu_q: torch.Tensor, cu_k: torch.Tensor, total_q: int, total_k: int, batch: dict[str, Any]) -> list[list[int]]:
    """The records that a pass would read."""
    items_here, block = cu_q.numel() - 1, batch["block"]
    count = most_tiles(total_k if batch["over_keys"] else total_q, items_here, block, True)
    made = torch.full((count * 8 + 2,), -7, dtype=torch.int32, device=cu_q.device)
    schedule_tiles[(items_here + 1,)](
        (cu_q, cu_k, None, None), made, total_q, total_k, items_here, count,
        BLOCK=block, OVER_KEYS=batch["over_keys"], REVERSED=batch["reversed"], VARLEN=True, CHUNK=16,
    )  # fmt: skip
    records = made[:-2].view(count, 8).tolist()
    tiles, taken = made[-2:].tolist()
    assert taken == 0
    assert tiles == count or not any(any(record) for record in records[int(tiles) :])
    assert all(record[3] > record[0] * block for record in records[: int(tiles)]) or batch["over_keys"]
    return records


@pytest.mark.parametrize("cu", [[5, -3, 900, 2], [2**31 - 1, 0, -(2**31), 7], [0, 64, 32, 64]])
def test_lengths_without_meaning_stay_inside_the_tensors(device: torch.device, cu: list[int]) -> None:
    """On a GPU nobody looks at them beforehand."""
    ends = torch.tensor(cu, dtype=torch.int32, device=device)
    batch = {"block": 16, "over_keys": False, "reversed": False}
    for tile, _, first_q, span_q, q, first_k, span_k, k in schedule(ends, ends, 64, 64, batch):
        assert 0 <= q <= span_q <= 64 - first_q
        assert 0 <= k <= span_k <= 64 - first_k
        assert min(tile, first_q, first_k) >= 0


def test_the_host_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's plan asks no tensor for its numbers: a meta tensor has none."""
    from flashtile.torch.call.arguments import Arguments
    from flashtile.torch.call.describe import make_problem
    from flashtile.torch.call.lengths import given_lengths

    q = torch.zeros(1, 64, 2, 16)
    ends = torch.zeros(4, dtype=torch.int32)
    monkeypatch.setattr(torch.Tensor, "item", None)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    given = given_lengths(cu_seqlens_q=ends, cu_seqlens_k=ends)
    problem, _ = make_problem(q, q, q, Arguments(causal=True), given)
    assert problem.spell() == "attention(q=3x64x2x16,kv=64x2x16,fp32,band=:0,tf32x3,varlen=64x64)"


def test_max_seqlen_is_a_hint(backend: str, place: torch.device) -> None:
    case = Case("hint", seqlen_q=64, seqlen_k=64, cu_q=(0, 40, 64), window=(9, 4))
    t = case.tensors(place)
    ends = case.lengths(place)["cu_seqlens_q"]
    how: dict[str, Any] = {"window": (9, 4), "options": flashtile.Options(backend=backend)}
    plain = flashtile.attention_varlen(t["q"], t["k"], t["v"], ends, **how)
    hinted = flashtile.attention_varlen(t["q"], t["k"], t["v"], ends, max_seqlen_q=40, max_seqlen_k=40, **how)
    assert torch.equal(plain, hinted)


def test_a_bias_is_as_long_as_max_seqlen_says() -> None:
    q, ends, bias = torch.randn(64, 2, 16), ints(0, 40, 64), torch.randn(2, 40, 40)
    short = flashtile.attention_varlen(q, q, q, ends, max_seqlen_q=40, score=flashtile.Bias(bias))
    whole = flashtile.attention_varlen(q, q, q, ends, score=flashtile.Bias(torch.nn.functional.pad(bias, (0, 24, 0, 24))))
    torch.testing.assert_close(short, whole)
    says = r"it must broadcast to .* = \(2, 2, 64, 64\)\. Packed items are as long as max_seqlen_q and max_seqlen_k say"
    with pytest.raises(InvalidProblem, match=says):
        flashtile.attention_varlen(q, q, q, ends, score=flashtile.Bias(bias))


def ints(*numbers: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


VARLEN: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"cu_seqlens_q": None}, "cu_seqlens_q is None; it must be a torch.Tensor"),
    "list": ({"cu_seqlens_q": [0, 6]}, "cu_seqlens_q is a list; it must be a torch.Tensor"),
    "float": ({"cu_seqlens_q": ints(0, 6, dtype=torch.float32)}, "cu_seqlens_q is torch.float32; it must be int32"),
    "rank": ({"cu_seqlens_q": ints(0, 6)[None]}, "cu_seqlens_q has shape (1, 2); it must be (batch + 1,)"),
    "empty": ({"cu_seqlens_q": ints()}, "cu_seqlens_q has shape (0,); it must be (batch + 1,)"),
    "items": ({"cu_seqlens_k": ints(0, 6, 8)}, "cu_seqlens_k has 3 elements and the batch 1 items; it must have 2"),
    "used": ({"seqused_k": ints(3, 4)}, "seqused_k has 2 elements and the batch 1 items; it must have 1"),
    "start": ({"cu_seqlens_q": ints(1, 6)}, "cu_seqlens_q is [1, 6]; it must start with 0, never fall"),
    "falling": ({"cu_seqlens_q": ints(0, 5, 3), "cu_seqlens_k": ints(0, 4, 8)}, "cu_seqlens_q is [0, 5, 3]; it must start"),
    "beyond": (
        {"cu_seqlens_k": ints(0, 9)},
        "it must start with 0, never fall, and end with at most 8",
    ),
    "used-beyond": ({"seqused_q": ints(7)}, "seqused_q[0] is 7; it must be from 0 to 6, the item's tokens"),
    "used-beyond-item": (
        {"cu_seqlens_q": ints(0, 2, 6), "cu_seqlens_k": ints(0, 4, 8), "seqused_q": ints(3, 4)},
        "seqused_q[0] is 3; it must be from 0 to 2, the item's tokens",
    ),
    "used-negative": ({"seqused_k": ints(-1)}, "seqused_k[0] is -1; it must be from 0 to 8"),
    "longest": ({"max_seqlen_q": 5}, "max_seqlen_q is 5; it must be at least 6, the longest item"),
    "longest-text": ({"max_seqlen_k": "8"}, "max_seqlen_k is '8'; it must be an int, at least 0, or None"),
    "meta": ({"cu_seqlens_q": ints(0, 6).to("meta")}, "cu_seqlens_q is on meta and q is on cpu; they must be on one device"),
    "dense": ({"q": torch.zeros(1, 6, 4, 16)}, "q has shape (1, 6, 4, 16); it must be (total, heads, head_dim)"),
    "flat": ({"k": torch.zeros(8, 16)}, "k has shape (8, 16); it must be (total, heads, head_dim)"),
    "slopes": ({"score": (flashtile.Alibi(torch.ones(2, 4)),)}, "alibi slopes have shape (2, 4); it must be (4,) or (1, 4)"),
    "causal": ({"causal": 1}, "causal is 1; it must be True or False"),
}


@pytest.mark.parametrize("name", VARLEN)
def test_bad_input_of_varlen(name: str) -> None:
    changed, message = VARLEN[name]
    good = {
        "q": torch.zeros(6, 4, 16), "k": torch.zeros(8, 2, 16), "v": torch.zeros(8, 2, 16), "cu_seqlens_q": ints(0, 6),
        "cu_seqlens_k": ints(0, 8),
    }  # fmt: skip
    flashtile.attention_varlen(**good)
    with pytest.raises(InvalidProblem, match=re.escape(message)):
        flashtile.attention_varlen(**{**good, **changed})


def test_an_argument_that_does_not_exist() -> None:
    q = torch.zeros(6, 4, 16)
    with pytest.raises(TypeError, match="window_size"):
        flashtile.attention_varlen(q, q, q, ints(0, 6), window_size=3)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("used", "message"),
    [
        (ints(3), "seqused_k has 1 elements and the batch 2 items; it must have 2"),
        (ints(3, 9), "seqused_k[1] is 9; it must be from 0 to 8"),
        (torch.ones(2), "seqused_k is torch.float32; it must be int32"),
        (3, "seqused_k is a int; it must be a torch.Tensor"),
        (KEEP[:, :6], "seqused_k is a mask of shape (2, 6); it must be (batch, seqlen_k) = (2, 8)"),
        (KEEP[0], "seqused_k is a mask of shape (8,); it must be (batch, seqlen_k) = (2, 8)"),
        (KEEP.int(), "seqused_k has shape (2, 8); it must be (batch,), how many tokens of each item count. A mask of 0 and 1"),
        (KEEP.long(), "goes in as booleans: mask.bool()."),
        (KEEP.float(), "goes in as booleans: mask.bool()."),
        (KEEP.to("meta"), "seqused_k is on meta and k is on cpu; they must be on one device"),
    ],
)
def test_bad_padding(used: Any, message: str) -> None:
    q, k = torch.zeros(2, 6, 4, 16), torch.zeros(2, 8, 4, 16)
    with pytest.raises(InvalidProblem, match=re.escape(message)):
        flashtile.attention(q, k, k, seqused_k=used)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mask": flashtile.KeyPadding(KEEP)}, "seqused_k is a mask with holes, and mask goes by the tokens' own places"),
        ({"mask": flashtile.Dilated(2)}, "keys are to be hidden there, by the mask KeyPadding(keep)"),
        ({"score": (flashtile.Bias(torch.zeros(1, 1, 1, 8)),)}, "seqused_k is a mask with holes, and bias goes by"),
    ],
)
def test_what_goes_by_tokens_places_does_not_go_with_holes(given: dict[str, Any], message: str) -> None:
    q, k = torch.zeros(2, 6, 4, 16), torch.zeros(2, 8, 4, 16)
    with pytest.raises(InvalidProblem, match=re.escape(message)):
        flashtile.attention(q, k, k, seqused_k=KEEP, **given)


def test_holes_hide_what_key_padding_hides(backend: str, place: torch.device) -> None:
    """Without bounds on positions it is the same whether keys are hidden in place or taken out."""
    keep, options = KEEP.to(place), flashtile.Options(backend=backend)
    made = []
    for hidden in ({"seqused_k": keep}, {"mask": flashtile.KeyPadding(keep)}):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, n, 4, 16, device=place, requires_grad=True) for n in (6, 8, 8))
        out = flashtile.attention(q, k, v, options=options, **hidden)
        made.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for got, expected in zip(*made, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    told = flashtile.explain(q, k, v, seqused_k=keep, options=options)
    assert "k and v are copied first: the tokens that count are moved together" in told.layout


@pytest.mark.parametrize("shape", [(1, 1, 6, 8), (2, 4, 6, 8), (2, 1, 1, 8), (1, 4, 6, 1)])
def test_a_stored_mask_beside_lengths(backend: str, place: torch.device, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 4, 16, device=place, requires_grad=True) for n in (6, 8, 8))
    stored = torch.rand(shape, device=place) < 0.7
    used_q, used_k = torch.tensor([6, 1], device=place), torch.tensor([0, 5], device=place)
    for lengths in ({"seqused_k": used_k}, {"seqused_q": used_q}, {"seqused_q": used_q, "seqused_k": used_k}):
        counts = {name: t.int() for name, t in lengths.items()}
        out = flashtile.attention(q, k, v, mask=Stored(stored), **counts, options=flashtile.Options(backend=backend))
        keep = stored.expand(2, 4, 6, 8)
        for name, n, axis in (("seqused_q", 6, 2), ("seqused_k", 8, 3)):
            if name in lengths:
                counted = torch.arange(n, device=place) < lengths[name][:, None]
                keep = keep & counted.view(2, 1, *((n, 1) if axis == 2 else (1, n)))
        scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 4
        p = scores.masked_fill(~keep, -1e4).softmax(-1).where(keep, 0.0)  # also where a query sees nothing
        true = torch.einsum("bhij,bjhd->bihd", p, v.double())
        dout = torch.randn_like(out)
        got = (out, *torch.autograd.grad(out, (q, k, v), dout))
        expected = (true, *torch.autograd.grad(true, (q, k, v), dout.double()))
        for mine, other in zip(got, expected, strict=True):
            torch.testing.assert_close(mine.double(), other.double(), rtol=1e-4, atol=1e-5)


def test_a_large_batch_of_empty_items(backend: str, place: torch.device) -> None:
    ends = torch.zeros(270, dtype=torch.int32, device=place)
    ends[140:] = 5
    q = torch.randn(9, 1, 16, device=place)
    out = flashtile.attention_varlen(q, q, q, ends, options=flashtile.Options(backend=backend))
    assert (out[5:] == 0).all()
    torch.testing.assert_close(out[None, :5], flashtile.attention(*(q[None, :5],) * 3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_an_item_on_a_cpu_gets_the_bits_of_a_call_of_its_own(causal: bool) -> None:
    """float32 too, whose backward inherits the rounding of the forward's scores: both passes round them alike."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 40, heads, 16) * size for heads, size in ((4, 4.0), (2, 4.0), (2, 1.0), (4, 1.0)))
    lengths = {"seqused_q": torch.tensor([29], dtype=torch.int32), "seqused_k": torch.tensor([29], dtype=torch.int32)}

    def gradients(part: slice, **how: Any) -> list[torch.Tensor]:
        leaves = [t[:, part].detach().requires_grad_() for t in (q, k, v)]
        out = flashtile.attention(*leaves, causal=causal, options=CPU, **how)
        return [t[:, :29] for t in (out.detach(), *torch.autograd.grad(out, leaves, dout[:, part]))]

    for one, own in zip(gradients(slice(0, 40), **lengths), gradients(slice(0, 29)), strict=True):
        assert torch.equal(one, own)
