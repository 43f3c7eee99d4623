"""What is wrong with a case's results on Hopper's kernels, whether a GPU or the emulator runs them."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.cases import Case, Tensors, holes, strangers
from tests.judge import breaches, expected, run, run_without_lse


def assess(case: Case, place: torch.device, backward: bool) -> list[str]:
    """Breaches of the accuracy rule, by out and lse alone or with all gradients; also beside NaN outside of the items."""
    tensors = case.tensors(place)
    truth, plain = expected(case, tensors)
    made = [tensors, soiled(case, tensors)] if case.lengths(place) or case.mask in ("holes", "strangers-blocks") else [tensors]
    results = [run("hopper", case, given) if backward else forward(case, given, place) for given in made]
    wrong = [
        f"{'beside NaN: ' * i}{breach}"
        for i, result in enumerate(results)
        for breach in breaches(case, result, {name: truth[name] for name in result}, plain)
    ]
    for name in ("out", "lse"):  # gradients are added up in any order
        if not torch.equal(results[0][name], results[-1][name]):
            wrong.append(f"{name} has other bits beside NaN")
    if backward and case.upstream == "out":
        alone = run_without_lse("hopper", case, tensors)
        wrong += [f"without lse: {breach}" for breach in breaches(case, alone, {name: truth[name] for name in alone}, plain)]
    return wrong


def forward(case: Case, tensors: Tensors, place: torch.device) -> Tensors:
    """out and lse."""
    how = {**case.given(tensors), **case.masks(place), **case.lengths(place), "return_lse": True}
    out, lse = case.function(
        *(tensors[name] for name in "qkv"), **how, options=replace(case, backward="auto").options("hopper")
    )
    return {"out": out, "lse": lse}


def soiled(case: Case, tensors: Tensors) -> Tensors:
    """The same tensors with NaN in every row that counts for no item, and in keys that a mask of holes hides."""
    made = {name: tensor.clone() for name, tensor in tensors.items()}
    if case.holes:
        for name, keep in case.lengths(made["q"].device).items():
            for part in ("q", "dout") if name == "seqused_q" else ("k", "v"):
                made[part][~keep] = torch.nan
            if name == "seqused_q":
                made["dlse"].transpose(1, 2)[~keep] = torch.nan
        return made
    if case.mask == "strangers-blocks":
        alone = strangers(case, made["k"].device)
        for name in ("q", "dout"):
            made[name][:, alone.queries < 0] = torch.nan
        made["dlse"][..., alone.queries < 0] = torch.nan
        for name in "kv":
            made[name][:, alone.keys < 0] = torch.nan
        return made
    if case.mask == "holes":
        hidden = ~holes(case, made["k"].device).keep
        made["k"][hidden] = made["v"][hidden] = torch.nan
    for names, span, cu, used in (
        (("q", "dout", "dlse"), case.seqlen_q, case.cu_q, case.used_q), (("k", "v"), case.seqlen_k, case.cu_k, case.used_k),
    ):  # fmt: skip
        for item in range(case.items):
            first, end = (0, span) if cu is None else cu[item : item + 2]
            end_used = end if used is None else first + used[item]
            for name in names:
                rows = made[name] if cu is not None else made[name][item]
                rows = rows.transpose(0, 1) if name == "dlse" else rows
                rows[end_used:end] = torch.nan
                if cu is not None:
                    rows[cu[-1] :] = torch.nan
    return made
