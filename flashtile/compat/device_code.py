"""The Triton functions of a recorded function of scalars: forward, backward and what captured tensors receive.

Derivatives are autograd's: it is recorded too, on one score. Numbers have the dtypes that torch gives them; what torch rounds
to 16 bits is rounded. A small vector is a number for each of its elements. What `device_text.py` has no line for, nor torch a
decomposition into such, is refused by name.
"""

from __future__ import annotations

import linecache
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from flashtile.compat import device_text
from flashtile.compat.device_text import NARROW, POINTWISE, WORKS_ON, Line, Unwritten, cast, number
from flashtile.errors import NotSupported
from flashtile.features.scores.bias import bias_load
from flashtile.features.scores.softcap import tanh
from flashtile.torch.api.recording import INPUT, INPUTS, LITERAL, Node, Recorder, ancestors, each, evaluate, leaves_of, plainly
from flashtile.triton_glue.language import VERSION, jit, tl

_FILES = count()
MOST_LINES = 2000
# Operators that move elements and compute nothing: of the elements' own numbers they make which element goes where.
MOVES = {
    "unsqueeze", "squeeze", "view", "_unsafe_view", "reshape", "expand", "permute", "t", "transpose", "select", "slice",
    "stack", "cat", "unbind", "flip", "select_scatter", "slice_scatter", "split", "split_with_sizes", "alias",
    "detach", "clone",
}  # fmt: skip
REDUCTIONS = {
    "sum": "{} + {}", "mean": "{} + {}", "prod": "({}) * ({})", "amax": "larger({}, {})", "amin": "smaller({}, {})",
    "any": "{} | {}", "all": "{} & {}",
}  # fmt: skip


class _Unwritable(Exception):
    """There is no Triton for a function."""


