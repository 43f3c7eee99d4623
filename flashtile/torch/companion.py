"""Runs ops that are not attention: one way for all of them, eager, differentiated and under torch.compile."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.kernels.companions.catalogue import OPS, select
from flashtile.plan.companion import Op, plan_backward, plan_forward
from flashtile.spec.companion import Companion, Described, make
from flashtile.torch.derivative import first_derivatives
from flashtile.torch.namespace import NAMESPACE
from flashtile.torch.run import TORCH_DTYPES, Bound, device_of

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items() if name != "fp64"}  # which is for scratch alone
Given = Mapping[str, torch.Tensor | None]


def run(op: str, given: Given, options: dict[str, Any], backend: str | None = None) -> tuple[torch.Tensor, ...]:
    """What the op's forward gives its caller, differentiable in what its kind calls differentiable."""
    ordered = ((name, given.get(name)) for name in OPS[op].kind.tensors)
    tensors = {name: tensor for name, tensor in ordered if tensor is not None}
    if torch.compiler.is_compiling():
        return _run_compiled(op, tensors, options, backend)
    call = prepare(op, tensors, options, backend)
    if call.wanted:
        return _Differentiable.apply(call, *tensors.values())  # pyright: ignore[reportReturnType, reportGeneralTypeIssues]
    made = call.forward(tensors)
    return tuple(made[name] for name in call.public)


def check_tensor(name: str, tensor: Any, like: torch.Tensor | None = None) -> None:
    """Raise InvalidProblem unless this is a dense tensor that a kernel can read, on the device of `like`."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidProblem(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor.")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise InvalidProblem(f"{name} has layout {tensor.layout}; it must be a strided, dense tensor.")
    if not torch.compiler.is_compiling() and tensor.is_neg():  # a compiled op resolves it
        raise InvalidProblem(f"{name} is a negated view; it must be a tensor of its own, as resolve_neg() gives.")
    if tensor.dtype not in NAMES:
        raise InvalidProblem(f"{name} is {tensor.dtype}; it must be one of {', '.join(NAMES[d] for d in NAMES)}.")
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidProblem(f"{name} is on {tensor.device}; it must be on the CPU or a GPU.")
    if like is not None and tensor.device != like.device:
        raise InvalidProblem(f"{name} is on {tensor.device} and others are on {like.device}; they must be on one device.")


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as (rows, last axis): a view where its strides allow one."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, Described]:
    return {name: Described(tuple(t.shape), NAMES[t.dtype]) for name, t in tensors.items()}


class Call:
    """An op bound to one layout of its inputs, and the backwards met so far."""

    def __init__(self, problem: Companion, device: torch.device, backend: str | None, wanted: frozenset[str]):
        self.op: Op = OPS[problem.op]
        self.problem, self.device, self.wanted = problem, device, wanted
        self.place = device_of(device)
        self.backend = select(problem, self.place, backend)
        self.plan = plan_forward(self.op, problem, self.place, self.backend, bool(wanted))
        self.names = tuple(name for name, _ in problem.given)
        self.public = problem.public()
        self.kept = self.op.kept(problem, wanted) if wanted else ()
        over = self.op.over(problem)
        self.overwritten = {name: source for name, source in over.items() if name in problem.outputs()}
        self.consumes = [source for name, source in over.items() if wanted and name not in problem.outputs()]
        self.constant = problem.constant()
        self.bound_forward: Bound | None = None
        self.bound_backward: dict[Any, Bound] = {}

    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = dict(tensors)
        if self.bound_forward is None:
            self.bound_forward = Bound(self.plan, tensors, self.device)
        return self.bound_forward.run(tensors)

    def backward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients from what was kept, and from `d<output>` of those outputs whose gradients arrive."""
        key = tuple((name, *_layout(t)) for name, t in tensors.items())
        bound = self.bound_backward.get(key)
        if bound is None:
            arriving = frozenset(name for name in self.public if f"d{name}" in tensors)
            plan = plan_backward(self.op, self.problem, self.place, self.backend, self.wanted, arriving)
            bound = self.bound_backward[key] = Bound(plan, tensors, self.device)
        return bound.run(dict(tensors))


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: torch.Tensor) -> Any:
        given = dict(zip(call.names, inputs, strict=True))
        made = call.forward(given)
        ctx.save_for_backward(*(made[name] for name in call.kept))
        ctx.call = call
        ctx.set_materialize_grads(False)
        results = [made[name] for name in call.public]
        ctx.mark_non_differentiable(*(made[name] for name in call.constant))
        ctx.mark_dirty(*(made[name] for name in call.public if name in call.overwritten))
        for name, source in call.overwritten.items():  # whoever kept that input for a backward of its own hears of it
            if name not in call.public:
                torch.autograd.graph.increment_version(given[source])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call: Call = ctx.call
        if call.consumes and getattr(ctx, "consumed", False):
            reason = "its backward wrote over what the forward had kept; ask for eager_gradient=False and inplace=False"
            raise NotSupported(f"a second backward of {call.problem.spell()}", {call.backend: [reason]})
        ctx.consumed = True
        tensors = dict(zip(call.kept, ctx.saved_tensors, strict=True))
        with torch.no_grad():
            tensors.update(arriving(call.problem, grads, call.device))
            made = call.backward(tensors)
            given = tuple(made[f"d{name}"] if name in call.wanted else None for name in call.names)
        for name in call.consumes:
            torch.autograd.graph.increment_version(tensors[name])
        return (None, *first_derivatives(call.problem, call.plan.backend, given))


