"""FlexAttention's `score_mod` functions, as far as they say what a score modifier here says.

The function is called once, with 0-dimensional tensors, and what it does to the score is recorded and recognised: factors,
`cap * tanh(score / cap)`, and sums with elements of a captured tensor, with what is made of either position, or with slope *
(kv_idx - q_idx). Whatever else it does is refused by
name: nothing is guessed from values.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flashtile.errors import NotSupported
from flashtile.score.bias import Bias
from flashtile.score.relative import Relative
from flashtile.score.softcap import Softcap

INPUTS: tuple[str, ...] = ("score", "batch", "head", "q_idx", "kv_idx")
NAMES = {"radd": "add", "rmul": "mul", "multiply": "mul", "subtract": "sub", "truediv": "div", "true_divide": "div",
         "divide": "div", "rtruediv": "rdiv", "negative": "neg"}  # fmt: skip
Sizes = tuple[int, int, int, int]  # of batch, head, q_idx, kv_idx


@dataclass(frozen=True, eq=False)
class Node:
    """A recorded call: its function, its name and its arguments, which are nodes, tensors and numbers."""

    function: Callable[..., Any]
    name: str
    arguments: tuple[Any, ...]
    named: dict[str, Any]


@dataclass(frozen=True)
class Input:
    """One of `INPUTS`."""

    name: str


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[torch.Tensor, Any]] = {}  # with the tensor, so that its id stays its own

    def node(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.made[id(value)][1] if id(value) in self.made else value
        return tuple(self.node(v) for v in value) if isinstance(value, (tuple, list)) else value

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.strip("_")
        if func.__name__ in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist"):
            raise _refusal(f"it asks for a value ({name}), which differs from score to score")
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            node = Node(func, name, tuple(self.node(a) for a in args), {k: self.node(v) for k, v in kwargs.items()})
            self.made[id(result)] = (result, node)
        return result


def modifiers_of(score_mod: Callable[..., Any], sizes: Sizes, device: torch.device) -> tuple[float, tuple[Any, ...]]:
    """(a factor of the scores, the modifiers after it) that say the same as `score_mod`. sizes: of its four indices.

    Raises NotSupported where there are none.
    """
    recorder = _Recorder()
    inputs = [torch.zeros((), dtype=torch.float32 if name == "score" else torch.int32, device=device) for name in INPUTS]
    recorder.made.update({id(t): (t, Input(name)) for t, name in zip(inputs, INPUTS, strict=True)})
    with recorder:
        result = score_mod(*inputs)
    steps = _steps(recorder.node(result))
    whole, pending, made = 1.0, 1.0, list[Any]()
    while steps:
        kind, value = steps.pop(0)
        if kind == "factor":
            pending *= value
            continue
        if kind == "tanh":  # cap tanh(pending score) = cap tanh(cap pending score / cap)
            cap = 1.0
            while steps and steps[0][0] == "factor":
                cap *= steps.pop(0)[1]
            if made and not math.isclose(cap * pending, 1.0, rel_tol=1e-6):
                raise _refusal("it caps a changed score other than by cap * tanh(score / cap)")
            if cap <= 0:
                raise _refusal(f"it multiplies tanh by {cap}, which is not positive")
            whole, pending = whole * (1.0 if made else cap * pending), 1.0
            made.append(Softcap(cap))
            continue
        if made and pending != 1.0:
            raise _refusal("it multiplies a changed score")
        whole, pending = whole * pending, 1.0
        slope = _slope(value)
        if slope is None:
            made.append(Bias(_addend(value, sizes, device)))
        else:
            made.append(Relative(_addend(slope, sizes, device)[:, :, 0, 0].expand(sizes[0], sizes[1])))
    if made and pending != 1.0:
        raise _refusal("it multiplies a changed score")
    return whole * pending, tuple(made)


def _refusal(reason: str) -> NotSupported:
    how = "use flashtile.attention with score=..., a modifier of your own if need be"
    return NotSupported("flex_attention with this score_mod", {"flashtile": [f"{reason}; {how}"]})


def _steps(node: Any) -> list[tuple[str, Any]]:
    """What happens to the score, in order: ("factor", number), ("tanh", None) or ("add", node)."""
    if isinstance(node, Input) and node.name == "score":
        return []
    if not isinstance(node, Node) or "score" not in _inputs(node):
        raise _refusal("its result does not depend on the score")
    name, given = NAMES.get(node.name, node.name), node.arguments
    if name in ("to", "float"):
        return _steps(given[0])
    if name == "neg":
        return [*_steps(given[0]), ("factor", -1.0)]
    if name == "tanh":
        return [*_steps(given[0]), ("tanh", None)]
    if name in ("add", "sub", "rsub", "mul", "div", "rdiv") and len(given) == 2 and not node.named:
        first, second = given if name[0] != "r" else given[::-1]
        on_first, on_second = ("score" in _inputs(t) for t in (first, second))
        if on_first and on_second:
            raise _refusal(f"it uses the score twice (in {node.name})")
        changed, other = (first, second) if on_first else (second, first)
        if name == "add":
            return [*_steps(changed), ("add", other)]
        if name in ("sub", "rsub"):
            if on_first:
                return [*_steps(changed), ("add", Node(torch.neg, "neg", (other,), {}))]
            return [*_steps(changed), ("factor", -1.0), ("add", other)]
        if isinstance(other, (int, float)) and (name == "mul" or on_first):
            return [*_steps(changed), ("factor", float(other) if name == "mul" else 1.0 / other)]
        raise _refusal("it multiplies or divides the score by something else than a number")
    raise _refusal(f"it changes the score by {node.name}")


def _inputs(node: Any, indexed: bool = True) -> set[str]:
    """The inputs that a node depends on; with `indexed` False, without those that only choose elements of a tensor."""
    if isinstance(node, Input):
        return {node.name}
    if isinstance(node, tuple):
        return set().union(*(_inputs(n, indexed) for n in node))
    if not isinstance(node, Node) or (not indexed and _element(node) is not None):
        return set()
    return _inputs((*node.arguments, *node.named.values()), indexed)


def _element(node: Node) -> tuple[torch.Tensor, tuple[str, ...]] | None:
    """(a captured tensor, the inputs that index its axes), where a node is such an element."""
    if node.name != "getitem" or not isinstance(node.arguments[0], torch.Tensor):
        return None
    index = node.arguments[1] if isinstance(node.arguments[1], tuple) else (node.arguments[1],)
    names = tuple(i.name for i in index if isinstance(i, Input))
    plain = len(names) == len(index) == len(set(names)) == node.arguments[0].dim()
    return (node.arguments[0], names) if plain else None


def _slope(node: Any) -> Any:
    """s, where a node is s (kv_idx - q_idx) with s the same for all queries and keys; else None."""
    if not isinstance(node, Node) or node.named:
        return None
    name, given = NAMES.get(node.name, node.name), node.arguments
    if name in ("sub", "rsub") and all(isinstance(i, Input) for i in given):
        ends = tuple(i.name for i in (given if name == "sub" else given[::-1]))
        return {("kv_idx", "q_idx"): 1.0, ("q_idx", "kv_idx"): -1.0}.get(ends)
    if name in ("neg", "to", "float"):
        inner = _slope(given[0])
        return Node(operator.neg, "neg", (inner,), {}) if inner is not None and name == "neg" else inner
    if name in ("mul", "div") and len(given) == 2:
        for inner, other in (given, given[::-1]) if name == "mul" else (given,):
            slope = _slope(inner)
            if slope is not None and not {"q_idx", "kv_idx"} & _inputs(other):
                return Node(operator.mul if name == "mul" else operator.truediv, name, (slope, other), {})
    return None


def _addend(node: Any, sizes: Sizes, device: torch.device) -> torch.Tensor:
    """What is added, broadcasting to (batch, head, q_idx, kv_idx), with the graph of what was captured."""
    if {"q_idx", "kv_idx"} <= _inputs(node, indexed=False):
        raise _refusal(
            "it adds a number that is made of each query's and key's position of another form than slope * (kv_idx - q_idx)"
        )
    axes: dict[str, int] = dict(zip(INPUTS[1:], range(4), strict=True))

    def value(node: Any) -> Any:
        if isinstance(node, Input):
            axis = axes[node.name]
            return torch.arange(sizes[axis], device=device).view([-1 if i == axis else 1 for i in range(4)])
        if isinstance(node, tuple):
            return tuple(value(n) for n in node)
        if not isinstance(node, Node):
            return node
        element = _element(node)
        if element is None:
            return node.function(*(value(a) for a in node.arguments), **{k: value(v) for k, v in node.named.items()})
        tensor, names = element
        for i, name in enumerate(names):
            tensor = tensor.narrow(i, 0, sizes[axes[name]])
        tensor = tensor.permute(sorted(range(len(names)), key=lambda i: axes[names[i]]))
        for axis, name in enumerate(INPUTS[1:]):
            tensor = tensor if name in names else tensor.unsqueeze(axis)
        return tensor

    made = torch.as_tensor(value(node), device=device)
    made = made if made.dim() == 4 else made[(None,) * (4 - made.dim())]
    return made if made.dtype in (torch.float16, torch.bfloat16) else made.float()
