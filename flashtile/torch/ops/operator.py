"""The ops that are not attention as operators of `torch.library`: what torch.compile, torch.func and dispatch modes see.

    flashtile::companion(tensors, text, floats, ints) -> all outputs, or without wanted gradients the caller's
    flashtile::companion_backward(tensors, behind, held, described, sizes, text, floats, ints) -> gradients

One operator for every op: its options as text and its sizes as numbers, that may be symbolic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashtile.errors import InvalidProblem, renamed
from flashtile.kernels.ops.catalogue import OPS
from flashtile.memory import remembered
from flashtile.problem.number import plain
from flashtile.problem.op import Companion, Described, make
from flashtile.torch.execute.bound import TORCH_DTYPES
from flashtile.torch.execute.plain import transforms
from flashtile.torch.ops import formula
from flashtile.torch.ops.call import (
    AS_IT_IS,
    Call,
    Maybe,
    arrivals,
    arrive,
    described,
    distinct,
    hides,
    recall,
    remember,
    wanted_of,
)
from flashtile.torch.routes.derivatives import (
    A_GRAPH_HAS_ITS_OWN,
    AN_OPERATOR_HAS_NONE,
    first_derivatives,
    is_dual_level,
    record_at_level,
    refuse_tangents,
    second_derivative,
)
from flashtile.torch.routes.library import LIBRARY, NAMESPACE, define
from flashtile.torch.routes.mapped import one_by_one
from flashtile.torch.routes.operator import below_autograd


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

    def problem(self, given: Iterable[Described], floats: Sequence[float], ints: Sequence[int]) -> Companion:
        numbers = {**dict(zip(self.floats, floats, strict=True)), **dict(zip(self.ints, ints, strict=True))}
        try:
            return make(self.op, dict(zip(self.names, given, strict=True)), self.options, numbers)
        except InvalidProblem as error:
            raise renamed(error, self.called) from None

    def of(self, tensors: list[torch.Tensor], floats: list[float], ints: list[int]) -> Companion:
        return self.problem(map(described, tensors), floats, ints)

    def call(self, problem: Companion, device: torch.device) -> Call:
        return Call(problem, device, self.backend, self.wanted)


@remembered(4096, "texts of traced ops")
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
    wanted = wanted_of(op, tensors, called)
    names = ",".join([f"{name}={word}" for name, word in called.items()])
    parts = (op, ",".join(tensors), ",".join(wanted), rest, ",".join(floats), ",".join(ints), backend or "", names)
    return "\n".join(parts), list(floats.values()), list(ints.values())


@remembered(4096, "texts of traced ops with gradients")
def wanting(text: str, wanted: tuple[str, ...]) -> str:
    """The same call, of which gradients of these inputs are wanted."""
    parts = text.split("\n", 7)
    parts[2] = ",".join(wanted)
    return "\n".join(parts)


def run_forward(tensors: list[torch.Tensor], text: str, floats: list[float], ints: list[int]) -> list[torch.Tensor]:
    """All outputs of an op's forward; the caller's alone where no gradient is wanted."""
    tensors = [t.resolve_neg() if t.is_neg() else t for t in tensors]
    floats, ints = floats or [], ints or []  # AOTInductor (2.13) hands None where a list is empty
    parts: list[Any] = [text, *floats, *ints, tensors[0].device]
    for t in tensors:
        parts += (t.shape, t.dtype, t.stride(), t.data_ptr() & 15)
    key = tuple(parts)
    call = recall(key)
    if call is None:
        request = read(text)
        call = remember(key, request.call(request.of(tensors, floats, ints), tensors[0].device))
    made = call.forward(dict(zip(call.names, tensors, strict=True)))
    return [made[name] for name in call.made]


def fake_forward(tensors: list[torch.Tensor], text: str, floats: list[float], ints: list[int]) -> list[torch.Tensor]:
    request = read(text)
    problem = request.of(tensors, floats, ints)
    outputs = problem.outputs()
    return _empty(tensors[0], [outputs[name] for name in (outputs if request.wanted else problem.public())])


def run_backward(
    tensors: list[torch.Tensor], behind: list[torch.Tensor], held: str, layout: str, sizes: list[int], text: str,
    floats: list[float], ints: list[int],
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients of the wanted inputs, of those that share one once, from the tensors that `held` names."""
    key: Any = (text, held, layout, *sizes, *floats, *ints, tensors[0].device)
    call = recall(key)
    if call is None:
        request = read(text)
        call = remember(key, request.call(_sized(request, layout, sizes, floats, ints), tensors[0].device))
    made = call.backward(dict(zip(held.split(","), tensors, strict=True)))
    return [made[name] for name in call.distinct]


