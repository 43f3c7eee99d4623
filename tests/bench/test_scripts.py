"""The scripts of benchmarks/: on a GPU that is none they run to their end, keep what they measured, and name what they lack."""

from __future__ import annotations

import csv
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as commands
from benchmarks import cached_cells, cached_peers, companion_cells, companion_sections, experiment, processes, record, replay
from flashtile import dispatch
from flashtile.demo.train import Setup
from flashtile.kernels.portable.backend import BACKEND as TRITON
from flashtile.plan.device import CPU
from flashtile.problem.attention import AttentionProblem
from tests.bench import fake_gpu, fake_peers

CPU_PLACE = torch.device("cpu")
TINY = (AttentionProblem.parse("attention(q=1x8x1x16,kv=8x1x16,fp16)"),)
TINY_CACHES: dict[str, Any] = dict(PAGES=(16, 32), LEAST_BYTES=1, ROUNDS=2, LEAST_S=0.0, captured=fake_gpu.captured)
GENERATED: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16,
)  # fmt: skip
SCRIPTS = sorted(p.stem for p in Path(record.__file__).parent.glob("[!_]*.py") if '"__main__"' in p.read_text())
NAMED: dict[str, list[str]] = {
    "exported": ["here.so"],
    "field_tests": ["tests"],
    "builds": ["--base", "."],
}  # what a script does not begin without

# Of a script: arguments, constants that are made small, and how many rows there are at least.
RUNS: dict[str, tuple[list[str], dict[str, Any], int]] = {
    "accuracy": (["--numbers", "127", "165"], {}, 2),
    "features": (["--sections", "costs"], dict(BATCH=1, SEQLEN=16, HEADS=1, HEAD_DIM=16, ROUNDS=1, REPEATS=1), 18),
    "fp32": (["--shapes", "1x16x1x16", "--split", "16x16/4/1/unit,16x16/4/1/unit"], dict(ROUNDS=1, BURST=1), 5),
    "varlen": (
        ["--section", "varlen"], dict(HEADS=1, HEAD_DIM=16, ROUNDS=1, DENSE=8, lognormal_lengths=lambda: [5, 3]), 8,
    ),
    "companions": (["--section", "norm"], dict(NORM_SHAPES=((8, 16),), FLUSH_BYTES=1024, WARM_CALLS=1), 12),
    "cpu": (
        ["--rounds", "2"],
        dict(
            SHAPES=((1, 16, 16, 2, 1, 16, True),), BURST_US=1.0, SMALL=1e9, STEP=1e9, MEMORY=1e9, LENGTHS=(16,),
            STEPS=Setup(4, batch=1, context=8),
        ), 4,
    ),
    "cpu --features": (
        ["--section", "features", "--dtype", "fp32", "--rounds", "2"], dict(SEQLEN=32, HEADS=1, HEAD_DIM=16, MOST=1e9), 16,
    ),
    "generation": (
        ["--batch", "2", "--keys", "16", "--new", "2", "--compile"],
        dict(MODELS={"tiny": (2, 1, 16, 16)}, SHAPE=GENERATED, HOST_CELL=cached_cells.Cell("tiny", 1, 64, 1), CALLS=1, ROUNDS=1,
             IN_A_GRAPH=2, REPEATS=3, captured=fake_gpu.captured,
             REPEATED={"plain": (cached_cells.Cell("tiny", 2, 32, 1), 16, "bf16", {}),
                       "e4m3": (cached_cells.Cell("tiny", 2, 32, 1, "lognormal"), 0, "e4m3", {})}), 15,
    ),
    "host": ([], dict(SHAPE=(1, 8, 1, 16), CALLS=1, ROUNDS=1, WARM_CALLS=1), 4),
    "host --ops": (["--ops"], dict(SHAPE=(1, 8, 1, 16), CALLS=1, ROUNDS=1, WARM_CALLS=1), 20),
    "host --cross": (["--cross"], dict(CROSS=TINY, CALLS=1, ROUNDS=1, WARM_CALLS=1), 2),
    "tiles": (
        ["--backend", "triton", "--dtype", "bf16", "--only", "plain"],
        dict(DIMS=((16, 16),), MASKS={"full": {}, "causal": {"band": ":0"}},
             SIZES={"small": dict(batch=1, seqlen_q=20, seqlen_k=20, heads_q=2, heads_kv=2)}), 4,
    ),
    "cached": (
        ["--models", "tiny", "--batch", "2", "--keys", "32", "--sets", "split=128", "LOADS=4"],
        dict(MODELS={"tiny": (2, 1, 16, 16)}, **TINY_CACHES), 22,
    ),
    "cached --lengths": (
        ["--models", "tiny", "--batch", "3", "--keys", "32", "--queries", "2", "--caches", "bf16", "--pages", "0", "16",
         "--lengths", "lognormal", "one-long", "equal", "--windows", "0", "8"],
        dict(MODELS={"tiny": (2, 1, 16, 16)}, **TINY_CACHES), 30,
    ),
    "cached --tiles": (
        ["--models", "mla-tiny", "--batch", "2", "--keys", "32", "--caches", "e4m3", "--pages", "16", "--tiles"],
        dict(MODELS={"mla-tiny": (2, 1, 24, 16)}, **TINY_CACHES), 4,
    ),
    "padded": (
        ["--models", "tiny", "--batch", "2", "--keys", "32"],
        dict(MODELS={"tiny": (2, 1, 16, 16)}, LEAST_BYTES=1, ROUNDS=2, STEP=3, captured=fake_gpu.captured), 3,
    ),
    "fp8": (
        ["--sections", "errors", "speed", "tiles", "simulated", "gradients", "--shapes", "1x16x1x32", "--keys", "128",
         "--rounds", "1"],
        dict(QUERIES=128, HEAD_DIM=32), 41,
    ),
    "derivatives": (["--shapes", "1x16x1x16", "--rounds", "1"], {}, 14),
    "derivatives --tiles": (["--shapes", "1x16x1x16", "--rounds", "1", "--tiles"], {}, 10),
    "replay": (["--without", "flex"], dict(PROBLEMS=TINY, ROUNDS=2, captured=fake_gpu.captured), 8),
}  # fmt: skip


