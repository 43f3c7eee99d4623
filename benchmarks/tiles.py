"""Every tile that the planner can choose, in every pass and beside every feature, once on a GPU against float64.

    python benchmarks/tiles.py [--list sm90] [--known CSV ...] [--backend triton hopper] [--dtype bf16 ...] [--together]
                               [--passes attention ...] [--only TEXT] [--part 1/4] [--budget 1200]
                               [--output benchmarks/results/tiles.csv]

Problems of every dtype, precision, pair of padded head dims, size class and feature, alone and in the pairs that rules ask
about, are planned for the GPU at hand: so the list comes from the planner, and from its rules and tuned tables whatever they
become. A row is a meeting of a pass in a tile with a class of features, with the line that `flashtile fuzz --repeat` runs
again. What has to be run once is each tile beside each class of features, at the widest head dims that it is chosen for, and
each tile at each of its head dims (`shows`): head dims times features would be 9,000 problems and 17,700 kernels. Tiles that
rules or tables have for this GPU and that no problem met are named at the end.
--list: only write the rows, for a GPU that need not be there. --known: what these files have as run and right under the
Triton that is installed is left out; with --list nothing is written then, but what they lack is counted, and the exit status
is 1 if there is a tile that no row has, with whatever features. --passes: what else is planned of the same problems, to be
listed alone: a case is a forward and a backward, which is what can be run here; of a cache one and eight queries, in pages and
without, of the problem's dtype. --part: every fourth of the cases to run, from the first.
Otherwise the exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.experiment import Judged, main_of
from benchmarks.processes import Failure, in_processes
from benchmarks.record import Record, need_gpu
from flashtile import NotSupported, dispatch
from flashtile.fuzz import tiles as choosable
from flashtile.fuzz.case import Case
from flashtile.fuzz.check import forget, place, settled
from flashtile.fuzz.planned import plans_of, problem_of
from flashtile.plan.backend import Direction
from flashtile.plan.call import KernelCall, Plan
from flashtile.plan.device import NAMED, Device, named
from flashtile.problem.cache import CachedProblem, Pages, default_split
from flashtile.torch.execute.bound import device_of
from flashtile.triton_glue.language import VERSION

# Pairs of head dims, one for each pair that they are padded to, and two that are no multiple of 16.
DIMS = (
    (16, 16), (32, 32), (64, 64), (128, 128), (256, 256), (512, 512), (192, 128), (64, 128), (128, 64), (40, 24), (100, 8),
    (96, 96),
)  # fmt: skip
# Sizes by name: from what is small for the planner to what fills a GPU, and what is no multiple of any tile.
SIZES: dict[str, dict[str, int]] = {
    "small": dict(batch=2, seqlen_q=90, seqlen_k=90, heads_q=4, heads_kv=4),
    "middle": dict(batch=4, seqlen_q=528, seqlen_k=528, heads_q=24, heads_kv=24),
    "long": dict(batch=1, seqlen_q=2300, seqlen_k=2300, heads_q=8, heads_kv=8),
}
GROUPED = dict(heads_q=8, heads_kv=2)
MASKS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": dict(band=":0"), "left": dict(band="64:"), "window": dict(band="64:9"),
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {}, "grouped": GROUPED, "lse": dict(upstream="both"), "softcap": dict(score="softcap30"),
    "alibi": dict(score="alibi", fixed="score"), "alibi gradient": dict(score="alibi"),
    "softcap, alibi": dict(score="softcap30+alibi", fixed="score"),
    **{f"{name} gradient": dict(score=name, score_dtype="dtype")
       for name in ("bias", "bias-plane", "bias-keys", "bias-rows", "bias-each-head")},
    "bias": dict(score="bias", fixed="score", score_dtype="dtype"), "sink": dict(sink="fp32", fixed="sink"),
    "sink gradient": dict(sink="fp32"), "dropout": dict(dropout=0.1), "predicate": dict(where="holes"),
    "documents": dict(where="document"), "stored": dict(where="stored"), "blocks": dict(where="document", blocks="128x128"),
    "small blocks": dict(where="holes", blocks="32x32"), "varlen": dict(items="varlen"), "used": dict(used="qk"),
    "scale < 0": dict(scale=-0.3), "dq": dict(wants="q"), "dk, dv": dict(wants="kv"),
}  # fmt: skip
# What rules ask about together, or what a pass pays for twice; all of TOGETHER with --together.
MOST_ASKED = (
    ("predicate", "dropout"), ("predicate", "grouped"), ("predicate", "lse"), ("predicate", "bias gradient"),
    ("predicate", "sink gradient"), ("dropout", "grouped"), ("dropout", "lse"), ("dropout", "bias gradient"),
)  # fmt: skip
TOGETHER = (
    *MOST_ASKED, ("predicate", "softcap"), ("predicate", "varlen"), ("dropout", "softcap"), ("dropout", "sink gradient"),
    ("dropout", "varlen"), ("dropout", "blocks"), ("dropout", "alibi gradient"), ("grouped", "varlen"), ("lse", "softcap"),
    ("grouped", "bias gradient"), ("grouped", "lse"), ("blocks", "softcap"), ("blocks", "grouped"), ("blocks", "bias gradient"),
    ("varlen", "sink gradient"), ("varlen", "alibi gradient"), ("stored", "dropout"), ("documents", "dropout"),
)  # fmt: skip
PLAIN_KINDS = ("fp16", "tf32", "ieee")  # of which pairs are left out
BACKWARDS: dict[str, dict[str, Any]] = {
    "split": dict(backward="split"), "fused": dict(backward="fused"), "deterministic": dict(deterministic=True),
}  # fmt: skip
KINDS = ("bf16", "fp16", "tf32x3", "tf32", "ieee")  # 16-bit dtypes, and fp32's precisions
IN_EVERY_MASK = ("plain",)
OF_FP16 = ("plain", "dropout", "predicate")  # whose tiles are bf16's
ATTENTION = "attention"  # forward and backward
DIRECTIONS = {
    "tangent": Direction(moved=frozenset("qkv")),
    "second": Direction(frozenset("qkv"), frozenset({"dout", "tdout"}), frozenset("qkv")),
    "statistics": Direction(wanted=frozenset({"peak", "entropy", "mass"})),
    "entropy": Direction(wanted=frozenset("qk")),
}
PASSES = (ATTENTION, *DIRECTIONS, "cached")
RUN = ("right", "close")  # close: beyond the rule by luck, and right with other seeds
ROWS = ("attention_delta", "attention_convert", "attention_rows", "attention_dq")  # passes whose tile is not chosen


@dataclass(frozen=True)
class Meeting:
    """A pass in a tile, beside a class of features, of a dtype or precision."""

    backend: str
    kernel: str
    tile: str
    kind: str
    columns: str
    mask: str
    features: str

    @property
    def where(self) -> tuple[str, ...]:
        """The tile: of which pass, and of which operands its products are."""
        return self.backend, self.kernel, self.tile, "16 bits" if self.kind in ("bf16", "fp16") else self.kind

    @property
    def shows(self) -> tuple[tuple[str, ...], ...]:
        """What its run says something about: the tile beside these features, and the tile at these head dims."""
        beside = self.features if self.mask == "causal" else f"{self.features}, {self.mask}"
        return ("beside", *self.where, beside), ("at", *self.where, self.kind, self.columns)


Meetings = dict[Case, list[Meeting]]
Shown = set[tuple[str, ...]]


def classes(pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every feature, and these pairs, with what they change in a case."""
    yield from FEATURES.items()
    for one, other in pairs:
        yield f"{one}, {other}", {**FEATURES[one], **FEATURES[other]}


