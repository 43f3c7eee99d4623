"""What was won on Hopper stays won: the machine code of every shipped tile, compiled without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from flashtile.plan.device import H100
from tests.compile.conftest import NEWEST, Compiled
from tests.compile.covering import covering, some_whole

triton = pytest.importorskip("triton", reason="Triton is not installed")

HALF, NARROW = ",fp16", ",128"  # instead of bfloat16; values of 128 columns
ONE_WAVE = ",one-wave"  # few tiles instead of many
SOFTCAP, ALIBI, BIAS = ",score=softcap(30.0)", ",score=alibi(4x16:fp32)", ",score=bias(1x16x4096x4096:bf16)"
KEYS, BIAS_GRADIENT = ",score=bias(4x1x1x4096:bf16)", ",score=bias(4x16x4096x4096:bf16:grad)"
DROPOUT, VARLEN, BLOCKS = ",dropout=0.1", ",varlen=16384x16384", ",where=block_table(128;128;4x16x32x32:bool),blocks=128x128"
DOCUMENTS = ",where=document(4096;4096;4x4096:int32;4x4096:int32),blocks=128x128"

# Instructions per key tile that needs no mask, as tuned (docs/lab/hopper-forward.md); a tenth more is a step back. Without
# those that are jumped over where no exponent has run away and no row's maximum risen far.
TUNED = {
    (64, ""): 320, (64, ",band=:0"): 337, (96, ""): 376, (128, ""): 335, (128, ",band=:0"): 342,
    (192, ""): 265, (192, ",band=:0"): 264, (192, NARROW): 365, (192, f"{NARROW},band=:0"): 377,
    (256, ""): 255, (256, ",band=:0"): 260,
    # up to 127 of softcap's are polynomials, which spare the slow unit
    (64, SOFTCAP): 535, (96, SOFTCAP): 592, (128, SOFTCAP): 504, (128, f",band=:0{SOFTCAP}"): 562,
    (128, f"{HALF}{SOFTCAP}"): 712,
    (64, ALIBI): 541, (128, ALIBI): 583,
    (128, ",band=:0,sink=16:fp32"): 342, (256, ",band=:0,sink=16:fp32"): 244, (64, DROPOUT): 554, (128, DROPOUT): 552,
    (64, BIAS): 555, (96, BIAS): 522, (128, BIAS): 487, (128, f",band=:0{BIAS}"): 506, (256, BIAS): 344, (128, KEYS): 466,
    (64, f",band=:0{VARLEN}"): 346, (128, VARLEN): 347, (128, f",band=:0{VARLEN}"): 348, (128, BLOCKS): 341,
}  # fmt: skip
APART = {(96, ""), (128, "")}  # three warpgroups that add the values of a tile before they multiply the next one's keys

# Where walks are short and the mask a band, a walk's first tile may be multiplied by half: 64 keys instead of 128.
HALVED = {(128, VARLEN), *((128, f",band=:0{rest}") for rest in ("", SOFTCAP, ",sink=16:fp32", VARLEN))}


def spell(head_dim: int, rest: str) -> str:
    dtype, head_dim_v = "" if rest.startswith(HALF) else ",bf16", 128 if rest.startswith(NARROW) else head_dim
    batch, seqlen = (1, 1024) if rest.startswith(ONE_WAVE) else (4, 4096)
    rest = rest.removeprefix(NARROW).removeprefix(ONE_WAVE)
    return f"attention(q={batch}x{seqlen}x16x{head_dim},kv={seqlen}x16x{head_dim_v}{dtype}{rest})"


# Instructions of the backward per step without a mask, and accesses to local memory that the loop may have.
TUNED_BACKWARD = {
    (64, ""): (585, 0), (64, ",band=:0"): (861, 0), (128, ""): (411, 0), (128, ",band=:0"): (547, 0),
    (256, ""): (453, 0), (256, ",band=:0"): (600, 0),
    (64, f"{ONE_WAVE},band=:0"): (854, 0), (128, f"{ONE_WAVE},band=:0"): (550, 0),  # blocks of short tiles help
    (128, BLOCKS): (409, 0), (64, BLOCKS): (587, 0),
    # of these 300 and 630 are jumped over where all of a block is visible
    (128, DOCUMENTS): (739, 5), (64, DOCUMENTS): (1255, 84),  # 82 by ptxas 12.8
    (64, f",band=:0{VARLEN}"): (869, 0), (128, f",band=:0{VARLEN}"): (577, 0), (64, SOFTCAP): (818, 0),
    (64, f",band=:0{SOFTCAP}"): (1090, 0), (128, SOFTCAP): (519, 0), (128, f",band=:0{SOFTCAP}"): (665, 0),
    (64, BIAS): (418, 0), (128, BIAS): (465, 0), (128, f",band=:0{BIAS}"): (611, 0), (128, f"{BIAS}{DROPOUT}"): (707, 7),
    (64, BIAS_GRADIENT): (440, 0), (128, BIAS_GRADIENT): (479, 0), (128, f",band=:0{BIAS_GRADIENT}"): (624, 0),
    (128, f",band=:0{ALIBI}"): (661, 2), (64, DROPOUT): (556, 0), (128, DROPOUT): (600, 0), (256, DROPOUT): (625, 0),
    (128, f",band=:0{DROPOUT}"): (749, 0),
    (192, NARROW): (419, 0), (192, f"{NARROW},band=:0"): (563, 0), (192, ",band=:0"): (590, 0),
    (256, BIAS): (764, 0), (256, f",band=:0{SOFTCAP}"): (733, 0),
}  # fmt: skip
# And of the pass for dv, where that has one of its own.
TUNED_DV = {
    (192, ",band=:0"): (276, 0), (256, ""): (200, 0), (256, ",band=:0"): (274, 0), (256, DROPOUT): (335, 0),
    (256, BIAS): (510, 1), (256, f",band=:0{SOFTCAP}"): (345, 0),
}  # fmt: skip
# Of the split backward: the pass over keys that makes dk, and that over queries; of the latter per key tile without a mask.
TUNED_SPLIT = {(64, ",band=:0"): (750, 0), (128, ",band=:0"): (458, 0), (256, ",band=:0"): (466, 0)}
TUNED_QUERIES = {
    (64, ""): (366, 0), (128, ",band=:0"): (397, 0), (128, DROPOUT): (381, 0), (192, f"{NARROW},band=:0"): (286, 0),
    (256, ",band=:0"): (304, 0),
}  # fmt: skip
PASSES = {
    **{f"backward:{spell(*which)}": (which, *tuned) for which, tuned in TUNED_BACKWARD.items()},
    **{f"backward-dv:{spell(*which)}": (which, *tuned) for which, tuned in TUNED_DV.items()},
    **{f"split:{spell(*which)}": (which, *tuned) for which, tuned in TUNED_SPLIT.items()},
    **{f"queries:{spell(*which)}": (which, *tuned) for which, tuned in TUNED_QUERIES.items()},
}


def traits(direction: str, which: tuple[int, str]) -> set[str]:
    """Head dims, with a mask and without one; features; plain code of each head dim. Of other passes: head dims."""
    head_dim, rest = f"{which[0]}{NARROW if which[1].startswith(NARROW) else ''}", which[1].removeprefix(NARROW)
    masked, features = ",band=:0" in rest, rest.replace(",band=:0", "")
    if direction not in ("", "backward"):
        return {f"{direction}:{head_dim}"}
    found = {HALF} if HALF in features else set()
    return found | {f"{head_dim}, {masked}", features.removeprefix(HALF) or f"plain {head_dim}"}


FEW = covering(TUNED, lambda which: traits("", which))
FEW_BACKWARD = covering(PASSES, lambda asked: traits(asked.partition(":")[0], PASSES[asked][0]))


@pytest.fixture(scope="module")
def shipped(compiled: Compiled, whole: bool) -> dict[str, dict[str, Any]]:
    some = (spell(*which) for which in TUNED if (which in FEW) != whole)
    return {found["spelling"]: found for found in compiled("hopper_code.py", *some)}


def executed(loop: dict[str, Any]) -> int:
    """Instructions of a loop without those that it mostly jumps over."""
    return loop["length"] - sum(to - place - 1 for place, to in loop["skips"])


def watches(which: tuple[int, str]) -> bool:
    """Whether a tile's steps look for no maxima."""
    return SOFTCAP not in which[1] and ALIBI not in which[1] and which != (64, BIAS)


