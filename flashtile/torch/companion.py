"""Runs ops that are not attention: one way for all of them, eager, differentiated and under torch.compile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashtile.errors import InvalidProblem, NotSupported, renamed
from flashtile.kernels.companions.catalogue import OPS, select
from flashtile.plan.companion import Op, plan_backward, plan_forward
from flashtile.spec.companion import Companion, Described, make
from flashtile.spec.number import plain
from flashtile.torch.derivative import NOTHING, each_gradient, first_derivatives, is_dual_level, is_mapped, refuse_tangents
from flashtile.torch.distributed import is_distributed
from flashtile.torch.namespace import LIBRARY, NAMESPACE, define
from flashtile.torch.plain import autocasts, is_compiling, is_watched, is_wrapped, transforms
from flashtile.torch.run import DEVICES, TORCH_DTYPES, Bound, device_of

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items() if name != "fp64"}  # which is for scratch alone
Maybe = torch.Tensor | None
Given = Mapping[str, Maybe]
AS_IT_IS: Mapping[str, str] = {}


def run(
    op: str, given: Given, options: dict[str, Any], backend: str | None = None, called: Mapping[str, str] = AS_IT_IS
) -> tuple[torch.Tensor, ...]:
    """What the op's forward gives its caller, differentiable in what its kind calls differentiable.

    given: the op's tensors in the order of its kind's, None for those that are not there.
    called: the caller's names of tensors and options, where they are not the op's, which errors say.
    """
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    if is_watched(*tensors.values()):
        check_tensors(tensors, called)
        if any(t.dtype not in NAMES for t in tensors.values()):
            make_problem(op, tensors, options, called)  # which says what is wrong, before the operator
        return tuple(COMPANION(list(tensors.values()), *write(op, tensors, options, backend, called)))
    call = prepare(op, tensors, options, backend, called)
    if call.wanted:
        made = (_Differentiable.apply if transforms() else _apply)(call, *tensors.values())
        return made[:-1] if call.hides else made
    made = call.forward(tensors)
    for source in call.overwritten.values():  # launches tell nobody what they write
        torch.autograd.graph.increment_version(tensors[source])
    return tuple([made[name] for name in call.public])


def check_tensor(name: str, tensor: Any) -> None:
    """Raise InvalidProblem unless this is a dense tensor, of which views can be made; `run` checks the rest."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidProblem(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor.")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise InvalidProblem(f"{name} has layout {tensor.layout}; it must be a strided, dense tensor.")


def check_tensors(tensors: Mapping[str, Any], called: Mapping[str, str] = AS_IT_IS) -> None:
    """Raise InvalidProblem unless these are dense tensors on the device of the first; their problem knows the dtypes.

    NotSupported for DTensors, and for tensors of torch.func's transforms.
    """
    device = None
    for name, tensor in tensors.items():
        name = called.get(name, name)
        check_tensor(name, tensor)
        device = tensor.device if device is None else device
        if is_distributed(tensor):
            reason = "what shards make of each other is not known; give it to_local(), and DTensor.from_local what comes back"
            raise NotSupported(f"an op on {name}, a DTensor", {"torch": [reason]})
        if not is_compiling() and is_wrapped(tensor):
            raise within_transforms(f"an op on {name}")
        if not is_compiling() and tensor.is_neg():  # a compiled op resolves it
            raise InvalidProblem(f"{name} is a negated view; it must be a tensor of its own, as resolve_neg() gives.")
        if tensor.device.type not in DEVICES:
            raise InvalidProblem(f"{name} is on {tensor.device}; it must be on the CPU or a GPU, or on meta for shapes alone.")
        if tensor.device != device:
            raise InvalidProblem(f"{name} is on {tensor.device} and others are on {device}; they must be on one device.")


