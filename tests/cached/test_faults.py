"""What is wrong is named before anything is written, whichever function of a cache is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashtile
from flashtile.compat import flashinfer

NEW = {"q": torch.randn(2, 1, 2, 32), "k": torch.randn(2, 1, 2, 32), "v": torch.randn(2, 1, 2, 32)}
TABLE = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
USED = torch.tensor([5, 7], dtype=torch.int32)


def ints(*numbers: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


def pools() -> dict[str, torch.Tensor]:
    return {"k_cache": torch.zeros(6, 4, 2, 32), "v_cache": torch.zeros(6, 4, 2, 32)}


def attend(**change: Any) -> Callable[[dict[str, Any]], Any]:
    given = {"q": NEW["q"], "page_table": TABLE, "seqused_k": USED, **change}
    return lambda some: flashtile.attention_cached(**{**some, **given})


def append(**change: Any) -> Callable[[dict[str, Any]], Any]:
    given = {"k": NEW["k"], "v": NEW["v"], "page_table": TABLE, "seqused_k": USED, **change}
    return lambda some: flashtile.append_to_cache(**{**some, **given})


def cache(method: Callable[[flashtile.PagedCache], Any], **change: Any) -> Callable[[dict[str, Any]], Any]:
    given = {"page_table": TABLE, "seqused": USED, **change}
    return lambda some: method(flashtile.PagedCache(some["k_cache"], some["v_cache"], **given))


PACKED = {"k": NEW["k"][:, 0], "v": NEW["v"][:, 0]}
SHARED: dict[str, Any] = {"page_table": ints(0, 1, 2, 1).view(2, 2), "seqused_k": ints(5, 5)}  # both write page 1's row 1
ONE_PLACE = "page_table gives two new keys, of items 0 and 1, one place: page 1, row 1"
COS = torch.ones(6, 16)
BAD: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("append's v is torch.bfloat16", attend(append=(NEW["k"], NEW["v"].bfloat16()))),
    ("append's v is a int", attend(append=(NEW["k"], 3))),
    ("append's v has (heads, head_dim) (2, 16)", attend(append=(NEW["k"], NEW["v"][..., :16]))),
    ("append's k has shape (1, 1, 2, 32) and q (2, 1, 2, 32)", attend(append=(NEW["k"][:1], NEW["v"][:1]))),
    ("append's k is torch.bfloat16 and q is torch.float32", lambda some: attend(
        append=(NEW["k"].bfloat16(), NEW["v"].bfloat16()))({n: t.to(torch.int8) for n, t in some.items()})),
    ("out is expanded", attend(out=NEW["q"][:1].expand(2, 1, 2, 32), append=(NEW["k"], NEW["v"]))),
    ("split is 100", attend(split=100, append=(NEW["k"], NEW["v"]))),
    ("heads_q must be a multiple of heads_kv", attend(q=torch.randn(2, 1, 3, 32), append=(NEW["k"], NEW["v"]))),
    ("first_k[0] is 9", attend(first_k=ints(9, 0), append=(NEW["k"], NEW["v"]))),
    ("needs row 8 of an item", attend(seqused_k=ints(5, 8), append=(NEW["k"], NEW["v"]))),
    ("rotary's cos has 6 rows", attend(rotary=(COS, COS), append=(NEW["k"], NEW["v"]))),
    ("seqused_k holds 4294967299", attend(seqused_k=ints(5, 2**32 + 3, dtype=torch.int64))),
    ("seqused_k holds", append(seqused_k=ints(5, 2**32 + 3, dtype=torch.int64))),
    ("cu_seqlens is [0, 1, 5]", append(**PACKED, cu_seqlens=ints(0, 1, 5))),
    ("cu_seqlens is [0, 3, 1]", append(**PACKED, cu_seqlens=ints(0, 3, 1))),
    ("cu_seqlens is [1, 1, 2]", append(**PACKED, cu_seqlens=ints(1, 1, 2))),
    ("v is torch.bfloat16", append(v=NEW["v"].bfloat16())),
    ("q is a str", append(q="x")),
    ("q has shape (2, 3, 2, 32)", append(q=torch.randn(2, 3, 2, 32), rotary=(COS, COS))),
    ("rotary's cos has 6 rows", append(rotary=(COS, COS))),
    ("rotary's sin is a int", append(rotary=(COS, 3))),
    ("slots is a list", append(seqused_k=None, slots=[0, 1])),
    ("slots names 1000000", append(seqused_k=None, slots=ints(0, 10**6)[:, None])),
    ("slots names -7", append(seqused_k=None, slots=ints(0, -7)[:, None])),
    ("slots names 24", append(seqused_k=None, slots=ints(0, 24)[:, None])),
    ("slots names 9 for tokens 0 and 1", append(seqused_k=None, slots=ints(9, 9)[:, None])),
    ("slots names 9 for tokens 0 and 1", append(**PACKED, seqused_k=None, slots=ints(9, 9))),
    (ONE_PLACE, append(**SHARED)),
    (ONE_PLACE, append(**PACKED, cu_seqlens=ints(0, 1, 2), **SHARED)),
    (ONE_PLACE, append(backend="triton", **SHARED)),
    (ONE_PLACE, attend(append=(NEW["k"], NEW["v"]), **SHARED)),
    (ONE_PLACE, cache(
        lambda one: one.append(NEW["k"], NEW["v"]), page_table=SHARED["page_table"], seqused=SHARED["seqused_k"])),
    ("page_table gives two new keys, of items 0 and 0, one place: page 2, row 3", append(
        k=NEW["k"].expand(2, 5, 2, 32)[:1], v=NEW["v"].expand(2, 5, 2, 32)[:1], page_table=ints(2, 2)[None],
        seqused_k=ints(3))),
    ("cu_seqlens is [0, 1, 5]", append(**PACKED, seqused_k=None, slots=ints(0, 1), cu_seqlens=ints(0, 1, 5))),
    ("cu_seqlens has 0 elements", append(**PACKED, seqused_k=None, slots=ints(0, 1), cu_seqlens=ints())),
    ("needs row 8 of an item", cache(lambda one: one.append(NEW["k"], NEW["v"]), seqused=ints(5, 8))),
    ("cu_seqlens is [0, 1, 5]", cache(lambda one: one.append(PACKED["k"], PACKED["v"], cu_seqlens=ints(0, 1, 5)))),
    ("page_table[0] names page -1", cache(lambda one: one.dense(), page_table=ints(0, -1, 2, 3).view(2, 2))),
    ("page_table[1] names page 50", cache(lambda one: one.dense(), page_table=ints(0, 1, 2, 50).view(2, 2))),
    ("seqused[1] is 9", cache(lambda one: one.dense(), seqused=ints(5, 9))),
    ("first_k[0] is 6", cache(lambda one: one.dense(), first_k=ints(6, 0))),
    ("page_table has shape ()", cache(lambda one: one, page_table=TABLE[0, 0])),
    ("rotary's cos has 0 rows", attend(append=(NEW["k"], NEW["v"]), rotary=(COS[:0], COS[:0]))),
    ("rotary has 1 elements", attend(append=(NEW["k"], NEW["v"]), rotary=(COS,))),
    ("cos has shape (16,); it must be (length, rotary_dim / 2)", attend(append=(NEW["k"], NEW["v"]), rotary=(COS[0], COS[0]))),
    ("sin is 6x8:fp32", attend(append=(NEW["k"], NEW["v"]), rotary=(COS, COS[:, :8]))),
    ("interleaved is 'no'", attend(append=(NEW["k"], NEW["v"]), rotary=(COS.repeat(2, 1), COS.repeat(2, 1), "no"))),
    ("seqused_k has layout torch.sparse_coo", attend(seqused_k=USED.to_sparse(), append=(NEW["k"], NEW["v"]))),
    ("seqused_k has layout torch.sparse_coo", append(seqused_k=USED.to_sparse())),
    ("page_table has layout torch.sparse_coo", attend(page_table=TABLE.to_sparse(), append=(NEW["k"], NEW["v"]))),
    ("page_table has layout torch.sparse_coo", append(page_table=TABLE.to_sparse())),
    ("sink has layout torch.sparse_coo", attend(sink=torch.ones(2).to_sparse(), append=(NEW["k"], NEW["v"]))),
    ("prefix's tensor has layout torch.sparse_coo", attend(mask=flashtile.Prefix(USED.to_sparse()))),
    ("page_table is a negated view", attend(page_table=torch._neg_view(-TABLE), append=(NEW["k"], NEW["v"]))),
    ("page_table is a negated view", append(page_table=torch._neg_view(-TABLE))),
    ("slots is a negated view", append(seqused_k=None, slots=torch._neg_view(ints(0, -5)[:, None]))),
    ("k_scale is a negated view", lambda some: attend(k_scale=torch._neg_view(-torch.ones(2)))(
        {n: t.to(torch.int8) for n, t in some.items()})),
    ("dtype is torch.int8", cache(lambda one: one.dense(torch.int8))),
    ("dtype is 'float16'", cache(lambda one: one.dense("float16"))),  # pyright: ignore[reportArgumentType]
    ("first_k is a list", cache(lambda one: one, first_k=[0, 1])),
    ("first_k has 3 elements and the batch 2", cache(lambda one: one, first_k=ints(0, 0, 0))),
    ("first_k has 1 elements and the batch 2", cache(lambda one: one, first_k=ints(0))),
    ("seqused has 1 elements and the batch 2", cache(lambda one: one, seqused=ints(0))),
]  # fmt: skip


@pytest.mark.parametrize(("says", "call"), BAD, ids=[f"{i}: {says}" for i, (says, _) in enumerate(BAD)])
def test_what_is_wrong_is_named_and_nothing_is_written(says: str, call: Callable[[dict[str, Any]], Any]) -> None:
    some = pools()
    with pytest.raises(flashtile.InvalidProblem) as error:
        call(some)
    assert says in str(error.value)
    assert all((t == 0).all() and t._version == 0 for t in some.values())


@pytest.mark.parametrize("stored", [False, True], ids=["plain", "stored"])
@pytest.mark.parametrize("packed", [False, True])
def test_batches_of_no_item(backend: str, place: torch.device, packed: bool, stored: bool) -> None:
    shape = (3, 2, 32) if packed else (0, 1, 2, 32)
    q, k, v = (torch.randn(shape, device=place) for _ in "qkv")
    given: dict[str, Any] = {"seqused_k": torch.zeros(0, dtype=torch.int32, device=place)}
    pools = [torch.zeros(6, 4, 2, 32, device=place).to(torch.int8 if stored else q.dtype) for _ in "kv"]
    scales: dict[str, Any] = {"k_scale": 0.5, "v_scale": torch.ones(0, 2, device=place)} if stored else {}
    tables = torch.zeros(0, 2, dtype=torch.int32, device=place)
    cu = torch.zeros(1, dtype=torch.int32, device=place) if packed else None
    flashtile.append_to_cache(k, v, pools[0], pools[1], tables, **given, **scales, cu_seqlens=cu, backend=backend)
    options = flashtile.Options(backend=backend)
    for prefix in (0, 4):
        for leaf in (q, q.clone().requires_grad_()):
            out = flashtile.attention_cached(
                leaf, *pools, tables, **given, **scales, cu_seqlens_q=cu, shared_prefix=prefix, options=options
            )
            assert out.shape == shape
            assert (out == 0).all()
            assert out.requires_grad == leaf.requires_grad
    assert all((t == 0).all() for t in pools)
    if packed and stored:  # slots say where tokens go, whoever's they are
        scales["v_scale"] = torch.ones(2, device=place)
        slots = torch.tensor([23, -1, 5], device=place)
        flashtile.append_to_cache(k, v, *pools, slots=slots, **scales, cu_seqlens=cu, backend=backend)
        for pool, new, scale in ((pools[0], k, 0.5), (pools[1], v, 1.0)):
            assert torch.equal(pool.flatten(0, 1)[[23, 5]].float(), (new[[0, 2]] / scale).round())
            assert (pool != 0).any(-1).sum() <= 4


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_nothing_is_cast_under_autocast(dtype: torch.dtype, compiles: bool) -> None:
    """Nor is float16 refused, which torch.cat does under bfloat16's: of latents, prefixes, gradients and states."""
    q, *new, qv = (t.to(dtype) for t in (*NEW.values(), torch.randn(2, 1, 2, 32)))
    some = {name: torch.randn(pool.shape).to(dtype) for name, pool in pools().items()}
    table = torch.tensor([[0, 1], [0, 3]], dtype=torch.int32)

    def run(q: torch.Tensor) -> list[torch.Tensor]:
        changes: list[dict[str, Any]] = [{}, {"append": new}, {"qv": qv}, {"shared_prefix": 4, "page_table": table}]
        out, lse = attend(q=q, return_lse=True)(some)
        merged = flashinfer.merge_state(out[:, 0], lse[..., 0], -out[:, 0], lse[..., 0] - 1)[0]
        return [merged, *(attend(q=q, **change)(some) for change in changes)]

    made: list[Any] = []
    for casts in (False, True):
        for leaf in (q.clone(), q.clone().requires_grad_()):
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                outs = (torch.compile(run, backend="aot_eager") if compiles and casts else run)(leaf)
            made += outs if not leaf.requires_grad else torch.autograd.grad(sum(out.sum() for out in outs), leaf)
    half = len(made) // 2
    for got, want in zip(made[half:], made[:half], strict=True):
        assert got.dtype is dtype
        assert torch.equal(got, want)


