"""What ranks send: of a window its halo, and over a mesh of two axes heads along one and keys along the other."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import flashtile
from flashtile import Band, Dilated, Document, Dropout, InvalidProblem, NotSupported
from flashtile.distributed import Context, attention, attention_varlen, shard
from flashtile.integrations.diffusers import attention_forward
from flashtile.torch.context import attention as of_attention
from flashtile.torch.context import gathered, heads
from flashtile.torch.context import varlen as of_varlen
from flashtile.torch.context.agree import agree
from flashtile.torch.context.collectives import Gathering, Returning, ToHeads, ToTokens
from flashtile.torch.context.context import head_groups
from flashtile.torch.execute.prepared import PreparedCall
from tests.distributed.cases import Case, data, judge
from tests.distributed.checks import shards


def a_window_fetches_its_halo_alone() -> None:
    """What ranks send, forward and backward, is what `explain` says: no more than the window beyond each run of queries."""
    ranks, n, d = dist.get_world_size(), 64, 16
    whole = [
        torch.randn(1, n * ranks, heads, d, generator=torch.Generator().manual_seed(i)) for i, heads in enumerate((4, 2, 2))
    ]
    cu = torch.tensor([0, 50, n * ranks], dtype=torch.int32)
    row = 2 * 2 * d * 4
    laws: list[tuple[Any, dict[str, Any], int]] = [
        ("contiguous", {"window": (9, 0)}, 9), ("zigzag", {"window": (9, 0)}, 2 * 9), ("contiguous", {"window": (5, 3)}, 5 + 3),
        ("contiguous", {"mask": Band(5, -2)}, 5),
    ]  # fmt: skip
    for (layout, how, most), packed in product(laws, (False, True)):
        context, axis = Context(method="allgather", layout=layout), 1 - packed
        if packed and how.get("window") == (5, 3):
            continue  # documents are then hidden by a mask, as `attention` hides them
        given, starts = ([t[0] for t in whole], [cu]) if packed else (whole, [])
        leaves = [t.clone().requires_grad_() for t in given]
        expected = (flashtile.attention_varlen if packed else flashtile.attention)(*leaves, *starts, **how)
        truth = torch.autograd.grad(expected.square().sum(), leaves)
        local = [shard(t, context, axis).requires_grad_() for t in given]
        with counted() as sent:
            out = (attention_varlen if packed else attention)(*local, *starts, context=context, **how)
            grads = torch.autograd.grad(out.square().sum(), local)
        for mine, of_one in zip((out, *grads), (expected, *truth), strict=True):
            torch.testing.assert_close(mine, shard(of_one, context, axis), rtol=1e-5, atol=1e-5)
        assert len(sent) == 2
        assert max(sent) <= most * row
        both: list[Any] = [None] * ranks
        dist.all_gather_object(both, sent)
        if not packed and "window" in how:
            forward, backward = (max(of) for of in zip(*both, strict=True))
            assert forward > 0
            said = f"the halo of its window alone: a rank sends {forward:,} bytes forward, {backward:,} backward"
            assert said in context.explain(*local, **how)
            assert Context(layout=layout).explain(*local, **how).startswith("allgather")
    assert "halo" not in Context(method="allgather").explain(*(t[:, :n] for t in whole), window=(n * ranks, 0))


def auto_takes_what_sends_less_where_work_is_even() -> None:
    """What two H200 measured, of 32 and 8 heads: all-gather is faster. Over four ranks it would send more."""
    ranks, bf16 = dist.get_world_size(), torch.bfloat16
    few = [torch.empty(1, 16384 // ranks, heads, 128, dtype=bf16, device="meta") for heads in (32, 8, 8)]
    equal = [torch.empty(1, 16384 // ranks, 32, 128, dtype=bf16, device="meta") for _ in range(3)]
    method, said = ("allgather", "it sends fewer bytes") if ranks == 2 else ("ulysses", "bytes in all")
    laws: list[tuple[list[torch.Tensor], Any, dict[str, Any], Any, str]] = [
        (few, "zigzag", {"causal": True}, method, said),
        (few, "zigzag", {}, method, said),
        (few, "contiguous", {"causal": True}, "ulysses", "would have 1.50 times" if ranks == 2 else "bytes in all"),
        (few, "zigzag", {"causal": True, "window": (1023, 0)}, "allgather", "a window's halo"),
        (equal, "zigzag", {"causal": True}, "ulysses", "bytes in all"),
    ]  # fmt: skip
    for given, layout, how, method, said in laws:
        told = Context(layout=layout).explain(*given, **how)
        assert told.startswith(method), told
        assert f"  auto asks {method} first: " in told, told
        assert said in told, told
        assert "auto asks" not in Context(method=method, layout=layout).explain(*given, **how)
    assert Context(layout="striped").explain(*few, causal=True).startswith("ulysses")
    window = {"causal": True, "window": (1023, 0), "dropout": Dropout(0.1, 7)}  # which fetches no halo beside dropout
    assert "a window's halo" not in Context(layout="zigzag").explain(*few, **window)

    context, q, k, v = Context(layout="zigzag"), *shards(n=16, heads_q=8, heads_kv=2)
    starts, used = (torch.tensor(of, dtype=torch.int32) for of in ([0, 5, 16 * ranks], [9 * ranks]))
    ids = torch.zeros(1, 16, dtype=torch.int32)
    for call, method in (
        (lambda: attention(q, k, v, context=context, causal=True), "allgather"),
        (lambda: attention(q, k, v, context=context), "allgather"),
        (lambda: attention(q, k, v, context=Context(), causal=True), "ulysses"),
        (lambda: attention(q, k, v, context=Context()), "allgather"),
        (lambda: attention(q, k, v, context=context, causal=True, mask=Document(ids)), "ulysses"),
        (lambda: attention(q, k, v, context=context, causal=True, seqused_q=used, seqused_k=used), "ulysses"),
        (lambda: attention_varlen(q[0], k[0], v[0], starts, context=context, causal=True), "ulysses"),
        (lambda: attention(q, k, v, context=context, causal=True, window=(5, 0)), "allgather"),
        (lambda: attention(q, k, v, context=Context(), causal=True, window=(5, 0), dropout=Dropout(0.5, 7)), "ulysses"),
    ):  # fmt: skip
        with taken() as methods:
            call()
        assert methods == [method]


@contextmanager
def taken() -> Generator[list[str]]:
    """The methods that calls agree on."""
    methods = list[str]()

    def noting(context: Any, told: dict[str, str], *some: Any, **more: Any) -> Any:
        methods.append(told["method"])
        return agree(context, told, *some, **more)

    with patch.object(of_attention, "agree", noting), patch.object(of_varlen, "agree", noting):
        yield methods


def degrees_of_diffusers() -> None:
    """Its backend of shards, by ring, Ulysses and both; tests/integrations/test_diffusers.py compares the names with theirs."""
    d = data(torch.float32, 8)
    whole = [t.clone().requires_grad_() for t in (d.q, d.k, d.v)]
    expected = flashtile.attention(*whole)
    truth = torch.autograd.grad(expected, whole, d.dout)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    one = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    for ring, ulysses in ((4, 1), (1, 4), (2, 2)):
        degrees = SimpleNamespace(ring_degree=ring, ulysses_degree=ulysses, _mesh=mesh, _ring_mesh=one, _ulysses_mesh=one)
        config = SimpleNamespace(context_parallel_config=degrees)
        local = [shard(t.detach(), Context()).requires_grad_() for t in whole]
        out = attention_forward(local[0], local[1], local[2], _parallel_config=config)
        found = torch.autograd.grad(out, local, shard(d.dout, Context()))
        for mine, of_one in zip((out, *found), (expected, *truth), strict=True):
            torch.testing.assert_close(mine, shard(of_one, Context()), rtol=1e-5, atol=1e-5)
        torch.manual_seed(7)
        dropped = attention_forward(local[0], local[1], local[2], dropout_p=0.5, _parallel_config=config)
        torch.manual_seed(7)
        of_one = shard(flashtile.attention(*whole, dropout=flashtile.Dropout(0.5)), Context())
        torch.testing.assert_close(dropped, of_one, rtol=1e-5, atol=1e-5)
        with pytest.raises(NotSupported, match="attn_mask is given beside context parallelism"):
            attention_forward(
                local[0], local[1], local[2], attn_mask=torch.ones(8, 8, dtype=torch.bool), _parallel_config=config
            )


@contextmanager
def counted() -> Generator[list[int]]:
    """The bytes of each exchange that leave this rank, and that nothing else is sent but what ranks agree on."""
    sent, before = list[int](), dist.batch_isend_irecv

    def counting(operations: list[dist.P2POp]) -> Any:
        sent.append(sum(of.tensor.nbytes for of in operations if of.op is dist.isend))
        return before(operations)

    with patch.object(dist, "batch_isend_irecv", counting), patch.object(dist, "all_to_all_single", None):
        yield sent


def noting(log: list[str], home: Any, name: str, word: Callable[..., str]) -> Any:
    """While it is entered, calls of home's function are written into the log, in a word made of their arguments."""
    plain = getattr(home, name)

    def note(*args: Any, **named: Any) -> Any:
        log.append(word(*args))
        return plain(*args, **named)

    return patch.object(home, name, note)