def votes(which: tuple[int, str]) -> bool:
    """Whether its warp is asked in every step whether it is careful, or whether a row has seen nothing yet."""
    return which[0] == 64 or any(feature in which[1] for feature in (DROPOUT, BIAS, KEYS))


def test_a_mask_is_asked_once_and_selects_once(compiled: Compiled) -> None:
    """Documents, 128 columns: what they and the bounds say is one word of bits a row; 976 instructions a step."""
    (found,) = compiled("hopper_code.py", spell(128, DOCUMENTS))
    asking = [executed(loop) for loop in found["loops"] if loop["exponentials"] and loop["length"] > 2000]
    assert len(asking) == 2  # one of each warpgroup
    assert max(asking) <= 1073


each = pytest.mark.parametrize("which", some_whole(TUNED, FEW), ids=lambda which: f"head_dim{which[0]}{which[1]}")


@each
def test_the_code_is_as_tuned(shipped: dict[str, dict[str, Any]], which: tuple[int, str]) -> None:
    found = shipped[spell(*which)]
    assert not found["overwritten"]
    assert not found["idle_barriers"]
    assert found["wgmma"]
    assert found["bulk"] >= 4
    assert found["setmaxnreg"] >= 2  # the loader gives registers to the consumers
    assert found["registers"] <= (128 if which[0] == 64 and which[1] != DROPOUT else 168)  # three warpgroups, or two
    assert found["shared_bytes"] <= min(found["priced_bytes"], H100.smem_bytes)
    if which[0] == 128:
        assert found["of_64_columns"] == (2 * 8 if which in HALVED else 0)  # of each of two warpgroups
    # loops over key tiles: both products of a step and the exponentials between them
    steps = [loop for loop in found["loops"] if loop["exponentials"] and executed(loop) < 1.1 * TUNED[which]]
    assert steps, [executed(loop) for loop in found["loops"]]
    shortest = min(loop["length"] for loop in steps)
    steps = [loop for loop in steps if loop["length"] < 1.1 * shortest]  # where a mask is jumped over is no other step
    for loop in steps:
        assert loop["spills"] == 0
        exponentials, waits = loop["exponentials"], loop["waits"]
        if watches(which):
            # What looks for maxima is jumped over, and so is rescaling; nothing else stands between the product with the keys
            # and the exponentials, which do not wait for the product with the values either.
            look, rebase, *rescale = loop["skips"]
            assert len(rescale) == (2 if which in ((96, ""), (96, BIAS), (192, ""), (192, ",band=:0")) else 1)  # accumulators
            # Where nothing is asked in a step a warp knows from the tile's beginning whether it looks.
            asked = loop["skips"][0 if votes(which) else 1 :]
            assert all(vote < jump for vote, (jump, _) in zip(loop["votes"], asked, strict=True))
            assert all(look[0] < place < look[1] or rebase[0] < place < rebase[1] for place in loop["maxima"])
            assert sum(look[1] <= place < rebase[0] for place in exponentials) > len(exponentials) - 6
            assert (max(waits) < look[1]) == (which in APART)
            rescaled = sum(a < place < b for place in loop["multiplications"] for a, b in rescale)
            assert rescaled == (128 if which[1].startswith(NARROW) else which[0]) // 2
        else:
            assert not loop["votes"]
            # The wait for the values' product stands before most exponentials: rescaling and packing hide under them.
            assert 2 * sum(place > max(waits) for place in exponentials) > len(exponentials)
        # A curve is evaluated before it, while the values are being added; two of them are of row maxima. In bfloat16 there are
        # no maxima to wait for, and curve and exponentials take turns.
        if SOFTCAP not in which[1]:
            assert not loop["curves"]
        elif HALF in which[1]:
            assert len(loop["curves"]) == 66
            assert all(place < max(waits) for place in loop["curves"])
        else:
            assert len(loop["curves"]) == 64
        # A bias of every score lies in shared memory, before both products.
        if BIAS in which[1]:
            assert not loop["loads"]
            assert len(loop["turns"]) == (4 if which[0] == 256 else 8)
            assert max(loop["turns"]) < min(loop["waits"])
        # The next tile's bias of keys is loaded, 16 bytes at a time, once this one's has gone, and before both products.
        if KEYS in which[1]:
            assert loop["loads"] == loop["wide_loads"]
            assert len(loop["loads"]) == 4
            assert max(loop["spreads"]) < min(loop["loads"])
            assert max(loop["loads"]) < min(loop["waits"])


