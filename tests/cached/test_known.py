"""Calls over a cache that come again are what they were the first time, and nothing that differs is taken for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import flashtile
from flashtile.torch.cache import append as appends
from flashtile.torch.cache.attention import problem_of
from flashtile.torch.cache.known import Known
from tests.cached.draw import draw
from tests.cached.test_cached import BAD, batch_of
from tests.seen import Seen

GOOD = {**batch_of([0, 1, 3], 19), "causal": True, "return_lse": True}
SINK, CAP = torch.linspace(-1, 1, 4), torch.tensor(2.0)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were known, as they come."""
    flashtile.cache_clear()
    calls: list[Any] = []
    run: Callable[..., Any] = Known.run

    def counted(self: Known, call: Any, *rest: Any) -> Any:
        calls.append(call)
        return run(self, call, *rest)

    monkeypatch.setattr(Known, "run", counted)
    return calls


def both(call: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """(out, lse), or (out,), of `attention_cached` by these arguments."""
    made = flashtile.attention_cached(**call)
    return made if isinstance(made, tuple) else (made,)


def same(made: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return len(made) == len(other) and all(
        (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype) and torch.equal(a, b)
        for a, b in zip(made, other, strict=True)
    )


@pytest.mark.parametrize("small", [False, True], ids=["cpu", "triton"])
def test_drawn_calls_that_are_known_are_what_they_are_anew(known: list[Any], small: bool) -> None:
    for seed in range(3000, 3016 if small else 3090):
        drawn = draw(seed, small)
        options = flashtile.Options(backend="triton" if small else "cpu")
        if small:
            pytest.importorskip("triton", reason="Triton is not installed")
        names = ("q", "k_cache", "v_cache", "page_table")
        call = {**dict(zip(names, drawn.tensors, strict=False)), **drawn.arguments, "split": drawn.split, "options": options}
        both(call)
        other = {**call, "q": torch.empty_strided(call["q"].shape, call["q"].stride(), dtype=call["q"].dtype).copy_(-call["q"])}
        before = len(known)
        made = both(other)
        assert len(known) == before + 1, drawn.about
        flashtile.cache_clear()
        assert same(both(other), made), drawn.about


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, the two axes before the last in the other order."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, at an address that 16 does not divide."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)


CHANGES: dict[str, dict[str, Any]] = {
    "q's strides": {"q": strided(GOOD["q"])},
    "q's place": {"q": moved(GOOD["q"])},
    "fewer queries": {"q": GOOD["q"][:, :1]},
    "strides of the keys": {"k_cache": strided(GOOD["k_cache"])},
    "values that are the keys": {"v_cache": GOOD["k_cache"]},
    "fp16": {name: GOOD[name].half() for name in ("q", "k_cache", "v_cache")},
    "fewer columns": {"page_table": GOOD["page_table"][:, :10]},
    "lengths of 64 bits": {"seqused_k": GOOD["seqused_k"].long()},
    "lengths apart": {"seqused_k": GOOD["seqused_k"].repeat_interleave(2)[::2]},
    "first_k": {"first_k": torch.tensor([3, 1, 0], dtype=torch.int32)},
    "packed": {"q": GOOD["q"].flatten(0, 1), "cu_seqlens_q": torch.tensor([0, 2, 3, 6], dtype=torch.int32)},
    "not causal": {"causal": False},
    "a causal of NumPy's kind": {"causal": torch.tensor(False)},
    "a window": {"window": (20, 0)},
    "another window": {"window": [30, 0]},
    "a band": {"mask": flashtile.Band(left=4)},
    "a predicate": {"mask": flashtile.Dilated(2)},
    "a scale": {"scale": 1.0},
    "a scale of int": {"scale": 1},
    "softcap": {"score": flashtile.Softcap(2.0)},
    "another softcap": {"score": [flashtile.Softcap(3.0)]},
    "alibi": {"score": (flashtile.Alibi(torch.tensor([0.5, 0.25, 0.1, 1.0])),)},
    "sinks": {"sink": SINK},
    "one pass": {"split": 0},
    "parts": {"split": 128},
    "out alone": {"return_lse": False},
    "a backend": {"options": flashtile.Options(backend="cpu")},
    "a prefix": {"shared_prefix": 16, "seqused_k": torch.tensor([150, 0, 77], dtype=torch.int32)},
    "a prefix of nothing": {"shared_prefix": 0},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_what_differs_is_not_taken_for_what_is_known(known: list[Any], change: dict[str, Any]) -> None:
    call = {**GOOD, **change}
    want = both(call)
    flashtile.cache_clear()
    for _ in range(2):
        both(GOOD)
    assert len(known) == 1
    assert same(both(call), want)
    assert same(both(call), want)
    assert same(both(call), want)


def test_numbers_that_are_tensors_are_read_at_every_call(known: list[Any]) -> None:
    for name, others in {"scale": (0.1, 0.5), "causal": (True, False)}.items():
        number = torch.tensor(others[0])
        for value in (*others, others[0]):
            number.fill_(value)
            assert same(both({**GOOD, name: number}), both({**GOOD, name: value}))


NEGATED = "is a negated view; it must be a tensor of its own"
WORSE: list[tuple[dict[str, Any], str]] = [
    *BAD,
    *(({name: torch._neg_view(GOOD[name])}, f"{name} {NEGATED}") for name in ("q", "k_cache", "v_cache")),
    ({"out": 0}, "out is a int; it must be a torch.Tensor"),
    ({"out": GOOD["q"][:, :1]}, "shape (3, 1, 4, 16) on cpu; it must be torch.bfloat16 of shape (3, 2, 4, 16) on cpu"),
    ({"out": GOOD["q"].half()}, "out is torch.float16 of shape (3, 2, 4, 16) on cpu; it must be torch.bfloat16"),
]


@pytest.mark.parametrize(("change", "says"), WORSE, ids=[says for _, says in WORSE])
def test_bad_input_is_named_beside_a_known_call(known: list[Any], change: dict[str, Any], says: str) -> None:
    for _ in range(2):
        both(GOOD)
    assert known
    for _ in range(2):
        with pytest.raises(flashtile.InvalidProblem) as error:
            both({**GOOD, **change})
        assert says in str(error.value)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("change", ["a band", "packed", "alibi", "a prefix"])
def test_results_are_written_where_the_caller_wants_them(known: list[Any], change: str, backend: str) -> None:
    """The first time and then, side by side or not, in the queries' own place, and where a mode looks; not with gradients."""
    if backend == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    call = {**GOOD, **CHANGES[change], "options": flashtile.Options(backend=backend)}
    want, _ = both(call)
    apart, queries = torch.empty(*want.shape, 2, dtype=want.dtype)[..., 0], torch.empty_like(call["q"])
    for place in (torch.empty_like(want), apart, queries):
        for _ in range(2):
            own = {"q": place.copy_(call["q"])} if place is queries else {}
            version = place._version
            assert both({**call, **own, "out": place})[0] is place
            assert torch.equal(place, want)
            assert place._version > version
    rows = call["q"].clone().requires_grad_()
    with pytest.raises(flashtile.NotSupported, match="out is given, and gradients are wanted"):
        both({**call, "q": rows, "out": torch.empty_like(want)})
    with pytest.raises(flashtile.NotSupported, match="out is given, and gradients are wanted"):
        both({**call, "out": torch.empty_like(want).requires_grad_()})
    with Seen():
        assert torch.equal(both({**call, "out": apart.fill_(torch.nan)})[0], want)
    explained = {name: value for name, value in call.items() if name not in ("shared_prefix", "return_lse")}
    assert problem_of(**explained, out=apart) == problem_of(**explained)


def test_a_known_call_whose_numbers_are_bad_says_so(known: list[Any]) -> None:
    call = {**GOOD, "seqused_k": GOOD["seqused_k"].clone(), "page_table": GOOD["page_table"].clone()}
    for _ in range(2):
        both(call)
    call["seqused_k"][1] = 400
    with pytest.raises(flashtile.InvalidProblem, match=r"seqused_k\[1\] is 400"):
        both(call)
    call["seqused_k"][1] = 3
    call["page_table"][0, 2] = -7
    with pytest.raises(flashtile.InvalidProblem, match="names page -7"):
        both(call)
    assert len(known) == 3


def test_whoever_wants_to_see_a_known_call_does(known: list[Any]) -> None:
    for _ in range(2):
        both(GOOD)
    with Seen() as seen:
        both(GOOD)
    assert "flashtile.attention_cached.default" in seen.names
    with pytest.raises(flashtile.NotSupported, match=r"within torch\.func"):
        torch.func.vmap(lambda q: flashtile.attention_cached(**{**GOOD, "q": q}))(GOOD["q"][None])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(GOOD["q"].clone(), torch.ones_like(GOOD["q"]))
        with pytest.raises(flashtile.NotSupported, match="attention_cached by q"):
            both({**GOOD, "q": dual})
    q = GOOD["q"].clone().requires_grad_()
    assert both({**GOOD, "q": q})[0].grad_fn is not None
    with torch.no_grad():
        assert same(both({**GOOD, "q": q}), both(GOOD))
    with pytest.raises(flashtile.NotSupported, match="k_cache requires a gradient"):
        both({**GOOD, "k_cache": GOOD["k_cache"].clone().requires_grad_()})
    assert len(known) == 3  # the second, and those under no_grad


def test_the_negation_of_a_known_predicates_tensor_is_seen(known: list[Any]) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    lengths, call = torch.tensor([40, 2, 9], dtype=torch.int32), {**GOOD, "options": flashtile.Options(backend="triton")}
    whole = {turn: both({**call, "mask": flashtile.Prefix(lengths * turn) & flashtile.Band(right=0)}) for turn in (1, -1)}
    assert not same(whole[1], whole[-1])
    for _ in range(2):
        assert same(both({**call, "mask": flashtile.Prefix(lengths) & flashtile.Band(right=0)}), whole[1])
    negated = torch._neg_view(lengths)
    assert same(both({**call, "mask": flashtile.Prefix(negated) & flashtile.Band(right=0)}), whole[-1])


def test_threads_share_what_is_known(known: list[Any]) -> None:
    calls = [{**GOOD, "q": GOOD["q"] * factor, "options": flashtile.Options(backend="cpu")} for factor in range(1, 9)]
    want = [both(call) for call in calls]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(both, calls * 10))
    assert all(same(one, want[i % 8]) for i, one in enumerate(made))


# -- appends --------------------------------------------------------------------------------------------------------------


def new_rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(3, count, 2, 16, generator=generator).bfloat16() for _ in "kv")  # pyright: ignore


