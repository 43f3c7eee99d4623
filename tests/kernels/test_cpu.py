"""The CPU backend: what is delegated, what is tiled, and that tiles change nothing.

tests/test_attention.py runs every case on every backend; here its tiles are small, so that those cases have many.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile
from flashtile import Alibi, Band, Blocks, Captured, Dilated, Document, Score, Softcap, Stored
from flashtile.kernels.cpu import products, region, tiled
from flashtile.kernels.cpu.backend import BACKEND
from flashtile.kernels.cpu.ways import delegates
from flashtile.plan.device import CPU, H100
from flashtile.problem.mask import CAUSAL, FULL
from flashtile.problem.score import Position, ScoreSpec
from flashtile.reference.attention import attention_plain, attention_reference
from tests.cases import CASES, DTYPES, Case, lay_out
from tests.judge import expected, judge, run
from tests.kernels.cpu_calls import OPTIONS, PLACE, inputs, notes, problem, step


def unused(*_: Any) -> None:
    """Stands in for the `@jit` functions of a modifier."""
    raise AssertionError("the CPU backend has no kernels")


# -- the plan says which way it goes -----------------------------------------------------------------------------------

DELEGATED = {
    "full": problem(),
    "unequal lengths": problem(30, 70),
    "causal": problem(mask=CAUSAL),
    "causal in one row": problem(1, 70, mask=CAUSAL),
    "long": problem(600, 600),
    "causal, rows without keys": problem(70, 30, mask=CAUSAL),
    "a window that hides nothing": problem(mask=Band(63, 100)),
    "causal beside the diagonal": problem(mask=Band(right=-5)),
    "grouped heads": problem(heads_q=6),
    "negative scale": problem(scale=-1.0),
    "head_dim 5": problem(head_dim=5, head_dim_v=5),
    "few keys": problem(64, 15),
}
DELEGATED_AS = "cpu: delegates to torch's flash attention, whose float32 sums are plain PyTorch's"
TILED = {
    "softcap": problem(score=(ScoreSpec(Softcap, (30.0,)),)),
    "window": problem(mask=Band(62, 0)),
    "causal, more keys than rows": problem(30, 70, mask=CAUSAL),
    "unequal head dims": problem(head_dim_v=32),
    "causal, negative scale": problem(mask=CAUSAL, scale=-1.0),
    "causal, scale 0": problem(mask=CAUSAL, scale=0.0),
    "nothing visible": problem(mask=Band(-2, 1)),
    "one key": problem(64, 1),
    "no keys": problem(10, 0),
    "no batch": problem(batch=0),
}


@pytest.mark.parametrize("name", DELEGATED)
def test_delegated(name: str) -> None:
    assert delegates(DELEGATED[name])
    forward, backward = notes(DELEGATED[name])
    assert forward == f"{DELEGATED_AS} (precision 'ieee' has stricter ones)"
    assert backward == f"{forward}, and tiles for items where scores are large"


@pytest.mark.parametrize("name", DELEGATED)
def test_strict_sums(name: str) -> None:
    """Those of few keys in float64, also where a call returns lse; of more keys the backward is tiled."""
    p = DELEGATED[name]
    strict, with_lse = (notes(replace(p, **change)) for change in ({"precision": "ieee"}, {"returns_lse": True}))
    if p.seqlen_k > products.FEW_KEYS:
        assert strict[0] == "cpu: delegates to torch's flash attention, rows that few keys decide again"
        assert strict[1].startswith("cpu: tiled online softmax, tile ")
        assert with_lse == notes(p)
    else:
        assert strict == with_lse == ("cpu: delegates to torch's flash attention in fp64",) * 2


@pytest.mark.parametrize("name", TILED)
def test_tiled(name: str) -> None:
    assert not delegates(TILED[name])
    assert all(note.startswith("cpu: tiled online softmax, ") for note in notes(TILED[name]))


def test_notes_name_the_tile_and_the_widening() -> None:
    assert notes(problem(mask=CAUSAL, returns_lse=True), dlse=True)[1] == "cpu: tiled online softmax, tile 64x64, in fp64"
    assert notes(problem(2048, 2048, mask=Band(9, 9)))[0] == "cpu: tiled online softmax, tile 256x512"
    assert notes(TILED["no keys"])[0] == "cpu: tiled online softmax, no query sees a key"


def test_unsupported() -> None:
    class Formless(Score):
        name = "without_formula"
        forward = backward = staticmethod(unused)

    assert BACKEND.unsupported(problem(), CPU) == []
    assert BACKEND.unsupported(problem(head_dim=256, head_dim_v=256, deterministic=True), CPU, "split") == []
    assert BACKEND.unsupported(problem(), H100) == ["tensors are on sm90; this backend runs on the CPU"]
    assert BACKEND.unsupported(problem(), CPU, "fused") == ["backward is 'fused'; the CPU has one backward, 'split'"]
    assert BACKEND.unsupported(problem(head_dim=513, head_dim_v=600), CPU) == [
        "head_dim is 513; supported up to 512",
        "head_dim_v is 600; supported up to 512",
    ]
    (reason,) = BACKEND.unsupported(problem(score=(ScoreSpec(Formless),)), CPU)
    assert reason == "score modifier without_formula has no `apply`, its formula in PyTorch"


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_tiles", "nothing_delegated")
@pytest.mark.parametrize("case", [case for case in CASES if case.backward != "fused"], ids=lambda case: case.name)
def test_case_in_small_tiles(case: Case) -> None:
    tensors = case.tensors(PLACE)
    judge(case, run("cpu", case, tensors), *expected(case, tensors))


LARGE = [
    Case("softcap", seqlen_q=600, seqlen_k=1100, heads_q=6, heads_kv=2, score=("softcap30",), causal=True),
    Case("alibi", batch=2, seqlen_q=300, seqlen_k=700, heads_q=2, score=("alibi",), dtype="bf16"),
    Case("window", seqlen_q=700, seqlen_k=700, window=(300, 100), head_dim_v=24, dtype="fp16"),
    Case("rows-of-many-heads", seqlen_q=3, seqlen_k=1500, heads_q=16, score=("softcap30",)),
    Case("delegated", seqlen_q=700, seqlen_k=700, causal=True, upstream="out"),
    Case("delegated-bf16", seqlen_q=700, seqlen_k=700, heads_q=4, causal=True, upstream="out", dtype="bf16"),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_case_in_real_tiles(case: Case, threads: int) -> None:
    tensors = case.tensors(PLACE)
    torch.set_num_threads(threads)
    try:
        result = run("cpu", case, tensors)
    finally:
        torch.set_num_threads(1)
    judge(case, result, *expected(case, tensors))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [64, 400])
def test_gradients_of_short_rows_are_as_exact_as_plain_torch_s(seqlen: int, causal: bool) -> None:
    """The accuracy rule's other half, on enough elements to tell: 99th percentile and mean near plain torch's.

    The rule says 1.1 and 1.0; both are taken from one draw of roundings, hence 1.15 and 1.1.
    """
    case = Case("percentiles", 4, seqlen, seqlen, 4, 4, 32, causal=causal, upstream="out", precision="ieee")
    tensors = case.tensors(PLACE)
    result, (truth, plain) = run("cpu", case, tensors), expected(case, tensors)
    for name in ("out", "dq", "dk", "dv"):
        ours, theirs = ((t[name].double() - truth[name]).abs().flatten() for t in (result, plain))
        last = int(0.99 * ours.numel())
        assert ours.kthvalue(last).values <= 1.15 * theirs.kthvalue(last).values, name
        assert ours.mean() <= 1.1 * theirs.mean(), name


@pytest.mark.parametrize("right", [-40, -5, 3, 10])
def test_triangles_of_any_offset(right: int) -> None:
    """Trimmed to what sees and is seen, some are top-left ones and delegated, also where they are cut off."""
    for seqlen_q, seqlen_k in ((60, 60), (60, 60 - right), (80, 60)):
        q, k, v, dout = inputs(1, seqlen_q, seqlen_k)
        band = Band(right=right)
        ours = step(q, k, v, dout, mask=band)
        leaves = [t.double().requires_grad_() for t in (q, k, v)]
        out, lse = attention_reference(*leaves, mask=band)
        exact = (out, lse, *torch.autograd.grad(out, leaves, dout.double()))
        for got, truth in zip(ours, exact, strict=True):
            torch.testing.assert_close(got.double(), truth.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_lse_of_one_key_is_its_score(dtype: str) -> None:
    """torch's 16-bit kernel misses this by 6e-5, which is why its lse is not returned."""
    q, k, v, _ = inputs(1, 64, 64, 2, 2, dtype=DTYPES[dtype])
    _, lse = flashtile.attention(q, k, v, causal=True, return_lse=True, options=OPTIONS)
    score = (q[0, 0].double() * k[0, 0].double()).sum(-1) / 4.0
    torch.testing.assert_close(lse[0, :, 0].double(), score, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window": (20, 3)}, {"score": (Softcap(5.0),)}], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e4, 1e15])
def test_scores_of_any_size(how: dict[str, Any], size: float) -> None:
    q, k, v, dout = inputs(1, 40, 40)
    for tensor in step(q * size, k, v, dout, **how):
        assert tensor.isfinite().all()


def test_far_keys_of_alibi_are_not_denormal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Denormal probabilities make the products many times slower; below 2^-100 there are none."""
    seen: list[torch.Tensor] = []
    exp = tiled._hidden_exp_

    def watched(*args: Any) -> torch.Tensor:
        prob = exp(*args)
        seen.append(prob.clone())
        return prob

    monkeypatch.setattr(tiled, "_hidden_exp_", watched)
    q, k, v, dout = inputs(1, 500, 500)
    step(q, k, v, dout, score=(Alibi(torch.full((4,), 0.5)),))
    assert len(seen) > 1
    for p in seen:
        assert (p[p > 0] >= 2.0**-100).all()
    assert any((p == 0).any() for p in seen)


# -- what is not visible, and what is not there ------------------------------------------------------------------------

WAYS = {
    "delegated": ({"mask": Band(right=-8)}, 60, 60),
    "delegated, rows without keys": ({"causal": True}, 60, 40),
    "tiled": ({"mask": Band(left=30, right=-8)}, 60, 60),
    "tiled, rows and keys": ({"window": (3, 3)}, 60, 30),
    "tiled with modifiers": ({"mask": Band(left=-5, right=40), "score": (Softcap(9.0), Alibi(torch.ones(4) / 8))}, 60, 60),
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("with_dlse", [False, True])
def test_what_is_not_visible_never_leaks(way: str, bad: float, with_dlse: bool) -> None:
    how, seqlen_q, seqlen_k = WAYS[way]
    q, k, v, dout = inputs(2, seqlen_q, seqlen_k)
    dlse = torch.randn(2, 4, seqlen_q) if with_dlse else None
    clean = step(q, k, v, dout, dlse, **how)
    _, lse, *_ = clean
    rows = (lse == -math.inf)[0, 0]
    band = how.get("mask") or Band(*how.get("window", (None, 0)))
    keys = ~torch.tensor([[band.visible(i, j, seqlen_k - seqlen_q) for j in range(seqlen_k)] for i in range(seqlen_q)]).any(0)
    assert rows.any() or keys.any()
    for tensor, where in ((q, rows), (dout, rows), (k, keys), (v, keys)):
        tensor[:, where] = bad
    if dlse is not None:
        dlse[:, :, rows] = bad
    for got, exact in zip(step(q, k, v, dout, dlse, **how), clean, strict=True):
        assert torch.equal(got, exact)
    out, _, dq, dk, dv = clean
    assert not out[:, rows].any()
    assert not dq[:, rows].any()
    assert not dk[:, keys].any()
    assert not dv[:, keys].any()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "how", [{}, {"causal": True}, {"window": (40, 0)}, {"causal": True, "score": (Softcap(9.0),)}], ids=str
)
def test_what_is_visible_propagates(how: dict[str, Any], bad: float) -> None:
    """Where plain PyTorch gives no number to a row that sees the bad element, neither does the backend."""
    for index, name in enumerate("qkv"):
        given = inputs(1, 50, 50)
        given[index][0, 20, 0, 3] = bad
        results = (*step(*given, **how)[:2], *attention_plain(*given[:3], **how))
        out, lse, plain_out, plain_lse = (~t.isfinite() for t in results)
        rows = [20] if name == "q" else [20, 35, 49]
        assert out[0, rows].any(-1).ge(plain_out[0, rows].any(-1)).all(), name
        assert lse[0, :, rows].ge(plain_lse[0, :, rows]).all(), name
        assert plain_out.any() or "score" in how, name  # softcap makes finite numbers of infinite ones
        assert not out[:, :, 2:].any(), "the heads of the other group"


@pytest.mark.parametrize("size", [1, 5, 15, 16, 17, 33])
def test_rows_of_nan_alone(size: int) -> None:
    """torch's kernel takes a few scores that are all NaN for none at all."""
    q, k, v, _ = inputs(1, size, size)
    q[0, size // 2, 0] = math.nan
    for causal in (False, True):
        out, lse = flashtile.attention(q, k, v, causal=causal, return_lse=True, options=OPTIONS)
        assert out[0, size // 2, 0].isnan().all()
        assert lse[0, 0, size // 2].isnan()


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize(
    "how", [{}, {"causal": True}, {"score": (Softcap(9.0), Alibi(torch.ones(4)))}], ids=["full", "causal", "score"]
)
def test_nothing_to_do(shape: tuple[int, int, int], how: dict[str, Any]) -> None:
    q, k, v, dout = inputs(*shape)
    out, lse, dq, dk, dv = step(q, k, v, dout, torch.zeros(shape[0], 4, shape[1]), **how)
    assert out.shape == q.shape
    assert not out.any()
    assert (lse == -math.inf).all()
    for grad, like in zip((dq, dk, dv), (q, k, v), strict=True):
        assert grad.shape == like.shape
        assert not grad.any()


# -- gradients and layouts ---------------------------------------------------------------------------------------------

SUBSETS = [names for n in range(1, 4) for names in itertools.combinations("qkv", n)]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("wanted", SUBSETS, ids="".join)
@pytest.mark.parametrize("slopes_too", [None, False, True])
def test_every_subset_of_gradients(wanted: tuple[str, ...], slopes_too: bool | None) -> None:
    q, k, v, dout = inputs(1, 50, 70)
    slopes = torch.rand(4)

    def grads(names: tuple[str, ...], slopes_too: bool | None) -> list[torch.Tensor]:
        leaves = {name: t.detach().requires_grad_(name in names) for name, t in zip("qkv", (q, k, v), strict=True)}
        captured = slopes.detach().requires_grad_(bool(slopes_too))
        score = () if slopes_too is None else (Alibi(captured), Softcap(4.0))
        out = flashtile.attention(*leaves.values(), score=score, options=OPTIONS)
        return list(torch.autograd.grad(out, [t for t in (*leaves.values(), captured) if t.requires_grad], dout))

    everything = dict(zip("qkvs", grads(("q", "k", "v"), slopes_too), strict=False))
    for name, got in zip((*wanted, "s"), grads(wanted, slopes_too), strict=False):
        assert torch.equal(got, everything[name])


def test_only_captured_tensors_need_gradients() -> None:
    q, k, v, dout = inputs(1, 40, 40)
    slopes = torch.rand(4, requires_grad=True)
    out = flashtile.attention(q, k, v, score=(Alibi(slopes),), options=OPTIONS)
    exact = slopes.detach().double().requires_grad_()
    truth, _ = attention_reference(q.double(), k.double(), v.double(), score=(Alibi(exact),))
    (got,), (want,) = torch.autograd.grad(out, slopes, dout), torch.autograd.grad(truth, exact, dout.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@dataclass(frozen=True, eq=False)
class Table(Score):
    """Score modifier score + table[batch, head, row, key], and nothing where the table holds -inf."""

    table: torch.Tensor

    name = "cpu_test_table"
    forward = backward = staticmethod(unused)
    captured = (Captured(unused, index=unused),)

    def tensors(self, batch: int, heads_q: int) -> tuple[torch.Tensor, ...]:
        return (self.table,)

    @staticmethod
    def apply(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        return score + tensors[0].to(score.dtype)[at.batch, at.head, at.row, at.k]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mask", [FULL, Band(right=4), Band(9, -2)], ids=str)
def test_positions_index_captured_tensors(mask: Band, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "ELEMENTS", 16 * 24 * 4)  # two batch entries of two heads, then one of two
    results: list[tuple[torch.Tensor, ...]] = []
    given = [*inputs(3, 40, 55), torch.randn(3, 4, 40, 55)]
    for function, dtype, extra in ((flashtile.attention, torch.float32, {"options": OPTIONS, "return_lse": True}),
                                   (attention_reference, torch.float64, {})):  # fmt: skip
        q, k, v, dout, table = (t.to(dtype) for t in given)
        leaves = [t.detach().requires_grad_() for t in (q, k, v, table)]
        out, lse = function(*leaves[:3], mask=mask, score=(Table(leaves[3]),), **extra)
        results.append((out, lse, *torch.autograd.grad(out, leaves, dout)))
    for got, exact in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
def test_a_modifier_may_hide_whole_rows() -> None:
    q, k, v, dout = inputs(1, 40, 40)
    table = torch.zeros(1, 4, 40, 40)
    table[:, :, 7] = -math.inf
    table[:, :, 9, :30] = -math.inf
    out, lse, dq, dk, dv = step(q, k, v, dout, score=(Table(table),))
    assert (lse[:, :, 7] == -math.inf).all()
    assert not out[:, 7].any()
    assert not dq[:, 7].any()
    alone, _ = attention_reference(q[:, 9:10].double(), k[:, 30:].double(), v[:, 30:].double())
    torch.testing.assert_close(out[:, 9:10].double(), alone, rtol=1e-5, atol=1e-5)
    assert all(t.isfinite().all() for t in (dq, dk, dv))


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window": (9, 0)}], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed", "gaps", "head_dim outside"])
def test_any_layout_and_outputs_follow_it(layout: str, dtype: str, how: dict[str, Any]) -> None:
    plain = inputs(2, 40, 40, 4, 4, dtype=DTYPES[dtype])
    if layout == "packed":
        given = [*torch.stack(plain[:3], 2).unbind(2), plain[3].mT.contiguous().mT]
    elif layout == "head_dim outside":
        given = [t.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for t in plain]
    else:
        given = [lay_out(t, layout) for t in plain]
    results, exact = step(*given, **how), step(*plain, **how)
    for got, want in zip(results, exact, strict=True):
        assert torch.equal(got, want)
    order = {"bhsd": (0, 2, 1, 3), "head_dim outside": (3, 0, 1, 2)}.get(layout, (0, 1, 2, 3))
    for got in (results[0], *results[2:]):
        assert got.permute(order).is_contiguous()
    assert results[1].is_contiguous()


@pytest.mark.parametrize("how", [{}, {"window": (9, 0)}], ids=str)
def test_expanded_gradients(how: dict[str, Any]) -> None:
    q, k, v, _ = inputs()
    for dout in (torch.ones(()).expand(q.shape), torch.randn(1, 50, 4, 1).expand(q.shape), torch.randn(16).expand(q.shape)):
        for got, want in zip(step(q, k, v, dout, **how), step(q, k, v, dout.contiguous(), **how), strict=True):
            assert torch.equal(got, want)


ELSEWHERE: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "predicates": (torch.float32, {"mask": Dilated(2) & Band(right=0) | Document(torch.arange(50, dtype=torch.int32) // 9)}),
    "distances": (torch.float16, {"causal": True, "score": (Alibi(torch.rand(4)),)}),
    "curve": (torch.float16, {"score": (Softcap(9.0),)}),
    "lse": (torch.bfloat16, {"window": (9, 3)}),
    "stored": (torch.float32, {"mask": Stored(torch.rand(1, 4, 50, 50) < 0.5), "seqused_k": torch.tensor([33]).int()}),
    "holes": (torch.float32, {"seqused_q": torch.rand(1, 50) < 0.5}),
    "blocks": (torch.float32, {"mask": Blocks.build(Dilated(3), 50, 50, device="cpu"), "causal": True}),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_torch_s_default_device_changes_nothing(name: str) -> None:
    dtype, how = ELSEWHERE[name]
    given = inputs(dtype=dtype)
    plain = step(*given, **how)
    if isinstance(how.get("mask"), Blocks):  # which remember what the first call found
        how = {**how, "mask": Blocks.build(Dilated(3), 50, 50, device="cpu")}
    with torch.device("meta"):
        elsewhere = step(*given, **how)
    assert all(torch.equal(a, b) for a, b in zip(elsewhere, plain, strict=True))


@pytest.mark.parametrize("how", [{}, {"causal": True, "score": (Softcap(9.0),)}], ids=["delegated", "tiled"])
def test_autocast_and_defaults_change_nothing(how: dict[str, Any]) -> None:
    """Neither of 16 bits, which autocast leaves alone, nor of a backward outside of it."""
    given = [t.half() for t in inputs()]
    plain = step(*given, **how)
    with torch.autocast("cpu", torch.bfloat16):
        cast = step(*given, **how)
    with torch.device("meta"):
        elsewhere = step(*given, **how)
    torch.set_default_dtype(torch.float64)
    try:
        double = step(*given, **how)
    finally:
        torch.set_default_dtype(torch.float32)
    for results in (cast, elsewhere, double):
        assert all(torch.equal(a, b) for a, b in zip(results, plain, strict=True))


@pytest.mark.usefixtures("strict_determinism")
@pytest.mark.parametrize("how", [{}, {"causal": True, "score": (Softcap(9.0),)}], ids=["delegated", "tiled"])
def test_repeatable(how: dict[str, Any]) -> None:
    given = inputs(2, 600, 600)
    torch.set_num_threads(2)
    try:
        once, again = (step(*given, **how) for _ in range(2))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


# -- memory ------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window": (500, 0)}, {"score": (Softcap(9.0), Alibi(torch.ones(1)))}],
                         ids=["full", "causal", "window", "score"])  # fmt: skip
def test_no_tensor_of_seqlen_squared(how: dict[str, Any]) -> None:
    seqlen = 1536
    given = inputs(1, seqlen, seqlen, 1, 1, 8)
    with Largest() as seen:
        step(*given, **how)
    assert seqlen * 8 <= seen.elements <= max(region.ROWS * region.WIDTH, seqlen * 8)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(512, 512), (300, 64)])
def test_heads_wider_than_a_gpu_s_in_fp32(head_dim: int, head_dim_v: int) -> None:
    case = Case("wide", seqlen_q=20, seqlen_k=36, head_dim=head_dim, head_dim_v=head_dim_v, causal=True)
    tensors = case.tensors(torch.device("cpu"))
    judge(case, run("cpu", case, tensors), *expected(case, tensors))
