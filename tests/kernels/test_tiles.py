"""Which tile a problem with modifiers or dropout gets."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from flashtile.kernels.portable import choose
from flashtile.kernels.portable.backend import BACKEND
from flashtile.kernels.portable.candidates import shared_bytes
from flashtile.kernels.portable.tile import Launch
from flashtile.plan.device import A100, H100, named
from flashtile.problem.attention import AttentionProblem
from flashtile.triton_glue import language as _triton


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


def test_tiles_for_modifiers_are_those_of_wgmma_and_16_bits() -> None:
    biased = ",score=bias(1x4x256x256:{}:grad)"
    assert choose.modified(problem(biased.format("bf16")), H100, "keys", 128) == choose.BIASED["keys", 128]
    assert choose.modified(problem(",score=bias(2x1x1x256:bf16)"), H100, "keys", 128) == choose.SCORED["keys", 128]
    assert choose.modified(problem(biased.format("bf16")), A100, "keys", 128) is None
    assert choose.modified(problem(biased.format("fp32"), "fp32"), H100, "keys", 128) is None
    assert choose.modified(problem(), H100, "keys", 128) is None


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
    assert choose.choose(dropped, H100, which) == choose.ROOMY[which, 256]
    assert choose.choose(plain, H100, which) == (choose.measured(plain, H100, which) or choose.SIXTEEN_BIT[which][256][0])
    assert choose.choose(scored, H100, which) != choose.ROOMY[which, 256]
    own = Launch(16, 32)
    monkeypatch.setattr(choose, "tiles_of", lambda target: {choose.family(dropped, which): own})
    assert choose.choose(dropped, H100, which) == own
