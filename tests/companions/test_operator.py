"""The companions as operators: what torch.compile, export and whoever calls them directly may rely on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flashtile import NotSupported, ops
from flashtile.kernels.ops.catalogue import BACKENDS, OPS
from flashtile.ops.head import HEAD
from flashtile.torch.ops.operator import BACKWARD, COMPANION, write
from flashtile.torch.ops.run import run
from tests.companions.cases import CASES, Case, Tensors

HOST = torch.device("cpu")
# A compiled graph leaves what an operator writes over to torch's own planning of memory.
TRACED = [c for c in CASES if not any(c.problem.options().get(name) for name in ("inplace", "eager_gradient"))]
FULLEST = [max((c for c in TRACED if c.problem.op == op), key=lambda c: len(c.problem.given)) for op in OPS]


def given(case: Case, place: torch.device = HOST) -> Tensors:
    tensors = case.tensors(place)
    return {n: tensors[n].detach().requires_grad_(n in case.wanted) for n, _ in case.problem.given}


def through(case: Case, tensors: Tensors, backend: str) -> list[torch.Tensor]:
    """All outputs of the operator."""
    return COMPANION(list(tensors.values()), *write(case.problem.op, tensors, case.problem.options(), backend))


@pytest.mark.parametrize("case", FULLEST, ids=lambda case: case.problem.op)
def test_opcheck(case: Case) -> None:
    tensors = given(case)
    found = opcheck(COMPANION, (list(tensors.values()), *write(case.problem.op, tensors, case.problem.options(), "cpu")))
    assert set(found.values()) == {"SUCCESS"}
    assert len(found) == 4


def test_opcheck_of_the_head() -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(300, 8, requires_grad=True)
    bias, own = torch.randn(300, requires_grad=True), torch.rand(300)
    for more in ((None, torch.arange(6), None, "mean"), (bias, torch.arange(6), own, "none")):
        asked = (*more, 0.1, 0.01, 1.0, 30.0, -100, 2**20, "")
        found = opcheck(HEAD, (x, weight, *asked, [False] * 3))
        assert set(found.values()) == {"SUCCESS"}
        assert len(found) == 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FULLEST, ids=lambda case: case.problem.op)
def test_called_directly_it_is_the_eager_call(case: Case, backend: str, place: torch.device) -> None:
    """Outputs and gradients, bit for bit."""
    made: list[list[torch.Tensor]] = []
    for call in (
        lambda t: list(run(case.problem.op, t, case.problem.options(), backend)),
        lambda t: through(case, t, backend)[: len(case.problem.public())],
    ):
        tensors = given(case, place)
        outputs = call(tensors)
        flowing = [o for o in outputs if o.requires_grad]
        grads = torch.autograd.grad([o.square().sum() for o in flowing], [tensors[name] for name in case.wanted])
        made.append([*outputs, *grads])
        assert [o.requires_grad for o in outputs] == [name not in case.problem.constant() for name in case.problem.public()]
    for eager, operator in zip(*made, strict=True):
        assert torch.equal(eager, operator)


class _Memory(TorchDispatchMode):
    """Compares what each operator of ours gives out with what it was given, and with its other outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (COMPANION, BACKWARD):
            self.seen.append(func)
            places = [t.untyped_storage().data_ptr() for t in (*args[0], *made) if t.numel()]
            held = len({t.untyped_storage().data_ptr() for t in args[0] if t.numel()})
            assert len(set(places)) == held + sum(t.numel() > 0 for t in made), "an output lies in memory of another tensor"
            assert all(t.is_contiguous() for t in made), "the fakes are contiguous"
        return made


@pytest.mark.parametrize("case", TRACED, ids=lambda case: case.name)
def test_outputs_have_memory_of_their_own(case: Case) -> None:
    """As compilers believe, who write over tensors that nobody reads again."""
    tensors = given(case)
    with _Memory() as memory:
        flowing = [o for o in through(case, tensors, "cpu") if o.requires_grad]
        if case.wanted:
            torch.autograd.grad([o.sum() for o in flowing], [tensors[name] for name in case.wanted], allow_unused=True)
    assert memory.seen == [COMPANION, BACKWARD][: 1 + bool(case.wanted)]


