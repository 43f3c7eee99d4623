"""The command line: what it prints, its exit codes, and that it works without PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import flashtile
from flashtile.cli import app
from flashtile.errors import InvalidProblem
from flashtile.output import prepare
from flashtile.plan.device import H100

PROBLEM = "attention(q=1x4096x16x128,kv=4096x16x128,bf16,band=:0,score=softcap(30.0))"


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def python(code: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, in which Triton compiles."""
    command, environment = [sys.executable, "-c", code], {**os.environ, "TRITON_INTERPRET": "0"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_version() -> None:
    result = call("--version")
    assert result.exit_code == 0
    assert result.stdout == f"flashtile {flashtile.__version__}\n"


def test_help_lists_the_commands() -> None:
    result = call("--help")
    assert result.exit_code == 0
    for command in ("demo", "bench", "explain", "tune", "warm"):
        assert command in result.stdout


def test_bench_takes_its_own_options() -> None:
    result = call("bench", "--list")
    assert result.exit_code == 0
    assert "fa3-paper" in result.stdout
    assert call("bench", "--help").exit_code == 0
    assert call("bench", "--no-such-option").exit_code == 2


def test_explain_names_a_gpu_that_is_not_there() -> None:
    result = call("explain", PROBLEM, "--device", "A100")
    assert result.exit_code == 0, result.output
    for expected in (
        PROBLEM,
        "on A100 (sm80)",
        "forward: triton",
        "attention_forward: grid ",
        "backward: triton, split",
        "attention_backward_keys: grid ",
        "68.74 GFLOP",
        "roofline 220 us, bound by arithmetic",
        "cpu: tensors are on sm80",
    ):
        assert expected in result.stdout


@pytest.mark.parametrize(
    "name", ["sm80", "sm_90", "H100", "H200", "GH200", "A10", "L40S", "rtx 4090", "B200", "MI300X", "gfx942"]
)
def test_devices_go_by_architecture_or_name(name: str) -> None:
    assert call("explain", PROBLEM, "--device", name).exit_code == 0


@pytest.mark.parametrize(
    ("spelling", "device", "message"),
    [
        ("attention(", "H100", "InvalidProblem: spelling is 'attention('"),
        (PROBLEM.replace("kv=4096x16", "kv=4096x3"), "H100", "InvalidProblem: heads_q is 16 and heads_kv is 3"),
        (PROBLEM.replace("softcap", "nocap"), "H100", "score modifier is 'nocap'"),
        (PROBLEM, "sm1", "InvalidProblem: device is 'sm1'; it must be one of sm80 (A100)"),
        (PROBLEM, "T4", "triton: sm75 has no bf16 matrix units; supported from sm80"),
        (PROBLEM.replace("x128", "x520"), "H100", "NotSupported: no backend can run attention(q=1x4096x16x520"),
    ],
)
def test_a_bad_request_is_one_message_and_exit_code_2(spelling: str, device: str, message: str) -> None:
    result = call("explain", spelling, "--device", device)
    assert result.exit_code == 2
    assert result.stderr.startswith(message) or message in result.stderr
    assert "Traceback" not in result.output


def test_tune_without_a_gpu_says_so() -> None:
    blind = "import torch; torch.cuda.is_available = lambda: False"
    result = python(f"{blind}; from flashtile.cli import app; app(['tune', {PROBLEM!r}])")
    assert result.returncode == 2, result.stderr
    assert result.stderr == "InvalidProblem: tune needs a GPU; this machine has none that torch can use.\n"


def tuned(monkeypatch: pytest.MonkeyPatch, output: Path, *spellings: str) -> Any:
    """The answer of `flashtile tune` on an H100 that measures at once; the second problem is interrupted."""
    from flashtile import tune

    best = tune.Measured(tune.Launch(64, 64, 4, 2), None, 0, ms=1.0)
    answers = iter([best] * 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune, "device_of", lambda device: H100)
    monkeypatch.setattr(tune, "random_inputs", lambda problem, device: {})
    monkeypatch.setattr(tune, "tune_pass", lambda *given: next(answers))
    return call("tune", *spellings, "--output", str(output))


def test_tune_reads_every_problem_before_it_measures_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, message in (
        ("attention(", "InvalidProblem: spelling is 'attention('"),
        (PROBLEM.replace("x128", "x520"), "triton: head_dim is 520; supported up to 512"),
        ("attention(q=2x128x4x64,kv=128x4x64,bf16,varlen=200x200)", "triton: items differ in length, or"),
        ("attention(q=2x128x4x64,kv=128x4x64,bf16,where=dilated(2),blocks=128x128)", "or the mask has block lists"),
    ):
        result = tuned(monkeypatch, tmp_path / "t.json", PROBLEM, wrong)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert not (tmp_path / "t.json").exists()


def test_an_interrupted_tune_leaves_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tuned(monkeypatch, tmp_path / "t.json", PROBLEM, PROBLEM.replace("x128", "x64"))
    assert result.exit_code != 0  # the fifth pass finds no answer
    table = json.loads((tmp_path / "t.json").read_text())
    assert {tile["problem"] for tile in table["tiles"].values()} == {PROBLEM}
    assert len(table["tiles"]) == 4


@pytest.mark.parametrize("place", ["taken", "taken/x", "/proc/x"])
@pytest.mark.parametrize("command", ["demo --output", "bench smoke -o", f"tune {PROBLEM} --output"])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    command: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*given: Any, **more: Any) -> None:
        raise AssertionError("the work was begun")

    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")  # the demo's own, which is then not set for good
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: command.startswith("tune"))
    for name in ("demo.main._train", "bench.run.Worker", "tune.device_of"):
        monkeypatch.setattr(f"flashtile.{name}", work)
    (tmp_path / "taken").write_text("before")
    output = tmp_path / place
    result = call(*command.split(), str(output / "t.json" if command.startswith("tune") else output))
    assert result.exit_code == 2, result.output
    assert f"output is '{output}/" in result.stderr
    assert result.stderr.count("\n") == 1
    assert (tmp_path / "taken").read_text() == "before"


