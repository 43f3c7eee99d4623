"""The Hopper backend: plans made of warp-specialised Gluon kernels."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Protocol

from flashtile.kernels.device.available import NO_TRITON
from flashtile.kernels.device.dropout import origin_refusals
from flashtile.kernels.device.mask import predicates
from flashtile.kernels.device.score import chain, form_of, uneven_refusals
from flashtile.kernels.device.small import is_small
from flashtile.kernels.device.sums import HeadSums, sum_heads, sum_partials
from flashtile.kernels.device.varlen import Schedules, most_tiles, padded_total
from flashtile.kernels.sm90.cached.plan import plan_cached
from flashtile.kernels.sm90.host.arguments import block_lists, over_queries, product_scale
from flashtile.kernels.sm90.host.bias_gradient import STORED_BYTES, scores_shape, stored, sums, zeros
from flashtile.kernels.sm90.host.choose_backward import backward_choice, choose_backward, is_split
from flashtile.kernels.sm90.host.choose_cached import refusals as cached_refusals
from flashtile.kernels.sm90.host.choose_forward import (
    choose_forward,
    choose_queries,
    forward_choice,
    forward_grid,
    queries_choice,
)
from flashtile.kernels.sm90.host.tile_backward import (
    PADDED_ROWS,
    BackwardLaunch,
    BackwardTile,
    backward_tiles,
    make_backward_tile,
    padded_queries,
    tiled,
)
from flashtile.kernels.sm90.host.tile_forward import (
    COPIED_KEYS,
    GROUP_ROWS,
    ForwardLaunch,
    ForwardTile,
    forward_form,
    make_forward_tile,
    make_queries_tile,
    make_watched_tile,
)
from flashtile.kernels.sm90.second.plan import plan_keys, sums_dq
from flashtile.kernels.sm90.tangent.plan import plan_second, plan_tangent
from flashtile.kernels.sm90.tangent.plan import refusals as tangent_refusals
from flashtile.plan.arguments import integers, mask_args, score_args
from flashtile.plan.backend import ROW_STATISTICS, Direction, Gradients, OfferedPass, Passes
from flashtile.plan.buffers import backward_buffers, forward_buffers, keys_dtype, row_statistics, shapes
from flashtile.plan.call import Buffer, Descriptor, KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.plan.rules import told
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import AppendProblem, CachedProblem
from flashtile.problem.dtype import DType
from flashtile.problem.options import Variant
from flashtile.triton_glue import language as _triton
from flashtile.triton_glue.language import JitTuple

MAX_HEAD_DIM = 256  # beyond it the accumulators of a warpgroup's 64 rows do not fit its registers
FEW_QUERIES = 15  # of an item of a small problem: the kernels that correct delta are as fast there
FEW_KEYS = 15  # of an item on average: of so few, lengths and masks often leave one
ROW_ELEMENTS = 8  # the bulk copy engine wants strides of 16 bytes: a dense row of 16-bit elements has a multiple of these
GATE, WARPS = "repair.gate", 4  # where a pass tells who repairs it of large scores: the forward in a word of each warp
STORED_ELEMENTS = 16  # likewise of bytes
# Of an item and its heads that share keys. Keys and values of 8 bits are read, written in 16 and read: 5 bytes of each number
# at 4 TB/s. Portable kernels read one, but multiply at 330 instead of 750 TFLOP/s (an H200, 2026-11-29): even at 370 rows.
FEW_ROWS = 512


class Repairs(Protocol):
    """A backend whose kernels may follow this one's."""

    passes: Passes

    def repair_forward(self, problem: AttentionProblem, device: Device, gate: Buffer) -> Plan | None: ...

    def repair_backward(self, problem: AttentionProblem, device: Device, gradients: Gradients, gate: Buffer) -> Plan | None: ...


def _watched(problem: AttentionProblem, device: Device, direction: Direction) -> Plan:
    return BACKEND.forward(problem, device, statistics=direction.wanted)