def within_transforms(what: str) -> NotSupported:
    """The refusal of tensors of torch.func's transforms."""
    reason = "their tensors have no memory; use torch.autograd.grad, or call it outside of them"
    return NotSupported(f"{what} within torch.func's transforms", {"torch": [reason]})


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as (rows, last axis): a view where its strides allow one."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def autocast(*factors: Maybe) -> tuple[Any, ...]:
    """What is multiplied, in autocast's dtype where it is enabled: by the rule of torch's own linear."""
    kind = next(t.device.type for t in factors if t is not None)
    if not (autocasts() and torch.is_autocast_enabled(kind)):  # the latter knows not every device
        return factors
    dtype = torch.get_autocast_dtype(kind)
    casts = (t is not None and t.is_floating_point() and t.dtype is not torch.float64 for t in factors)
    return tuple(t.to(dtype) if t is not None and cast else t for t, cast in zip(factors, casts, strict=True))


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, Described]:
    return {name: _described(t) for name, t in tensors.items()}


def _described(tensor: torch.Tensor) -> Described:
    """The tensor, as data. A dtype that no kernel reads is there by torch's name, for the problem to refuse."""
    return Described(tuple(tensor.shape), NAMES.get(tensor.dtype) or str(tensor.dtype))


def make_problem(op: str, tensors: Mapping[str, torch.Tensor], options: dict[str, Any], called: Mapping[str, str]) -> Companion:
    """Validate a call. Raises InvalidProblem naming the argument as its caller does, its value, and what it must be."""
    return check_options(op, describe(tensors), options, called)


def check_options(op: str, given: Mapping[str, Described], options: dict[str, Any], called: Mapping[str, str]) -> Companion:
    """As `make_problem`, of tensors that are not there yet."""
    try:
        return OPS[op].kind(tuple(given.items()), **options)
    except InvalidProblem as error:
        raise renamed(error, called) from None


