"""Calls of 8 bits drawn at random, on every backend that runs them: against float64, and the same with NaN in padding."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import flashtile
from flashtile import dispatch
from flashtile.torch.execute.bound import device_of
from tests.cases import MODIFIERS, Case
from tests.judge import breaches
from tests.stored.cases import KINDS, StoredCase
from tests.stored.test_stored import FP8_ERROR, problem_of

DRAWN = 24
MASKS = ("document", "holes", "prefix", "dilated", "holes-blocks", "stored")
SCORES = ("softcap30", "alibi", "bias-heads", "bias-keys", "softcap+alibi")


def drawn(number: int) -> StoredCase:
    dice = random.Random(number)
    heads_kv = dice.choice((1, 2))
    sizes: dict[str, Any] = dict(
        heads_q=heads_kv * dice.choice((1, 2, 3)), heads_kv=heads_kv, head_dim=dice.choice((16, 24, 64)), batch=2,
        seqlen_q=dice.randint(1, 60), seqlen_k=dice.randint(1, 90), dtype=dice.choice(("fp16", "bf16")),
    )  # fmt: skip
    how: dict[str, Any] = dict(causal=dice.random() < 0.4, sink=dice.choice((None, None, "fp32")))
    how["dropout"] = dice.choice((None, None, 0.2))
    kind = dice.choice(("plain", "mask", "varlen", "used"))
    if kind == "mask":
        how["mask"] = dice.choice(MASKS)
    elif kind == "varlen":
        q, k = sorted(dice.sample(range(1, 90), 2)), sorted(dice.sample(range(1, 120), 2))
        sizes |= dict(batch=1, seqlen_q=q[1] + 3, seqlen_k=k[1] + 5)
        how |= dict(cu_q=(0, q[0], q[0], q[1]), cu_k=(0, k[0], k[0] + 1, k[1]))
    elif kind == "used":
        how["used_k"] = tuple(dice.randint(0, sizes["seqlen_k"]) for _ in range(2))
    score = dice.choice((None, None, *SCORES))
    if score is not None and not (kind in ("varlen", "used") and score.startswith("bias")):
        how["score"] = tuple(score.split("+"))
    if not how.get("mask") and dice.random() < 0.3:
        how["window"] = (dice.randint(0, 40), dice.randint(0, 20))
    fp8 = dice.random() < 0.4
    scales = {f"{side}_scale": dice.choice(("", "all", "heads", "items", "rows")) for side in "qkv"}
    if fp8 and scales["v_scale"] == "rows":
        scales["v_scale"] = "items"
    return StoredCase(Case(f"drawn{number}", **sizes, **how), dice.choice(list(KINDS)), **scales, fp8=fp8)


@pytest.mark.parametrize("number", range(DRAWN))
def test_drawn(place: torch.device, number: int) -> None:
    case = drawn(number)
    assert set(case.case.score) <= MODIFIERS.keys()
    truth, plain = case.expected(place)
    inputs, scales, others = case.tensors(place)
    for backend in dispatch.BACKENDS:
        if backend.unsupported(problem_of(case, place), device_of(place)):
            continue
        options = case.options(backend.name)
        out, lse = case.call(case.case.function, inputs, scales, others, return_lse=True, options=options)
        if case.fp8 and backend.name != "cpu":
            assert (out.double() - truth["out"]).norm() <= FP8_ERROR * truth["out"].norm() + 1e-30, case
        else:
            judged = Case("stored", dtype="bf16" if case.fp8 else case.case.dtype)
            found = list(breaches(judged, {"out": out, "lse": lse}, truth, plain))
            assert not found, (case, backend.name, found)
        if case.case.used_k is not None:
            dirty = [t.clone() for t in inputs]
            for i, used in enumerate(case.case.used_k):
                for tensor in dirty[1:]:
                    tensor.view(torch.uint8)[i, used:] = 0x7F  # e4m3's and e5m2's NaN
            noisy = {n: s.clone() for n, s in scales.items()}
            for name in ("k_scale", "v_scale"):
                if name in noisy and noisy[name].dim() == 3:
                    for i, used in enumerate(case.case.used_k):
                        noisy[name][i, used:] = float("nan")
            again = case.call(case.case.function, dirty, noisy, others, return_lse=True, options=options)
            assert torch.equal(again[0], out), (case, backend.name)
            assert torch.equal(again[1], lse), (case, backend.name)


def test_every_kind_is_drawn() -> None:
    cases = [drawn(number) for number in range(DRAWN)]
    assert {c.kind for c in cases if not c.fp8} == KINDS.keys()
    assert {c.fp8 for c in cases} == {False, True}
    assert any(c.case.used_k for c in cases)
    assert any(c.case.cu_q for c in cases)
    assert isinstance(cases[0].case.function, type(flashtile.attention))
