"""attention_cached against the float64 reference, and what it promises beside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flashtile
from flashtile.kernels.device import decoding
from flashtile.kernels.portable import cached
from flashtile.kernels.sm90.host import choose_cached
from flashtile.plan.buffers import cached_buffers
from flashtile.plan.call import Plan
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import CachedProblem, Pages
from flashtile.problem.dtype import DType
from flashtile.problem.lengths import Lengths
from flashtile.torch.execute.bound import Bound
from tests.cached.draw import check, draw


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_random_calls_on_the_cpu(first: int) -> None:
    for seed in range(first, first + 40):
        check(draw(seed), "cpu")


@pytest.mark.parametrize("first", range(1000, 1064, 16))
def test_random_calls_of_the_portable_kernels(first: int, device: torch.device) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    for seed in range(first, first + 16):
        check(draw(seed, True, device), "triton")


def batch_of(places: list[int], columns: int) -> dict[str, Any]:
    """A batch of items taken out of five, by their places."""
    generator = torch.Generator().manual_seed(7)
    used = torch.tensor([150, 3, 0, 77, 300], dtype=torch.int32)
    table = torch.randperm(5 * 19, generator=generator).int().view(5, 19)[:, :columns]
    q = torch.randn(5, 2, 4, 16, generator=generator).bfloat16()
    k, v = (torch.randn(5 * 19, 16, 2, 16, generator=generator).bfloat16() for _ in "kv")
    return dict(q=q[places], k_cache=k, v_cache=v, page_table=table[places], seqused_k=used[places])


@pytest.mark.parametrize("split", [0, 128])
def test_an_items_bits_do_not_depend_on_its_batch(backend: str, place: torch.device, split: int) -> None:
    how: dict[str, Any] = dict(causal=True, split=split, return_lse=True, options=flashtile.Options(backend=backend))

    def run(places: list[int], packed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        given = {name: tensor.to(place) for name, tensor in batch_of(places, 19).items()}
        if packed:
            cu = torch.arange(0, 2 * len(places) + 1, 2, dtype=torch.int32, device=place)
            out, lse = flashtile.attention_cached(**{**given, "q": given["q"].flatten(0, 1)}, cu_seqlens_q=cu, **how)
            return out.view(len(places), 2, 4, 16), lse.view(4, len(places), 2).transpose(0, 1)
        return flashtile.attention_cached(**given, **how)

    alone = [run([i]) for i in range(5)]
    for places in ([0, 1, 2, 3, 4], [4, 0], [3, 3, 2]):
        for got, want in zip(run(places), zip(*(alone[i] for i in places), strict=True), strict=True):
            assert torch.equal(got, torch.cat(want))
    apart, joined = run([1, 4, 2], packed=True), run([1], packed=True)
    assert torch.equal(apart[0][:1], joined[0])
    assert torch.equal(apart[1][:1], joined[1])


@pytest.mark.parametrize(("keys", "rows", "places"), [(100, 512, 4), (512, 512, 4), (1000, 1024, 8)])
def test_places_for_parts_that_are_not_there_change_no_bit(
    keys: int, rows: int, places: int, device: torch.device, monkeypatch: Any
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(2, rows, 1, 16, generator=generator).to(device) for _ in "kv")
    q = torch.randn(2, 1, 2, 16, generator=generator).to(device)
    used, options = torch.tensor([keys, 300], device=device), flashtile.Options(backend="triton")
    real, planned = decoding.loaded_of, list[tuple[int, int]]()
    monkeypatch.setattr(decoding, "loaded_of", lambda *given: planned.append(real(*given)) or planned[-1])

    def run() -> torch.Tensor:
        flashtile.cache_clear()
        return flashtile.attention_cached(q, k, v, seqused_k=used, split=128, options=options)

    few = run()
    monkeypatch.setattr(decoding, "FEW_PARTS", 16)
    assert torch.equal(run(), few)
    assert planned == [(places, 1), (16, 1)]
    assert [decoding.loaded_of(count, 1) for count in (2, 3, 5, 40)] == [(1, 2), (1, 4), (1, 8), (1, 8)]
    flashtile.cache_clear()


@pytest.mark.parametrize("window", [(700, 0), (600, 100), (2, 0)])
def test_the_places_of_a_windows_parts_change_no_bit(window: Any, device: torch.device, monkeypatch: Any) -> None:
    """They begin at the window's first part, whether parts that are added up first end among them (2,348 keys) or not."""
    pytest.importorskip("triton", reason="Triton is not installed")
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(3, 3000, 1, 16, generator=generator).half().to(device) for _ in "kv")
    v[0, 1800, 0, 3] = torch.inf  # before that border, in both wide windows
    q = torch.randn(3, 2, 16, 16, generator=generator).half().to(device)
    how: dict[str, Any] = dict(window=window, split=128, return_lse=True, options=flashtile.Options(backend="triton"))
    how["seqused_k"] = torch.tensor([2348, 1400, 0], device=device)
    real, planned = decoding.near_of, list[int]()
    monkeypatch.setattr(decoding, "near_of", lambda *given: planned.append(real(*given)) or planned[-1])

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        flashtile.cache_clear()
        return flashtile.attention_cached(q, k, v, **how)

    few = run()
    assert (few[0][0, :, :, 3] == torch.inf).all() == (window[0] > 2)
    monkeypatch.setattr(decoding, "near_of", lambda *given: 0)
    assert all(torch.equal(a, b) for a, b in zip(few, run(), strict=True))
    assert len(planned) == 1
    assert planned[0] > 0
    flashtile.cache_clear()