@pytest.fixture
def pretended(monkeypatch):
    reasons = TRITON.unsupported(*TINY, CPU)
    if reasons:  # where there is a GPU, kernels are compiled for it
        pytest.skip("; ".join(reasons))
    fake_gpu.pretend(monkeypatch)
    yield monkeypatch
    fake_gpu.run.device_of.cache_clear()


def run(
    name: str, arguments: list[str], output: Path, patch: Any, constants: dict[str, Any]
) -> tuple[int, list[dict[str, str]]]:
    """The exit status and the rows of a script."""
    patch.setattr(record, "STARTED", time.monotonic())
    script = importlib.reload(importlib.import_module(f"benchmarks.{name.split()[0]}"))
    for constant, value in constants.items():
        for module in (script, cached_cells, cached_peers, companion_cells, companion_sections):
            if hasattr(module, constant):
                patch.setattr(module, constant, value)
    patch.setattr(sys, "argv", [name, *arguments, "--output", str(output), "--commit", "told"])
    with fake_gpu.OnTheCpu():
        status = script.main()
    with output.open() as file:
        return status, list(csv.DictReader(file))


@pytest.mark.parametrize("name", RUNS)
def test_a_script_runs_to_its_end(name, tmp_path, pretended, capsys) -> None:
    arguments, constants, least = RUNS[name]
    status, rows = run(name, arguments, tmp_path / "new" / "rows.csv", pretended, constants)
    said = capsys.readouterr().out
    assert status == 0, said
    assert "MISSING" not in said
    assert len(rows) >= least, said
    assert {row["commit"] for row in rows} == {"told"}
    assert not any(row.get("failure") for row in rows)


