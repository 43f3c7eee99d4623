"""Checks, then times, the ops of `flashtile.ops` beside torch.compile and, where it is installed, Liger, in rotation.

    python benchmarks/companions.py [--section norm rotary ...] [--limit SECONDS] [--output benchmarks/results/companions.csv]

GB/s are those of the fewest bytes that the op must move; `of_copy` and `of_read` are fractions of what this run's own copy
and read of 1 GiB reach. The caches are cleared before every call. `compiled` is torch.compile of the plain formula.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.companion_cells import Session
from benchmarks.companion_sections import SECTIONS
from benchmarks.record import record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument(
        "--limit",
        type=float,
        default=200.0,
        help="seconds, shared by the sections; cells that have not begun by then are left out",
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/companions.csv"))
    parser.add_argument("--commit", default="")
    chosen = parser.parse_args()
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # a compiled backward is to be called again and again
    torch._dynamo.config.recompile_limit = 1000  # one function, many shapes: beyond the limit it would run eagerly
    torch._dynamo.config.accumulated_recompile_limit = 10000
    torch.manual_seed(0)
    session = Session(torch.device("cuda", 0), chosen.limit)
    session.measure_ceilings()
    for i, section in enumerate(chosen.section):
        session.begin_section(len(chosen.section) - i)
        for cell in SECTIONS[section]():
            if session.left() < 0:
                print(f"LEFT OUT, no time: {cell.section} {cell.case} {cell.direction}", flush=True)
                continue
            session.run(cell)
            gc.collect()
    record(chosen.output, session.rows, session.device, chosen.commit)
    return int(any(row["provider"].endswith("FAILED") for row in session.rows))


if __name__ == "__main__":
    sys.exit(main())
