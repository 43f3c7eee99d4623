"""Tiles other than the chosen one: which there are, and a way to make the planner choose them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from flashtile.errors import InvalidProblem
from flashtile.kernels.portable import choose
from flashtile.kernels.portable.candidates import shared_bytes
from flashtile.kernels.portable.rules import TABLES, TWICE, Asked
from flashtile.kernels.portable.tile import Launch, Pass, products
from flashtile.memory import cache_clear
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem

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
    made_of = products(problem, device, which)
    asked = Asked(problem, device, which, made_of)
    found = [tile for table in TABLES if asked.kind in table.kinds for tile in table.tiles.get((which, asked.width), ())]
    if asked.narrow and which == "queries" and asked.width in TWICE:
        found.append(TWICE[asked.width])
    if made_of != "float64":
        start, _, _ = choose.plain_family(problem, which).rpartition("/")
        found += [launch for key, launch in choose.tiles_of(device.target).items() if key.startswith(f"{start}/")]
    tiles = [replace(launch, products=made_of) for launch in found]
    return [launch for launch in dict.fromkeys(tiles) if shared_bytes(problem, launch, which) <= device.smem_bytes]