def test_decoding_is_timed_beside_flashinfer_and_flash_attention_4(tmp_path, pretended) -> None:
    """Stand-ins for them compute what they are told: whatever the lengths, windows and latents, it is what ours computes."""
    fake_peers.install(pretended)
    constants: dict[str, Any] = dict(
        MODELS={"tiny": (4, 2, 16, 16), "mla-tiny": (2, 1, 24, 16)}, FLASHINFER_PAGES=(0, 16), FA4_PAGES=(0, 16), ROTATED=8,
        WORKSPACE_BYTES=16, **TINY_CACHES,
    )  # fmt: skip
    one = ["flashinfer/{}/" + name for name in ("fa3", "fa2", "cores", "xqa")]
    made = {
        "tiny:3x64:lognormal": [*one, "fa4/{}"], "tiny:2x32:w8": [*one, "fa4/{}"],
        "tiny:2x32:q2:w8:one-long": [*one[:2], "fa4/{}"], "mla-tiny:3x64:one-long": one[:2],
    }  # fmt: skip
    told = ["--caches", "bf16", "--pages", "0", "16", "--cells", *made]
    status, rows = run("cached", told, tmp_path / "rows.csv", pretended, constants)
    assert status == 0
    assert not any(row.get("note") or row.get("failure") for row in rows)
    cells = dict.fromkeys((row["model"], row["queries"], row["window"], row["lengths"]) for row in rows)
    for cell, names in zip(cells, made.values(), strict=True):
        found = {row["provider"] for row in rows if (row["model"], row["queries"], row["window"], row["lengths"]) == cell}
        wanted = {name.format(page) for name in names for page in ("contiguous", 16)} - {"flashinfer/contiguous/xqa"}
        assert {name for name in found if name.startswith(("flashinfer", "fa4"))} == wanted
    ours = [row for row in rows if row["provider"].startswith("flashtile/")]
    assert all(float(row["of_best"]) > 0 for row in ours)
    assert [bool(row["of_sdpa"]) for row in ours] == [not row["model"].startswith("mla") for row in ours]


