"""The fuzzer: its formula is the definition, what is wrong is found and made small, and its cases are what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flashtile import InvalidProblem, NotSupported, dispatch
from flashtile.cli import app
from flashtile.fuzz import check as checks
from flashtile.fuzz import draw, guard, tiles
from flashtile.fuzz.case import Case
from flashtile.fuzz.check import Result, check
from flashtile.fuzz.formula import Scene, evaluate, soil, yardsticks
from flashtile.fuzz.main import Request, lines_of, sessions_of, total, write
from flashtile.fuzz.make import Inputs, build, call, mask_of, modifier_of
from flashtile.fuzz.pool import Event, Order, judge, prepare
from flashtile.fuzz.shrink import shrink
from flashtile.kernels.portable.tile import Launch
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem
from flashtile.reference.attention import attention_reference
from tools.mutate import read_bugs

ROOT = Path(__file__).parent.parent.parent
FAILURES = Path(__file__).parent / "failures.jsonl"
CPU = torch.device("cpu")
SMALL = replace(draw.MEANS["interpreted"], widest=64)
BASE = Case(2, 19, 37, 4, 2, 16, 24, "fp32", backend="cpu")


def drawn(numbers: range, backend: str = "cpu", each: int = 2) -> list[Case]:
    means = replace(SMALL, cases=each)
    return [case for n in numbers for case in draw.cases(draw.variant(3, n, backend, means), None)]


def test_a_case_is_its_line() -> None:
    for case in drawn(range(200)):
        assert Case.parse(case.spell()) == case


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("q=1x2x3 kv=1x1x1 fp32", "q=1x2x3"),
        ("q=1x2x2x8 kv=3x2x8 fp64", "fp64"),
        ("q=1x2x2x8 kv=3x2x8 fp32 where=nowhere", "where=nowhere"),
        ("q=1x2x2x8 kv=3x2x8 fp32 score=cubes", "cubes"),
        ("q=1x2x2x8 kv=3x2x8 fp32 items=self", "seqlen_q"),
        ("q=1x2x2x8 kv=3x2x8 fp32 data=offset:1e9", "bias"),
        ("q=1x2x2x8 kv=3x2x8 bf16 eight=int8", "eight"),
    ],
)
def test_a_line_that_is_no_case_is_refused(line: str, said: str) -> None:
    with pytest.raises(InvalidProblem, match=said):
        Case.parse(line)


def by_reference(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The same in the library's float64 reference, which reads the library's own masks and modifiers."""
    c = inputs.case
    leaves = {n: t.detach().double().requires_grad_(n in inputs.wanted) for n, t in inputs.leaves.items()}
    asked: dict[str, Any] = dict(c.mask_arguments())
    mask = mask_of(inputs)
    if mask is not None:
        asked["mask"] = mask & asked["mask"] if "mask" in asked else mask
    asked["score"] = tuple(modifier_of(name, leaves.get(f"score.{i}")) for i, name in enumerate(c.modifiers))
    asked |= {"scale": c.scale_value, "sink": leaves.get("sink"), "dropout": inputs.dropout}
    n = inputs.lengths
    given = {"cu_seqlens_q": n.cu_q, "cu_seqlens_k": n.cu_k, "seqused_q": n.used_q, "seqused_k": n.used_k}
    lengths = {name: torch.tensor(value, dtype=torch.int32) for name, value in given.items() if value is not None}
    for side in "qk":
        if c.holes and f"seqused_{side}" in lengths:
            keep = torch.zeros((c.batch, c.seqlen_q if side == "q" else c.seqlen_k), dtype=torch.bool)
            for item, places in enumerate(n.tokens_q if side == "q" else n.tokens_k):
                keep[item, list(places)] = True
            lengths[f"seqused_{side}"] = keep
    out, lse = attention_reference(leaves["q"], leaves["k"], leaves["v"], **asked, **lengths)
    made = {"out": out.detach()} | ({"lse": lse.detach()} if c.returns_lse else {})
    flowing = [(out, inputs.flows["dout"].double())] * (c.upstream in ("both", "out", "alone"))
    flowing += [(lse, inputs.flows["dlse"].double())] * (c.upstream in ("both", "lse"))
    if flowing and inputs.wanted:
        outputs, arriving = zip(*flowing, strict=True)
        given_back = torch.autograd.grad(outputs, [leaves[x] for x in inputs.wanted], arriving, allow_unused=True)
        for name, gradient in zip(inputs.wanted, given_back, strict=True):
            made[f"d{name}"] = torch.zeros_like(leaves[name]) if gradient is None else gradient
    return made


