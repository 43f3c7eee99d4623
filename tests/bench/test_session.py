"""The measuring process: what it finds right, wrong or refused, and what is left of it when a provider kills it."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from flashtile.bench.cases import DIRECTIONS, DType, case
from flashtile.bench.child import Session
from flashtile.bench.contest import Contest, Settings
from flashtile.bench.providers import PEERS, Provider, own_providers
from flashtile.bench.revision import LIBRARY
from flashtile.bench.worker import Worker, WorkerLostError
from flashtile.bench.yardstick import Yardstick, tolerance
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.mask import Band

TINY = case(2, 4, (24, 40), 16, DType.FP32, False, heads_kv=2)
FILE = Path(__file__).with_name("odd_providers.py")


@pytest.fixture
def session():
    if torch.cuda.is_available():
        pytest.skip("written for the CPU's providers")
    return Session(FILE)


def test_the_right_is_right_and_can_be_timed(session) -> None:
    session.open(TINY.spell(), backward=True)
    for direction in DIRECTIONS:
        reply = session.prepare("odd/right", direction)
        assert reply["status"] == "ok"
        assert 0 < reply["error"] < 1e-6
        assert session.burst("odd/right", direction)["ms"] > 0


@pytest.mark.parametrize(
    ("name", "direction", "reason"),
    [
        ("odd/wrong", "forward", "out is off by"),
        ("odd/gradient", "backward", "dk is off by"),
        ("odd/nan", "forward", "out is off by nan"),
        ("odd/elsewhere", "forward", "out is off by nan"),
    ],
)
def test_the_wrong_is_found_and_cannot_be_timed(session, name, direction, reason) -> None:
    session.open(TINY.spell(), backward=True)
    reply = session.prepare(name, direction)
    assert reply["status"] == "wrong"
    assert reason in reply["reason"]
    with pytest.raises(KeyError):
        session.burst(name, direction)


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("odd/refuses", "refused", "only on Sundays"),
        ("odd/raises", "failed", "KeyError: 'q'"),
        ("odd/unsupported", "refused", "odd: not this one"),
    ],
)
def test_refusals_and_failures_have_reasons(session, name, status, reason) -> None:
    session.open(TINY.spell(), backward=True)
    assert session.prepare(name, "forward") == {"status": status, "reason": reason}
    assert session.prepare("odd/right", "forward")["status"] == "ok"


def test_a_missing_part_of_the_output_is_seen(session) -> None:
    session.open(TINY.spell(), backward=True)
    assert math.isnan(session.prepare("odd/unwritten", "forward")["error"])


@pytest.mark.parametrize("band", [Band(), Band(right=0), Band(left=5, right=2), Band(left=3), Band(right=-30)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(24, 40), (40, 24), (1, 9)])
def test_yardstick_against_autograd(band, seqlen_q, seqlen_k, monkeypatch) -> None:
    monkeypatch.setattr("flashtile.bench.yardstick.CHUNK_BYTES", 8 * 2 * seqlen_k * 7)  # seven rows at a time
    problem = AttentionProblem(2, seqlen_q, seqlen_k, 4, 2, 8, 12, DType.FP32, band)
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, seqlen_q, 4, 8), "k": (2, seqlen_k, 2, 8), "v": (2, seqlen_k, 2, 12), "dout": (2, seqlen_q, 4, 12)}
    given = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    q, k, v = (given[name].clone().requires_grad_() for name in "qkv")
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * problem.scale_value
    hidden = torch.tensor([[not band.visible(i, j, problem.shift) for j in range(seqlen_k)] for i in range(seqlen_q)])
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).detach()).masked_fill(hidden, 0.0)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(2, 2))
    out.backward(given["dout"])
    yardstick = Yardstick(problem, given)
    for name, tensor in {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}.items():
        assert yardstick.error(name, tensor) < 1e-12 or not tensor.any()
    assert tolerance(problem) == (1e-4, 2e-4)


def test_yardstick_gives_a_lone_key_no_gradient() -> None:
    problem = AttentionProblem(1, 1, 1, 1, 1, 64, 64, DType.FP32, Band())
    given = {
        name: torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(i))
        for i, name in enumerate(("q", "k", "v", "dout"))
    }
    yardstick = Yardstick(problem, given)
    assert yardstick.error("dq", torch.zeros(1, 1, 1, 64)) == 0.0
    assert yardstick.error("dk", torch.full((1, 1, 1, 64), 1e-9)) > 1.0


def test_each_backend_is_discovered_with_its_variants(monkeypatch) -> None:
    from flashtile import dispatch
    from flashtile.bench import providers
    from flashtile.plan.device import H100

    monkeypatch.setattr(providers, "device_of", lambda device: H100)
    names = [p.name for p in own_providers(torch.device("cpu"))]
    assert {"flashtile/triton/split", "flashtile/triton/fused"} <= set(names)
    assert {name.split("/")[1] for name in names} == {backend.name for backend in dispatch.BACKENDS}


@pytest.mark.parametrize(
    ("name", "problem", "device", "reason"),
    [
        ("sdpa/flash", case(1, 1, (8, 16), 16, DType.FP16, True), "cuda", "aligns top-left"),
        ("sdpa/cudnn", case(1, 1, 8, 16, DType.FP32, True), "cuda", "dtype is fp32"),
        ("sdpa/cudnn", case(1, 1, 8, 16, DType.FP16, True), "cpu", "needs a GPU"),
        ("sdpa/efficient", case(1, 2, 8, 16, DType.FP16, True, heads_kv=1), "cuda", "heads_kv must equal heads_q"),
        ("sdpa/math", case(4, 48, 32768, 64, DType.FP16, True), "cuda", "holds 768.0 GiB of scores; limit here 5 GiB"),
        ("flex", case(1, 1, 8, 16, DType.FP16, True), "cpu", "compiled for GPUs only"),
        ("fa4", case(1, 1, 8, 16, DType.FP16, True), "cpu", ""),
    ],
)
def test_peers_say_why_not(name, problem, device, reason) -> None:
    provider: Provider = next(p for p in PEERS if p.name == name)
    assert reason in (provider.refuse(problem, torch.device(device)) or "accepted")
    assert name == "fa4" or provider.refuse(case(1, 1, 8, 16, DType.FP16, True), torch.device("cuda")) is None


def test_dead_and_hung_processes_are_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    worker = Worker(LIBRARY, tmp_path / "log", FILE)
    try:
        worker.start()
        assert Path(worker.greeting["library"]) == LIBRARY
        worker.patience_s["prepare"] = 4.0
        held = Contest("suite", TINY, [worker], Settings(patterns=("odd/dies", "odd/hangs", "odd/right"), rounds=2), Counter())
        held.run()
        rows = {(r.provider, r.direction): r for r in held.results({}, {False: ""})}
        assert rows["odd/right", "forward"].status == rows["odd/right", "backward"].status == "ok"
        assert rows["odd/dies", "forward"].status == "ok"
        assert rows["odd/dies", "backward"].reason == "prepare: process died of SIGABRT"
        assert rows["odd/hangs", "forward"].reason == "prepare: no answer within 4 s, killed"
        assert rows["odd/hangs", "backward"].status == "failed"
    finally:
        worker.stop()


def test_a_library_without_the_needed_parts_is_named(tmp_path) -> None:
    (tmp_path / "flashtile").mkdir()
    (tmp_path / "flashtile" / "__init__.py").write_text("VERSION = 0\n")
    worker = Worker(tmp_path, tmp_path / "log")
    with pytest.raises(WorkerLostError, match=r"did not start: process exited with status 1: .*No module named 'flashtile\."):
        worker.start()
    assert worker.process is None
