"""The portable backend: plans made of Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, prod
from types import MappingProxyType
from typing import Any

from flashtile.kernels.device.available import NO_TRITON, unavailable
from flashtile.kernels.device.dropout import origin_refusals
from flashtile.kernels.device.mask import predicates
from flashtile.kernels.device.score import captures, chain, form_of, sums_in_queries, uneven_refusals
from flashtile.kernels.device.sums import sum_partials
from flashtile.kernels.device.varlen import Schedules, most_tiles, padded_total
from flashtile.kernels.portable import backward as bwd
from flashtile.kernels.portable import broadcast, cached
from flashtile.kernels.portable.append import plan_append
from flashtile.kernels.portable.candidates import shared_bytes
from flashtile.kernels.portable.choose import CONVERT, DELTA, choice, choose, choose_variant
from flashtile.kernels.portable.directed import PASSES
from flashtile.kernels.portable.forward import attention_forward
from flashtile.kernels.portable.repair import repairing
from flashtile.kernels.portable.rows import attention_delta
from flashtile.kernels.portable.stored import converts, stored_refusals
from flashtile.kernels.portable.tile import (
    Correction,
    Launch,
    Pass,
    correction_of,
    form_in,
    is_mended,
    make_tile,
    mends_lse,
    products,
    reads_bytes_and_joins,
    tells_sizes,
)
from flashtile.plan.arguments import integers, mask_args, score_args
from flashtile.plan.backend import ROW_STATISTICS, Direction, Gradients, OfferedPass, Passes
from flashtile.plan.buffers import backward_buffers, forward_buffers, row_statistics, shapes
from flashtile.plan.call import Buffer, KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.plan.rules import told
from flashtile.problem.attention import MAX_HEAD_DIM, AttentionProblem
from flashtile.problem.cache import AppendProblem, CachedProblem
from flashtile.problem.dtype import DType
from flashtile.problem.lengths import ALIKE
from flashtile.problem.options import Variant
from flashtile.triton_glue.language import JitTuple

Launches = Mapping[Pass, Launch]
NO_LAUNCHES: Launches = {}


def _watched(problem: AttentionProblem, device: Device, direction: Direction) -> Plan:
    return BACKEND.forward(problem, device, statistics=direction.wanted)


def _watched_refusals(p: AttentionProblem, device: Device, direction: Direction) -> list[str]:
    """Reasons against statistics beside a forward."""
    return [] if p.stored is None else ["k and v are stored; statistics of them are not implemented"]


class TritonBackend:
    """Any GPU that Triton compiles for; on the CPU only inside Triton's interpreter."""

    name = "triton"
    passes: Passes = MappingProxyType({**PASSES, "watched": OfferedPass(_watched, _watched_refusals)})

    def unsupported(self, problem: AttentionProblem, device: Device, variant: Variant | None = None) -> list[str]:
        reasons = unavailable(device, "matrix units")
        for name in ("head_dim", "head_dim_v"):
            if getattr(problem, name) > MAX_HEAD_DIM:
                reasons.append(f"{name} is {getattr(problem, name)}; supported up to {MAX_HEAD_DIM}")
        if device.kind != "cpu" and reasons in ([], [NO_TRITON]):
            reasons += _too_wide(problem, device, variant)
        if problem.stored is not None:
            reasons += stored_refusals(problem, problem.stored, device, variant)
        if variant == "fused" and problem.deterministic:
            reasons.append("the fused backward adds dq atomically and is not deterministic; use 'split'")
        if problem.blocks is not None and problem.lengths.ragged:
            reasons.append("the mask has block lists and items differ in length; lists are made for one length")
        if problem.dtype is DType.FP64:
            reasons.append("dtype is fp64; supported are fp16, bf16 and fp32 (fp64 runs on the CPU)")
        reasons += uneven_refusals(problem) + origin_refusals(problem)
        for leaf in problem.leaves:
            if not hasattr(leaf.kind, "visible"):
                reasons.append(f"predicate {leaf.kind.name} has no `visible`, its formula for kernels")
        for spec in problem.score:
            if not (hasattr(spec.kind, "forward") and hasattr(spec.kind, "backward")):
                reasons.append(
                    f"score modifier {spec.kind.name} has no `forward` and `backward`, its formula for kernels{spec.kind.why}"
                )
            for captured, tensor in zip(spec.kind.captured, spec.tensors, strict=True):
                if problem.deterministic and tensor.grad and captured.index is not None:
                    reasons.append(f"the gradient of {spec.kind.name}'s tensor is added atomically, not deterministically")
        return reasons

    def forward(
        self, problem: AttentionProblem, device: Device, launches: Launches = NO_LAUNCHES,
        statistics: frozenset[str] = frozenset(),
    ) -> Plan:  # fmt: skip
        """The plan; `launches` overrides the tile of a pass. statistics: those of "peak" and "entropy" that it keeps."""
        p = problem.listed
        launch, why = _launch(p, device, "forward", launches, bool(statistics))
        sink = None if p.sink is None else "sink"
        schedules, scales = Schedules(p), _scales(p)
        kept = tuple(n if n in statistics else None for n in ROW_STATISTICS) if statistics else ()
        call = _call(
            attention_forward, p, device, launch, "forward",
            (("q", "k", "v", sink, *scales), ("out", "lse", "stats" if p.float32_grade else None, *kept)),
            ("q", "k", "v", "out", sink or "q", *(name or "q" for name in scales)),
            tail=(p.scale_value, score_args(p), _region(p, _schedule(schedules, "forward", launch))),
            statistics=" ".join(n for n in kept if n),
        )  # fmt: skip
        buffers = (*_forward_buffers(p), *row_statistics(p, statistics), *schedules.buffers)
        return Plan(p, self.name, "", buffers, (*schedules.calls, call), (f"forward tile {launch.spell()}", *why))

    def backward(
        self,
        problem: AttentionProblem,
        device: Device,
        gradients: Gradients,
        variant: Variant,
        launches: Launches = NO_LAUNCHES,
    ) -> Plan:
        """The plan; `launches` overrides the tile of a pass."""
        p = problem if broadcast_gradients(problem) else problem.listed  # their pass walks no lists
        variant = choose_variant(p, device, gradients) if variant == "auto" else variant
        fused = variant == "fused"
        adds_dq = fused and "q" in gradients.wanted
        key_pass: Pass = "fused" if adds_dq else "keys"
        key_launch, why_keys = _launch(p, device, key_pass, launches)
        wide = key_launch.products == "float64"
        sums_dq = adds_dq and (wide or p.dtype is not DType.FP32)  # into a buffer of its own, instead of dq
        buffers, notes = _backward_buffers(p, gradients, adds_dq and not sums_dq), [f"backward {variant}"]
        captured = bool(captures(p.score))
        dlse, stats = "dlse" if gradients.dlse else None, "stats" if p.float32_grade else None
        sink = None if p.sink is None else "sink"
        query_launch, why_queries = _launch(p, device, "queries", launches)
        sink_sums = _sink_partials(p, query_launch)
        elements: tuple[Buffer, ...] = ()
        sums: list[tuple[Buffer, Pointer | None]] = [(buffer, None) for buffer in sink_sums]
        schedules = Schedules(p)
        delta = _call(
            attention_delta, p, device, DELTA, "queries",
            (("out", "dout", "lse", dlse, stats), "rows"), ("out", "dout", dlse or "lse", "rows"),
            tail=(_schedule(schedules, "queries", DELTA),), score=False,
        )  # fmt: skip
        calls, inputs = [delta], ("q", "k", "v", "dout", "rows")
        wants_keys = fused or bool(gradients.wanted & {"k", "v"})
        correction = correction_of(p, query_launch)
        if captured or sink_sums or wide or mends_lse(p) or (not fused and "q" in gradients.wanted):
            schedule = _schedule(schedules, "queries", query_launch)
            capture = _capture(p, _tiles(p, query_launch, "queries"), _sum_dtype(query_launch))
            sums += [(buffer, schedule) for buffer in capture.partials]
            elements += capture.elements
            dq = "dq" if "q" in gradients.wanted and not fused else None
            slip = dlse if (correction or mends_lse(p)) and not p.float32_grade else None
            sunk = sink_sums[0].name if sink_sums else None
            calls.append(_call(
                bwd.attention_backward_queries, p, device, query_launch, "queries", ((*inputs, slip, sink, dq, sunk),),
                ("q", "k", "v", "dout", dq or "q", "rows", slip or "q", sink or "q"),
                tail=(p.scale_value, score_args(p), capture.args, _region(p, schedule)), slots=capture.slots,
                correction=correction,
            ))  # fmt: skip
            notes += [f"queries pass tile {query_launch.spell()}", *why_queries]
        if wants_keys:
            outputs = (("dq_sum" if sums_dq else "dq") if adds_dq else None,
                       *(f"d{n}" if n in gradients.wanted else None for n in "kv"))  # fmt: skip
            strides = ("q", "k", "v", "dout", outputs[0] or "q", "rows", outputs[1] or "k", outputs[2] or "v")
            calls.append(_call(
                bwd.attention_backward_keys, p, device, key_launch, key_pass, (inputs, outputs), strides,
                tail=(p.scale_value, score_args(p), _region(p, _schedule(schedules, key_pass, key_launch), True)),
            ))  # fmt: skip
            notes += [f"keys pass tile {key_launch.spell()}", *why_keys]
        if sums_dq:
            buffers += (Buffer("dq_sum", shapes(p)["q"], "fp64" if wide else "fp32", "scratch", zeroed=True),)
            calls.append(_call(
                bwd.attention_convert, _all_tokens(p), device, CONVERT, "queries", ("dq_sum", "dq"), ("dq_sum", "dq"),
                tail=(p.scale_value,), score=False,
            ))  # fmt: skip
        for partial, schedule in sums:
            gradient, rows = partial.name.replace("partial.", "d"), p.batch * p.heads_q if schedule else partial.shape[0]
            shape = next(buffer.shape for buffer in buffers if buffer.name == gradient)
            size = prod(shape)
            target = gradient if size == rows else partial.name.replace("partial.", "sums.")
            args = (Pointer(partial.name), schedule, Pointer(target), partial.shape[1], p.heads_q)
            calls.append(KernelCall(sum_partials, (rows, 1, 1), args, (("BLOCK", 256),), 4, 1))
            if size != rows:  # one number for several heads or batch entries, or for none
                buffers += (Buffer(target, (rows,), partial.dtype, "scratch"),)
                own, length = (size, 1) if shape[1] == 1 else (1, size)
                calls.append(_sum_shared(target, gradient, own, rows // size, length))
        for buffer in elements:
            calls.append(_sum_shared(buffer.name, buffer.name.replace("sums.", "d"), 1, 1, prod(buffer.shape)))
        buffers += (*(partial for partial, _ in sums), *elements, *schedules.buffers)
        for i, j in broadcast_gradients(p):
            launch, why = _launch(p, device, "pairs", launches)
            scratch, own_calls = _broadcast_calls(p, device, i, j, launch)
            buffers += tuple(scratch)
            calls += own_calls
            notes += [f"gradient of {p.score[i].kind.name} tile {launch.spell()}", *why]
        return Plan(p, self.name, variant, buffers, (*schedules.calls, *calls), tuple(notes))

    def repair_forward(self, problem: AttentionProblem, device: Device, gate: Buffer) -> Plan | None:
        """What follows another backend's forward, told by `gate` whether to run; None unless rows may share an offset."""
        repairs = problem.shares_offset and not self.unsupported(problem, device)
        return repairing(self.forward(problem, device), device, True, gate) if repairs else None

    def repair_backward(self, problem: AttentionProblem, device: Device, gradients: Gradients, gate: Buffer) -> Plan | None:
        """Likewise after a backward."""
        repairs = problem.shares_offset and not self.unsupported(problem, device, "split")
        return repairing(self.backward(problem, device, gradients, "split"), device, False, gate) if repairs else None

    def unsupported_cached(self, problem: CachedProblem | AppendProblem, device: Device) -> list[str]:
        if isinstance(problem, AppendProblem):
            return unavailable(device, "arithmetic")
        if not problem.shared:
            return self.unsupported(problem.attention, device) + problem.remedies
        slim = replace(
            problem.attention, head_dim=min(problem.attention.head_dim, 64), head_dim_v=min(problem.attention.head_dim_v, 64)
        )
        return self.unsupported(slim, device) + cached.refusals(problem, device)

    def cached(self, problem: CachedProblem | AppendProblem, device: Device, general: bool = False) -> Plan:
        return plan_append(problem) if isinstance(problem, AppendProblem) else cached.plan_cached(problem, device)


BACKEND = TritonBackend()


def _launch(
    p: AttentionProblem, device: Device, which: Pass, launches: Launches, watched: bool = False
) -> tuple[Launch, tuple[str, ...]]:
    """The tile of a pass, and the lines that say why; none where `launches` has it."""
    if given := launches.get(which):
        return given, ()
    launch, fired = choice(p, device, which, watched)
    return launch, told(fired)


def _too_wide(p: AttentionProblem, device: Device, variant: Variant | None) -> list[str]:
    """Reasons against wide head dims: a pass whose smallest tile needs more shared memory than there is, or registers.

    Tiles that `reads_bytes_and_joins` made larger are looked at whatever the head dims.
    """
    dims, fp32 = f"head_dim is {p.head_dim} and head_dim_v {p.head_dim_v}", p.dtype is DType.FP32
    if device.kind == "hip" and variant == "fused" and fp32 and p.precision != "ieee" and max(p.head_dim, p.head_dim_v) > 128:
        return [f"{dims}; in fp32 the smallest fused tile beyond 128 needs 70 KiB of shared memory, {device.target} has "
                f"{device.smem_bytes // 1024} KiB; use 'split'"]  # fmt: skip
    wide = max(p.head_dim, p.head_dim_v) > 256
    if not wide and not reads_bytes_and_joins(p, device, products(p, device, "fused")):
        return []
    if wide and fp32:  # compiled for sm90, tiles of 16 x 16 spill 14 to 90 KB
        return [f"{dims}; fp32, whose operands are multiplied in parts, is supported up to 256"]
    if device.kind == "hip":  # operands wait in registers: what compiles fits
        return []
    fused = (choose_variant(p, device, Gradients()) if variant == "auto" else variant) == "fused"
    runs: dict[Pass, bool] = {
        "forward": variant is None,
        "queries": variant is not None and (not fused or bool(captures(p.score)) or is_mended(p)),
        "keys": variant is not None and not fused,
        "fused": fused,
        "pairs": variant is not None and bool(broadcast_gradients(p)),
    }
    passes = [which for which, run in runs.items() if run]
    sizes = {which: shared_bytes(p, choose(p, device, which), which) for which in passes}
    return [
        f"{dims}; a tile of the {which} pass needs {size / 1024:.0f} KiB of shared memory, {device.target} has "
        f"{device.smem_bytes // 1024} KiB"
        for which, size in sizes.items()
        if size > device.smem_bytes
    ]


def _call(
    kernel: Any, p: AttentionProblem, device: Device, launch: Launch, which: Pass, pointers: tuple[Any, ...],
    strides: tuple[str, ...], *, tail: tuple[Any, ...] = (), slots: int = 0, correction: Correction = "", score: bool = True,
    statistics: str = "",
) -> KernelCall:  # fmt: skip
    """A call in the kernels' common order: pointers, strides, integers, the rest; one program per tile and head."""
    heads = p.heads_kv if which in ("keys", "fused") else p.heads_q
    tile = replace(make_tile(p, launch, which, slots, correction), statistics=statistics)
    if p.stored is not None:
        tile = replace(tile, native=converts(p.stored, device))
    constants: tuple[tuple[str, Any], ...] = (("T", tile),)
    if score:
        constants += (("SCORE", chain(p, device, form_in(p, which))),)
    if "MASK" in kernel.arg_names:
        constants += (("MASK", predicates(p)),)
    if "CAPTURED" in kernel.arg_names:
        constants += (("CAPTURED", captures(p.score)),)
    args = (
        *(_pointer(n) for n in pointers),
        tuple(Strides(n) for n in strides),
        *(value for name, value in integers(p).items() if name in kernel.arg_names),
        *tail,
    )
    # At float32's grade every pass has to make the very score that the forward made: where one rounds twice and another once,
    # p is off by half a unit of a modified score, which may be large. Plain scores are spared the 6 to 10 % more instructions.
    contracts = not (p.float32_grade and p.score)
    grid = (_tiles(p, launch, which) * heads, 1, 1)
    return KernelCall(kernel, grid, args, constants, launch.num_warps, launch.num_stages, contracts)


def _scales(p: AttentionProblem) -> tuple[str | None, ...]:
    """The buffers of the scales of q, k and v; nothing where nothing is stored."""
    return () if p.stored is None else tuple(f"{side}_scale" if side in p.stored.scaled else None for side in "qkv")


def _region(p: AttentionProblem, schedule: Pointer | None, over_keys: bool = False) -> tuple[Any, ...]:
    """What kernels call `region`: all that says where there are scores, besides lengths and band."""
    if p.blocks is None:
        return schedule, mask_args(p), None
    side = "k" if over_keys else "q"
    names = f"blocks.count_{side}", f"blocks.index_{side}"
    return schedule, mask_args(p), tuple(arg for name in names for arg in (Pointer(name), Strides(name)))


def _all_tokens(p: AttentionProblem) -> AttentionProblem:
    """The problem for a pass that treats all rows of the tensors alike, whatever items they belong to."""
    plain = replace(p, score=(), sink=None, dropout=None, where=(), blocks=None)
    return replace(plain, batch=p.slabs, seqlen_q=p.span_q, seqlen_k=p.span_k, lengths=ALIKE)


def _tiles(p: AttentionProblem, launch: Launch, which: Pass) -> int:
    """Tiles of a pass for one head, of all items together."""
    length, block = (p.span_k, launch.block_k) if which in ("keys", "fused") else (p.span_q, launch.block_q)
    return most_tiles(length, p.batch, block, p.lengths.varlen)


def _schedule(schedules: Schedules, which: Pass, launch: Launch) -> Pointer | None:
    """The schedule of a pass; None where all items are alike."""
    over_keys = which in ("keys", "fused")
    return schedules.of(launch.block_k if over_keys else launch.block_q, over_keys)


def _pointer(name: Any) -> Any:
    if isinstance(name, tuple):
        return tuple(_pointer(n) for n in name)
    return None if name is None else Pointer(name)


class _Capture:
    """Arguments and buffers of captured gradients in the one pass that forms them."""

    def __init__(self, args: tuple[Any, ...], partials: tuple[Buffer, ...], elements: tuple[Buffer, ...], slots: int):
        self.args, self.partials, self.elements, self.slots = args, partials, elements, slots


def _sum_dtype(launch: Launch) -> str:
    """In which a pass leaves sums for another kernel to add up."""
    return "fp64" if launch.products == "float64" else "fp32"


def _capture(p: AttentionProblem, tiles: int, dtype: str) -> _Capture:
    args: list[tuple[Any, ...]] = []
    partials: list[Buffer] = []
    elements: list[Buffer] = []
    slots = 0
    for i, spec in enumerate(p.score):
        entries: list[tuple[Any, ...]] = []
        for j, captured in enumerate(spec.kind.captured):
            if not sums_in_queries(spec, j):
                entries.append((0, None))
                continue
            if captured.index is None:
                heads = p.heads_q if p.lengths.ragged else p.batch * p.heads_q
                tiles_here = tiles if p.lengths.ragged else tiles // max(p.batch, 1)
                partials.append(Buffer(f"partial.score.{i}.{j}", (heads, tiles_here), dtype, "scratch"))
                entries.append((slots, Pointer(f"partial.score.{i}.{j}")))
            elif p.float32_grade:  # thousands of scores for an element, added in any order
                elements.append(Buffer(f"sums.score.{i}.{j}", spec.tensors[j].shape, "fp64", "scratch", zeroed=True))
                entries.append((0, Pointer(elements[-1].name)))
            else:
                entries.append((0, Pointer(f"dscore.{i}.{j}")))
            slots += 1
        args.append(tuple(entries))
    return _Capture(tuple(args) if slots else (), tuple(partials), tuple(elements), slots)


def broadcast_gradients(p: AttentionProblem) -> list[tuple[int, int]]:
    """(modifier, tensor) of the broadcast tensors whose gradient needs a pass of its own."""
    return [
        (i, j)
        for i, spec in enumerate(p.score)
        for j, captured in enumerate(spec.kind.captured)
        if spec.tensors[j].grad and not sums_in_queries(spec, j) and captured.broadcast
    ]


def _broadcast_calls(
    p: AttentionProblem, device: Device, i: int, j: int, launch: Launch
) -> tuple[list[Buffer], list[KernelCall]]:
    """Scratch and calls that form the gradient of one broadcast tensor."""
    captured, shape = p.score[i].kind.captured[j], p.score[i].tensors[j].shape
    shared = tuple(n == 1 for n in shape)
    tiles_q, tiles_k = ceil(p.seqlen_q / launch.block_q), ceil(p.seqlen_k / launch.block_k)
    count = (p.batch if shared[0] else 1) * (p.heads_q if shared[1] else 1)
    own, gradient = shape[0] * shape[1], f"dscore.{i}.{j}"
    if shared[2:] == (False, False):
        length, programs, target = 0, own * tiles_q * tiles_k, gradient
    else:
        length = p.seqlen_k if shared[2] else p.seqlen_q
        programs = p.batch * p.heads_q * (tiles_k if shared[2] else tiles_q)
        target = f"partial.score.{i}.{j}"
    args = (
        tuple(Pointer(n) for n in ("q", "k", "v", "dout", "rows", target)),
        tuple(Strides(n) for n in ("q", "k", "v", "dout", "rows")), *integers(p).values(), p.scale_value, score_args(p),
        (tuple(Pointer(n) if n in p.lengths.tensors else None for n in ("seqused_q", "seqused_k")), mask_args(p)), p.batch,
    )  # fmt: skip
    constants = (("T", make_tile(p, launch, "pairs")), ("SCORE", chain(p, device, form_of(p, gradients=True))),
                 ("CAPTURED", JitTuple((captured.contribution, i, *shared))), ("MASK", predicates(p)))  # fmt: skip
    kernel = broadcast.attention_backward_broadcast
    calls = [KernelCall(kernel, (programs, 1, 1), args, constants, launch.num_warps, launch.num_stages)]
    if target == gradient:
        return [], calls
    scratch = Buffer(target, (own, count, length), _sum_dtype(launch), "scratch")
    return [scratch], [*calls, _sum_shared(target, gradient, own, count, length)]


def _sum_shared(source: str, target: str, own: int, shared: int, length: int) -> KernelCall:
    """target (own, length) = source (own, shared, length), summed over the middle axis."""
    args = (Pointer(source), Pointer(target), shared, length)
    return KernelCall(broadcast.sum_shared, (own * ceil(length / 256), 1, 1), args, (("BLOCK", 256),), 4, 1)


def _sink_partials(p: AttentionProblem, launch: Launch) -> list[Buffer]:
    """Where the pass over queries leaves its sums for the gradient of sink; empty where it is not wanted."""
    if p.sink is None or not p.sink.grad:
        return []
    return [Buffer("partial.sink", (p.heads_q, _tiles(p, launch, "queries")), _sum_dtype(launch), "scratch")]


def _stats_shape(p: AttentionProblem) -> tuple[int, ...]:
    return (p.slabs, p.heads_q, 2, p.span_q)


def _forward_buffers(p: AttentionProblem) -> tuple[Buffer, ...]:
    stats = (Buffer("stats", _stats_shape(p), "fp32", "output"),) if p.float32_grade else ()
    return (*forward_buffers(p), *stats)


def _backward_buffers(p: AttentionProblem, gradients: Gradients, adds_into_dq: bool) -> tuple[Buffer, ...]:
    zeroed = {
        f"dscore.{i}.{j}"
        for i, spec in enumerate(p.score)
        for j, captured in enumerate(spec.kind.captured)
        if captured.index is not None and not p.float32_grade
    }  # added to by the kernels, like dq in the fused fp32 pass
    if adds_into_dq:
        zeroed.add("dq")
    padded = padded_total(p.span_q, p.batch, p.lengths.varlen)
    stats = (Buffer("stats", _stats_shape(p), "fp32", "input"),) if p.float32_grade else ()
    count = 4 if p.float32_grade or tells_sizes(p) else 3 if mends_lse(p) else 2
    rows = Buffer("rows", (p.slabs, p.heads_q, count, padded), "fp32", "scratch")
    return (*backward_buffers(p, gradients, zeroed), *stats, rows)