class _Derivative(Recorder):
    """Records operators that have Triton, and what others are made of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name not in POINTWISE and name not in MOVES and name not in REDUCTIONS:
            if func in _decompositions():
                with self:
                    return _decompositions()[func](*args, **(kwargs or {}))
            if func._can_decompose():
                with self:
                    return func.decompose(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@cache
def _decompositions() -> Any:
    from torch._decomp import core_aten_decompositions, decomposition_table  # half a second, paid where it is needed

    return {**decomposition_table, **core_aten_decompositions()}


@dataclass
class Kernels:
    """The `@jit` functions of a modifier, or the reason why there are none."""

    forward: Any = None
    backward: Any = None
    contributions: tuple[Any, ...] = ()
    reason: str | None = None


def kernels_of(result: Node, given: Sequence[Node], numbers: Sequence[Node], called: str) -> Kernels:
    """The functions of `result`, made of INPUTS, of captured tensors (`given`) and of scalars (`numbers`)."""
    if VERSION is None:
        return Kernels(reason="there is no Triton")
    try:
        out, gradients, inputs = _differentiated(result, given, numbers)
        text = _written(called, out, gradients, inputs, given, numbers)
    except (_Unwritable, NotSupported) as error:
        return Kernels(reason=str(error))
    return _compiled(text, called, len(given))


def _differentiated(
    result: Node, given: Sequence[Node], numbers: Sequence[Node]
) -> tuple[Node, list[Node | None], dict[int, str]]:
    """(the result, its gradients by the score and each captured tensor; of their inputs the names)."""
    recorder = _Derivative("score_mod")
    place = torch.device("meta")  # no value counts, and none can be divided by
    names: dict[int, str] = {}
    with plainly(torch.device("cpu")), temporarily_clear_interpreter_stack(), torch.inference_mode(False), torch.enable_grad():
        values: dict[str, torch.Tensor] = {}
        dtypes = {**dict.fromkeys(INPUTS, torch.int64), "score": torch.float32}
        for name, dtype in {**dtypes, **{n.args[0]: n.dtype or torch.float32 for n in (*given, *numbers)}}.items():
            tensor = torch.zeros((), dtype=dtype, device=place)
            if name not in {n.args[0] for n in numbers} and dtype.is_floating_point:
                tensor = tensor.requires_grad_() + 0
            values[name] = tensor
            names[id(recorder.input(name, tensor))] = name
        grad = torch.zeros((), dtype=result.dtype, device=place)
        names[id(recorder.input("grad", grad))] = "grad"
        with recorder:
            made = evaluate([result], values, lambda t: t, place)[0]
            targets = [values["score"], *(values[leaf.args[0]] for leaf in given)]
            wanted = [t for t in targets if t.requires_grad]
            found: list[Any] = [None] * len(wanted)
            if made.requires_grad:
                found = list(torch.autograd.grad(made, wanted, grad, allow_unused=True))
    by_target = iter(found)
    gradients = [next(by_target) if t.requires_grad else None for t in targets]
    return recorder.seen(made), [None if g is None else recorder.seen(g) for g in gradients], names


class _Text:
    """The lines of one device function. A value is a tensor of places in `elements`, of an element's own name each."""

    def __init__(self, inputs: dict[int, str], given: Sequence[Node], numbers: Sequence[Node]):
        self.inputs, self.given, self.numbers = inputs, given, numbers
        self.lines: list[str] = []
        self.elements: list[str] = []
        self.values: dict[int, Any] = {}

    def element(self, text: str) -> int:
        self.lines.append(f"    x{len(self.elements)} = {text}")
        self.elements.append(f"x{len(self.elements)}")
        if len(self.elements) > MOST_LINES:
            raise _refusal(f"more than {MOST_LINES} numbers for each score")
        return len(self.elements) - 1

    def write(self, root: Node) -> str:
        """The name of a scalar's value, after the lines that make it."""
        for node in ancestors([root]):
            self.values[id(node)] = self.made(node)
        if self.values[id(root)].dim():
            raise _refusal(f"a vector ({root.name})")
        return self.elements[int(self.values[id(root)])]

    def made(self, node: Node) -> Any:
        if node.op is operator.getitem:
            return self.values[id(node.args[0])][node.args[1]]
        if node.dtype is not None and node.dtype not in WORKS_ON:
            raise _refusal(f"{node.name} of {node.dtype}")
        if node.op in (INPUT, LITERAL):
            assert node.dtype is not None
            text = self.given_text(node, node.dtype) if node.op == INPUT else number(node.args[0], node.dtype)
            return torch.tensor(self.element(text))
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves_of((node.args, node.kwargs))):
            raise _refusal(f"{node.name} of a captured tensor")
        if node.name in MOVES and node.args:
            return node.op(*each(lambda a: self.values[id(a)] if isinstance(a, Node) else a, node.args))
        if node.name in REDUCTIONS and len(node.parents) == 1 and node.parents[0] is node.args[0]:
            return self.reduced(node)
        if node.name in ("mm", "mv"):
            return self.product(node)
        return self.pointwise(node)

    def given_text(self, node: Node, dtype: torch.dtype) -> str:
        name = self.inputs[id(node)]
        first = {"score": "score", "grad": "grad", "batch": "at.batch", "head": "at.head", "q_idx": "at.row", "kv_idx": "at.k"}
        if name in first:
            return f"tl.cast({first[name]}, {WORKS_ON[dtype]})"
        which = next((i for i, n in enumerate(self.numbers) if n.args[0] == name), None)
        if which is not None:
            return f"tl.cast(args[{which}], {WORKS_ON[dtype]})"
        i = len(self.numbers) + 2 * next(i for i, n in enumerate(self.given) if n.args[0] == name)
        loaded = f"bias_load(at, (args[{i}], args[{i + 1}]))"
        return f"({loaded} != 0)" if dtype == torch.bool else f"tl.cast({loaded}, {WORKS_ON[dtype]})"

    def pointwise(self, node: Node) -> Any:
        line = POINTWISE.get(node.name)
        if line is None or node.dtype is None:
            raise _refusal(node.name)
        parents = list({id(parent): parent for parent in node.parents}.values())
        known: dict[tuple[int, ...], int] = {}

        def one(places: tuple[int, ...]) -> int:
            if places not in known:
                names = {id(parent): self.elements[place] for parent, place in zip(parents, places, strict=True)}
                try:
                    text = line(Line(node, names))
                except Unwritten:
                    raise _refusal(node.name) from None
                assert node.dtype is not None
                known[places] = self.element(cast(text, torch.float32, node.dtype) if node.dtype in NARROW else text)
            return known[places]

        if not parents or "_like" in node.name or node.name.startswith("new_"):
            names = {id(parent): self.elements[0] for parent in parents}
            return torch.full(node.shape, self.element(line(Line(node, names))))
        spread = torch.broadcast_tensors(*(self.values[id(parent)] for parent in parents))
        if tuple(spread[0].shape) != node.shape:
            raise _refusal(f"{node.name} of shape {node.shape}")
        rows = zip(*(t.flatten().tolist() for t in spread), strict=True)
        return torch.tensor([one(places) for places in rows]).view(node.shape)

    def reduced(self, node: Node) -> Any:
        assert node.dtype is not None
        source = self.values[id(node.args[0])]
        given: Any = node.args[1:2]
        dims = given[0] if given and given[0] not in (None, []) else list(range(source.dim()))
        dims = sorted(d % max(source.dim(), 1) for d in ([dims] if isinstance(dims, int) else dims)) if source.dim() else []
        kept = [d for d in range(source.dim()) if d not in dims]
        rows = source.permute(*kept, *dims).reshape(-1, max(1, torch.Size(source.shape[d] for d in dims).numel()))
        made = [self.folded(REDUCTIONS[node.name], row, node.args[0].dtype, node.dtype) for row in rows.tolist()]
        if node.name == "mean":
            divisor = number(rows.shape[1], node.dtype)
            made = [self.element(cast(f"{self.elements[m]} / {divisor}", torch.float32, node.dtype)) for m in made]
        return torch.tensor(made).view(node.shape)

    def folded(self, text: str, places: list[int], before: torch.dtype | None, dtype: torch.dtype) -> int:
        total = cast(self.elements[places[0]], before, dtype)
        for place in places[1:]:
            total = self.elements[self.element(text.format(total, cast(self.elements[place], before, dtype)))]
        return self.element(cast(total, torch.float32, dtype) if dtype in NARROW else total)

    def product(self, node: Node) -> Any:
        assert node.dtype is not None
        if node.dtype in NARROW:
            raise _refusal(f"{node.name} of {node.dtype}")
        left, right = (self.values[id(a)] for a in node.args)
        columns = right[:, None] if right.dim() == 1 else right
        made: list[int] = []
        for row in left.tolist():
            for column in columns.T.tolist():
                products = [self.element(f"{self.elements[a]} * {self.elements[b]}") for a, b in zip(row, column, strict=True)]
                made.append(self.folded("{} + {}", products, node.dtype, node.dtype))
        return torch.tensor(made).view(node.shape)