def test_the_sum_of_parts_leaves_whole_items_alone(device: torch.device) -> None:
    """Where items' lengths are alike blocks wrote the results; else an item without a key has zeros, beside parts of NaN."""
    pytest.importorskip("triton", reason="Triton is not installed")
    p = AttentionProblem(3, 1, 5000, 2, 1, 16, 16, DType.FP16, lengths=Lengths(used_k=True), returns_lse=True)
    problem = CachedProblem(p, Pages(3, 5000, 1, False, False), 256)
    tile = replace(choose_cached.make_cached_tile(problem, choose_cached.CachedLaunch(turned=True), 2, 8), parts=1, folds=False)
    call = decoding.combine_call(problem, decoding.Packing(2, 1, 1, 2048, 1, False, whole=32), tile, 1, H100)
    buffers = (*cached_buffers(problem), *decoding.part_buffers(problem, 3, "fp32"))
    plan = Plan(problem, "hopper", "", buffers, (call,))
    tensors = {"q": torch.zeros(3, 1, 2, 16), "k": torch.zeros(3, 5000, 1, 16), "v": torch.zeros(3, 5000, 1, 16)}
    inputs = {name: t.half().to(device) for name, t in tensors.items()}
    for used, whole in (([4700, 5000, 4900], True), ([0, 0, 0], True), ([5000, 0, 5000], False), ([4600, 0, 5000], False)):
        inputs["seqused_k"] = torch.tensor(used, dtype=torch.int32, device=device)
        made = Bound(plan, inputs, device).run(inputs)
        assert made["out"][1].isnan().all().item() == whole, used
        assert (made["lse"][1] == -torch.inf).all().item() == (not whole), used
        assert made["out"][0].isnan().all(), used


def test_prefill_chunks_stand_beside_decodes(backend: str, place: torch.device) -> None:
    """Items of 9, 1, 0 and 2 queries in one call are what they are alone."""
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(12, 16, 1, 16, generator=generator).to(place) for _ in "kv")
    q = torch.randn(12, 4, 16, generator=generator).to(place)
    table = torch.arange(12, dtype=torch.int32).view(4, 3).to(place)
    used = torch.tensor([40, 33, 5, 2], dtype=torch.int32).to(place)
    cu = torch.tensor([0, 9, 10, 10, 12], dtype=torch.int32).to(place)
    options = flashtile.Options(backend=backend)
    out = flashtile.attention_cached(q, k, v, table, seqused_k=used, cu_seqlens_q=cu, causal=True, options=options)
    for i in (0, 1, 3):
        rows = slice(int(cu[i]), int(cu[i + 1]))
        dense = [t[table[i].long()].flatten(0, 1)[None, : int(used[i])] for t in (k, v)]
        want = flashtile.attention(q[None, rows], *dense, causal=True, options=options)
        torch.testing.assert_close(out[None, rows], want, rtol=1e-5, atol=1e-6)


