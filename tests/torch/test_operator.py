"""Attention as an operator: torch.compile, export, checkpointing, FLOP counts, autocast; results equal to eager calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from flashtile import (
    Alibi,
    Band,
    Bias,
    Blocks,
    Document,
    Dropout,
    InvalidProblem,
    KeyPadding,
    NotSupported,
    Options,
    Softcap,
    Stored,
)
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.describe import make_problem
from flashtile.torch.execute.packing import APART
from flashtile.torch.routes.functional import ATTENTION, BACKWARD
from flashtile.torch.routes.operator import dense_strides
from flashtile.torch.routes.request import write
from tests.cases import lay_out

MOST_RECOMPILES = 20
QUICK = Options(backend=None if torch.cuda.is_available() else "cpu")  # what runs a call is not in its graph

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaves(device: torch.device | str = "cpu", layout: str = "bshd") -> Tensors:
    """Leaves that every call below may use."""
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "q": (2, 20, 4, 16),
        "k": (2, 36, 2, 16),
        "v": (2, 36, 2, 16),
        "slopes": (4,),
        "sink": (4,),
        "bias": (1, 4, 20, 36),
    }
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if layout == "head_dim outside":
        made = {name: t.movedim(-1, 0).contiguous().movedim(0, -1) if name in "qkv" else t for name, t in made.items()}
    else:
        made = {name: lay_out(t, layout) if name in "qkv" else t for name, t in made.items()}
    return {name: t.to(device).detach().requires_grad_() for name, t in made.items()}


def keep() -> torch.Tensor:
    return torch.arange(72).view(2, 36) % 7 != 3


def ids() -> torch.Tensor:
    return (torch.arange(72).view(2, 36) % 5).int()


def attend(t: Tensors, **arguments: Any) -> Any:
    return flashtile.attention(t["q"], t["k"], t["v"], **arguments)


def varlen(t: Tensors, **arguments: Any) -> Any:
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 7, 7, 40], [0, 30, 41, 72]))
    q, k, v = (t[name].flatten(0, 1) for name in "qkv")
    return flashtile.attention_varlen(q, k, v, cu_q, cu_k, **arguments)


def qkvpacked(t: Tensors, **arguments: Any) -> Any:
    return flashtile.attention_qkvpacked(torch.stack([t["q"]] * 3, 2), **arguments)


def heads_packed(t: Tensors, **arguments: Any) -> Any:
    return flashtile.attention_qkvpacked(t["q"], heads_q=2, **arguments)


def kvpacked(t: Tensors, **arguments: Any) -> Any:
    return flashtile.attention_kvpacked(t["q"], torch.stack([t["k"], t["v"]], 2), **arguments)


CALLS: dict[str, Callable[[Tensors], Any]] = {
    "causal": partial(attend, causal=True),
    "lse": partial(attend, causal=True, scale=0.3, return_lse=True),
    "scores": lambda t: attend(t, window=(5, None), score=(Softcap(3.0), Alibi(t["slopes"]))),
    "bias-sink": lambda t: attend(t, causal=True, sink=t["sink"], score=(Bias(t["bias"]),), return_lse=True),
    "dropout": partial(attend, causal=True, dropout=Dropout(0.3, 7)),
    "padding": lambda t: attend(t, causal=True, mask=KeyPadding(keep())),
    "union": lambda t: attend(t, mask=(Document(ids()[:, :20], ids()) & Band(right=0)) | Band(5, 0)),
    "blocks": lambda t: attend(t, mask=BLOCKS),
    "blocks-narrowed": lambda t: attend(t, mask=BLOCKS, window=(9, None)),
    "blocks-joined": lambda t: attend(t, mask=KeyPadding(keep()) & BLOCKS | Document(ids()[:, :20], ids()) & Band(left=7)),
    "band-first": lambda t: attend(t, mask=Band(left=9) & BLOCKS | Band(right=0) & Document(ids()[:, :20], ids())),
    "blocks-stored": lambda t: attend(t, mask=BLOCKS & Stored(torch.arange(2880).view(1, 4, 20, 36) % 3 != 0)),
    "options": partial(attend, mask=Band(left=7), options=Options(deterministic=True, precision="ieee", backend="cpu")),
    "seqused": lambda t: attend(t, causal=True, seqused_k=torch.tensor([30, 36], dtype=torch.int32)),
    "holes": lambda t: attend(t, seqused_q=keep()[:, :20], seqused_k=keep(), return_lse=True),
    "varlen": partial(varlen, causal=True, max_seqlen_q=33, return_lse=True),
    "qkvpacked": partial(qkvpacked, causal=True),
    "heads-packed": partial(heads_packed, causal=True, return_lse=True),
    "kvpacked": partial(kvpacked, window=(9, 9)),
}
BLOCKS = Blocks.build(Band(right=0), 20, 36, block_size=(32, 32), device="cpu")


def step(function: Callable[[Tensors], Any], tensors: Tensors) -> list[Any]:
    """The outputs and the gradients of all leaves, None where there is none."""
    made = function(tensors)
    made = made if isinstance(made, tuple) else (made,)
    loss = sum((t * torch.linspace(-1, 2, t.numel(), device=t.device).view(t.shape)).sum() for t in made)
    assert isinstance(loss, torch.Tensor)
    return [*made, *torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)]


def agree(got: list[Any], expected: list[Any]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls(name: str) -> None:
    """No graph break, and what eager gives: outputs and every gradient."""
    compiled = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True)
    agree(step(compiled, leaves()), step(CALLS[name], leaves()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scores", "varlen"])
def test_inductor(name: str) -> None:
    compiled = torch.compile(CALLS[name], fullgraph=True)
    agree(step(compiled, leaves()), step(CALLS[name], leaves()))


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "head_dim outside", "gaps"])
def test_opcheck(layout: str) -> None:
    t = leaves(layout=layout)
    asked = dict(causal=True, score=(Alibi(t["slopes"]),), scale=0.3, dropout=Dropout(0.2, 3), return_lse=True)
    text, floats, ints, captured, others = write(APART, t["q"], None, Arguments(**asked))
    captured = [c.detach().requires_grad_() for c in captured]
    found = opcheck(ATTENTION, (t["q"], t["k"], t["v"], [*captured, *others], 15, text, floats, ints))
    assert set(found.values()) == {"SUCCESS"}
    assert len(found) == 4


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "head_dim outside", "gaps"])
@pytest.mark.parametrize("name", ["lse", "varlen", "heads-packed", "kvpacked"])
def test_fakes_have_the_strides_of_what_runs(name: str, layout: str) -> None:
    """Of outputs and gradients alike."""
    seen: list[Any] = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func in (ATTENTION, BACKWARD):
                seen[-1] += [(t.shape, t.stride(), t.dtype) for t in made]
            return made

    for mode in (None, FakeTensorMode()):
        tensors = leaves(layout=layout)
        if mode is not None:
            tensors = {name: mode.from_tensor(t).detach().requires_grad_() for name, t in tensors.items()}
        seen.append([])
        with Record():
            if mode is None:
                step(CALLS[name], tensors)
            else:
                with mode:
                    step(CALLS[name], tensors)
    assert seen[0] == seen[1]
    assert len(seen[0]) >= 4


def test_a_million_tokens_that_are_not_there() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2**20, 64, 128, dtype=torch.bfloat16, requires_grad=True)
        out, lse = flashtile.attention(q, q, q, causal=True, return_lse=True)
        (dq,) = torch.autograd.grad(out, q, torch.empty_like(out))
        with torch.no_grad():  # autograd itself wants the driver of a GPU
            elsewhere = torch.empty(1, 2**20, 64, 128, dtype=torch.bfloat16, device="cuda")
            away = flashtile.attention(elsewhere, elsewhere, elsewhere)
    assert (out.shape, lse.shape, dq.shape) == (q.shape, (1, 64, 2**20), q.shape)
    assert (away.shape, away.device.type) == (q.shape, "cuda")


def test_dense_strides_keep_the_order_and_put_head_dim_innermost() -> None:
    like = torch.empty(2, 8, 3, 5).permute(0, 2, 1, 3)
    assert dense_strides(like.shape, like) == like.stride()
    assert dense_strides((2, 3, 8, 5), torch.empty(2, 3, 5, 8).mT) == (120, 40, 5, 1)
    assert dense_strides((2, 3, 8, 5), torch.empty(2, 3, 8, 1).expand(2, 3, 8, 5)) == (120, 40, 5, 1)


def counted(function: Callable[..., torch.Tensor], calls: list[tuple[Any, ...]]) -> int:
    """Graphs that a function is compiled to over these calls, forward and backward."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for given in calls:
        compiled(*given).backward()
    return counter.frame_count


