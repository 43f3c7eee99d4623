"""Which tile a problem with modifiers or dropout gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import flashtile
from flashtile.kernels.portable import choose, rules
from flashtile.kernels.portable.backend import BACKEND
from flashtile.kernels.portable.candidates import shared_bytes
from flashtile.kernels.portable.tile import Launch, Pass, products
from flashtile.plan.device import A100, H100, Device, named
from flashtile.plan.rules import told
from flashtile.problem.attention import AttentionProblem
from flashtile.triton_glue import language as _triton
from flashtile.triton_glue.workarounds import WORKAROUNDS


def problem(tail: str = "", dtype: str = "bf16") -> AttentionProblem:
    return AttentionProblem.parse(f"attention(q=2x256x4x128,kv=256x4x128,{dtype}{tail})")


@pytest.mark.parametrize(
    ("tail", "behind"),
    [
        ("", ""),
        (",dropout=0.1", "/dropout"),
        (",score=softcap(2.0)", "/softcap"),
        (",score=alibi(2x4:fp32)+softcap(2.0),dropout=0.1", "/alibi/softcap/dropout"),
        (",score=alibi(2x4:fp32:grad)", "/alibi/grad"),
        (",score=bias(1x4x256x256:bf16)", "/bias:qk"),
        (",score=bias(1x4x256x256:bf16:grad)", "/bias:qk"),
        (",score=bias(2x1x1x256:bf16)", "/bias:k"),
        (",score=bias(2x4x256x1:bf16)", "/bias:q"),
        (",score=bias(2x4x1x1:bf16:grad)", "/bias/grad"),
    ],
)
def test_families_tell_apart_what_a_pass_computes(tail: str, behind: str) -> None:
    assert choose.family(problem(tail), "queries") == "queries/16bit/128x128/full" + behind


def test_a_tuned_tile_of_the_feature_comes_before_the_plain_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    own, plain = Launch(64, 32), Launch(32, 64)
    dropped, capped = problem(",dropout=0.1"), problem(",score=softcap(2.0)")
    table = {choose.family(dropped, "forward"): own, choose.family(problem(), "forward"): plain}
    monkeypatch.setattr(choose, "tiles_of", lambda target: table)
    assert choose.measured(dropped, H100, "forward") == own
    table.pop(choose.family(dropped, "forward"))
    assert choose.measured(dropped, H100, "forward") == plain
    assert choose.measured(capped, H100, "forward") is None
    table[choose.family(capped, "forward")] = own
    assert choose.measured(capped, H100, "forward") == own


def table_of(p: AttentionProblem, device: Device) -> rules.Table:
    """The first table that has tiles of the pass over keys."""
    asked = rules.Asked(p, device, "keys", products(p, device, "keys"))
    return next(table for table in rules.TABLES if table.of(asked))


def test_tiles_for_modifiers_are_those_of_wgmma_and_16_bits() -> None:
    biased = ",score=bias(1x4x256x256:{}:grad)"
    assert table_of(problem(biased.format("bf16")), H100) is rules.BIASED
    assert table_of(problem(",score=bias(2x1x1x256:bf16)"), H100) is rules.SCORED
    assert table_of(problem(biased.format("bf16")), A100) is rules.SIXTEEN_BIT
    assert table_of(problem(biased.format("fp32"), "fp32"), H100).kinds == ("float64",)
    assert table_of(problem(), H100) is rules.SIXTEEN_BIT


def test_every_table_has_tiles_for_every_pass_and_width() -> None:
    """Nothing is asked that no rule answers: each kind has, for all passes, a table of all its widths."""
    for kind in ("16bit", "float64", "parts", "short", "ieee", "fp32"):
        whole = [table for table in rules.TABLES if kind in table.kinds and table.when is rules.always]
        for which in ("forward", "keys", "queries", "fused", "pairs"):
            for width in (64, 128, 256, 512) if kind == "16bit" else (64, 128, 256):
                assert any((which, width) in table.tiles for table in whole), (kind, which, width)


@pytest.mark.parametrize(
    ("spelling", "device", "which", "words"),
    [
        ("q=2x256x4x128,kv=256x4x128,bf16", "H100", "keys", ["such problems were tuned"]),
        ("q=2x256x4x128,kv=256x4x128,bf16", "A100", "keys", ["16 bits"]),
        ("q=2x256x4x128,kv=256x4x128,bf16,dropout=0.1", "A100", "keys", ["16 bits", "the widest tile would spill"]),
        ("q=8x2048x8x64,kv=2048x8x64,fp32,tf32x3", "B200", "forward", ["fp32", "the widest tile", "does nothing"]),
        ("q=1x90x4x64,kv=90x4x64,bf16", "A100", "queries", ["16 bits", "walks the keys twice"]),
        ("q=2x96x4x256,kv=96x2x256,fp16,where=key_padding(96;2x96:bool),dropout=0.1", "A100", "queries", ["mma.sync leaves"]),
    ],
)  # fmt: skip
def test_the_rules_that_fired_are_told(spelling: str, device: str, which: Pass, words: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    place = {"H100": H100, "A100": A100, "B200": named("sm100")}[device]
    launch, fired = choose.choice(AttentionProblem.parse(f"attention({spelling})"), place, which)
    assert launch == choose.choose(AttentionProblem.parse(f"attention({spelling})"), place, which)
    lines = told(fired)
    assert all(line.startswith("  rule: ") and line.endswith("]") for line in lines)
    found = [next((i for i, line in enumerate(lines) if word in line), -1) for word in words]
    assert found == sorted(found)
    assert -1 not in found, (words, lines)


@pytest.mark.parametrize(("device", "warps"), [("sm80", 4), ("sm100", 8), ("sm120", 8)])
@pytest.mark.parametrize("wanted", [{"peak"}, {"peak", "entropy"}])
def test_a_forward_that_keeps_statistics_has_more_warps_where_a_rule_says_so(
    device: str, warps: int, wanted: set[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    place, spelled = named(device), AttentionProblem.parse("attention(q=2x256x4x64,kv=256x4x64,bf16,band=:0)")
    plain, watched = BACKEND.forward(spelled, place), BACKEND.forward(spelled, place, statistics=frozenset(wanted))
    calls = [call for plan in (plain, watched) for call in plan.calls]
    assert [getattr(call, "num_warps", None) for call in calls] == [4, warps]
    told_of = [sum("rows' statistics" in note for note in plan.notes) for plan in (plain, watched)]
    assert told_of == [0, int(warps == 8)]


def test_a_workaround_stands_where_it_says() -> None:
    """Each entry is named in the file that does it, so that none is left behind when code goes."""
    root = Path(flashtile.__file__).parent
    assert len(WORKAROUNDS) >= 9
    for name, workaround in WORKAROUNDS.items():
        assert name in (root / workaround.at).read_text(), name
        assert "." in workaround.releases, name


@pytest.mark.parametrize("which", ["forward", "keys", "queries", "pairs", "fused"])
def test_a_bias_is_priced_as_a_third_stream(which: choose.Pass) -> None:
    launch = Launch(64, 32, 4, 3)
    plain, keys = shared_bytes(problem(), launch, which), shared_bytes(problem(",score=bias(2x1x1x256:bf16)"), launch, which)
    assert keys == plain
    assert shared_bytes(problem(",score=bias(1x4x256x256:bf16)"), launch, which) == plain + 2 * 64 * 32 * 2
    assert shared_bytes(problem(",score=bias(1x4x256x256:fp32)"), launch, which) == plain + 2 * 64 * 32 * 4


@pytest.mark.parametrize(("dims", "rest", "refused"), [
    (256, "fp32", True), (256, "fp32,tf32", True), (136, "fp32", True), (256, "fp32,ieee", False), (128, "fp32", False),
    (256, "bf16", False),
])  # fmt: skip
def test_wide_fused_tiles_of_fp32_do_not_fit_amd_s(dims: int, rest: str, refused: bool) -> None:
    wide = AttentionProblem.parse(f"attention(q=2x256x4x{dims},kv=256x4x{dims},{rest})")
    reasons = BACKEND.unsupported(wide, named("gfx942"), "fused")
    assert [reason for reason in reasons if "70 KiB" in reason] == reasons[: len(reasons) * refused]
    assert bool(reasons) == refused
    assert not BACKEND.unsupported(wide, named("gfx942"), "split")


def test_what_amd_s_compiler_cannot_pipeline_it_is_not_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    documents = "where=document(256;256;2x256:int32;2x256:int32),blocks={}"
    small, large = (
        AttentionProblem.parse(f"attention(q=2x256x4x64,kv=256x4x64,bf16,{documents.format(block)})")
        for block in ("32x32", "64x64")
    )
    assert choose.choose(small, named("gfx942"), "fused").num_stages == 1
    assert choose.choose(small, H100, "fused").num_stages > 1
    assert choose.choose(large, named("gfx942"), "fused").num_stages > 1


@pytest.mark.parametrize("which", ["keys", "queries", "fused"])
def test_modifiers_take_room_from_narrow_tiles_in_float64(which: choose.Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    plain, narrow, wide = (
        AttentionProblem.parse(f"attention(q=1x200x8x{columns},kv=200x8x{columns},fp32,band=:0{rest},tf32x3)")
        for columns, rest in ((32, ""), (32, ",score=softcap(30.0)"), (64, ",score=softcap(30.0)"))
    )
    assert [choose.choose(p, H100, which).block_q for p in (plain, narrow, wide)] == [32, 16, 32]


@pytest.mark.parametrize("which", ["keys", "fused"])
def test_dropout_takes_room_from_wide_tiles(which: choose.Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    plain, dropped, scored = (
        AttentionProblem.parse(f"attention(q=2x256x4x256,kv=256x4x256,bf16{rest},band=:0)")
        for rest in ("", ",dropout=0.1", ",score=softcap(2.0),dropout=0.1")
    )
    assert choose.choose(dropped, H100, which) == rules.ROOMY.tiles[which, 256][0]
    assert choose.choose(plain, H100, which) == (choose.measured(plain, H100, which) or rules.SIXTEEN_BIT.tiles[which, 256][0])
    assert choose.choose(scored, H100, which) != rules.ROOMY.tiles[which, 256][0]
    own = Launch(16, 32)
    monkeypatch.setattr(choose, "tiles_of", lambda target: {choose.family(dropped, which): own})
    assert choose.choose(dropped, H100, which) == own
