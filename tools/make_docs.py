"""Writes the generated parts of the docs: `make docs`.

docs/support.md from what the backends say, README's table and docs/*.png from benchmarks/results/*.csv, nothing by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashtile.bench import plot, report
from flashtile.bench.result import read
from flashtile.errors import NotSupported
from flashtile.export.matrix import TARGETS
from flashtile.spec.attention import AttentionProblem
from flashtile.spec.options import Variant
from tools import evidence
from tools.evidence import Evidence, cell

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SUITES = ("fa3-paper", "llmc")

# (feature, spelling, backward variant): each row of the support matrix is one problem put to every backend.
FEATURES: tuple[tuple[str, str, Variant], ...] = (
    ("fp16", "attention(q=1x128x2x64,kv=128x2x64,fp16)", "auto"),
    ("bf16", "attention(q=1x128x2x64,kv=128x2x64,bf16)", "auto"),
    ("fp32, tf32x3", "attention(q=1x128x2x64,kv=128x2x64,fp32,tf32x3)", "auto"),
    ("fp32, tf32", "attention(q=1x128x2x64,kv=128x2x64,fp32,tf32)", "auto"),
    ("fp32, ieee", "attention(q=1x128x2x64,kv=128x2x64,fp32,ieee)", "auto"),
    ("causal, seqlen_q != seqlen_k", "attention(q=1x64x2x64,kv=128x2x64,bf16,band=:0)", "auto"),
    ("window", "attention(q=1x128x2x64,kv=128x2x64,bf16,band=32:0)", "auto"),
    ("GQA, MQA", "attention(q=1x128x8x64,kv=128x2x64,bf16)", "auto"),
    ("head_dim 1 to 256", "attention(q=1x128x2x7,kv=128x2x7,bf16)", "auto"),
    ("head_dim 256", "attention(q=1x128x2x256,kv=128x2x256,bf16)", "auto"),
    ("head_dim 512, 16 bits", "attention(q=1x128x2x512,kv=128x2x512,bf16)", "auto"),
    ("head_dim 512, fp32", "attention(q=1x128x2x512,kv=128x2x512,fp32,tf32x3)", "auto"),
    ("head_dim_v != head_dim", "attention(q=1x128x2x192,kv=128x2x128,bf16)", "auto"),
    ("softcap", "attention(q=1x128x2x64,kv=128x2x64,bf16,score=softcap(30.0))", "auto"),
    ("ALiBi, gradient of slopes", "attention(q=1x128x2x64,kv=128x2x64,bf16,score=alibi(1x2:fp32:grad))", "auto"),
    ("sinks", "attention(q=1x128x2x64,kv=128x2x64,bf16,sink=2:fp32:grad)", "auto"),
    ("dropout", "attention(q=1x128x2x64,kv=128x2x64,bf16,dropout=0.1)", "auto"),
    ("bias, its gradient", "attention(q=1x128x2x64,kv=128x2x64,bf16,score=bias(1x2x128x128:bf16:grad))", "auto"),
    ("varlen", "attention(q=4x128x2x64,kv=128x2x64,bf16,band=:0,varlen=300x300)", "auto"),
    (
        "varlen, gradient of a bias",
        "attention(q=4x128x2x64,kv=128x2x64,bf16,score=bias(4x2x1x1:bf16:grad),varlen=300x300)",
        "auto",
    ),
    ("padding (seqused)", "attention(q=4x128x2x64,kv=128x2x64,bf16,used=qk)", "auto"),
    ("predicates", "attention(q=2x128x2x64,kv=128x2x64,bf16,where=prefix(2:int32))", "auto"),
    ("block lists", "attention(q=2x128x2x64,kv=128x2x64,bf16,where=prefix(2:int32),blocks=64x64)", "auto"),
    ("backward split", "attention(q=1x128x2x64,kv=128x2x64,bf16)", "split"),
    ("backward fused", "attention(q=1x128x2x64,kv=128x2x64,bf16)", "fused"),
    ("deterministic backward", "attention(q=1x128x2x64,kv=128x2x64,bf16,deterministic)", "auto"),
)


def support(proof: Iterable[Evidence]) -> str:
    """The support matrix as markdown."""
    targets, proof = ("cpu", *TARGETS), tuple(proof)
    lines = [
        "# What runs where",
        "",
        "Written by `make docs` from what the backends answer. **run on**: on the CPU the tests run every case; on a GPU a row",
        "of `benchmarks/results/*.csv` measured the feature there with that backend and found it right. **compiled for**: the",
        "kernels compile there within their budgets (`make compile`); no such row exists. **refused**: with the reason below.",
        "Forward and backward alike, where they are not told apart.",
        "",
        "| feature | " + " | ".join(targets) + " |",
        "| --- |" + " --- |" * len(targets),
    ]
    reasons: list[str] = []
    for feature, spelling, variant in FEATURES:
        problem, cells = AttentionProblem.parse(spelling), list[str]()
        for target in targets:
            try:
                cells.append(cell(problem, variant, target, proof))
            except NotSupported as refusal:
                told = "; ".join(f"{name}: {', '.join(why)}" for name, why in refusal.reasons.items())
                reasons.append(f"- {feature} on {target}: {told}")
                cells.append("refused")
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(["Refusals:", "", *reasons, ""] if reasons else [])])


def tables() -> tuple[str, str]:
    """Markdown for README (geometric means) and docs/benchmarks.md (every row) from the newest results of each suite."""
    short: list[str] = []
    full = ["# Benchmarks", "", "Written by `make docs` from `benchmarks/results`; TFLOP/s as FlashAttention counts them.", ""]
    for suite in SUITES:
        files = sorted(RESULTS.glob(f"{suite}-*.csv"))
        if files:
            results = read(files[-1])
            plot.draw(results, ROOT / "docs" / f"{suite}.png")
            short += [f"Suite `{suite}`:", "", report.markdown(results, [report.means(results)])]
            full += [f"## {suite}", "", report.markdown(results), f"![{suite}]({suite}.png)", ""]
    return "\n".join(short), "\n".join(full)


def main() -> None:
    (ROOT / "docs" / "support.md").write_text(support(evidence.read(RESULTS)))
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition("<!-- bench:begin -->")
    _, _, after = rest.partition("<!-- bench:end -->")
    short, full = tables()
    (ROOT / "docs" / "benchmarks.md").write_text(full)
    readme.write_text(f"{before}<!-- bench:begin -->\n{short}<!-- bench:end -->{after}")


if __name__ == "__main__":
    main()
