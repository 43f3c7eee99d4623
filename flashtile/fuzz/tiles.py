"""Tiles other than the chosen one: which there are, and a way to make the planner choose them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from flashtile.errors import InvalidProblem
from flashtile.kernels.portable import choose
from flashtile.kernels.portable.candidates import shared_bytes
from flashtile.kernels.portable.tile import Launch, Pass, padded, products
from flashtile.memory import cache_clear
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType

PASSES: tuple[Pass, ...] = ("forward", "keys", "queries", "fused", "pairs")


def spell(launches: dict[Pass, Launch]) -> str:
    """PASS:QxKxWARPSxSTAGESxSWIZZLExHELD;..."""
    return ";".join(
        f"{which}:{x.block_q}x{x.block_k}x{x.num_warps}x{x.num_stages}x{x.swizzle}x{x.held}" for which, x in launches.items()
    )


def parse(text: str) -> dict[Pass, Launch]:
    """What `spell` wrote. Raises InvalidProblem."""
    made: dict[Pass, Launch] = {}
    for part in text.split(";") if text else ():
        which, _, numbers = part.partition(":")
        found = [int(n) for n in numbers.split("x") if n.isdecimal()]
        if which not in PASSES or len(found) != 6:
            raise InvalidProblem(f"tile is {part!r}; it must be PASS:QxKxWARPSxSTAGESxSWIZZLExHELD, of {', '.join(PASSES)}.")
        made[which] = Launch(*found[:5], held=found[5])  # pyright: ignore[reportArgumentType]
    return made


@contextmanager
def forced(text: str) -> Generator[None]:
    """The planner of the portable backend gives these tiles, whatever it would choose."""
    launches = parse(text)
    if not launches:
        yield
        return
    cache_clear()  # plans are remembered by problem
    choose.FORCED.update(launches)
    try:
        yield
    finally:
        choose.FORCED.clear()
        cache_clear()


def choosable(problem: AttentionProblem, device: Device, which: Pass) -> list[Launch]:
    """Every tile that some rule or tuned table has for a pass of a problem's dtype and head dims, and that fits the device."""
    width, half, made_of = max(*padded(problem), 64), problem.dtype is not DType.FP32, products(problem, device, which)
    found: list[Launch] = []
    if half:
        found += choose.SIXTEEN_BIT[which][width]
        tables = (choose.SCORED, choose.LINED, choose.BIASED, choose.ROOMY, choose.SCATTERED, choose.UNEQUAL)
        found += [table[which, width] for table in tables if (which, width) in table]
        if which == "queries" and width in choose.TWICE:
            found.append(choose.TWICE[width])
    elif made_of == "float64":
        found += [replace(choose.FLOAT64[width], block_q=rows) for rows in {16, choose.FLOAT64[width].block_q}]
    elif problem.precision == "ieee":
        found += [*choose.IEEE[width], *(choose.IEEE_QUERIES.get(width, ()) if which == "queries" else ())]
    else:
        own = choose.OWN_TILES[made_of].get((which, width), ()) if made_of != "unit" else ()
        found += [*choose.FP32[which][width], *own]
    columns, columns_v = padded(problem)
    kind = problem.precision if not half else "16bit"
    start = f"{which}/{kind}/{columns}x{columns_v}/"
    if made_of != "float64":
        found += [launch for key, launch in choose.tiles_of(device.target).items() if key.startswith(start)]
    tiles = [replace(launch, products=made_of) for launch in found]
    return [launch for launch in dict.fromkeys(tiles) if shared_bytes(problem, launch, which) <= device.smem_bytes]
