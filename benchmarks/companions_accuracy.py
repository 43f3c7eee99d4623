"""Judges random problems of every companion op on a GPU by the accuracy rule, and writes what it found.

    python benchmarks/companions_accuracy.py [--cases 1000] [--op norm ...] [--limit SECONDS] [--output FILE.csv]

Shapes, layouts, dtypes and options are random, from sets that compile some dozens of kernels an op.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.record import record
from flashtile.kernels.companions.catalogue import OPS
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="of each op")
    parser.add_argument("--op", nargs="+", choices=list(DRAW), default=list(DRAW))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=500.0, help="seconds, shared equally by the ops")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/companions-accuracy.csv"))
    parser.add_argument("--commit", default="", help="where the files were copied without git")
    chosen = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows: list[dict[str, str]] = []
    for op in chosen.op:
        dice, end, done, wrong = random.Random(chosen.seed), time.perf_counter() + chosen.limit / len(chosen.op), 0, 0
        for _ in range(chosen.cases):
            if time.perf_counter() > end:
                break
            layout = dice.choice(("dense", "dense", "dense", "gaps", "transposed", "expanded"))
            case = Case(DRAW[op](dice), layout)
            tensors = case.tensors(device)
            got = result(case, tensors, chosen.backend)
            found = "; ".join(breaches(case, got, truth(case, tensors), plain(case, tensors)))
            rows.append(dict(op=op, case=case.name, breach=found))
            done, wrong = done + 1, wrong + bool(found)
            if found:
                print(f"BREACH {case.name}: {found}", flush=True)
        print(f"{op}: {done} cases, {wrong} breaches", flush=True)
    record(chosen.output, rows, device, chosen.commit)
    return int(any(row["breach"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
