"""A cache under torch.compile(fullgraph=True), and before dispatch modes: operators, and pools that nobody copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from tests.seen import Seen

Given = tuple[torch.Tensor, ...]


def given(place: torch.device, batch: int = 2) -> Given:
    """q, k, v of one token, two pools, a table, lengths."""
    generator = torch.Generator().manual_seed(batch)
    shapes = ((batch, 1, 4, 16), (batch, 1, 2, 16), (batch, 1, 2, 16), (12, 4, 2, 16), (12, 4, 2, 16))
    tensors = [torch.randn(shape, generator=generator).to(place) for shape in shapes]
    table = torch.arange(batch * 3, dtype=torch.int32, device=place).view(batch, 3)
    return *tensors, table, torch.arange(4, 4 + batch, dtype=torch.int32, device=place)


def steps(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *cached: torch.Tensor, backend: str) -> Given:
    """Two tokens, the methods of PagedCache, and the function with all that it takes."""
    k_cache, v_cache, table, used = cached
    options = flashtile.Options(backend=backend)
    cache = flashtile.PagedCache(k_cache, v_cache, table, used).append(k, v, backend=backend)
    out, lse = cache.attention(q, causal=True, return_lse=True, options=options)
    angle = torch.arange(96.0, device=q.device).view(12, 8)
    rotary = (angle.cos(), angle.sin(), True)
    score = (flashtile.Softcap(3.0), flashtile.Alibi(torch.full((4,), 0.1, device=q.device)))
    mask = flashtile.Prefix(used - 3) | flashtile.Band(right=0)
    other = flashtile.attention_cached(
        q, k_cache, v_cache, table, seqused_k=cache.seqused, first_k=used - 3, append=(k, v), rotary=rotary, score=score,
        mask=mask, sink=torch.zeros(4, device=q.device), options=options, out=torch.zeros_like(q),
    )  # fmt: skip
    return out, lse, other, *cache.dense()


def test_a_whole_graph_does_what_eager_calls_do(backend: str, place: torch.device) -> None:
    compiled = torch.compile(steps, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 3):
        some, other = given(place, batch), given(place, batch)
        for got, want in zip(compiled(*some, backend=backend), steps(*other, backend=backend), strict=True):
            assert torch.equal(got, want)
        assert all(torch.equal(one, two) for one, two in zip(some, other, strict=True))


def test_an_exported_program_takes_any_batch() -> None:
    """Nothing takes the example's number of items for a constant, as a tensor's len does."""

    class Steps(torch.nn.Module):
        def forward(self, *some: torch.Tensor) -> Given:
            return steps(*some, backend="cpu")

    items, none = {0: torch.export.Dim("batch", min=1, max=4)}, None
    shapes = ((items, items, items, none, none, items, items),)
    with torch.no_grad():
        program = torch.export.export(Steps(), given(torch.device("cpu"), 3), dynamic_shapes=shapes, strict=False).module()
        for batch in (1, 4):
            some, other = given(torch.device("cpu"), batch), given(torch.device("cpu"), batch)
            for got, want in zip(program(*some), Steps()(*other), strict=True):
                assert torch.equal(got, want)
            assert all(torch.equal(one, two) for one, two in zip(some, other, strict=True))


def test_expanded_scales_in_a_graph() -> None:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *cached: torch.Tensor) -> Any:
        k_cache, v_cache, table, used, k_scale, v_scale = cached
        return flashtile.attention_cached(
            q, k_cache, v_cache, table, seqused_k=used, append=(k, v), k_scale=k_scale, v_scale=v_scale
        )

    made: list[Given] = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        q, k, v, *pools, table, used = given(torch.device("cpu"))
        pools = [pool.to(torch.int8) for pool in pools]
        out = function(q, k, v, *pools, table, used, torch.tensor(0.1).expand(2, 2), torch.tensor([[0.1, 0.3]]).expand(2, 2))
        made.append((out, *pools))
    assert all(torch.equal(one, two) for one, two in zip(*made, strict=True))


def test_packed_items_and_slots_in_a_graph(backend: str, place: torch.device) -> None:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *cached: torch.Tensor) -> torch.Tensor:
        k_cache, v_cache, table, used = cached
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        flashtile.append_to_cache(k, v, k_cache, v_cache, slots=used.long(), backend=backend)
        cu = torch.arange(len(used) + 1, device=q.device, dtype=torch.int32)
        return flashtile.attention_cached(
            q, k_cache, v_cache, table, seqused_k=used, cu_seqlens_q=cu, append=(k, v), causal=True,
            options=flashtile.Options(backend=backend),
        )  # fmt: skip

    some, other = given(place), given(place)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(*some), run(*other))
    assert all(torch.equal(one, two) for one, two in zip(some, other, strict=True))


def test_gradients_through_a_graph() -> None:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *cached: torch.Tensor) -> torch.Tensor:
        k_cache, v_cache, table, used = cached
        out, lse = flashtile.attention_cached(
            q, k_cache, v_cache, table, seqused_k=used, append=(k, v), causal=True, return_lse=True
        )
        return out.sin().sum() + lse.sum()

    made: list[Any] = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        *leaves, k_cache, v_cache, table, used = given(torch.device("cpu"))
        leaves = [t.requires_grad_() for t in leaves]
        made.append((torch.autograd.grad(function(*leaves, k_cache, v_cache, table, used), leaves), k_cache))
    for got, want in zip(made[1][0], made[0][0], strict=True):
        torch.testing.assert_close(got, want)
    assert torch.equal(made[0][1], made[1][1])


def test_operators_are_seen_and_pools_are_written_in_place() -> None:
    some = given(torch.device("cpu"))
    q, k, v, k_cache, v_cache, table, used = some
    with Seen() as called:
        flashtile.attention_cached(q, k_cache, v_cache, table, seqused_k=used, append=(k, v), causal=True)
    wanted = ["flashtile.append_to_cache.default", "flashtile.attention_cached.default"]
    assert called.names == wanted
    assert k_cache._version > 0
    assert torch.equal(k_cache[table[0, 1].long(), 0], k[0, 0])
    schema = torch.ops.flashtile.append_to_cache.default._schema
    assert [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write] == [
        "k_cache",
        "v_cache",
        "k_scale",
        "v_scale",
    ]


def test_a_compiled_append_copies_no_pool() -> None:
    """What the compiler writes calls the operator with the pools themselves, and makes nothing of their size."""
    from torch._inductor.utils import run_and_get_code

    def run(*some: torch.Tensor) -> torch.Tensor:
        q, k, v, k_cache, v_cache, table, used = some
        flashtile.append_to_cache(k, v, k_cache, v_cache, table, seqused_k=used)
        return flashtile.attention_cached(q, k_cache, v_cache, table, seqused_k=used + 1, causal=True)

    some, other = given(torch.device("cpu")), given(torch.device("cpu"))
    made, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), *some)
    torch.testing.assert_close(made, run(*other))
    assert torch.equal(some[3], other[3])
    body = code[code.index("def call") : code.index("runner = ")]
    assert "append_to_cache" in body
    assert "empty_strided_cpu((12, 4, 2, 16)" not in body
    assert "empty_strided_cpu((2, )" in body  # and what is looked for is how it is written


def test_fakes_have_the_shapes_and_strides_of_what_runs(backend: str, place: torch.device) -> None:
    token, *_, k_cache, v_cache, table, used = given(place)

    def run(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, used: torch.Tensor) -> Given:
        return flashtile.attention_cached(
            q, k_cache, v_cache, table, seqused_k=used, return_lse=True, options=flashtile.Options(backend=backend)
        )

    for tokens in (1, 3):
        q = token.expand(2, tokens, 4, 16).transpose(1, 2).contiguous().transpose(1, 2)  # heads before tokens in memory
        real = (q, k_cache, v_cache, table, used)
        with FlopCounterMode(display=False):  # who sees operators sees their strides, of an axis of one place too
            want = run(*real)
        with FakeTensorMode() as mode:
            made = run(*(mode.from_tensor(t) for t in real))
        for got, one in zip(made, want, strict=True):
            assert (got.shape, got.stride(), got.dtype, got.device) == (one.shape, one.stride(), one.dtype, one.device)


def test_wrong_numbers_are_found_in_a_compiled_call() -> None:
    k, v, k_cache, v_cache, table, used = given(torch.device("cpu"))[1:]
    compiled = torch.compile(flashtile.append_to_cache, fullgraph=True, backend="eager")
    with pytest.raises(flashtile.InvalidProblem, match="needs row 12 of an item"):
        compiled(k, v, k_cache, v_cache, table, seqused_k=used + 8)


def test_transforms_within_a_graph_are_refused() -> None:
    """As eager ones are: a gradient by torch.func was zero there, without a word."""
    q, k, v, k_cache, v_cache, table, used = given(torch.device("cpu"))
    calls: list[Any] = [
        lambda q: flashtile.attention_cached(q, k_cache, v_cache, table, seqused_k=used).sum(),
        lambda k: flashtile.attention_cached(q, k_cache.clone(), v_cache, table, seqused_k=used, append=(k, v)).sum(),
    ]
    for call, by in zip(calls, (q, k), strict=True):
        for transform in (torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
            torch.compiler.reset()
            with pytest.raises(flashtile.NotSupported, match=r"attention_cached within torch\.func"):
                torch.compile(transform(call), backend="eager")(by)
