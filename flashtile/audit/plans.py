"""Plans of drawn problems for every architecture, told by a hash: whether a change of planning code changed any of them.

    python -m flashtile.audit.plans [--target sm90 ...] [--draw N] [--seed N] [--csv FILE] [--against FILE]

No GPU is needed, and nothing is compiled. A plan is all that a launch is made of: kernels, tiles, grids, arguments, buffers. A
row says "refused" where the backend refuses the problem, with its reasons in the hash. With --against, rows that differ
from those of that earlier file are printed, and are failures.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from flashtile.dispatch import BACKENDS
from flashtile.errors import InvalidProblem
from flashtile.plan.backend import Backend, Gradients
from flashtile.plan.call import KernelCall, Plan
from flashtile.plan.device import NAMED, Device, named
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.options import Variant

VARIANTS: tuple[Variant | None, ...] = (None, "auto", "split", "fused")
DIMS = (16, 24, 32, 40, 64, 64, 80, 96, 128, 128, 128, 192, 256, 320, 512)
LENGTHS = (1, 17, 90, 200, 512, 1000, 1024, 2048, 4096, 8192)
BANDS = ("", "", ":0", ":0", "1000:", "1000:0", "9:5", "63:0")
IDENTITY = ("problem", "target", "backend", "variant")


@dataclass(frozen=True)
class Row:
    """One plan."""

    problem: str
    target: str
    backend: str
    variant: str
    plan: str  # a hash, behind "refused" where there is none
    notes: str  # what of it `explain` prints


def draw(random: Random) -> str:
    """The spelling of a problem, which may have no meaning: shapes, dtype and features each by itself."""
    n, m = random.choice(LENGTHS), random.choice(LENGTHS)
    m = n if random.random() < 0.6 else m
    group, heads_kv, batch = random.choice((1, 1, 2, 4)), random.choice((1, 2, 8)), random.choice((1, 2, 4, 16))
    heads, d = group * heads_kv, random.choice(DIMS)
    dv = d if random.random() < 0.7 else random.choice(DIMS)
    dtype = random.choice(("bf16", "bf16", "bf16", "fp16", "fp32", "fp32"))
    parts = [f"q={batch}x{n}x{heads}x{d},kv={m}x{heads_kv}x{dv},{dtype}"]
    if band := random.choice(BANDS):
        parts.append(f"band={band}")
    wide = "fp32" if dtype == "fp32" else dtype
    shapes = [f"{random.choice((1, batch))}x{random.choice((1, heads))}x{random.choice((1, n))}x{m}"]
    bias = f"bias({shapes[0]}:{wide}{random.choice(('', ':grad'))})"
    slopes = f"{batch}x{heads}:fp32"
    if score := random.choice(("", "", "", "softcap(30.0)", f"alibi({slopes}:grad)", f"alibi({slopes})+softcap(30.0)", bias)):
        parts.append(f"score={score}")
    chances = {f"sink={heads}:fp32:grad": 0.1, "dropout=0.1": 0.15, "deterministic": 0.15, "lse": 0.1, "exact_delta": 0.1}
    parts += [part for part, chance in chances.items() if random.random() < chance]
    if random.random() < 0.4:  # nothing that few have
        parts = parts[: 1 + bool(band)]
    if dtype == "fp32":
        parts.append(random.choice(("tf32x3", "tf32x3", "tf32", "ieee")))
    lengths = random.choice(("", "", "", "", "", "used=qk", "used=k", f"varlen={batch * n}x{batch * m}"))
    documents = f"document({n};{m};{batch}x{n}:int32;{batch}x{m}:int32)"
    masks = ("", "", "", "", documents, "dilated(3)", f"key_padding({m};{batch}x{m}:bool)", f"prefix({batch}:int32)")
    where, size = random.choice(masks), random.choice((32, 64, 128, 256))
    parts += [lengths] * bool(lengths) + [f"where={where}"] * bool(where)
    if where and not lengths and random.random() < 0.6:
        parts.append(f"blocks={size}x{random.choice((size, 128))}")
    return f"attention({','.join(parts)})"


def drawn(count: int, seed: int) -> Iterator[AttentionProblem]:
    """So many problems that have a meaning."""
    random = Random(seed)
    while count:
        try:
            problem = AttentionProblem.parse(draw(random))
        except InvalidProblem:
            continue
        yield problem
        count -= 1


def told(plan: Plan) -> str:
    """All of a plan but its notes."""
    calls = [
        f"{call.kernel.fn.__name__} {call.grid} {call.args} {call.constants} {call.options} {call.early}"
        if isinstance(call, KernelCall)
        else f"{call.function.__module__}.{call.function.__qualname__} {call.outputs}"
        for call in plan.calls
    ]
    return "\n".join((plan.backend, plan.variant, str(plan.buffers), str(sorted(plan.optional)), *calls))


def row_of(problem: AttentionProblem, device: Device, backend: Backend, variant: Variant | None) -> Row:
    """The plan of one backend, forward where variant is None, or its refusal."""
    known = problem.spell(), device.target, backend.name, variant or ""
    if reasons := backend.unsupported(problem, device, variant):
        return Row(*known, f"refused {_hash(str(reasons))}", "")
    if variant is None:
        plan = backend.forward(problem, device)
    else:
        plan = backend.backward(problem, device, Gradients(dlse=True), variant)
    return Row(*known, _hash(told(plan)), "; ".join(plan.notes))


def rows(targets: list[str], count: int, seed: int) -> Iterator[Row]:
    """All plans of all backends."""
    for problem in drawn(count, seed):
        for device in map(named, targets):
            for backend in BACKENDS:
                for variant in VARIANTS:
                    yield row_of(problem, device, backend, variant)


def write(made: list[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in made)


def against(made: list[Row], earlier: Path) -> tuple[int, list[Row]]:
    """How many of the rows an earlier file has, too, and those of them that have another plan."""
    with earlier.open(newline="") as file:
        known = {tuple(line[name] for name in IDENTITY): line["plan"] for line in csv.DictReader(file)}
    plans = [(row, known.get(tuple(getattr(row, name) for name in IDENTITY))) for row in made]
    shared = [(row, plan) for row, plan in plans if plan is not None]
    return len(shared), [row for row, plan in shared if plan != row.plan]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=list(NAMED))
    parser.add_argument("--draw", type=int, default=1000, help="how many problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--against", type=Path, help="a file that --csv made before a change")
    asked = parser.parse_args()
    made = list(rows(asked.target or list(NAMED), asked.draw, asked.seed))
    if asked.csv:
        write(made, asked.csv)
    refused = sum(row.plan.startswith("refused") for row in made)
    print(f"{len(made) - refused} plans and {refused} refusals of {asked.draw} problems")
    if asked.against is None:
        return 0
    compared, others = against(made, asked.against)
    for row in others:
        print(f"DIFFERS {row.backend} {row.target} {row.variant or 'forward'} {row.problem}: {row.notes}")
    print(f"{compared} compared with {asked.against.name}: {len(others)} differ")
    return 1 if others or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
