"""Which tile a pass gets: the measured one where this architecture was tuned, otherwise the first rule that fits."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from flashtile import plan
from flashtile.errors import InvalidProblem
from flashtile.kernels.device.score import score_bytes, sums_per_head
from flashtile.kernels.portable.candidates import shared_bytes
from flashtile.kernels.portable.tile import (
    WHOLE_FRAGMENT,
    Launch,
    Pass,
    forms_captured,
    is_mended,
    padded,
    products,
    reads_bytes_and_joins,
)
from flashtile.plan.backend import Gradients
from flashtile.plan.device import Device
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

# Tiles in order of preference, by pass and by the wider head dim of the tile. The first whose shared memory fits is
# taken. The leading entries won on an H100 (docs/lab/tuning.md); the later ones are for devices with 99 KiB and 64 KiB.
SIXTEEN_BIT: dict[Pass, dict[int, tuple[Launch, ...]]] = {
    "forward": {
        64: (Launch(128, 64, 4, 3, 8), Launch(64, 64, 4, 2, 8)),
        128: (Launch(128, 128, 8, 3, 8), Launch(64, 64, 4, 3, 8), Launch(64, 32, 4, 2, 8), Launch(64, 32, 4, 1, 8)),
        256: (Launch(128, 64, 8, 2, 8), Launch(64, 32, 4, 2, 8), Launch(64, 32, 8, 1, 8), Launch(32, 32, 4, 1, 8)),
        512: (Launch(32, 64, 8, 1, 8), Launch(32, 32, 8, 1, 8), Launch(16, 16, 4, 1, 8)),
    },
    "keys": {
        64: (Launch(32, 128, 4, 3, 8), Launch(32, 64, 4, 2, 8), Launch(32, 32, 4, 2, 8)),
        128: (Launch(32, 64, 4, 3, 8), Launch(32, 64, 4, 2, 8), Launch(16, 64, 4, 1, 8)),
        256: (Launch(64, 32, 8, 2, 8), Launch(32, 32, 4, 1, 8), Launch(16, 32, 4, 1, 8)),  # 4 warps spill 1 KB under a window
        512: (Launch(16, 32, 8, 1, 8), Launch(16, 16, 8, 1, 8)),
    },
    "queries": {
        64: (Launch(128, 64, 4, 3, 8), Launch(64, 64, 4, 2, 8), Launch(64, 32, 4, 2, 8)),
        128: (Launch(128, 64, 8, 3, 1), Launch(64, 32, 4, 2, 8), Launch(64, 16, 4, 1, 8)),
        256: (Launch(128, 32, 8, 3, 8), Launch(32, 32, 4, 1, 8), Launch(32, 16, 4, 1, 8)),
        512: (Launch(32, 32, 8, 1, 8), Launch(32, 16, 8, 1, 8), Launch(16, 16, 4, 1, 8)),
    },
    "fused": {
        64: (Launch(64, 64, 4, 3, 8), Launch(32, 64, 4, 2, 8)),
        128: (Launch(32, 128, 8, 3, 8), Launch(32, 64, 4, 1, 8), Launch(16, 64, 4, 1, 8)),
        256: (Launch(64, 32, 8, 1, 8), Launch(32, 32, 8, 1, 8), Launch(16, 32, 4, 1, 8)),  # 4 warps spill 1.2 KB under a bias
        512: (Launch(16, 32, 8, 1, 8), Launch(16, 16, 8, 1, 8)),
    },
    "pairs": {
        64: (Launch(128, 64, 4, 2), Launch(64, 64, 4, 2), Launch(64, 64, 4, 1)),
        128: (Launch(128, 64, 8, 2), Launch(64, 64, 4, 2), Launch(64, 32, 4, 1)),
        256: (Launch(64, 64, 8, 1), Launch(64, 32, 4, 1), Launch(32, 16, 4, 1)),
        512: (Launch(32, 32, 4, 1), Launch(32, 16, 4, 1), Launch(16, 16, 4, 1)),
    },
}
FP32: dict[Pass, dict[int, tuple[Launch, ...]]] = {
    "forward": {
        64: (Launch(64, 64, 4, 1, 8), Launch(64, 32, 4, 1, 8), Launch(32, 32, 4, 1, 8)),
        128: (Launch(64, 32, 4, 1, 8), Launch(32, 32, 4, 1, 8)),
        256: (Launch(32, 32, 4, 1, 8), Launch(16, 16, 4, 1, 8)),
    },
    "keys": {
        64: (Launch(32, 64, 4, 1, 8), Launch(32, 32, 4, 1, 8)),
        128: (Launch(32, 64, 8, 1, 8), Launch(32, 32, 8, 1, 8), Launch(16, 16, 4, 1, 8)),
        256: (Launch(16, 16, 4, 1, 8),),
    },
    "queries": {
        64: (Launch(64, 64, 4, 1, 8), Launch(32, 32, 4, 1, 8)),
        128: (Launch(128, 32, 8, 1, 8), Launch(64, 32, 4, 1, 8), Launch(32, 32, 4, 1, 8), Launch(16, 16, 4, 1, 8)),
        256: (Launch(16, 16, 4, 1, 8),),
    },
    "fused": {
        64: (Launch(32, 64, 4, 1, 8), Launch(32, 32, 4, 1, 8)),
        128: (Launch(32, 32, 8, 1, 8), Launch(16, 16, 4, 1, 8)),
        256: (Launch(16, 16, 4, 1, 8),),
    },
    "pairs": {
        64: (Launch(64, 32, 4, 1), Launch(32, 32, 4, 1), Launch(16, 16, 4, 1)),
        128: (Launch(32, 32, 4, 1), Launch(16, 16, 4, 1)),
        256: (Launch(16, 16, 4, 1),),
    },
}
# Products of own parts hold two sums at once: 32 x 64 would spill 3 KB in the pass over keys, and take 7.0 ms, not 6.3.
PARTS: dict[tuple[Pass, int], tuple[Launch, ...]] = {
    ("keys", 128): (Launch(32, 32, 8, 1, 8), Launch(16, 16, 4, 1, 8)),
    ("queries", 128): (Launch(64, 32, 4, 1, 8), Launch(32, 32, 4, 1, 8), Launch(16, 16, 4, 1, 8)),
}
# tf32 in two parts leaves room for wider tiles: by spills and instructions per score (H100, Triton 3.6.0), not timed. At
# head_dim 64 those of other fp32 products are faster (docs/lab/tuning.md).
SHORT: dict[tuple[Pass, int], tuple[Launch, ...]] = {
    ("forward", 128): (Launch(128, 32, 8, 1, 8), Launch(64, 32, 4, 1, 8)),
    ("keys", 64): (Launch(32, 128, 8, 1, 8), Launch(32, 64, 4, 1, 8)),
    ("keys", 128): (Launch(32, 128, 8, 1, 8), Launch(16, 128, 8, 1, 8)),
    ("queries", 64): (Launch(128, 32, 8, 1, 8), Launch(64, 32, 4, 1, 8)),
}
OWN_TILES = {"cut": PARTS, "aligned": PARTS, "short": SHORT}
# Small problems: many small tiles, so that all of a GPU has work. 128 KB of shared memory at most.
FLOAT64 = {64: Launch(32, 32, 4, 1), 128: Launch(32, 32, 8, 1), 256: Launch(16, 16, 4, 1)}
# Without tensor cores ("ieee") every product is unrolled into scalar multiply-adds: only small tiles compile in time.
IEEE: dict[int, tuple[Launch, ...]] = {
    64: (Launch(32, 32, 4, 1, 8),),
    128: (Launch(32, 32, 8, 1, 8), Launch(16, 16, 4, 1, 8)),
    256: (Launch(16, 16, 8, 1, 8),),
}
# Its correction of delta beside them: 32 x 32 of 128 columns would spill 11 KB on sm90. Of 256, one stage spills 1 to 4.5 KB
# on NVIDIA (8.5 with modifiers and dropout), two none (1.1, and 2.3 with lists of blocks); Triton 3.6.0, not timed.
IEEE_QUERIES = {128: (Launch(16, 16, 4, 1, 8),), 256: (Launch(16, 16, 8, 2, 8),)}


# 16-bit problems with modifiers on an H100 (2026-11-21, 2 x 4096, 16 heads, full and causal; docs/lab/tuning.md).
SCORED: dict[tuple[Pass, int], Launch] = {
    ("keys", 128): Launch(32, 64, 4, 3, 8, held=1),
    ("queries", 128): Launch(64, 64, 4, 3, 8, held=1),
}
# With tensors that broadcast: what an element for every query or key asks for, and one for every score, which is a third
# stream of tiles in shared memory.
LINED: dict[tuple[Pass, int], Launch] = {
    ("forward", 128): Launch(64, 64, 4, 2, 8),
    ("pairs", 128): Launch(64, 64, 4, 2),
}
BIASED: dict[tuple[Pass, int], Launch] = {
    ("forward", 128): Launch(128, 64, 8, 3, 8),
    ("keys", 128): Launch(32, 64, 4, 2, 8),
    ("queries", 128): Launch(64, 32, 4, 3, 8, held=1),
    ("pairs", 128): Launch(64, 128, 8, 2),
}

# With predicates, whose answers wait in registers beside dk and dv, and of 256 columns with dropout, whose words do: by spills
# (840 bytes a thread at most, with a bias, a sink and dropout besides; 4,232 in the dense problem's tile), not timed.
ROOMY: dict[tuple[Pass, int], Launch] = {
    ("keys", 64): Launch(32, 128, 8, 3, 8),
    ("keys", 128): Launch(64, 32, 8, 3, 8),
    ("keys", 256): Launch(64, 32, 8, 2, 8),
    ("fused", 64): Launch(32, 128, 8, 2, 8),
    ("fused", 128): Launch(64, 32, 8, 2, 8),
    ("fused", 256): Launch(32, 32, 8, 2, 8),
}

# The pass over queries of small problems, which walks the keys twice: by spills (sm90, Triton 3.6.0: with modifiers and
# predicates 1.6 KB a thread in 64 x 64 of 64 columns, 4.1 KB in 32 x 32 of 512, here 0.3 at most), not timed. Scattered rows
# take 32 queries: with 64 Triton 3.9.0 spills 1.1 KB. With 64 x 16 dq is wrong on a GPU where lists of 32 keys are walked, and
# right in the interpreter (Triton 3.6.0).
TWICE: dict[int, Launch] = {64: Launch(64, 32, 4, 2, 8), 256: Launch(32, 16, 4, 1, 8), 512: Launch(16, 32, 8, 1, 8)}

# Rows that are no multiple of 16 elements apart (4 x 4096, 32 heads of 40, causal, H100): 128 x 64 takes 1.41 ms, and spills
# 0.7 KB in 4 warps, 64 x 64 takes 1.90. The backward's later rules: 4.5 ms for both passes, 6.4 in the dense problem's tiles.
SCATTERED: dict[tuple[Pass, int], Launch] = {("forward", 64): Launch(128, 64, 8, 3, 8)}

# Keys wider than values: by spills (none; 700 bytes a thread in the tile of equal head dims), not timed.
UNEQUAL: dict[tuple[Pass, int], Launch] = {("fused", 256): Launch(32, 32, 8, 2, 8)}


# Where matrix instructions take all operands from registers (sm80, sm86, sm120), before the rules above: by spills, not timed
# (docs/lab/tuning.md). With 64 x 32 the pass over queries would not fit into sm86's shared memory either.
SYNCHRONOUS: dict[tuple[str, Pass, int], tuple[Launch, ...]] = {
    ("16bit", "forward", 256): (Launch(64, 64, 8, 2, 8), Launch(64, 32, 8, 2, 8)),
    ("ragged", "forward", 256): (Launch(64, 64, 8, 2, 8), Launch(64, 32, 8, 2, 8)),
    ("16bit", "fused", 256): (Launch(32, 32, 8, 1, 8),),
    ("ragged", "fused", 256): (Launch(32, 32, 8, 1, 8),),
    ("ragged", "fused", 64): (Launch(64, 64, 4, 2, 8),),  # under Triton 3.9.0 three stages spill 568 bytes, two 500
    ("tf32x3", "queries", 128): (Launch(32, 32, 4, 1, 8),),
    ("tf32", "fused", 256): (Launch(16, 16, 8, 1, 8),),
    ("scattered", "queries", 64): (Launch(64, 32, 4, 2, 8),),
    ("predicates", "fused", 64): (Launch(32, 64, 8, 2, 8),),
}


# Those of CDNA, in the place of the rules above (gfx942, Triton 3.6.0, by spills, none here): 32 x 32 under 8 warps spills 2.4
# to 3.1 KB a thread, 16 x 16 under 8 524 bytes.
CDNA: dict[tuple[str, Pass, int], tuple[Launch, ...]] = {
    ("tf32x3", "keys", 128): (Launch(16, 32, 4, 1, 8),),
    ("16bit", "fused", 512): (Launch(16, 16, 4, 1, 8),),
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


def choose(problem: AttentionProblem, device: Device, which: Pass) -> Launch:
    """The tile of a pass on a device; no larger than a block of the mask, where it has lists of them."""
    launch, blocks = FORCED.get(which), problem.blocks
    launch = _choose(problem, device, which) if launch is None else replace(launch, products=products(problem, device, which))
    if reads_bytes_and_joins(problem, device, launch.products):
        launch = with_whole_fragments(problem, launch, which)
    if blocks is None:
        return launch
    launch = replace(launch, block_q=min(launch.block_q, blocks.block_q), block_k=min(launch.block_k, blocks.block_k))
    if device.kind == "hip" and which == "fused" and launch.block_q == launch.block_k == 32:
        return replace(launch, num_stages=1)  # of two Triton 3.6.0 makes a cast that it cannot translate
    return launch


def with_whole_fragments(problem: AttentionProblem, launch: Launch, which: Pass) -> Launch:
    """The launch, whose products of probabilities have WHOLE_FRAGMENT terms or more."""
    block_q, block_k = max(launch.block_q, WHOLE_FRAGMENT), max(launch.block_k, WHOLE_FRAGMENT)
    if which == "queries" and launch.block_k < block_k and max(padded(problem)) == 256 and problem.dtype is not DType.FP32:
        return replace(launch, block_q=16, block_k=block_k)  # 32 queries spill 1.1 KB on sm100, 0.9 on sm90, 16 none
    if which in ("forward", "queries"):
        return replace(launch, block_k=block_k)
    if which == "keys":
        return replace(launch, block_q=block_q)
    if which == "fused" and (block_q, block_k) != (launch.block_q, launch.block_k):
        return replace(launch, block_q=block_q, block_k=block_k, num_warps=8)  # in 4 warps dk, dv and dq's share spill 5.6 KB
    return launch


def _choose(problem: AttentionProblem, device: Device, which: Pass) -> Launch:
    kind = products(problem, device, which)
    if _triton.INTERPRETED:
        return replace(INTERPRETED[which], products=kind)  # small, so that short sequences still cross tile borders
    width = max(*padded(problem), 64)
    launch = measured(problem, device, which) or modified(problem, device, which, width)
    if launch is not None and kind in ("unit", "short"):  # no tile was tuned for other products
        return replace(launch, products=kind)
    if problem.dtype is not DType.FP32:
        rules = SIXTEEN_BIT[which][width]
    else:
        rules = FP32[which][width]
        if kind == "float64":
            tile = replace(FLOAT64[width], products=kind)
            # with modifiers 32 x 32 spills 2.7 KB a thread where tiles have 32 columns (0.9 with 64 of them), 16 x 32 0.2; with
            # dropout 2.3 KB where they have 16
            spills = (problem.score or problem.dropout is not None) and max(padded(problem)) <= 32
            return replace(tile, block_q=16) if spills and which in ("keys", "fused", "queries") else tile
        if kind != "unit":
            rules = OWN_TILES[kind].get((which, width), rules)
        elif problem.precision == "ieee":
            rules = IEEE_QUERIES.get(width, IEEE[width]) if which == "queries" else IEEE[width]
    split = problem.dtype is DType.FP32 and problem.precision != "ieee"  # operands in several forms at once
    more = problem.score or problem.where or problem.dropout is not None or scattered(problem)
    if (more or device.kind == "hip" or (split and device.target != "sm90")) and len(rules) > 1:
        # Modifiers, predicates, random words and scattered addresses need registers, CDNA has fewer per accumulator, and
        # without wgmma all forms of an operand wait in registers: the widest tiles would spill.
        rules = rules[1:]
        asks = problem.where and device.kind == "cuda"
        if (asks or (split and problem.dropout is not None)) and device.target != "sm90":
            rules = rules[1:] or rules  # both at once
    if kind == "unit" and device.kind == "cuda" and not 90 <= device.arch < 120:
        rules = (*SYNCHRONOUS.get((crowd(problem), which, width), ()), *rules)
    if device.kind == "hip":
        rules = CDNA.get((crowd(problem), which, width), rules)
    if problem.dtype is not DType.FP32 and which == "queries" and width == 256 and device.target == "sm100":
        rules = tuple(replace(rule, num_stages=min(rule.num_stages, 2)) for rule in rules)  # three do not fit
    if problem.dtype is not DType.FP32 and which == "queries" and is_mended(problem) and width in TWICE:
        tile = TWICE[width]
        rules = (replace(tile, block_q=32, num_stages=1) if scattered(problem) else tile, *rules)
    if problem.dtype is DType.FP32 and 100 <= device.arch < 120:
        # Triton 3.6.0 compiles wider fp32 tiles for sm100 to a kernel that does nothing
        rules = tuple(launch for launch in rules if max(launch.block_q, launch.block_k) <= 32) or rules[-1:]
    for launch in (*(replace(rule, products=kind) for rule in rules), *rules):  # in parts if that fits at all
        if shared_bytes(problem, launch, which) <= device.smem_bytes:
            return launch
    return rules[-1]


def measured(problem: AttentionProblem, device: Device, which: Pass) -> Launch | None:
    """The tile that was tuned for such a problem; dropout takes the plain problem's if it has no own one and room there."""
    room = roomy(problem, device, which)
    if scattered(problem) or (room and problem.where):
        return None
    if problem.where and which == "queries" and is_mended(problem):
        return None  # the dense problem's tile, walked twice, spills 1 KB a thread at head_dim 256
    if (problem.lengths.ragged or problem.exact_delta) and which == "keys" and max(padded(problem)) == 256:
        return None  # the plain problem's tile, of 4 warps, spills 540 bytes a thread where items differ in length, 590 else
    tuned = tiles_of(device.target)
    own = tuned.get(family(problem, which))
    return tuned.get(plain_family(problem, which)) if own is None and not problem.score and room is None else own