def test_200_random_lengths() -> None:
    draw = random.Random(0)

    def dense(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return flashtile.attention(q, k, k, causal=True, window=(50, None), score=(Softcap(20.0),), options=QUICK).sum()

    calls = []
    for _ in range(200):
        seqlen, batch = draw.randint(1, 90), draw.randint(1, 3)
        other = draw.choice([seqlen, draw.randint(1, 90)])
        calls.append(tuple(torch.randn(batch, n, h, 8, requires_grad=True) for n, h in ((seqlen, 2), (other, 1))))
    assert counted(dense, calls) <= MOST_RECOMPILES


def test_random_lengths_of_other_forms() -> None:
    draw = random.Random(1)
    packs = [(torch.randn(draw.randint(1, 4), draw.randint(1, 40), 3, 2, 8, requires_grad=True),) for _ in range(30)]
    assert counted(lambda qkv: flashtile.attention_qkvpacked(qkv, causal=True, options=QUICK).sum(), packs) <= MOST_RECOMPILES
    items = []
    for _ in range(30):
        total = draw.randint(1, 60)
        ends = sorted(draw.randint(0, total) for _ in range(draw.randint(0, 4)))
        cu_seqlens = torch.tensor([0, *ends, total], dtype=torch.int32)
        items.append((torch.randn(total, 2, 8, requires_grad=True), cu_seqlens))
    varlen = partial(flashtile.attention_varlen, causal=True, options=QUICK)
    assert counted(lambda x, cu: varlen(x, x, x, cu).sum(), items) <= MOST_RECOMPILES
    windows = [(torch.randn(1, 30, 2, 8, requires_grad=True), n) for n in range(2, 20)]
    assert counted(lambda x, n: flashtile.attention(x, x, x, window=(n, 0), options=QUICK).sum(), windows) <= MOST_RECOMPILES


@pytest.mark.parametrize(
    ("held", "arguments"),
    [
        (torch.rand(4), lambda t: {"score": (Alibi(t),)}), (torch.rand(2, 4), lambda t: {"score": (Alibi(t),)}),
        (keep(), lambda t: {"mask": KeyPadding(t)}), (ids(), lambda t: {"mask": Document(t)}),
    ],
    ids=["slopes", "slopes of items", "padding", "documents"],
)  # fmt: skip
def test_sizes_of_a_module_meet_symbols(held: torch.Tensor, arguments: Callable[[torch.Tensor], Any]) -> None:
    """What a module holds has sizes that are known, beside those of its inputs, which are not."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = torch.nn.Buffer(held)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return flashtile.attention(x, x, x, **arguments(self.held))

    module, x = Module(), torch.randn(2, 36, 4, 16)
    assert torch.equal(torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)(x), module(x))


def test_blocks_meet_symbols() -> None:
    """Sizes of blocks that a caller's mask holds are symbols, too, where all numbers are to be."""
    blocks = Blocks.build(Document(ids()), 36, 36, batch=2, block_size=(32, 32))

    def function(x: torch.Tensor) -> torch.Tensor:
        return flashtile.attention(x, x, x, mask=blocks, causal=True)

    x = torch.randn(2, 36, 4, 16)
    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)(x), function(x))