class Call:
    """An op bound to one layout of its inputs, and the backwards met so far."""

    def __init__(self, problem: Companion, device: torch.device, backend: str | None, wanted: frozenset[str]):
        self.op: Op = OPS[problem.op]
        self.problem, self.device, self.wanted = problem, device, wanted
        self.place = device_of(device)
        self.backend = select(problem, self.place, backend)
        self.plan = plan_forward(self.op, problem, self.place, self.backend, bool(wanted))
        self.names = tuple(name for name, _ in problem.given)
        self.gradients = tuple(f"d{name}" if name in wanted else None for name in self.names)
        self.distinct = tuple(f"d{name}" for name in distinct(problem, wanted))
        self.made, self.public = tuple(b.name for b in self.plan.named("output")), problem.public()
        self.kept, self.hides = (self.op.kept(problem, wanted), hides(problem, wanted)) if wanted else ((), False)
        self.arrivals = arrivals(problem)
        over = self.op.over(problem)
        self.overwritten = {name: source for name, source in over.items() if name in problem.outputs()}
        self.dirty = tuple(name for name in self.public if name in self.overwritten)
        self.consumes = [source for name, source in over.items() if wanted and name not in problem.outputs()]
        self.constant = problem.constant()
        self.bound_forward: Bound | None = None
        self.bound_backward: dict[Any, Bound] = {}

    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors, to which the outputs are added."""
        if self.bound_forward is None:
            self.bound_forward = Bound(self.plan, tensors, self.device)
        return self.bound_forward.run(tensors)

    def backward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors, what was kept and `d<output>` of those outputs whose gradients arrive, to which gradients are added."""
        layouts: list[Any] = [*tensors]
        for t in tensors.values():
            layouts += (t.stride(), t.data_ptr() & 15)
        key = tuple(layouts)
        bound = self.bound_backward.get(key)
        if bound is None:
            arriving = frozenset(name for name in self.public if f"d{name}" in tensors)
            plan = plan_backward(self.op, self.problem, self.place, self.backend, self.wanted, arriving)
            bound = self.bound_backward[key] = Bound(plan, tensors, self.device)
        return bound.run(tensors)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: torch.Tensor) -> Any:
        made = call.forward(dict(zip(call.names, inputs, strict=True)))
        hidden = (NOTHING.detach(),) if call.hides else ()
        ctx.save_for_backward(*[made[name] for name in call.kept], *hidden)
        ctx.call = call
        ctx.set_materialize_grads(False)
        if call.constant:
            ctx.mark_non_differentiable(*[made[name] for name in call.constant])
        if call.dirty:
            ctx.mark_dirty(*[made[name] for name in call.dirty])
        for name, source in call.overwritten.items():  # whoever kept that input for a backward of its own hears of it
            if name not in call.dirty:
                torch.autograd.graph.increment_version(made[source])
        return (*[made[name] for name in call.public], *hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> Any:
        call: Call = ctx.call
        if is_dual_level():
            refuse_tangents(call.problem, call.backend, zip(call.public, grads, strict=False))
        if is_mapped(grads):
            if call.consumes:
                reason = "a backward writes over what the forward kept; ask for eager_gradient=False and inplace=False"
                raise NotSupported(f"a batch of gradients of {call.problem.spell()}", {call.backend: [reason]})
            saved = ctx.saved_tensors

            def differentiate(*some: Maybe) -> list[Maybe]:
                tensors = dict(zip(call.kept, saved, strict=False))
                arrive(tensors, call.arrivals, some, call.device)
                call.backward(tensors)
                return [None if name is None else tensors[name] for name in call.gradients]

            return None, *each_gradient(call.problem, call.backend, differentiate, grads[: len(call.public)])
        if call.consumes:
            if getattr(ctx, "consumed", False):
                reason = "its backward wrote over what the forward had kept; ask for eager_gradient=False and inplace=False"
                raise NotSupported(f"a second backward of {call.problem.spell()}", {call.backend: [reason]})
            ctx.consumed = True
        saved = ctx.saved_tensors
        tensors = dict(zip(call.kept, saved, strict=False))  # what is hidden comes behind them
        arrive(tensors, call.arrivals, grads, call.device)
        if torch.is_grad_enabled():  # create_graph
            with torch.no_grad():
                call.backward(tensors)
        else:
            call.backward(tensors)
        for name in call.consumes:
            torch.autograd.graph.increment_version(tensors[name])
        given = tuple([None if name is None else tensors[name] for name in call.gradients])
        return None, *first_derivatives(call.problem, call.backend, given, saved, grads)


def hides(problem: Companion, wanted: frozenset[str]) -> bool:
    """Whether gradients depend on wanted inputs to which nothing leads that is kept.

    Then a Function gives out one tensor more than its caller sees, without elements, and saves that for `first_derivatives`.
    """
    kept, flowing = OPS[problem.op].kept(problem, wanted), {*problem.public()}.difference(problem.constant())
    return not wanted <= {*kept, *problem.linear} and not flowing.intersection(kept)


def distinct(problem: Companion, wanted: frozenset[str]) -> tuple[str, ...]:
    """The wanted inputs whose gradients are tensors of their own."""
    same = OPS[problem.op].same(problem, wanted)
    return tuple(name for name, _ in problem.given if name in wanted and name not in same)


# What `Function.apply` comes to outside of torch.func's transforms; tensors that outlived one have no address, and are refused.
_apply: Any = super(torch.autograd.Function, _Differentiable).apply  # pyright: ignore[reportAttributeAccessIssue]


Arrivals = tuple[tuple[str, Described | None], ...]


def arrivals(problem: Companion) -> Arrivals:
    """Gradients of the caller's outputs by name; with what they look like, those that a backward needs."""
    outputs, needed = problem.outputs(), problem.always_arrive()
    return tuple((f"d{name}", outputs[name] if name in needed else None) for name in problem.public())


def arrive(tensors: dict[str, torch.Tensor], expected: Arrivals, grads: Sequence[Maybe], device: torch.device) -> None:
    """Add the gradients that arrive to the tensors; zero where one that is needed does not."""
    for (name, needed), grad in zip(expected, grads, strict=False):
        if grad is not None:
            tensors[name] = grad.resolve_neg() if grad.is_neg() else grad
        elif needed is not None:
            tensors[name] = torch.zeros((), dtype=TORCH_DTYPES[needed.dtype], device=device).expand(needed.shape)


_CALLS: dict[Any, Call] = {}
_MOST_CALLS = 8192  # layouts remembered; past this the memory is started afresh


def _remember(key: Any, call: Call) -> Call:
    if len(_CALLS) >= _MOST_CALLS:
        _CALLS.clear()
    _CALLS[key] = call
    return call


def prepare(
    op: str, tensors: dict[str, torch.Tensor], options: dict[str, Any], backend: str | None,
    called: Mapping[str, str] = AS_IT_IS,
) -> Call:  # fmt: skip
    """The call of these arguments. Everything is validated at first sight of a layout. called: as in `run`."""
    differentiates = torch.is_grad_enabled()
    parts: list[Any] = [op, backend, *options, *options.values(), *map(type, options.values())]
    try:
        for name, t in tensors.items():
            parts += (
                name, t.shape, t.dtype, t.device, t.is_neg(), differentiates and t.requires_grad, t.stride(), t.data_ptr() & 15,
            )  # fmt: skip
    except (AttributeError, RuntimeError):
        check_tensors(tensors, called)  # which says what is wrong
        raise
    key: Any = tuple(parts)
    try:
        call = _CALLS.get(key)
    except TypeError:  # an option is not hashable: let validation say what is wrong
        key, call = None, None
    if call is None:
        check_tensors(tensors, called)
        kind, problem = OPS[op].kind, make_problem(op, tensors, options, called)
        assert list(tensors) == [name for name in kind.tensors if name in tensors]
        wanted = frozenset(n for n in kind.differentiable if n in tensors and differentiates and tensors[n].requires_grad)
        call = Call(problem, next(iter(tensors.values())).device, backend, wanted)
        if key is not None and not any(isinstance(v, torch.Tensor) for v in options.values()):  # whose numbers may change
            _remember(key, call)
    if is_dual_level() and (call.wanted or call.backend != "cpu"):  # which computes in PyTorch, with tangents
        refuse_tangents(op, call.backend, ((called.get(name, name), t) for name, t in tensors.items()))
    return call


# -- torch.compile: one operator for every op, its options as text and its sizes as numbers, that may be symbolic -----------


@dataclass(frozen=True)
class Request:
    """A call without its tensors and numbers, which is what compiled code may be specialised on."""

    op: str
    names: tuple[str, ...]  # of the tensors
    wanted: frozenset[str]
    options: str
    floats: tuple[str, ...]  # options
    ints: tuple[str, ...]
    backend: str | None
    called: dict[str, str]  # what the caller calls tensors and options

    def problem(self, described: Iterable[Described], floats: Sequence[float], ints: Sequence[int]) -> Companion:
        numbers = {**dict(zip(self.floats, floats, strict=True)), **dict(zip(self.ints, ints, strict=True))}
        try:
            return make(self.op, dict(zip(self.names, described, strict=True)), self.options, numbers)
        except InvalidProblem as error:
            raise renamed(error, self.called) from None

    def of(self, tensors: list[torch.Tensor], floats: list[float], ints: list[int]) -> Companion:
        return self.problem(map(_described, tensors), floats, ints)

    def call(self, problem: Companion, device: torch.device) -> Call:
        return Call(problem, device, self.backend, self.wanted)


@lru_cache(maxsize=4096)
def read(text: str) -> Request:
    """The request that `write` wrote."""
    op, names, wanted, options, floats, ints, backend, called = text.split("\n", 7)
    asked = (op, _words(names), frozenset(_words(wanted)), options, _words(floats), _words(ints), backend or None)
    return Request(*asked, dict(pair.split("=") for pair in _words(called)))  # pyright: ignore[reportArgumentType]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def write(
    op: str, tensors: dict[str, torch.Tensor], options: dict[str, Any], backend: str | None,
    called: Mapping[str, str] = AS_IT_IS,
) -> tuple[str, list[float], list[int]]:  # fmt: skip
    """(text, floats, ints) of a call; `read` is the text's inverse."""
    options = {name: plain(value) for name, value in options.items()}
    floats = {name: value for name, value in options.items() if isinstance(value, float)}
    ints = {name: value for name, value in options.items() if isinstance(value, int) and not isinstance(value, bool)}
    rest = ";".join(f"{n}={v!r}" for n, v in options.items() if n not in floats and n not in ints)
    differentiates = torch.is_grad_enabled()
    wanted = [n for n in OPS[op].kind.differentiable if n in tensors and differentiates and tensors[n].requires_grad]
    names = ",".join([f"{name}={word}" for name, word in called.items()])
    parts = (op, ",".join(tensors), ",".join(wanted), rest, ",".join(floats), ",".join(ints), backend or "", names)
    return "\n".join(parts), list(floats.values()), list(ints.values())


