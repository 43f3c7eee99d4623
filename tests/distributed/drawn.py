"""Calls that no list has: features drawn at random together, over ranks beside one process."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import flashtile
from flashtile import Alibi, Band, Bias, Dilated, Document, Dropout, KeyPadding, NotSupported, Prefix, Softcap, TopLeft
from flashtile.distributed import Context
from tests.distributed.cases import FEATURES, IDS, KEEP, SEQLEN, Case, Cut, Told, judge
from tests.distributed.volumes import in_groups

COUNTS = {2: 24, 4: 8}
MASKS: dict[str, Any] = {
    "documents": lambda t, cut: Document(cut(IDS, 0)), "padding": lambda t, cut: KeyPadding(cut(KEEP, 1)),
    "prefix or window": lambda t, cut: Prefix(t["prefix"]) | Band(left=6, right=0),
    "documents or padding": lambda t, cut: Document(cut(IDS, 0)) | KeyPadding(cut(KEEP, 1)),
    "top left": lambda t, cut: TopLeft(left=12), "dilated": lambda t, cut: Dilated(3),
}  # fmt: skip
SCORES: dict[str, Any] = {
    "softcap": lambda t, cut: Softcap(2.0), "alibi": lambda t, cut: Alibi(t["slopes"]),
    "bias": lambda t, cut: Bias(cut(t["bias"], 2)), "bias of keys": lambda t, cut: Bias(t["bias"][:, :, :1]),
}  # fmt: skip


def draw(dice: random.Random) -> tuple[str, Told]:
    """Features and their names."""
    band = dice.choice([{}, {"causal": True}, {"causal": True, "window": (9, 0)}, {"window": (5, 3)}, {"window": (3, 20)}])
    masks = dice.sample(list(MASKS), dice.choice([0, 0, 1, 1, 2]))
    scores = dice.sample(list(SCORES), dice.choice([0, 1, 1, 2]))
    sink, drops, used = dice.random() < 0.3, dice.random() < 0.4, dice.random() < 0.25
    drop = Dropout(dice.choice([0.1, 0.5, 0.7]), dice.randrange(-(2**40), 2**40))

    def told(t: dict[str, torch.Tensor], cut: Cut) -> dict[str, Any]:
        found: dict[str, Any] = dict(band)
        for i, name in enumerate(masks):
            mask = MASKS[name](t, cut)
            found["mask"] = found["mask"] & mask if i else mask
        found["score"] = tuple(SCORES[name](t, cut) for name in scores)
        return (
            found
            | ({"sink": t["sink"]} if sink else {})
            | ({"dropout": drop} if drops else {})
            | ({"seqused_q": t["used"], "seqused_k": t["used"]} if used else {})
        )

    return f"{band}, {masks}, {scores}, sink {sink}, {drop if drops else 'no dropout'}, used {used}", told


def drawn_calls_are_those_of_one_process(seed: int = 59) -> str:
    """What is wrong of so many calls, alike on all ranks; a refusal is right where every rank makes it."""
    ranks, wrong, ran = dist.get_world_size(), list[str](), 0
    for number in range(COUNTS[ranks]):
        dice = random.Random(f"{seed}-{number}-{ranks}")
        name, told = draw(dice)
        layout = dice.choice(["contiguous", "zigzag", "striped"])
        method = dice.choice(["auto", "ulysses", "ring"] if layout == "striped" else ["auto", "ulysses", "ring", "allgather"])
        lse, heads_kv, groups = dice.random() < 0.5, dice.choice([1, 2, 4, 8]), dice.choice([1, 2])
        seqlen_q = SEQLEN if "used True" in name or "documents" in name or dice.random() < 0.7 else SEQLEN // 2
        options = flashtile.Options(deterministic=True) if dice.random() < 0.2 else None
        case = Case(method, layout, f"drawn {number}: {name}", torch.float32, heads_kv, seqlen_q, lse, options)
        with patch.dict(FEATURES, {case.feature: told}), in_groups(groups):
            try:
                found = judge(case, Context(None, method, layout), number % ranks)
            except NotSupported:
                continue
        ran += 1
        if found:
            wrong.append(f"{case.spell()}: {found}")
    if ran < COUNTS[ranks] // 2:
        wrong.append(f"{ran} of {COUNTS[ranks]} calls ran; the others were refused")
    return "\n".join(wrong)