def grid(backend: str, kind: str, dims: tuple[int, int], together: bool) -> Iterator[tuple[str, str, Case]]:
    """(mask, features, case) of everything of these head dims that is planned."""
    half = kind in ("bf16", "fp16")
    dtype = kind if half else "fp32"
    base = Case(
        head_dim=dims[0], head_dim_v=dims[1], dtype=dtype, backend=backend, precision="tf32x3" if half else kind, upstream="out"
    )
    pairs = () if kind in PLAIN_KINDS else TOGETHER if together else MOST_ASKED
    for size in SIZES.values():
        for features, changes in classes(pairs):
            if kind == "fp16" and features not in OF_FP16:
                continue
            changes = {k: dtype if v == "dtype" else v for k, v in changes.items()}
            for mask in MASKS if features in IN_EVERY_MASK else ("causal",):
                for how in BACKWARDS.values():
                    yield mask, features, replace(base, **{**size, **MASKS[mask], **changes, **how})


def plans(case: Case, device: Device, which: str) -> Iterator[Plan]:
    """The plans of a pass of a case; none where it is refused."""
    with suppress(NotSupported):
        if which == ATTENTION:
            yield from plans_of(case, device)
        elif which in DIRECTIONS:
            yield dispatch.plan_pass(which, problem_of(case), device, DIRECTIONS[which], case.backend)
    for queries in (1, 8) if which == "cached" and not case.dropout else ():
        for size in (64, case.seqlen_k):
            columns = -(-case.seqlen_k // size)
            pages = Pages(case.batch * columns, size, columns, table=columns > 1)
            with suppress(NotSupported):
                problem = problem_of(replace(case, seqlen_q=queries, used="k", upstream="none"))
                cached = CachedProblem(problem, pages, default_split(problem, pages))
                yield dispatch.plan_cached(cached, device, case.backend)


def meetings(kind: str, mask: str, features: str, case: Case, device: Device, passes: Sequence[str]) -> list[Meeting]:
    """What a case meets; nothing where it is refused."""
    found: list[Meeting] = []
    columns = f"{case.head_dim}x{case.head_dim_v}"
    for plan in (plan for which in passes for plan in plans(case, device, which)):
        for call in (call for call in plan.calls if isinstance(call, KernelCall)):
            tile = dict(call.constants).get("T")
            if tile is None or call.kernel.fn.__name__ in ROWS:
                continue
            found.append(Meeting(case.backend, call.kernel.fn.__name__, spelled(tile, call), kind, columns, mask, features))
    return found


def spelled(tile: Any, call: KernelCall) -> str:
    """A tile as its kernel sees it, as far as it is a choice."""
    words = []
    for name in ("block_q", "block_k", "groups", "stages", "stages_dout", "products", "correction", "held", "adds_dq", "pieces",
                 "helps", "offset", "converts", "joined", "parted", "apart", "turns", "staged", "resident"):  # fmt: skip
        value = getattr(tile, name, None)
        if value not in (None, False, "", "unit"):
            words.append(name if value is True else f"{name}={value}")
    return " ".join([*words, f"warps={call.num_warps}", f"stages={call.num_stages}"])


def listed(
    backend: str, kind: str, dims: tuple[int, int], device: Device, together: bool, passes: Sequence[str]
) -> list[tuple[str, list[Meeting]]]:
    """The lines of cases of these head dims that meet something new, with that."""
    met: set[Meeting] = set()
    made: list[tuple[str, list[Meeting]]] = []
    for mask, features, case in grid(backend, kind, dims, together):
        new = [meeting for meeting in meetings(kind, mask, features, case, device, passes) if meeting not in met]
        if new:
            met.update(new)
            made.append((case.spell(), new))
    forget()
    return made


def chosen_cases(
    backends: list[str], kinds: list[str], device: Device, ends: float, together: bool, passes: Sequence[str]
) -> Meetings:
    """The same of all head dims, planned in parallel processes."""
    jobs = [
        (backend, kind, dims, device, together, passes)
        for backend in backends
        for kind in kinds
        for dims in DIMS
        if backend != "hopper" or (kind in ("bf16", "fp16") and max(dims) <= 256)
    ]
    made: Meetings = {}
    for job, found in in_processes(listed, jobs, ends):
        if isinstance(found, Failure):
            raise RuntimeError(f"{job}: {found.text}")
        made |= {Case.parse(line): new for line, new in found}
    return made


def unmet(made: Meetings, device: Device) -> list[str]:
    """Tiles of the portable backend that a rule or a tuned table has for this device, and that no case was planned with."""
    known: set[tuple[str, str]] = set()
    wanted: set[tuple[str, str]] = set()
    names = {"forward": "attention_forward", "keys": "attention_backward_keys", "queries": "attention_backward_queries",
             "fused": "attention_backward_keys", "pairs": "attention_backward_broadcast"}  # fmt: skip
    for found in made.values():
        known |= {(m.kernel, _size(m.tile)) for m in found if m.backend == "triton"}
    for case in {replace(case, score="", where="", blocks="", fixed="", sink="") for case in made if case.backend == "triton"}:
        problem = problem_of(case)
        for which in choosable.PASSES:
            wanted |= {
                (names[which], f"{launch.block_q}x{launch.block_k} warps={launch.num_warps} stages={launch.num_stages}")
                for launch in choosable.choosable(problem, device, which)
            }
    return [" ".join(pair) for pair in sorted(wanted - known)]


def _size(tile: str) -> str:
    words = dict(word.split("=") for word in tile.split() if "=" in word)
    return f"{words['block_q']}x{words['block_k']} warps={words['warps']} stages={words['stages']}"


def shown_by(files: Sequence[Path], triton: str) -> Shown:
    """What the rows of these files show that have a right result under this Triton."""
    names = [field.name for field in fields(Meeting)]
    shown: Shown = set()
    for path in files:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["section"] == "tiles" and row.get("triton") == triton and row.get("status") in RUN:
                    shown |= set(Meeting(*(row[name] for name in names)).shows)
    return shown


def needed(made: Meetings, shown: Shown) -> Meetings:
    """The cases that show what is not shown: of each tile and its features that of the widest head dims.

    Tiles of which nothing is shown come first, then head dims, then features.
    """
    shown = set(shown)
    known = {key[1:5] for key in shown}
    found: list[tuple[bool, Case]] = []
    for case in sorted(made, key=lambda case: case.head_dim + case.head_dim_v, reverse=True):
        new = {key for meeting in made[case] for key in meeting.shows} - shown
        if new:
            found.append((all(key[1:5] in known for key in new), case))
            shown |= new
            known |= {key[1:5] for key in new}
    return {case: made[case] for _, case in sorted(found, key=lambda pair: pair[0])}


def tell(made: Meetings, shown: Shown, triton: str) -> int:
    """Print what is not shown, and return the exit status: 1 if there is a tile of which nothing is."""
    wanted = {key for found in made.values() for meeting in found for key in meeting.shows}
    missing, known = wanted - shown, {key[1:5] for key in shown}
    never = sorted({key[1:5] for key in missing} - known)
    for tile in never:
        print(f"NEVER RUN {' '.join(tile)}")
    for what, name in (("beside", "tiles beside features"), ("at", "tiles at head dims")):
        of, left = (sum(key[0] == what for key in keys) for keys in (wanted, missing))
        print(f"{of - left} of {of} {name} were run on a GPU under Triton {triton}, {left} were not")
    print(f"{len(never)} tiles were never run there")
    return 1 if never else 0


def judged(line: str) -> tuple[str, str, float]:
    """(status, what is wrong or refused, error over what is allowed) of a case, on this process's GPU."""
    case = Case.parse(line)
    result = settled(case, place(case.backend))
    forget()
    return result.status, result.text, result.ratio


def row_of(meeting: Meeting, case: Case) -> dict[str, Any]:
    return {"section": "tiles", **asdict(meeting), "case": case.spell()}


class Tiles(Judged):
    """A cell is the line of a case. What it meets is planned first, for a GPU that need not be there."""

    output, budget_s, gpu = "benchmarks/results/tiles.csv", 1200, False  # --list needs none
    judge = staticmethod(judged)
    made: Meetings

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--list", choices=[n for n in NAMED if n != "cpu"], help="plan for it and write the rows, run nothing"
        )
        parser.add_argument("--backend", nargs="+", choices=[b.name for b in dispatch.BACKENDS if b.name != "cpu"],
                            default=["triton", "hopper"])  # fmt: skip
        parser.add_argument("--dtype", nargs="+", choices=KINDS, default=list(KINDS), help="16-bit dtypes, fp32's precisions")
        parser.add_argument(
            "--together", action="store_true", help="all pairs of TOGETHER, not those alone that rules ask about"
        )
        parser.add_argument(
            "--passes", nargs="+", choices=PASSES, default=[ATTENTION], help="others than attention with --list alone"
        )
        parser.add_argument("--only", default="", metavar="TEXT", help="meetings whose row holds this")
        parser.add_argument("--part", default="1/1", help="which of how many equal parts of the cases")
        parser.add_argument("--known", nargs="+", type=Path, default=[], metavar="CSV", help="rows of earlier runs, left out")

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int | None:
        part, _, parts = chosen.part.partition("/")
        if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
            parser.error(f"--part is {chosen.part}; it must be like 1/4")
        if chosen.passes != [ATTENTION] and (chosen.list is None or chosen.known):
            parser.error(
                f"--passes are {' '.join(chosen.passes)}; without --list, or with --known, it must be {ATTENTION} alone"
            )
        if chosen.list is None:
            need_gpu(parser)
        elif chosen.known:
            return tell(cls(chosen).planned(), shown_by(chosen.known, VERSION), VERSION)
        return None

    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def machine(self) -> Mapping[str, str]:
        return super().machine() if self.chosen.list is None else {"device": named(self.chosen.list).name}

    def planned(self) -> Meetings:
        """All cases, with what they meet."""
        chosen, device = self.chosen, device_of(self.device()) if self.chosen.list is None else named(self.chosen.list)
        begun = time.monotonic()
        made = chosen_cases(chosen.backend, chosen.dtype, device, begun + chosen.budget, chosen.together, chosen.passes)
        print(f"{sum(map(len, made.values()))} meetings in {len(made)} cases, {time.monotonic() - begun:.0f} s", flush=True)
        if chosen.passes == [ATTENTION]:
            missing = unmet(made, device)
            print(f"{len(missing)} tiles are in tables and met by nothing: {'; '.join(missing)}", flush=True)
        return made

    def cells(self) -> list[tuple[str]]:
        part, _, parts = self.chosen.part.partition("/")
        only = {c: [m for m in found if self.chosen.only in str(row_of(m, c))] for c, found in self.planned().items()}
        made = needed(only, shown_by(self.chosen.known, VERSION))
        self.made = {case: made[case] for case in list(made)[int(part) - 1 :: int(parts)]}
        print(f"{sum(map(len, self.made.values()))} of them in {len(self.made)} cases are to be run", flush=True)
        return [(case.spell(),) for case in self.made]

    def run(self, record: Record) -> None:
        if self.chosen.list is None:
            return super().run(record)
        for (line,) in self.cells():
            self.write_rows(line, {}, record)

    def write(self, cell: tuple[str], made: Any, record: Record) -> None:
        status, text, ratio = ("wrong", made.text, float("inf")) if isinstance(made, Failure) else made
        if status == "wrong":
            print(f'FAILED flashtile fuzz --repeat "{cell[0]}": {text}', flush=True)
        note, failure = "" if status in ("right", "wrong") else text, text if status == "wrong" else ""
        self.write_rows(cell[0], {"status": status, "ratio": f"{ratio:.3g}", "note": note, "failure": failure}, record)

    def write_rows(self, line: str, result: dict[str, str], record: Record) -> None:
        """A row of everything that the case meets."""
        case = Case.parse(line)
        for meeting in self.made[case]:
            record.add({**row_of(meeting, case), **result})


def main() -> int:
    return main_of(Tiles)


if __name__ == "__main__":
    sys.exit(main())
