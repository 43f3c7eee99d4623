"""The generated parts of README: its figure and its tables, from benchmarks/results/*.csv and what the backends answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from matplotlib.figure import Figure

from flashtile.audit.matrix import TARGETS
from flashtile.bench import report
from flashtile.bench.result import Result
from flashtile.bench.result import read as read_bench
from tools import companion_tables, decoding_tables, script_tables, shapes
from tools.companion_tables import Row, read

OURS = "flashtile/hopper"
CARD = "h100"  # every figure of README is of this card; that no other can slip in is tested
FIGURE = "hopper-fa3-paper"  # the suite of the figure, at its longest sequences
SUITES = {  # file of `flashtile bench` -> where its shapes come from; the shapes are told from its rows
    "hopper-fa3-paper": "shapes of FlashAttention-3's paper",
    "hopper-triton-tutorial": "Triton's tutorial",
    "hopper-llmc": "GPT-2's shapes, llm.c",
    "hopper-cudnn-cross": "cuDNN's samples",
    "fp32-llmc": "GPT-2's shapes, llm.c",
}
UNEQUAL = "sequences of unequal lengths; bf16"  # the dtype of benchmarks/varlen.py
UNEQUAL_PEERS = {"sdpa nested": "nested tensors", "flex document": "FlexAttention", "fa4 varlen": "FlashAttention-4"}
MODELS = "training shapes of Llama 3, Qwen3, Gemma 3, GPT-OSS, DeepSeek V3"
TRAINED = "hopper-models-h200"
NORM_PEERS = {"compiled": "torch.compile", "liger": "Liger"}
NORMS = ("layer_norm", "rms_norm", "add_rms_norm", "dropout_add_layer_norm")
DEVICES = {
    "cpu": "CPU", "sm80": "A100 (sm80)", "sm86": "RTX 3090 (sm86)", "sm90": "H100, H200 (sm90)", "sm100": "B200 (sm100)",
    "sm120": "RTX 5090 (sm120)", "gfx942": "MI300X (gfx942)",
}  # fmt: skip
FEATURES = {  # what README calls rows of docs/support.md, which must say the same of every target -> the rows
    "fp16, bf16, fp32": ("fp16", "bf16", "fp32, tf32x3"),
    "sliding window; sinks and their gradient": ("window", "sinks"),
    "sequences of any lengths, padded or packed": ("varlen", "padding (seqused)"),
    "masks of your own; bias and its gradient": ("predicates", "bias, its gradient"),
    "repeatable gradients; second derivatives": ("deterministic backward", "the second derivative"),
    "fp8 products, forward only": ("fp8 products",),
    "decoding from a paged cache": ("paged cache, forward",),
    "the same with a window and sinks": ("paged cache, a window and sinks",),
}
TESTED = {("paged cache, a window and sinks", "sm90")}  # docs/support.md, "What ran apart from benchmarks", counts them


# -- what runs where ------------------------------------------------------------------------------------------------


def support(said: Mapping[str, Sequence[str]]) -> str:
    """Some rows of the support matrix in one word a cell. said: what the matrix says of each feature on each target."""
    targets = ("cpu", *TARGETS)
    lines = ["| | " + " | ".join(DEVICES[target] for target in targets) + " |", "| --- |" + " --- |" * len(targets)]
    for name, features in FEATURES.items():
        words, *others = ([_word(cell) for cell in said[feature]] for feature in features)
        if any(other != words for other in others):
            raise ValueError(f"{', '.join(features)} are not alike on every target: give each a row of its own in FEATURES.")
        lines.append(_line(name, *words))
    return "\n".join([*lines, ""])


def _word(cell: str) -> str:
    if cell == "refused":
        return cell
    return "built" if "compiled for" in cell else "tested" if "tested on" in cell else "run"


# -- how fast -------------------------------------------------------------------------------------------------------


def called(folder: Path, stem: str) -> str:
    """What README calls a suite: the shapes of its rows, and where they come from."""
    return f"{shapes.told(read_bench(_path(folder, stem)))} ({SUITES[stem]})"


def speed(folder: Path) -> str:
    """Seven rows: geometric means of our speed over the fastest other's, on one card."""
    lines = ["| what | the competitors | forward | backward | measured |", "| --- | --- | --- | --- | --- |"]
    for stem in SUITES:
        results = read_bench(_path(folder, stem))
        lines.append(_line(called(folder, stem), shapes.peers(results), *_means(results), _when(results)))
    rows = [row for row in read(_path(folder, "varlen")) if row["section"] == "varlen"]
    lines.append(_line(UNEQUAL, _named(UNEQUAL_PEERS, (row["name"].rpartition(", ")[0] for row in rows)),
                       *(_mean(_unequal(rows, way)) for way in ("fwd", "bwd")), _when(rows)))  # fmt: skip
    norms = [row for row in read(_path(folder, "companions")) if row["case"].partition(" ")[0] in NORMS]
    cells = companion_tables.cells(norms)
    ways = [[r for c in cells if next(iter(c.values()))["direction"] == way and (r := companion_tables.ratio(c))]
            for way in ("fwd", "bwd")]  # fmt: skip
    others = _named(NORM_PEERS, (row["provider"] for row in norms))
    lines.append(_line("LayerNorm and RMSNorm, also fused", others, *map(_mean, ways), _when(norms)))
    return "\n".join([*lines, ""])


