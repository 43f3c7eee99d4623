"""benchmarks/counters.py without a GPU: what it makes of ncu's CSV, and of an ncu that fails, hangs or lacks a metric."""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import counters, experiment, processes, record
from flashtile.kernels.sm90.backend import BACKEND
from flashtile.plan.backend import Gradients
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",'
    '"Section Name","Metric Name","Metric Unit","Metric Value"'
)
TIME, TENSOR, RED = (counters.METRICS[column][0] for column in ("us", "tensor_pct", "l2_red_sectors"))
WAIT = counters.METRICS["stall_wait"][0]


def line(number: int, kernel: str, metric: str, unit: str, value: str) -> str:
    middle = '"1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics"'
    return f'"{number}","411","python3.12","127.0.0.1","{kernel}",{middle},"{metric}","{unit}","{value}"'


SAID = "\n".join([
    "==PROF== Connected to process 411 (/usr/bin/python3.12)",
    '==PROF== Profiling "attention_forward" - 0: 0%....50%....100% - 21 passes',
    "UserWarning: said by the child",
    "==PROF== Disconnected from process 411",
    HEADER,
    line(0, "schedule_tiles", TIME, "ns", "2,016"),
    line(0, "schedule_tiles", TENSOR, "%", "0"),
    line(1, "attention_forward", TIME, "ns", "401,504"),
    line(1, "attention_forward", TENSOR, "%", "78.25"),
    line(1, "attention_forward", WAIT, "inst", "1.5"),
    line(2, "void at::fill<float, 4>(int, float)", TIME, "ns", "1,984"),
    line(3, "attention_backward", TIME, "ns", "1,203,840"),
    line(3, "attention_backward", TENSOR, "%", "(!) n/a"),
    line(3, "attention_backward", RED, "sector", "33,554,432"),
])  # fmt: skip

# Knows all metrics but that of L2's additions, then refuses the stall reason that it has just listed.
NCU = f"""#!/bin/sh
case "$*" in
--version) echo "NVIDIA (R) Nsight Compute Command Line Profiler"; echo "Version 2025.3.1.0 (build 36398880)"; exit;;
--query-metrics*) cat {{listed}}; exit;;
*{WAIT}*) echo "==ERROR== Failed to find metric {WAIT}"; exit 1;;
*window-1024*) sleep 1000;;
*dense-full-backward*) echo "ValueError: off"; echo "==ERROR== The application returned an error code (1)."; exit 9;;
*head_dim-96*) echo "==WARNING== No kernels were profiled."; exit;;
esac
cat {{said}}
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the script with an ncu that is none; returns its status and rows."""

    def running(*cells: str) -> tuple[int, list[dict[str, str]]]:
        listed, said, ncu = (tmp_path / name for name in ("listed", "said", "ncu"))
        names = [metric.partition(".")[0] for metrics in counters.METRICS.values() for metric in metrics]
        listed.write_text("".join(f"{name}   Counter   %   of it\n" for name in names if name != RED.partition(".")[0]))
        said.write_text(SAID)
        ncu.write_text(NCU.format(listed=listed, said=said))
        ncu.chmod(0o755)
        output = tmp_path / "rows.csv"
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setattr(record, "STARTED", time.monotonic())
        for module in (counters, experiment):
            monkeypatch.setattr(module, "need_gpu", lambda parser: None)
        monkeypatch.setattr(experiment, "machine", lambda device, commit: {"commit": commit})
        monkeypatch.setattr(processes, "compile_ahead", lambda *given: None)
        monkeypatch.setattr(counters, "MOST_S", 2.0)
        monkeypatch.setattr(sys, "argv", ["counters", "--cell", *cells, "--output", str(output), "--commit", "told"])
        status = counters.main()
        with output.open() as file:
            return status, list(csv.DictReader(file))

    return running


def test_kernels_are_read_from_the_csv_of_ncu() -> None:
    columns = counters.known_columns("")
    rows = counters.rows_of(SAID, ["varlen-full-forward", "varlen-full-backward"], columns)
    assert [(row["cell"].rpartition("-")[2], row["kernel"]) for row in rows] == [
        ("forward", "schedule_tiles"), ("forward", "attention_forward"),
        ("backward", "void at::fill<float, 4>(int, float)"), ("backward", "attention_backward"),
    ]  # fmt: skip
    assert [row["us"] for row in rows] == [2.016, 401.504, 1.984, 1203.84]
    assert rows[1]["tensor_pct"] == 78.25
    assert rows[1]["stall_wait"] == 1.5
    assert rows[1]["problem"].startswith("attention(q=16x4096x16x128")
    assert rows[3]["tensor_pct"] == ""
    assert rows[3]["l2_red_sectors"] == 2**25
    assert {row["cell"] for row in counters.rows_of(SAID, ["dense-full-backward"], columns)} == {"dense-full-backward"}


