"""What runs where of attention over a cache: rows of docs/support.md, put to every backend as those of attention are."""

from __future__ import annotations

import csv
from collections import Counter
from functools import cache
from pathlib import Path

from flashtile import dispatch
from flashtile.errors import NotSupported
from flashtile.plan.device import named
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import AppendProblem, CachedProblem, Pages
from flashtile.problem.dtype import DType
from flashtile.problem.stored import Stored
from tests.cached.cases import CALLS, FIRST, KERNELS, drawn_case, kinds_of
from tools.evidence import SAME_CODE, cache_backend

TARGETS = ("cpu", "sm80", "sm90")  # those that tests/compile/cached_code.py compiles for
PAGED = Pages(64, 16, 128)
ONE = "q=4x1x8x64,kv=2048x2x64"
MLA_PAGES, MLA = Pages(64, 64, 32), "q=4x1x16x576,kv=2048x1x512"


def _cached(
    rest: str, pages: Pages = PAGED, split: int = 0, sizes: str = ONE, stored: Stored | None = None, shared: bool = False
) -> CachedProblem:
    return CachedProblem(AttentionProblem.parse(f"attention({sizes},{rest})"), pages, split, stored, shared)


DRAWN = {  # kinds of drawn calls -> what the page calls them
    "window": "windows that end on the left", "sink": "sinks", "Softcap": "softcap", "Alibi": "ALiBi", "Bias": "a bias",
    "Dilated": "dilated masks", "Tree": "trees of drafts", "cu_seqlens_q": "packed queries", "first_k": "padding on the left",
    "torch.float32": "float32", "stored torch.int8": "caches of int8",
}  # fmt: skip
TESTED = {  # rows -> kinds of drawn calls, all of which an H200 has run by the kernels that the row names
    "window, sinks": ("window", "sink"), "fp32": ("torch.float32",),
    "packed queries: prompts beside decodes": ("cu_seqlens_q",),
    "padded on the left (first_k), pages of 16": ("first_k",), "softcap": ("Softcap",), "ALiBi, bias": ("Alibi", "Bias"),
    "predicates": ("Dilated", "Tree"), "int8, a scale of each token and head": ("stored torch.int8",),
}  # fmt: skip
# (feature, problem, the provider of benchmarks/cached.py that measures it or "")
ROWS: tuple[tuple[str, CachedProblem | AppendProblem, str], ...] = (
    ("one query, pages of 16", _cached("bf16,used=k", split=512), "flashtile/16"),
    ("pages of 256", _cached("bf16,used=k", Pages(64, 256, 8), 512), "flashtile/256"),
    ("pages of 3", _cached("bf16,used=k", Pages(64, 3, 683), sizes="q=4x1x8x64,kv=2049x2x64"), ""),
    ("contiguous cache", _cached("bf16,used=k", Pages(4, 2048, 1, False), 512), "flashtile/contiguous"),
    ("padded on the left (first_k), contiguous", _cached("bf16,used=k", Pages(4, 2048, 1, False, True), 512), "first_k"),
    ("padded on the left (first_k), pages of 16", _cached("bf16,used=k", Pages(64, 16, 128, True, True)), ""),
    ("fp32", _cached("fp32,tf32x3,used=k"), ""),
    (
        "packed queries: prompts beside decodes",
        _cached("bf16,band=:0,varlen=20x8192,used=k", sizes="q=4x20x8x64,kv=2048x2x64"), "",
    ),
    ("window", _cached("bf16,band=1023:0,used=k", split=512), "flashtile/16/window"),
    ("window, sinks", _cached("bf16,band=64:0,sink=8:fp32,used=k"), ""),
    ("softcap", _cached("bf16,score=softcap(30.0),used=k"), ""),
    ("ALiBi, bias", _cached("bf16,score=alibi(4x8:fp32)+bias(1x8x1x2048:bf16),used=k"), ""),
    ("predicates", _cached("bf16,where=prefix(4:int32),used=k"), ""),
    ("e4m3", _cached("bf16,used=k", split=512, stored=Stored("e4m3", "head", "head")), "flashtile/16/e4m3"),
    ("e5m2", _cached("bf16,used=k", split=512, stored=Stored("e5m2", "head", "head")), "flashtile/16/e5m2"),
    ("int8, a scale of each token and head", _cached("bf16,used=k", split=512, stored=Stored("int8", "token", "token")), ""),
    ("absorbed MLA, 576 columns", _cached("bf16,used=k", MLA_PAGES, 512, MLA, None, True), "flashtile/64/mla"),
    (
        "absorbed MLA in e4m3",
        _cached("bf16,used=k", MLA_PAGES, 512, MLA, Stored("e4m3", "head", "head"), True), "flashtile/64/e4m3/mla",
    ),
    ("append", AppendProblem(4, 1, 2, 64, 64, DType.BF16, 64, 16), ""),
    ("append that quantises", AppendProblem(4, 1, 2, 64, 64, DType.BF16, 64, 16, Stored("e4m3", "token", "token")), ""),
)  # fmt: skip