def test_compiled_dropout_draws_anew() -> None:
    t = leaves()
    compiled = torch.compile(partial(attend, dropout=Dropout(0.5)), backend="aot_eager", fullgraph=True)
    first, second = compiled(t), compiled(t)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    third = compiled(t)
    torch.manual_seed(5)
    assert torch.equal(third, compiled(t))


@pytest.mark.parametrize("compiles", [False, True])
def test_checkpointing_repeats_dropout(compiles: bool) -> None:
    function = partial(attend, causal=True, dropout=Dropout(0.5))

    def again(t: Tensors) -> torch.Tensor:
        return checkpoint(function, t, use_reentrant=False)  # pyright: ignore[reportReturnType]

    if compiles:
        again = torch.compile(again, backend="aot_eager", fullgraph=True)
    torch.manual_seed(4)
    got = step(again, leaves())
    torch.manual_seed(4)
    plain = torch.compile(function, backend="aot_eager", fullgraph=True) if compiles else function
    agree(got, step(plain, leaves()))


def test_selective_checkpointing_keeps_attention() -> None:
    """A policy that names the operator saves it; the backward then computes everything else again, and attention not."""
    ran: list[str] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is ATTENTION and not ctx.is_recompute:
            ran.append("forward")
        return CheckpointPolicy.MUST_SAVE if op is ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE

    def selective(t: Tensors) -> Any:
        return checkpoint(
            partial(attend, causal=True), t, use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, policy),
        )  # fmt: skip

    agree(step(selective, leaves()), step(partial(attend, causal=True), leaves()))
    assert ran == ["forward"]