GOOD = batch_of([0, 1, 3], 19)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"page_table": GOOD["page_table"].long()}, "page_table is torch.int64; it must be int32"),
    ({"page_table": GOOD["page_table"][:2]}, "page_table has shape (2, 19); it must be (batch, columns), of batch 3"),
    ({"page_table": GOOD["page_table"][:, :2]}, "seqused_k[0] is 150; it must be from 0 to 32"),
    ({"page_table": GOOD["page_table"] * 100}, "among those of its"),
    ({"page_table": None}, "k_cache has 95 items and the batch 3"),
    ({"page_table": [1]}, "page_table is a list"),
    ({"v_cache": GOOD["v_cache"].half()}, "v_cache is torch.float16 and q is torch.bfloat16"),
    ({"k_cache": GOOD["k_cache"].double()}, "k_cache is torch.float64"),
    ({"k_cache": GOOD["k_cache"][0]}, "k_cache has shape (16, 2, 16)"),
    ({"k_cache": GOOD["k_cache"][:0], "v_cache": GOOD["v_cache"][:0]}, "it must have pages"),
    ({"k_cache": GOOD["k_cache"][..., :8]}, "k_cache has head_dim 8 and q has 16"),
    ({"v_cache": GOOD["v_cache"][:, :8]}, "they must be equal but for head_dim"),
    ({"q": GOOD["q"][:, :, :3]}, "heads_q must be a multiple of heads_kv"),
    ({"q": GOOD["q"][0]}, "q has shape (2, 4, 16)"),
    ({"seqused_k": GOOD["seqused_k"][:2]}, "seqused_k has 2 elements and the batch 3"),
    ({"seqused_k": GOOD["seqused_k"].float()}, "seqused_k is torch.float32"),
    ({"seqused_k": GOOD["seqused_k"] + 300}, "it must be from 0 to 304"),
    ({"seqused_k": GOOD["seqused_k"] * 0 - 1}, "seqused_k[0] is -1"),
    ({"first_k": GOOD["seqused_k"] + 1}, "first_k[0] is 151; it must be from 0 to seqused_k[0]"),
    ({"split": 100}, "split is 100; it must be None, 0 or a multiple of 128"),
    ({"split": True}, "split is True"),
    ({"split": 2**31 - 128}, "split is 2147483520; it must be at most 1073741824 keys. Give 0 for one pass"),
    ({"rotary": (1, 2)}, "rotary is given without append"),
    ({"append": 3}, "append is a int"),
    ({"scale": "x"}, "scale is"),
]


@pytest.mark.parametrize(("change", "says"), BAD, ids=[says for _, says in BAD])
def test_bad_input_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(flashtile.InvalidProblem) as error:
        flashtile.attention_cached(**{**GOOD, **change})
    assert says in str(error.value)


def test_a_cache_has_no_gradient_and_says_so() -> None:
    with pytest.raises(flashtile.NotSupported, match=r"k_cache requires a gradient.*torch\.no_grad.*cache\.first_k"):
        flashtile.attention_cached(**{**GOOD, "k_cache": GOOD["k_cache"].clone().requires_grad_()})
    with torch.no_grad():
        flashtile.attention_cached(**{**GOOD, "k_cache": GOOD["k_cache"].clone().requires_grad_()})
    with pytest.raises(flashtile.NotSupported, match=r"attention_cached within torch\.func"):
        torch.func.vmap(lambda q: flashtile.attention_cached(**{**GOOD, "q": q}))(GOOD["q"][None])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(GOOD["q"].clone(), torch.ones_like(GOOD["q"]))
        with pytest.raises(flashtile.NotSupported, match="attention_cached by q"):
            flashtile.attention_cached(**{**GOOD, "q": dual})


