"""The Hopper kernels compute what they should, by a run of their sources on the CPU (`emulator`), in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.compile.covering import some_whole
from tests.hopper.emulating import emulate, run

pytest.importorskip("triton", reason="Triton is not installed")

LIMIT = 2e-3  # of the largest element; rounding inputs, probabilities and results to fp16 costs 3e-4 to 6e-4

# batch x seqlen_q x heads_q and seqlen_k x heads_kv, what else the problem says, and whether lse has a gradient
Sizes = tuple[str, str, str, bool]
TINY: Sizes = ("1x5x1", "7x1", "", False)
CAUSAL: Sizes = ("1x200x2", "333x2", ",band=:0", False)
UNSEEN_QUERIES: Sizes = ("2x333x4", "200x2", ",band=:0", False)
SHARED_HEADS: Sizes = ("1x257x4", "400x1", "", True)
WINDOW: Sizes = ("1x300x2", "320x2", ",band=100:30", False)
LEFT: Sizes = ("1x256x2", "384x1", ",band=64:", True)
GROUPED: Sizes = ("1x260x4", "260x2", ",band=:0", False)
BROAD: Sizes = ("1x600x2", "620x2", ",band=300:0", False)  # no tile meets both bounds
BROAD_LEFT: Sizes = ("1x500x2", "700x1", ",band=270:", True)
# of the first tile that these warpgroups see, or of the last, one half
HALVES: Sizes = ("1x384x2", "384x1", ",band=:0", False)
HALVES_WINDOW: Sizes = ("1x640x1", "640x1", ",band=256:0", False)
HALVES_BROAD: Sizes = ("1x450x2", "700x1", ",band=319:6", False)
HALVES_LEFT: Sizes = ("1x512x1", "620x1", ",band=300:", False)
HALVES_TAIL: Sizes = ("1x200x2", "318x2", "", False)
HALVED_SOFTCAP: Sizes = ("1x384x2", "384x1", ",band=256:0,score=softcap(2.0)", False)
HALVED = (HALVES, HALVES_WINDOW, HALVES_BROAD, HALVES_LEFT, HALVES_TAIL)
STRIPE: Sizes = ("1x150x1", "420x1", ",band=200:-70", False)
SOFTCAP: Sizes = ("1x140x1", "150x1", ",band=:0,score=softcap(2.0)", False)
MODIFIERS: Sizes = ("1x140x2", "150x2", ",score=softcap(30.0)+alibi(1x2:fp32)", True)
WAVE: Sizes = ("1x400x2", "400x2", ",band=:0", False)  # four tiles a head
SHARED_WAVE: Sizes = ("1x400x2", "400x1", ",band=:0", False)
NEGATIVE: Sizes = ("1x130x1", "130x1", ",scale=-0.2", False)
LONGER: Sizes = ("1x400x1", "2100x1", "", False)
LONGER_CAUSAL: Sizes = ("1x70x1", "8200x1", ",band=:0", False)
ALL = (TINY, CAUSAL, UNSEEN_QUERIES, SHARED_HEADS, WINDOW, LEFT, STRIPE, SOFTCAP, MODIFIERS, NEGATIVE)
DRIFTS = (-2.0, -0.054, 0.5), (-0.5, 0.054, 2.0)  # both directions, far and near, in either
LAGS = [(dtype, drifts) for dtype in ("fp16", "bf16") for drifts in DRIFTS]
FEW = (CAUSAL, SHARED_HEADS, WINDOW, MODIFIERS)


@dataclass(frozen=True)
class Tile:
    """A tile and what it has to compute. `launch` holds the fields that are not those of the shipped tile."""

    sizes: tuple[Sizes, ...]
    head_dim: int
    head_dim_v: int | None = None
    deterministic: bool = False
    launch: dict[str, Any] = field(default_factory=dict)

    def cases(self, direction: str) -> Iterator[dict[str, Any]]:
        """What `emulated` is told to run."""
        tail = ",deterministic" if self.deterministic else ""
        for queries, keys, rest, dlse in self.sizes:
            heads = f"q={queries}x{self.head_dim},kv={keys}x{self.head_dim_v or self.head_dim}"
            spelling = f"attention({heads},fp16{rest}{tail})"
            yield {"problem": spelling, "pass": direction, "launch": self.launch, "dlse": dlse}


SMALL = dict(block_q=64)
APART_DOUT, JOINED, CONVERTED = dict(joined=False), dict(joined=True, stages=2), dict(converts=True)
NARROW = dict(narrow=True)
UNGROUPED = dict(ungrouped=True)
APART = dict(groups=3, turns=False, loader_warps=1, apart=True)
FORWARD = {
    "head_dim64": (
        Tile(ALL, 64),
        Tile((CAUSAL, UNSEEN_QUERIES, WINDOW), 64, launch=dict(groups=3, stages=3, resident=True, loader_warps=1)),
        Tile((BROAD, BROAD_LEFT), 64, launch=dict(groups=2)),
        Tile(HALVED, 64, launch=dict(groups=3, stages=3, resident=True, loader_warps=1)),
        Tile((*HALVED, HALVED_SOFTCAP), 64, launch=dict(groups=2)),
    ),
    "head_dim128": (
        Tile((*ALL, BROAD, BROAD_LEFT), 128),
        Tile((CAUSAL, UNSEEN_QUERIES, WINDOW), 128, launch=dict(resident=True, swizzle=3)),
        Tile((*HALVED, HALVED_SOFTCAP), 128),
    ),
    "thirds": (
        Tile((CAUSAL, SHARED_HEADS, MODIFIERS), 96),
        Tile((CAUSAL,), 80, 40),
        Tile((HALVES, HALVES_WINDOW), 96),
    ),
    "apart": (
        Tile((CAUSAL, UNSEEN_QUERIES, SHARED_HEADS, LONGER), 128, launch=APART),
        Tile((CAUSAL, SHARED_HEADS, LONGER_CAUSAL), 96, launch=dict(APART, resident=True)),
    ),
    "wide": (
        Tile((CAUSAL, UNSEEN_QUERIES, STRIPE, MODIFIERS), 256),
        Tile((CAUSAL, SHARED_HEADS, WINDOW, HALVES, HALVES_WINDOW), 192, 128),
        Tile((CAUSAL, SHARED_HEADS), 192, 96),
        Tile((CAUSAL, SHARED_HEADS), 192, 192),
    ),
}
BACKWARD = {
    "head_dim64": (
        Tile(ALL, 64),
        Tile((CAUSAL, UNSEEN_QUERIES, LEFT, SHARED_HEADS), 64, deterministic=True),
        Tile((CAUSAL, SHARED_HEADS, WINDOW, SOFTCAP), 64, launch=SMALL),
        Tile((CAUSAL, UNSEEN_QUERIES), 64, deterministic=True, launch=dict(SMALL, stages=3, swizzle=2)),
        Tile((UNSEEN_QUERIES, LEFT, SHARED_HEADS, SOFTCAP), 64, launch=APART_DOUT),
        Tile((TINY, CAUSAL, UNSEEN_QUERIES, LEFT, SHARED_HEADS, MODIFIERS), 64, launch=CONVERTED),
        Tile((GROUPED, STRIPE), 40, launch=CONVERTED),
        Tile((GROUPED, SHARED_HEADS), 64, launch=UNGROUPED),
    ),
    "head_dim128": (
        Tile(ALL, 128),
        Tile((CAUSAL, SHARED_HEADS, STRIPE, NEGATIVE), 128, launch=JOINED),
        Tile((CAUSAL, UNSEEN_QUERIES, LEFT, SHARED_HEADS), 128, deterministic=True),
        Tile((CAUSAL, SHARED_HEADS), 128, launch=dict(stages=2, swizzle=3)),
        Tile((GROUPED, LEFT), 128, launch=dict(interleaves=True)),
        Tile((GROUPED, SHARED_HEADS, LEFT, TINY), 128, launch=dict(UNGROUPED, joined=False, stages_dout=2)),
        Tile((GROUPED, SHARED_HEADS), 128, launch=dict(UNGROUPED, joined=False, stages=2, stages_dout=2, converts=True)),
        Tile((TINY, CAUSAL, UNSEEN_QUERIES, LEFT), 128, launch=CONVERTED),
        Tile((UNSEEN_QUERIES,), 96, launch=CONVERTED),
        Tile((CAUSAL, MODIFIERS), 80, 40),
    ),
    "narrow": (
        Tile((TINY, CAUSAL, LEFT, SHARED_HEADS, MODIFIERS), 96, launch=NARROW),
        Tile((CAUSAL, SHARED_HEADS), 96, 128, deterministic=True, launch=NARROW),
        Tile((CAUSAL, GROUPED), 128, 72, launch=dict(CONVERTED, **NARROW)),
    ),
    "wide": (
        Tile(ALL, 256),
        Tile((CAUSAL, UNSEEN_QUERIES, LEFT, SHARED_HEADS), 256, deterministic=True),
        Tile((*FEW, LEFT, TINY, GROUPED), 192, 128),
        Tile((CAUSAL, UNSEEN_QUERIES, SHARED_HEADS), 192, 128, deterministic=True),
        Tile((CAUSAL,), 200, 72),
    ),
}

SPLIT = {
    "head_dim64": (
        Tile(ALL, 64),
        Tile((CAUSAL, GROUPED), 96),
        Tile((WINDOW,), 64, launch=APART_DOUT),
    ),
    "head_dim128": (Tile((*ALL, BROAD, BROAD_LEFT), 128), Tile((CAUSAL, MODIFIERS), 80, 40)),
    "wide": (Tile((*FEW, UNSEEN_QUERIES, STRIPE), 256), Tile((CAUSAL, SHARED_HEADS, LEFT), 192, 128), Tile((CAUSAL,), 192)),
}


def judge(cases: list[dict[str, Any]], script: str = "emulated", limit: float = LIMIT) -> None:
    """Run cases in one process; all that is wrong in one message."""
    results = emulate(script, map(json.dumps, cases))
    wrong = [
        f"{case}: {result.get('failure') or result['errors']}"
        for case, result in zip(cases, results, strict=True)
        if "failure" in result or max(result["errors"].values()) > limit
    ]
    assert not wrong, "\n".join(wrong)


def test_registers_keep_what_the_contract_names() -> None:
    done = run("emulated_dropout")
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-4000:]


@pytest.mark.parametrize("width", FORWARD)
def test_the_forward_is_exact(width: str) -> None:
    judge([case for tile in FORWARD[width] for case in tile.cases("forward")])


def test_a_forward_keeps_statistics_of_rows() -> None:
    """Largest scores and entropies beside out and lse; maxima that rise or fall from tile to tile, rows that see nothing."""
    tiles = Tile((TINY, CAUSAL, UNSEEN_QUERIES, HALVES, MODIFIERS), 64), Tile((SHARED_HEADS, WINDOW), 128)
    cases = [case for tile in (*tiles, Tile((GROUPED,), 192)) for case in tile.cases("watched")]
    drifting = [dict(case, drift=drift) for case in Tile((CAUSAL,), 64).cases("watched") for drift in (-0.5, 0.5)]
    alone = [dict(case, keeps=["peak"]) for case in Tile((SOFTCAP, LEFT), 96).cases("watched")]
    judge([*cases, *drifting, *alone])


def test_a_forward_keeps_entropies_without_looking_for_maxima() -> None:
    """Of 128 columns; exponents are measured from what scores leave behind, or run away from."""
    cases = Tile((TINY, CAUSAL, UNSEEN_QUERIES, WINDOW, HALVES), 128).cases("watched")
    drifting = [dict(case, drift=drift) for case in Tile((CAUSAL,), 128).cases("watched") for drift in (-0.5, 0.5, 4.0)]
    judge([dict(case, keeps=["entropy"]) for case in (*cases, *drifting)])


def test_a_forward_keeps_largest_scores_that_run_away_and_fall_behind() -> None:
    """They are the largest of all tiles, whichever tile's maximum exponents are measured from."""
    judge([
        dict(case, keeps=["peak"], drift=drift)
        for drift in (0.0, -0.5, 4.0) for case in Tile((TINY, CAUSAL, UNSEEN_QUERIES, WINDOW, HALVES), 128).cases("watched")
    ])  # fmt: skip


