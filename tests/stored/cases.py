"""Cases of attention of 8 bits: those of tests/cases.py, with what is stored, and how it is scaled."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashtile import Options
from flashtile.reference.attention import attention_plain, attention_reference
from tests.cases import Case, Tensors

KINDS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
MOST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}


@dataclass(frozen=True)
class StoredCase:
    """A case whose k and v are stored as `kind`. k_scale, v_scale, q_scale: "", "all", "heads", "items" or "rows", by what has
    a scale of its own. fp8: q is stored too.
    """

    case: Case
    kind: str = "e4m3"
    k_scale: str = "items"
    v_scale: str = "items"
    q_scale: str = "items"
    fp8: bool = False

    @property
    def name(self) -> str:
        kind = "fp8" if self.fp8 else self.kind
        return "-".join((self.case.name, kind, *((self.q_scale,) if self.fp8 else ()), self.k_scale, self.v_scale))

    def tensors(self, device: torch.device) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Tensors]:
        """(q, k, v; their scales by name; everything else that the case has)."""
        made, generator = self.case.tensors(device), torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        three, scales = list[torch.Tensor](), dict[str, torch.Tensor]()
        for side, how in (("q", self.q_scale if self.fp8 else ""), ("k", self.k_scale), ("v", self.v_scale)):
            x = made[side]
            if side == "q" and not self.fp8:
                three.append(x)
                continue
            heads, kind = x.shape[-2], "e4m3" if self.fp8 else self.kind
            shape = {"": (), "all": (), "heads": (heads,), "items": (self.case.items, heads), "rows": x.shape[:-1]}[how]
            scale = torch.rand(shape, generator=generator).add(0.5).to(device)
            scale = scale * (4.0 / MOST["int8"] if kind == "int8" else 1.0) if how else scale
            if how:
                scales[f"{side}_scale"] = scale
            wide = x.float() * (MOST["int8"] / 4.0 if kind == "int8" else 1.0)
            wide = wide.clamp(-MOST[kind], MOST[kind])
            three.append((wide.round() if kind == "int8" else wide).to(KINDS[kind]))
        return three, scales, {n: t for n, t in made.items() if n not in ("q", "k", "v", "dout", "dlse")}

    def options(self, backend: str | None) -> Options:
        return Options(backend=backend, precision="fp8" if self.fp8 else "tf32x3")

    def call(self, function: Any, inputs: Any, scales: Any, others: Tensors, **extra: Any) -> Any:
        place = inputs[0].device
        given = {**self.case.given(others), **self.case.masks(place), **self.case.lengths(place), **scales}
        return function(*inputs, **given, **extra)

    def expected(self, device: torch.device) -> tuple[Tensors, Tensors]:
        """(the truth in float64, what plain PyTorch makes of the same numbers in 16 bits)."""
        inputs, scales, others = self.tensors(device)
        truth = self.call(attention_reference, [t.double() for t in inputs], scales, {n: t.double() for n, t in others.items()})
        dtype = torch.bfloat16 if self.fp8 else inputs[0].dtype
        plain = self.call(attention_plain, [t.to(dtype) for t in inputs], scales, others)
        return dict(zip(("out", "lse"), truth, strict=True)), dict(zip(("out", "lse"), plain, strict=True))


def _cases() -> Iterator[StoredCase]:
    base = Case("stored", batch=2, seqlen_q=40, seqlen_k=72, heads_q=4, heads_kv=2, head_dim=32, dtype="bf16", causal=True)
    for kind in KINDS:
        yield StoredCase(base, kind)
        yield StoredCase(base, kind, "rows", "rows")
    for k_scale, v_scale in (("", ""), ("all", "heads"), ("rows", "items"), ("", "rows")):
        yield StoredCase(replace(base, dtype="fp16", window=(20, 7), causal=False), "e4m3", k_scale, v_scale)
    uneven = replace(
        base, name="varlen", batch=1, seqlen_q=84, seqlen_k=101, cu_q=(0, 33, 33, 35, 80), cu_k=(0, 20, 37, 37, 101)
    )
    padded = replace(base, name="padded", batch=3, used_q=(40, 9, 17), used_k=(1, 0, 72))
    several = (
        uneven, replace(uneven, name="varlen-used", used_q=(33, 0, 1, 20), used_k=(3, 17, 0, 40), sink="fp32"), padded,
        replace(base, name="sink", sink="fp32", head_dim=64, head_dim_v=32),
        replace(base, name="softcap-alibi", score=("softcap", "alibi")),
        replace(base, name="mask", mask="holes-and-documents"), replace(base, name="blocks", mask="prefix-blocks"),
        replace(base, name="dropout", dropout=0.2), replace(base, name="gaps", layout="gaps", dtype="fp16"),
    )  # fmt: skip
    for case in several:
        yield StoredCase(case, "e4m3", "rows", "items")
        yield StoredCase(case, fp8=True)
    yield StoredCase(uneven, "e5m2", "items", "rows")
    yield StoredCase(padded, "int8", "rows", "rows")
    yield StoredCase(replace(base, name="bias", score=("bias",)), fp8=True, q_scale="rows", k_scale="rows", v_scale="heads")
    yield StoredCase(uneven, fp8=True, q_scale="rows", k_scale="rows")
    yield StoredCase(base, fp8=True, q_scale="", k_scale="all", v_scale="")
    yield StoredCase(base, fp8=True, v_scale="rows")  # which the portable kernels refuse
    yield StoredCase(replace(base, name="fp32", dtype="fp32"), "e4m3")  # likewise


CASES = tuple(_cases())
