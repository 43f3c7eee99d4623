"""`flashtile export`: problems in, a C file and its header out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.export import llmc
from flashtile.export.attention import LAYOUTS, AttentionExport, Layout, entries
from flashtile.export.cached import CachedExport, cached_entries
from flashtile.export.entry import Entry
from flashtile.export.op import CompanionExport, companion_entries
from flashtile.export.op import name_of as name_of_companion
from flashtile.output import prepare
from flashtile.plan.device import NAMED, Device, named
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import CachedProblem
from flashtile.problem.op import Companion
from flashtile.triton_glue import language as _triton

ARCHITECTURES = tuple(f"sm_{d.arch}" for d in NAMED.values() if d.kind == "cuda")


@dataclass(frozen=True)
class Request:
    """What is to be exported.

    problems: spellings, each with a name before it if it is to have another than its own: "NAME=attention(...)". Sizes in
        them stand for any; of "cached(...)" the rows of a page and `split` stay. With the layout "llmc" and none of them,
        llm.c's: causal, head_dim 64 and 128, every dtype.
    architectures: as "sm_90".
    layout: of attention's tensors, if no cache is among them; "bshd", "bhsd" or "llmc".
    """

    problems: tuple[str, ...]
    architectures: tuple[str, ...]
    layout: str = "bshd"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise InvalidProblem(f"layout is {self.layout!r}; it must be one of {', '.join(LAYOUTS)}.")
        if not self.problems and self.layout != "llmc":
            raise InvalidProblem("there is no problem; give one or more, or the layout 'llmc'.")
        if not self.architectures:
            raise InvalidProblem(f"there is no architecture; give some of {', '.join(ARCHITECTURES)}.")
        for name in self.architectures:
            if name not in ARCHITECTURES:
                known = (f"sm_{d.arch} ({d.name})" for d in NAMED.values() if d.kind == "cuda")
                raise InvalidProblem(f"architecture is {name!r}; it must be one of {', '.join(known)}.")

    @property
    def devices(self) -> list[Device]:
        return [named(name) for name in sorted(set(self.architectures), key=ARCHITECTURES.index)]


def name_of(p: AttentionProblem) -> str:
    """What the functions of a problem are called unless the caller says."""
    words = ["attention", p.dtype.value, str(p.head_dim) if p.head_dim == p.head_dim_v else f"{p.head_dim}x{p.head_dim_v}"]
    if p.group > 1:
        words.append(f"group{p.group}")
    left, right = p.mask.left, p.mask.right
    if (left, right) == (None, 0):
        words.append("causal")
    elif not p.mask.unbounded:
        words.append("band" + "_".join("" if n is None else str(n).replace("-", "m") for n in (left, right)))
    words += [spec.kind.name for spec in p.score]
    words += [
        word for word, there in (("sink", p.sink), ("dropout", p.dropout), ("lse", p.returns_lse or None)) if there is not None
    ]
    words += ["deterministic"] if p.deterministic else []
    words += ["exact_delta"] if p.exact_delta else []
    words += [p.precision] if p.precision != "tf32x3" else []
    return "_".join(words)


def name_of_cached(problem: CachedProblem) -> str:
    """The same of a problem over a cache, which has the forward and the append."""
    pages = problem.pages
    words = [name_of(problem.attention).replace("attention", "cached", 1)]
    words += [f"page{pages.page_size}" if pages.table else "contiguous"]
    words += ["first"] if pages.first else []
    words += ["packed"] if problem.attention.lengths.varlen else []
    words += [f"split{problem.split}"] if problem.split else []
    if problem.stored is not None:
        words += [w for w in (problem.stored.dtype, problem.stored.k_scale, problem.stored.v_scale) if w]
    return "_".join([*words, *["shared"] * problem.shared, *["apart"] * problem.apart])


def read(spelling: str) -> tuple[str | None, str]:
    """(name or None, the problem's own spelling)."""
    found = re.fullmatch(r"(?:([A-Za-z]\w*)=)?(\w+\(.*\))", spelling.strip(), re.ASCII)
    if found is None:
        raise InvalidProblem(
            f"problem is {spelling!r}; it must be 'attention(...)' or 'cached(...)', or 'NAME=attention(...)'."
        )
    return found.group(1), found.group(2)


def export(
    request: Request, folder: Path, workers: int | None = None, report: Callable[[str], None] = lambda line: None
) -> list[Path]:
    """Write the files; their paths. Raises InvalidProblem and NotSupported.

    `report` is told how far it is: compiling takes seconds for each kernel, of which `workers` are compiled at a time.
    """
    if _triton.INTERPRETED:
        raise NotSupported("export", {"triton": ["its interpreter is on (TRITON_INTERPRET=1); kernels cannot be compiled"]})
    from flashtile.export.build import FILES, build, plan_all, workers_here, write

    made: list[Entry] = []
    packed: list[AttentionProblem] = []
    for name, spelling in map(read, request.problems):
        if spelling.startswith("cached("):
            cached = CachedProblem.parse(spelling)
            made += cached_entries(name or name_of_cached(cached), CachedExport(cached))
            continue
        if not spelling.startswith("attention("):
            companion = Companion.parse(spelling)
            made += companion_entries(name or name_of_companion(companion), CompanionExport(companion))
            continue
        problem = AttentionProblem.parse(spelling)
        if name is None and request.layout == "llmc" and llmc.is_llmc(problem):
            packed.append(problem)
        else:
            layout: Layout = request.layout  # pyright: ignore[reportAssignmentType] (checked by Request)
            made += entries(name or name_of(problem), AttentionExport(problem, layout))
    if not request.problems:
        packed = llmc.problems()
    made += llmc.llmc_entries(packed)
    _check_names(made, llmc.FUNCTIONS if packed else ())
    plans = plan_all(made, request.devices)  # what is refused leaves no folder behind
    prepare(*(folder / name for name in FILES))
    planned = build(plans, workers or workers_here(), report)
    if not packed:
        return list(write(planned, folder))
    return list(write(planned, folder, llmc.declarations(), llmc.functions(packed, planned)))


def _check_names(made: Sequence[Entry], taken: Sequence[str]) -> None:
    """Raise InvalidProblem where two have one name, or one of those that are `taken`."""
    seen: set[str] = set(taken)
    for entry in made:
        if entry.name in seen:
            raise InvalidProblem(
                f"two problems have the functions {entry.name}; give one a name, as in 'NAME={entry.spelling}'."
            )
        seen.add(entry.name)