def scattered(problem: AttentionProblem) -> bool:
    """Whether rows are no multiple of 16 elements apart, for all that Triton knows: it loads them element by element then."""
    return bool(problem.head_dim % 16 or problem.head_dim_v % 16)


def crowd(problem: AttentionProblem) -> str:
    """What most fills the registers of a problem, as SYNCHRONOUS names it."""
    if problem.dtype is DType.FP32:
        return problem.precision
    if scattered(problem) or problem.where:
        return "scattered" if scattered(problem) else "predicates"
    return "ragged" if problem.lengths.ragged and not problem.score and problem.dropout is None else "16bit"


def roomy(problem: AttentionProblem, device: Device, which: Pass) -> Launch | None:
    """The tile that has room for a 16-bit problem's predicates or dropout, where the dense problem's has not."""
    if device.target != "sm90" or problem.dtype is DType.FP32:
        return None
    width = max(padded(problem))
    if width == 256 and scattered(problem):  # whose addresses need that room: lists spill 15.6 KB a thread
        return None
    crowded = problem.where or (problem.dropout is not None and not problem.score and width == 256)
    return ROOMY.get((which, width)) if crowded else None


def modified(problem: AttentionProblem, device: Device, which: Pass, width: int) -> Launch | None:
    """The tile that has room for a 16-bit problem's modifiers, predicates, scattered or unequal rows, where that is known."""
    if device.target != "sm90" or problem.dtype is DType.FP32:
        return None
    room = roomy(problem, device, which)
    if room is not None or problem.where:
        return room
    if not problem.score:
        wide, wide_v = padded(problem)
        known = SCATTERED if scattered(problem) else UNEQUAL if wide > wide_v else {}
        return known.get((which, width)) if problem.dropout is None else None
    broadcast = any(captured.broadcast for spec in problem.score for captured in spec.kind.captured)
    own = BIASED if score_bytes(problem) else LINED if broadcast else SCORED
    return own.get((which, width)) or SCORED.get((which, width))


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
