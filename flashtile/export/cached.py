"""Attention over a key/value cache as two C functions: the forward, and the append of new keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import gcd

from flashtile.dispatch import first_of
from flashtile.errors import InvalidProblem, NotSupported
from flashtile.export.attention import GPU_BACKENDS, at_sizes, check_exported
from flashtile.export.entry import Entry, Sizes
from flashtile.kernels.portable.backend import BACKEND as PORTABLE
from flashtile.plan.call import Buffer, Plan
from flashtile.plan.device import Device
from flashtile.problem.cache import CachedProblem, append_of
from flashtile.problem.lengths import Lengths
from flashtile.triton_glue.compile import contiguous

AXES = ("page_stride", "row_stride", "head_stride")
BATCHES, QUERIES, ROWS = (1, 3, 64, 1000), (1, 2, 5, 16, 100, 2000), (1, 2, 4, 100, 1000, 20000)

NOTE = """\
   Lengths lie in device memory, so that nobody waits: seqused_k has the rows of each item, its new ones included, the same for
   both functions: write the new length, append, then attend. Row t of item i lies {where}.{table}
   Rows beyond an item's length, and what no query sees, may hold anything, NaN too. Strides of the pools are given at run time,
   in elements: multiples of {unit}; the last axis is dense.{parts}
