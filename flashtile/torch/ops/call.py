"""What torch knows of an op that is not attention: a call bound to one layout, and what its gradients need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashtile.errors import InvalidProblem, renamed
from flashtile.kernels.ops.catalogue import OPS, select
from flashtile.memory import Memory
from flashtile.plan.op import Op, plan_backward, plan_forward
from flashtile.problem.op import Companion, Described
from flashtile.torch.execute.bound import TORCH_DTYPES, Bound, device_of

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items() if name != "fp64"}  # which is for scratch alone
Maybe = torch.Tensor | None
AS_IT_IS: Mapping[str, str] = {}


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, Described]:
    return {name: described(t) for name, t in tensors.items()}


def described(tensor: torch.Tensor) -> Described:
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


def wanted_of(op: str, tensors: Mapping[str, torch.Tensor], called: Mapping[str, str]) -> list[str]:
    """Names of the inputs whose gradient is asked for. Raises InvalidProblem for one that has none."""
    if not torch.is_grad_enabled():
        return []
    wanted = [name for name, tensor in tensors.items() if tensor.requires_grad]
    for name in wanted:
        if name not in OPS[op].kind.differentiable:
            raise InvalidProblem(f"{called.get(name, name)} requires a gradient, which it does not have; detach it.")
    return wanted


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


_CALLS = Memory[Any, Call](8192, "calls of ops")  # by layouts

recall = _CALLS.get


def remember(key: Any, call: Call) -> Call:
    """The call, which `recall` gives for the key from now on."""
    _CALLS[key] = call
    return call