def test_an_ncu_that_fails_or_hangs_is_named_and_the_others_go_on(run, capsys) -> None:
    status, rows = run("dense-full", "head_dim-96-full-forward", "window-1024-forward", "plain-full")
    said = capsys.readouterr().out
    assert status == 1
    read = [(row["cell"], row["kernel"]) for row in rows if not row["failure"]]
    assert read.count(("plain-full-forward", "attention_forward")) == 1
    assert read.count(("plain-full-backward", "attention_backward")) == 1
    assert {cell for cell, _ in read} == {"plain-full-forward", "plain-full-backward", "dense-full-forward"}  # alone it is read
    assert {row["cell"]: row["failure"] for row in rows if row["failure"]} == {
        "dense-full-backward": "exit status 9: ==ERROR== The application returned an error code (1). ValueError: off",
        "head_dim-96-full-forward": "ncu read no kernel: ==WARNING== No kernels were profiled.",
        "window-1024-forward": "hangs, or takes more than 2 s:",
    }
    assert {row["ncu"] for row in rows} == {"2025.3.1.0"}
    assert {row["commit"] for row in rows} == {"told"}
    assert f"ncu does not know: {RED}\n" in said
    assert f"ncu refuses: {WAIT}\n" in said
    assert not {"l2_red_sectors", "stall_wait"} & rows[0].keys()


def test_without_the_right_to_read_counters_nothing_more_is_tried(run, monkeypatch, capsys) -> None:
    told = NCU.replace("No kernels were profiled", "ERR_NVGPUCTRPERM: no permission")
    monkeypatch.setattr(sys.modules[__name__], "NCU", told)
    _, rows = run("head_dim-96-full", "varlen-full")
    assert [row["cell"] for row in rows] == ["head_dim-96-full-forward head_dim-96-full-backward"]
    assert "varlen-full-forward varlen-full-backward" in capsys.readouterr().out.partition("MISSING")[2]


def test_one_call_of_each_pass_is_seen_by_the_profiler(monkeypatch) -> None:
    events: list[str] = []

    class Bound:
        def __init__(self, plan):
            self.which = plan.variant or "forward"

        def run(self, tensors):
            events.append(self.which)
            return {"out": tensors["q"], "lse": tensors["q"]}

    monkeypatch.setattr(counters, "bind", lambda plan, tensors, device: (Bound(plan), dict(tensors)))
    monkeypatch.setattr(counters, "draw", lambda problem, plan, device: {"q": torch.zeros(1)})
    monkeypatch.setattr(counters, "device_of", lambda device: H100)
    monkeypatch.setattr(counters.signal, "alarm", lambda seconds: None)
    for what in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, what, lambda what=what: events.append(what))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    counters.called(["dropout-causal-forward", "dropout-causal-backward"])
    warm, seen = events[: events.index("start")], events[events.index("start") :]
    assert seen == ["start", "forward", "fused", "stop"]
    assert warm.count("fused") == counters.WARM_CALLS <= warm.count("forward")


@pytest.mark.parametrize("name", counters.PROBLEMS)
def test_problems_are_those_of_the_hopper_kernels(name) -> None:
    problem = counters.PROBLEMS[name]
    assert not BACKEND.unsupported_backward(problem, H100, "fused")
    assert problem.spell() == AttentionProblem.parse(problem.spell()).spell()


@pytest.mark.parametrize("more", ["varlen=60x60", "dropout=0.1", "score=bias(3x2x20x20:bf16:grad)"])
def test_inputs_are_what_the_plan_takes(more) -> None:
    problem = AttentionProblem.parse(f"attention(q=3x20x2x64,kv=20x2x64,bf16,{more})")
    plan = BACKEND.backward(problem, H100, Gradients(), "fused")
    made = counters.draw(problem, plan, torch.device("cpu"))
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {b.name: b.shape for b in plan.named("input")}
    assert {name: tensor.dtype for name, tensor in made.items()} == {
        b.name: counters.TORCH_DTYPES[b.dtype] for b in plan.named("input")
    }
    if problem.lengths.varlen:
        assert made["cu_seqlens_q"].tolist() == [0, 20, 40, 60]


def test_no_script_is_named_as_a_module_of_python() -> None:
    folder = Path(record.__file__).parent  # which comes first where a script of it is run
    assert not {path.stem for path in folder.glob("*.py")} & sys.stdlib_module_names