@pytest.mark.parametrize("split", [0, 128])
def test_pages_before_every_window_may_be_anybodys(backend: str, place: torch.device, split: int) -> None:
    """They were evicted: their entries name page 0, or one whose rows are NaN, and no bit changes."""
    given = batch_of([0, 3, 4], 19)
    how: dict[str, Any] = dict(causal=True, window=(40, 0), split=split, return_lse=True)
    kept = flashtile.attention_cached(
        **{n: t.to(place) for n, t in given.items()}, **how, options=flashtile.Options(backend=backend)
    )
    pools = {name: torch.cat([given[name], torch.full_like(given[name][:1], torch.nan)]) for name in ("k_cache", "v_cache")}
    for item, used in enumerate(given["seqused_k"].tolist()):
        gone = max(used - 2 - 40, 0) // 16  # pages whose last row is before the first query's window
        given["page_table"][item, :gone] = torch.tensor([0, len(pools["k_cache"]) - 1] * 10)[:gone].int()
    evicted = {name: tensor.to(place) for name, tensor in {**given, **pools}.items()}
    for got, want in zip(
        flashtile.attention_cached(**evicted, **how, options=flashtile.Options(backend=backend)), kept, strict=True
    ):
        assert torch.equal(got, want)


def test_hopper_says_why_it_does_not_read_a_cache_here() -> None:
    with pytest.raises(flashtile.NotSupported, match="made of sm90's instructions"):
        flashtile.attention_cached(**GOOD, options=flashtile.Options(backend="hopper"))
    with pytest.raises(TypeError, match="did you mean"):
        flashtile.attention_cached(**GOOD, softcap=3.0)
    with pytest.raises(TypeError, match=r"'block_table'; did you mean page_table\?"):
        flashtile.attention_cached(**GOOD, block_table=None)


@pytest.mark.parametrize("window", [None, (100, 0)])
def test_parts_that_a_program_forms_change_no_bit(monkeypatch: pytest.MonkeyPatch, device: torch.device, window: Any) -> None:
    given = {name: tensor.to(device) for name, tensor in batch_of([0, 1, 2, 3, 4], 19).items()}
    how: dict[str, Any] = dict(causal=True, window=window, split=128, options=flashtile.Options(backend="triton"))
    made: list[tuple[torch.Tensor, ...]] = []
    for parts in (1, 2, 4):
        planned: list[int] = []
        monkeypatch.setattr(cached, "parts_of", lambda *_, n=parts, planned=planned: planned.append(n) or n)
        flashtile.cache_clear()
        made.append(flashtile.attention_cached(**given, **how, return_lse=True))
        assert planned == [parts]
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))


@pytest.mark.parametrize("split", [256, 512])
def test_the_shape_of_the_sums_programs_changes_no_bit(
    split: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Of the launch that adds parts up: sums side by side, or fewer columns, where multiprocessors are idle."""
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(2, 3000, 1, 64, generator=generator).half().to(device) for _ in "kv")
    used = torch.tensor([3000, 1400], dtype=torch.int32, device=device)
    q = torch.randn(2, 1, 4, 64, generator=generator).half().to(device)
    how: dict[str, Any] = dict(seqused_k=used, split=split, return_lse=True, options=flashtile.Options(backend="triton"))
    made: list[tuple[torch.Tensor, ...]] = []
    calls: list[Any] = []
    plain = decoding.combine_call
    for count, side_by_side in ((1, 4), (1000, 4), (1000, 2), (1000, 1)):
        monkeypatch.setattr(decoding, "ABREAST", side_by_side)

        def combine(problem: Any, packing: Any, tile: Any, together: int, place: Any, count: int = count) -> Any:
            calls.append(plain(problem, packing, tile, together, replace(place, sm_count=count)))
            return calls[-1]

        monkeypatch.setattr(cached, "combine_call", combine)
        flashtile.cache_clear()
        made.append(flashtile.attention_cached(q, k, v, **how))
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))
    shapes = [(call.grid, dict(call.constants)) for call in calls]
    assert [(grid, how["PACK"].abreast, how["COLUMNS"]) for grid, how in shapes] == [
        ((2, 1, 1), 1, 64), ((2, 4, 2), 4, 32), ((2, 4, 2), 2, 32), ((2, 1, 2), 1, 32),
    ]  # fmt: skip