def every_op(x: torch.Tensor, backend: str | None = None) -> list[torch.Tensor]:
    """What the public functions make of x (6, 8), with labels, weights and angles that depend on nothing."""
    labels, square = torch.arange(6, device=x.device), torch.ones(8, 8, device=x.device) / 8
    how = {"backend": backend}
    turned = (x * 1.0).view(1, 6, 1, 8)
    angles = torch.linspace(0, 1, 12).view(6, 2).to(x.device)
    return [
        ops.rms_norm(x, square[0] * 8, **how), ops.softmax(x, scale=0.5, **how), ops.mlp(x, square, None, square, **how),
        ops.rotary(x.view(1, 6, 1, 8), None, angles.cos(), angles.sin(), **how),
        ops.rotary(turned, None, angles.cos(), angles.sin(), inplace=True, **how), turned,
        ops.cross_entropy(x, labels, inplace=True, **how), ops.linear_cross_entropy(x, square, labels, **how),
    ]  # fmt: skip


def test_fake_tensors() -> None:
    """As memory is estimated, and models are made that fill no memory."""
    real = every_op(torch.randn(6, 8))
    with FakeTensorMode():
        x = torch.empty(6, 8, requires_grad=True)
        made = every_op(x)
        (dx,) = torch.autograd.grad([t.sum() for t in made], x)
        with torch.no_grad():  # autograd itself wants the driver of a GPU
            away = ops.layer_norm(torch.empty(6, 8, device="cuda"))
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in real]
    assert (dx.shape, away.shape, away.device.type) == (x.shape, x.shape, "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_traced_by_make_fx(backend: str, place: torch.device) -> None:
    """The graph has the operators, and is as good for other numbers."""
    x = torch.randn(6, 8, device=place)
    graph = make_fx(lambda x: every_op(x, backend))(torch.randn(6, 8, device=place))
    for made, expected in zip(graph(x), every_op(x, backend), strict=True):
        assert torch.equal(made, expected)


@pytest.mark.parametrize("case", FULLEST, ids=lambda case: case.problem.op)
def test_vmap_of_recorded_gradients(case: Case) -> None:
    tensors = given(case)
    made = [o for o in run(case.problem.op, tensors, case.problem.options(), "cpu") if o.requires_grad]
    wanted, weights = [tensors[name] for name in case.wanted], [torch.randn(3, *o.shape).to(o.dtype) for o in made]

    def pull(*weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(made, wanted, weights, retain_graph=True)

    mapped = torch.func.vmap(pull)(*weights)
    for i in range(3):
        for got, expected in zip(mapped, pull(*(w[i] for w in weights)), strict=True):
            assert torch.equal(got[i], expected)


def test_a_batch_of_gradients_refuses_where_one_is_all() -> None:
    x, labels = torch.randn(6, 8, requires_grad=True), torch.arange(6)
    for loss in (ops.cross_entropy(x, labels), ops.linear_cross_entropy(x, torch.randn(8, 8), labels)):
        with pytest.raises(NotSupported, match=r"a batch of gradients of (linear_)?cross_entropy"):
            torch.func.vmap(lambda w, loss=loss: torch.autograd.grad(loss, x, w, retain_graph=True))(torch.randn(3))


@pytest.mark.parametrize("names", ["x", "weight1", "bias1", "weight2", "x weight1 bias1 weight2"])
def test_flops_are_those_of_torch(names: str) -> None:
    given = {"x": torch.randn(6, 8), "weight1": torch.randn(16, 8), "bias1": torch.randn(16), "weight2": torch.randn(4, 16)}
    for name in names.split():
        given[name].requires_grad_()

    def counted(function: Any) -> list[int]:
        with FlopCounterMode(display=False) as counter:
            out = function(*given.values())
            forward = counter.get_total_flops()
            torch.autograd.grad(out.sum(), [given[name] for name in names.split()])
        return [forward, counter.get_total_flops()]

    linear = torch.nn.functional.linear
    assert counted(ops.mlp) == counted(lambda x, w, b, v: linear(torch.nn.functional.gelu(linear(x, w, b)), v))
    head = [t.detach().requires_grad_(name in names.split()) for name, t in given.items() if name in ("x", "weight1")]
    with FlopCounterMode(display=False) as counter:
        ops.linear_cross_entropy(*head, torch.arange(6))
    assert counter.get_total_flops() == 2 * 6 * 8 * 16 * (1 + sum(t.requires_grad for t in head))


@pytest.mark.parametrize("loss", [torch.sum, lambda o: o.square().sum()], ids=["linear", "square"])
@pytest.mark.parametrize("case", [c for c in CASES if c.wanted], ids=lambda case: case.name)
def test_second_derivatives_of_each_input_are_right_or_refused(
    case: Case, loss: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """torch.autograd.grad visits what leads to an input alone: each that gradients depend on leads there, or to a refusal.

    And as long as nobody differentiates them, gradients are those that have no graph, but for rounding.
    """

    def doubled(name: str, factor: float) -> tuple[float, float]:
        """A factor of an input times the sum of all gradients there, and the size of what is summed."""
        tensors = given(case)
        scaled = {n: t.detach().mul(factor).requires_grad_() if n == name else t for n, t in tensors.items()}
        outputs = run(case.problem.op, scaled, case.problem.options(), "cpu")
        made = torch.autograd.grad([loss(o) for o in outputs if o.requires_grad], [scaled[n] for n in case.wanted])
        parts = [g.double() * (factor if n == name else 1) for n, g in zip(case.wanted, made, strict=True)]
        return factor * sum(g.sum().item() for g in parts), sum(g.abs().sum().item() for g in parts)

    linear = case.problem.linear if loss is torch.sum else ()
    for recorded in (False, True) if case in TRACED else (False,):
        made: list[tuple[torch.Tensor, ...]] = []
        for create_graph in (False, True):
            tensors = given(case)
            factors = {name: torch.ones((), dtype=tensors[name].dtype, requires_grad=True) for name in case.wanted}
            scaled = {name: t * factors[name] if name in factors else t for name, t in tensors.items()}
            outputs = through(case, scaled, "cpu") if recorded else run(case.problem.op, scaled, case.problem.options(), "cpu")
            total = [loss(o) for o in outputs if o.requires_grad]
            made.append(torch.autograd.grad(total, [tensors[n] for n in case.wanted], create_graph=create_graph))
        for plain, with_graph in zip(*made, strict=True):
            if plain.isfinite().all():  # fp16 may overflow; and a formula rounds otherwise
                eps, most = 8 * torch.finfo(plain.dtype).eps, plain.abs().amax().item() if plain.numel() else 0.0
                torch.testing.assert_close(with_graph, plain, rtol=eps, atol=eps * most + 2e-6)
        for name in case.wanted:
            if name not in linear:
                twice = sum((g * factors[name]).sum() for g in made[1])
                try:
                    (found,) = torch.autograd.grad(twice, factors[name], retain_graph=True)
                except NotSupported as refusal:
                    if "gradients of gradients" not in str(refusal):
                        raise
                    continue
                if all(tensors[n].dtype is torch.float32 for n in case.wanted) and found.isfinite():
                    (ahead, size), (behind, _) = doubled(name, 1.01), doubled(name, 0.99)
                    assert (ahead - behind) / 0.02 == pytest.approx(found.item(), rel=0.05, abs=0.02 * size + 1e-4)


@pytest.mark.parametrize("case", [c for c in CASES if set(c.wanted) & set(c.problem.linear)], ids=lambda case: case.name)
def test_linear_inputs_are_those_that_no_gradient_depends_on(case: Case) -> None:
    """By the reference, where the loss is linear in the outputs."""
    tensors = {name: t.detach().double() if t.is_floating_point() else t for name, t in given(case).items()}
    leaves = [tensors[name].requires_grad_() for name in case.wanted]
    outputs = case.reference({name: t.clone() for name, t in tensors.items()})
    flowing = [o.sum() for name, o in outputs.items() if name not in case.problem.constant() and o.requires_grad]
    grads = torch.autograd.grad(flowing, leaves, create_graph=True)
    twice = sum(g.square().sum() for g in grads) + sum(t.sum() * 0.0 for t in leaves)
    assert isinstance(twice, torch.Tensor)
    for name in set(case.wanted) & set(case.problem.linear):
        assert not torch.autograd.grad(twice, tensors[name], retain_graph=True)[0].any()


class Block(torch.nn.Module):
    """Some of the ops after each other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.up = torch.nn.Parameter(torch.randn(16)), torch.nn.Parameter(torch.randn(24, 16))
        self.register_buffer("angles", torch.randn(64, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, h = ops.rms_norm(x, self.scale, residual=x, prenorm=True)
        q = ops.rotary(out.unflatten(-1, (2, 8)), None, self.angles.cos(), self.angles.sin())
        return ops.softmax(ops.linear_act(q.flatten(-2) + h, self.up))


def test_export_saves_and_loads(tmp_path: Path) -> None:
    model, x = Block(), torch.randn(2, 5, 16)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {1: torch.export.Dim("seqlen", min=2, max=64)}})
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for seqlen in (5, 9):
        x = torch.randn(2, seqlen, 16)
        assert torch.equal(loaded(x), model(x))


@pytest.mark.slow
def test_aot_inductor(tmp_path: Path) -> None:
    model, x = Block().requires_grad_(False), torch.randn(2, 5, 16)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes={"x": {1: torch.export.Dim("seqlen", min=2, max=64)}})
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(path)
        for seqlen in (5, 9):
            x = torch.randn(2, seqlen, 16)
            torch.testing.assert_close(loaded(x), model(x))