def test_preparing_an_output_makes_its_folder_alone(tmp_path: Path) -> None:
    there, new, link = tmp_path / "there", tmp_path / "a" / "b" / "new", tmp_path / "link"
    there.write_text("before")
    link.symlink_to(tmp_path / "target")
    prepare(there, new, link)
    assert there.read_text() == "before"
    assert not list(new.parent.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "link", "there"]
    with pytest.raises(InvalidProblem, match=r"output is .*Is a directory"):
        prepare(tmp_path)


def test_an_error_of_a_file_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr("flashtile.explanation.explain", fail)
    error = OSError(28, "No space left on device", "/full/x")
    result = call("explain", PROBLEM)
    assert (result.exit_code, result.stderr) == (2, "/full/x: No space left on device\n")
    error = OSError("of no file")
    assert call("explain", PROBLEM).exception is error


def test_explain_needs_no_torch() -> None:
    hidden = "import sys; sys.modules['torch'] = None"
    result = python(f"{hidden}; import flashtile; print(flashtile.explain({PROBLEM!r}, device='sm90'))")
    assert result.returncode == 0, result.stderr
    assert "forward: hopper" in result.stdout


HIDDEN = "import sys; sys.modules.update({'torch': None, 'triton': None})"


@pytest.mark.parametrize(("device", "backend"), [("H200", "hopper"), ("B200", "triton"), ("MI300X", "triton")])
def test_explain_speaks_of_gpus_without_triton(device: str, backend: str) -> None:
    """On macOS and Windows there is none."""
    result = python(f"{HIDDEN}; import flashtile; print(flashtile.explain({PROBLEM!r}, device={device!r}))")
    assert result.returncode == 0, result.stderr
    text = result.stdout
    assert f"forward: {backend}\n  Triton is not installed: its kernels and tiles are not known here" in text
    assert "68.74 GFLOP" in text
    assert "us, bound by arithmetic" in text


@pytest.mark.parametrize(
    ("spelling", "reason"),
    [
        ("attention(q=1x128x2x512,kv=128x2x512,fp32)", "triton: head_dim is 512 and head_dim_v 512; fp32"),
        ("attention(q=1x128x2x520,kv=128x2x520,bf16)", "triton: head_dim is 520; supported up to 512"),
    ],
)
def test_without_triton_explain_refuses_what_it_refuses_with_it(spelling: str, reason: str) -> None:
    result = python(f"{HIDDEN}; import flashtile; print(flashtile.explain({spelling!r}, device='sm90'))")
    assert result.returncode == 1
    assert "NotSupported" in result.stderr
    assert reason in " ".join(result.stderr.split()), result.stderr


def test_without_its_libraries_the_command_line_names_the_extra() -> None:
    result = python("import sys; sys.modules['typer'] = None; import flashtile.cli")
    assert result.returncode == 1
    assert result.stderr == 'flashtile\'s command line needs typer: pip install "flashtile[cli]"\n'


@pytest.mark.parametrize("options", ["--steps 0", f"--seed {-(2**64)}", f"--seed {2**64}"])
def test_the_demo_refuses_numbers_that_it_cannot_take(options: str, tmp_path: Path) -> None:
    result = call("demo", *options.split(), "--output", str(tmp_path / "new"))
    assert result.exit_code == 2
    assert f"Invalid value for '{options.split()[0]}'" in result.stderr
    assert not (tmp_path / "new").exists()


def test_without_torch_a_command_names_the_extra() -> None:
    result = python("import sys; sys.modules['torch'] = None; from flashtile.cli import app; app(['demo'])")
    assert result.returncode == 2
    assert result.stderr == 'This command needs torch: pip install "flashtile[torch]"\n'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "H100"], "there is no problem to warm"),
        (["--device", "cpu", "attention(q=1x8x1x8,kv=8x1x8,fp16)"], "device is the CPU"),
        (["--device", "H100", "--suite", "nobody"], "suite is 'nobody'"),
        (["--device", "H100", "attention(q=1x8x1x8)"], "attention(q=1x8x1x8)"),
    ],
)
def test_warm_refuses_what_has_nothing_to_compile(arguments: list[str], said: str) -> None:
    result = call("warm", *arguments)
    assert result.exit_code == 2
    assert said in result.output