def test_statistics_are_of_an_item_s_own_rows() -> None:
    """A warp's rows may belong to two items. Largest scores shared within a warp were off by 0.4 to 1.3 on an H200."""
    items = ([0, 19, 191, 222], [0, 145, 253, 256]), ([0, 70, 100, 141], [0, 90, 130, 199])
    judge([
        dict(q=q, k=k, head_dim=d, keeps=keeps)
        for (q, k), d in zip(items, (64, 128), strict=True) for keeps in (["peak", "entropy"], ["peak"], ["entropy"])
    ], "emulated_items")  # fmt: skip


@pytest.mark.parametrize("width", BACKWARD)
def test_the_backward_is_exact(width: str) -> None:
    judge([case for tile in BACKWARD[width] for case in tile.cases("fused")])


def test_blocks_of_short_tiles_take_steps_of_long_ones() -> None:
    """Where each has one tile, of heads that share keys, too, if query heads have tiles of their own."""
    tiles = Tile((WAVE,), 64), Tile((WAVE, SHARED_WAVE), 128, launch=UNGROUPED), Tile((SHARED_WAVE,), 64, launch=UNGROUPED)
    judge([dict(case, blocks=8) for tile in tiles for case in tile.cases("fused")])


@pytest.mark.parametrize("width", SPLIT)
def test_the_backward_in_passes_is_exact(width: str) -> None:
    judge([case for tile in SPLIT[width] for case in tile.cases("split")])


