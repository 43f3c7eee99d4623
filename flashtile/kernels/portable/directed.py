"""The portable backend's passes beyond first derivatives: their tiles, what they refuse, their plans."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from flashtile.kernels.device.direction import FIELDS, along, moves_captured, second_refusals, tangent_refusals
from flashtile.kernels.device.mask import predicates
from flashtile.kernels.device.score import chain
from flashtile.kernels.device.small import is_small
from flashtile.kernels.device.sums import sum_partials
from flashtile.kernels.device.varlen import Schedules, most_tiles
from flashtile.kernels.portable.second import attention_second_keys, attention_second_queries
from flashtile.kernels.portable.statistics import (
    Pace,
    attention_entropy_keys,
    attention_entropy_queries,
    attention_mass,
    attention_statistics,
)
from flashtile.kernels.portable.tangent import attention_tangent
from flashtile.kernels.portable.tile import OVER_KEYS, Launch, Pass, form_in, make_tile, padded, products
from flashtile.plan.arguments import integers, mask_args, moved_args, score_args
from flashtile.plan.backend import Direction, OfferedPass, Passes
from flashtile.plan.buffers import entropy_buffers, second_buffers, statistics_buffers, tangent_buffers
from flashtile.plan.call import Buffer, KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.triton_glue import language as _triton

Launches = dict[Pass, Launch]
MOST_COLUMNS = 256  # of a head: beyond, the smallest tiles' operands fit neither shared memory nor registers

UPRIGHT = "3.6."  # releases of Triton that compile upright scores well: 3.6.0 spills 288 bytes there, 3.9.0 848 (400 without)
INTERPRETED: dict[Pass, Launch] = {
    "tangent": Launch(16, 32), "second_queries": Launch(32, 16), "second_keys": Launch(16, 32),
}  # fmt: skip
# Tiles in order of preference, by pass and by the wider head dim of the tile; the first whose shared memory fits is taken. Of
# 64 columns the fastest of five (an H200, 2026-11-30: 1 x 8192, 32 heads, full, ms: tangent 2.929, 4.079 with 128 x 32; queries
# 3.008; keys 4.708, 5.119 not upright, 5.398 with 64 x 128), and of 128 the tangent's (16 heads, 3.340; 3.457 with 128 x 64);
# the others by spills (sm80, sm90, Triton 3.6.0), not timed yet.
SIXTEEN_BIT: dict[Pass, dict[int, tuple[Launch, ...]]] = {
    "tangent": {
        64: (Launch(64, 64, 4, 3, 8), Launch(64, 32, 4, 3, 8), Launch(64, 32, 4, 1, 8)),
        128: (Launch(128, 32, 8, 3, 8), Launch(128, 32, 8, 2, 8), Launch(64, 32, 4, 2, 8), Launch(32, 32, 4, 1, 8)),
        256: (Launch(32, 32, 8, 1, 8), Launch(16, 16, 4, 1, 8)),
    },
    "second_queries": {
        64: (Launch(128, 64, 8, 3, 8), Launch(64, 32, 4, 3, 8), Launch(64, 32, 4, 1, 8)),
        128: (Launch(128, 32, 8, 2, 8), Launch(64, 32, 8, 1, 8), Launch(32, 32, 4, 1, 8), Launch(16, 16, 4, 1, 8)),
        256: (Launch(32, 32, 8, 1, 8), Launch(16, 16, 4, 1, 8)),
    },
    "second_keys": {
        64: (Launch(64, 64, 4, 2, 8, upright=True), Launch(32, 64, 8, 2, 8), Launch(32, 64, 8, 1, 8)),
        128: (Launch(32, 128, 8, 3, 8), Launch(32, 64, 8, 1, 8), Launch(32, 32, 4, 1, 8), Launch(16, 16, 4, 1, 8)),
        256: (Launch(32, 32, 8, 1, 8), Launch(16, 16, 4, 1, 8)),
    },
}  # fmt: skip
# With modifiers, predicates, dropout or scattered rows, which need registers; elsewhere the second of the rules above.
CROWDED: dict[tuple[Pass, int], Launch] = {
    ("second_queries", 128): Launch(64, 32, 4, 1, 8),
    ("second_keys", 128): Launch(32, 32, 4, 1, 8),
}
CDNA: dict[tuple[Pass, int], Launch] = {("second_keys", 64): Launch(32, 32, 4, 1, 8)}  # 32 x 64 spills 1.9 KB
# In the place of the first rule. The larger tiles need more tensor memory than sm100 has, which Triton 3.6.0 tells by a kernel
# that traps; these spill nothing. 64 x 128 spills 0.6 to 1.3 KB on sm80, 32 x 128 48 bytes.
BLACKWELL: dict[tuple[Pass, int], Launch] = {
    ("tangent", 128): Launch(64, 64, 8, 2, 8), ("second_keys", 64): Launch(32, 128, 8, 3, 8),
    ("second_keys", 128): Launch(32, 64, 8, 2, 8),
}  # fmt: skip
AMPERE: dict[tuple[Pass, int], Launch] = {("second_keys", 64): Launch(32, 128, 8, 3, 8)}
# Of fp32, whose operands wait in several parts, and of float64 and "ieee", whose tiles are all small.
FP32: dict[int, tuple[Launch, ...]] = {
    64: (Launch(32, 32, 4, 1, 8), Launch(16, 32, 4, 1, 8)),
    128: (Launch(16, 16, 4, 1, 8),),  # of 32 x 32, eight warps, 2 to 40 KB spill on sm80, sm90 and sm100
    256: (Launch(16, 16, 4, 1, 8),),
}


def choose_directed(p: AttentionProblem, device: Device, which: Pass) -> Launch:
    """The tile of a directed pass; no larger than a block of the mask, where it has lists of them."""
    kind, width = products(p, device, which), max(*padded(p), 64)
    if _triton.INTERPRETED:
        launch = INTERPRETED[which]
    else:
        rules = FP32[width] if p.dtype is DType.FP32 else SIXTEEN_BIT[which][width]
        elsewhere = BLACKWELL if device.arch >= 100 else AMPERE if device.arch < 90 else {}
        if device.kind == "cuda" and p.dtype is not DType.FP32 and (which, width) in elsewhere:
            rules = (elsewhere[which, width], *rules[1:])
        more = p.score or p.where or p.dropout is not None or p.head_dim % 16 or p.head_dim_v % 16
        more = more or (is_small(p) and p.dtype.is_narrow)  # whose products are twice as many
        if (more or device.kind == "hip") and len(rules) > 1:
            crowded = CROWDED.get((which, width)) if p.dtype is not DType.FP32 else None
            rules = (crowded, *rules[1:]) if crowded else rules[1:]
        if device.kind == "hip" and p.dtype is not DType.FP32 and (which, width) in CDNA:
            rules = (CDNA[which, width],)
        fits = (launch for launch in rules if shared_bytes(p, replace(launch, products=kind), which) <= device.smem_bytes)
        launch = next(fits, rules[-1])
        if launch.upright and not str(_triton.VERSION).startswith(UPRIGHT):
            launch = replace(launch, upright=False)
    if p.blocks is not None:
        launch = replace(launch, block_q=min(launch.block_q, p.blocks.block_q), block_k=min(launch.block_k, p.blocks.block_k))
    return replace(launch, products=kind)


def shared_bytes(p: AttentionProblem, launch: Launch, which: Pass) -> int:
    """Shared memory of a tile where everything moves: resident operands once, streamed ones per stage."""
    (d, dv), size = padded(p), 8 if launch.products == "float64" else p.dtype.size_bytes
    rows, keys = launch.block_q, launch.block_k
    if which == "tangent":
        return size * (rows * 2 * d + launch.num_stages * keys * 2 * (d + dv))
    resident, streamed = (keys, rows) if which in OVER_KEYS else (rows, keys)
    return size * 2 * (d + dv) * (resident + launch.num_stages * streamed)


def refusals(p: AttentionProblem, device: Device, direction: Direction) -> list[str]:
    """Reasons against a tangent."""
    reasons = tangent_refusals(p, direction.moved)
    for name in ("head_dim", "head_dim_v"):
        if getattr(p, name) > MOST_COLUMNS:
            reasons.append(f"{name} is {getattr(p, name)}; tangents and second derivatives are supported up to {MOST_COLUMNS}")
    return reasons


def refusals_of_second(p: AttentionProblem, device: Device, direction: Direction) -> list[str]:
    """Reasons against a second derivative."""
    return refusals(p, device, direction) + second_refusals(p)


def plan_tangent(p: AttentionProblem, device: Device, direction: Direction, launches: Launches | None = None) -> Plan:
    """One launch; `launches` overrides its tile."""
    p = p.listed
    launch, schedules = (launches or {}).get("tangent") or choose_directed(p, device, "tangent"), Schedules(p)
    call = _tangent_call(p, device, direction, launch, schedules, ("out", "lse", "tout", "tlse", None, None))
    buffers = (*tangent_buffers(p, direction), *schedules.buffers)
    return Plan(p, "triton", "", buffers, (*schedules.calls, call), (f"tangent tile {launch.spell()}",))


def plan_second(p: AttentionProblem, device: Device, direction: Direction, launches: Launches | None = None) -> Plan:
    """A tangent pass, which leaves what is known of rows, then a pass over queries and one over keys."""
    p = p.listed
    chosen = {which: (launches or {}).get(which) or choose_directed(p, device, which) for which in INTERPRETED}
    schedules, buffers = Schedules(p), list(second_buffers(p, direction))
    sum_dtype = "fp64" if chosen["tangent"].products == "float64" else "fp32"
    buffers.append(Buffer("rows", (p.slabs, p.heads_q, p.span_q, int(FIELDS)), sum_dtype, "scratch"))
    sunk = p.sink is not None and p.sink.grad
    if sunk:
        tiles = most_tiles(p.span_q, p.batch, chosen["tangent"].block_q, p.lengths.varlen)
        buffers.append(Buffer("partial.sink", (p.heads_q, tiles), sum_dtype, "scratch"))
    tangents = ("tout" if "out" in direction.wanted else None, "tlse" if "lse" in direction.wanted else None)
    made = (None, None, *tangents, "rows", "partial.sink" if sunk else None)
    calls = [_tangent_call(p, device, direction, chosen["tangent"], schedules, made)]
    there = _names(direction)
    inputs = ("q", "k", "v", there("tq"), there("tk"), there("tv"), there("dout"), there("tdout"), "rows")
    wanted = {n: f"d{n}" if n in direction.wanted else None for n in "qkv"}
    strides = (
        "q", "k", "v", wanted["q"] or "q", wanted["v"] or "v", there("tq") or "q", there("tk") or "k", there("tv") or "v",
        there("dout") or "q", there("tdout") or "q", wanted["k"] or "k",
    )  # fmt: skip
    if "q" in direction.wanted:
        calls.append(_call(attention_second_queries, p, device, direction, chosen["second_queries"], "second_queries",
                           schedules, inputs, "dq", strides))  # fmt: skip
    if direction.wanted & {"k", "v"}:
        calls.append(_call(attention_second_keys, p, device, direction, chosen["second_keys"], "second_keys", schedules,
                           inputs, (wanted["k"], wanted["v"]), strides))  # fmt: skip
    if sunk:
        args = (Pointer("partial.sink"), None, Pointer("dsink"), tiles, p.heads_q)
        calls.append(KernelCall(sum_partials, (p.heads_q, 1, 1), args, (("BLOCK", 256),), 4, 1))
    notes = tuple(f"{which} tile {launch.spell()}" for which, launch in chosen.items())
    return Plan(p, "triton", "", (*buffers, *schedules.buffers), (*schedules.calls, *calls), notes)


# Tiles of statistics and of the entropy's gradient by the kind of pass and the tile's columns, which hold no values; not timed.
ROWS, KEYS = "tangent", "second_keys"
LIGHT: dict[tuple[Pass, int], Launch] = {
    (ROWS, 64): Launch(128, 64, 4, 3, 8), (ROWS, 128): Launch(128, 64, 8, 3, 8), (ROWS, 256): Launch(64, 32, 4, 2, 8),
    (KEYS, 64): Launch(64, 128, 8, 3, 8), (KEYS, 128): Launch(64, 64, 4, 3, 8), (KEYS, 256): Launch(32, 64, 4, 2, 8),
}  # fmt: skip
MASS_KEYS = 128  # of which a program of mass has one product; where its tile has more, it goes by parts
# A mass of so few queries that each program has one step of them: in the first of these that gives every SM a program, one
# waits for its first keys alone. An H200, 2026-11-30, 1 x 8192, 32 heads of 64, the last 64 queries, full: 13, 16, 20 and 21
# us, and 27 with the tile above.
FEW = (Launch(64, 1024, 4, 3, 8), Launch(64, 512, 4, 3, 8), Launch(64, 256, 4, 2, 8), Launch(64, 128, 4, 1, 8))
# By spills of the entropy's pass over keys (Triton 3.6.0), bytes: sm100 1,760 and 1,248 with the tiles above, 16 and 208 with
# these; gfx942 1,936 and 828, 0 and 0.
LIGHT_ELSEWHERE: dict[tuple[str, Pass, int], Launch] = {
    ("cuda", KEYS, 64): Launch(64, 64, 8, 3, 8), ("cuda", KEYS, 128): Launch(64, 64, 8, 3, 8),
    ("hip", KEYS, 64): Launch(64, 64, 4, 2, 8), ("hip", KEYS, 128): Launch(32, 64, 4, 2, 8),
}  # fmt: skip


def choose_light(p: AttentionProblem, device: Device, which: Pass, last: int = 0) -> Launch:
    """The tile of a pass of statistics; last: of how many last queries mass is, 0 for all."""
    kind, width = products(p, device, which), max(padded(p)[0], 64)
    if _triton.INTERPRETED:
        return replace(INTERPRETED[which], products=kind)
    launch = FP32[width][-1] if p.dtype is DType.FP32 else LIGHT[which, width]
    if (
        p.dtype is not DType.FP32
        and 0 < last <= FEW[0].block_q
        and width <= 128
        and device.kind == "cuda"
        and device.arch == 90
    ):
        programs = (most_tiles(p.span_k, p.batch, few.block_k, p.lengths.varlen) * p.heads_q for few in FEW)
        filling = (few for few, count in zip(FEW, programs, strict=True) if count >= device.sm_count)
        return replace(next(filling, FEW[-1]), products=kind)
    if p.dtype is not DType.FP32 and (device.kind == "hip" or (device.kind == "cuda" and device.arch >= 100)):
        launch = LIGHT_ELSEWHERE.get((device.kind, which, width), launch)
    return replace(launch, products=kind)


def refusals_of_entropy(p: AttentionProblem, device: Device, direction: Direction) -> list[str]:
    """Reasons against the entropy's gradient."""
    return refusals(p, device, direction) + [
        f"the entropy's gradient by {spec.kind.name}'s tensor is not implemented" for spec in p.score if spec.wants_grad
    ]


