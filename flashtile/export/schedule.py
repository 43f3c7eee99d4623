"""The Hopper forward's choice of a tile, which plays schedules through for given sizes: in C it is made at run time."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

from flashtile.kernels.sm90.host import choose_forward as choose
from flashtile.kernels.sm90.host import schedule
from flashtile.kernels.sm90.host.tile_forward import ForwardLaunch
from flashtile.problem.attention import AttentionProblem

DERIVED = ("choice", "swizzle")  # what the choice consists of, as sizes that the run-time finds


def launches(problem: AttentionProblem) -> dict[int, ForwardLaunch]:
    """Every launch that may be chosen for some sizes, by number, from 1 on; `swizzle` is not decided."""
    full, causal = choose.options(problem)
    found = [launch for launch, _ in full]
    for launch, _ in causal if problem.mask.right is not None else ():
        found += [replace(launch, resident=False), launch]
    return dict(enumerate(found, 1))


def feasible(problem: AttentionProblem) -> list[int]:
    """Numbers of the launches that may be chosen for these sizes."""
    full, causal = choose.options(problem)
    if not choose.is_causal(problem):
        return list(range(1, len(full) + 1))
    pairs = [(len(full) + 1 + 2 * i, launch.resident) for i, (launch, _) in enumerate(causal)]
    return [number for first, resident in pairs for number in ((first, first + 1) if resident else (first,))]


def number_of(problem: AttentionProblem, launch: ForwardLaunch) -> int:
    """The number of a launch that was chosen for these sizes."""
    known = launches(problem)
    return next(n for n in feasible(problem) if replace(known[n], swizzle=launch.swizzle) == launch)


def table(problem: AttentionProblem, name: str) -> str:
    """The problem's `struct schedule` in C."""
    p = problem

    def tilings(priced: tuple[choose.Priced, ...]) -> str:
        rows = [f"{{{one.block_q}, {one.block_k}, {us!r}, {int(one.resident)}}}" for one, us in priced]
        return "{" + ", ".join(rows + ["{0, 0, 0.0, 0}"] * (2 - len(rows))) + "}"

    full, causal = choose.options(p)
    left, right = p.mask.left, p.mask.right
    numbers = (
        p.group, (p.head_dim + p.head_dim_v) * p.dtype.size_bytes, int(left is not None), int(right is not None), left or 0,
        right or 0, len(full), len(causal), tilings(full), tilings(causal),
    )  # fmt: skip
    return f"static const struct schedule {name}_schedule = {{{', '.join(map(str, numbers))}}};\n"


def code() -> str:
    """The functions that choose, with the planner's constants."""
    text = (files("flashtile.export") / "schedule.c").read_text()
    for name, module in (
        ("TILE_US", choose), ("BLOCK_US", choose), ("EVEN", choose), ("TOGETHER_BYTES", choose), ("MOST_PLAYED", choose),
        ("MOST_QUEUED", schedule),
    ):  # fmt: skip
        text = text.replace(f"@{name}@", repr(getattr(module, name)))
    return text
