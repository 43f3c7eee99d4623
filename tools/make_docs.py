"""Writes the generated parts of the docs: `make docs`.

docs/support.md from what the backends say, docs/reference/arguments.md from signatures, the lists of questions of docs/answers
from their headings, README's tables and figure, docs/benchmarks, docs/goals.md and docs/*.png from benchmarks/results/*.csv,
nothing by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashtile import dispatch
from flashtile.audit.matrix import TARGETS
from flashtile.bench import plot
from flashtile.bench.result import read
from flashtile.errors import NotSupported
from flashtile.plan.backend import PASSES, ROW_STATISTICS, Direction
from flashtile.plan.device import named
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import CachedProblem
from flashtile.problem.options import Variant
from tools import (
    answer_pages,
    argument_page,
    benchmark_pages,
    block_rows,
    cache_rows,
    decoding_tables,
    error_table,
    evidence,
    fp8_rows,
    front_page,
    fuzz_rows,
    goals,
    ranks_table,
    script_tables,
    shapes,
    support_tables,
)
from tools.evidence import Evidence, cell

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# (feature, spelling, backward variant): each row of the support matrix is one problem put to every backend.
FEATURES: tuple[tuple[str, str, Variant], ...] = (
    ("fp16", "attention(q=1x128x2x64,kv=128x2x64,fp16)", "auto"),
    ("bf16", "attention(q=1x128x2x64,kv=128x2x64,bf16)", "auto"),
    ("fp32, tf32x3", "attention(q=1x128x2x64,kv=128x2x64,fp32,tf32x3)", "auto"),
    ("fp32, tf32", "attention(q=1x128x2x64,kv=128x2x64,fp32,tf32)", "auto"),
    ("fp32, ieee", "attention(q=1x128x2x64,kv=128x2x64,fp32,ieee)", "auto"),
    ("fp64", "attention(q=1x128x2x64,kv=128x2x64,fp64)", "auto"),
    ("k, v of 8 bits", "attention(q=1x128x2x64,kv=128x2x64,bf16,stored=e4m3:head:head)", "auto"),
    ("fp8 products", "attention(q=1x128x2x64,kv=128x2x64,bf16,stored=e4m3:head:head:head)", "auto"),
    ("causal, seqlen_q != seqlen_k", "attention(q=1x64x2x64,kv=128x2x64,bf16,band=:0)", "auto"),
    ("window", "attention(q=1x128x2x64,kv=128x2x64,bf16,band=32:0)", "auto"),
    ("GQA, MQA", "attention(q=1x128x8x64,kv=128x2x64,bf16)", "auto"),
    ("head_dim that 8 does not divide", "attention(q=1x128x2x7,kv=128x2x7,bf16)", "auto"),
    ("head_dim 256", "attention(q=1x128x2x256,kv=128x2x256,bf16)", "auto"),
    ("head_dim 512, 16 bits", "attention(q=1x128x2x512,kv=128x2x512,bf16)", "auto"),
    ("head_dim 512, fp32", "attention(q=1x128x2x512,kv=128x2x512,fp32,tf32x3)", "auto"),
    ("head_dim_v != head_dim", "attention(q=1x128x2x192,kv=128x2x128,bf16)", "auto"),
    ("softcap", "attention(q=1x128x2x64,kv=128x2x64,bf16,score=softcap(30.0))", "auto"),
    ("ALiBi, gradient of slopes", "attention(q=1x128x2x64,kv=128x2x64,bf16,score=alibi(1x2:fp32:grad))", "auto"),
    ("sinks", "attention(q=1x2048x2x64,kv=2048x2x64,bf16,sink=2:fp32:grad)", "auto"),
    ("sinks, few scores", "attention(q=1x512x4x64,kv=512x4x64,bf16,sink=4:fp32:grad)", "auto"),
    ("window beside sinks", "attention(q=1x2048x2x64,kv=2048x2x64,bf16,band=256:0,sink=2:fp32:grad)", "auto"),
    ("dropout", "attention(q=1x128x2x64,kv=128x2x64,bf16,dropout=0.1)", "auto"),
    ("bias, its gradient", "attention(q=1x128x2x64,kv=128x2x64,bf16,score=bias(1x2x128x128:bf16:grad))", "auto"),
    ("bias of keys, its gradient", "attention(q=1x128x2x64,kv=128x2x64,bf16,score=bias(1x2x1x128:bf16:grad))", "auto"),
    ("varlen", "attention(q=4x128x2x64,kv=128x2x64,bf16,band=:0,varlen=300x300)", "auto"),
    (
        "varlen, gradient of a bias",
        "attention(q=4x128x2x64,kv=128x2x64,bf16,score=bias(4x2x1x1:bf16:grad),varlen=300x300)",
        "auto",
    ),
    ("padding (seqused)", "attention(q=4x128x2x64,kv=128x2x64,bf16,used=qk)", "auto"),
    (
        "varlen, a bias of every score",
        "attention(q=4x128x2x64,kv=128x2x64,bf16,score=bias(4x2x128x128:bf16),varlen=300x300)",
        "auto",
    ),
    ("predicates", "attention(q=2x128x2x64,kv=128x2x64,bf16,where=prefix(2:int32))", "auto"),
    ("predicates beside sinks", "attention(q=2x2048x2x64,kv=2048x2x64,bf16,sink=2:fp32,where=prefix(2:int32))", "auto"),
    ("lists of blocks of 128 x 128", "attention(q=2x128x2x64,kv=128x2x64,bf16,where=prefix(2:int32),blocks=128x128)", "auto"),
    ("lists of blocks of 64 x 64", "attention(q=2x128x2x64,kv=128x2x64,bf16,where=prefix(2:int32),blocks=64x64)", "auto"),
    ("one query", "attention(q=4x1x2x64,kv=128x2x64,bf16)", "auto"),
    ("backward split", "attention(q=1x128x2x64,kv=128x2x64,bf16)", "split"),
    ("backward fused", "attention(q=1x128x2x64,kv=128x2x64,bf16)", "fused"),
    ("deterministic backward", "attention(q=1x128x2x64,kv=128x2x64,bf16,deterministic)", "auto"),
    (
        "paged cache, forward",
        "cached(attention(q=4x1x8x128,kv=1024x2x128,bf16,used=k),pages=64x16x64,split=512)",
        "auto",
    ),
    (
        "paged cache, a window and sinks",
        "cached(attention(q=4x1x8x128,kv=1024x2x128,bf16,band=127:0,sink=8:fp32,used=k),pages=64x16x64,split=512)",
        "auto",
    ),
)
PASS_ROWS = {"statistics": "statistics, by a pass behind the forward"}  # what rows are called that PASSES names too shortly
PASSED = [  # by passes that not every backend offers: a short call and a long one
    AttentionProblem.parse(f"attention(q=1x{tokens}x2x64,kv={tokens}x2x64,bf16)") for tokens in (128, 8192)
]


Told = list[tuple[str, str, str]]


def matrix(proof: tuple[Evidence, ...]) -> tuple[dict[str, list[str]], Told, Told]:
    """What is said of each feature on each target; why it is refused there; what Hopper's kernels leave to others, and why."""
    targets, rows = ("cpu", *TARGETS), dict[str, list[str]]()
    refused, left = Told(), Told()
    for feature, spelling, variant in FEATURES:
        cells = list[str]()
        for target in targets:
            try:
                cells.append(cell(spelling, variant, target, proof))
            except NotSupported as refusal:
                refused.append((feature, target, told_of(refusal, target)))
                cells.append("refused")
            else:
                if (feature, target) in front_page.TESTED:
                    cells[-1] = cells[-1].replace("compiled for", "tested on")
                left += [(feature, *told) for told in left_by_hopper(evidence.problem_of(spelling), variant, target)]
        rows[feature] = cells
    for name, (what, _) in PASSES.items():
        cells = list[str]()
        for target in targets:
            try:
                plans = [dispatch.plan_pass(name, problem, named(target), Direction(frozenset("qkv"))) for problem in PASSED]
                told = dict[str, list[str]]()
                for backend in dict.fromkeys(plan.backend for plan in plans):
                    ran = target == "cpu" or evidence.has_passed(RESULTS, name, target, backend)
                    told.setdefault("run on" if ran else "compiled for", []).append(backend)
                cells.append(", ".join(f"{what} ({', '.join(backends)})" for what, backends in told.items()))
            except NotSupported as refusal:
                refused.append((what, target, told_of(refusal, target)))
                cells.append("refused")
        rows[PASS_ROWS.get(name, what)] = cells
    rows["largest logits, entropies: a forward keeps them"] = [kept(target) for target in targets]
    return rows, refused, left


