"""Which tile a pass gets: the measured one where this architecture was tuned, otherwise the first rule that fits."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from flashtile import plan
from flashtile.errors import InvalidProblem
from flashtile.kernels.device.score import sums_per_head
from flashtile.kernels.portable.candidates import shared_bytes
from flashtile.kernels.portable.rules import CHANGES, LAST, ROOMY, TABLES, Asked
from flashtile.kernels.portable.tile import Launch, Pass, forms_captured, is_mended, padded, products
from flashtile.plan.backend import Gradients
from flashtile.plan.device import Device
from flashtile.plan.rules import Reason, apply_all
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.problem.options import Variant
from flashtile.problem.score import ScoreSpec
from flashtile.triton_glue import language as _triton

DELTA = Launch(128, 128, 8, 1)  # a memory-bound pass over whole padded rows
CONVERT = Launch(32, 128, 8, 1)  # another, from float32 to the type of dq
INTERPRETED = {
    "forward": Launch(16, 32),
    "keys": Launch(16, 32, held=2),
    "queries": Launch(32, 16, held=1),
    "fused": Launch(16, 32),
    "pairs": Launch(32, 32),
}


def family(problem: AttentionProblem, which: Pass) -> str:
    """The key under which a tile is tuned: what changes the code of a kernel or its balance, not the exact sizes.

    Behind the plain problem's stand modifiers, with those of the axes "qk" that a broadcast tensor has, "grad" where the pass
    sums up gradients of captured tensors beside dq, and "dropout".
    """
    features = [_named(spec) for spec in problem.score]
    features += ["grad"] * (which == "queries" and forms_captured(problem, which))
    features += ["dropout"] * (problem.dropout is not None)
    return "/".join([plain_family(problem, which), *features])


def _named(spec: ScoreSpec) -> str:
    pairs = zip(spec.kind.captured, spec.tensors, strict=True)
    axes = [axis for c, t in pairs if c.broadcast for axis, n in zip("qk", t.shape[2:], strict=True) if n != 1]
    return f"{spec.kind.name}:{''.join(axes)}" if axes else spec.kind.name


def plain_family(problem: AttentionProblem, which: Pass) -> str:
    """The key of the same problem without modifiers and dropout."""
    band = problem.band
    mask = {(False, False): "full", (False, True): "causal", (True, False): "left", (True, True): "window"}[
        (band.left is not None, band.right is not None)
    ]
    kind = problem.precision if problem.dtype is DType.FP32 else "16bit"
    columns, columns_v = padded(problem)
    return f"{which}/{kind}/{columns}x{columns_v}/{mask}"


FORCED: dict[Pass, Launch] = {}  # what `flashtile.fuzz` asks for in the place of every rule


@dataclass(frozen=True)
class Source:
    """Where a tile comes from that no table of the rules has."""

    because: str
    measured: str


TUNED = Source("such problems were tuned for this architecture", "by `flashtile tune`: plan/tuned, or `use_tuning`'s file")
SMALL = Source("Triton's interpreter runs it: short sequences still cross tile borders", "not on a GPU")
AS_ASKED = Source("it was asked for", "by the caller")


def choose(problem: AttentionProblem, device: Device, which: Pass) -> Launch:
    """The tile of a pass on a device; no larger than a block of the mask, where it has lists of them."""
    return choice(problem, device, which)[0]


def choice(problem: AttentionProblem, device: Device, which: Pass, watched: bool = False) -> tuple[Launch, tuple[Reason, ...]]:
    """The tile of a pass on a device, and the rules that fired. watched: it is a forward that keeps rows' statistics."""
    asked, fired = Asked(problem, device, which, products(problem, device, which), watched), list[Reason]()
    launch = apply_all(LAST, asked, _choose(asked, fired), fired)
    return launch, tuple(fired)


