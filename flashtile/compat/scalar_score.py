"""A score modifier made of what a recorded function of scalars does with the score.

What does not depend on the score is a tensor that the modifier captures, with an element for each of those of (batch, head,
q_idx, kv_idx) that it depends on. Only arithmetic on what depends on a query and on a key is left to be done at every score: it
then takes no memory. A gather or a reduction at every pair of query and key takes an element for each.

On the CPU the modifier is the function itself, mapped over a tile by torch.vmap. `device_code.py` writes it in Triton.
"""

from __future__ import annotations

import math
from math import prod
from typing import Any

import torch

from flashtile.compat.device_code import Kernels, kernels_of
from flashtile.compat.device_text import POINTWISE
from flashtile.problem.score import Captured, Position, Score
from flashtile.torch.api.recording import ATEN, INPUT, INPUTS, LITERAL, Node, ancestors, each, evaluate, refusal
from flashtile.torch.api.spread import Spread, mapped
from flashtile.torch.execute.bound import DTYPE_NAMES, DTYPES
from flashtile.triton_glue.language import INTERPRETED

MOST_NUMBERS = 64  # of a captured vector that meets the score
BOTH = {"q_idx", "kv_idx"}
NUMBERED = ("add", "sub", "rsub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")
_KINDS: dict[tuple[str, bool], type[ScalarScore]] = {}  # by their code, and whether kernels have it


class Code:
    """What is done at every score: nodes over inputs, captured scalars (`leaves`) and numbers that calls may change."""

    def __init__(self, result: Node, subject: str):
        self.subject = subject
        self.leaves: list[Node] = []  # of what they are made, beyond this code
        self.given: list[Node] = []  # what stands for them here
        self.numbers: list[float] = []
        self.standing: list[Node] = []  # what stands for the numbers
        self.lines: list[str] = []
        self._known: dict[int, Node] = {}
        self._serial = 0
        self.result = self._copy(result)

    @property
    def text(self) -> str:
        """What two functions have in common that differ in the tensors and the finite numbers alone."""
        return "\n".join(self.lines)

    def _new(self, op: Any, args: Any, kwargs: Any, of: Node) -> Node:
        self._serial += 1
        return Node(op, args, kwargs, of.needs, self._serial, of.shape, of.dtype, of.detached)

    def _copy(self, root: Node) -> Node:
        stop = lambda n: not self._is_here(n)  # noqa: E731
        for node in ancestors([root], stop):
            if id(node) in self._known:
                continue
            number = node.args[0] if node.op == LITERAL or node.name == "scalar_tensor" else None
            if _may_change(number, node.dtype):
                self._known[id(node)] = self._number(number, node)
            elif self._is_here(node):
                self._known[id(node)] = made = self._line(node)
                self._write(made)
            elif node.dtype is not None:
                self._known[id(node)] = self._leaf(node)
        return self._known[id(root)]

    def _line(self, node: Node) -> Node:
        args, kwargs = (each(self._argument, part) for part in (node.args, node.kwargs))
        op = node.op
        if node.name in NUMBERED and len(args) == 2 and node.op._overloadname in ("Tensor", "Scalar"):
            dtypes = {a.dtype for a in args if isinstance(a, Node)}
            if len(dtypes) == 1 and any(_may_change(a, *dtypes) for a in args):
                like = next(a for a in args if isinstance(a, Node))
                args = tuple(self._number(a, like) if _may_change(a, *dtypes) else a for a in args)
                op = getattr(ATEN, "sub" if node.name == "rsub" else node.name).Tensor
                args = args[::-1] if node.name == "rsub" else args
        return self._new(op, args, kwargs, node)

    def _number(self, number: Any, like: Node) -> Node:
        """What stands for a number, of the dtype that it has in torch: another one is no other code."""
        stands = Node(INPUT, (f"number{len(self.numbers)}",), {}, frozenset(), 0, (), like.dtype)
        self.numbers.append(float(number))
        self.standing.append(stands)
        self.lines.append(f"{stands.args[0]}: {like.dtype}")
        return stands

    @staticmethod
    def _is_here(node: Node) -> bool:
        constant = node.op in (INPUT, LITERAL) or node.name == "scalar_tensor"
        return constant or "score" in node.needs or (node.needs >= BOTH and in_place(node, deep=False))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self._known[id(value)]
        if isinstance(value, torch.Tensor):
            if id(value) not in self._known:
                self._known[id(value)] = self._leaf(_alias(value))
            return self._known[id(value)]
        return value

    def _leaf(self, node: Node) -> Node:
        """What stands for a captured value here; a vector's numbers are captured one by one."""
        if not node.shape:
            return self._scalar(node)
        count = prod(node.shape)
        if count > MOST_NUMBERS:
            raise refusal(self.subject, f"the score meets a tensor of {count} numbers at once; supported are {MOST_NUMBERS}")
        flat = Node(ATEN.reshape.default, (node, [count]), {}, node.needs, node.serial + 0.25, (count,), node.dtype)
        numbers = [
            self._scalar(Node(ATEN.select.int, (flat, 0, i), {}, node.needs, node.serial + 0.5, (), node.dtype))
            for i in range(count)
        ]
        row = self._new(ATEN.stack.default, (numbers,), {}, flat)
        self._write(row)
        whole = self._new(ATEN.view.default, (row, list(node.shape)), {}, node)
        self._write(whole)
        return whole

    def _scalar(self, node: Node) -> Node:
        stands = Node(INPUT, (f"leaf{len(self.leaves)}",), {}, node.needs, 0, (), node.dtype)
        self.leaves.append(node)
        self.given.append(stands)
        self.lines.append(f"{stands.args[0]}: {node.dtype}")
        return stands

    def _write(self, node: Node) -> None:
        def told(value: Any) -> Any:
            if isinstance(value, Node):
                return f"%{value.serial}" if value.op != INPUT else value.args[0]
            return "" if isinstance(value, torch.device) else value

        self.lines.append(f"%{node.serial} = {node.op} {each(told, node.args)} {each(told, node.kwargs)} "
                          f"{node.dtype} {node.shape} {node.detached}")  # fmt: skip