def pools() -> dict[str, torch.Tensor]:
    return {name: GOOD[name].clone() for name in ("k_cache", "v_cache")}


ANGLES = torch.linspace(0, 3, 304)[:, None] * torch.linspace(0.1, 1, 8)
ROTARY = (ANGLES.cos().bfloat16(), ANGLES.sin().bfloat16())


@pytest.mark.parametrize("pair", [iter, torch.stack], ids=["iterator", "tensor"])
def test_what_is_no_pair_of_new_rows_is_named_beside_a_known_call(known: list[Any], pair: Callable[[Any], Any]) -> None:
    some, new = pools(), new_rows(2)
    for _ in range(2):
        both({**GOOD, **some, "append": new})
    with pytest.raises(flashtile.InvalidProblem, match=r"append is a \w+; it must be \(k, v\)"):
        both({**GOOD, **some, "append": pair(new)})
    assert len(known) == 1


@pytest.mark.parametrize("rotary", [None, ROTARY, (*ROTARY, True)], ids=["plain", "rotary", "interleaved"])
def test_a_known_call_appends(known: list[Any], rotary: Any) -> None:
    results: list[tuple[Any, ...]] = []
    for forgets in (False, False, True):
        some = pools()
        if forgets:
            flashtile.cache_clear()
        made = both({**GOOD, **some, "append": new_rows(2, len(results)), "rotary": rotary})
        results.append((*made, *some.values()))
    assert len(known) == 1
    some = pools()
    made = both({**GOOD, **some, "append": new_rows(2, 1), "rotary": rotary})
    assert len(known) == 2
    assert all(map(torch.equal, results[1], (*made, *some.values())))
    version = some["k_cache"]._version
    both({**GOOD, **some, "append": new_rows(2, 1), "rotary": rotary})
    assert some["k_cache"]._version > version
    before = {name: pool.clone() for name, pool in some.items()}
    beyond = GOOD["seqused_k"] + torch.tensor([0, 300, 0], dtype=torch.int32)
    with pytest.raises(flashtile.InvalidProblem):
        both({**GOOD, **some, "append": new_rows(2), "rotary": rotary, "seqused_k": beyond})
    assert all(torch.equal(pool, before[name]) for name, pool in some.items()), "nothing is written for a call that fails"