def test_the_formula_is_the_reference() -> None:
    for case in drawn(range(250), each=1):
        if case.kind in ("offset", "masked", "huge"):  # whose scores float32 rounds, or whose -inf is a mask
            case = replace(case, data="normal")
        case = replace(case, eight="")  # whose scales are part of the call
        inputs = build(case, CPU)
        scene = Scene(inputs)
        if case.dirty:
            soil(inputs, scene)
        made, _ = evaluate(inputs, scene, torch.float64)
        expected = by_reference(inputs)
        assert made.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(
                made[name], tensor, rtol=1e-9, atol=1e-9, equal_nan=False, msg=lambda m, c=case, n=name: f"{c.spell()}: {n} {m}"
            )


def test_what_is_drawn_is_right_on_the_cpu() -> None:
    status = [check(case, CPU).status for case in drawn(range(40)) if case.kind in ("normal", "peaked", "masked")]
    assert set(status) <= {"right", "close"}, status
    assert status.count("right") > 50


@pytest.mark.parametrize(
    "line",
    [
        "q=2x9x4x16 kv=21x2x24 bf16 eight=int8 upstream=none backend=cpu dirty seed=2",
        "q=3x30x2x16 kv=41x2x16 fp16 items=varlen where=tree eight=e4m3 upstream=none backend=cpu seed=3",
    ],
)
def test_8_bits_are_numbers_times_their_scales(line: str) -> None:
    case = Case.parse(line)
    assert check(case, CPU).status == "right"
    without = lambda inputs, backend: call(replace(inputs, case=replace(case, eight="")), backend)  # noqa: E731
    assert check(case, CPU, function=without).status == "wrong"


def test_a_formula_beside_a_large_offset_is_finite_and_shifted() -> None:
    case = replace(BASE, score="bias-plane", data="offset:-1e9", scale=0.25, dtype="fp16")
    inputs = build(case, CPU)
    truth, plain = yardsticks(inputs, Scene(inputs))
    assert all(tensor.isfinite().all() for made in (truth, plain) for tensor in made.values())
    assert truth["lse"].min() < -0.9e9


