"""What ranks check together besides `cases`: refusals on every rank, helpers, bits that repeat. Named by their functions."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile import Alibi, Bias, Dilated, Document, Dropout, InvalidProblem, KeyPadding, NotSupported, Predicate, Prefix
from flashtile.distributed import (
    Context,
    attention,
    document_ids,
    padded_length,
    position_ids,
    shard,
    unshard,
)
from flashtile.problem.dropout import Origin
from tests.distributed.cases import CU, IDS, SEQLEN, Case, data, one_process, over_ranks, relative

METHODS: tuple[Any, ...] = ("ulysses", "allgather", "ring")
LAYOUTS: tuple[Any, ...] = ("contiguous", "zigzag", "striped")


def shards(
    n: int = 4, heads_q: int = 8, heads_kv: int = 8, dtype: torch.dtype = torch.float32, batch: int = 1
) -> list[torch.Tensor]:
    return [torch.randn(batch, n, heads, 16, dtype=dtype) for heads in (heads_q, heads_kv, heads_kv)]


def ranks_that_differ_refuse_together() -> None:
    rank, context = dist.get_rank(), Context()
    calls: list[tuple[int, torch.dtype, dict[str, Any]]] = [
        (4 + (rank == 1), torch.float32, {}),
        (4, torch.float64 if rank == 1 else torch.float32, {}),
        (4, torch.float32, {"causal": rank == 1}),
        (4, torch.float32, {"window": (2 + rank, 0)}),
        (4, torch.float32, {"window": (-1, 0) if rank == 1 else None}),
        (4, torch.float32, {"mask": torch.ones(2) if rank == 1 else None}),
        (4, torch.float32, {"return_lse": rank == 0}),
    ]
    for n, dtype, arguments in calls:
        with pytest.raises(InvalidProblem, match=r"rank|float64|window|mask"):
            attention(*shards(n, dtype=dtype), context=context, **arguments)
    for name, value in (("layout", "head-tail"), ("method", "tree"), ("check", "never")):
        with pytest.raises(InvalidProblem, match=rf"context {name} is '{value}'; it must be one of"):
            attention(*shards(), context=Context(**({name: value} if rank == 1 else {})))  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidProblem, match="layout is"):
        attention(*shards(), context=Context(layout="zigzag" if rank else "contiguous"))
    with pytest.raises(InvalidProblem, match="check is always on rank 0 and first on rank 1"):
        attention(*shards(), context=Context(check="first" if rank == 1 else "always"))
    with pytest.raises(InvalidProblem, match=r"q is .*, with a gradient on rank 0"):
        attention(*(t.requires_grad_(rank == 0) for t in shards()), context=context)
    with pytest.raises((TypeError, InvalidProblem), match=r"rank 1 refuses the call. TypeError|did you mean causal"):
        attention(*shards(), context=context, **({"is_causal": True} if rank == 1 else {}))  # pyright: ignore[reportArgumentType]


def tensors_that_differ_refuse_together() -> None:
    """Kinds, shapes, dtypes and numbers of what a call brings besides q, k and v, by each method, in one message for all."""
    odd = dist.get_rank() == 1
    ids, used, slopes = torch.zeros(4, dtype=torch.int32), torch.tensor([7], dtype=torch.int32), torch.ones(8)
    keep, many = torch.ones(2, 4, dtype=torch.bool), torch.arange(40).float()
    laws: list[tuple[Any, Any, str]] = [
        ({"seqused_q": used, "seqused_k": used}, {}, r"seqused_q is int32 \(1,\) on cpu on rank 0 and None on rank 1"),
        (dict.fromkeys(("seqused_q", "seqused_k"), used), dict.fromkeys(("seqused_q", "seqused_k"), used - 1),
         r"what seqused_q holds is \[7\] on rank 0 and \[6\] on rank 1"),
        ({"mask": KeyPadding(keep)}, {"mask": KeyPadding(keep[:1])}, "the mask is"),
        ({"mask": KeyPadding(keep)}, {"mask": KeyPadding(keep.int())}, "the mask is"),
        ({"mask": Document(ids)}, {"mask": Document(ids.long())}, "the mask is"),
        ({"mask": Document(ids)}, {"mask": Document(ids.expand(2, 4))}, "the mask is"),
        ({"mask": Document(ids)}, {"mask": Document(ids, ids.clone())}, "the mask is"),
        ({"mask": Prefix(torch.tensor([3, 4]))}, {"mask": Prefix(torch.tensor([3, 5]))}, "what lengths of mask prefix 0 holds"),
        ({"score": Alibi(slopes)}, {"score": Alibi(slopes * 2)}, "what slopes of alibi 0 holds"),
        ({"score": Alibi(slopes)}, {"score": Alibi(slopes.half())}, "score is"),
        ({"score": Bias(torch.zeros(1, 8, 1, 8))}, {"score": Bias(torch.zeros(1, 1, 1, 8))}, "score is"),
        ({"score": Bias(many[:8])}, {"score": Bias(many[:8].flip(0))}, "what bias of bias 0 holds"),
        (dict.fromkeys(("seqused_q", "seqused_k"), many.int() % 7), dict.fromkeys(("seqused_q", "seqused_k"), many.int() % 6),
         "numbers of checksum"),
        ({"sink": slopes}, {"sink": slopes + 1}, "what sink holds"),
        ({"sink": slopes}, {"sink": slopes.clone().requires_grad_()}, "sink is"),
        ({}, {"options": flashtile.Options(deterministic=True)}, "options is"),
        ({"dropout": Dropout(0.1, 1)}, {"dropout": Dropout(0.1, 2)}, "dropout is p=0.1, seed=1 on rank 0 and p=0.1, seed=2"),
        ({"dropout": Dropout(0.1, torch.arange(2))}, {"dropout": Dropout(0.1, torch.ones(2).long())}, "dropout.s seed holds"),
    ]  # fmt: skip
    for one, other, words in laws:
        batch = len(one["seqused_q"]) if "seqused_q" in one else 2
        for method in METHODS:
            with pytest.raises(InvalidProblem, match=words):
                attention(*shards(batch=batch), context=Context(method=method), causal=True, **(other if odd else one))


def what_has_no_meaning_is_refused_on_every_rank() -> None:
    ranks = dist.get_world_size()
    whole = 4 * ranks
    for method in METHODS:
        context = Context(method=method)
        laws: list[tuple[dict[str, Any], str]] = [
            ({"sink": torch.zeros(9)}, "sink has shape"),
            ({"sink": torch.zeros(3)}, "sink has shape"),
            ({"seqused_q": (used := torch.tensor([whole + 1])), "seqused_k": used}, f"seqused_q\\[0\\] is {whole + 1}"),
            ({"seqused_q": (fewer := torch.tensor([-1])), "seqused_k": fewer}, r"seqused_q\[0\] is -1"),
            ({"options": 3}, "options is a int"),
            ({"scale": "2"}, "scale is"),
            ({"score": (3,)}, "score holds a int"),
        ]
        for arguments, words in laws:
            with pytest.raises(InvalidProblem, match=words):
                attention(*shards(), context=context, **arguments)
        with pytest.raises(NotSupported, match=r"triton: "):
            attention(*shards(), context=context, options=flashtile.Options(backend="triton"))
        with pytest.raises(NotSupported, match="tensors on meta"):
            attention(*(t.to("meta") for t in shards()), context=context)
        for transform in (torch.func.grad(lambda q, k, v, c=context: attention(q, k, v, context=c).sum()),
                          torch.func.vmap(lambda q, k, v, c=context: attention(q, k, v, context=c))):  # fmt: skip
            with pytest.raises(NotSupported, match=r"torch.func's transforms"):
                transform(*(t[None] for t in shards()))
        with forward_ad.dual_level():
            q, k, v = shards()
            q = forward_ad.make_dual(q, torch.ones_like(q))
            with pytest.raises(NotSupported, match="forward-mode"):
                attention(q, k, v, context=context)
        q, k, v = (t.requires_grad_() for t in shards())
        out = attention(q, k, v, context=context, causal=True)
        (dk,) = torch.autograd.grad(out.sum(), k, create_graph=True)
        for leaf in (q, k, v):
            with pytest.raises(NotSupported, match="second derivative"):
                torch.autograd.grad(dk.square().sum(), leaf, retain_graph=True)
    laid = [distribute_tensor(t, init_device_mesh("cpu", (ranks,)), [Shard(1)]) for t in shards()]
    with pytest.raises(InvalidProblem, match=r"hold a DTensor; .* flashtile\.attention"):
        attention(*laid, context=Context())


def helpers_refuse_what_has_no_meaning() -> None:
    rank, context, by_documents = dist.get_rank(), Context(), Context(layout="documents")
    laws: list[tuple[Any, str]] = [
        (lambda: unshard(torch.zeros(2, 3 + (rank == 1)), context), "tensor is torch.float32"),
        (lambda: unshard(torch.zeros(2, 3, dtype=torch.int64 if rank else torch.int32), context), "tensor is torch.int32"),
        (lambda: unshard(torch.zeros(2, 3), context, seqlen=1.5), "seqlen is 1.5"),  # pyright: ignore[reportArgumentType]
        (lambda: unshard(torch.zeros(2, 3), context, dim=2 if rank == 1 else 1), "dim is 2"),
        (lambda: shard(torch.zeros(2, 8), context, dim=2), "dim is 2"),
        (lambda: document_ids([0, 4], context), "cu_seqlens is a list"),  # pyright: ignore[reportArgumentType]
        (lambda: shard(torch.zeros(2, 8), by_documents), "cu_seqlens is None; layout 'documents' needs"),
        (lambda: unshard(torch.zeros(2, 8), by_documents), "cu_seqlens is None; layout 'documents' needs"),
        (
            lambda: unshard(torch.zeros(2, 8), by_documents, cu_seqlens=torch.tensor([0, 3 + (rank == 1), 8])),
            r"what cu_seqlens holds is \[0, 3, 8\] on rank 0 and \[0, 4, 8\] on rank 1",
        ),
        (
            lambda: unshard(torch.zeros(2, 8), by_documents, cu_seqlens=torch.tensor([0, 8] if rank == 1 else [0, 3, 8])),
            "cu_seqlens is 3 ints on rank 0 and 2 ints on rank 1",
        ),
        (
            lambda: unshard(torch.zeros(2, 8), by_documents, cu_seqlens=torch.tensor([0, 99] if rank == 1 else [0, 3])),
            r"cu_seqlens is \[0, 99\]; it must start with 0, never fall, and end with at most",
        ),
        (lambda: shard(torch.zeros(2, 8), by_documents, cu_seqlens=torch.tensor([0, 5, 3])), r"cu_seqlens is \[0, 5, 3\]"),
        (lambda: document_ids(torch.tensor([0, 5, 3]), context), r"cu_seqlens is \[0, 5, 3\]; it must start with 0"),
        (lambda: position_ids(8, context, cu_seqlens=torch.tensor([1, 8])), r"cu_seqlens is \[1, 8\]; it must start with 0"),
        (lambda: document_ids(torch.zeros(0, dtype=torch.int32), context), r"cu_seqlens is torch.int32 \(0,\)"),
        (lambda: position_ids(-8, context), "seqlen is -8"),
        (lambda: position_ids(8.0, context), "seqlen is 8.0"),  # pyright: ignore[reportArgumentType]
        (lambda: padded_length(1.5, context), "seqlen is 1.5"),  # pyright: ignore[reportArgumentType]
    ]
    for call, words in laws:
        with pytest.raises(InvalidProblem, match=words):
            call()
    for layout in LAYOUTS:
        nothing = shard(torch.zeros(1, 0), Context(layout=layout))
        assert unshard(nothing, Context(layout=layout)).shape == (1, 0)
    others = dist.new_group([1])
    if rank != 1:
        with pytest.raises(InvalidProblem, match="no member"):
            Context(others)


def a_query_for_each_rank_has_its_own_bias() -> None:
    """A bias of one row a rank is its shard, and not one for all queries."""
    ranks, d = dist.get_world_size(), data(torch.float32, 4)
    whole, bias = [t[:, : dist.get_world_size()] for t in (d.q, d.k, d.v)], d.bias[..., :ranks, :ranks]
    expected = flashtile.attention(*whole, score=(Bias(bias),))
    for method in ("auto", "allgather", "ring"):
        context = Context(method=method)
        local = [shard(t, context) for t in whole]
        out = attention(*local, context=context, score=(Bias(shard(bias, context, 2)),))
        torch.testing.assert_close(out, shard(expected, context), rtol=1e-5, atol=1e-5)
    context = Context(method="ulysses")
    with pytest.raises(NotSupported, match="a bias with an axis of queries"):
        attention(*(shard(t, context) for t in whole), context=context, score=(Bias(shard(bias, context, 2)),))


def no_tokens_are_a_sequence_too() -> None:
    for method, shape in product(METHODS, ((1, 0, 8, 16), (0, 8, 8, 16))):
        q, k, v = (torch.zeros(shape).requires_grad_() for _ in range(3))
        for how in ({"causal": True}, {"causal": True, "window": (3, 0)}):
            out = attention(q, k, v, context=Context(method=method), **how)
            assert [t.shape for t in (out, *torch.autograd.grad(out.sum(), (q, k, v)))] == [shape] * 4


def checkpoints_run_a_call_again() -> None:
    """Under torch's hooks a backward may ask once for what was saved."""
    for method in METHODS:
        context = Context(method=method, layout="zigzag")
        given = [t.requires_grad_() for t in shards()]
        call = partial(attention, context=context, causal=True, window=(9, 0))
        expected = torch.autograd.grad(call(*given).square().sum(), given)
        made = checkpoint(call, *given, use_reentrant=False)
        for a, b in zip(torch.autograd.grad(made.square().sum(), given), expected, strict=True):
            assert torch.equal(a, b), method