def slower(folder: Path) -> str:
    """Where we are slower than what stands beside it, and the table of `speed` does not say it."""
    lines = ["| what | speed | beside | measured on |", "| --- | --- | --- | --- |"]

    def add(what: str, speed: str, beside: str, rows: Sequence[Row] | Sequence[Result], device: str = "H100") -> None:
        lines.append(_line(what, speed, beside, f"{device}, {_when(rows)}"))

    results = read_bench(_path(folder, "fa3-paper"))
    add("the portable kernels, bf16; other GPUs run these", _both(results), shapes.peers(results), results)
    forward = {row["row"]: row for row in read(_path(folder, "hopper-forward"))}
    rows = [forward[f"softcap-{depth}-{mask}"] for depth in (64, 128) for mask in ("full", "causal")]
    late = [forward["softcap-128-with-lse"]]
    capped, returning = (_range([float(row["of_base"]) for row in some]) for some in (rows, late))
    told = f"{capped}; {returning} with `return_lse` and 128"
    add("softcap, forward, head_dim 64 and 128", told, "no softcap, no `return_lse`", rows + late)
    costs = [row for row in read(_path(folder, "features-hopper")) if (row["section"], row["name"]) == ("costs", "dropout")]
    add("dropout, forward, head_dim 128", _range([1 / float(row["forward_ratio"]) for row in costs]), "no dropout", costs)
    rows = [row for row in read(folder / "cpu-epyc.csv") if (row["section"], row["what"]) == ("calls", "both")]
    add("fp32 forward and backward on one thread of a CPU; small calls most", _mean([1 / float(row["ratio"]) for row in rows]),
        "PyTorch's own", rows, "AMD EPYC")  # fmt: skip
    results = [r for r in read_bench(folder / "cpu-xeon.csv") if r.direction == "backward" and r.dtype != "fp32"]
    ratios = [r for row in report.grouped(results) if (r := report.ratio(row)) is not None]
    add("16-bit backward on a CPU", _mean(ratios), "PyTorch's own", results, "Intel Xeon")
    rows = decoding_tables.decoding_rows(folder)
    of_one, of_pages = (
        [float(row["of_best"]) for row in rows if row["provider"] == f"flashtile/{kind}"] for kind in ("contiguous", "16")
    )
    several, latents = (decoding_tables.rotation(folder)[kind] for kind in ("several", "mla-16"))
    of_each = [_mean([float(row["of_best"]) for row in some]) for some in (several, latents)]
    add("decoding: one query, equal lengths; 2 to 8 queries; latents of 16 heads",
        f"{_mean(of_one)}, pages of 16 {_mean(of_pages)}; {'; '.join(of_each)}", "SDPA; FlashAttention-4; flashinfer",
        [*rows, *several], "H200")  # fmt: skip
    head = script_tables.head_rows(folder)
    ours, theirs = head["flashtile"], head["compiled"]
    share, memory = float(theirs["ms"]) / float(ours["ms"]), float(ours["peak_mb"]) / float(theirs["peak_mb"])
    add("`linear_cross_entropy`, both passes", f"{share:.2f}x, in {memory:.2f} of the memory", "torch.compile", [ours, theirs],
        "H200")  # fmt: skip
    for stem, name in (("hopper-mla-h200", ""), (TRAINED, MODELS)):
        results = read_bench(folder / f"{stem}.csv")
        add(name or shapes.told(results), _both(results), shapes.peers(results), shapes.measured(results), "H200")
    return "\n".join([*lines, ""])