@pytest.mark.parametrize("delta", ["rounded", "exact"])
def test_delta_is_part_of_a_call(delta: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("flashtile.fuzz.make.attention", lambda *_, options, **__: seen.append(options))
    with pytest.raises(TypeError):
        call(build(replace(BASE, delta=delta), CPU))
    assert [options.delta for options in seen] == [delta]


WRONG: dict[str, Callable[[Inputs, str], Any]] = {
    "scale": lambda inputs, backend: call(replace(inputs, case=replace(inputs.case, scale=0.26)), backend),
    "band": lambda inputs, backend: call(replace(inputs, case=replace(inputs.case, band=":1")), backend),
    "sink": lambda inputs, backend: call(replace(inputs, case=replace(inputs.case, sink="")), backend),
    "dropout": lambda inputs, backend: call(replace(inputs, case=replace(inputs.case, dropout=0.25)), backend),
}


@pytest.mark.parametrize("fault", WRONG)
def test_faults_are_found(fault: str) -> None:
    case = replace(BASE, band=":0", sink="fp32", dropout=0.2)
    assert check(case, CPU).status == "right"
    result = check(case, CPU, function=WRONG[fault])
    assert result.status == "wrong", result
    assert "out" in result.text or "results" in result.text


def unwritten(inputs: Inputs, backend: str) -> Any:
    """What forgets to write an element."""
    out, lse, leaves = call(inputs, backend)
    lost = torch.empty_like(out)
    lost[:, :-1] = out[:, :-1]
    return lost, lse, leaves


def beyond(inputs: Inputs, backend: str) -> Any:
    """What writes an element behind its output."""
    out, lse, leaves = call(inputs, backend)
    made = torch.empty(7)
    made.as_strided((1,), (1,), made.storage_offset() + 7).fill_(0.0)
    return out, lse, leaves


def again_otherwise(inputs: Inputs, backend: str) -> Any:
    """What differs from call to call."""
    CALLS.append(1)
    out, lse, leaves = call(inputs, backend)
    return out * (1.0 + 2.0**-23 * len(CALLS)), lse, leaves


CALLS: list[int] = []


@pytest.mark.parametrize(("function", "said"), [(unwritten, "NaN"), (beyond, "words beside"), (again_otherwise, "bits")])
def test_faults_of_memory_are_found(function: Any, said: str) -> None:
    result = check(replace(BASE, again=True, upstream="none"), CPU, function=function)
    assert result.status == "wrong"
    assert said in result.text


def test_guarded_memory_is_nan_and_whole() -> None:
    with guard.watched() as guards:
        made = [torch.empty(3, 5, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
        strided = torch.empty_strided((2, 3), (1, 4))
        numbers = torch.empty(4, dtype=torch.int64)
    assert all(tensor.isnan().all() for tensor in (*made, strided))
    assert strided.stride() == (1, 4)
    assert (numbers == guard.UNWRITTEN).all()
    assert all(tensor.data_ptr() % 16 == 0 for tensor in made)
    assert guard.broken(guards) == 0
    assert len(guards) == 12


def test_refusals_have_reasons() -> None:
    def refuses(inputs: Inputs, backend: str) -> Any:
        raise NotSupported("it", {"cpu": ["too hard"]})

    def silent(inputs: Inputs, backend: str) -> Any:
        raise NotSupported("it", {"cpu": []})

    assert check(BASE, CPU, function=refuses) == Result("refused", "cpu: too hard")
    assert check(BASE, CPU, function=silent).status == "wrong"


def test_failures_become_small() -> None:
    case = replace(BASE, band="9:0", where="holes", score="softcap30+bias", sink="fp32", dropout=0.1, layout="gaps", again=True)

    def faulty(c: Case) -> Result:
        """Wrong wherever there is a bias and more than four keys."""
        bad = "bias" in c.score and c.seqlen_k > 4
        return Result("wrong", "dq is off by 1", 5.0) if bad else Result("right")

    smallest, result = shrink(case, faulty(case), faulty, 30.0)
    assert (smallest.score, smallest.where, smallest.sink, smallest.dropout, smallest.layout) == ("bias", "", "", 0.0, "bshd")
    assert smallest.seqlen_k in (5, 8, 9)
    assert smallest.seqlen_q == smallest.batch == 1
    assert result.status == "wrong"


def test_a_process_tells_every_case_and_shrinks_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Event] = []
    broken = Result("wrong", "out is off by 1", 9.0)
    monkeypatch.setattr(checks, "settled", lambda case, device: broken)
    monkeypatch.setattr(checks, "check", lambda case, device: broken)
    judge(Order(0, "cpu", shrinking_s=20.0, cases=2), 0, "cpu", found.append)
    kinds = [event.kind for event in found]
    assert kinds == ["begun", "failed", "done", "begun", "failed", "done", "variant"]
    assert len(found[1].shrunk) < len(found[1].case)
    assert found[4].shrunk == found[4].case


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    line = [sys.executable, "-m", "flashtile", "fuzz", *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=env, timeout=300, check=False)


def test_a_session_counts_and_adds_to_a_summary(tmp_path: Path) -> None:
    file, summary = tmp_path / "made" / "failures.jsonl", tmp_path / "counts" / "summary.json"
    earlier = {"cases": 10, "close": [], "wrong": [], "kernels": ["a", "b"]}
    summary.parent.mkdir()
    write(summary, [earlier])
    asked = ["--backend", "cpu", "--variants", "2", "--cases", "3", "--jobs", "1"]
    done = command(*asked, "--output", str(file), "--summary", str(summary))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 cases of 2 variants" in done.stdout
    assert "0 wrong" in done.stdout
    assert not file.exists()
    first, own = sessions_of(summary)
    assert first == earlier
    assert (own["cases"], own["variants"], own["seed"], sum(own["status"].values())) == (6, 2, 0, 6)
    assert json.loads(summary.read_text())["total"] == "16 cases, 2 distinct kernels, 0 close, 0 wrong in 2 sessions"
    assert "16 cases, 2 distinct kernels" in done.stdout.replace("\n", " ")


def test_kernels_of_several_sessions_count_once(tmp_path: Path) -> None:
    sessions = [{"cases": 1, "close": ["x"], "wrong": [], "kernels": kernels} for kernels in (["a", "b"], ["b", "c"])]
    assert total(sessions) == "2 cases, 3 distinct kernels, 2 close, 0 wrong in 2 sessions"
    (file := tmp_path / "other.json").write_text("[]")
    with pytest.raises(InvalidProblem, match="summary"):
        sessions_of(file)


def test_a_session_that_judges_nothing_fails(tmp_path: Path) -> None:
    asked = ("--backend", "hopper", "--jobs", "1", "--variants", "1", "--cases", "1", "--output", str(tmp_path / "failures"))
    done = command(*asked, "--without", "q=")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOTHING was judged" in done.stdout


@pytest.mark.parametrize("setup", ["nowhere:install", "tests.fuzz.emulate", "nowhere.at.all:install", ":"])
def test_a_setup_that_nobody_finds_is_refused(setup: str) -> None:
    for more in ([], ["--repeat", BASE.spell()]):
        done = CliRunner().invoke(app, ["fuzz", "--setup", setup, *more])
        assert done.exit_code == 2
    with pytest.raises(InvalidProblem, match="MODULE:FUNCTION"):
        Request(1.0, setup=setup)


def test_processes_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    with warnings.catch_warnings():
        for process in range(4):
            prepare("", process)
    assert taken == [0, 1, 0, 1]


def test_a_case_is_repeated() -> None:
    lines = BASE.spell(), replace(BASE, head_dim=600, backend="triton").spell()
    done = CliRunner().invoke(app, ["fuzz", "--repeat", lines[0], "--repeat", lines[1]])
    assert done.exit_code == 0, done.output
    assert "RIGHT " + BASE.spell() in done.stdout
    assert "REFUSED" in done.stdout
    assert CliRunner().invoke(app, ["fuzz", "--repeat", "q=1"]).exit_code == 2


def test_files_of_failures_are_read(tmp_path: Path) -> None:
    file = tmp_path / "failures.jsonl"
    file.write_text(json.dumps({"case": BASE.spell(), "text": "it was wrong"}) + "\n\n")
    assert lines_of(file) == [BASE.spell()]
    file.write_text("nonsense\n")
    with pytest.raises(InvalidProblem, match="failures"):
        lines_of(file)


def test_tiles_are_forced_and_let_go() -> None:
    problem = AttentionProblem.parse("attention(q=1x300x2x64,kv=300x2x64,bf16)")
    text = tiles.spell({"forward": Launch(64, 32, 4, 2, 1), "keys": Launch(32, 64, 4, 2, 8, held=1)})
    assert tiles.spell(tiles.parse(text)) == text
    chosen = dispatch.plan_forward(problem, H100, "triton").notes
    with tiles.forced(text):
        assert "64x32 warps=4 stages=2 swizzle=1" in str(dispatch.plan_forward(problem, H100, "triton").notes)
    assert dispatch.plan_forward(problem, H100, "triton").notes == chosen
    with pytest.raises(InvalidProblem, match="sideways"):
        tiles.parse("sideways:1x2x3x4x5x6")


def fitting(case: Case, scores: int) -> Case:
    """The case, or one with shorter items that is done soon where kernels are interpreted."""
    while case.batch * case.heads_q * case.seqlen_q * case.seqlen_k > scores:
        longer = "seqlen_q" if case.seqlen_q > case.seqlen_k else "seqlen_k"
        case = replace(case, **{longer: getattr(case, longer) // 2})
    return case


@pytest.mark.parametrize("line", lines_of(FAILURES))
def test_what_failed_once_is_right(line: str, backend: str, place: torch.device) -> None:
    """Every failure that a session found, in every backend; with shorter items where there is no GPU."""
    case = replace(Case.parse(line), backend=backend)
    if place.type == "cpu":
        case = fitting(case, 1 << 12)
    if backend == "cpu" and case.backward == "fused":
        case = replace(case, backward="auto")
    result = checks.settled(case, place)
    assert result.status in ("right", "close", "refused"), result.text


def test_kernels_are_counted(backend: str, place: torch.device) -> None:
    result = check(replace(BASE, backend=backend), place)
    assert result.status == "right", result.text
    assert bool(result.kernels) == (backend != "cpu")


def test_hopper_is_asked_for_what_it_runs() -> None:
    cases = drawn(range(60), "hopper", 1)
    assert {case.dtype for case in cases} == {"fp16", "bf16"}
    assert all(case.head_dim % 8 == 0 and case.backend == "hopper" for case in cases)


def test_every_seeded_bug_is_one_place_of_its_file() -> None:
    """`tools/mutate.py` judges no others: whoever rewrites a line writes its bug anew."""
    stale = [bug for bug in read_bugs() if (ROOT / bug.file).read_text().count(bug.old) != 1]
    assert not stale