@each
def test_spills_stay_where_they_cost_little(shipped: dict[str, dict[str, Any]], which: tuple[int, str]) -> None:
    """Never in the unmasked loop; of plain tiles, with a sink or a bias too, some that are named here; those of features have
    more to keep.
    """
    some = {(head_dim, f",band=:0{rest}") for head_dim in (128, 256) for rest in ("", ",sink=16:fp32")}
    some |= {(64, ",band=:0"), (64, BIAS), (128, f",band=:0{BIAS}"), (256, BIAS), (128, KEYS)}
    most = 320 if any(word in which[1] for word in (DROPOUT, VARLEN, BLOCKS)) else 128 if which in some else 0
    assert shipped[spell(*which)]["spill_bytes"] <= most


@pytest.mark.parametrize("asked", [
    "attention(q=1x128x16x64,kv=128x16x64,bf16,band=:0)", "attention(q=4x4096x16x128,kv=77x16x128,bf16)",
])  # fmt: skip
def test_of_one_key_tile_there_are_no_steps(compiled: Compiled, asked: str) -> None:
    (found,) = compiled("hopper_code.py", asked)
    assert not found["overwritten"]
    assert not found["idle_barriers"]
    assert found["spill_bytes"] == 0
    assert found["loops"]  # over query tiles
    for loop in found["loops"]:
        assert len(loop["exponentials"]) <= 2 * 70  # of a tile of scores: all of it, or half
        assert not loop["votes"]  # nothing is computed again