def behind(folder: Path) -> list[tuple[str, str, str]]:
    """What of the figure's suite is behind a peer, slowest first: the pass and shape, our speed beside the peer's, the peer."""
    found: list[tuple[float, str, str]] = []
    for row in report.grouped(read_bench(_path(folder, FIGURE))):
        ours = next(r for r in row.values() if r.side == "own")
        shape = f"{ours.batch} x {ours.seqlen_q:,} tokens, {ours.heads_q} heads of {ours.head_dim}"
        for peer in (r for r in row.values() if r.side == "peer"):
            speed = (ours.tflops or 0.0) / (peer.tflops or float("inf"))
            if 0.0 < speed < 1.0:
                what = f"{'causal' if ours.causal else 'full'} {ours.direction}, {shape}"
                found.append((speed, what, shapes.PEERS[peer.provider]))
    return [(what, f"{speed:.2f}x", peer) for speed, what, peer in sorted(found)]


def step(folder: Path) -> str:
    """A forward and a backward together by head dim, mask and length: our speed over each peer's, and the peers' versions."""
    results = shapes.measured(read_bench(_path(folder, FIGURE)))
    ms: dict[tuple[int, bool, int, str], float] = {}
    for r in results:
        cell = (r.head_dim, r.causal, r.seqlen_q, r.provider)
        ms[cell] = ms.get(cell, 0.0) + (r.ms or 0.0)
    peers = report.providers_of(r for r in results if r.side == "peer")
    columns = [(peer, length) for peer in peers for length in sorted({r.seqlen_q for r in results})]
    titles = [f"{shapes.short(length)}, {shapes.PEERS[peer]}" for peer, length in columns]
    lines = [_line("head_dim, mask", *titles), _line(*["---"] * (1 + len(titles)))]
    for depth, causal in dict.fromkeys((r.head_dim, r.causal) for r in results):
        cells = (ms[depth, causal, length, peer] / ms[depth, causal, length, OURS] for peer, length in columns)
        lines.append(_line(f"{depth}, {'causal' if causal else 'full'}", *(f"{cell:.2f}x" for cell in cells)))
    first = next(r for r in results if r.provider == "fa4")
    versions = f"FlashAttention-4 {first.flash_attn}, cuDNN {cudnn(first.cudnn)}, PyTorch {first.torch}"
    return "\n".join([*lines, "", f"One {first.device}, {_when(results)}; {versions}.", ""])


def models(folder: Path) -> str:
    """The training shapes of models: our speed over each peer's, by pass, and of a forward and a backward together."""
    results = shapes.measured(read_bench(folder / f"{TRAINED}.csv"))
    rows, peers = report.grouped(results), report.providers_of(r for r in results if r.side == "peer")
    titles = [f"{way}, {shapes.PEERS[peer]}" for way in ("forward", "backward", "both") for peer in peers]
    lines = [_line("model", "shape", *titles), _line(*["---"] * (2 + len(titles)))]
    for spelling in dict.fromkeys(r.spelling for r in results):
        ms = {(r.direction, name): r.ms or 0.0 for row in rows for name, r in row.items() if r.spelling == spelling}
        first = next(r for r in results if r.spelling == spelling)
        ways = (("forward",), ("backward",), ("forward", "backward"))
        cells = [sum(ms[way, peer] for way in some) / sum(ms[way, OURS] for way in some) for some in ways for peer in peers]
        lines.append(_line(shapes.MODELS[spelling], f"`{report.label(first)}`", *(f"{cell:.2f}x" for cell in cells)))
    return "\n".join([*lines, "", f"One {results[0].device}, {_when(results)}.", ""])


def cudnn(number: str) -> str:
    """cuDNN's version from its number: 91900 is 9.19.0."""
    return f"{int(number) // 10000}.{int(number) // 100 % 100}.{int(number) % 100}"


