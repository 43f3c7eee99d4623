"""What has run on which device, read from benchmarks/results/*.csv: a feature has where a row of ours measured it."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flashtile import dispatch
from flashtile.plan.device import named
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import CachedProblem, Pages
from flashtile.problem.dtype import DType
from flashtile.problem.options import Variant
from tests import relative_bias  # noqa: F401 (its modifier is in rows of pairs: to be read it has to be known)

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
SAME_CODE = {"sm90": ("H200",)}  # devices that run what is compiled for an architecture's named one
CACHED = re.compile(r"cached\((attention\(.*\)),pages=(\d+)x(\d+)x(\d+)(?:,split=(\d+))?\)")
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
        "stored": p.stored is not None,
        "fp8 products": p.stored is not None and p.stored.queries is not None,
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


def problem_of(spelling: str) -> AttentionProblem | CachedProblem:
    """What a spelling says; of a cache, one with a table of pages."""
    if found := CACHED.fullmatch(spelling):
        inner, *pages, split = found.groups()
        return CachedProblem(AttentionProblem.parse(inner), Pages(*map(int, pages)), int(split or 0))
    return AttentionProblem.parse(spelling)


def of_pages(row: Mapping[str, str]) -> str:
    """How a row of benchmarks/cached.py is spelled; "" where its keys lie in no pages."""
    page = row["provider"].rpartition("/")[2]
    if not page.isdigit():
        return ""
    sizes = ("batch", "queries", "keys", "heads_q", "heads_kv", "head_dim")
    batch, queries, keys, heads_q, heads_kv, dim = (int(row[name]) for name in sizes)
    band = f",band={int(row['window']) - 1}:0" if row.get("window") else ""
    inner = f"attention(q={batch}x{queries}x{heads_q}x{dim},kv={keys}x{heads_kv}x{dim},bf16{band},used=k)"
    return f"cached({inner},pages={batch * keys // int(page)}x{page}x{keys // int(page)})"


def read(folder: Path) -> Iterator[Evidence]:
    """The evidence of every result file in a folder."""
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                yield from of_row(row, path.stem)


def cache_backend(source: str, provider: str) -> str:
    """Whose kernels a row of benchmarks/cached.py or padded.py measured; `source` is the file's name."""
    return "hopper" if source.startswith(("cached-hopper", "padded")) and " triton" not in provider else "triton"


# From when on a long call of benchmarks/derivatives.py has gone to a pass of Hopper's own, and before to the portable one.
HOPPER_SINCE = {"tangent": "2026-11-30T03:50:32", "double backward": "2026-11-30T07:03:46", "forward with max_logit": ""}


def has_passed(folder: Path, name: str, target: str, backend: str) -> bool:
    """Whether benchmarks/derivatives.py found the backend's pass right on that architecture, and took its time."""
    measured = {
        "tangent": "tangent", "second": "double backward", "statistics": "max_logit", "watched": "forward with max_logit",
    }  # fmt: skip
    what, places = measured.get(name), (named(target).name, *SAME_CODE.get(target, ()))
    for path in folder.glob("derivatives-*.csv"):
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["what"] == what and row["ms"]]
        for row in rows:
            hopper = row["date"] >= HOPPER_SINCE.get(row["what"], "3")
            if any(place in row["device"] for place in places) and backend == ("hopper" if hopper else "triton"):
                return True
    return False


def of_row(row: Mapping[str, str], source: str) -> Iterator[Evidence]:
    """What a row proves; `source` is the file's name, which says what the columns `direction` and `backend` do not.

    Rows of peers, of problems that are no attention, and of what was wrong, refused or not measured prove nothing.
    """
    spelling, provider, device = row.get("spelling") or row.get("problem", ""), row.get("provider", ""), row.get("device", "")
    if source.startswith("cached-") and provider.startswith("flashtile/"):
        spelling, provider = of_pages(row), f"flashtile/{cache_backend(source, provider)}"
    named = row.get("backend") or (provider.split("/")[1] if provider.startswith("flashtile/") else "")
    if not named and not provider.startswith(("sdpa", "flex", "base/", "flash_attn")):
        named = next((backend for backend in ONLY_VARIANT if source.startswith(f"{backend}-")), "")
    failed = row.get("breach") or row.get("failure") or row.get("status", "ok") != "ok"
    cached = CACHED.fullmatch(spelling)
    if not (cached or spelling.startswith("attention(")) or not device or named not in ONLY_VARIANT or failed:
        return
    if cached:
        yield Evidence(device, named, "forward", traits(AttentionProblem.parse(cached[1]), "forward") | {"cached"})
        return
    problem = AttentionProblem.parse(spelling)
    variant = row.get("backward") or (provider.split("/")[2] if provider.count("/") > 1 else ONLY_VARIANT[named])
    told = [direction for direction in DIRECTIONS if direction in (row.get("direction") or source)]
    for direction in told or DIRECTIONS:
        also = {"deterministic"} if direction == "backward" and "deterministic" in provider else set[str]()
        yield Evidence(device, named, direction, traits(problem, direction, variant) | also)


def cell(spelling: str, variant: Variant, target: str, proof: Sequence[Evidence]) -> str:
    """Which backends run a problem on an architecture, and whether each was seen to. Raises NotSupported."""
    device, problem = named(target), problem_of(spelling)

    def told(name: str, direction: Direction, needed: frozenset[str]) -> str:
        places = (device.name, *SAME_CODE.get(target, ()))
        seen = any(
            any(place in row.device for place in places) and (row.backend, row.direction) == (name, direction)
            and row.traits >= needed for row in proof
        )  # fmt: skip
        return "run on" if target == "cpu" or seen else "compiled for"

    if isinstance(problem, CachedProblem):
        name = dispatch.plan_cached(problem, device).backend
        return f"{told(name, 'forward', traits(problem.attention, 'forward') | {'cached'})} ({name})"
    if problem.stored is not None:  # a forward alone: gradients are those of a call without 8 bits
        name = dispatch.select(problem, device, None, None).name
        return f"forward {told(name, 'forward', traits(problem, 'forward'))} ({name})"
    names = [dispatch.select(problem, device, None, way).name for way in (None, variant)]
    words = [told(name, way, traits(problem, way, variant)) for way, name in zip(DIRECTIONS, names, strict=True)]
    if words[0] != words[1]:
        return ", ".join(f"{way} {word} ({name})" for way, word, name in zip(DIRECTIONS, words, names, strict=True))
    return f"{words[0]} ({names[0] if names[0] == names[1] else f'{names[0]}, backward {names[1]}'})"
