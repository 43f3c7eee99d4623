"""Judges random problems of every companion op on a GPU by the accuracy rule, and writes what it found.

    python benchmarks/companions_accuracy.py [--cases 1000] [--op norm ...] [--dtype fp32 ...] [--budget SECONDS]
        [--output FILE.csv]

Shapes, layouts, dtypes and options are random, from sets that compile some dozens of kernels an op. Several processes compile
and check side by side.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.experiment import Judged, main_of
from benchmarks.processes import Failure
from benchmarks.record import Record, at_least_one
from flashtile.kernels.ops.catalogue import OPS
from tests.companions.cases import Case, ce, mlp, norm, rope
from tests.companions.judge import breaches, plain, result, truth

DTYPES = ("fp32", "fp16", "bf16")


def draw_norm(dice: random.Random) -> str:
    kind, more = dice.choice(("layer", "rms")), ["residual"] if dice.random() < 0.5 else []
    options = [f"kind='{kind}'", "eps=1e-05"]
    second = dice.random() < 0.2
    more += ["x1"] if second else []
    more += ["weight"] if dice.random() < 0.8 else []
    more += ["bias"] if dice.random() < 0.5 else []
    if second:
        more += ["weight1", "bias1"]
    else:
        more += [n for n in ("rowscale", "colscale") if dice.random() < 0.2]
    if dice.random() < 0.4:
        more, options = [*more, "seed"], [*options, "dropout_p=0.2"]
    if dice.random() < 0.5:
        options.append("prenorm=True")
    hidden = dice.choice((8, 100, 768, 1024, 4096, 5000, 16384, 20000, 40000))
    return norm(dice.randint(1, 400), hidden, dice.choice(DTYPES), " ".join(more), ";".join(options))


def draw_cross_entropy(dice: random.Random) -> str:
    options = [f"reduction='{dice.choice(('none', 'mean', 'sum'))}'"]
    options += ["smoothing=0.1"] if dice.random() < 0.4 else []
    options += ["z_loss=0.001"] if dice.random() < 0.4 else []
    options += ["eager_gradient=True"] if "none" not in options[0] and dice.random() < 0.5 else []
    columns = dice.choice((2, 33, 1000, 4096, 32000, 50257, 131072))
    return ce(dice.randint(1, 200), columns, dice.choice(DTYPES), ";".join(options), dice.choice(("int32", "int64")))


def draw_rotary(dice: random.Random) -> str:
    dim = dice.choice((16, 64, 80, 128, 256))
    half = dice.choice((dim // 2, dim // 4, max(1, dim // 2 - 3)))
    options = ";interleaved=True" if dice.random() < 0.5 else ""
    options += ";conjugate=True" if dice.random() < 0.3 else ""
    heads = dice.choice(((4, 2), (8, 8), (3, 1), (5, 0)))
    return rope(dice.randint(1, 3), dice.randint(1, 300), heads, dim, half, dice.choice(DTYPES), options, "300")


def draw_softmax(dice: random.Random) -> str:
    rows, columns = dice.randint(1, 200), dice.choice((7, 64, 200, 1024, 2048, 20000))
    shape, dtype = f"{dice.randint(1, 3)}x{dice.randint(1, 3)}x{rows}x{columns}", dice.choice(DTYPES)
    mask = f",mask={shape}:bool" if dice.random() < 0.5 else ""
    options = ["scale=0.5"] + (["causal=True"] if dice.random() < 0.5 else [])
    options += ["masked_score=-10000.0"] if dice.random() < 0.5 else []
    return f"softmax(x={shape}:{dtype}{mask};{';'.join(options)})"


def draw_dense(dice: random.Random) -> str:
    two = dice.random() < 0.6
    more = "weight1" + (" bias1" if dice.random() < 0.8 else "") + (" weight2" if two else "") + (" bias2" if two else "")
    options = f"activation='{dice.choice(('gelu_tanh', 'relu', 'sqrelu'))}'" + (
        ";recompute=True" if two and dice.random() < 0.5 else ""
    )
    sizes = dice.randint(1, 700), dice.choice((8, 64, 200)), dice.choice((16, 100, 512)), dice.choice((8, 72))
    return mlp(*sizes, dice.choice(DTYPES), more, options)


DRAW: dict[str, Callable[[random.Random], str]] = {
    "norm": draw_norm, "cross_entropy": draw_cross_entropy, "rotary": draw_rotary, "softmax": draw_softmax, "dense": draw_dense,
}  # fmt: skip
assert set(DRAW) == set(OPS)


def drawn(op: str, cases: int, seed: int, dtypes: Collection[str]) -> list[tuple[str, str]]:
    """Spelling and layout of an op's cases, of those that have a tensor of these dtypes."""
    dice = random.Random(seed)
    made = []
    while len(made) < cases:
        layout = dice.choice(("dense", "dense", "dense", "gaps", "transposed", "expanded"))
        spelling = DRAW[op](dice)
        if any(f":{dtype}" in spelling for dtype in dtypes):
            made.append((spelling, layout))
    return made


def checked(spelling: str, layout: str, backend: str) -> tuple[str, str]:
    """A case's name, and what broke the rule."""
    torch.backends.cuda.matmul.allow_tf32 = False
    if torch.cuda.memory_reserved() > 2**30:  # other processes need it too
        torch.cuda.empty_cache()
    case = Case(spelling, layout)
    tensors = case.tensors(torch.device("cuda", 0))
    got = result(case, tensors, backend)
    return case.name, "; ".join(breaches(case, got, truth(case, tensors), plain(case, tensors)))


class CompanionsAccuracy(Judged):
    """A cell is a spelling, a layout and a backend."""

    output, budget_s = "benchmarks/results/companions-accuracy.csv", 300
    judge = staticmethod(checked)

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cases", type=at_least_one, default=1000, help="of each op")
        parser.add_argument("--op", nargs="+", choices=list(DRAW), default=list(DRAW))
        parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--backend", choices=("triton",), default="triton")

    @cached_property
    def ops(self) -> dict[tuple[Any, ...], str]:
        """The op of each cell; the ops in turn: none is left out where time is short."""
        asked = self.chosen
        cases = {op: drawn(op, asked.cases, asked.seed, asked.dtype) for op in asked.op}
        turns = zip(*([(op, case) for case in cases[op]] for op in asked.op), strict=True)
        return {(*case, asked.backend): op for alike in turns for op, case in alike}

    def cells(self) -> list[tuple[Any, ...]]:
        return list(self.ops)

    def name(self, cell: tuple[Any, ...]) -> str:
        return f"{self.ops[cell]} {cell[0]} {cell[1]}"

    def write(self, cell: tuple[Any, ...], made: Any, record: Record) -> None:
        name, failure = (f"{cell[0]} {cell[1]}", made.text) if isinstance(made, Failure) else made
        record.add(dict(op=self.ops[cell], case=name, failure=failure))
        if failure:
            print(f"FAILED {name}: {failure}", flush=True)

    def report(self, record: Record) -> None:
        record.count_missing(lambda name: name.split(" ", 1)[0])
        for op in self.chosen.op:
            mine = [row for row in record.rows if row["op"] == op]
            print(f"{op}: {len(mine)} cases, {sum(bool(row['failure']) for row in mine)} breaches", flush=True)


def main() -> int:
    return main_of(CompanionsAccuracy)


if __name__ == "__main__":
    sys.exit(main())
