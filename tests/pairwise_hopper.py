"""The features of Hopper's kernels for the generator of tests/pairwise.py, and the backend itself as what refuses a choice.

Biases alone have gradients here; slopes, tables and, in problems as small as these, sinks have them from the portable
kernels. A pair that no choice with a backward has is covered by forwards alone, where the backend runs these, and so is one
query beside everything.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from flashtile import AttentionProblem, dispatch
from flashtile.plan.device import H100
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.describe import make_problem
from flashtile.torch.call.lengths import given_lengths
from tests import pairwise
from tests.cases import Case, Tensors
from tests.hopper.assess import forward
from tests.judge import run, run_without_lse, wants_gradient
from tests.pairwise import Choice, Meeting, Table, cover

TRIES = 24  # more of them save hardly a choice
FIXED: dict[str, Any] = {"fixed_slopes": "score"}

# The first value of an axis is one that hardly anything excludes: see `plainest`.
AXES: dict[str, dict[str, dict[str, Any]]] = {
    **pairwise.AXES,
    "dtype": {name: {"dtype": name, "score_dtype": name} for name in ("bf16", "fp16")},
    "lengths": {
        "equal": {"seqlen_q": 80, "seqlen_k": 80},
        "more-keys": {"seqlen_q": 70, "seqlen_k": 112},
        "more-queries": {"seqlen_q": 80, "seqlen_k": 48},
    },
    "dims": {
        "64": {"head_dim": 64},
        "128": {"head_dim": 128},
        "40-24": {"head_dim": 40, "head_dim_v": 24},
        "96": {"head_dim": 96},
        "192-128": {"head_dim": 192, "head_dim_v": 128},
        "256": {"head_dim": 256},
    },
    "mask": {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (33, 17)},
        "left": {"window": (40, None), "causal": True},
    },
    "score": {
        "none": {},
        "softcap": {"score": ("softcap",)},
        "softcap-bounded": {"score": ("alibi", "softcap50"), **FIXED},
        "alibi": {"score": ("alibi",), **FIXED},
        "alibi-per-batch": {"score": ("softcap30", "alibi-per-batch"), **FIXED},
        "bias": {"score": ("bias",), **FIXED},
        "bias-odd-keys": {"score": ("bias",), **FIXED},  # which the copy engine does not bring
        "bias-fp32": {"score": ("alibi", "bias"), "score_dtype": "fp32", **FIXED},
        "bias-heads": {"score": ("bias-heads", "softcap"), **FIXED},
        "bias-keys": {"score": ("alibi", "bias-keys"), **FIXED},
        "bias-plane": {"score": ("softcap", "bias-plane", "alibi"), **FIXED},
        "bias-number": {"score": ("bias-each-head",), **FIXED},
        "table": {"score": ("table",), **FIXED},
        "bias-gradient": {"score": ("bias",)},
        "bias-heads-gradient": {"score": ("bias-heads",)},
        "bias-plane-gradient": {"score": ("bias-plane",)},
    },
    "sink": {
        "none": {},
        **{dtype: {"sink": dtype, "fixed_sink": True} for dtype in ("fp32", "bf16")},
    },
    "where": {
        "anywhere": {},
        "document": {"mask": "document"},
        "prefix": {"mask": "prefix"},
        "holes": {"mask": "holes"},
        "holes-and-documents": {"mask": "holes-and-documents"},
        "table-blocks": {"mask": "table"},
        "strangers-blocks": {"mask": "strangers-blocks"},
        "wide-band-blocks": {"mask": "wide-band-blocks"},
    },
    "backward": {
        "fused": {"backward": "fused"},
        "deterministic": {"deterministic": True},
        "split": {"backward": "split"},
    },
    "upstream": {
        **{name: {"upstream": name} for name in ("both", "out", "lse")},
        "out-alone": {"upstream": "out", "returns_lse": False},
    },
}
ONE_QUERY = {"one-query": {"seqlen_q": 1, "seqlen_k": 48}}  # whose backward the portable kernels have
FORWARD = {
    **AXES,
    "lengths": {**AXES["lengths"], **ONE_QUERY},
    "backward": {"none": {"gradients": False}},
    "upstream": {"both": {}},
}

IMPOSSIBLE = frozenset(
    frozenset(pair)
    for pair in (
        *(  # packed tensors are of one shape
            (("layout", "packed"), (axis, name))
            for axis, fitting in (("lengths", ("equal",)), ("heads", ("mha",)), ("dims", ("64", "128", "96", "256")))
            for name in FORWARD[axis]
            if name not in fitting
        ),
        *((("where", "prefix"), ("mask", name)) for name in ("causal", "left")),  # whose keys beyond the diagonal are hidden
    )
)


@dataclass(frozen=True)
class HopperCase(Case):
    """`returns_lse`: the call returns lse. `gradients`: there is a backward."""

    returns_lse: bool = True
    gradients: bool = True


def problem_of(case: HopperCase) -> AttentionProblem:
    """What a case asks for."""
    place = torch.device("cpu")
    tensors = replace(case, layout="bshd").tensors(place)  # no problem says how its tensors lie
    for name, tensor in tensors.items():
        tensor.requires_grad_(wants_gradient(case, name))
    q, k, v = (tensors[n] if case.cu_q is None else tensors[n][None] for n in "qkv")
    given = given_lengths(**case.lengths(place))
    arguments = {**case.given(tensors), **case.masks(place)}
    asked = Arguments(**arguments, options=case.options("hopper"), return_lse=case.returns_lse)
    return make_problem(q, k, v, asked, given)[0]


def refusals(case: HopperCase) -> list[str]:
    """Why Hopper does not run a case."""
    hopper = dispatch.backend_named("hopper")
    return hopper.unsupported(problem_of(case), H100, case.backward if case.gradients else None)


def case_of(table: Table, name: str, choice: Choice, **sizes: int) -> HopperCase:
    case = table.case_of(name, choice, **sizes)
    assert isinstance(case, HopperCase)
    return case


def table_of(axes: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """The table whose choices Hopper may refuse; what it says of each is remembered."""
    known: dict[tuple[str, ...], list[str]] = {}

    def refused(choice: Choice) -> list[str]:
        key = tuple(choice.values())
        if key not in known:
            known[key] = refusals(case_of(table, "asked", choice))
        return known[key]

    table = Table(axes, IMPOSSIBLE, refused, HopperCase)  # `refused` asks it
    return table


BOTH, ALONE = table_of(AXES), table_of(FORWARD)


@dataclass(frozen=True)
class Covered:
    """Choices that cover every pair: with a backward, forwards alone; and pairs that none has, with Hopper's reasons."""

    both: list[Choice]
    alone: list[Choice]
    refused: dict[Meeting, str]
    refused_backward: dict[Meeting, str]  # of pairs that `alone` covers

    @property
    def choices(self) -> list[tuple[Table, Choice]]:
        return [*((BOTH, choice) for choice in self.both), *((ALONE, choice) for choice in self.alone)]


