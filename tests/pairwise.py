"""Cases in which every two features meet: an all-pairs generator over a table of features.

A feature is an entry of AXES: an axis, a name, and what it changes in a `Case`. Two values of one axis exclude each other;
any two of different axes meet in some case, unless `possible` says that they cannot.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from tests.cases import Case

Choice = dict[str, str]  # axis -> the name of its value
Pair = tuple[tuple[str, str], tuple[str, str]]

AXES: dict[str, dict[str, dict[str, Any]]] = {
    "dtype": {name: {"dtype": name} for name in ("fp32", "fp16", "bf16")},
    "lengths": {
        "equal": {"seqlen_q": 36, "seqlen_k": 36},
        "more-keys": {"seqlen_q": 17, "seqlen_k": 50},
        "more-queries": {"seqlen_q": 40, "seqlen_k": 20},
        "one-query": {"seqlen_q": 1, "seqlen_k": 45},
    },
    "heads": {
        "mha": {"heads_q": 1, "heads_kv": 1, "batch": 2},
        "gqa": {"heads_q": 4, "heads_kv": 2},
        "mqa": {"heads_q": 3, "heads_kv": 1, "batch": 3},
    },
    "dims": {
        "16": {"head_dim": 16},
        "24-40": {"head_dim": 24, "head_dim_v": 40},
        "64-5": {"head_dim": 64, "head_dim_v": 5},
    },
    "mask": {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (12, 5)},
        "left": {"window": (9, None), "causal": True},
    },
    "score": {
        "none": {},
        "softcap": {"score": ("softcap",)},
        "alibi": {"score": ("alibi",)},
        "alibi-per-batch": {"score": ("softcap30", "alibi-per-batch")},
        "bias": {"score": ("bias",)},
        "bias-heads": {"score": ("bias-heads", "softcap")},
        "bias-keys": {"score": ("alibi", "bias-keys")},
        "bias-plane": {"score": ("softcap", "bias-plane", "alibi")},
        "table": {"score": ("table",)},
    },
    "sink": {"none": {}, "fp32": {"sink": "fp32"}, "bf16": {"sink": "bf16"}},
    "dropout": {"none": {}, "0.1": {"dropout": 0.1}, "0.5": {"dropout": 0.5}},
    "where": {
        "anywhere": {},
        "document": {"mask": "document"},
        "prefix": {"mask": "prefix"},
        "holes": {"mask": "holes-and-documents"},
        "document-blocks": {"mask": "document-blocks"},
        "holes-blocks": {"mask": "holes-blocks"},
    },
    "items": {"alike": {}, "varlen": {}, "varlen-used": {}, "padded-keys": {}, "padded": {}},  # see `with_items`
    "layout": {name: {"layout": name} for name in ("bshd", "bhsd", "packed", "gaps")},
    "backward": {
        "split": {"backward": "split"},
        "fused": {"backward": "fused"},
        "deterministic": {"backward": "split", "deterministic": True},
    },
    "upstream": {name: {"upstream": name} for name in ("both", "out", "lse")},
    "scale": {"default": {}, "negative": {"scale": -0.4}, "large": {"scale": 1.0}},
}

IMPOSSIBLE: tuple[Pair, ...] = (
    # packed tensors are of one shape
    *((("layout", "packed"), ("lengths", name)) for name in AXES["lengths"] if name != "equal"),
    *((("layout", "packed"), ("heads", name)) for name in AXES["heads"] if name != "mha"),
    *((("layout", "packed"), ("dims", name)) for name in AXES["dims"] if name != "16"),
    # what triton refuses: lists of blocks are made for one length; under varlen a bias is one number per item and head
    *(
        (("items", items), ("where", f"{mask}-blocks"))
        for items in AXES["items"]
        if items != "alike"
        for mask in ("document", "holes")
    ),
    *(
        (("items", items), ("score", score))
        for items in ("varlen", "varlen-used")
        for score in ("bias", "bias-heads", "bias-keys", "bias-plane")
    ),
    # the table's gradient is added atomically: a refusal of its own (tests/test_user_modifier.py)
    (("score", "table"), ("backward", "deterministic")),
)
_FORBIDDEN = {frozenset(pair) for pair in IMPOSSIBLE}
_CLASHES = {value: set().union(*(pair - {value} for pair in _FORBIDDEN if value in pair)) for value in set().union(*_FORBIDDEN)}


def pairs_of(choice: Choice) -> Iterator[frozenset[tuple[str, str]]]:
    return (frozenset(pair) for pair in combinations(choice.items(), 2))


def possible(choice: Choice, value: tuple[str, str]) -> bool:
    """Whether a possible choice may have this value too."""
    return _CLASHES.get(value, set()).isdisjoint(choice.items())


def all_pairs() -> set[frozenset[tuple[str, str]]]:
    """Every pair of values of different axes that can meet."""
    values = [(axis, name) for axis, names in AXES.items() for name in names]
    found = {frozenset(pair) for pair in combinations(values, 2) if pair[0][0] != pair[1][0]}
    return found - _FORBIDDEN


def choices(count: int, seed: int = 0, tries: int = 30) -> Iterator[Choice]:
    """`count` choices: first enough to cover every pair, then again with other companions, and so on."""
    dice = random.Random(seed)
    missing: set[frozenset[tuple[str, str]]] = set()
    for _ in range(count):
        if not missing:
            missing = all_pairs()
        must = dict(dice.choice(sorted(map(sorted, missing))))
        drawn = [complete(must, dice) for _ in range(tries)]
        best = max(drawn, key=lambda choice: sum(pair in missing for pair in pairs_of(choice)))
        missing -= set(pairs_of(best))
        yield best


def complete(must: Choice, dice: random.Random) -> Choice:
    """A possible choice that holds `must`, whose other values are drawn axis by axis."""
    choice = dict(must)
    for axis in dice.sample(list(AXES), len(AXES)):
        if axis not in must:
            choice[axis] = dice.choice([name for name in AXES[axis] if possible(choice, (axis, name))])
    return {axis: choice[axis] for axis in AXES}


def case_of(name: str, choice: Choice, **sizes: int) -> Case:
    """The case of a choice; `sizes`: what to change of its lengths and batch."""
    changes: dict[str, Any] = {}
    for axis, value in choice.items():
        changes |= AXES[axis][value]
    return with_items(Case(name, **{**changes, **sizes}), choice["items"])


def with_items(case: Case, items: str) -> Case:
    """The case with items of uneven lengths, an empty one among them; tokens behind the last item belong to none."""

    def cuts(total: int) -> tuple[int, ...]:
        return 0, total // 3, total // 3, total // 2, max(total // 2, total - 2)

    def used(total: int, shorter: int) -> tuple[int, ...]:
        cu = cuts(total)
        spans = [end - start for start, end in pairwise(cu)] if case.cu_q else [total] * case.batch
        return tuple((max(span - shorter, 0), span // 2, 0, span)[i % 4] for i, span in enumerate(spans))

    n, m = case.seqlen_q, case.seqlen_k
    if items.startswith("varlen"):
        case = replace(case, batch=1, cu_q=cuts(n), cu_k=cuts(m))
    if items in ("varlen-used", "padded"):
        case = replace(case, used_q=used(n, 0))
    if items in ("varlen-used", "padded", "padded-keys"):
        case = replace(case, used_k=used(m, 3))
    return case


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """The cases of `choices`."""
    for number, choice in enumerate(choices(count, seed)):
        yield case_of(f"pairwise-{seed}-{number}-" + "-".join(choice.values()), choice)