def autocast_counts_as_it_does_on_one_process() -> None:
    for method in METHODS:
        context = Context(method=method)
        q, k, v = (t.requires_grad_() for t in shards())
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(q, k, v, context=context, causal=True)
            assert attention(q.bfloat16(), k.bfloat16(), v, context=context).dtype is torch.bfloat16
            grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert out.dtype is torch.bfloat16
        assert all(g.dtype is torch.float32 for g in grads)
        torch.testing.assert_close(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), context=context, causal=True))
        halves, made = [t.detach().half().requires_grad_() for t in (q, k, v)], list[tuple[torch.Tensor, ...]]()
        for casts in (False, True):  # it leaves float16 as it is
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                out = attention(*halves, context=context, causal=True)
                made.append((out, *torch.autograd.grad(out.float().square().sum(), halves)))
        assert all(torch.equal(a, b) for a, b in zip(*made, strict=True)), method


def a_compiled_module_breaks_its_graph_in_front() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.context = Context()

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention(q * 2, k, v, context=self.context, causal=True) + 1

    given = shards()
    made = torch.compile(Module(), backend="eager")(*given)
    torch.testing.assert_close(made, Module()(*given))
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"attention over ranks, .* run eagerly"):
        torch.compile(Module(), backend="eager", fullgraph=True)(*given)


