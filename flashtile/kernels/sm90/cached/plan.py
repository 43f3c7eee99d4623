"""Plans of Hopper's kernel over a cache."""

from __future__ import annotations

from dataclasses import replace

from flashtile.kernels.device.decoding import Packing, combine_call, group_of, part_buffers, parts_of, reach_of
from flashtile.kernels.sm90.host import choose_cached as choose
from flashtile.kernels.sm90.host.choose_cached import CachedLaunch, make_cached_tile
from flashtile.kernels.sm90.host.tile_forward import GROUP_ROWS, LOST
from flashtile.plan.buffers import cached_buffers
from flashtile.plan.call import Descriptor, KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.problem.cache import CachedProblem


def plan_cached(
    problem: CachedProblem, device: Device, name: str, launch: CachedLaunch | None = None, general: bool = False
) -> Plan:
    """The forward of one launch, or of parts and their sum; `launch` overrides the tile. general: no block has whole items."""
    from flashtile.kernels.sm90.cached.kernel import decode_hopper
    from flashtile.kernels.sm90.cached.latent import decode_latent

    p, pages, split = problem.attention, problem.pages, problem.split
    launch = choose.choose_cached(problem) if launch is None else launch
    heads = choose.heads_of(problem)
    tokens = launch.rows_of(heads * p.seqlen_q) // heads
    tiles = p.batch * -(-p.seqlen_q // tokens)
    chunks = -(-p.group // heads)
    least = choose.LATENT_PROGRAMS if problem.shared else choose.PROGRAMS
    programs = tiles * p.heads_kv * chunks
    parts = parts_of(problem, programs, device, least)
    shares = -(-problem.splits // parts)
    tile = make_cached_tile(problem, launch, heads, parts)
    reach = reach_of(problem, tokens)
    seen = shares  # that a tile of queries may see a key of
    if reach is not None and shares > 1:
        seen = min(shares, max(0, -(-(reach - 1) // (split * parts))) + 1)
    if seen > 1 and choose.crosses(problem, launch, reach, programs, device):
        tile, seen = replace(tile, parts=group_of(split), folds=True, direct=True, crosses=True), 1
    sums = tile.split > 0 and not tile.direct  # by a launch of its own
    scratch = part_buffers(problem, shares if tile.folds else problem.splits, "fp32") if sums else ()
    sink = Pointer("sink") if p.sink is not None else None
    outputs = tuple(Pointer(b.name) for b in scratch) if sums else (Pointer("out"), Pointer("lse"), sink)
    table = (Pointer("page_table"), Strides("page_table")) if pages.table else (None, (0, 0))
    scales = tuple(
        (Pointer(name), Strides(name)) if scaled else (None, (0, 0))
        for name, scaled in (("k_scale", tile.k_scale), ("v_scale", tile.v_scale))
    )
    keys = Descriptor("k", (1, 1, tile.box, tile.copied_columns_k))
    strides = Strides("q"), Strides("out"), Strides("sink") if sink else (0,)
    lengths = (Pointer("seqused_k"), Pointer("first_k") if pages.first else None)
    sizes = (
        table, lengths, p.seqlen_q, p.heads_kv, pages.capacity, seen, p.band.left or 0, p.band.right or 0,
        (p.group, p.batch, p.scale_value * (1.0 + LOST * p.head_dim)),
    )  # fmt: skip
    if problem.shared and not launch.turned:
        queries = Descriptor("q", (1, GROUP_ROWS // heads, heads, choose.STRIP), axes=(0, 1, 2, 3))
        latents = Descriptor("v", keys.block) if problem.apart else keys
        kernel, args = decode_latent, (queries, latents, keys, outputs, strides, *sizes)
    else:
        values = keys if problem.one_pool else Descriptor("v", (1, 1, tile.box, tile.copied_columns_v))
        if seen > 1 and not general and choose.may_be_whole(problem, tile, programs, device):
            tile = replace(tile, whole=choose.WHOLE_ITEMS, crosses=True)
            outputs = (*outputs, (Pointer("out"), Pointer("lse"), sink))
        kernel, args = decode_hopper, (keys, values, Pointer("q"), outputs, strides, scales, *sizes)
    forward = KernelCall(
        kernel, (programs * seen, 1, 1), args, (("T", tile),), 4, contracts=False,
        registers=launch.registers, early=True,
    )  # fmt: skip
    calls = [forward]
    if sums:
        keys_of_part = split * parts if tile.folds else split
        packing = Packing(heads, chunks, tile.page, keys_of_part, parts, True, whole=tile.whole)
        plain = replace(tile, parts=1, folds=False, crosses=False, whole=0)  # the same sum, whoever made the parts
        calls.append(combine_call(problem, packing, plain, 1 if tile.folds else group_of(split), device))
    notes = (
        f"decode tile {launch.spell()}, {heads} heads packed, boxes of {tile.box} rows",
        f"{problem.splits} parts of {split} keys" if split else "one pass",
    )
    return Plan(problem, name, "", (*cached_buffers(problem), *scratch), tuple(calls), notes, spare=frozenset({"lse"}))
