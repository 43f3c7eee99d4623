"""FlexAttention's `score_mod` functions as score modifiers.

What the function does is recorded (`recording.py`). Factors, `cap * tanh(score / cap)`, sums with what does not depend on the
score, and slope * (kv_idx - q_idx) are the modifiers that there are. Of every other function what depends on the score
becomes a modifier of its own (`scalar_score.py`), and what does not, a tensor that it captures, as small as its axes allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from flashtile.compat.scalar_score import in_place, scalar_score
from flashtile.errors import InvalidProblem
from flashtile.features.scores.bias import Bias
from flashtile.features.scores.relative import Relative
from flashtile.features.scores.softcap import Softcap
from flashtile.torch.api.fingerprint import fingerprint
from flashtile.torch.api.recording import ATEN, INPUT, INPUTS, Node, Recorded, record
from flashtile.torch.api.spread import Sizes, Spread

# of each score_mod what it was recorded for, the objects that this names by their identity, and what it does
_RECORDED: WeakKeyDictionary[Any, tuple[list[Any], list[Any], Recorded]] = WeakKeyDictionary()
WIDE = (torch.float32, torch.float64)


class _OtherForm(Exception):
    """The function is none of the known modifiers."""


def modifiers_of(
    score_mod: Callable[..., Any], sizes: Sizes, device: torch.device, shown: torch.dtype = torch.float32
) -> tuple[float, tuple[Any, ...]]:
    """(a factor of the scores, the modifiers after it) that say the same as `score_mod`. sizes: of its four indices.

    shown: what `score.dtype` is for the function, q's dtype as in torch; the score is float32. Raises NotSupported where
    there are none, InvalidProblem for a function that is none of scalars.
    """
    result = _recorded(score_mod, device, shown).result
    if result.dtype is None or result.dtype.is_complex:
        raise InvalidProblem(f"score_mod returns {result.dtype}; it must return a real number.")
    spread = Spread(sizes, device, "score_mod")
    try:
        return _known(result, spread)
    except _OtherForm:
        return 1.0, (scalar_score(result, spread),)


def _recorded(score_mod: Callable[..., Any], device: torch.device, shown: torch.dtype) -> Recorded:
    """What a score_mod does; as it was recorded before, where the function and what it reads are known to be the same."""
    found = None if _is_watched() else fingerprint(score_mod)
    if found is None:
        return record(score_mod, "score_mod", device, INPUTS, shown)
    marks, kept = [device, shown, *found[0]], found[1]
    known = _RECORDED.get(score_mod)
    if known is not None and known[0] == marks:
        return known[2]
    made = record(score_mod, "score_mod", device, INPUTS, shown)
    if not made.by_value:
        _RECORDED[score_mod] = marks, kept, made
    return made


def _is_watched() -> bool:
    """Whether a mode, torch.compile or a transform of torch.func takes part in what functions do."""
    modes = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    return bool(modes) or _functorch.maybe_current_level() is not None or torch.compiler.is_compiling()


def _known(result: Node, spread: Spread) -> tuple[float, tuple[Any, ...]]:
    steps = _steps(result)
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
            if cap <= 0 or (made and not math.isclose(cap * pending, 1.0, rel_tol=1e-6)):
                raise _OtherForm
            whole, pending = whole * (1.0 if made else cap * pending), 1.0
            made.append(Softcap(cap))
            continue
        if made and pending != 1.0:
            raise _OtherForm
        whole, pending = whole * pending, 1.0
        made.append(value)
    if made and pending != 1.0:
        raise _OtherForm
    return whole * pending, tuple(_added(m, spread) if isinstance(m, tuple) else m for m in made)


def _steps(node: Node) -> list[tuple[str, Any]]:
    """What happens to the score, in order: ("factor", number), ("tanh", None) or ("add", (sign, node))."""
    steps: list[tuple[str, Any]] = []
    while node.op != INPUT:
        if node.detached or node.kwargs or node.dtype not in WIDE or "score" not in node.needs:
            raise _OtherForm
        name, given = node.name, node.args
        on = [isinstance(a, Node) and "score" in a.needs for a in given]
        if name in ("neg", "tanh") and on == [True]:
            steps.append(("tanh", None) if name == "tanh" else ("factor", -1.0))
            node = given[0]
            continue
        if len(given) != 2 or sum(on) != 1:
            raise _OtherForm
        changed, other = given if on[0] else given[::-1]
        number = float(other) if isinstance(other, (int, float)) else None
        if name == "mul" and _is_factor(number):
            steps.append(("factor", number))
        elif name == "div" and on[0] and number and _is_factor(1.0 / number):
            steps.append(("factor", 1.0 / number))
        elif name in ("add", "sub", "rsub"):
            first = on[0] is (name != "rsub")  # whether the score is what is added to or subtracted from
            steps.append(("add", _sign_of(other, -1 if name != "add" and first else 1)))
            if name != "add" and not first:
                steps.append(("factor", -1.0))
        else:
            raise _OtherForm
        node = changed
    return steps[::-1]


def _is_factor(number: float | None) -> bool:
    return number is not None and number != 0 and math.isfinite(number)


def _sign_of(value: Any, sign: int) -> tuple[int, Any]:
    """A real number that is added, or a node of a real number; refused where kernels rather make it themselves."""
    if isinstance(value, (bool, complex)) or (isinstance(value, torch.Tensor) and value.dtype.is_complex):
        raise _OtherForm
    if isinstance(value, Node) and ((value.dtype is not None and value.dtype.is_complex) or _in_kernel(value)):
        raise _OtherForm
    return sign, value


def _in_kernel(node: Node) -> bool:
    """Whether it is made of queries' and keys' positions by arithmetic alone, other than as a slope: no tensor need hold it."""
    return {"q_idx", "kv_idx"} <= node.needs and _slope(node) is None and in_place(node)


def _added(signed: tuple[int, Any], spread: Spread) -> Any:
    sign, value = signed
    if isinstance(value, (int, float)):
        return Bias(torch.full((1, 1, 1, 1), sign * float(value), device=spread.device))
    if isinstance(value, torch.Tensor):
        made = value.to(spread.device).reshape(1, 1, 1, 1)
    else:
        slope = _slope(value)
        if slope is not None:
            factor, rest = slope
            made = torch.ones((1, 1), device=spread.device) if rest is None else spread.of(rest)[:, :, 0, 0].float()
            made = made if factor * sign == 1 else made * (factor * sign)
            return Relative(made.expand(spread.sizes[0], spread.sizes[1]))
        made = spread.of(value)
    made = made if made.dtype in (torch.float16, torch.bfloat16) else made.float()
    return Bias(made if sign == 1 else -made)


def _slope(node: Any) -> tuple[float, Any] | None:
    """(c, s), where a node is c s (kv_idx - q_idx) with s the same for all queries and keys, None for 1; else None."""
    if not isinstance(node, Node) or node.detached or node.dtype not in (*WIDE, torch.int64):
        return None
    name, given = node.name, node.args
    if name == "sub" and not node.kwargs and all(isinstance(a, Node) and a.op == INPUT for a in given):
        return {("kv_idx", "q_idx"): (1.0, None), ("q_idx", "kv_idx"): (-1.0, None)}.get(tuple(a.args[0] for a in given))
    if name == "_to_copy":
        return _slope(given[0])
    if node.kwargs:
        return None
    if name == "neg":
        inner = _slope(given[0])
        return None if inner is None else (-inner[0], inner[1])
    if name in ("mul", "div") and len(given) == 2:
        for inner, other in (given, given[::-1]) if name == "mul" else (given,):
            slope = _slope(inner)
            if slope is None:
                continue
            if isinstance(other, (int, float)):
                return (slope[0] * other, slope[1]) if name == "mul" else (slope[0] / other, slope[1]) if other else None
            if isinstance(other, torch.Tensor) and name == "mul" and slope[1] is None and other.is_floating_point():
                return slope[0], Node(ATEN.alias.default, (other,), {}, frozenset(), 0, (), other.dtype)
            floating = isinstance(other, Node) and other.dtype is not None and other.dtype.is_floating_point
            if name == "mul" and slope[1] is None and floating and not {"q_idx", "kv_idx", "score"} & _needs(other):
                return slope[0], other
    return None


def _needs(value: Any) -> frozenset[str]:
    return value.needs if isinstance(value, Node) else frozenset()