@pytest.fixture(scope="module")
def shipped_backward(compiled: Compiled, whole: bool) -> dict[str, dict[str, Any]]:
    some = (asked for asked in PASSES if (asked in FEW_BACKWARD) != whole)
    return {found["spelling"]: found for found in compiled("hopper_code.py", *some)}


@pytest.mark.parametrize("asked", some_whole(PASSES, FEW_BACKWARD))
def test_the_backward_s_code_is_as_tuned(shipped_backward: dict[str, dict[str, Any]], asked: str) -> None:
    found, (which, length, spills) = shipped_backward[asked], PASSES[asked]
    assert not found["overwritten"]
    assert not found["idle_barriers"]
    assert found["wgmma"]
    assert found["bulk"] >= 8
    assert found["setmaxnreg"] >= 2
    assert found["shared_bytes"] <= H100.smem_bytes
    assert set(found["serialised"]) <= {"(C7517)"}  # where dP starts from -delta it waits for S: measured faster than adding
    loops = 2 if VARLEN in which[1] else 1  # of each consumer: steps that need no mask have one of their own
    steps = sorted((loop for loop in found["loops"] if loop["exponentials"]), key=lambda loop: loop["length"])[: 2 * loops]
    assert steps[-1]["length"] < 1.1 * length, [loop["length"] for loop in found["loops"]]
    if loops > 1:
        assert steps[1]["length"] <= TUNED_BACKWARD[which[0], ""][0]
    for loop in steps:
        assert loop["spills"] <= spills
        if which == (128, f",band=:0{DROPOUT}"):  # what masked steps alone select is jumped over: 678 where it is not
            assert executed(loop) < 1.05 * 606
        # A bias lies in shared memory a step ahead, where that has room for it; what the scores start from is it, turned.
        if (BIAS in which[1] or BIAS_GRADIENT in which[1]) and which[0] <= 128:
            assert not loop["loads"]
            assert len(loop["turns"]) == 4
            assert max(loop["turns"]) < min(loop["waits"])


