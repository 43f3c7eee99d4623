"""The tables of docs/support.md by kind of feature, and its refusals by reason. tools/make_docs.py asks the backends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

GROUPS = {  # heading -> rows of the table below it, in this order
    "Dtypes": ("fp16", "bf16", "fp32, tf32x3", "fp32, tf32", "fp32, ieee", "fp64"),
    "Heads": (
        "GQA, MQA", "head_dim that 8 does not divide", "head_dim 256", "head_dim 512, 16 bits", "head_dim 512, fp32",
        "head_dim_v != head_dim",
    ),
    "Masks": (
        "causal, seqlen_q != seqlen_k", "window", "predicates", "lists of blocks of 128 x 128", "lists of blocks of 64 x 64",
    ),
    "Score modifiers, sinks and dropout": (
        "softcap", "ALiBi, gradient of slopes", "bias, its gradient", "bias of keys, its gradient", "sinks",
        "sinks, few scores", "window beside sinks", "predicates beside sinks", "dropout",
    ),
    "Lengths": (
        "varlen", "varlen, gradient of a bias", "varlen, a bias of every score", "padding (seqused)", "one query",
        "paged cache, forward", "paged cache, a window and sinks",
    ),
}  # fmt: skip
REST = "Backwards and derivatives"


def grouped(header: Sequence[str], rows: Mapping[str, str]) -> list[str]:
    """A table with this header below each heading; rows: feature -> line. What no heading names comes last."""
    named = {feature for features in GROUPS.values() for feature in features}
    if unknown := named - rows.keys():
        raise ValueError(f"GROUPS names {', '.join(sorted(unknown))}; rows are {', '.join(rows)}.")
    groups = {**GROUPS, REST: tuple(feature for feature in rows if feature not in named)}
    return [
        line
        for title, features in groups.items()
        for line in ("", f"## {title}", "", *header, *(rows[feature] for feature in features))
    ]


def refusals(found: Iterable[tuple[str, str, str]]) -> list[str]:
    """What is refused, on which architectures, and why; found: (feature, architecture, why), a reason once a feature."""
    where = dict[tuple[str, str], list[str]]()
    for feature, target, why in found:
        where.setdefault((feature, why), []).append(target)
    lines = [
        "",
        "## What is refused, and why",
        "",
        "On a GPU these are the portable kernels' reasons; Hopper's refuse the same.",
        "",
    ]
    lines += ["| feature | on | why |", "| --- | --- | --- |"]
    return [*lines, *(f"| {feature} | {', '.join(targets)} | {why} |" for (feature, why), targets in where.items())]


def left(found: Iterable[tuple[str, str, str]]) -> list[str]:
    """What Hopper's kernels leave to the portable ones; found: (feature, passes, why), a row for each reason."""
    features = dict[tuple[str, str], list[str]]()
    for feature, passes, why in found:
        features.setdefault((passes, why), []).append(feature)
    lines = ["", "## What Hopper's kernels leave to the portable ones on sm90", ""]
    lines += ["| feature | passes | why |", "| --- | --- | --- |"]
    return [*lines, *(f"| {'; '.join(names)} | {passes} | {why} |" for (passes, why), names in features.items())]
