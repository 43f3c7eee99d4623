"""Makes a case that fails as small and as plain as it can be."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.fuzz.case import Case
from flashtile.fuzz.check import Result

PLAIN = Case()
KEPT = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v", "dtype", "backend", "seed", "score")


def shrink(case: Case, result: Result, check: Callable[[Case], Result], seconds: float) -> tuple[Case, Result]:
    """(the smallest case found in so many seconds that fails in the same way, its result)."""
    ends, known = time.monotonic() + seconds, {case}
    again = True
    while again:
        again = False
        for simpler in candidates(case):
            if simpler in known:
                continue
            known.add(simpler)
            if time.monotonic() > ends:
                return case, result
            try:
                simpler.check()
            except InvalidProblem:
                continue
            found = check(simpler)
            if fails_alike(result, found):
                case, result, again = simpler, found, True
                break
    return case, result


def fails_alike(one: Result, other: Result) -> bool:
    """Whether both fail, as clearly, and some of the same results are wrong."""
    return other.status == one.status and bool(signature(one.text) & signature(other.text))


def signature(text: str) -> frozenset[str]:
    """What is wrong with which results, without numbers."""
    found = re.findall(r"\b(out|lse|dq|dk|dv|dsink|dscore)\b", text)
    raised = re.findall(r"it raised (\w+)", text)
    words = [name for name, word in (("guards", "words beside"), ("bits", "other bits")) if word in text]
    return frozenset([*found, *raised, *words])


def candidates(case: Case) -> Iterator[Case]:
    """Simpler cases, those first that leave most out."""
    for field in fields(Case):
        if (
            field.name not in KEPT
            and getattr(case, field.name) != field.default
            and getattr(case, field.name) == getattr(case, field.name)
        ):
            plain: dict[str, Any] = {field.name: field.default}
            if field.name == "used":
                plain["holes"] = False
            if field.name == "where":
                plain["blocks"] = ""
            yield replace(case, **plain)
    if case.upstream != "out":
        yield replace(case, upstream="out")
    if case.band not in (":", ":0"):
        yield replace(case, band=":0")
    modifiers = case.modifiers
    for i in range(len(modifiers)):
        yield replace(case, score="+".join((*modifiers[:i], *modifiers[i + 1 :])))
    for name in ("seqlen_q", "seqlen_k"):
        yield from _sizes(case, name)
    if case.seqlen_q == case.seqlen_k:
        yield from (replace(smaller, seqlen_q=smaller.seqlen_k) for smaller in _sizes(case, "seqlen_k"))
    yield from _sizes(case, "batch")
    for heads_q, heads_kv in ((1, 1), (2, 1), (2, 2), (case.heads_q // case.heads_kv, 1)):
        if heads_q * heads_kv < case.heads_q * case.heads_kv and heads_q % heads_kv == 0:
            yield replace(case, heads_q=heads_q, heads_kv=heads_kv)
    for head_dim in (16, 32, 64, 128):
        if 2 * head_dim < case.head_dim + case.head_dim_v:
            yield replace(case, head_dim=head_dim, head_dim_v=head_dim)
    if case.seed:
        yield replace(case, seed=0)


def _sizes(case: Case, name: str) -> Iterator[Case]:
    size = getattr(case, name)
    for smaller in dict.fromkeys((1, 16, 32, 64, 128, size // 2, size * 3 // 4, size - 16, size - 1)):
        if 0 < smaller < size:
            yield replace(case, **{name: smaller})