def arriving(problem: Companion, grads: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """The gradients that arrive, by name; zero where one that is needed does not."""
    outputs, needed = problem.outputs(), problem.always_arrive()
    found: dict[str, torch.Tensor] = {}
    for name, grad in zip(problem.public(), grads, strict=True):
        if grad is not None:
            found[f"d{name}"] = grad.resolve_neg()
        elif name in needed:
            zero = torch.zeros((), dtype=TORCH_DTYPES[outputs[name].dtype], device=device)
            found[f"d{name}"] = zero.expand(outputs[name].shape)
    return found


_CALLS: dict[Any, Call] = {}
_MOST_CALLS = 8192  # layouts remembered; past this the memory is started afresh


def prepare(op: str, tensors: dict[str, torch.Tensor], options: dict[str, Any], backend: str | None) -> Call:
    """The call of these arguments. Everything is validated at first sight of a layout."""
    differentiates = torch.is_grad_enabled()
    key: Any = (op, backend, *options.items(), *map(type, options.values()))
    for name, t in tensors.items():
        key += (name, t.shape, t.dtype, t.device, differentiates and t.requires_grad, *_layout(t))
    try:
        call = _CALLS.get(key)
    except TypeError:  # an option is not hashable: let validation say what is wrong
        key, call = None, None
    if call is None:
        kind = OPS[op].kind
        problem = kind(tuple(describe(tensors).items()), **options)
        wanted = frozenset(n for n in kind.differentiable if n in tensors and differentiates and tensors[n].requires_grad)
        call = Call(problem, next(iter(tensors.values())).device, backend, wanted)
        if key is not None:
            if len(_CALLS) >= _MOST_CALLS:
                _CALLS.clear()
            _CALLS[key] = call
    return call


def _layout(tensor: torch.Tensor) -> tuple[Any, int]:
    return tensor.stride(), tensor.data_ptr() & 15


# -- torch.compile: one operator for every op, its options as text and its sizes as numbers, that may be symbolic -----------


def _run_compiled(op: str, tensors: dict[str, torch.Tensor], options: dict[str, Any], backend: str | None) -> Any:
    floats = {name: value for name, value in options.items() if isinstance(value, float)}
    ints = {name: value for name, value in options.items() if isinstance(value, int) and not isinstance(value, bool)}
    rest = ";".join(f"{n}={v!r}" for n, v in options.items() if n not in floats and n not in ints)
    text = f"{rest}|{','.join(floats)}|{','.join(ints)}"
    differentiates = torch.is_grad_enabled()
    wanted = [n for n in OPS[op].kind.differentiable if n in tensors and differentiates and tensors[n].requires_grad]
    return companion(
        op, text, list(floats.values()), list(ints.values()), backend or "", ",".join(tensors), ",".join(wanted),
        list(tensors.values()),
    )  # fmt: skip


def _problem(op: str, options: Any, names: list[str], shapes: list[Any], dtypes: list[str]) -> Companion:
    """options: text, floats, ints, as `_run_compiled` writes them."""
    given = {name: Described(tuple(shape), dtype) for name, shape, dtype in zip(names, shapes, dtypes, strict=True)}
    text, floats, ints = options[0].split("|")
    numbers = {**dict(zip(floats.split(","), options[1], strict=False)), **dict(zip(ints.split(","), options[2], strict=False))}
    return make(op, given, text, numbers)


def _problem_of(op: str, options: Any, names: str, tensors: list[torch.Tensor]) -> Companion:
    return _problem(op, options, names.split(","), [t.shape for t in tensors], [NAMES[t.dtype] for t in tensors])


@lru_cache(maxsize=4096)
def _compiled_call(problem: Companion, device: torch.device, backend: str, wanted: str, layouts: Any) -> Call:
    return Call(problem, device, backend or None, frozenset(wanted.split(",") if wanted else ()))


@torch.library.custom_op(f"{NAMESPACE}::companion", mutates_args=())
def companion(
    op: str, options: str, floats: list[float], ints: list[int], backend: str, names: str, wanted: str,
    tensors: list[torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    """All outputs of an op's forward; the caller's alone where no gradient is wanted."""
    tensors = [t.resolve_neg() for t in tensors]
    problem = _problem_of(op, (options, floats, ints), names, tensors)
    call = _compiled_call(problem, tensors[0].device, backend, wanted, tuple(_layout(t) for t in tensors))
    made = call.forward(dict(zip(names.split(","), tensors, strict=True)))
    return [made[name] for name in (problem.outputs() if wanted else problem.public())]


@companion.register_fake
def _(
    op: str, options: str, floats: list[float], ints: list[int], backend: str, names: str, wanted: str,
    tensors: list[torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    problem = _problem_of(op, (options, floats, ints), names, tensors)
    outputs = problem.outputs()
    found = [outputs[name] for name in (outputs if wanted else problem.public())]
    return [tensors[0].new_empty(d.shape, dtype=TORCH_DTYPES[d.dtype]) for d in found]


@torch.library.custom_op(f"{NAMESPACE}::companion_backward", mutates_args=())
def companion_backward(
    op: str, options: str, floats: list[float], ints: list[int], backend: str, names: str, dtypes: str, ranks: str,
    sizes: list[int], wanted: str, held: str, tensors: list[torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients of the wanted inputs, from the tensors that `held` names."""
    problem = _sized(op, (options, floats, ints), names, dtypes, ranks, sizes)
    by_name = dict(zip(held.split(","), tensors, strict=True))
    layouts = tuple(_layout(t) for t in tensors)
    call = _compiled_call(problem, tensors[0].device, backend, wanted, layouts)
    made = call.backward(by_name)
    return [made[f"d{name}"] for name in _distinct(problem, wanted)]


@companion_backward.register_fake
def _(
    op: str, options: str, floats: list[float], ints: list[int], backend: str, names: str, dtypes: str, ranks: str,
    sizes: list[int], wanted: str, held: str, tensors: list[torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    problem = _sized(op, (options, floats, ints), names, dtypes, ranks, sizes)
    found = [problem[name] for name in _distinct(problem, wanted)]
    return [tensors[0].new_empty(d.shape, dtype=TORCH_DTYPES[d.dtype]) for d in found]


def _distinct(problem: Companion, wanted: str) -> list[str]:
    """The wanted inputs whose gradients are tensors of their own."""
    same = OPS[problem.op].same(problem, frozenset(wanted.split(",")))
    return [name for name in wanted.split(",") if name not in same]


def _sized(op: str, options: Any, names: str, dtypes: str, ranks: str, sizes: list[int]) -> Companion:
    rest, shapes = list(sizes), []
    for rank in ranks.split(","):
        shapes.append(rest[: int(rank)])
        rest = rest[int(rank) :]
    return _problem(op, options, names.split(","), shapes, dtypes.split(","))


def _setup(ctx: Any, inputs: Any, output: list[torch.Tensor]) -> None:
    op, options, floats, ints, backend, names, wanted, tensors = inputs
    problem = _problem_of(op, (options, floats, ints), names, tensors)
    known = {**dict(zip(names.split(","), tensors, strict=True)), **dict(zip(problem.outputs(), output, strict=True))}
    ctx.held = OPS[op].kept(problem, frozenset(wanted.split(",")))
    ctx.save_for_backward(*(known[name] for name in ctx.held))
    ctx.problem, ctx.names, ctx.wanted, ctx.device = problem, names, wanted, tensors[0].device
    ctx.request = (op, options, floats, ints, backend)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grads: list[torch.Tensor | None]) -> Any:
    tensors = dict(zip(ctx.held, ctx.saved_tensors, strict=True))
    tensors.update(arriving(ctx.problem, grads[: len(ctx.problem.public())], ctx.device))
    described = [d for _, d in ctx.problem.given]
    made = companion_backward(
        *ctx.request, ctx.names, ",".join(d.dtype for d in described), ",".join(str(len(d.shape)) for d in described),
        [n for d in described for n in d.shape], ctx.wanted, ",".join(tensors), list(tensors.values()),
    )  # fmt: skip
    by_name = dict(zip(_distinct(ctx.problem, ctx.wanted), made, strict=True))
    same = OPS[ctx.problem.op].same(ctx.problem, frozenset(ctx.wanted.split(",")))
    by_name.update({name: by_name[other] for name, other in same.items()})
    floats, ints = (None if numbers else [] for numbers in ctx.request[2:4])  # an empty list counts as one of tensors
    return None, None, floats, ints, None, None, None, [by_name.get(name) for name in ctx.names.split(",")]


companion.register_autograd(_differentiate, setup_context=_setup)