def test_negated_lengths_are_resolved() -> None:
    """Kernels read memory, which holds the numbers before the negation; those of dense keys do, too."""
    pytest.importorskip("triton", reason="Triton is not installed")
    some, first, cu = {n: torch.randn(t.shape) for n, t in pools().items()}, ints(1, 2), ints(0, 1, 2)
    options = flashtile.Options(backend="triton")
    how = {"q": NEW["q"][:, 0], "options": options, "append": tuple(PACKED.values())}
    dense, starts = [some["k_cache"][:2]] * 3, ints(0, 5, 8)
    made = [
        (
            attend(seqused_k=turn(USED), first_k=turn(first), cu_seqlens_q=turn(cu), **how)(
                {n: t.clone() for n, t in some.items()}
            ),
            flashtile.attention(*dense, seqused_q=turn(first), seqused_k=turn(first), options=options),
            flashtile.attention_varlen(*(t.flatten(0, 1) for t in dense), cu_seqlens_q=turn(starts), options=options),
        )
        for turn in (torch.clone, lambda t: torch._neg_view(-t), torch.clone)
    ]
    assert all(torch.equal(one, other) for turned in made[1:] for one, other in zip(turned, made[0], strict=True))


@pytest.mark.parametrize("backend", [None, "triton"])
def test_what_inference_mode_made_is_not_written_outside_of_it(backend: str | None) -> None:
    """Kernels would write it before autograd refuses: not the first time, nor where the layout is known."""
    if backend:
        pytest.importorskip("triton", reason="Triton is not installed")
    options = flashtile.Options(backend=backend)
    with torch.inference_mode():
        some, out = pools(), torch.zeros(2, 1, 2, 32)
    new = {n: NEW[n] for n in "kv"}
    places: dict[str, Any] = {"page_table": TABLE, "seqused_k": USED}
    calls: list[tuple[str, Callable[..., Any]]] = [
        ("k_cache", lambda some: flashtile.append_to_cache(**new, **some, **places, backend=backend)),
        ("k_cache", lambda some: attend(append=(NEW["k"], NEW["v"]), options=options)(some)),
        ("out", lambda _: attend(out=out, options=options)(pools())),
    ]
    for name, call in calls:
        for knows in (False, True):
            with pytest.raises(flashtile.InvalidProblem, match=f"{name} is an inference tensor") as error:
                call(some)
            assert "clone()" in str(error.value)
            assert all((t == 0).all() for t in (out, *some.values()))
            for _ in range(0 if knows else 2):  # of others, to be known by
                call(pools()) if name != "out" else attend(out=torch.zeros(2, 1, 2, 32), options=options)(pools())
    with torch.inference_mode():
        for _, call in calls:
            call(some)
    assert all((t[1, 1] != 0).all() for t in some.values())


def test_a_known_append_is_looked_at_again() -> None:
    """Tables change between calls of one layout; -1 twice is no place."""
    some, table, used = pools(), TABLE.clone(), USED.clone()
    new = {n: NEW[n] for n in "kv"}
    for _ in range(3):
        flashtile.append_to_cache(**new, **some, page_table=table, seqused_k=used)
        attend(page_table=table, seqused_k=used, append=(NEW["k"], NEW["v"]))(some)
        flashtile.append_to_cache(**new, **some, slots=ints(-1, -1)[:, None])
    table.copy_(SHARED["page_table"])
    used.fill_(5)
    before = {n: t.clone() for n, t in some.items()}
    places = {"page_table": table, "seqused_k": used}
    for call in (append(**places), attend(append=(NEW["k"], NEW["v"]), **places)):
        with pytest.raises(flashtile.InvalidProblem, match=ONE_PLACE):
            call(some)
    with pytest.raises(flashtile.InvalidProblem, match="slots names 3 for tokens 0 and 1"):
        flashtile.append_to_cache(**new, **some, slots=ints(3, 3)[:, None])
    assert all(torch.equal(t, some[n]) for n, t in before.items())