def test_flops_are_those_of_the_problem() -> None:
    t = leaves()
    problem, _ = make_problem(t["q"], t["k"], t["v"], Arguments(causal=True))
    with FlopCounterMode(display=False) as counter:
        attend(t, causal=True).sum().backward()
    assert counter.get_total_flops() == problem.flops("forward") + problem.flops("backward")


@pytest.mark.parametrize("compiles", [False, True])
def test_autocast_is_that_of_torchs_attention(compiles: bool) -> None:
    """float32 becomes autocast's dtype, gradients are float32; what comes in 16 bits stays as it is."""
    t = leaves()
    function = partial(attend, causal=True)
    if compiles:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = step(function, t)
        mixed = function({**t, "v": t["v"].bfloat16()})
        half = function({name: x.half() for name, x in t.items()})
    assert (got[0].dtype, got[1].dtype, mixed.dtype, half.dtype) == (
        torch.bfloat16, torch.float32, torch.bfloat16, torch.float16,
    )  # fmt: skip
    lowered = {name: x.detach().bfloat16().requires_grad_() for name, x in t.items()}
    expected = step(partial(attend, causal=True), lowered)
    agree(got, [expected[0], *(None if g is None else g.float() for g in expected[1:])])


def test_second_derivatives_are_the_eager_ones() -> None:
    """In dispatch modes, and in a graph that runs as it was traced; PyTorch has none of what AOTAutograd compiled."""

    def twice(function: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        t = leaves()
        given = [t[name] for name in "qkv"]
        grads = torch.autograd.grad(function(t).square().sum(), given, create_graph=True)
        return torch.autograd.grad([g.sin().sum() for g in grads], given)

    expected = twice(attend)
    with FlopCounterMode(display=False):
        watched = twice(attend)
    for found in (watched, twice(torch.compile(attend, backend="eager", fullgraph=True))):
        for mine, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, truth)
    with pytest.raises(RuntimeError, match="double backward"):
        twice(torch.compile(partial(attend, causal=True), backend="aot_eager", fullgraph=True))


def test_wrong_calls_fail_while_they_are_traced() -> None:
    t = leaves()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(InvalidProblem, match="k has head_dim 8 and q has 16"):
        flashtile.attention(t["q"], t["k"][..., :8], t["v"])
    with pytest.raises(Exception, match="alibi slopes have shape"):
        torch.compile(lambda t: attend(t, score=(Alibi(t["slopes"][:3]),)), backend="aot_eager", fullgraph=True)(t)
    q = torch.zeros(1, 4, 1, 513)
    with FlopCounterMode(display=False), pytest.raises(NotSupported, match="head_dim is 513"):
        flashtile.attention(q, q, q)