def plan_statistics(p: AttentionProblem, device: Device, direction: Direction, launches: Launches | None = None) -> Plan:
    """A launch for what is known of rows, one for the mass of keys; `launches` overrides their tiles.

    Lists of blocks, which repeat the mask, are not read.
    """
    p = replace(p, blocks=None)
    schedules, calls, notes, sink = Schedules(p), list[KernelCall](), list[str](), None if p.sink is None else "sink"
    made = tuple(n if n in direction.wanted else None for n in ("peak", "entropy"))
    if any(made):
        launch = (launches or {}).get(ROWS) or choose_light(p, device, ROWS)
        arrives = "g" if made[1] else ""
        calls.append(_light_call(attention_statistics, p, device, launch, ROWS, schedules, ("q", "k", sink), made,
                                 ("q", "k", sink or "q"), arrives=arrives))  # fmt: skip
        notes.append(f"statistics tile {launch.spell()}")
    if "mass" in direction.wanted:
        launch = (launches or {}).get(KEYS) or choose_light(p, device, KEYS, direction.last)
        call = _light_call(attention_mass, p, device, launch, KEYS, schedules, ("q", "k", "lse"), "mass", ("q", "k"),
                           heads=p.heads_q, more=(direction.last,))  # fmt: skip
        parts = -(-launch.block_k // MASS_KEYS)
        pace = Pace(parts, early=parts > 1 and device.kind == "cuda" and device.arch >= 90)
        calls.append(replace(call, constants=(*call.constants, ("PACE", pace)), early=pace.early))
        notes.append(f"mass tile {launch.spell()}")
    buffers = (*statistics_buffers(p, direction), *schedules.buffers)
    return Plan(p, "triton", "", buffers, (*schedules.calls, *calls), tuple(notes))


def plan_entropy(p: AttentionProblem, device: Device, direction: Direction) -> Plan:
    """A pass over queries and one over keys."""
    p = replace(p, blocks=None)
    schedules, calls, buffers = Schedules(p), list[KernelCall](), list(entropy_buffers(p, direction))
    launches = {which: choose_light(p, device, which) for which in (ROWS, KEYS)}
    if p.score and p.dtype is not DType.FP32:  # 128 rows of 64 columns by four warps spill 2.4 KB (sm90), by eight 0.2
        launches[ROWS] = replace(launches[ROWS], num_warps=max(launches[ROWS].num_warps, 8))
    wanted, sink = {n: f"d{n}" if n in direction.wanted else None for n in "qk"}, None if p.sink is None else "sink"
    sunk = p.sink is not None and p.sink.grad
    inputs, strides = (
        ("q", "k", "lse", "entropy", "dentropy", sink),
        ("q", "k", sink or "q", wanted["q"] or "q", wanted["k"] or "k"),
    )
    tiles = most_tiles(p.span_q, p.batch, launches[ROWS].block_q, p.lengths.varlen)
    if sunk:
        sum_dtype = "fp64" if launches[ROWS].products == "float64" else "fp32"
        buffers.append(Buffer("partial.sink", (p.heads_q, tiles), sum_dtype, "scratch"))
    if wanted["q"] or sunk:
        made = (wanted["q"], "partial.sink" if sunk else None)
        calls.append(_light_call(attention_entropy_queries, p, device, launches[ROWS], ROWS, schedules, inputs, made, strides))
    if wanted["k"]:
        calls.append(_light_call(attention_entropy_keys, p, device, launches[KEYS], KEYS, schedules, inputs, "dk", strides))
    if sunk:
        args = (Pointer("partial.sink"), None, Pointer("dsink"), tiles, p.heads_q)
        calls.append(KernelCall(sum_partials, (p.heads_q, 1, 1), args, (("BLOCK", 256),), 4, 1))
    notes = tuple(f"the entropy's {what} tile {launches[which].spell()}" for what, which in (("queries", ROWS), ("keys", KEYS)))
    return Plan(p, "triton", "", (*buffers, *schedules.buffers), (*schedules.calls, *calls), notes)


def _light_call(
    kernel: Any, p: AttentionProblem, device: Device, launch: Launch, which: Pass, schedules: Schedules,
    inputs: tuple[str | None, ...], outputs: Any, strides: tuple[str, ...], *, heads: int | None = None,
    more: tuple[Any, ...] = (), arrives: str = "",
) -> KernelCall:  # fmt: skip
    """One program per tile and head of a pass that reads no values; more: what is behind the predicates in `region`."""
    over_keys = which in OVER_KEYS
    block, span = (launch.block_k, p.span_k) if over_keys else (launch.block_q, p.span_q)
    constants = (("T", make_tile(p, launch, which, arrives=arrives)), ("SCORE", chain(p, device, form_in(p, which))),
                 ("MASK", predicates(p)))  # fmt: skip
    args = (
        _pointers(inputs), _pointers(outputs), tuple(Strides(n) for n in strides), *integers(p).values(), p.scale_value,
        score_args(p), (schedules.of(block, over_keys), mask_args(p), *more),
    )  # fmt: skip
    heads = heads or (p.heads_kv if over_keys else p.heads_q)
    grid = (most_tiles(span, p.batch, block, p.lengths.varlen) * heads, 1, 1)
    return KernelCall(kernel, grid, args, constants, launch.num_warps, launch.num_stages, not (p.float32_grade and p.score))


PASSES: Passes = MappingProxyType(
    {
        "tangent": OfferedPass(plan_tangent, refusals),
        "second": OfferedPass(plan_second, refusals_of_second),
        "statistics": OfferedPass(plan_statistics, refusals),
        "entropy": OfferedPass(plan_entropy, refusals_of_entropy),
    }
)


def _names(direction: Direction) -> Any:
    """A function that gives a buffer's name back where there is such a buffer, else None."""
    known = {*(f"t{name}" for name in direction.moved), *direction.given}
    return lambda name: name if name in known else None


def _tangent_call(
    p: AttentionProblem, device: Device, direction: Direction, launch: Launch, schedules: Schedules,
    made: tuple[str | None, ...],
) -> KernelCall:  # fmt: skip
    there, sink = _names(direction), None if p.sink is None else "sink"
    moved = tuple(there(n) for n in ("tq", "tk", "tv", "tsink"))
    arriving = tuple(there(n) for n in ("dout", "dlse", "tdout", "tdlse"))
    own = "q", "k", "v", sink or "q", "q", "q", "q", "q"
    laid = (*moved, *arriving)
    strides = ("q", "k", "v", made[2] or "q", sink or "q", *(n or o for n, o in zip(laid, own, strict=True)))
    return _call(attention_tangent, p, device, direction, launch, "tangent", schedules,
                 ("q", "k", "v", sink, *moved, *arriving), made, strides)  # fmt: skip


def _call(
    kernel: Any, p: AttentionProblem, device: Device, direction: Direction, launch: Launch, which: Pass, schedules: Schedules,
    inputs: tuple[str | None, ...], outputs: Any, strides: tuple[str, ...],
) -> KernelCall:  # fmt: skip
    """One program per tile and head, its arguments in the kernels' common order."""
    over_keys = which in OVER_KEYS
    block, span = (launch.block_k, p.span_k) if over_keys else (launch.block_q, p.span_q)
    moves = "".join(n for n in "qkv" if n in direction.moved)
    moves += "b" * any(moves_captured(i, direction.moved) for i in range(len(p.score)))
    arrives = "g" * ("dout" in direction.given) + "t" * ("tdout" in direction.given)
    constants: list[tuple[str, Any]] = [
        ("T", make_tile(p, launch, which, moves=moves, arrives=arrives)),
        ("SCORE", chain(p, device, form_in(p, which))), ("ALONG", along(p, direction.moved)), ("MASK", predicates(p)),
    ]  # fmt: skip
    lists = None
    if p.blocks is not None:
        side = "k" if over_keys else "q"
        names = f"blocks.count_{side}", f"blocks.index_{side}"
        lists = tuple(arg for name in names for arg in (Pointer(name), Strides(name)))
    args = (
        _pointers(inputs), _pointers(outputs), tuple(Strides(n) for n in strides), *integers(p).values(), p.scale_value,
        (score_args(p), moved_args(p, direction.moved)), (schedules.of(block, over_keys), mask_args(p), lists),
    )  # fmt: skip
    heads = p.heads_kv if over_keys else p.heads_q
    grid = (most_tiles(span, p.batch, block, p.lengths.varlen) * heads, 1, 1)
    chosen = tuple((name, value) for name, value in constants if name in kernel.arg_names)
    contracts = not (p.float32_grade and p.score)  # every pass makes the very scores of the others
    return KernelCall(kernel, grid, args, chosen, launch.num_warps, launch.num_stages, contracts)


def _pointers(names: Any) -> Any:
    if isinstance(names, tuple):
        return tuple(_pointers(n) for n in names)
    return None if names is None else Pointer(names)