# Forward mode: what moves, instructions of a step without a mask, its products' instructions, bytes of spills around the loops.
TANGENTS = {
    "q, 64": (f"tangent.q:{spell(64, ',band=:0')}", 707, 24, 68), "qkv, 64": (f"tangent.qkv:{spell(64, '')}", 765, 36, 0),
    "q, 128": (f"tangent.q:{spell(128, '')}", 552, 24, 52), "qkv, 128": (f"tangent.qkv:{spell(128, ',band=:0')}", 591, 36, 4),
}  # fmt: skip
TANGENTS_FEW = ["q, 64", "qkv, 128"]


@pytest.fixture(scope="module")
def tangents(compiled: Compiled, whole: bool) -> dict[str, dict[str, Any]]:
    some = (asked for name, (asked, *_) in TANGENTS.items() if (name in TANGENTS_FEW) != whole)
    return {found["spelling"]: found for found in compiled("hopper_code.py", *some)}


@pytest.mark.parametrize("name", some_whole(TANGENTS, TANGENTS_FEW))
def test_forward_mode_multiplies_in_one_go(tangents: dict[str, dict[str, Any]], name: str) -> None:
    """Every product of a step is under way before the first exponential, and the wait for scores alone stands before these."""
    asked, length, products, spilled = TANGENTS[name]
    found = tangents[asked]
    assert (found["overwritten"], found["idle_barriers"], found["serialised"]) == ([], [], [])
    assert found["spill_bytes"] <= spilled
    assert found["shared_bytes"] <= H100.smem_bytes
    steps = [loop for loop in found["loops"] if loop["products"] == products and loop["length"] < 1.1 * length]
    assert len(steps) == 2, [(loop["length"], loop["products"]) for loop in found["loops"]]
    for loop in steps:
        assert loop["spills"] == 0
        values, _, scores, slopes = loop["waits"]
        assert values < scores < min(loop["exponentials"])
        assert max(loop["exponentials"]) < slopes


# Under the newest Triton: a forward of each way to divide the rows, both kinds of the backward's passes, and a feature.
NEWEST_FEW = (
    spell(64, ",band=:0"),
    spell(96, ""),
    spell(192, NARROW),
    f"backward:{spell(128, BIAS)}",
    f"queries:{spell(96, '')}",
    f"tangent.qkv:{spell(64, ',band=:0')}",
)
NEWEST_OTHERS = (
    spell(256, ",band=:0"), spell(128, ""), spell(192, ""), f"backward:{spell(128, '')}", f"queries:{spell(128, '')}",
    f"queries:{spell(192, NARROW)}",
)  # fmt: skip


@pytest.mark.skipif(not NEWEST.is_dir(), reason="tools/setup.sh could not install the newest Triton")
@pytest.mark.parametrize("some", some_whole((NEWEST_FEW, NEWEST_OTHERS), [NEWEST_FEW]), ids=("few", "others"))
def test_it_compiles_under_the_newest_triton(compiled: Compiled, some: tuple[str, ...]) -> None:
    for found in compiled("hopper_code.py", *some, packages=NEWEST):
        assert found["wgmma"]
        assert found["bulk"]
        assert found["setmaxnreg"]
        assert not found["idle_barriers"]