"""


@dataclass(frozen=True)
class CachedExport:
    """A problem over a cache, whose sizes stand for any; the page's rows and `split` are the problem's.

    Pools lie with any strides that are multiples of `unit` elements; all other tensors are dense.
    """

    problem: CachedProblem

    def __post_init__(self) -> None:
        check_exported(self.problem.attention, self.problem.spell(), lengths=True)
        if self.problem.attention.lengths.used_q:
            raise NotSupported(self.problem.spell(), {"export": ["queries have lengths; over a cache they are all counted"]})

    @property
    def unit(self) -> int:
        """What the pools' strides are multiples of: where head_dim allows it, so many that loads are whole vectors."""
        problem = self.problem
        return gcd(16, problem.columns_k, 16 if problem.one_pool else problem.attention.head_dim_v)

    @property
    def sizes(self) -> tuple[str, ...]:
        p, pages = self.problem.attention, self.problem.pages
        counts = ("batch", "total_q" if p.lengths.varlen else "seqlen_q", "heads_kv")
        return (*counts, *(("pages", "columns") if pages.table else ("rows",)), *self.strided)

    @property
    def strided(self) -> tuple[str, ...]:
        """Names of the pools' strides: of both alike, where they are equally wide."""
        problem = self.problem
        if problem.one_pool or problem.columns_k == problem.attention.head_dim_v:
            return AXES
        return tuple(f"{side}_{axis}" for side in "kv" for axis in AXES)

    @property
    def units(self) -> tuple[str, ...]:
        """The same strides, counted in units."""
        return tuple(f"{name}_units" for name in self.strided)

    def at(self, sizes: Sizes) -> CachedProblem:
        """The problem of these sizes."""
        p, pages = self.problem.attention, self.problem.pages
        batch, queries = sizes["batch"], sizes[self.sizes[1]]
        if pages.table:
            pages = replace(pages, pages=sizes["pages"], columns=sizes["columns"])
        else:
            pages = replace(pages, pages=batch, page_size=sizes["rows"])
        if p.lengths.varlen:
            p = replace(p, lengths=Lengths(queries, batch * pages.capacity, used_k=True))
        p = at_sizes(p, batch, queries, pages.capacity, sizes["heads_kv"])
        size_bytes = p.dtype.size_bytes if self.problem.stored is None else 1
        return replace(self.problem, attention=p, pages=pages, addressable=self.unit * size_bytes % 16 == 0)

    def strides(self, pools: dict[str, str], buffer: Buffer, sizes: Sizes) -> tuple[int, ...]:
        """Those of a tensor of the plan; pools: which are pools, and whose of k and v."""
        name = buffer.over or buffer.name
        if name in pools:
            own = [n for n in self.units if not n.startswith(("k_", "v_")) or n.startswith(f"{pools[name]}_")]
            return (*(sizes[n] * self.unit for n in own), 1)
        strides = contiguous(buffer.shape)
        if name in ("k_scale", "v_scale") and "k_cache" in pools and not self.problem.attention.lengths.varlen:
            if self.problem.stored is not None and getattr(self.problem.stored, name) == "head":
                return (buffer.shape[2], 0, 1)  # of an item's new rows: the tensor that the forward has
        return strides

    def samples(self, device: Device) -> list[dict[str, int]]:
        """Sizes at which plans are made."""
        found: list[dict[str, int]] = []
        for batch, queries, rows in product(BATCHES, QUERIES, ROWS):
            given = {"batch": batch, self.sizes[1]: queries, "heads_kv": 2, "pages": 4096, "columns": rows, "rows": rows}
            found += self.complete({**given, **dict.fromkeys(self.strided, 1024)}, device)
        return found

    def complete(self, sizes: Sizes, device: Device) -> list[dict[str, int]]:
        """Sizes that a caller gives, with what the run-time finds for them; none where no problem has them."""
        given = {**{name: sizes[name] for name in self.sizes}, "sm_count": device.sm_count}
        given |= {unit: given[name] // self.unit for unit, name in zip(self.units, self.strided, strict=True)}
        try:
            self.at(given)
        except InvalidProblem:
            return []
        return [given]

    def derive(self, name: str) -> str:
        """C that fills in the derived sizes."""
        first = len(self.sizes)
        text = f"    sizes[{first}] = gpu->sm_count;\n"
        for i, stride in enumerate(self.strided):
            at = self.sizes.index(stride)
            text += (
                f"    if (sizes[{at}] % {self.unit})\n"
                f'        return fail(FLASHTILE_INVALID_ARGUMENT, "flashtile_{name}: {stride} is %lld; it must be a "\n'
                f'                    "multiple of {self.unit}",\n                    (long long)sizes[{at}]);\n'
                f"    sizes[{first + 1 + i}] = sizes[{at}] / {self.unit};\n"
            )
        return text + "    return FLASHTILE_OK;\n"

    def note(self) -> str:
        """What the header says of both functions."""
        pages, split = self.problem.pages, self.problem.split
        where = (
            f"in page page_table[i][t / {pages.page_size}], row t % {pages.page_size}" if pages.table else "in page i, row t"
        )
        table = "\n   Entries of page_table behind an item's length are never read." if pages.table else ""
        parts = f"\n   Keys are summed in parts of {split}, {split * 4096} rows an item at most." if split else ""
        if split == 0:
            parts = "\n   Keys are summed in one pass; few items of many keys are faster in parts: split=256 in the problem."
        return NOTE.format(where=where, table=table, unit=self.unit, parts=parts)


def cached_entries(name: str, export: CachedExport) -> list[Entry]:
    """The forward, and the append."""
    spelling = export.problem.spell()

    def forward(sizes: Sizes, device: Device) -> Plan:
        problem, place = export.at(sizes), replace(device, sm_count=sizes["sm_count"])
        return first_of(GPU_BACKENDS, lambda each: each.unsupported_cached(problem, place), export.problem, place).cached(
            problem, place, general=True
        )

    def append(sizes: Sizes, device: Device) -> Plan:
        return PORTABLE.cached(append_of(export.at(sizes)), device)

    def entry(direction: str, plan: Callable[[Sizes, Device], Plan], pools: dict[str, str]) -> Entry:
        whole = f"{name}_{direction}"
        shown = tuple((f"{unit} * {export.unit}", stride) for unit, stride in zip(export.units, export.strided, strict=True))
        return Entry(
            name=whole, spelling=spelling, direction=direction, sizes=export.sizes, derived=("sm_count", *export.units),
            plan=plan, strides=partial(export.strides, pools), broadcast=lambda name: (), samples=export.samples,
            complete=export.complete,
            derive=export.derive(whole), shown=shown, note=export.note(),
        )  # fmt: skip

    return [
        entry("forward", forward, {"k": "k", "v": "v"}),
        entry("append", append, {"k_cache": "k", "v_cache": "v"}),
    ]