def _choose(asked: Asked, fired: list[Reason]) -> Launch:
    kind, forced = asked.products, FORCED.get(asked.which)
    if forced is not None:
        fired.append(AS_ASKED)
        return replace(forced, products=kind)
    if _triton.INTERPRETED:
        fired.append(SMALL)
        return replace(INTERPRETED[asked.which], products=kind)
    launch = measured(asked.problem, asked.device, asked.which)
    if launch is not None and kind in ("unit", "short"):  # no tile was tuned for other products
        fired.append(TUNED)
        return replace(launch, products=kind)
    table, tiles = next((table, tiles) for table in TABLES if (tiles := table.of(asked)))
    fired.append(table)
    if table.settled:
        return replace(tiles[0], products=kind)
    tiles = apply_all(CHANGES, asked, tiles, fired)
    for launch in (*(replace(tile, products=kind) for tile in tiles), *tiles):  # in parts if that fits at all
        if shared_bytes(asked.problem, launch, asked.which) <= asked.device.smem_bytes:
            return launch
    return tiles[-1]


def measured(problem: AttentionProblem, device: Device, which: Pass) -> Launch | None:
    """The tile that was tuned for such a problem; dropout takes the plain problem's if it has no own one and room there."""
    asked = Asked(problem, device, which, "unit")
    if problem.stored is not None:
        return None
    room = ROOMY.of(asked)
    if asked.scattered or (room and problem.where):
        return None
    if problem.where and which == "queries" and is_mended(problem):
        return None  # the dense problem's tile, walked twice, spills 1 KB a thread at head_dim 256
    if (problem.lengths.ragged or problem.exact_delta) and which == "keys" and asked.columns == 256:
        return None  # the plain problem's tile, of 4 warps, spills 540 bytes a thread where items differ in length, 590 else
    tuned = tiles_of(device.target)
    own = tuned.get(family(problem, which))
    return tuned.get(plain_family(problem, which)) if own is None and not problem.score and room is None else own


def choose_variant(problem: AttentionProblem, device: Device, gradients: Gradients) -> Variant:
    """The backward that "auto" means: fused for fp32 products in parts at head dims up to 64, else split.

    Measured on an H100 (2026-11-21). The fused pass saves two of seven products and pays for it in float32 atomics, of
    which the L2 cache takes about 1 TB/s whatever the tile. In bf16 that is the bottleneck: 16k tokens, full, 4.2 ms against
    3.3 for both split passes at head_dim 128, 4.5 against 3.6 at 64, 8.9 against 5.4 at 256. In fp32 the products cost six
    times as much and the atomics are hidden: 6 x 4096 causal, 12 heads of 64, 7.2 ms against 8.2. Where the pass over queries
    runs anyway, for sums per head or in float64, there is nothing to save.
    """
    if problem.deterministic or gradients.wanted < {"q", "k", "v"}:
        return "split"
    wide = max(problem.head_dim, problem.head_dim_v) > 64
    kind = products(problem, device, "fused")
    in_parts = (problem.precision == "tf32x3" and kind != "float64") or kind == "short"
    return "fused" if problem.dtype is DType.FP32 and in_parts and not wide and not sums_per_head(problem) else "split"


@cache
def tiles_of(target: str) -> dict[str, Launch]:
    """The measured tiles of an architecture: those shipped, overlaid by `use_tuning`."""
    shipped = files(plan) / "tuned" / f"{target}.json"
    return _read(json.loads(shipped.read_text())) if shipped.is_file() else {}


def use_tuning(path: str | Path) -> None:
    """Use the tiles of a file that `flashtile tune` wrote. Raises InvalidProblem.

    Problems that were planned before keep their tiles: call it first.
    """
    try:
        table = json.loads(Path(path).read_text())
        tiles, target = _read(table), str(table["target"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidProblem(f"tuning file {path} cannot be used: {error}.") from error
    tiles_of(target).update(tiles)


def _read(table: dict[str, Any]) -> dict[str, Launch]:
    names = ("block_q", "block_k", "num_warps", "num_stages", "swizzle")
    tiles = table["tiles"].items()
    return {key: Launch(*(int(entry[n]) for n in names), held=int(entry.get("held", 0))) for key, entry in tiles}
