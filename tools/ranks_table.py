"""The part of docs/support.md about sequences over ranks: every feature put to every method of `flashtile.distributed`."""

from __future__ import annotations

from typing import Any

import torch

from flashtile import Alibi, Band, Bias, Dilated, Document, KeyPadding, Prefix, Softcap, TopLeft
from flashtile.torch.context.context import METHODS, against_dropout, refusals
from flashtile.torch.context.layout import LAYOUTS
from flashtile.torch.context.wanted import against, wanted

RANKS, ROWS, HEADS = 4, 8, 8  # ranks, a rank's queries, heads of q and k
SLOPES, IDS = torch.ones(HEADS), torch.zeros(ROWS, dtype=torch.int32)
FEATURES: dict[str, dict[str, Any]] = {
    "causal, windows": {"causal": True, "window": (3, 0)},
    "softcap, sinks": {"score": (Softcap(2.0),), "sink": torch.zeros(HEADS)},
    "ALiBi in causal order": {"causal": True, "score": (Alibi(SLOPES),)},
    "ALiBi in any order": {"score": (Alibi(SLOPES),)},
    "bias with queries": {"score": (Bias(torch.zeros(ROWS, ROWS * RANKS)),)},
    "bias of keys": {"score": (Bias(torch.zeros(ROWS * RANKS)),)},
    "Document": {"mask": Document(IDS)},
    "KeyPadding": {"mask": KeyPadding(torch.ones(1, ROWS))},
    "Prefix, TopLeft": {"mask": Prefix(torch.ones(1, dtype=torch.int32)) | TopLeft(left=3) & Band(right=3)},
    "Dilated": {"mask": Dilated(2)},
}
HEAD_COUNTS = {"8 heads of q, 2 of k": (8, 2), "6 heads of q, 3 of k": (6, 3)}


def table() -> list[str]:
    """Lines of markdown."""
    methods = METHODS[1:4]  # those of a mesh of two axes are tested by a few cases
    lines = [
        "## Sequences over ranks", "",
        "`flashtile.distributed`, whose local calls are the calls above. **run on cpu**: tests/distributed runs it in 2",
        "processes, forward and backward, and most of it in 4. Two H200 have run causal calls, windows and packed",
        "documents, which every method takes. Refused by all are masks with blocks, masks and modifiers of your own. JAX's",
        "`dot_product_attention_sharded` gathers keys or exchanges heads: causal order, windows, softcap, ALiBi, biases,",
        "sinks, documents, key padding, dropout ([how](how-to/context-parallel.md#jax)).",
        "",
        "| feature | " + " | ".join(methods) + " |", "| --- |" + " --- |" * len(methods),
    ]  # fmt: skip
    for feature, given in FEATURES.items():
        want = wanted(*(given.get(name, default) for name, default in
                        (("causal", False), ("window", None), ("mask", None), ("score", ()), ("scale", None), ("sink", None),
                         ("options", None))))  # fmt: skip
        lines.append(f"| {feature} | " + " | ".join(_cell(against(want, method, ROWS)) for method in methods) + " |")
    for said, packed in (("dropout", False), ("dropout, packed documents", True)):
        lengths = (ROWS * RANKS, ROWS * RANKS)
        cells = (_cell(against_dropout(method, "zigzag", lengths, RANKS, "cpu", packed)) for method in methods)
        lines.append(f"| {said} | " + " | ".join(cells) + " |")
    for layout in LAYOUTS:
        cells = (_cell(refusals(method, layout, HEADS, HEADS, RANKS)) for method in methods)
        lines.append(f"| layout {layout} | " + " | ".join(cells) + " |")
    for said, (heads_q, heads_kv) in HEAD_COUNTS.items():
        cells = (_cell(refusals(method, "contiguous", heads_q, heads_kv, RANKS)) for method in methods)
        lines.append(f"| {said}, {RANKS} ranks | " + " | ".join(cells) + " |")
    return lines


def _cell(reasons: list[str]) -> str:
    return f"refused: {'; '.join(reasons)}" if reasons else "run on cpu"