@pytest.mark.parametrize("packed", [False, True])
def test_the_kernel_of_an_append_says_how_long_items_are(known: list[Any], packed: bool) -> None:
    """Of more items than it looks at together; the first call adds up by itself."""
    pytest.importorskip("triton", reason="Triton is not installed")
    generator = torch.Generator().manual_seed(5)
    items, options = 70, flashtile.Options(backend="triton")
    used = torch.randint(0, 6, (items,), generator=generator, dtype=torch.int32)
    counts = torch.randint(0, 3, (items,), generator=generator, dtype=torch.int32) if packed else used * 0 + 2
    starts = torch.cat([used[:1] * 0, counts.cumsum(0, dtype=torch.int32)])
    empty = [torch.full((items, 8, 1, 16), torch.nan) for _ in "kv"]
    for i, length in enumerate(used.tolist()):
        for pool in empty:
            pool[i, :length] = torch.randn(length, 1, 16, generator=generator)
    shape = (int(starts[-1]),) if packed else (items, 2)
    q, k, v = (torch.randn(*shape, heads, 16, generator=generator) for heads in (2, 1, 1))
    results: list[tuple[torch.Tensor, ...]] = []
    for backend in (options, options, flashtile.Options(backend="cpu")):
        some = [pool.clone() for pool in empty]
        how: dict[str, Any] = dict(seqused_k=used, causal=True, append=(k, v), options=backend)
        results.append((flashtile.attention_cached(q, *some, cu_seqlens_q=starts if packed else None, **how), *some))
    assert len(known) == 1
    first, second, truth = results
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))
    torch.testing.assert_close(second, truth, rtol=1e-5, atol=1e-6, equal_nan=True)