def run_forward(tensors: list[torch.Tensor], text: str, floats: list[float], ints: list[int]) -> list[torch.Tensor]:
    """All outputs of an op's forward; the caller's alone where no gradient is wanted."""
    tensors = [t.resolve_neg() if t.is_neg() else t for t in tensors]
    floats, ints = floats or [], ints or []  # AOTInductor (2.13) hands None where a list is empty
    parts: list[Any] = [text, *floats, *ints, tensors[0].device]
    for t in tensors:
        parts += (t.shape, t.dtype, t.stride(), t.data_ptr() & 15)
    key = tuple(parts)
    call = _CALLS.get(key)
    if call is None:
        request = read(text)
        call = _remember(key, request.call(request.of(tensors, floats, ints), tensors[0].device))
    made = call.forward(dict(zip(call.names, tensors, strict=True)))
    return [made[name] for name in call.made]


def fake_forward(tensors: list[torch.Tensor], text: str, floats: list[float], ints: list[int]) -> list[torch.Tensor]:
    request = read(text)
    problem = request.of(tensors, floats, ints)
    outputs = problem.outputs()
    return _empty(tensors[0], [outputs[name] for name in (outputs if request.wanted else problem.public())])


def run_backward(
    tensors: list[torch.Tensor], held: str, described: str, sizes: list[int], text: str, floats: list[float], ints: list[int]
) -> list[torch.Tensor]:
    """The gradients of the wanted inputs, of those that share one once, from the tensors that `held` names."""
    key: Any = (text, held, described, *sizes, *floats, *ints, tensors[0].device)
    call = _CALLS.get(key)
    if call is None:
        request = read(text)
        call = _remember(key, request.call(_sized(request, described, sizes, floats, ints), tensors[0].device))
    made = call.backward(dict(zip(held.split(","), tensors, strict=True)))
    return [made[name] for name in call.distinct]