def kept(target: str) -> str:
    """Which forwards keep rows' statistics beside out, and whether a row has timed that; on the CPU none does."""
    plans = [dispatch.plan_watched(problem, named(target), frozenset(ROW_STATISTICS)) for problem in PASSED]
    backends = dict.fromkeys(plan.backend for plan in plans if plan is not None)
    told = dict[str, list[str]]()
    for backend in backends:
        ran = evidence.has_passed(RESULTS, "watched", target, backend)
        told.setdefault("run on" if ran else "compiled for", []).append(backend)
    return ", ".join(f"{what} ({', '.join(names)})" for what, names in told.items()) or "by that pass"


def support(proof: Iterable[Evidence]) -> str:
    """The support matrix as markdown."""
    lines = [
        "# What runs where",
        "",
        "Written by `make docs` from what the backends answer. **run on**: on the CPU the tests run every case; on a GPU a row",
        "of `benchmarks/results/*.csv` measured the feature there with that backend and found it right. **compiled for**: the",
        "kernels compile there within their budgets (`make compile`); no such row exists, though",
        "[drawn problems](#drawn-problems) may have run it on a GPU. **tested on**:",
        "[tests of caches](#what-ran-apart-from-benchmarks) ran it there and found it right; nothing was timed.",
        "**refused**: with the reason below. Which head dims have a speed, and which none:",
        "[speed](answers/speed.md#head_dim-80-96-or-512).",
        "Forward and backward alike, where they are not told apart. Your own combination of features may go another way: ask",
        "[`flashtile.explain`](how-to/explain.md). For sm89 (RTX 4090, L40S) no test compiles the kernels.",
        "",
        '`sm90` has two backends: *hopper* is its own kernels, *triton* the portable ones. "Few scores" means that a forward',
        "has at most 10^9 floating-point operations, counted without the mask: batch x heads x queries x keys x 2 x (head_dim",
        "+ head_dim_v).",
    ]
    rows, refused, left = matrix(tuple(proof))
    header = ("| feature | " + " | ".join(("cpu", *TARGETS)) + " |", "| --- |" + " --- |" * (1 + len(TARGETS)))
    lines += support_tables.grouped(header, {name: f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()})
    lines += ["", "## Drawn problems", "", fuzz_rows.sentence(RESULTS), "", fuzz_rows.tiles(RESULTS)]
    lines += ["", "## A key/value cache", "", *cache_rows.table(RESULTS)]
    lines += support_tables.refusals(refused)
    lines += support_tables.left(left)
    lines += ["", *ranks_table.table()]
    return "\n".join([*lines, ""])