def fake_backward(
    tensors: list[torch.Tensor], behind: list[torch.Tensor], held: str, layout: str, sizes: list[int], text: str,
    floats: list[float], ints: list[int],
) -> list[torch.Tensor]:  # fmt: skip
    request = read(text)
    problem = _sized(request, layout, sizes, floats, ints)
    return _empty(tensors[0], [problem[name] for name in distinct(problem, request.wanted)])


def _empty(like: torch.Tensor, made: list[Described]) -> list[torch.Tensor]:
    return [like.new_empty(d.shape, dtype=TORCH_DTYPES[d.dtype]) for d in made]


def _sized(request: Request, layout: str, sizes: list[int], floats: list[float], ints: list[int]) -> Companion:
    """layout: dtype and rank of each input; sizes: of all of them."""
    rest, given = list(sizes), []
    for dtype, _, rank in (part.partition(":") for part in layout.split(",")):
        given.append(Described(tuple(rest[: int(rank)]), dtype))
        rest = rest[int(rank) :]
    return request.problem(given, floats, ints)


class _Recorded(torch.autograd.Function):
    """The operator, with its gradients by the other one."""

    @staticmethod
    def forward(ctx: Any, request: Request, asked: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with below_autograd():
            made = COMPANION(list(tensors), *asked)
        problem = request.of(list(tensors), *asked[1:])
        outputs = dict(zip(problem.outputs(), made, strict=True))
        known = {**dict(zip(request.names, tensors, strict=True)), **outputs}
        ctx.held = OPS[request.op].kept(problem, request.wanted)
        hidden = made[0].new_empty(0)
        behind = [hidden] if hides(problem, request.wanted) else []
        if transforms():  # inputs may want gradients at levels below this one, and nothing leads there from what is made here
            kind = OPS[request.op].kind
            led = set(kind.differentiable).difference(ctx.held, kind.linear)
            behind = [known[name] for name in request.names if name in led]
        ctx.save_for_backward(*(known[name] for name in ctx.held), *behind)
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
        inputs = [d for _, d in problem.given]
        made = BACKWARD(
            list(tensors.values()), list(saved[len(ctx.held) :]), ",".join(tensors),
            ",".join(f"{d.dtype}:{len(d.shape)}" for d in inputs), [n for d in inputs for n in d.shape], *ctx.asked,
        )  # fmt: skip
        by_name = dict(zip(distinct(problem, request.wanted), made, strict=True))
        same = OPS[request.op].same(problem, request.wanted)
        by_name.update({name: by_name[other] for name, other in same.items()})
        return None, None, *(by_name.get(name) for name in request.names)


def record(tensors: list[torch.Tensor], text: str, floats: list[float], ints: list[int]) -> list[torch.Tensor]:
    """The operator's outputs, with their gradients where any is wanted.

    Within torch.func's transforms a call does not know which of its tensors want a gradient: here, at the level of one of
    them, they say it.
    """
    request = read(text)
    if formula.is_nested() and not OPS[request.op].over(request.of(tensors, floats, ints)):
        return move(tensors, text, floats, ints)
    asking = wanted_of(request.op, dict(zip(request.names, tensors, strict=True)), request.called)
    wanted = tuple(name for name in request.names if name in request.wanted or name in asking)
    if wanted:
        text = wanting(text, wanted)
        return list(record_at_level(_Recorded, read(text), (text, floats, ints), *tensors))[:-1]
    with below_autograd():
        return COMPANION(tensors, text, floats, ints)


class _Gradients(torch.autograd.Function):
    """The operator of gradients, with theirs by the op's formula, or a refusal. Its inputs are there for their edges too."""

    @staticmethod
    def forward(ctx: Any, count: int, asked: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.asked = asked
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        with below_autograd():
            return tuple(BACKWARD(list(tensors[:count]), list(tensors[count:]), *asked))

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> Any:
        held, layout, sizes, text, floats, ints = ctx.asked
        request, names = read(text), held.split(",")
        problem, op = _sized(request, layout, sizes, floats, ints), OPS[request.op]
        if transforms():
            raise second_derivative(request.op, "autograd", AN_OPERATOR_HAS_NONE)
        given = dict(zip(names, ctx.saved_tensors, strict=False))
        with torch.enable_grad():
            leaves = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in given.items()}
            arriving = {n: t for n, _ in arrivals(problem) if (t := leaves.get(n)) is not None}
            kept = {n: t for n, t in leaves.items() if n not in arriving}
            found = formula.gradients(op, problem, kept, arriving, request.wanted)
            if found is None:
                raise second_derivative(request.op, "autograd", formula.remedy(op, problem, tuple(kept)))
            made = [found[f"d{name}"] for name in distinct(problem, request.wanted)]
            pairs = [(t, g) for t, g in zip(made, grads, strict=True) if g is not None and t.requires_grad]
            sources = [t for t in leaves.values() if t.requires_grad]
            some = torch.autograd.grad([t for t, _ in pairs], sources, [g for _, g in pairs], allow_unused=True)
        second = first_derivatives(f"the gradient of {request.op}", "autograd", some, ctx.saved_tensors, grads)
        by_place = iter(second)
        placed = [next(by_place) if t.requires_grad else None for t in leaves.values()]
        return None, None, *placed, *(None for _ in ctx.saved_tensors[len(names) :])


def record_gradients(tensors: list[torch.Tensor], behind: list[torch.Tensor], *asked: Any) -> list[torch.Tensor]:
    """The gradients, for whoever differentiates them (create_graph, a transform of a transform)."""
    return list(record_at_level(_Gradients, len(tensors), asked, *tensors, *behind))


def move(tensors: list[torch.Tensor], text: str, floats: list[float], ints: list[int]) -> list[torch.Tensor]:
    """The operator's outputs with the tangents that its inputs bring, by the op's formula in plain PyTorch."""
    request = read(text)
    asking = wanted_of(request.op, dict(zip(request.names, tensors, strict=True)), request.called)
    problem, op = request.of(tensors, floats, ints), OPS[request.op]
    if op.over(problem):
        refuse_tangents(request.op, "autograd", tell(tensors, text)[1])
    names = tuple(problem.outputs()) if request.wanted or asking else problem.public()
    return list(formula.made(op, problem, dict(zip(request.names, tensors, strict=True)), names).values())


def tell(tensors: list[torch.Tensor], text: str, *_: Any) -> tuple[str, Iterable[tuple[str, torch.Tensor]]]:
    """The op, and its tensors by its caller's names."""
    request = read(text)
    return request.op, zip((request.called.get(name, name) for name in request.names), tensors, strict=True)


ASKED = "str text, float[] floats, SymInt[] ints"
COMPANION = define(
    f"companion(Tensor[] tensors, {ASKED}) -> Tensor[]", run_forward, fake_forward, record, tell, A_GRAPH_HAS_ITS_OWN, move
)
BACKWARD = define(  # behind: nothing is read of them, but they lead to what gradients depend on, where no other tensor does
    f"companion_backward(Tensor[] tensors, Tensor[] behind, str held, str layout, SymInt[] sizes, {ASKED}) -> Tensor[]",
    run_backward, fake_backward, record_gradients, remedy=AN_OPERATOR_HAS_NONE,
)  # fmt: skip


def _map_forward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    made = one_by_one(COMPANION, info.batch_size, in_dims, args)
    return made, [0] * len(made)


def _map_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    made = one_by_one(BACKWARD, info.batch_size, in_dims, args)
    return made, [0] * len(made)


torch.library.register_vmap(f"{NAMESPACE}::companion", _map_forward, lib=LIBRARY)
torch.library.register_vmap(f"{NAMESPACE}::companion_backward", _map_backward, lib=LIBRARY)


@register_flop_formula(COMPANION.overloadpacket, get_raw=True)
def forward_flops(tensors: list[torch.Tensor], text: str, floats: list[float], ints: list[int], **_: Any) -> int:
    """FLOPs of a forward's products."""
    return read(text).of(tensors, floats, ints).flops()


@register_flop_formula(BACKWARD.overloadpacket, get_raw=True)
def backward_flops(
    tensors: list[torch.Tensor], behind: list[torch.Tensor], held: str, layout: str, sizes: list[int], text: str,
    floats: list[float], ints: list[int], **_: Any,
) -> int:  # fmt: skip
    """FLOPs of a backward's products."""
    request = read(text)
    return _sized(request, layout, sizes, floats, ints).flops(request.wanted)