# -- nested tensors, DLPack -----------------------------------------------------------------------------------------------


def nested(lengths: list[int], heads: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, heads, 16, generator=generator) for n in lengths]


@pytest.mark.parametrize("compiles", [False, True])
def test_nested_tensors_are_loops_over_their_items(compiles: bool) -> None:
    items = [nested([5, 9, 2], 4, 0), nested([7, 9, 11], 2, 1), nested([7, 9, 11], 2, 2)]
    q, k, v = (torch.nested.nested_tensor(some, layout=torch.jagged).requires_grad_() for some in items)
    v = torch.nested.nested_tensor_from_jagged(v.values(), k.offsets())
    function = partial(flashtile.attention, causal=True, return_lse=True)
    if compiles:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    out, lse = function(q, k, v)
    assert out.is_nested
    assert out.shape == q.shape
    (dq,) = torch.autograd.grad(out.values().sum(), q)
    for i, (a, b, c) in enumerate(zip(*items, strict=True)):
        a = a.detach().requires_grad_()
        one, one_lse = flashtile.attention(a[None], b[None], c[None], causal=True, return_lse=True)
        torch.testing.assert_close(out[i], one[0])
        torch.testing.assert_close(lse[i], one_lse[0])
        torch.testing.assert_close(dq[i], torch.autograd.grad(one.sum(), a)[0])


def test_dlpack_views_are_read_where_they_lie() -> None:
    t = leaves(layout="gaps")
    views = [torch.from_dlpack(t[name].detach()) for name in "qkv"]
    assert [view.data_ptr() for view in views] == [t[name].data_ptr() for name in "qkv"]
    torch.testing.assert_close(flashtile.attention(*views, causal=True), attend(t, causal=True).detach())


# -- export, AOTInductor, CUDA graphs -------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Attention between what torch computes itself."""

    def __init__(self, sinks: bool = False) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 96)
        self.sink = torch.nn.Parameter(torch.randn(4)) if sinks else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.project(x).unflatten(-1, (3, 4, 8))
        return flashtile.attention_qkvpacked(qkv, causal=True, score=(Softcap(5.0),), sink=self.sink).flatten(2)


def test_export_with_any_length(tmp_path: Path) -> None:
    model, x = Model().eval(), torch.randn(2, 12, 8)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {1: torch.export.Dim("seqlen", min=2, max=64)}})
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for length in (12, 31):
        given = torch.randn(2, length, 8)
        torch.testing.assert_close(loaded(given), model(given))


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [False, True])
def test_aot_inductor(sinks: bool, tmp_path: Path) -> None:
    model, x = Model(sinks).eval(), torch.randn(2, 12, 8)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes={"x": {1: torch.export.Dim("seqlen", min=2, max=64)}})
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(path)
        for length in (12, 31):
            given = torch.randn(2, length, 8)
            torch.testing.assert_close(loaded(given), model(given), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_cuda_graphs_of_a_compiled_step(device: torch.device) -> None:
    """torch.compile's own CUDA graphs, forward and backward, replayed on new inputs."""
    compiled = torch.compile(partial(attend, causal=True), fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        shapes = {"q": (2, 200, 4, 64), "k": (2, 200, 2, 64), "v": (2, 200, 2, 64)}
        made = {n: torch.randn(s, generator=generator).to(device, torch.bfloat16).requires_grad_() for n, s in shapes.items()}
        torch.compiler.cudagraph_mark_step_begin()
        got = [t.clone() for t in step(compiled, made)]
        for a, b in zip(got, step(partial(attend, causal=True), made), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_inductor_on_a_gpu(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (2, 200, 4, 64), "k": (2, 200, 2, 64), "v": (2, 200, 2, 64), "sink": (4,)}
    made = {n: torch.randn(s, generator=generator).to(device, torch.bfloat16).requires_grad_() for n, s in shapes.items()}

    def function(t: Tensors) -> Any:
        return attend(t, causal=True, sink=t["sink"], score=(Softcap(9.0),), return_lse=True)

    for a, b in zip(step(torch.compile(function, fullgraph=True), made), step(function, made), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
