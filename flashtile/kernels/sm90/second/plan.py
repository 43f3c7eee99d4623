"""Plans of second derivatives: a tangent pass, then one over keys, or the portable kernels' two."""

from __future__ import annotations

from math import ceil
from typing import Any

from flashtile.kernels.sm90.host.arguments import product_scale
from flashtile.kernels.sm90.host.tile_backward import PADDED_ROWS
from flashtile.kernels.sm90.host.tile_forward import GROUP_ROWS
from flashtile.kernels.sm90.second.tile import SecondTile
from flashtile.kernels.sm90.tangent.plan import first_pass
from flashtile.plan.arguments import integers
from flashtile.plan.backend import Direction
from flashtile.plan.buffers import second_buffers
from flashtile.plan.call import Buffer, Descriptor, KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem

ROW_WARPS, ROW_REGISTERS = 8, 64  # of the pass behind, as the backward's


def sums_dq(p: AttentionProblem, direction: Direction) -> bool:
    """Whether one pass over keys, which adds dq up in any order, makes all three: elsewhere the portable kernels do."""
    tile = SecondTile.of(p)
    every = frozenset("qkv")
    return (
        tile.columns == tile.columns_v <= 128
        and not (tile.mask.blanks or p.deterministic)
        and direction.moved == every
        and direction.wanted >= every
        and "dout" in direction.given
    )


def plan_keys(p: AttentionProblem, device: Device, direction: Direction, tile: SecondTile | None = None) -> Plan:
    """The tangent pass, the pass over keys, and dq of its sum; `tile` overrides the chosen one."""
    from flashtile.kernels.sm90.backward.rows import attention_dq
    from flashtile.kernels.sm90.second.kernel import attention_second, attention_turned_dq

    tile, counts = tile or SecondTile.of(p, 1 + ("tdout" in direction.given)), integers(p)
    span = ceil(p.span_q / 4) * 4  # the copy engine wants strides of 16 bytes
    padded = ceil(p.span_q / PADDED_ROWS) * PADDED_ROWS
    heads = p.slabs * p.heads_q
    scratch = (
        Buffer("rows", (p.slabs, p.heads_q, 5, span), "fp32", "scratch"),
        Buffer("dq_sum", (1, 1, heads * padded * tile.columns // 256, 256), "fp32", "scratch"),
    )
    first, notes = first_pass(p, device, direction, (span, Pointer("dq_sum")))
    rows = {"k": GROUP_ROWS, "v": GROUP_ROWS}
    columns = {"k": tile.columns, "q": tile.columns}

    def of(name: str, like: str) -> Descriptor:
        return Descriptor(name, (1, 1, rows.get(like, tile.block_q), columns.get(like, tile.columns_v)))

    keys = KernelCall(
        attention_second,
        (ceil(p.span_k / tile.block_k) * p.slabs * p.heads_kv, 1, 1),
        (
            *(of(n, n) for n in "qkv"),
            *(of(f"t{n}", n) for n in "qkv"),
            of("dout", "out"),
            of("tdout", "out") if "tdout" in direction.given else None,
            Descriptor("rows", (1, 1, 1, tile.block_q), axes=(0, 1, 2, 3), swizzled=False),
            of("dk", "k"),
            of("dv", "v"),
            Descriptor("dq_sum", (1, 1, GROUP_ROWS * tile.block_q // 256, 256), axes=(0, 1, 2, 3), swizzled=False),
            *(counts[n] for n in ("left", "right")),
            product_scale(p),
        ),
        (("T", tile),),
        4,
        early=True,
    )
    sums: Any = Pointer("dq_sum") if tile.turned else (Pointer("dq_sum"), None)
    args = (sums, Pointer("dq"), Strides("dq"), counts["seqlen_q"], counts["heads"], p.scale_value)
    if not tile.turned:
        args = (*args, (None, None, None))
    dq = KernelCall(
        attention_turned_dq if tile.turned else attention_dq,
        (padded // tile.block_q * heads, 1, 1),
        args,
        (("T", tile),),
        ROW_WARPS,
        registers=ROW_REGISTERS,
        early=True,
    )
    buffers = (*second_buffers(p, direction), *scratch)
    return Plan(p, "hopper", "", buffers, (first, keys, dq), (*notes, f"second derivative tile {tile.spell()}"))