def keys_are_under_way_while_others_are_attended() -> None:
    """Calls wait for the keys that they see, and their gradients go before the next is made. By groups the same bits."""
    log: list[str] = []
    noted = partial(noting, log)
    notes = (
        noted(Gathering, "__init__", lambda *_: "begin"), noted(Gathering, "arrived", lambda *_: "here"),
        noted(PreparedCall, "forward", lambda *_: "attend"), noted(PreparedCall, "gradients", lambda *_: "differentiate"),
        noted(Returning, "begin", lambda _, group, stage, *__: f"return {group}.{stage}"),
        noted(Returning, "arrived", lambda _, group, *__: f"sum {group}"),
    )  # fmt: skip
    context, d = Context(None, "allgather", "zigzag"), data(torch.bfloat16, 4)
    local = [shard(t, context) for t in (d.q, d.k, d.v)]
    made: dict[int, list[torch.Tensor]] = {}
    for groups in (1, 2, 4):
        with in_groups(groups), ExitStack() as stack:
            for note in notes:
                stack.enter_context(note)
            log.clear()
            leaves = [t.detach().requires_grad_() for t in local]
            out = attention(*leaves, context=context, causal=True)
            forward = ["begin"] * groups + ["here", "attend", "here", "attend"] * groups
            assert log == forward, log
            (alone,) = torch.autograd.grad(out.sum(), leaves[0], retain_graph=True)  # without the gradients of keys
            for _ in range(2):
                log.clear()
                made[groups] = [out, *torch.autograd.grad(out.sum(), leaves, retain_graph=True)]
                assert torch.equal(made[groups][1], alone)
        backward = list[str]()
        for i in range(groups)[::-1]:
            came = [f"sum {i + 1}"] * (i + 1 < groups)
            backward += ["differentiate", f"return {i}.1", *came, "differentiate", f"return {i}.0"]
        assert log == [*backward, "sum 0"], log
        for one, other in zip(made[1], made[groups], strict=True):
            assert torch.equal(one, other)
    for feature in ("dropout", "alibi", "bias", "sink", "documents", "packed causal", "packed window"):
        with in_groups(2):
            assert not judge(Case("allgather", "zigzag", feature), context, 0), feature
            if feature != "bias":
                assert not judge(Case("ulysses", "contiguous", feature), Context(None, "ulysses"), 0), feature
    laws = [(8192, 8, 1, 1), (32768, 8, 2, 4), (65536, 8, 4, 4), (32768, 2, 1, 1), (65536, 1, 1, 1)]  # of 32 heads
    for rows, heads_kv, groups, by_heads in laws:
        q, k = (torch.empty(1, rows, heads, 128, device="meta") for heads in (32, heads_kv))
        assert head_groups("allgather", q, k, context) == groups
        assert head_groups("ulysses", q, k, context) == by_heads
    assert head_groups("allgather", d.q, d.k, context) == head_groups("ulysses", d.q, d.k, context) == 1


