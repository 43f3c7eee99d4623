"""Runs pair cases on Hopper's kernels in the emulator, prints what is wrong with any, and how many are right.

python -m tests.hopper.emulated_pairs [--stored] [--processes 2] NUMBER ...

FIRST-LAST stands for all numbers between; --stored leaves out those whose backward stores no bias's gradient. That is without
a GPU what `benchmarks/features.py --sections pairs --backend hopper` does on one: all 1,100 take twelve minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from tests.hopper.emulated_cases import running_on  # installs the emulator, also in every process of the pool

# isort: split

from flashtile.kernels.sm90.host.bias_gradient import stored
from tests.hopper.emulated import SMALL
from tests.judge import breaches, expected
from tests.pairwise_hopper import HopperCase, cases, problem_of, results


def judge(case: HopperCase) -> str:
    """What is wrong with a case's results."""
    torch.set_num_threads(1)
    tensors = case.tensors(torch.device("cpu"))
    with running_on(SMALL):
        made = results(case, tensors)
    truth, plain = expected(case, tensors)
    return "; ".join(breaches(case, made, {name: truth[name] for name in made}, plain))


def judged(number: int, only_stored: bool) -> tuple[int, str | None]:
    """(number, what is wrong with its case; None where it is left out)."""
    (case,) = cases([number])
    if only_stored and (not case.gradients or stored(problem_of(case)) is None):
        return number, None
    try:
        return number, judge(case)
    except Exception as problem:  # of a role, or of the plan: it belongs to this case alone
        return number, f"{type(problem).__name__}: {problem}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="+", metavar="NUMBER")
    parser.add_argument("--stored", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    bounds = [(int(first), int(last or first)) for first, _, last in (text.partition("-") for text in chosen.numbers)]
    numbers = [n for first, last in bounds for n in range(first, last + 1)]
    right, wrong = list[int](), 0
    with ProcessPoolExecutor(chosen.processes, get_context("spawn")) as pool:
        for number, failure in pool.map(judged, numbers, [chosen.stored] * len(numbers), chunksize=8):
            if failure:
                wrong += 1
                print(f"WRONG {number}: {failure}", flush=True)
            elif failure is not None:
                right.append(number)
    print(f"{len(right)} right, {wrong} wrong")
    return 1 if wrong or not right else 0


if __name__ == "__main__":
    sys.exit(main())
