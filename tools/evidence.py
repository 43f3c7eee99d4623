"""What has run on which device, read from benchmarks/results/*.csv: a feature has where a row of ours measured it."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flashtile import dispatch
from flashtile.plan.device import named
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.problem.options import Variant
from tests import relative_bias  # noqa: F401 (its modifier is in rows of pairs: to be read it has to be known)

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
SAME_CODE = {"sm90": ("H200",)}  # devices that run what is compiled for an architecture's named one
ONLY_VARIANT = {"hopper": "fused", "cpu": "split", "triton": ""}  # the backward of rows that name none


@dataclass(frozen=True)
class Evidence:
    """A direction of one problem, by one backend on one device, that was right when it was measured."""

    device: str
    backend: str
    direction: Direction
    traits: frozenset[str]


def traits(p: AttentionProblem, direction: Direction, variant: str = "") -> frozenset[str]:
    """What of a problem needs code of its own. A measured problem speaks for all whose traits it has."""
    dims = p.head_dim, p.head_dim_v
    found = {
        p.dtype.value: True,
        p.precision: p.dtype is DType.FP32,
        "causal": p.mask.right is not None,
        "window": p.mask.left is not None,
        "seqlen_q != seqlen_k": p.seqlen_q != p.seqlen_k,
        "grouped heads": p.group > 1,
        "odd head_dim": any(d % 8 for d in dims),
        "head_dim above 128": max(dims) > 128,
        "head_dim above 256": max(dims) > 256,
        "head_dim_v != head_dim": p.head_dim != p.head_dim_v,
        "sink": p.sink is not None,
        "dropout": p.dropout is not None,
        "varlen": p.lengths.varlen,
        "padding": p.lengths.ragged and not p.lengths.varlen,
        "predicates": bool(p.where),
        "blocks": p.blocks is not None,
        **{f"score {spec.kind.name}": True for spec in p.score},
    }
    if direction == "backward":
        found |= {
            "deterministic": p.deterministic,
            f"variant {variant}": variant not in ("", "auto"),
            "gradient of sink": p.sink is not None and p.sink.grad,
            **{f"gradient of {spec.kind.name}": any(t.grad for t in spec.tensors) for spec in p.score},
        }
    return frozenset(name for name, has in found.items() if has)


def read(folder: Path) -> Iterator[Evidence]:
    """The evidence of every result file in a folder."""
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                yield from of_row(row, path.stem)


def of_row(row: Mapping[str, str], source: str) -> Iterator[Evidence]:
    """What a row proves; `source` is the file's name, which says what the columns `direction` and `backend` do not.

    Rows of peers, of problems that are no attention, and of what was wrong, refused or not measured prove nothing.
    """
    spelling, provider, device = row.get("spelling") or row.get("problem", ""), row.get("provider", ""), row.get("device", "")
    named = row.get("backend") or (provider.split("/")[1] if provider.startswith("flashtile/") else "")
    if not named and not provider.startswith(("sdpa", "flex", "base/", "flash_attn")):
        named = next((backend for backend in ONLY_VARIANT if source.startswith(f"{backend}-")), "")
    failed = row.get("breach") or row.get("failure") or row.get("status", "ok") != "ok"
    if not spelling.startswith("attention(") or not device or named not in ONLY_VARIANT or failed:
        return
    problem = AttentionProblem.parse(spelling)
    variant = row.get("backward") or (provider.split("/")[2] if provider.count("/") > 1 else ONLY_VARIANT[named])
    told = [direction for direction in DIRECTIONS if direction in (row.get("direction") or source)]
    for direction in told or DIRECTIONS:
        also = {"deterministic"} if direction == "backward" and "deterministic" in provider else set[str]()
        yield Evidence(device, named, direction, traits(problem, direction, variant) | also)


def cell(problem: AttentionProblem, variant: Variant, target: str, proof: Sequence[Evidence]) -> str:
    """Which backends run a problem on an architecture, and whether each was seen to. Raises NotSupported."""
    device = named(target)
    places = (device.name, *SAME_CODE.get(target, ()))
    names = [dispatch.select(problem, device, None, way).name for way in (None, variant)]
    told = [
        "run on" if target == "cpu" or any(
            any(place in seen.device for place in places) and (seen.backend, seen.direction) == (name, direction)
            and seen.traits >= traits(problem, direction, variant) for seen in proof
        ) else "compiled for"
        for direction, name in zip(DIRECTIONS, names, strict=True)
    ]  # fmt: skip
    if told[0] != told[1]:
        return ", ".join(f"{way} {word} ({name})" for way, word, name in zip(DIRECTIONS, told, names, strict=True))
    return f"{told[0]} ({names[0] if names[0] == names[1] else f'{names[0]}, backward {names[1]}'})"