HOW: dict[str, Callable[[], dict[str, Any]]] = {
    "by lengths": lambda: {"page_table": GOOD["page_table"], "seqused_k": GOOD["seqused_k"]},
    "by lengths of 64 bits": lambda: {"page_table": GOOD["page_table"], "seqused_k": GOOD["seqused_k"].long()},
    "by slots": lambda: {"slots": torch.tensor([[5, 6], [-1, 40], [41, 900]])},
    "by slots of 32 bits": lambda: {"slots": torch.tensor([[5, 6], [-1, 40], [41, 900]], dtype=torch.int32)},
    "rotated": lambda: {"page_table": GOOD["page_table"], "seqused_k": GOOD["seqused_k"], "rotary": ROTARY, "q": GOOD["q"]},
}


@pytest.mark.parametrize("scale", [0.5, torch.ones(2), torch.ones(3, 2)], ids=["number", "heads", "items"])
@pytest.mark.parametrize("how", ["by lengths", "by slots"])
def test_appends_beside_scales_are_known(monkeypatch: pytest.MonkeyPatch, scale: Any, how: str) -> None:
    calls: list[Any] = []
    run: Callable[..., Any] = appends.write_again
    monkeypatch.setattr(appends, "write_again", lambda *given: calls.append(given) or run(*given))
    flashtile.cache_clear()
    some = {name: pool.nan_to_num().to(torch.int8) for name, pool in pools().items()}
    for _ in range(2):
        flashtile.append_to_cache(*new_rows(2), **some, **HOW[how](), k_scale=scale, v_scale=scale)
    assert len(calls) == 1


@pytest.mark.parametrize("how", HOW.values(), ids=list(HOW))
def test_appends_that_are_known_write_what_they_write_anew(how: Callable[[], dict[str, Any]]) -> None:
    def written(seed: int) -> tuple[Any, ...]:
        some = pools()
        return (flashtile.append_to_cache(*new_rows(2, seed), **some, **how()), *some.values())

    flashtile.cache_clear()
    written(0)
    assert len(appends._KNOWN) == 1
    made = written(1)
    assert len(appends._KNOWN) == 1
    flashtile.cache_clear()
    for one, other in zip(made, written(1), strict=True):
        assert one is other or torch.equal(one, other)


def test_known_appends_look_at_numbers_and_gradients() -> None:
    flashtile.cache_clear()
    rows, some = new_rows(2), pools()
    call: dict[str, Any] = {**some, "page_table": GOOD["page_table"], "seqused_k": GOOD["seqused_k"].clone()}
    for _ in range(2):
        flashtile.append_to_cache(*rows, **call)
    version = some["v_cache"]._version
    flashtile.append_to_cache(*rows, **call)
    assert some["v_cache"]._version > version
    call["seqused_k"][2] = 303
    with pytest.raises(flashtile.InvalidProblem, match="append needs row 304"):
        flashtile.append_to_cache(*rows, **call)
    call["seqused_k"][2] = 0
    with pytest.raises(flashtile.NotSupported, match="tensors that require gradients"):
        flashtile.append_to_cache(rows[0].clone().requires_grad_(), rows[1], **call)
    with pytest.raises(flashtile.InvalidProblem, match="expanded"):
        flashtile.append_to_cache(*rows, **{**call, "k_cache": some["k_cache"][:1].expand(95, -1, -1, -1)})
    for names, pair in {"k": (torch._neg_view(rows[0]), rows[1]), "v": (rows[0], torch._neg_view(rows[1]))}.items():
        with pytest.raises(flashtile.InvalidProblem, match=f"^{names} {NEGATED}"):
            flashtile.append_to_cache(*pair, **call)
    slots = torch.tensor([[5, 6], [-1, 40], [41, 900]])
    for _ in range(2):
        flashtile.append_to_cache(*rows, **some, slots=slots)
    with pytest.raises(flashtile.InvalidProblem, match="slots names 9999"):
        flashtile.append_to_cache(*rows, **some, slots=slots.where(slots != 900, 9999))
    with Seen() as seen:
        flashtile.append_to_cache(*rows, **call)
    assert "flashtile.append_to_cache.default" in seen.names
