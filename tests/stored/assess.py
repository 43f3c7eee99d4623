"""How far attention of e4m3 on Hopper's kernels is off, whether a GPU or the emulator runs them."""

from __future__ import annotations

from typing import Any

import torch

from tests.cases import Case
from tests.judge import breaches
from tests.stored.cases import StoredCase

# Relative RMS of out: what three bits of the probabilities cost; of lse the largest error: sums have 13 bits.
LIMITS = {"out": 2.8e-2, "lse": 2e-3, "padding": 0.0, "breaches": 0.0}
VARLEN: dict[str, Any] = dict(batch=1, seqlen_q=290, seqlen_k=420, cu_q=(0, 70, 70, 75, 280), cu_k=(0, 130, 150, 150, 411))

# 16-bit products, of so many query rows that keys and values are converted first.
WIDENED: dict[str, Any] = dict(fp8=False, batch=2, seqlen_q=290, heads_q=8, heads_kv=1)


def told(name: str, head_dim: int, stored: dict[str, Any] | None = None, launch: dict[str, Any] | None = None,
         **fields: Any) -> dict[str, Any]:  # fmt: skip
    """A case as data: fields of a `Case`, of its `StoredCase`, and of the tile that is not the chosen one.

    Products are of e4m3, unless the fields name WIDENED.
    """
    fp8 = fields.pop("fp8", True)
    sizes = dict(batch=1, seqlen_q=200, seqlen_k=333, heads_q=2, heads_kv=1, dtype="bf16")
    return {
        "case": {**sizes, "name": name, "head_dim": head_dim, **fields},
        "stored": {**(stored or {}), "fp8": fp8},
        "launch": launch or {},
    }


GROUPS = {
    "narrow": (
        told("full", 64),
        told("causal", 64, causal=True, batch=2, seqlen_q=300, seqlen_k=200),
        told("window", 64, window=(100, 30), seqlen_q=300),
        told("before", 64, causal=True, window=(40, 0), seqlen_q=130, seqlen_k=400),
        told("sink", 64, sink="fp32", causal=True, stored=dict(k_scale="heads", q_scale="all", v_scale="")),
        told("softcap", 64, score=("softcap",), causal=True),
        told("columns", 16, causal=True, dtype="fp16", stored=dict(q_scale="", k_scale="", v_scale="")),
        told("padded", 64, batch=3, seqlen_q=140, seqlen_k=300, used_q=(140, 9, 17), used_k=(1, 0, 272), causal=True),
        told("two", 64, launch=dict(groups=2, resident=False), window=(70, 0)),
    ),
    "middle": (
        told("full", 128, heads_q=4, heads_kv=2),
        told("causal", 128, causal=True),
        told("window", 128, window=(150, 0), seqlen_q=333),
        told("varlen", 128, **VARLEN, causal=True),
        told("varlen-used", 128, **VARLEN, used_q=(33, 0, 1, 205), used_k=(3, 17, 0, 240), sink="fp32"),
        told("columns", 96, head_dim_v=80, causal=True),
        told("alibi", 128, score=("softcap", "alibi")),
        told("keys", 128, score=("alibi",), causal=True),
        told("long", 128, seqlen_q=64, seqlen_k=2000),
    ),
    "wide": (
        told("full", 256, seqlen_q=130),
        told("causal", 256, causal=True),
        told("varlen", 192, **VARLEN, head_dim_v=208),
        told("values", 64, head_dim_v=256, causal=True, seqlen_q=130),
        told("varlen-window", 256, **VARLEN, window=(60, 0)),
    ),
    "stored": (
        told("e4m3", 128, causal=True, **WIDENED, stored=dict(k_scale="items", v_scale="heads")),
        told("e5m2", 64, **{**WIDENED, "dtype": "fp16"}, stored=dict(kind="e5m2", k_scale="", v_scale="all")),
        told("int8", 96, **WIDENED, window=(90, 0), stored=dict(kind="int8", v_scale="rows")),
        told("varlen", 64, **{**VARLEN, **WIDENED, "batch": 1}, used_k=(3, 17, 0, 240), stored=dict(v_scale="rows")),
        told("softcap", 128, score=("softcap", "alibi"), **WIDENED, sink="fp32"),
    ),
}  # fmt: skip


def assess(case: dict[str, Any], place: torch.device) -> dict[str, float]:
    """{"out": relative RMS beside float64, "lse": largest error, "padding": infinity where NaN in padding shows}."""
    fields = {name: tuple(x) if isinstance(x, list) else x for name, x in case["case"].items()}
    made = StoredCase(Case(**fields), **case["stored"])
    inputs, scales, others = made.tensors(place)
    how: dict[str, Any] = dict(return_lse=True, options=made.options("hopper"))
    out, lse = made.call(made.case.function, inputs, scales, others, **how)
    truth, plain = made.expected(place)
    if not made.fp8:
        rule = Case("stored", dtype=made.case.dtype)
        return {"breaches": len(list(breaches(rule, {"out": out, "lse": lse}, truth, plain)))}
    found = {"out": error(out.double(), truth["out"]), "lse": farthest(lse.double(), truth["lse"])}
    hidden = unseen_keys(made.case)
    if hidden:
        for tensor in inputs[1:]:
            for rows in hidden:
                tensor.view(torch.uint8)[rows] = 0x7F  # NaN
        again = made.call(made.case.function, inputs, scales, others, **how)
        found["padding"] = 0.0 if torch.equal(again[0], out) and torch.equal(again[1], lse) else float("inf")
    return found


def excesses(found: dict[str, float]) -> list[str]:
    """What is above its limit."""
    return [f"{name} {found[name]:.2e} > {LIMITS[name]}" for name in found if not found[name] <= LIMITS[name]]


def unseen_keys(case: Case) -> list[Any]:
    """Places in the keys that no query sees."""
    if case.used_k is not None:
        firsts = case.cu_k[:-1] if case.cu_k is not None else [0] * len(case.used_k)
        ends = case.cu_k[1:] if case.cu_k is not None else [case.seqlen_k] * len(case.used_k)
        return [
            slice(first + used, end) if case.cu_k is not None else (i, slice(used, None))
            for i, (first, used, end) in enumerate(zip(firsts, case.used_k, ends, strict=True))
        ]
    if case.causal and case.seqlen_q < case.seqlen_k and case.window is not None:
        return [(slice(None), slice(0, max(case.seqlen_k - case.seqlen_q - case.window[0], 0)))]
    return []


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative RMS; infinity where it is no number."""
    off = (found - exact).norm() / exact.norm().clamp(min=1e-30)
    return float(off.nan_to_num(nan=float("inf")))


def farthest(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error; infinity unless the same rows saw nothing."""
    blind = exact == -torch.inf
    if not torch.equal(found == -torch.inf, blind):
        return float("inf")
    return float((found - exact)[~blind].abs().amax().nan_to_num(nan=float("inf"))) if not blind.all() else 0.0