def what_is_not_done_is_refused() -> None:
    class Own(Predicate):
        name = "of_a_test_of_ranks"

    ranks = dist.get_world_size()
    with pytest.raises(InvalidProblem, match=rf"seqlen_q is {ranks * 3}; .* multiple of {2 * ranks}.*Pad the end"):
        attention(*shards(3), context=Context(layout="zigzag"))
    with pytest.raises(NotSupported, match=r"6 heads of q|9 heads of q"):
        attention(*shards(heads_q=9 if ranks == 2 else 6, heads_kv=3), context=Context(method="ulysses"))
    refused: list[tuple[Any, dict[str, Any], str]] = [
        ("auto", {"dropout": Dropout(0.1, 0, Origin())}, "dropout with an origin"),
        ("ring", {"mask": Dilated(2)}, "predicate dilated"),
        ("allgather", {"score": (flashtile.Alibi(torch.ones(8)),)}, "alibi without causal order"),
        ("ulysses", {"score": (flashtile.Bias(torch.ones(4, 4 * ranks)),)}, "a bias with an axis of queries"),
        ("auto", {"mask": Own()}, "predicate"),
        ("auto", {"seqused_k": torch.ones(1, dtype=torch.int32)}, "not one tensor"),
    ]
    for method, arguments, reason in refused:
        with pytest.raises(NotSupported, match=reason):
            attention(*shards(), context=Context(method=method), **arguments)
    for score in (flashtile.Bias(torch.ones(4, 4)), flashtile.Alibi(torch.ones(3))):
        with pytest.raises(InvalidProblem, match=r"has shape|have shape"):
            attention(*shards(), context=Context(), score=(score,), causal=True)
    with pytest.raises(InvalidProblem, match="the last axis must be this rank's 4"):
        attention(*shards(), context=Context(), mask=Document(torch.zeros(4 * ranks, dtype=torch.int32)))


