"""What a feature adds to the inner loops of a Hopper GPU: machine code, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compile.conftest import Compiled

pytest.importorskip("triton", reason="Triton is not installed")

SHAPE = "attention(q=2x4096x16x128,kv=4096x16x128,bf16"
TF32 = "attention(q=6x4096x12x64,kv=4096x12x64,fp32,tf32"
BIAS = "score=bias(1x16x4096x4096:bf16:grad)"
# Instructions per score in the first loop without masks: measured 2026-11-21 with Triton 3.6.0, and 8 % room.
MOST = {
    f"forward:{SHAPE},{BIAS})": 16.0,
    f"forward:{SHAPE},dropout=0.1)": 19.2,
    f"queries:{SHAPE},score=softcap(30.0))": 14.4,
    f"queries:{SHAPE},score=alibi(2x16:fp32:grad))": 19.8,
    f"queries:{SHAPE},{BIAS})": 16.9,  # a narrow tile, measured faster than wider ones of 11.8
    f"pairs:{SHAPE},{BIAS})": 18.2,
    # 12.4 before scores were measured from lse before they are scaled, which is what makes large ones exact
    f"pairs:{SHAPE},score=bias(2x1x1x4096:bf16:grad))": 12.8,
    f"forward:{TF32})": 27.2,
    f"fused:{TF32})": 47.0,  # 45.3 in the faster of two tiles, the other 38.4
}


@pytest.fixture(scope="module")
def code(compiled: Compiled) -> dict[str, Any]:
    return {entry["spelling"]: entry for entry in compiled("feature_code.py", *MOST)}


def whole_loops(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Those with all of a pass's products: beside a bias another walk, where lse is large, only adds up probabilities."""
    most = max(loop["HGMMA"] + loop["HMMA"] for loop in entry["loops"])
    return [loop for loop in entry["loops"] if loop["HGMMA"] + loop["HMMA"] == most]


@pytest.mark.parametrize("spelling", MOST)
def test_instructions_per_score(code: dict[str, Any], spelling: str) -> None:
    loop = whole_loops(code[spelling])[0]
    assert loop["instructions"] <= MOST[spelling]
    assert loop["spills"] <= 2


@pytest.mark.parametrize("spelling", MOST)
def test_products_wait_for_none_before_them(code: dict[str, Any], spelling: str) -> None:
    assert code[spelling]["serialised"] == []


def test_tf32_is_three_products_of_bf16_parts_and_six_for_the_scores_of_lse(code: dict[str, Any]) -> None:
    """In the forward, by steps of 16 columns or keys: six of four, three of two; no product is TF32's."""
    forward, fused = (code[f"{which}:{TF32})"]["loops"][0] for which in ("forward", "fused"))
    assert (forward["HGMMA"], forward["HMMA"]) == (6 * 4 + 3 * 4, 0)
    assert (fused["HGMMA"], fused["HMMA"]) == (2 * 3 * 4 + 2 * 3 * 2, 3 * 16)


# Copies of keys, values and bias by a thread; and how many programs share an SM: one of eight warps, or two of four.
@pytest.mark.parametrize(("which", "copies", "programs"), [("forward", 12, 1), ("queries", 10, 2)])
def test_a_bias_is_copied_ahead_of_its_use(code: dict[str, Any], which: str, copies: int, programs: int) -> None:
    """In 16-byte pieces and without a register: added to the product, not what the product begins with."""
    entry = code[f"{which}:{SHAPE},{BIAS})"]
    for loop in whole_loops(entry):
        assert (loop["LDG"], loop["LDGSTS"]) == (0, copies)
    assert entry["shared_bytes"] <= 227 * 1024 // programs - 1024


def test_dropped_probabilities_stay_in_float32_until_they_are_packed(code: dict[str, Any]) -> None:
    assert code[f"forward:{SHAPE},dropout=0.1)"]["loops"][0]["PRMT"] == 0
