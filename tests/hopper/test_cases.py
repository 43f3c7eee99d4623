"""Hopper's kernels on the one case list and on longer cases, in the emulator: whatever the backend does not refuse is right."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile.errors import NotSupported
from flashtile.reference.attention import attention_reference
from tests.cases import Case
from tests.compile.covering import covering, some_whole
from tests.hopper.assess import assess
from tests.hopper.cases import CASES_HERE, EMULATED, LARGE, unexpected
from tests.hopper.emulating import emulate

pytest.importorskip("triton", reason="Triton is not installed")

PARTS = 3  # processes that share the cases of `make test`, and as many the others, of `make compile`
# Of cases whose name begins so the first runs, forward or with its backward too: a refusal of all would go unnoticed otherwise.
RUN = {
    "forward": ("varlen-", "padded-", "sink-", "dropout-", "bias-", "longer-mask-table-128", "longer-varlen-256-causal"),
    "backward": (
        "varlen-fp16-fused",
        "longer-varlen-128-dropout",
        "longer-padded-left",
        "longer-one-wave",
        "longer-mask-table",
        "longer-mask-holes",
        "longer-bias-full",
        "longer-bias-gradient",
        "longer-bias-gradient-pair",
    ),
}

WIDTHS = (64, 96, 128, 192, 256, 512)  # whose kernels differ; the last is refused
ASKED = "causal", "mask", "score", "backward", "deterministic", "sink", "dropout", "window"  # of each width
ALSO = "dtype", "score_dtype", "layout", "upstream", "head_dim", "head_dim_v"


def traits(case: Case) -> set[str]:
    """Of each width: what a case asks for, how its items lie, which sizes are more, grouped heads. Its family, by name."""
    sizes = (case.seqlen_q > case.seqlen_k) - (case.seqlen_q < case.seqlen_k)
    lie = "packed" if case.cu_q else "padded" if case.used_q or case.used_k else "dense"
    found = [*(f"{name}={getattr(case, name)}" for name in ASKED), f"sizes {sizes}", f"{case.heads_q > case.heads_kv}", lie]
    width = next(width for width in WIDTHS if max(case.head_dim, case.head_dim_v or 0) <= width)
    family = case.name.removeprefix("longer-").partition("-")[0]
    return {f"{width} {trait}" for trait in found} | {f"{name}={getattr(case, name)}" for name in ALSO} | {family}


def work(case: Case) -> int:
    """Elements of the products."""
    return case.batch * case.heads_q * case.seqlen_q * case.seqlen_k * case.head_dim


def first(direction: str) -> set[str]:
    """The first case of each beginning in RUN."""
    return {next(case.name for case in EMULATED if case.name.startswith(start)) for start in RUN[direction]}


FEW = {case.name for case in covering(sorted(EMULATED, key=work), traits)} | first("forward") | first("backward")
OTHERS = [case.name for case in EMULATED if case.name not in FEW]
SHARES = [tuple(names[part::PARTS]) for names in (sorted(FEW), OTHERS) for part in range(PARTS)]


@pytest.mark.parametrize("names", some_whole(SHARES, SHARES[:PARTS]), ids=range(2 * PARTS))
def test_what_is_not_refused_is_right(names: tuple[str, ...]) -> None:
    results = emulate("emulated_cases", names, timeout=600)
    wrong = [f"{r['case']}: {r.get('failure') or r['breaches']}" for r in results if r.get("failure") or r.get("breaches")]
    assert not wrong, "\n".join(wrong)
    assert [r["case"] for r in results] == list(names)
    assert not [reason for r in results for reason in unexpected(r.get("refusal", ()))]
    forward = {r["case"] for r in results if "breaches" in r}
    backward = {r["case"] for r in results if "breaches" in r and "refusal" not in r}
    assert not first("forward") & (set(names) - forward)
    assert not first("backward") & (set(names) - backward)


@pytest.mark.sm90
@pytest.mark.parametrize("direction", ["FORWARD", "BACKWARD"])
@pytest.mark.parametrize("case", [*CASES_HERE, *LARGE], ids=lambda case: case.name)
def test_what_is_not_refused_is_right_on_a_gpu(device: torch.device, case: Case, direction: str) -> None:
    try:
        wrong = assess(case, device, direction == "BACKWARD")
    except NotSupported as refusal:
        if unexpected(refusal.reasons["hopper"]):
            raise
        pytest.skip("; ".join(refusal.reasons["hopper"]))
    assert not wrong, "\n".join(wrong)


@pytest.mark.sm90
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_cut_off_sums_are_made_up_for(device: torch.device, head_dim: int, biased: bool) -> None:
    """Where there is one key, lse is the score: of a product of 256 columns 3e-7 are cut off, of a bias 5e-7."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, length, 8, head_dim, device=device, dtype=torch.float16) for length in (2048, 1, 1))
    scores = torch.einsum("bqhd,bkhd->bhq", q.double(), k.double())
    bias = -scores.half()
    given = {"score": (flashtile.Bias(bias[..., None]),)} if biased else {}
    options = flashtile.Options(backend="hopper")
    _, lse = flashtile.attention(q, k, v, scale=1.0, return_lse=True, options=options, **given)
    off = lse.double() - (scores + bias.double() if biased else scores)
    assert abs((off * scores).sum() / scores.square().sum()) < 1.2e-7  # a float32 scale is so coarse


@pytest.mark.sm90
@pytest.mark.parametrize("drift", [-2.0, -0.5, -0.054, 0.054, 0.5, 2.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_scores_that_rise_from_tile_to_tile(
    device: torch.device, head_dim: int, head_dim_v: int, p: float, causal: bool, drift: float
) -> None:
    """Keys are walked from the last back: a row's maximum rises by 185, 46 or 5 powers of two from tile to tile, or falls."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 3, d, device=device) for n, d in ((2100, head_dim), (2200, head_dim), (2200, head_dim_v)))
    q[..., 0] = head_dim**0.5
    k[..., 0] = drift * torch.arange(2200, device=device)[:, None]
    q, k, v = (x.bfloat16() for x in (q, k, v))
    given = {"causal": causal, "dropout": flashtile.Dropout(p, 3) if p else None}
    out, lse = flashtile.attention(q, k, v, return_lse=True, options=flashtile.Options(backend="hopper"), **given)
    exact, level = attention_reference(q, k, v, **given)
    assert (out - exact).abs().max() < 1.6e-2 * exact.abs().max()
    assert ((lse - level).abs() <= 1e-5 * level.abs() + 1e-5).all()