def contexts_without_meaning() -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "cp"))
    assert Context(mesh["cp"]).ranks == 2
    assert hash(Context(mesh["cp"])) == hash(Context(mesh["cp"]))
    meaningless: list[tuple[dict[str, Any], str]] = [
        ({"mesh": mesh}, r"it must have one, as mesh\[.cp.\]"),
        ({"mesh": "cp"}, "context mesh is 'cp'"),
        ({"method": "tree"}, "context method is 'tree'"),
        ({"layout": "head-tail"}, "context layout is 'head-tail'"),
        ({"method": "allgather", "layout": "striped"}, "'zigzag', which is as balanced"),
        ({"method": "ulysses", "layout": "documents"}, "'ulysses' and layout 'documents'; it must be 'allgather'"),
    ]
    for arguments, words in meaningless:
        with pytest.raises(InvalidProblem, match=words):
            Context(**arguments)
    with pytest.raises(InvalidProblem, match="context is a str"):
        attention(*shards(), context="cp")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="did you mean causal"):
        attention(*shards(), context=Context(), is_causal=True)  # pyright: ignore[reportArgumentType]


def a_mesh_beside_another_axis() -> None:
    """Two axes: items over one, positions over the other."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "cp"))
    d = data(torch.float32, 4)
    for method in METHODS:
        case = Case(method, "zigzag", "causal")
        ours, one = over_ranks(case, d, Context(mesh["cp"], method=method, layout="zigzag")), one_process(case, d)
        torch.testing.assert_close(ours, one, rtol=1e-5, atol=1e-5)


def shards_come_back() -> None:
    for layout in LAYOUTS:
        context = Context(layout=layout)
        tokens = torch.arange(2 * 29).view(2, 29)
        part = shard(tokens, context, pad=-1)
        assert padded_length(29, context) == part.shape[1] * context.ranks
        assert torch.equal(unshard(part, context, seqlen=29), tokens)
        assert torch.equal(unshard(position_ids(SEQLEN, context), context, 0), torch.arange(SEQLEN))
        assert torch.equal(document_ids(CU, context), shard(IDS, context, 0))
        within = torch.cat([torch.arange(b - a) for a, b in pairwise(CU.tolist())])
        assert torch.equal(position_ids(SEQLEN, context, cu_seqlens=CU), shard(within, context, 0))
        assert torch.equal(unshard(shard(tokens > 9, context, 1, False), context, seqlen=29), tokens > 9)
        with pytest.raises(InvalidProblem, match="must be a multiple of"):
            shard(tokens, context)
        with pytest.raises(InvalidProblem, match="the padded length"):
            unshard(part, context, seqlen=33)
    chunks = 2 * dist.get_world_size()
    pair = [dist.get_rank(), chunks - 1 - dist.get_rank()]  # TransformerEngine's order
    assert position_ids(chunks, Context(layout="zigzag")).tolist() == pair


def gathered_keys_give_one_process_bits() -> None:
    """out and dq of `allgather`: each query meets the same keys in the same order."""
    for dtype in (torch.float32, torch.bfloat16):
        for layout in LAYOUTS[:2]:
            case, d = Case("allgather", layout, "causal", dtype, lse=False), data(dtype, 4)
            ours, one = over_ranks(case, d, Context(method="allgather", layout=layout)), one_process(case, d)
            assert torch.equal(ours["out"], one["out"])
            assert torch.equal(ours["dq"], one["dq"])


def bits_repeat() -> None:
    for method in METHODS:
        case, d, context = Case(method, "zigzag", "alibi", heads_kv=1), data(torch.bfloat16, 1), Context(None, method, "zigzag")
        first, second = over_ranks(case, d, context), over_ranks(case, d, context)
        assert all(torch.equal(first[name], second[name]) for name in first)


def dropout_keeps_what_one_device_keeps() -> None:
    """Bits of all methods and layouts, also without a seed, which all ranks then take of the first, and at every call anew."""
    heads, n = 8, 64
    whole = [torch.randn(2, n, heads, 16) for _ in range(2)] + [torch.eye(n)[None, :, None].expand(2, n, heads, n)]
    dist.broadcast(whole[0], 0)
    dist.broadcast(whole[1], 0)
    expected = flashtile.dropout_mask(Dropout(0.5, 11), 2, heads, n, n).transpose(1, 2)
    found: list[torch.Tensor] = []
    for method in METHODS:
        for layout in LAYOUTS:
            if (method, layout) == ("allgather", "striped"):
                continue
            context = Context(method=method, layout=layout)
            local = [shard(t, context) for t in whole]
            kept = attention(*local, context=context, dropout=Dropout(0.5, 11)) > 0
            assert torch.equal(unshard(kept, context), expected), (method, layout)
            torch.manual_seed(dist.get_rank())
            for _ in range(2):
                found.append(unshard(attention(*local, context=context, dropout=Dropout(0.5)) > 0, context))
            both = [torch.zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(both, torch.rand(1))  # what generators draw after it is as without ranks: each has its own
            assert len({float(t) for t in both}) == len(both)
    for one, other in zip(found[2::2], found[3::2], strict=True):
        assert torch.equal(one, found[0])
        assert torch.equal(other, found[1])
        assert not torch.equal(one, other)


def float64_stays_float64() -> None:
    d = data(torch.float64, 1)
    leaves = [t.clone().requires_grad_() for t in (d.q, d.k, d.v)]
    out = flashtile.attention(*leaves, causal=True)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, d.dout)]
    for method in METHODS:
        context = Context(method=method, layout="zigzag")
        local = [shard(t, context).requires_grad_() for t in (d.q, d.k, d.v)]
        ours = attention(*local, context=context, causal=True)
        for one, true in zip((ours, *torch.autograd.grad(ours, local, shard(d.dout, context))), expected, strict=True):
            torch.testing.assert_close(unshard(one, context), true, rtol=1e-12, atol=1e-12)


def sixteen_bits_are_as_exact_as_on_one_process() -> None:
    """Shapes of parts that the CPU computes otherwise than the whole's."""
    for n, heads_kv, dtype, feature in (
        (256, 4, torch.bfloat16, "causal"), (256, 4, torch.float16, "causal"), (256, 8, torch.bfloat16, "full"),
    ):  # fmt: skip
        d, told = data(dtype, heads_kv, n, n), {"causal": feature == "causal"}
        true = flashtile.attention(d.q.double(), d.k.double(), d.v.double(), **told)
        alone = relative(flashtile.attention(d.q, d.k, d.v, **told), true)
        for method in METHODS:
            context = Context(method=method, layout="zigzag")
            out = attention(*(shard(t, context) for t in (d.q, d.k, d.v)), context=context, **told)
            assert relative(unshard(out, context), true) <= 1.02 * alone, (method, n, dtype, feature)