def _may_change(value: Any, dtype: torch.dtype | None) -> bool:
    """Whether it is a number that is handed to kernels with each call: a finite float."""
    return isinstance(value, float) and math.isfinite(value) and dtype in (torch.float32, torch.float64)


def _alias(tensor: torch.Tensor) -> Node:
    return Node(ATEN.alias.default, (tensor,), {}, frozenset(), 0, tuple(tensor.shape), tensor.dtype)


def in_place(node: Node, deep: bool = True) -> bool:
    """Whether kernels make it at every score: arithmetic on scalars. deep: all that depends on a query and a key is such."""
    if node.op == INPUT:
        return True
    scalars = not node.shape and all(not parent.shape and parent.dtype is not None for parent in node.parents)
    if not scalars or node.name not in POINTWISE or any(isinstance(a, torch.Tensor) and a.dim() for a in node.args):
        return False
    return not deep or all(in_place(parent) for parent in node.parents if parent.needs >= BOTH)


class ScalarScore:
    """Base of the modifiers made here, beside `Score`."""

    code: Code
    name = ""

    def __init__(self, numbers: tuple[float, ...], values: tuple[torch.Tensor, ...]):
        self.numbers, self.values = numbers, values

    def scalars(self) -> tuple[float, ...]:
        return self.numbers

    def tensors(self, batch: int, heads_q: int) -> tuple[torch.Tensor, ...]:
        return self.values

    @classmethod
    def map(
        cls, score: torch.Tensor, at: Position, numbers: tuple[float, ...], tensors: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """The modified scores of a tile, by torch.vmap."""
        code, device = cls.code, score.device
        places = [index.reshape(-1) for index in (at.batch, at.head, at.row, at.k)]
        given: list[torch.Tensor] = [score.to(torch.float32), *(place.to(torch.int64) for place in places)]
        rows: list[list[int | None]] = [[0, *(0 if j == i else None for j in range(4))] for i in range(4)]
        for leaf, tensor in zip(code.given, tensors, strict=True):
            squeezed = tensor
            for axis in reversed(range(4)):
                if tensor.shape[axis] > 1:
                    squeezed = squeezed.index_select(axis, places[axis])
                else:
                    squeezed = squeezed.squeeze(axis)
                rows[axis].append(0 if tensor.shape[axis] > 1 else None)
            given.append(squeezed.to(leaf.dtype))

        def scalar(*values: torch.Tensor) -> torch.Tensor:
            names: list[str] = [*INPUTS, *(leaf.args[0] for leaf in code.given)]
            inputs = dict(zip(names, values, strict=True))
            for stands, number in zip(code.standing, numbers, strict=True):
                inputs[stands.args[0]] = torch.full((), number, dtype=stands.dtype, device=device)
            made = evaluate([code.result], inputs, lambda t: t, device)[0]
            return made if made.dtype in (torch.float32, torch.float64) else made.to(torch.float32)

        return mapped(scalar, rows)(*given).expand(score.shape)


def scalar_score(result: Node, spread: Spread) -> ScalarScore:
    """The modifier that makes `result` of the score."""
    code = Code(result, spread.subject)
    values = tuple(_storable(spread.of(leaf)) for leaf in code.leaves)
    kernels = spread.device.type != "cpu" or INTERPRETED
    kind = _KINDS.get((code.text, kernels))
    if kind is None:
        kind = _KINDS[code.text, kernels] = kind_of(code, f"score_mod_{len(_KINDS)}", kernels)
    return kind(tuple(code.numbers), values)


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that modifiers may capture."""
    if tensor.requires_grad:
        return tensor if tensor.dtype in DTYPES and tensor.dtype is not torch.float64 else tensor.float()
    return tensor if tensor.dtype in DTYPE_NAMES else tensor.float() if tensor.is_floating_point() else tensor.long()


def kind_of(code: Code, called: str, kernels: bool) -> Any:
    """A subclass of ScalarScore and Score of this name; kernels: with functions for them, where there can be."""
    made = kernels_of(code.result, code.given, code.standing, called) if kernels else Kernels(reason="it runs on the CPU")
    contributions: tuple[Any, ...] = made.contributions if made.reason is None else (None,) * len(code.given)

    def apply(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        """The function, mapped over a tile."""
        return kind.map(score, at, scalars, tensors)

    body: dict[str, Any] = {
        "__doc__": "What a score_mod does with the score.",
        "code": code,
        "name": called,
        "captured": tuple(Captured(c, broadcast=True, exact=True) for c in contributions),
        "apply": staticmethod(apply),
    }
    if made.reason is None:
        body |= {"forward": made.forward, "backward": made.backward}
    else:
        body["why"] = f": {made.reason}"
    kind: Any = type(called, (ScalarScore, Score), body)
    return kind