def test_gradients_of_keys_in_float32_are_those_that_are_rounded() -> None:
    fused = Tile((CAUSAL, SHARED_HEADS), 64), Tile((CAUSAL, MODIFIERS), 80, 40), Tile((CAUSAL, TINY), 128), Tile((CAUSAL,), 192)
    split = Tile((CAUSAL,), 128), Tile((SHARED_HEADS,), 256)
    told = [case for tile in fused for case in tile.cases("fused")] + [case for tile in split for case in tile.cases("split")]
    judge([dict(case, wide_keys=True) for case in told])


def test_so_are_those_of_items() -> None:
    starts = {"cu_seqlens_q": [0, 70, 70, 300], "cu_seqlens_k": [0, 130, 140, 290]}
    used = {"seqused_q": [300, 17], "seqused_k": [290, 100]}
    told = [{"lengths": starts, "head_dim": 64}, {"lengths": used, "head_dim": 64}]
    judge([*told, *({"lengths": starts, "head_dim": n} for n in (128, 256))], "emulated_wide")


@pytest.mark.parametrize("parts", ["items", "documents"])
def test_a_query_of_one_key_beside_dropout_has_no_gradient_by_its_score(parts: str) -> None:
    """delta is of out, which dropout's factor makes another number than the key's value, and 16 bits round."""
    whole, cut = {"lengths": [200], "parts": parts}, {"lengths": [70, 1, 64, 65], "parts": parts}
    told: list[dict[str, Any]] = [{**cut, "head_dim": n, "backward": "fused"} for n in (64, 128, 256)]
    told += [{**cut, "head_dim": 128, "backward": "split"}, {**whole, "head_dim": 64, "backward": "fused", "softcap": 30.0}]
    judge([*told, {**whole, "head_dim": 64, "backward": "split", "softcap": 30.0}], "emulated_lone")