def the_text_says_which_method_and_what_it_sends() -> None:
    ranks = dist.get_world_size()
    q, k, v = (t.bfloat16() for t in shards(n=8, heads_q=8, heads_kv=2))
    text = Context(layout="zigzag").explain(q, k, v, causal=True)
    assert text.startswith(f"allgather, layout zigzag, {ranks} ranks of 8 of {8 * ranks} queries")
    assert "  auto asks allgather first: it sends fewer bytes, and work is even" in text
    keys = 8 * 2 * 32
    assert f"* allgather: a rank sends {keys * 2 * (ranks - 1):,} bytes forward, {keys * 4 * (ranks - 1):,} backward" in text
    assert "busiest rank has 1.00 times" in Context(method="ring", layout="zigzag").explain(q, k, v, causal=True)
    assert "busiest rank has 1.00 times" not in Context(method="ring").explain(q, k, v, causal=True)
    of_gpu = [torch.empty(1, 65536 // ranks, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8, 8)]
    told = Context(method="allgather", layout="zigzag").explain(*of_gpu, causal=True)
    assert "backward, in 2 groups of heads: all but one group's while others are computed" in told
    assert told.count("all but the first step's while keys are computed") == 1
    assert "groups of heads" not in text
    drops = Dropout(0.1, 7)
    assert "* allgather: a rank sends" in Context(method="allgather").explain(*of_gpu, window=(9, 0), dropout=drops)
    assert "halo" in Context(method="allgather").explain(*of_gpu, window=(9, 0))
    assert "  ring: dropout in layout 'striped' on a GPU" in Context(layout="striped").explain(*of_gpu, dropout=drops)
    odd = shards(heads_q=6 if ranks == 4 else 9, heads_kv=3)
    assert Context().explain(*odd).startswith("allgather")
    assert Context(layout="striped").explain(*odd).startswith("ring")


def agreed_once_is_enough_where_asked() -> None:
    context = Context(method="allgather", check="first")
    asked: list[Any] = []
    before = dist.all_gather_object
    dist.all_gather_object = lambda *a, **b: (asked.append(1), before(*a, **b))[1]
    try:
        for _ in range(3):
            attention(*shards(), context=context)
    finally:
        dist.all_gather_object = before
    assert len(asked) <= 1


def dtensors_of_positions_need_no_other_word() -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "cp"))
    d = data(torch.float32, 4)
    weights = d.dout, d.dlse
    laws: list[tuple[list[Any], dict[str, Any]]] = [
        ([Replicate(), Shard(1)], {"causal": True, "window": (9, 0)}),
        ([Shard(0), Shard(1)], {"score": (flashtile.Softcap(2.0),)}),
        ([Shard(1), Shard(2)], {"causal": True}),
    ]
    for placements, arguments in laws:
        whole = [t.clone().requires_grad_() for t in (d.q, d.k, d.v)]
        made = flashtile.attention(*whole, return_lse=True, **arguments)
        expected = [*made, *torch.autograd.grad(made, whole, weights)]
        laid = [distribute_tensor(t.detach(), mesh, placements).requires_grad_() for t in whole]
        made = flashtile.attention(*laid, return_lse=True, **arguments)
        assert list(made[0].placements) == placements
        parts = [distribute_tensor(w, mesh, t.placements) for w, t in zip(weights, made, strict=True)]
        found = [*made, *torch.autograd.grad(made, laid, parts)]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.full_tensor(), b, rtol=1e-5, atol=1e-5)
        alone = flashtile.attention(*laid, **arguments).full_tensor()
        torch.testing.assert_close(alone, expected[0], rtol=1e-5, atol=1e-5)
    unnamed = [distribute_tensor(t, init_device_mesh("cpu", (ranks // 2, 2)), [Shard(0), Shard(1)]) for t in (d.q, d.k, d.v)]
    expected = flashtile.attention(d.q, d.k, d.v, causal=True)
    torch.testing.assert_close(flashtile.attention(*unnamed, causal=True).full_tensor(), expected, rtol=1e-5, atol=1e-5)
    laid = [distribute_tensor(t, mesh, [Replicate(), Shard(1)]) for t in (d.q, d.k, d.v)]
    with pytest.raises(NotSupported, match=r"flashtile\.distributed\.attention"):
        flashtile.attention(*laid, sink=d.sink)
    odd = [distribute_tensor(t[:, :31], mesh, [Replicate(), Shard(1)]) for t in (d.q, d.k, d.v)]
    with pytest.raises(NotSupported, match="31 of axis 1 of q over 2 ranks; pad"):
        flashtile.attention(*odd)


OF_TWO = (
    tensors_that_differ_refuse_together, gathered_keys_give_one_process_bits, bits_repeat,
    agreed_once_is_enough_where_asked, autocast_counts_as_it_does_on_one_process,
    what_has_no_meaning_is_refused_on_every_rank, a_compiled_module_breaks_its_graph_in_front,
)  # fmt: skip
OF_FOUR = (
    a_mesh_beside_another_axis,
    dtensors_of_positions_need_no_other_word,
)  # two axes of two; fmt: skip
CHECKS = (
    ranks_that_differ_refuse_together, what_is_not_done_is_refused, contexts_without_meaning, shards_come_back,
    the_text_says_which_method_and_what_it_sends, helpers_refuse_what_has_no_meaning,
    a_query_for_each_rank_has_its_own_bias, dropout_keeps_what_one_device_keeps, float64_stays_float64,
    sixteen_bits_are_as_exact_as_on_one_process, no_tokens_are_a_sequence_too, checkpoints_run_a_call_again,
)  # fmt: skip