@cache
def covered(seed: int = 0) -> Covered:
    both, refused = cover(BOTH, BOTH.pairs(), seed, TRIES)
    forwards = {pair for pair in ALONE.pairs() if any(("lengths", name) in pair for name in ONE_QUERY)}
    alone, never = cover(ALONE, ALONE.pairs() & set(refused) | forwards, seed, TRIES)
    backward = {pair: reasons for pair, reasons in refused.items() if pair in ALONE.pairs() and pair not in never}
    return Covered(both, alone, {pair: reasons for pair, reasons in refused.items() if pair not in backward}, backward)


def cases(numbers: Iterable[int]) -> list[HopperCase]:
    """The cases of these numbers: the choices of `covered` again and again, with other lengths."""
    base = covered().choices
    return [draw(number, *base[number % len(base)]) for number in numbers]


def draw(number: int, table: Table, choice: Choice) -> HopperCase:
    """The case of a choice with lengths of this number."""
    name = f"features-{number}-" + "-".join(choice.values())
    return case_of(table, name, choice, **sizes(choice, random.Random(number)))


def sizes(choice: Choice, dice: random.Random) -> dict[str, int]:
    """Lengths of up to several tiles, and a batch. What decides about a kernel beside the choice hardly changes: no window is
    wider than all keys, a causal mask has two queries, and a fixed order, whose kernel knows the number of key tiles, four.
    Items have sixteen queries each, or more: Hopper refuses the backward of fewer. Compilers make use of multiples of 16 and of
    ones: half of the choices have lengths that are such multiples, the others none, and a third always has one item.
    """
    kind = random.Random("-".join(choice.values()))
    odd = choice["score"] == "bias-odd-keys"
    whole, alone = kind.random() < 0.5 and not odd, kind.random() < 1 / 3
    fewest = 64 if choice["items"].startswith("varlen") else 16
    least = max(48, fewest) if choice["mask"] in ("window", "left") else 2 * fewest
    spans = ((385, 496),) if choice["backward"] == "deterministic" else ((least, 128), (129, 700))
    keys, more = dice.randint(*dice.choice(spans)), dice.randint(1, 300)
    if whole:
        keys, more = keys + -keys % 16, more + -more % 16
    else:  # an odd number of queries, and of keys but where the copy engine brings or stores a bias, eight keys at a time
        keys += (8 - keys) % 16 if choice["score"].startswith("bias") and not odd else 1 - keys % 2
        more, fewest = more + (keys + more + 1) % 2, fewest + 1
    queries = {"equal": keys, "more-keys": max(keys - more, fewest), "more-queries": keys + more, "one-query": 1}
    return {"seqlen_q": queries[choice["lengths"]], "seqlen_k": keys, "batch": 1 if alone else dice.randint(2, 3)}


def results(case: HopperCase, tensors: Tensors) -> Tensors:
    """What Hopper makes of a case: out, lse where it is returned, and gradients where there are."""
    if not case.gradients:
        return forward(case, tensors, tensors["q"].device)
    if case.returns_lse:
        return run("hopper", case, tensors)
    return run_without_lse("hopper", case, tensors)