def test_one_key_gives_its_value_whatever_its_score() -> None:
    """Its weight is no power of two: exponents are measured from another key's score. Where a bias makes scores large, passes
    tell so.
    """
    told: list[dict[str, Any]] = [{"dtype": "bfloat16", "head_dim": n} for n in (64, 128)]
    told += [{"dtype": "float16", "head_dim": 128, "sink": True}, {"dtype": "bfloat16", "head_dim": 256, "used": 300}]
    tells = [{"offset": 0.0, "row": 0}, *({"offset": -4e4, "row": row} for row in (0, 299))]  # of rows that others repair
    judge([*told, *tells], "emulated_saturated")


@pytest.mark.parametrize("lags", some_whole(LAGS, [LAGS[0], LAGS[3]]))
def test_maxima_that_lag_behind(lags: tuple[str, tuple[float, ...]]) -> None:
    """Keys are walked from the last back: a row's maximum rises by 185, 46 or 5 powers of two from tile to tile, or falls."""
    wide = Tile((CAUSAL, UNSEEN_QUERIES, WINDOW, SHARED_HEADS), 256), Tile((GROUPED,), 200), Tile((CAUSAL, LEFT), 192, 128)
    tiles = *wide, Tile((LONGER,), 128, launch=APART), Tile((LONGER_CAUSAL,), 96, launch=APART)
    cases = [case for tile in tiles for case in tile.cases("forward")]
    dtype, drifts = lags
    told = [dict(case, drift=drift, problem=case["problem"].replace("fp16", dtype)) for case in cases for drift in drifts]
    judge(told, limit=LIMIT if dtype == "fp16" else 8 * LIMIT)