def fake_backward(
    tensors: list[torch.Tensor], held: str, described: str, sizes: list[int], text: str, floats: list[float], ints: list[int]
) -> list[torch.Tensor]:
    request = read(text)
    problem = _sized(request, described, sizes, floats, ints)
    return _empty(tensors[0], [problem[name] for name in distinct(problem, request.wanted)])


def _empty(like: torch.Tensor, described: list[Described]) -> list[torch.Tensor]:
    return [like.new_empty(d.shape, dtype=TORCH_DTYPES[d.dtype]) for d in described]


def _sized(request: Request, described: str, sizes: list[int], floats: list[float], ints: list[int]) -> Companion:
    """described: dtype and rank of each input; sizes: of all of them."""
    rest, given = list(sizes), []
    for dtype, _, rank in (part.partition(":") for part in described.split(",")):
        given.append(Described(tuple(rest[: int(rank)]), dtype))
        rest = rest[int(rank) :]
    return request.problem(given, floats, ints)


class _Recorded(torch.autograd.Function):
    """The operator, with its gradients by the other one."""

    @staticmethod
    def forward(ctx: Any, request: Request, asked: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            made = COMPANION(list(tensors), *asked)
        problem = request.of(list(tensors), *asked[1:])
        outputs = dict(zip(problem.outputs(), made, strict=True))
        known = {**dict(zip(request.names, tensors, strict=True)), **outputs}
        ctx.held = OPS[request.op].kept(problem, request.wanted)
        hidden = made[0].new_empty(0)
        saved = [*(known[name] for name in ctx.held), hidden]
        ctx.save_for_backward(*(saved if hides(problem, request.wanted) else saved[:-1]))
        ctx.request, ctx.asked, ctx.problem, ctx.device = request, asked, problem, tensors[0].device
        ctx.set_materialize_grads(False)
        differentiable = set(problem.public()).difference(problem.constant())
        ctx.mark_non_differentiable(*(t for name, t in outputs.items() if name not in differentiable))
        return (*made, hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> Any:
        request, problem, saved = ctx.request, ctx.problem, ctx.saved_tensors
        if is_dual_level():
            refuse_tangents(problem, "autograd", zip(problem.public(), grads, strict=False))
        tensors = dict(zip(ctx.held, saved, strict=False))
        arrive(tensors, arrivals(problem), grads, ctx.device)
        described = [d for _, d in problem.given]
        made = BACKWARD(
            list(tensors.values()), ",".join(tensors), ",".join(f"{d.dtype}:{len(d.shape)}" for d in described),
            [n for d in described for n in d.shape], *ctx.asked,
        )  # fmt: skip
        by_name = dict(zip(distinct(problem, request.wanted), made, strict=True))
        same = OPS[request.op].same(problem, request.wanted)
        by_name.update({name: by_name[other] for name, other in same.items()})
        given = tuple(by_name.get(name) for name in request.names)
        return None, None, *first_derivatives(request.op, "autograd", given, saved, grads)


def record(tensors: list[torch.Tensor], text: str, floats: list[float], ints: list[int]) -> list[torch.Tensor]:
    """The operator's outputs, with their gradients where any is wanted."""
    if any(map(is_wrapped, tensors)):
        raise within_transforms("an op")
    request = read(text)
    if request.wanted:
        return list(_Recorded.apply(request, (text, floats, ints), *tensors))[:-1]
    with torch._C._AutoDispatchBelowAutograd():
        return COMPANION(tensors, text, floats, ints)


ASKED = "str text, float[] floats, SymInt[] ints"
COMPANION = define(f"companion(Tensor[] tensors, {ASKED}) -> Tensor[]", run_forward, fake_forward, record)
BACKWARD = define(
    f"companion_backward(Tensor[] tensors, str held, str described, SymInt[] sizes, {ASKED}) -> Tensor[]",
    run_backward, fake_backward,
)  # fmt: skip


def _map(*_: Any) -> Any:
    raise within_transforms("an op")


torch.library.register_vmap(f"{NAMESPACE}::companion", _map, lib=LIBRARY)


@register_flop_formula(COMPANION.overloadpacket, get_raw=True)
def forward_flops(tensors: list[torch.Tensor], text: str, floats: list[float], ints: list[int], **_: Any) -> int:
    """FLOPs of a forward's products."""
    return read(text).of(tensors, floats, ints).flops()


@register_flop_formula(BACKWARD.overloadpacket, get_raw=True)
def backward_flops(
    tensors: list[torch.Tensor], held: str, described: str, sizes: list[int], text: str, floats: list[float], ints: list[int],
    **_: Any,
) -> int:  # fmt: skip
    """FLOPs of a backward's products."""
    request = read(text)
    return _sized(request, described, sizes, floats, ints).flops(request.wanted)
