"""Cases in which every two features meet: an all-pairs generator over a table of features.

A feature is an entry of AXES: an axis, a name, and what it changes in a `Case`. Two values of one axis exclude each other;
any two of different axes meet in some case, unless IMPOSSIBLE says that they cannot. `Table` is what the generator takes
of it; tests/pairwise_hopper.py has another one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any

from tests.cases import Case

Choice = dict[str, str]  # axis -> the name of its value
Pair = tuple[tuple[str, str], tuple[str, str]]
Meeting = frozenset[tuple[str, str]]  # a pair, whose order does not matter

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
    # what triton refuses: under varlen a bias is one number per item and head
    *(
        (("items", items), ("score", score))
        for items in ("varlen", "varlen-used")
        for score in ("bias", "bias-heads", "bias-keys", "bias-plane")
    ),
    # the table's gradient is added atomically: a refusal of its own (tests/test_user_modifier.py)
    (("score", "table"), ("backward", "deterministic")),
)


@dataclass(frozen=True)
class Table:
    """Axes of features, the pairs that cannot meet, and what else stands against a choice of theirs."""

    axes: dict[str, dict[str, dict[str, Any]]]
    impossible: frozenset[Meeting]
    refusals: Callable[[Choice], Sequence[str]] = lambda choice: ()
    make: Callable[..., Case] = Case

    @cached_property
    def clashes(self) -> dict[tuple[str, str], set[tuple[str, str]]]:
        """The values that each value cannot meet."""
        values = frozenset[tuple[str, str]]().union(*self.impossible)
        return {value: set().union(*(pair - {value} for pair in self.impossible if value in pair)) for value in values}

    def possible(self, choice: Choice, value: tuple[str, str]) -> bool:
        """Whether a possible choice may have this value too."""
        return self.clashes.get(value, set()).isdisjoint(choice.items())

    def pairs(self) -> set[Meeting]:
        """Every pair of values of different axes that can meet."""
        values = [(axis, name) for axis, names in self.axes.items() for name in names]
        found = {frozenset(pair) for pair in combinations(values, 2) if pair[0][0] != pair[1][0]}
        return found - self.impossible

    def complete(self, must: Choice, dice: random.Random) -> Choice:
        """A possible choice that holds `must`, whose other values are drawn axis by axis."""
        choice = dict(must)
        for axis in dice.sample(list(self.axes), len(self.axes)):
            if axis not in must:
                choice[axis] = dice.choice([name for name in self.axes[axis] if self.possible(choice, (axis, name))])
        return {axis: choice[axis] for axis in self.axes}

    def drawn(self, must: Choice, missing: set[Meeting], dice: random.Random, tries: int) -> list[Choice]:
        """`tries` choices that hold `must`, those with most missing pairs first."""
        made = [self.complete(must, dice) for _ in range(tries)]
        return sorted(made, key=lambda choice: -sum(pair in missing for pair in pairs_of(choice)))

    def plainest(self, choice: Choice) -> Choice:
        """What begins so, with the first value of every other axis that is possible."""
        for axis, names in self.axes.items():
            if axis not in choice:
                choice = {**choice, axis: next(name for name in names if self.possible(choice, (axis, name)))}
        return {axis: choice[axis] for axis in self.axes}

    def refused_part(self, choice: Choice) -> frozenset[tuple[str, str]]:
        """Of a refused choice the values that are refused with the plainest ones beside them; none of them can be left out."""
        part = dict(choice)
        for axis in self.axes:
            less = {other: name for other, name in part.items() if other != axis}
            if self.refusals(self.plainest(less)):
                part = less
        return frozenset(part.items())

    def case_of(self, name: str, choice: Choice, **sizes: int) -> Case:
        """The case of a choice; `sizes`: what to change of its lengths and batch."""
        changes: dict[str, Any] = {}
        for axis, value in choice.items():
            changes |= self.axes[axis][value]
        return with_items(self.make(name, **{**changes, **sizes}), choice["items"])


TABLE = Table(AXES, frozenset(map(frozenset, IMPOSSIBLE)))


def pairs_of(choice: Choice) -> Iterator[Meeting]:
    return (frozenset(pair) for pair in combinations(choice.items(), 2))


def drawn_from(missing: set[Meeting], dice: random.Random) -> Choice:
    """One of the pairs, as a choice of two axes."""
    return dict(dice.choice(sorted(map(sorted, missing))))


def choices(count: int, seed: int = 0, tries: int = 30) -> Iterator[Choice]:
    """`count` choices of TABLE: first enough to cover every pair, then again with other companions, and so on."""
    dice = random.Random(seed)
    missing: set[Meeting] = set()
    for _ in range(count):
        if not missing:
            missing = TABLE.pairs()
        best = TABLE.drawn(drawn_from(missing, dice), missing, dice, tries)[0]
        missing -= set(pairs_of(best))
        yield best


def cover(table: Table, wanted: set[Meeting], seed: int = 0, tries: int = 30) -> tuple[list[Choice], dict[Meeting, str]]:
    """Choices that cover every wanted pair, and those pairs that are refused in whatever choice was tried, with the reasons."""
    dice, missing, found = random.Random(seed), set(wanted), list[Choice]()
    refused = dict[frozenset[tuple[str, str]], str]()  # values that do not meet
    while missing:
        must = drawn_from(missing, dice)
        for choice in [*table.drawn(must, missing, dice, tries), table.plainest(must)]:
            if any(part.issubset(choice.items()) for part in refused):
                continue
            if not table.refusals(choice):
                found.append(choice)
                missing -= set(pairs_of(choice))
                break
            part = table.refused_part(choice)
            reasons = table.refusals(table.plainest(dict(part)))
            if len(part) == 2 and all(table.refusals(table.complete(dict(part), dice)) for _ in range(5)):
                table = replace(table, impossible=table.impossible | {part})
                missing.discard(part)
            elif len(part) == 2:  # with other companions they do meet
                part = frozenset(choice.items())
            refused[part] = "; ".join(reasons)
            if part.issubset(must.items()):
                break
        else:
            pair = frozenset(must.items())
            missing.remove(pair)
            refused[pair] = "; ".join(table.refusals(table.plainest(must)))
    return found, {part: reasons for part, reasons in refused.items() if part in wanted}


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
        yield TABLE.case_of(f"pairwise-{seed}-{number}-" + "-".join(choice.values()), choice)