def field_tests(folder: Path) -> str:
    """What became of flash-attention's own tests, in a few words."""
    counts: dict[str, int] = {}
    rows = read(_path(folder, "field-tests"))
    caches = all("key/value cache" in row["why"] for row in rows if row["outcome"] == "refused")
    for row in rows:
        counts[row["outcome"]] = counts.get(row["outcome"], 0) + int(row["cases"])
    failed = sum(n for outcome, n in counts.items() if outcome not in ("passed", "refused", "skipped", "not reached"))
    drawn = sum(counts.values())
    return (
        f"We ran {drawn - counts['not reached']:,} of {drawn:,} tests of flash-attention 2.8.4, drawn at random, on an H100 on "
        f"{_when(rows)}: {counts['passed']:,} passed, {counts['refused']:,} asked for "
        f"{'a key/value cache' if caches else 'features'}, which we refused then, {counts['skipped']:,} skipped themselves, "
        f"{failed or 'none'} failed."
    )


def draw(folder: Path, path: Path) -> None:
    """The figure: ours beside cuDNN and FlashAttention-4 at the longest sequences, forward and backward."""
    results = [r for r in read_bench(_path(folder, FIGURE)) if r.tflops is not None]
    longest = max(r.seqlen_q for r in results)
    chosen = [r for r in results if r.seqlen_q == longest]
    cases = list(dict.fromkeys((r.head_dim, r.causal) for r in chosen))
    colours = {OURS: "#d62728", "sdpa/cudnn": "#7f9db9", "fa4": "#4c6a88"}
    names = {OURS: "flashtile", **shapes.PEERS}
    figure: Any = Figure(figsize=(10, 3.6), layout="constrained")
    for place, direction in enumerate(("forward", "backward"), start=1):
        axes = figure.add_subplot(1, 2, place)
        for k, (provider, colour) in enumerate(colours.items()):
            found = {(r.head_dim, r.causal): r.tflops for r in chosen if (r.provider, r.direction) == (provider, direction)}
            at = [i + (k - 1) * 0.28 for i in range(len(cases))]
            bars = axes.bar(at, [found[case] for case in cases], 0.28, label=names[provider], color=colour)
            axes.bar_label(bars, fmt="%.0f", fontsize=6.5, padding=1)
        ticks = [f"{depth}\n{'causal' if causal else 'full'}" for depth, causal in cases]
        axes.set_xticks(range(len(cases)), ticks, fontsize=8)
        axes.set(title=direction, ylabel="TFLOP/s", xlabel="head_dim and mask")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    when = f"{_when(chosen)}, commit {', '.join(sorted({r.commit for r in chosen}))}"
    figure.suptitle(f"{longest // 1024}k keys, bf16; {chosen[0].device}; {when}", fontsize=8, y=-0.01, va="top")
    figure.savefig(path, dpi=110, bbox_inches="tight")


# -- cells ----------------------------------------------------------------------------------------------------------


def _path(folder: Path, stem: str) -> Path:
    return folder / f"{stem}-{CARD}.csv"


def _means(results: Sequence[Result]) -> list[str]:
    """Our fastest over the fastest peer, forward and backward."""
    rows = [(next(iter(row.values())).direction, report.ratio(row)) for row in report.grouped(results)]
    return [_mean([r for way, r in rows if way == direction and r is not None]) for direction in ("forward", "backward")]


def _both(results: Sequence[Result]) -> str:
    forward, backward = _means(results)
    return f"forward {forward}, backward {backward}"


def _unequal(rows: Sequence[Row], direction: str) -> list[float]:
    found: list[float] = []
    for mask in ("causal", "full"):
        ms = {row["name"]: float(row["ms"]) for row in rows if row["direction"] == direction and row["name"].endswith(mask)}
        others = [value for name, value in ms.items() if not name.startswith("flashtile")]
        found.append(min(others) / ms[f"{OURS} varlen, {mask}"])
    return found


def _named(names: Mapping[str, str], found: Iterable[str]) -> str:
    """The others among those found, each by its name. Whoever has none is an error."""
    return ", ".join(names[other] for other in dict.fromkeys(found) if not other.startswith("flashtile"))


def _mean(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def _range(ratios: Sequence[float]) -> str:
    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f"{least}x" if least == most else f"{least}x to {most}x"


def _when(rows: Sequence[Result] | Sequence[Row]) -> str:
    """The day of rows, or the first and the last. docs/benchmarks.md has their commits."""
    days = sorted({(r["date"] if isinstance(r, Mapping) else r.date)[:10] for r in rows})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