@contextmanager
def in_groups(groups: int) -> Generator[None]:
    """Heads are attended in so many groups, or in as many as a rank has."""

    def as_asked(method: str, q: torch.Tensor, k: torch.Tensor, context: Context) -> int:
        return min(groups, max(k.shape[2] // (context.ranks if method == "ulysses" else 1), 1))

    with patch.object(gathered, "head_groups", as_asked), patch.object(heads, "head_groups", as_asked):
        yield


def heads_by_groups_are_under_way_while_others_are_computed() -> None:
    """The same bits as at once, in every layout; a group's results leave before the next is computed."""
    log: list[str] = []
    noted = partial(noting, log)
    notes = (
        noted(ToHeads, "__init__", lambda *_: "begin"), noted(ToHeads, "arrived", lambda *_: "here"),
        noted(ToTokens, "__init__", lambda *_: "leave"), noted(ToTokens, "arrived", lambda *_: "there"),
        noted(PreparedCall, "forward", lambda *_: "attend"), noted(PreparedCall, "gradients", lambda *_: "differentiate"),
    )  # fmt: skip
    d = data(torch.bfloat16, 8)

    def in_turn(compute: str, groups: int) -> list[str]:
        return ["here", compute, "leave"] + ["here", compute, "leave", "there"] * (groups - 1) + ["there"]

    for layout in ("contiguous", "zigzag", "striped"):
        context = Context(None, "ulysses", layout)
        local, made = [shard(t, context) for t in (d.q, d.k, d.v)], dict[int, list[torch.Tensor]]()
        for groups in (1, 2, 4):
            with in_groups(groups), ExitStack() as stack:
                for note in notes:
                    stack.enter_context(note)
                log.clear()
                leaves = [t.detach().requires_grad_() for t in local]
                out = attention(*leaves, context=context, causal=True)
                assert log == ["begin"] * groups + in_turn("attend", groups), log
                for _ in range(2):
                    log.clear()
                    made[groups] = [out, *torch.autograd.grad(out.sum(), leaves, retain_graph=True)]
                backward, turns = ["begin"], in_turn("differentiate", groups)
                for word in turns:
                    backward += ["begin", word] if word == "here" and backward.count("begin") < groups else [word]
                assert log == backward, log
            for one, other in zip(made[1], made[groups], strict=True):
                assert torch.equal(one, other)


def heads_over_one_axis_of_a_mesh_and_positions_over_the_other() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "gpus"))
    laws: list[tuple[Any, Any, str, torch.dtype, int]] = [
        ("usp", "zigzag", "documents", torch.float32, 4), ("usp", "contiguous", "window", torch.float32, 2),
        ("usp", "zigzag", "causal", torch.bfloat16, 4), ("usp", "zigzag", "packed window", torch.float32, 4),
        ("usp", "zigzag", "alibi", torch.float32, 4), ("usp_ring", "zigzag", "seqused", torch.float32, 4),
        ("usp_ring", "contiguous", "sink", torch.float32, 8), ("usp_ring", "zigzag", "packed causal", torch.float32, 4),
        ("usp", "zigzag", "dropout", torch.float32, 4), ("usp_ring", "contiguous", "dropout of a window", torch.float32, 4),
    ]  # fmt: skip
    for method, layout, feature, dtype, heads_kv in laws:
        found = judge(Case(method, layout, feature, dtype, heads_kv), Context(mesh, method, layout), 0)
        assert not found, (method, layout, feature, found)
    given = shards(n=64, heads_kv=2)
    text = Context(mesh, "usp", "zigzag").explain(*given, causal=True)
    row, keys, queries = 64 * 4, 2 * 32, 8 * 32
    assert text.startswith("usp, layout zigzag, 4 ranks of 64 of 256 queries")
    sent = f"{row * (keys + (queries + keys) // 2):,}"
    assert f"* usp: a rank sends {sent} bytes forward, {sent} backward" in text
    assert "halo" in Context(mesh, "usp").explain(*given, window=(9, 0))
    with pytest.raises(NotSupported, match="1 heads of k over the 2 ranks of the mesh's second axis"):
        attention(*shards(heads_kv=1), context=Context(mesh, "usp"))
    with pytest.raises(NotSupported, match="predicate dilated"):
        attention(*shards(), context=Context(mesh, "usp"), mask=Dilated(2))
    meaningless: list[tuple[dict[str, Any], str]] = [
        ({"mesh": mesh["gpus"], "method": "usp"}, "for method 'usp' it must have two, by name"),
        ({"method": "usp"}, "context mesh is None; for method 'usp' it must be a DeviceMesh"),
        ({"mesh": mesh["gpus"].get_group(), "method": "usp"}, "ProcessGroup.*; for method 'usp' it must be a DeviceMesh"),
        ({"mesh": mesh, "method": "usp_ring", "layout": "striped"}, "context method is 'usp_ring' and layout 'striped'"),
    ]
    for arguments, words in meaningless:
        with pytest.raises(InvalidProblem, match=words):
            Context(**arguments)