def test_ranks_are_measured_beside_one_process(tmp_path) -> None:
    """In processes of its own, without the interpreter: two ranks over gloo compute what one does, and are timed."""
    told = ["--ranks", "2", "--seqlens", "16", "--shape", "1x2x2x16", "--windows", "4", "--rounds", "1", "--dtype", "float32"]
    told += ["--packed", "--dropout", "0.2", "--providers", "ulysses", "allgather", "ring"]
    told += ["--output", str(tmp_path / "rows.csv"), "--commit", "told"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    root = Path(record.__file__).parent.parent
    command = [sys.executable, "-m", "benchmarks.context", *told]
    done = subprocess.run(
        command,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    forms = [("", "", ""), ("4", "", ""), ("", "packed", ""), ("", "", "0.2")]
    expected = [(name, *form) for form in forms for name in ("ulysses", "allgather", "ring")]
    assert [(row["provider"], row["window"], row["packed"], row["dropout"]) for row in rows] == expected
    assert all(float(row["ranks_ms"]) > 0 and float(row["error_dk"]) < 1e-6 for row in rows)


def test_ranks_tell_what_they_know_after_each_round_that_there_is_time_for(tmp_path, monkeypatch) -> None:
    """A time-out during the last round took all of a cell's rows."""
    context, dist = (importlib.import_module(name) for name in ("benchmarks.context", "torch.distributed"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    given, left = context.inputs("1x2x1x16", 8, torch.float32, CPU_PLACE), iter([1.0, 0.0])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        found = list(context.measure(["allgather", "ulysses"], given, context.Form(), 9, lambda: next(left)))
    finally:
        dist.destroy_process_group()
    assert [list(rows) for rows in found] == [["allgather", "ulysses"]] * 2
    assert all(row["ranks_ms"] > 0 and row["memory"] > 0 for rows in found for row in rows.values())


def test_two_builds_are_timed_in_turns(tmp_path, monkeypatch) -> None:
    """This build beside itself, in processes of their own, which interpret no kernel."""
    root, path = Path(record.__file__).parent.parent, tmp_path / "rows.csv"
    told = ["--base", str(root), "--cells", "host", "--rounds", "2", "--starts", "2", "--output", str(path), "--commit", "told"]
    monkeypatch.setattr(record, "STARTED", time.monotonic())
    monkeypatch.setattr(sys, "argv", ["builds", *told])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert importlib.import_module("benchmarks.builds").main() == 0
    rows = list(csv.DictReader(path.open()))
    assert [(row["cell"], row["pass"], row["unit"]) for row in rows] == [
        ("host", "forward", "host_us"), ("host", "both", "host_us"),
    ]  # fmt: skip
    assert all(float(row["this"]) > 0 and float(row["base"]) > 0 for row in rows)


def test_every_cell_of_two_builds_is_a_call(monkeypatch) -> None:
    """Of few tokens, in the interpreter: their names are those that the library takes."""
    worker = importlib.import_module("benchmarks.build_worker")
    monkeypatch.setattr(worker, "lengths", lambda count: [5, 9][:count])
    monkeypatch.setattr(worker, "DEVICE", torch.device("cpu"))
    kinds = {str((not shape[1], shape[4])): name for name, shape in worker.SHAPES.items()}
    for name in kinds.values():
        _, seqlen, _, _, how = worker.SHAPES[name]
        monkeypatch.setitem(worker.SHAPES, name, (2, min(seqlen, 16), 2, 16, how))
        assert all(abs(number) < float("inf") for number in worker.answer(worker.calls(name)["both"]()))


def test_builds_that_make_other_tensors_are_not_timed() -> None:
    """A gradient of another size, of another sign, that is NaN, that is not there: each is named."""
    compare = importlib.import_module("benchmarks.builds").compare
    base = [10.0, 0.5, 4.0, -1.0]
    compare([10.1, 0.45, 4.0, -1.05], base)
    with pytest.raises(ArithmeticError, match=r"tensor 1: this build makes a signed sum of 1, the base -1"):
        compare([10.0, 0.5, 4.0, 1.0], base)
    for wrong in ([10.0, 0.5, 5.0, -1.0], [float("nan"), 0.5, 4.0, -1.0], [10.0, 0.5], []):
        with pytest.raises(ArithmeticError):
            compare(wrong, base)
    with pytest.raises(ArithmeticError, match="the base 0"):
        compare([], [])


def test_the_quietest_rounds_stand_for_the_host_s_time() -> None:
    """What else a machine does only adds: bursts of it do not move the ratio, nor does one process that started slow. Processes
    that lie apart are what the base is said to be off by.
    """
    stand_for = importlib.import_module("benchmarks.builds").stand_for
    quiet = [20.0 + 0.01 * (i % 7) for i in range(144)]
    busy = [time + 15.0 * (i % 3 > 0) for i, time in enumerate(quiet)]
    slow = [1.2 * time for time in quiet]
    (calm, _), (beside, spread) = stand_for([quiet] * 3, True), stand_for([busy, quiet, busy], True)
    assert beside == pytest.approx(calm, rel=1e-3)
    assert spread < 1.001
    assert stand_for([quiet, slow, busy], True)[0] == pytest.approx(calm, rel=1e-3)
    assert stand_for([quiet, slow, slow, quiet], True)[1] == pytest.approx(1.2, rel=1e-3)
    assert stand_for([[1.04 * time for time in busy]] * 3, True)[0] / calm > 1.03  # a slower build is seen
    assert stand_for([busy], False)[0] > 1.5 * calm  # the median is the device's


def test_what_8_bits_make_is_judged_before_it_is_timed() -> None:
    fp8: Any = importlib.import_module("benchmarks.fp8")
    three, z = fp8.tensors_of("2x20x3x32", CPU_PLACE)
    for what in fp8.JUDGED:
        for causal in (False, True):
            call, given = fp8.calls(three, z, causal)[what], fp8.described(what, three, z, causal)
            said = fp8.judge(what, call, given, CPU_PLACE)
            assert said["backend"] == dispatch.plan_forward(given[0], CPU).backend
            assert ("e4m3:head:head:head" in said["problem"], "band=:0" in said["problem"]) == (what == "fp8", causal)
            for spoil in (
                lambda out: 1.03 * out,
                lambda out: out.roll(1, 2),
                lambda out: out * torch.nan,
                lambda out: out[:1] * 0,
            ):
                with pytest.raises(ArithmeticError, match=f"{what} is off by"):
                    fp8.judge(what, lambda call=call, spoil=spoil: spoil(call()), given, CPU_PLACE)


def raising(*_: Any) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_replays_that_compute_nothing_are_wrong(tmp_path, pretended) -> None:
    constants = dict(PROBLEMS=TINY, ROUNDS=2)
    status, rows = run("replay", ["--without", "flex", "fa4"], tmp_path / "rows.csv", pretended, constants)
    assert status == 1
    assert len(rows) == 6
    assert all(row["failure"].startswith("wrong after a replay: ") for row in rows)


def test_only_ours_has_to_be_captured(tmp_path, pretended) -> None:
    constants = dict(PROBLEMS=TINY, captured=raising)
    status, rows = run("replay", ["--without", "flex"], tmp_path / "rows.csv", pretended, constants)
    assert status == 1
    assert [row["provider"] for row in rows if row["failure"]] == ["flashtile", "flashtile"]
    assert all("is not captured" in row["note"] or "not installed" in row["note"] for row in rows if not row["failure"])


def test_replays_are_held_against_the_best_peer() -> None:
    assert replay.beside({"flashtile": 4.0, "fa4": 5.0, "flex": 3.0}) == {"best": "flex", "of_best": 0.75}
    assert replay.beside({"flashtile": 4.0}) == replay.beside({"fa4": 5.0}) == {}
    ratios: list[dict[str, Any]] = [{"of_best": 2.0}, {"of_best": 0.5}, {}]
    rows = [{"problem": name, "pass": "step", **ratio} for name, ratio in zip("abc", ratios, strict=True)]
    assert replay.summary(rows) == ["step: of_best 1.000 over 2 problems, least 0.500 of b"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_arguments_are_checked_before_anything_is_done(name, monkeypatch, capsys) -> None:
    pytest.importorskip("triton", reason="Triton, which some of them load, is not installed")
    script = importlib.import_module(f"benchmarks.{name}")
    for wrong in (["--budget", "0"], ["--output", "rows.txt"], ["--unknown"]):
        monkeypatch.setattr(sys, "argv", [name, *NAMED.get(name, []), *wrong])
        with pytest.raises(SystemExit) as end:
            script.main()
        assert end.value.code == 2
        assert wrong[0] in capsys.readouterr().err


class Letters(experiment.Experiment[str]):
    """An experiment of three cells, of which one is wrong."""

    output, budget_s, gpu = "letters.csv", 60.0, False

    @classmethod
    def add_options(cls, parser: Any) -> None:
        parser.add_argument("--times", type=record.at_least_one, default=1)

    @classmethod
    def check(cls, chosen: Any, parser: Any) -> int | None:
        return 7 if chosen.times == 7 else None

    def about(self) -> dict[str, int]:
        return {"times": self.chosen.times}

    def cells(self) -> list[str]:
        return ["a", "b", "c"]

    def place(self, cell: str) -> dict[str, str]:
        return {"letter": cell}

    def measure(self, cell: str, record: record.Record, until: float) -> None:
        assert until > time.monotonic()
        if cell == "b":
            raise ArithmeticError("wrong")
        record.add({"letter": cell, "repeated": cell * self.chosen.times})

    def report(self, record: record.Record) -> None:
        print(f"{len(record.rows)} letters")


def test_an_experiment_is_its_cells_and_a_measurement(tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "rows.csv"
    monkeypatch.setattr(record, "STARTED", time.monotonic())
    monkeypatch.setattr(sys, "argv", ["letters", "--times", "2", "--output", str(path), "--commit", "told"])
    assert experiment.main_of(Letters) == 1
    rows = list(csv.DictReader(path.open()))
    assert [(row["letter"], row["repeated"], row["failure"]) for row in rows] == [
        ("a", "aa", ""), ("b", "", "ArithmeticError: wrong"), ("c", "cc", ""),
    ]  # fmt: skip
    assert {(row["times"], row["commit"]) for row in rows} == {("2", "told")}
    assert "3 letters" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["letters", "--times", "7", "--output", str(tmp_path / "none.csv")])
    assert experiment.main_of(Letters) == 7
    assert not (tmp_path / "none.csv").exists()


def test_every_experiment_is_listed_and_run_by_one_command(monkeypatch, capsys) -> None:
    assert sorted(commands.experiments()) == SCRIPTS
    assert all(commands.experiments().values())
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    assert commands.main() == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name} " in listed for name in SCRIPTS)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "nothing"])
    assert commands.main() == 2
    monkeypatch.setattr(sys, "argv", ["benchmarks", "cpu", "--budget", "0"])
    with pytest.raises(SystemExit) as end:
        commands.main()
    assert end.value.code == 2
    assert "--budget: 0 is not above zero" in capsys.readouterr().err


def test_rows_are_kept_as_they_come(tmp_path) -> None:
    path = tmp_path / "made" / "rows.csv"
    kept = record.Record(path, 1e9, {"commit": "abc"})
    for cell, _ in kept.parts(["right", "wrong", "other"]):
        with kept.attempt(cell=cell):
            if cell == "wrong":
                raise ArithmeticError("off\nby one")
            kept.add({"cell": cell, f"{cell}_ms": 1.0})
            assert path.read_text().count(cell) >= 1  # already
    rows = list(csv.DictReader(path.open()))
    assert [row["cell"] for row in rows] == ["right", "wrong", "other"]
    assert [row["failure"] for row in rows] == ["", "ArithmeticError: off by one", ""]
    assert {row["commit"] for row in rows} == {"abc"}
    kept.put(1, [{"cell": "wrong", "wrong_ms": 2.0}, {"cell": "other", "note": "again"}])  # once more is known
    rows = list(csv.DictReader(path.open()))
    assert [(row["cell"], row["wrong_ms"], row["note"], row["failure"], row["commit"]) for row in rows] == [
        ("right", "", "", "", "abc"), ("wrong", "2.0", "", "", "abc"), ("other", "", "again", "", "abc"),
    ]  # fmt: skip
    kept.fail("late", cell="last")
    assert kept.end() == 1


def test_what_there_is_no_time_for_is_named(tmp_path, capsys) -> None:
    kept = record.Record(tmp_path / "rows.csv", 1e9, {})
    for cell, _ in kept.parts(["first", "second", "third"]):
        kept.add({"cell": cell})
        kept.ends = time.monotonic()
    assert kept.missing == ["second", "third"]
    assert kept.end() == 0
    assert "2 cells: second; third" in capsys.readouterr().out


def test_a_lost_gpu_ends_what_follows(tmp_path) -> None:
    kept = record.Record(tmp_path / "rows.csv", 1e9, {})
    for cell, _ in kept.parts(["first", "second"]):
        with kept.attempt(cell=cell):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert len(kept.rows) == 1
    assert kept.missing == ["second"]


def answer(what: str) -> str:
    """A job of the processes below."""
    if what == "raises":
        raise ValueError(what)
    if what == "dies":
        os._exit(3)
    if what == "loses":
        raise RuntimeError("CUDA error: misaligned address")
    time.sleep(1000.0 if what == "hangs" else 0.0)
    return what.upper()


def test_processes_outlive_what_happens_to_one(capsys) -> None:
    jobs = [(what,) for what in ("a", "dies", "b", "raises", "c", "loses", "d", "hangs")]
    found = dict(processes.in_processes(answer, jobs, time.monotonic() + 20.0, workers=2))
    texts = {job[0]: made if isinstance(made, str) else made.text for job, made in found.items()}
    assert texts == {
        "a": "A", "b": "B", "c": "C", "d": "D", "raises": "ValueError: raises", "dies": "its process ended with 3",
        "loses": "RuntimeError: CUDA error: misaligned address",
    }  # fmt: skip


def test_tiles_are_listed_for_a_gpu_that_is_not_there(tmp_path, monkeypatch) -> None:
    from benchmarks import tiles

    output = tmp_path / "tiles.csv"
    monkeypatch.setattr(tiles, "in_processes", lambda function, jobs, ends: ((job, function(*job)) for job in jobs))
    monkeypatch.setattr(tiles, "DIMS", ((192, 128),))
    monkeypatch.setattr(tiles, "SIZES", {"small": tiles.SIZES["small"]})
    monkeypatch.setattr(record, "STARTED", time.monotonic())
    monkeypatch.setattr(
        sys, "argv", ["tiles", "--list", "sm90", "--backend", "triton", "--dtype", "fp16", "--output", str(output)]
    )
    assert tiles.main() == 0
    rows = list(csv.DictReader(output.open()))
    kernels = {row["kernel"] for row in rows}
    assert kernels == {"attention_forward", "attention_backward_queries", "attention_backward_keys"}
    assert {row["features"] for row in rows} == set(tiles.OF_FP16)
    assert {row["mask"] for row in rows if row["features"] == "plain"} == set(tiles.MASKS)
    missing = ["tiles", "--list", "sm90", "--backend", "triton", "--dtype", "fp16", "--known", str(output)]
    monkeypatch.setattr(sys, "argv", missing)
    assert tiles.main() == 1  # rows that are listed are not rows that were run
    assert all(row["tile"].startswith("block_q=") and row["case"].startswith("q=") for row in rows)