def test_scores_between_bounds() -> None:
    """Of bfloat16 a soft cap needs no maxima, some of its exponentials are polynomials, and three warpgroups take full ones."""
    full: Sizes = ("1x200x2", "318x1", ",score=softcap(30.0)", False)
    tiles = *(Tile((full,), width, launch=APART) for width in (96, 128)), *(Tile((full, HALVED_SOFTCAP), n) for n in (64, 128))
    cases = [case for tile in tiles for case in tile.cases("forward")]
    judge([dict(case, problem=case["problem"].replace("fp16", "bf16")) for case in cases], limit=8 * LIMIT)


def test_a_warpgroup_without_queries_lets_go_of_its_block_s_keys() -> None:
    narrow: Sizes = ("1x130x1", "192x1", ",band=10:0", False)
    blind: Sizes = ("1x130x1", "192x1", ",band=5:-40", False)  # no query sees anything
    three = Tile((LEFT,), 64, launch=dict(groups=3, loader_warps=1))
    judge([*Tile((narrow, blind), 256).cases("forward"), *three.cases("forward")])


def test_an_lse_without_an_address_is_not_written() -> None:
    tiles = Tile((CAUSAL, TINY), 64), Tile((HALVES_TAIL,), 96), Tile((CAUSAL,), 256)
    judge([dict(case, leaves=["lse"]) for tile in tiles for case in tile.cases("forward")])


def test_modifiers_in_other_forms() -> None:
    biased: Sizes = ("1x140x2", "150x2", ",band=:0,score=alibi(1x2:fp32)+softcap(30.0)", False)
    twice: Sizes = ("1x140x1", "150x1", ",score=softcap(2.0)+softcap(3.0)", False)  # one by one
    tile = Tile((biased, twice), 64)
    judge([*tile.cases("forward"), *tile.cases("fused")])


# of a product: its sizes m, n, k, how many blocks there are at most, its ending, whether that has all that it can, and what of
# its tile is not the default
PRODUCTS: tuple[tuple[tuple[int, int, int], int, str, bool, dict[str, Any]], ...] = (
    ((200, 520, 400), 2, "derivative", True, {}),
    ((200, 520, 400), 3, "derivative", False, {}),
    ((200, 520, 400), 1, "derivative", True, dict(rows=256, columns=128, wave=2)),
    ((136, 264, 264), 2, "derivative", False, dict(stages=2)),
    ((8, 8, 8), 2, "derivative", True, {}),
    ((200, 520, 400), 2, "gelu", True, {}),
    ((200, 520, 72), 3, "gelu", False, dict(rows=256, columns=128)),
    ((8, 8, 8), 2, "gelu", True, {}),
)


def test_products_are_exact() -> None:
    names = ("sizes", "sm_count", "ending", "more", "tile")
    judge([dict(zip(names, which, strict=True)) for which in PRODUCTS], "emulated_product")