def told_of(refusal: NotSupported, target: str) -> str:
    """The reasons of the last backend that is made for this architecture: the one that would have run it."""
    elsewhere = foreign(target)
    return [", ".join(why) for name, why in refusal.reasons.items() if why and not elsewhere.get(name)][-1]


def foreign(target: str) -> dict[str, list[str]]:
    """Of backends that run nothing at all on an architecture, why: what they say to the plainest problem."""
    plain = AttentionProblem.parse(FEATURES[0][1])
    return {backend.name: backend.unsupported(plain, named(target)) for backend in dispatch.BACKENDS}


def left_by_hopper(problem: AttentionProblem | CachedProblem, variant: Variant, target: str) -> list[tuple[str, str]]:
    """Which passes another backend runs on the architecture of Hopper's kernels, and why: both, or else the backward."""
    if isinstance(problem, CachedProblem):
        why = dispatch.backend_named("hopper").unsupported_cached(problem, named(target)) if target == "sm90" else []
        return [("forward", ", ".join(why))] if why else []
    hopper = dispatch.backend_named("hopper")
    ways: tuple[tuple[Variant | None, str], ...] = ((None, "forward and backward"), (variant, "backward"))
    for way, passes in ways if target == "sm90" else ():
        if refusals := hopper.unsupported(problem, named(target), way):
            return [(passes, ", ".join(refusals))]
    return []


def readme(text: str) -> str:
    """README's text with its generated parts as the results and the backends now say."""
    parts = {
        "support": "\n" + front_page.support(matrix(tuple(evidence.read(RESULTS)))[0]),
        "speed": "\n" + front_page.speed(RESULTS),
        "slower": "\n" + front_page.slower(RESULTS),
        "field": front_page.field_tests(RESULTS),
    }
    for name, part in parts.items():
        text = replaced(text, name, part)
    return text


def numerics(text: str) -> str:
    """The page of numbers with the errors that were measured."""
    return replaced(text, "errors", "\n" + error_table.table(RESULTS))


def jax(text: str) -> str:
    """The page of JAX with what was measured there."""
    return replaced(text, "peers", "\n" + script_tables.jax(RESULTS))


def features(text: str) -> str:
    """The page of features with what they cost."""
    text = replaced(text, "window", script_tables.window(RESULTS))
    text = replaced(text, "pairs", script_tables.pairs(RESULTS))
    text = replaced(text, "trained", script_tables.trained_pairs(RESULTS))
    for depth in (128, 256):
        text = replaced(text, f"fp8of{depth}", fp8_rows.share(RESULTS, depth).split()[0])
    text = replaced(text, "documents", script_tables.documents(RESULTS))
    return replaced(text, "costs", "\n" + script_tables.costs(RESULTS))