def measured(folder: Path) -> set[tuple[str, str, str]]:
    """(device, backend, provider) of every row of benchmarks/cached.py's and padded.py's results that was right; behind MLA's
    providers stands /mla, behind those of windows /window.
    """
    found: set[tuple[str, str, str]] = set()
    for path in sorted(path for name in ("cached", "stored", "padded") for path in folder.glob(f"{name}-*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row.get("us") and not row.get("failure"):
                    backend, provider = cache_backend(path.stem, row["provider"]), row["provider"].split(" ")[0]
                    kind = "/mla" * row["model"].startswith("mla") + "/window" * bool(row.get("window"))
                    found.add((row["device"], backend, provider + kind))
    return found


def table(folder: Path) -> list[str]:
    """The rows, and below them the refusals."""
    seen, drawn = measured(folder), _drawn()
    lines = [
        'On the CPU and the architectures that the tests compile its kernels for. "tested on" says that no benchmark has it on',
        "a GPU, but [drawn calls ran it there](#what-ran-apart-from-benchmarks), and were right:",
        "",
    ]
    lines += [f"| feature | {' | '.join(TARGETS)} |", "| --- |" + " --- |" * len(TARGETS)]
    refusals: list[str] = []
    for feature, problem, provider in ROWS:
        cells: list[str] = []
        for target in TARGETS:
            try:
                name = dispatch.plan_cached(problem, named(target)).backend
            except NotSupported as refusal:
                told = "; ".join(f"{who}: {', '.join(why)}" for who, why in refusal.reasons.items())
                refusals.append(f"- {feature} on {target}: {told}")
                cells.append("refused")
                continue
            ran = target == "cpu" or _ran(name, provider, target, seen)
            kinds = TESTED.get(feature, ()) if target == "sm90" else ()
            tested = bool(kinds) and all(drawn[kind] for kind in kinds)
            cells.append(f"{'run on' if ran else 'tested on' if tested else 'compiled for'} ({name})")
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    lines += ["", *_apart(folder)]
    hopper = dispatch.backend_named("hopper")
    lines += ["", "### What Hopper's kernel of a cache leaves to the portable ones", ""]
    lines += ["| feature | why |", "| --- | --- |"]
    for feature, problem, _ in ROWS:
        reasons = hopper.unsupported_cached(problem, named("sm90"))
        lines += [f"| {feature} | {'; '.join(reasons)} |"] if reasons else []
    lines += ["", "### Gradients", ""]
    lines += ["Gradients of q, of appended keys and values, of sinks and of captured tensors are those of attention"]
    lines += ["over gathered keys."]
    return [*lines, *(["", "Refusals of caches:", "", *refusals] if refusals else [])]


@cache
def _drawn() -> Counter[str]:
    """How many of tests/cached/test_many.py's kernels have each kind of call."""
    counts = Counter[str]()
    for drawn in (drawn_case(FIRST + n * CALLS, False, variant=n) for n in range(KERNELS)):
        behind = drawn.arguments.get("window", (None,))[0] is not None  # else it is a window in name alone
        counts.update({*kinds_of(drawn)} - {"window"} | ({"window"} if behind else set()))
    return counts


def _apart(folder: Path) -> list[str]:
    """What tests ran on a GPU that no row of a benchmark has: kinds of drawn calls, and other libraries' tests of windows."""
    counts = _drawn()
    with (folder / "field-tests-caches-h200.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["file"] == "test_sliding_window.py" and row["outcome"] == "passed"]
    paged = ("test_batch_decode_sliding_window", "test_batch_paged_prefill_sliding_window")
    passed = sum(int(row["cases"]) for row in rows if row["test"] in paged)
    return [
        "### What ran apart from benchmarks", "",
        '"tested on" and "compiled for" say above that no row of a benchmark has a feature. On an H200',
        f"`tests/cached/test_many.py` compared {KERNELS * CALLS:,} drawn calls of {KERNELS} portable kernels with float64.",
        "[What came out](limits.md#a-cache): three calls of float32 queries beside 8 bits erred too much.",
        f"Of flashinfer's tests of sliding windows over pages {passed} passed there, through its names",
        "([rows](benchmarks/caches.md#field-tests-caches-h200)). Of Hopper's own kernel drawn calls ran there, too",
        "(`tests/cached/test_hopper.py`), windows and sinks among them. Of all these windows, and padding of contiguous",
        "caches on the left, alone were timed, by Hopper's kernel ([windows](benchmarks/caches.md#cached-hopper-turned-h200),",
        "[padding](benchmarks/caches.md#padded-h200)).", "",
        f"| drawn kernels with | of {KERNELS} |", "| --- | --- |",
        *(f"| {words} | {counts[kind]} |" for kind, words in DRAWN.items()),
    ]  # fmt: skip


def _ran(backend: str, provider: str, target: str, seen: set[tuple[str, str, str]]) -> bool:
    places = (named(target).name, *SAME_CODE.get(target, ()))
    return any((backend, provider) == (name, who) and any(p in device for p in places) for device, name, who in seen)