def _written(
    called: str, out: Node, gradients: list[Node | None], inputs: dict[int, str], given: Sequence[Node], numbers: Sequence[Node]
) -> str:  # fmt: skip
    lines: list[str] = []

    def function(name: str, parameters: str, root: Node | None) -> None:
        lines.extend(["@jit", f"def {called}_{name}({parameters}):"])
        if root is None:
            lines.append("    return tl.zeros_like(score)")
            return
        text = _Text(inputs, given, numbers)
        made = f"tl.cast({text.write(root)}, score.dtype)"
        whole = {"score", "grad"} & root.needs
        lines.extend([*text.lines, f"    return {made}" if whole else f"    return tl.zeros_like(score) + {made}"])

    function("forward", "score, at, args", out)
    function("backward", "grad, score, out, at, args", gradients[0])
    for i, gradient in enumerate(gradients[1:]):
        function(f"captured_{i}", "grad, score, at, args", gradient)
    return "\n".join(lines) + "\n"


def _refusal(what: str) -> Exception:
    return _Unwritable(f"it computes {what}, which they have no line for")


def _compiled(text: str, called: str, captured: int) -> Kernels:
    name = f"<flashtile score_mod {next(_FILES)}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    scope: dict[str, Any] = {**_scope(), "__name__": f"{__name__}.{called}"}
    exec(compile(text, name, "exec"), scope)  # the text that is written here of operators by name and numbers
    return Kernels(
        scope[f"{called}_forward"], scope[f"{called}_backward"], tuple(scope[f"{called}_captured_{i}"] for i in range(captured))
    )


def _scope() -> dict[str, Any]:
    names = (
        "exp_minus_one", "floor_divided", "floor_remainder", "larger", "log_one_plus", "rounded", "smaller", "truncated",
    )  # fmt: skip
    return {**{n: getattr(device_text, n) for n in names}, "bias_load": bias_load, "jit": jit, "tanh": tanh, "tl": tl}
