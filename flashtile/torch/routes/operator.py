"""What runs behind the operators of attention that `functional.py` defines, for torch.compile, export, modes and subclasses.

    flashtile::attention(q, k?, v?, others, wanted, text, floats, ints) -> (out, lse, residual)
    flashtile::attention_backward(dout?, dlse?, q, k?, v?, others, out, lse, residual, wanted, text, floats, ints) -> gradients
    flashtile::attention_tangent(q, k?, v?, others, moved, wanted, text, floats, ints) -> (out, lse, tangents of both)
    flashtile::attention_second(dout?, dlse?, tdout?, tdlse?, q, k?, v?, others, moved, tangents, wanted, ...)
        -> derivatives of gradients, and if `tangents` those of out and lse

q, k, v as the caller has them: (batch, seqlen, heads, head_dim), of varlen (total, heads, head_dim), one or two packed tensors
in their place. others, text, floats, ints: `request.py`. wanted: bit i says whether the i-th of q, k, v and others has a
gradient. moved: the tangents of q, k, v (those that are there) and others, None for zero. residual: what else the backward
wants, of float32. out and the gradients of q, k, v have their axes in the order of q, k, v in memory, but head_dim innermost.

Eager calls of plain tensors go by here: dispatch costs more than all else that the host does.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad

from flashtile.memory import Memory
from flashtile.torch.call.describe import out_dtype
from flashtile.torch.call.inputs import check_tensors
from flashtile.torch.call.sharded import is_replaced, refuse_shards
from flashtile.torch.execute.directed import second_derivatives, tangents
from flashtile.torch.execute.packing import Packing
from flashtile.torch.execute.plain import transforms
from flashtile.torch.execute.prepared import PreparedCall
from flashtile.torch.execute.replay import laid
from flashtile.torch.routes.request import Named, Request, read

Maybe = torch.Tensor | None
GIVEN = "Tensor q, Tensor? k, Tensor? v, Tensor[] others, "
ASKED = "int wanted, str text, float[] floats, SymInt[] ints"


# -- what runs ------------------------------------------------------------------------------------------------------------


def run_forward(
    q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], wanted: int, text: str, floats: list[float],
    ints: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    if is_replaced():  # a compiled graph runs here, too
        refuse_shards()
    others, floats, ints = others or [], floats or [], ints or []  # AOTInductor (2.13) hands None where a list is empty
    packs, rest = _resolved((q, k, v)), _resolved(others)
    layout = _layout(packs, rest, wanted, text, floats, ints)
    if wanted:
        layout.call.require_backward()
    out, lse, *kept = layout.call.forward(layout.slabs(packs), rest)
    residual, lse = residual_of(lse, kept, q.dtype), lse.contiguous()  # a CPU's may lie otherwise
    if layout.varlen:
        out, lse, residual = out[0], lse[0], residual[0] if residual.dim() > 1 else residual
    return laid(out, layout.out_strides), lse, residual


def run_backward(
    dout: Maybe, dlse: Maybe, q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor],
    out: torch.Tensor, lse: torch.Tensor, residual: torch.Tensor, *asked: Any,
) -> list[torch.Tensor]:  # fmt: skip
    if torch.is_grad_enabled():
        with torch.no_grad():
            return run_backward(dout, dlse, q, k, v, others, out, lse, residual, *asked)
    packs, rest = _resolved((q, k, v)), _resolved(others)
    layout = _layout(packs, rest, *asked)
    call, kept = layout.call, [out, lse]
    if len(call.kept) > len(kept):
        kept.append(residual.select(-2, 0) if call.plan.backend == "cpu" else residual)
    if layout.varlen:
        kept = [t[None] for t in kept]
        dout, dlse = (None if t is None else t[None] for t in (dout, dlse))
    found = call.gradients((*layout.slabs(packs), *rest, *kept), dout, dlse, layout.needs)
    made: list[torch.Tensor] = []
    for i, (tensor, grad) in enumerate(zip((*packs, *rest), found, strict=True)):
        if layout.needs[i]:
            grad = torch.zeros_like(tensor) if grad is None else grad
            if i < len(packs):
                grad = laid(grad[0] if layout.varlen else grad, layout.strides[i])
            made.append(grad)
    return made


def run_tangent(
    q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], moved: list[Maybe], *asked: Any
) -> tuple[torch.Tensor, ...]:
    refuse_shards()
    with torch.no_grad():
        packs, rest = _resolved((q, k, v)), _resolved(others)
        layout = _layout(packs, rest, *asked)
        made = tangents(layout.call, layout.slabs(packs), rest, layout.moved(moved))
        out, lse, tout, tlse = (t[0] for t in made) if layout.varlen else made
        return laid(out, layout.out_strides), lse.contiguous(), laid(tout, layout.out_strides), tlse.contiguous()


def run_second(
    dout: Maybe, dlse: Maybe, tdout: Maybe, tdlse: Maybe, q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor],
    moved: list[Maybe], along: bool, *asked: Any,
) -> list[torch.Tensor]:  # fmt: skip
    with torch.no_grad():
        packs, rest = _resolved((q, k, v)), _resolved(others)
        layout = _layout(packs, rest, *asked)
        arriving = {"dout": dout, "dlse": dlse, "tdout": tdout, "tdlse": tdlse}
        if layout.varlen:
            arriving = {name: None if t is None else t[None] for name, t in arriving.items()}
        found = second_derivatives(layout.call, layout.slabs(packs), rest, layout.moved(moved), arriving, layout.needs, along)
        made: list[torch.Tensor] = []
        for i, grad in enumerate(found[: len(layout.needs)]):
            if grad is not None:
                made.append(laid(grad[0] if layout.varlen else grad, layout.strides[i]) if i < len(packs) else grad)
        if along:
            tout, tlse = (t[0] if layout.varlen else t for t in found[-2:] if t is not None)
            made += [laid(tout, layout.out_strides), tlse.contiguous()]
        return made


class _Layout:
    """What is known of calls of one request with tensors of one layout."""

    def __init__(
        self, packs: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...], wanted: int, text: str, floats: list[float],
        ints: list[int],
    ):  # fmt: skip
        request = read(text)
        named = request.named(packs, others, wanted, floats, ints)
        check(named, request, packs)
        self.call = PreparedCall(named.problem, named.options, packs[0].device).packed(named.packing)
        self.varlen, self.checks = request.varlen, bool(request.lengths) and packs[0].device.type == "cpu"
        queries = _queries(named.packing, request, packs)
        self.out_strides = dense_strides((*queries.shape[:-1], named.problem.head_dim_v), queries)
        self.strides = [dense_strides(t.shape, t) for t in packs]
        self.needs = tuple(bool(wanted >> i & 1) for i in range(len(packs) + len(others)))

    def slabs(self, packs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """As plans want them: varlen has a first axis of one."""
        return tuple(t[None] for t in packs) if self.varlen else packs

    def moved(self, tangents: list[Maybe]) -> list[Maybe]:
        """Those of q, k, v likewise."""
        count = len(self.strides)
        packs = [None if t is None else t[None] for t in tangents[:count]] if self.varlen else tangents[:count]
        return [*packs, *tangents[count:]]


_LAYOUTS = Memory[Any, _Layout](8192, "traced calls")


def _layout(
    packs: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...], wanted: int, text: str, floats: list[float],
    ints: list[int],
) -> _Layout:  # fmt: skip
    key = (text, wanted, *floats, *ints, packs[0].device)
    for tensor in (*packs, *others):
        key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() & 15)
    found = _LAYOUTS.get(key)
    if found is None:
        found = _LAYOUTS[key] = _Layout(packs, others, wanted, text, floats, ints)
    if found.checks:
        lengths = read(text).named(packs, others, wanted, floats, ints).given
        assert lengths is not None
        lengths.check_values({"q": found.call.problem.span_q, "k": found.call.problem.span_k})
    return found


def layout_of_call(
    packs: Sequence[Maybe], others: Sequence[torch.Tensor], *asked: Any
) -> tuple[_Layout, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """(what is known of the call, its packs, its other tensors), for operators beside these."""
    there, rest = _resolved(packs), _resolved(others)
    return _layout(there, rest, *asked), there, rest


def check(named: Named, request: Request, packs: tuple[torch.Tensor, ...]) -> None:
    """Raise InvalidProblem unless the tensors fit together."""
    parts = named.packing.unpack(_slabs(request, packs))
    check_tensors(parts["q"], parts["k"], parts["v"], named.given, request.stored is not None)


def _slabs(request: Request, packs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """As plans want them: varlen has a first axis of one."""
    return tuple(t[None] for t in packs) if request.varlen else packs


def _queries(packing: Packing, request: Request, packs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """q, a view; of varlen without the first axis."""
    q = packing.unpack(_slabs(request, packs))["q"]
    return q[0] if request.varlen else q


def _resolved(tensors: Sequence[Maybe]) -> tuple[torch.Tensor, ...]:
    """Those that are there, with their own numbers in memory."""
    return tuple([t.resolve_neg() if t.is_neg() else t for t in tensors if t is not None])


def residual_of(lse: torch.Tensor, kept: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """What a backend keeps besides out and lse: of float32 up to two numbers a row, (batch, heads_q, 2, seqlen_q)."""
    if dtype is not torch.float32:
        return lse.new_empty(0)
    shape = residual_shape(lse.shape, dtype)
    if kept and kept[0].shape == shape:
        return kept[0]
    residual = lse.new_zeros(shape)
    if kept:
        residual.select(-2, 0).copy_(kept[0])
    return residual


def residual_shape(rows: Sequence[Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """Of `residual`, where lse has the shape `rows`."""
    return (*rows[:-1], 2, rows[-1]) if dtype is torch.float32 else (0,)


def dense_strides(shape: Sequence[int], like: torch.Tensor) -> tuple[int, ...]:
    """Of a dense tensor with its axes in the order of `like`, but the last innermost. Sizes may be symbolic."""
    order = list(range(like.dim() - 1))
    if 0 not in like.stride():
        order.sort(key=lambda axis: (_is_wide(like.shape[axis]), -like.stride(axis), axis))
    strides: list[Any] = [1] * like.dim()
    step: Any = shape[-1]
    for axis in reversed(order):
        strides[axis] = step
        step = step * torch.sym_max(shape[axis], 1)
    return tuple(strides)


def _is_wide(size: Any) -> bool:
    """Whether an axis has more places than one, or may have."""
    wide = size != 1
    if isinstance(wide, bool):
        return wide
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # it loads sympy, which takes as long as all of ours

    return bool(guard_or_true(wide))


# -- what is traced -------------------------------------------------------------------------------------------------------


def fake_forward(
    q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], wanted: int, text: str, floats: list[float],
    ints: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    request, packs = read(text), tuple(t for t in (q, k, v) if t is not None)
    _check_sizes(request, packs, others, wanted, floats, ints)
    packing = request.packing(ints)
    like = _queries(packing, request, packs)
    shape = (*like.shape[:-1], packing.unpack(_slabs(request, packs))["v"].shape[-1])
    rows = (*shape[:-3], shape[-2], shape[-3])
    lse = q.new_empty(rows, dtype=torch.promote_types(q.dtype, torch.float32))
    residual = q.new_empty(residual_shape(rows, q.dtype), dtype=torch.float32)
    return q.new_empty_strided(shape, dense_strides(shape, like), dtype=out_dtype(q)), lse, residual


def fake_backward(
    dout: Maybe, dlse: Maybe, q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor],
    out: torch.Tensor, lse: torch.Tensor, residual: torch.Tensor, wanted: int, *asked: Any,
) -> list[torch.Tensor]:  # fmt: skip
    packs = [t for t in (q, k, v) if t is not None]
    made: list[torch.Tensor] = []
    for i, tensor in enumerate((*packs, *others)):
        if wanted >> i & 1:
            packed = i < len(packs)
            made.append(
                tensor.new_empty_strided(tensor.shape, dense_strides(tensor.shape, tensor))
                if packed
                else tensor.new_empty(tensor.shape)
            )
    return made


def fake_tangent(
    q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], moved: list[Maybe], *asked: Any
) -> tuple[torch.Tensor, ...]:
    made = fake_forward(q, k, v, others, *asked)[:2]
    return (*made, *map(torch.empty_like, made))


def fake_second(
    dout: Maybe, dlse: Maybe, tdout: Maybe, tdlse: Maybe, q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor],
    moved: list[Maybe], along: bool, *asked: Any,
) -> list[torch.Tensor]:  # fmt: skip
    made = fake_backward(dout, dlse, q, k, v, others, q, q, q, *asked)
    return [*made, *fake_forward(q, k, v, others, *asked)[:2]] if along else made


def _check_sizes(
    request: Request, packs: tuple[torch.Tensor, ...], others: Sequence[torch.Tensor], wanted: int, floats: list[float],
    ints: list[int],
) -> None:  # fmt: skip
    """Raise InvalidProblem while tracing, for sizes like those that it was given; none of them becomes a condition."""
    known: list[Any] = [_hint(n) for n in (*floats, *ints)]
    shapes = [[_hint(n) for n in t.shape] for t in (*packs, *others)]
    if None in known or any(None in shape for shape in shapes):
        return  # sizes that depend on data: the call itself checks
    sized = [t.new_empty(shape) for t, shape in zip((*packs, *others), shapes, strict=True)]
    packs, others = tuple(sized[: len(packs)]), sized[len(packs) :]
    check(request.named(packs, others, wanted, known[: len(floats)], known[len(floats) :]), request, packs)


def _hint(number: Any) -> Any:
    """The number that a symbol stands for; None where nobody knows."""
    if not isinstance(number, (torch.SymInt, torch.SymFloat)):
        return number
    return number.node.hint if number.node.has_hint() else None


# -- gradients ------------------------------------------------------------------------------------------------------------


def spread(packs: Sequence[Maybe]) -> tuple[Maybe, Maybe, Maybe]:
    """q, k, v of the schema."""
    q, k, v = (*packs, None, None)[:3]
    return q, k, v


@contextmanager
def below_autograd() -> Generator[None]:
    """Where a Function that records an operator runs it: below autograd, or at the next of torch.func's levels.

    That one records too, and sees tangents, if both are enabled, which a Function switches off.
    """
    above = bool(transforms())
    with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(above), forward_ad._set_fwd_grad_enabled(above):  # pyright: ignore[reportPrivateUsage]
        yield