def limits(text: str) -> str:
    """The page of limits with the shares that were measured."""
    text = replaced(text, "decoding", decoding_tables.decoding(RESULTS))
    text = replaced(text, "uneven", decoding_tables.uneven_decoding(RESULTS))
    text = replaced(text, "window", decoding_tables.window_decoding(RESULTS))
    text = replaced(text, "drafts", decoding_tables.drafts(RESULTS))
    text = replaced(text, "rotated", decoding_tables.rotated(RESULTS))
    text = replaced(text, "head", script_tables.head(RESULTS))
    text = replaced(text, "cputimes", script_tables.cpu_times(RESULTS))
    text = replaced(text, "builds", "\n" + script_tables.builds(RESULTS) + "\n")
    text = replaced(text, "statistics", "\n" + script_tables.statistics(RESULTS))
    text = replaced(text, "latent", "\n" + script_tables.latent(RESULTS))
    text = caches(replaced(text, "cpuwindow", script_tables.cpu_window(RESULTS)))
    text = replaced(text, "cpu32", "\n" + script_tables.cpu_sizes(RESULTS))
    lines = ["", "| pass and shape | speed | beside |", "| --- | --- | --- |"]
    lines += [f"| {' | '.join(row)} |" for row in front_page.behind(RESULTS)]
    text = replaced(text, "behind", "\n".join([*lines, ""]))
    text = replaced(text, "step", "\n" + front_page.step(RESULTS))
    text = replaced(text, "models", "\n" + front_page.models(RESULTS))
    text = replaced(text, "ownshapes", "\n" + shapes.own_table(RESULTS))
    text = replaced(text, "large", "\n" + error_table.large())
    return replaced(text, "shares", "\n" + script_tables.shares(RESULTS))


def caches(text: str) -> str:
    """A page with what a cache of e4m3 gains."""
    return replaced(text, "e4m3", decoding_tables.e4m3_caches(RESULTS))


def fp8(text: str) -> str:
    """The page of 8 bits with its speeds."""
    text = replaced(caches(text), "speed", "\n" + fp8_rows.speed(RESULTS))
    for depth in (64, 128, 256):
        text = replaced(text, f"share{depth}", fp8_rows.share(RESULTS, depth))
        text = replaced(text, f"quantised{depth}", fp8_rows.share(RESULTS, depth, "fp8 with quantisation"))
    return replaced(text, "aims", fp8_rows.aims(RESULTS))


def block_masks(text: str) -> str:
    """The page of masks with blocks, with what lists gain."""
    return replaced(text, "blocks", "\n" + block_rows.table(RESULTS))


def environment(text: str) -> str:
    """The page of environment with what first calls take."""
    return replaced(text, "first", script_tables.first_calls(RESULTS))


def answers(text: str) -> str:
    """A page of answers with its list of questions and README's figures, and those of pages that it links to."""
    return answer_pages.filled(text, RESULTS)


def replaced(text: str, name: str, part: str) -> str:
    """The text with this between the two marks of that name, which it must have."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{begin} and {end} are not in the text, in this order.")
    return f"{before}{begin}{part}{end}{after}"


def main() -> None:
    (ROOT / "docs" / "support.md").write_text(support(evidence.read(RESULTS)))
    for name, text in benchmark_pages.pages(RESULTS).items():
        (ROOT / "docs" / name).write_text(text)
    (ROOT / "docs" / "goals.md").write_text(goals.page(RESULTS))
    (ROOT / "docs" / "reference" / "arguments.md").write_text(argument_page.page())
    for file in (file for file in RESULTS.glob("*.csv") if benchmark_pages.is_shown(file.stem)):
        plot.draw(read(file), ROOT / "docs" / f"{file.stem}.png")
    front_page.draw(RESULTS, ROOT / "docs" / "speed-h100.png")
    generated = {
        "README.md": readme, "docs/explanation/numerics.md": numerics, "docs/jax.md": jax, "docs/features.md": features,
        "docs/limits.md": limits, **{f"docs/answers/{group}.md": answers for group in answer_pages.GROUPS},
        "docs/answers.md": answers,
        "docs/reference/environment.md": environment, "docs/tutorials/cache.md": caches, "docs/how-to/fp8.md": fp8,
        "docs/how-to/block-masks.md": block_masks,
    }  # fmt: skip
    for name, written in generated.items():
        page = ROOT / name
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()