def _watched_refusals(problem: AttentionProblem, device: Device, direction: Direction) -> list[str]:
    """Reasons against statistics beside a forward."""
    follow = "where a row's scores are large the portable kernels compute it again, which keep no statistics then"
    eight = "q, k or v are stored; statistics of them are not implemented"
    return [follow] * problem.shares_offset + [eight] * (problem.stored is not None)


def _second(problem: AttentionProblem, device: Device, direction: Direction) -> Plan:
    if sums_dq(problem, direction):
        return plan_keys(problem, device, direction)
    assert BACKEND.repairs is not None
    return plan_second(problem, device, direction, BACKEND.repairs.passes["second"].plan(problem, device, direction))


def _second_refusals(problem: AttentionProblem, device: Device, direction: Direction) -> list[str]:
    reasons = tangent_refusals(problem, device, direction)
    if BACKEND.repairs is not None:
        reasons += BACKEND.repairs.passes["second"].unsupported(problem, device, direction)
    return reasons


class HopperBackend:
    """H100, H200: 16-bit problems through TMA and warpgroup matrix instructions."""

    name = "hopper"
    passes: Passes = MappingProxyType(
        {
            "watched": OfferedPass(_watched, _watched_refusals),
            "tangent": OfferedPass(plan_tangent, tangent_refusals),
            "second": OfferedPass(_second, _second_refusals),
        }
    )
    repairs: Repairs | None = None  # who computes again what is off where a row's scores are large; `dispatch` says it

    def unsupported(self, problem: AttentionProblem, device: Device, variant: Variant | None = None) -> list[str]:
        p = problem
        reasons: list[str] = []
        if device.kind != "cuda" or device.arch != 90:
            return [f"the device is {device.target}; these kernels are made of sm90's instructions"]
        if _triton.INTERPRETED:
            return ["Gluon kernels cannot be interpreted"]
        if _triton.VERSION is None:
            reasons.append(NO_TRITON)
        elif reason := gluon_refusal():
            return [reason]
        if not p.dtype.is_narrow:
            reasons.append(f"dtype is {p.dtype}; supported are fp16 and bf16")
        for name in ("head_dim", "head_dim_v"):
            size = getattr(p, name)
            if size > MAX_HEAD_DIM:
                reasons.append(f"{name} is {size}; supported up to {MAX_HEAD_DIM}")
            elif size % ROW_ELEMENTS:
                reasons.append(f"{name} is {size}; supported are multiples of {ROW_ELEMENTS}, which the bulk copy engine needs")
        reasons += stored_refusals(p)
        reasons += uneven_refusals(p) + origin_refusals(p)
        reasons += block_refusals(p, device)
        if p.empty:
            reasons.append("there is no score at all")
        for spec in p.score:
            if not (hasattr(spec.kind, "forward") and hasattr(spec.kind, "backward")):
                reasons.append(
                    f"score modifier {spec.kind.name} has no `forward` and `backward`, its formula for kernels{spec.kind.why}"
                )
        return reasons if variant is None else reasons + self.unsupported_backward(p, device, variant)

    def unsupported_backward(self, problem: AttentionProblem, device: Device, variant: Variant) -> list[str]:
        """Reasons against the backward alone."""
        p, split = problem.listed, is_split(problem, variant)
        if p.stored is not None:
            return ["k and v are of 8 bits and have no gradient; a call that wants others computes them of 16-bit ones"]
        reasons: list[str] = []
        items = p.batch if p.lengths.varlen else 1
        if p.lone:
            reasons.append("no query sees more than one key, so that dp - delta is 0; here both are rounded, and do not cancel")
        elif p.span_q <= items or (p.span_q <= FEW_QUERIES * items and is_small(p)):
            reasons.append(
                f"an item has one query, or up to {FEW_QUERIES} in a small problem: dq and dk show what out was rounded by, "
                "which more would average"
            )
        elif p.dropout is not None and is_small(p) and _may_leave_one(p, items):
            reasons.append(
                "there is dropout, and what is known at run time may leave each query of a small problem one key: seqused or, "
                f"beside up to {FEW_KEYS} keys per item, lengths, a mask or a bias; dq and dk are 0 then, and here what out "
                "was rounded by"
            )
        if p.exact_delta:
            reasons.append("delta is to be exact; here it is of the rounded out, and no pass walks the keys before it is used")
        if p.sink is not None and p.sink.grad and is_small(p):
            reasons.append(
                "the sink's gradient in a small problem is formed by the portable kernels: here delta is of the rounded out"
            )
        if p.where and p.sink is not None:
            reasons.append("the mask has predicates and there is a sink; here it is lse that tells which queries see nothing")
        if p.blocks is not None and max(p.head_dim, p.head_dim_v) <= MAX_HEAD_DIM:
            tile = choose_backward(p, device, split)
            fewest = max(tile.block_q, choose_queries(p, device).block_q if split else 0)
            if p.blocks.block_q % fewest or p.blocks.block_q > PADDED_ROWS or p.blocks.block_k % tile.block_k:
                reasons.append(f"the mask's blocks are {p.blocks.block_q} x {p.blocks.block_k}; supported by the backward are "
                               f"{fewest} to {PADDED_ROWS} queries and multiples of {tile.block_k} keys")  # fmt: skip
        if p.lengths.ragged and p.deterministic and not split:
            reasons.append("items differ in length; the deterministic order is kept for batches of one length")
        if split and any(spec.wants_grad for spec in p.score):
            reasons.append("gradients of biases are formed by the 'fused' backward")
        if stored(p) is None:
            reasons += [
                f"the gradient of {spec.kind.name}'s tensor is formed by the portable kernels; here it is that of one bias for "
                f"every query and key, {p.dtype.value} as the problem, of head dims up to 128, of keys that are a multiple of "
                f"{COPIED_KEYS}, of one length; where batch entries or heads share it, all scores take at most "
                f"{STORED_BYTES >> 30} GiB"
                for spec in p.score
                if spec.wants_grad
            ]
        return reasons

    def forward(
        self, problem: AttentionProblem, device: Device, launch: ForwardLaunch | None = None,
        statistics: frozenset[str] = frozenset(),
    ) -> Plan:  # fmt: skip
        """The plan; `launch` overrides the tile. statistics: those of "peak" and "entropy" that it keeps."""
        from flashtile.kernels.sm90.forward.kernel import attention_forward

        p = problem.listed
        launch, fired = forward_choice(p, device) if launch is None else (launch, ())
        form, schedules = forward_form(p), Schedules(p)
        tile, kept = make_forward_tile(p, launch, form), ()
        if statistics:
            tile = make_watched_tile(p, launch, form, " ".join(n for n in ROW_STATISTICS if n in statistics))
            kept = (tuple(Pointer(n) if n in statistics else None for n in ROW_STATISTICS),)
        grid = forward_grid(p, launch, device)
        gate, behind = gate_of(grid[0] * tile.groups * WARPS), None
        if self.repairs and not p.multiplies_fp8:  # nothing that is added to scores is cut off there
            behind = self.repairs.repair_forward(problem, device, gate)
        if behind is not None:
            tile, kept = replace(tile, tells_far=True), (Pointer(GATE),)
        tiles, tail = over_queries(p, launch, tile, schedules)
        score, biased = chain(p, device, form), None
        if tile.modifiers.brought:
            biased = Descriptor(f"score.{tile.modifiers.early}.0", (1, 1, tile.rows, tile.block_k), axes=(0, 1, 2, 3))
        if tile.modifiers.early >= 0:
            kind = p.score[tile.modifiers.early].kind
            score = JitTuple((*score, kind.load, kind.join))
        sink, out = None if p.sink is None else "sink", "out" if p.lengths.varlen else None
        call = KernelCall(
            attention_forward,
            grid,
            (
                *tiles,
                Descriptor("out", (1, 1, tile.rows, tile.columns_v)),
                biased,
                (Pointer("lse"), *(n and Pointer(n) for n in (sink, out)), tuple(n and Strides(n) for n in (out, sink)), *kept),
                *tail,
            ),
            (("T", tile), ("SCORE", score), ("MASK", predicates(p))),
            launch.num_warps,
            early=True,
        )
        if p.multiplies_fp8:
            before, scratch = turn_values(p, tile, schedules)
        else:
            before, scratch = ([], []) if p.stored is None else widen(p)
        buffers = (*forward_buffers(p), *row_statistics(p, statistics), *scratch, *schedules.buffers)
        notes = (f"forward tile {launch.spell()}", *told(fired))
        plan = Plan(p, self.name, "", buffers, (*schedules.calls, *before, call), notes, optional=frozenset({"lse"}))
        return plan if behind is None else replace(plan, buffers=(*plan.buffers, gate)).followed_by(behind)

    def backward(
        self,
        problem: AttentionProblem,
        device: Device,
        gradients: Gradients,
        variant: Variant,
        launch: BackwardLaunch | None = None,
    ) -> Plan:
        """The plan; `launch` overrides the tile."""
        from flashtile.kernels.sm90.backward.kernel import attention_backward
        from flashtile.kernels.sm90.backward.rows import attention_dq, attention_rows

        p = problem.listed
        split = is_split(p, variant)
        launch, fired = backward_choice(p, device, split) if launch is None else (launch, ())
        launch = replace(launch, converts=launch.converts and "q" in gradients.wanted)
        form, schedules = form_of(p, gradients=stored(p) is None), Schedules(p)
        tile, padded, counts = make_backward_tile(p, launch, form, split), padded_queries(p), integers(p)
        heads_kv = tiled(p, launch).heads_kv
        spares = tile.modifiers.spares and not gradients.dlse  # which such a key gets, too, and delta alone knows
        tile = replace(
            tile, outputs=replace(tile.outputs, wide_keys=gradients.wide_keys), modifiers=replace(tile.modifiers, spares=spares)
        )
        ds, ds_buffers, (ds_zeros, ds_sums) = score_gradient(p, tile)
        score, biased = chain(p, device, form), None
        if tile.modifiers.early >= 0:
            score = JitTuple((*score, p.score[tile.modifiers.early].kind.join))
            biased = Descriptor(f"score.{tile.modifiers.early}.0", (1, 1, tile.block_q, GROUP_ROWS), axes=(0, 1, 2, 3))
        tiles, varlen = backward_tiles(p, launch), p.lengths.varlen
        schedule = schedules.of(launch.block_k, over_keys=True)
        region = schedule, padded if varlen else None, schedule and tiles // heads_kv
        flags = tiles // 2 if tile.outputs.pairs_ds else p.batch * heads_kv if tile.pipeline.converts else 0
        row_region = schedules.of(PADDED_ROWS), region[1]
        rows_per_head = most_tiles(p.span_q, p.batch, PADDED_ROWS if tile.items.ragged else GROUP_ROWS, p.lengths.varlen)
        if not tile.items.ragged:
            rows_per_head = padded // GROUP_ROWS * p.batch
        scratch = [
            Buffer("rows", (p.slabs, p.heads_q, 2, padded), "fp32", "scratch"),
            Buffer("tickets", (tile.counts + flags,), "int32", "scratch"),
        ]
        sums_dq = None
        if not split:
            sums_dq = Pointer("dq_sum")
            scratch.append(Buffer("dq_sum", (1, 1, p.slabs * p.heads_q * padded * tile.columns // 256, 256), "fp32", "scratch"))
        locks = None
        if tile.locked:
            locks = Pointer("locks")
            per_head = (padded // GROUP_ROWS, tile.columns // tile.columns_dq)
            scratch.append(Buffer("locks", (p.slabs, p.heads_q, *per_head), "int32", "scratch"))
        given, more = None, min(tiles, tile.divided) * (tile.schedule.pieces - 1)  # tickets beside those of tiles, at most
        if tile.schedule.pieces > 1:
            given = Pointer("given")
            room = (tiles // 2 if tile.schedule.helps else more, 2, GROUP_ROWS, tile.columns + tile.columns_v)
            scratch.append(Buffer("given", room, "fp32", "scratch"))
        parts = [part for part in tile.parts if part.makes & gradients.wanted or tile.outputs.ds]
        formed = {n for part in parts for n in part.makes}
        unasked = formed - gradients.wanted - {"q"}
        stored_in = keys_dtype(p, tile.outputs.wide_keys)
        made = {n: f"d{n}" for n in "kv"}  # by the passes over keys
        if launch.ungrouped:
            made = {n: f"d{n}.heads" for n in "kv"}
            scratch += [Buffer(name, shapes(tiled(p, launch))[n], stored_in, "scratch") for n, name in made.items()]
        else:
            scratch += [Buffer(f"d{n}", shapes(p)[n], stored_in, "scratch", like=n) for n in sorted(unasked)]
        dlse, sink = "dlse" if gradients.dlse else None, None if p.sink is None else "sink"
        sunk = None
        if p.sink is not None and p.sink.grad:
            sunk = Pointer("partial.sink")
            scratch.append(Buffer("partial.sink", (p.heads_q, rows_per_head), "fp32", "scratch"))
        gate = gate_of(rows_per_head * p.heads_q)
        behind = self.repairs and self.repairs.repair_backward(problem, device, gradients, gate)
        rows = KernelCall(
            attention_rows,
            (rows_per_head * p.heads_q, 1, 1),
            (
                (Pointer("out"), Pointer("dout"), Pointer("lse"), dlse and Pointer(dlse), sink and Pointer(sink)),
                (
                    Pointer("rows"),
                    sums_dq if tile.clears and len(parts) == 1 else None,
                    Pointer("tickets"),
                    locks,
                    sunk,
                    behind and Pointer(GATE),
                ),
                (Strides("out"), Strides("dout"), Strides(dlse or "lse"), Strides(sink or "lse")),
                counts["seqlen_q"],
                counts["heads"],
                product_scale(p),
                (*row_region, flags or None),
            ),
            (("T", tile),),
            ROW_WARPS,
            registers=None if tile.items.ragged else ROW_REGISTERS,
            early=True,
        )
        alone = p.lengths.varlen or tile.outputs.wide_keys  # rows that the copy engine does not write
        whole = [(Pointer(name), Strides(name)) if alone and n in formed else None for n, name in made.items()]
        dq = (Pointer("dq", addressable=True), Strides("dq"), p.scale_value) if tile.pipeline.converts else None
        keys = [
            KernelCall(
                attention_backward,
                (min(tiles + more, device.sm_count) if launch.resident else tiles, 1, 1),
                (
                    Descriptor("q", (1, 1, part.block_q, part.columns)),
                    Descriptor("k", (1, 1, GROUP_ROWS, part.columns)),
                    Descriptor("v", (1, 1, GROUP_ROWS, part.columns_v)) if part.outputs.dk else None,
                    Descriptor("dout", (1, 1, part.block_q, part.columns_v)),
                    Descriptor(made["k"], (1, 1, GROUP_ROWS, part.columns_stored)) if part.outputs.dk else None,
                    Descriptor(made["v"], (1, 1, GROUP_ROWS, part.columns_v_stored)) if part.outputs.dv else None,
                    Descriptor("rows", (1, 1, 1, part.block_q), axes=(0, 1, 2, 3), swizzled=False),
                    sums_dq and Descriptor("dq_sum", (1, 1, part.columns_added // 4, 256), axes=(0, 1, 2, 3), swizzled=False),
                    biased,
                    ds and Descriptor(ds, (1, 1, part.block_q, GROUP_ROWS), axes=(0, 1, 2, 3)),
                    *(counts[n] for n in ("left", "right")),
                    (
                        (
                            (sums_dq if part.outputs.dk or len(parts) > 1 else None, Pointer("tickets"), locks, given),
                            *whole,
                            dq,
                        ),
                        *(region, product_scale(p), score_args(p), mask_args(p), (block_lists(p, "k"), block_lists(p, "q"))),
                    ),
                ),
                (("T", part), ("SCORE", score), ("MASK", predicates(p))),
                launch.num_warps,
                early=True,
            )
            for part in parts
        ]
        calls = [*schedules.calls, *ds_zeros, rows, *keys, *ds_sums]
        notes = (f"backward {'split' if split else 'fused'}", f"keys pass tile {launch.spell()}", *told(fired))
        if "q" in gradients.wanted and split:
            queries, fired = queries_choice(p, device)
            calls.append(queries_call(p, device, queries, tile, schedules))
            notes += (f"queries pass tile {queries.spell()}", *told(fired))
        elif "q" in gradients.wanted and not tile.pipeline.converts:
            sums = sums_dq, None if tile.clears else locks
            args = (sums, Pointer("dq"), Strides("dq"), counts["seqlen_q"], counts["heads"], p.scale_value, row_region)
            calls.append(replace(rows, kernel=attention_dq, args=args))
        if launch.ungrouped:
            calls += head_sums(p, [n for n in "kv" if n in gradients.wanted])
        if sunk:
            args = (sunk, None, Pointer("dsink"), rows_per_head, p.heads_q)
            calls.append(KernelCall(sum_partials, (p.heads_q, 1, 1), args, (("BLOCK", 256),), 4, 1))
        buffers = (*backward_buffers(p, gradients), *ds_buffers, *scratch, *schedules.buffers)
        plan = Plan(p, self.name, "split" if split else "fused", buffers, tuple(calls), notes)
        return replace(plan, buffers=(*plan.buffers, gate)).followed_by(behind) if behind else plan

    def unsupported_cached(self, problem: CachedProblem | AppendProblem, device: Device) -> list[str]:
        if device.kind != "cuda" or device.arch != 90:
            return [f"the device is {device.target}; these kernels are made of sm90's instructions"]
        if isinstance(problem, AppendProblem):
            return ["new rows are written into a cache by the portable kernels"]
        if _triton.INTERPRETED:
            return ["Gluon kernels cannot be interpreted"]
        reason = NO_TRITON if _triton.VERSION is None else gluon_refusal()
        return [reason] if reason else cached_refusals(problem)

    def cached(self, problem: CachedProblem | AppendProblem, device: Device, general: bool = False) -> Plan:
        assert isinstance(problem, CachedProblem), problem
        return plan_cached(problem, device, self.name, general=general)


BACKEND = HopperBackend()

# of the passes before and after: 64 queries of a head, which wait for memory (docs/lab/hopper-backward.md)
ROW_WARPS, ROW_REGISTERS = 8, 64


def gate_of(words: int) -> Buffer:
    """Room for the words that tell of rows whose scores are large."""
    return Buffer(GATE, (words,), "int32", "scratch")


def head_sums(p: AttentionProblem, names: list[str]) -> list[KernelCall]:
    """dk and dv ("k", "v"), of those that are wanted, from the gradients that query heads have made apart."""
    if not names:
        return []
    tile = HeadSums(p.group, tuple(p.head_dim if n == "k" else p.head_dim_v for n in names))
    grid = (-(-p.span_k // tile.rows) * p.heads_kv * p.slabs, 1, 1)
    sources, targets = (tuple(Pointer(f"d{n}{tail}") for n in names) for tail in (".heads", ""))
    args = (sources, targets, tuple(Strides(f"d{n}") for n in names), p.span_k, p.heads_kv)
    return [KernelCall(sum_heads, grid, args, (("T", tile),), 4, 1)]


def turn_values(p: AttentionProblem, tile: ForwardTile, schedules: Schedules) -> tuple[list[KernelCall], list[Buffer]]:
    """What makes `turned` of values in 8 bits, and that buffer."""
    from flashtile.kernels.sm90.forward.values import attention_values

    counts, padded = integers(p), padded_total(p.span_k, p.batch, p.lengths.varlen)
    turned = Buffer("turned", (p.slabs, p.heads_kv, p.head_dim_v, padded), "uint8", "scratch")
    tiles = most_tiles(p.span_k, p.batch, PADDED_ROWS, p.lengths.varlen)
    args = (
        *(Pointer("v"), Pointer("turned"), Strides("v"), counts["seqlen_q"], counts["seqlen_k"], p.heads_kv),
        *(counts["left"], counts["right"], (schedules.of(PADDED_ROWS, over_keys=True), padded)),
    )
    grid = (tiles * p.heads_kv * tile.parts_v, 1, 1)
    return [KernelCall(attention_values, grid, args, (("T", tile),), 4, 1)], [turned]


def widen(p: AttentionProblem) -> tuple[list[KernelCall], list[Buffer]]:
    """What makes `wide.k` and `wide.v` of keys and values in 8 bits, and these."""
    from flashtile.kernels.sm90.forward.widen import WidenTile, attention_widened

    assert p.stored is not None
    calls, made = list[KernelCall](), list[Buffer]()
    for side in "kv":
        shape, token = shapes(p)[side], p.stored.scaled.get(side) == "token"
        columns = 1 << (shape[3] - 1).bit_length()
        tile = WidenTile(max(16, 8192 // columns), columns, shape[3], p.stored.dtype, token)
        made.append(Buffer(f"wide.{side}", shape, p.dtype.value, "scratch"))
        scale = f"{side}_scale" if token else None
        strides = (Strides(side), Strides(f"wide.{side}"), scale and Strides(scale))
        args = (Pointer(side), scale and Pointer(scale), Pointer(f"wide.{side}"), strides, p.span_k, p.heads_kv)
        grid = (-(-p.span_k // tile.rows) * p.slabs * p.heads_kv, 1, 1)
        calls.append(KernelCall(attention_widened, grid, args, (("T", tile),), 4, 1))
    return calls, made


def queries_call(
    p: AttentionProblem, device: Device, launch: ForwardLaunch, keys: BackwardTile, schedules: Schedules
) -> KernelCall:
    """The pass over queries that makes dq, of rows as the passes over keys have them."""
    from flashtile.kernels.sm90.backward.dq_queries import attention_queries

    form, varlen = form_of(p), p.lengths.varlen
    tile = make_queries_tile(p, launch, form)
    tiles, tail = over_queries(p, launch, tile, schedules)
    return KernelCall(
        attention_queries,
        forward_grid(p, launch, device),
        (
            *tiles,
            Descriptor("dout", (1, 1, tile.rows, tile.columns_v)),
            Descriptor("dq", (1, 1, tile.rows, tile.columns)),
            (
                Pointer("rows"),
                padded_queries(p) if varlen else None,
                *((Pointer("dq"), Strides("dq")) if varlen else (None, None)),
            ),
            *tail,
        ),
        (
            ("FOLDS", -1 if keys.modifiers.spares else keys.modifiers.folds + keys.modifiers.folds_level),
            ("T", tile),
            ("SCORE", chain(p, device, form)),
            ("MASK", predicates(p)),
        ),
        launch.num_warps,
        early=True,
    )


def score_gradient(p: AttentionProblem, tile: BackwardTile) -> tuple[str | None, list[Buffer], list[list[KernelCall]]]:
    """(where all scores' gradients are stored, None unless T.outputs.ds; that buffer, where the plan has none such; what is
    launched before it, and after).
    """
    given = stored(p)
    if given is None:
        return None, [], [[], []]
    name, shape, whole = f"dscore.{given}.0", p.score[given].tensors[0].shape, scores_shape(p)
    scratch, after = list[Buffer](), list[KernelCall]()
    if not (shape == whole or tile.outputs.pairs_ds):
        scratch, after = [Buffer("ds", whole, p.dtype.value, "scratch")], [sums("ds", name, whole, shape)]
        name, shape = "ds", whole
    return name, scratch, [[zeros(p, name, shape[0] * shape[1], tile)] if tile.mask.gaps else [], after]


def stored_refusals(p: AttentionProblem) -> list[str]:
    """Reasons against what is stored in 8 bits."""
    if p.stored is None:
        return []
    if not p.multiplies_fp8:
        rows, few = p.span_q * p.group, FEW_ROWS * (p.batch if p.lengths.varlen else 1)
        reasons: list[str] = []
        if p.stored.k_scale == "token":
            reasons.append("k_scale is one of each token; keys times it would be rounded to 16 bits here")
        if p.stored.v_scale == "token" and p.dtype is DType.FP16:
            reasons.append("v_scale is one of each token and q is fp16, in which values times it may be infinite")
        if rows < few:
            reasons.append(
                f"k and v are stored in {p.stored.dtype} and {rows} query rows share them, of heads together; here they become "
                f"{p.dtype} in memory first, which pays from {few} on"
            )
        return reasons
    reasons = [
        f"{side}_scale is one of each token; these kernels take one of each head" for side, how in p.stored.scaled.items()
        if how == "token"
    ]  # fmt: skip
    for name in ("head_dim", "head_dim_v"):
        if getattr(p, name) % STORED_ELEMENTS:
            reasons.append(f"{name} is {getattr(p, name)}; of bytes the bulk copy engine needs multiples of {STORED_ELEMENTS}")
    if p.where or p.blocks is not None:
        reasons.append("the mask has predicates or block lists; under precision='fp8' these kernels take bands alone")
    if p.dropout is not None:
        reasons.append("there is dropout; under precision='fp8' these kernels have none")
    return reasons


def block_refusals(p: AttentionProblem, device: Device) -> list[str]:
    """Reasons against block lists and predicates."""
    reasons = [
        f"predicate {leaf.kind.name} has no `visible`, its formula for kernels"
        for leaf in p.leaves
        if not hasattr(leaf.kind, "visible")
    ]
    if p.blocks is not None and p.lengths.ragged:
        reasons.append("the mask has block lists and items differ in length; lists are made for one length")
    elif p.blocks is not None and max(p.head_dim, p.head_dim_v) <= MAX_HEAD_DIM:
        tile = choose_forward(p, device)
        if p.blocks.block_q % tile.block_q or p.blocks.block_k % tile.block_k:
            reasons.append(f"the mask's blocks are {p.blocks.block_q} x {p.blocks.block_k}; supported are multiples of "
                           f"{tile.block_q} x {tile.block_k}")  # fmt: skip
    return reasons


@cache
def gluon_refusal() -> str | None:
    """Why this Triton's Gluon cannot build the kernels, which is said in a warning once; None when it can."""
    try:
        from flashtile.kernels.sm90.backward import dq_queries as queries  # noqa: F401
    except SyntaxError:  # no release changes how a file is parsed: this copy of the library is damaged
        raise
    except Exception as error:  # whatever a release changed: a refusal, never a crash
        reason = f"Triton {_triton.VERSION}'s Gluon differs from the one these kernels are written in: {error}"
        warnings.warn(f"{reason}. Slower ones take the place of Hopper's.", stacklevel=2)
        return reason
    return None


def _may_leave_one(p: AttentionProblem, items: int) -> bool:
    """Whether it happens that no query sees more than one key, though the problem does not say so.

    out is then v times dropout's factor, rounded: delta is of that, dp is not. `seqused` does it beside any number of keys: the
    items that have more may have no query.
    """
    uneven = p.lengths.ragged or bool(p.where) or p.shares_offset
    return p.lengths.used_k or (uneven and p.span_k <= FEW_KEYS * items)
