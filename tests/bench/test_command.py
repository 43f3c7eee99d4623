"""The command, end to end on a CPU."""

import os
import shutil
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from flashtile.bench import run as runs
from flashtile.bench.cases import SUITES, suite_named
from flashtile.bench.main import bench
from flashtile.bench.result import read
from flashtile.bench.revision import LIBRARY, checked_out, commit
from flashtile.errors import InvalidProblem
from tests.bench.fake_worker import FakeWorker

IS_GIT = shutil.which("git") is not None and bool(commit(LIBRARY))

app = typer.Typer()
app.command()(bench)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """One run of the suite, with the last commit as the base where there is one: its folder and rows."""
    folder = tmp_path_factory.mktemp("smoke")
    os.environ["OMP_NUM_THREADS"] = "1"  # the processes inherit it; cores are shared with other tests
    base = ["--base", "HEAD"] if IS_GIT else []
    result = invoke("smoke", *base, "-o", folder / "r.csv", "--rounds", 2, "-p", "sdpa", "-p", "cpu", "-p", "fa4")
    del os.environ["OMP_NUM_THREADS"]
    assert result.exit_code == 0, result.output
    assert "too small to compare speeds" in result.output
    return folder, read(folder / "r.csv")


def test_smoke_times_what_is_right_and_says_why_not(smoke) -> None:
    _, rows = smoke
    assert {row.spelling for row in rows} == {c.spell() for c in suite_named("smoke").cases}
    assert {"sdpa/math", "sdpa/flash"} <= {row.provider for row in rows if row.status == "ok"}
    assert {"flashtile/cpu", "fa4"} <= {row.provider for row in rows}
    for row in rows:
        assert row.device
        assert row.torch
        if row.status == "ok":
            assert row.ms > 0
            assert row.tflops > 0
            assert row.error < 2e-2
        else:
            assert row.status == "refused"
            assert row.reason


def test_table_and_plot_come_from_the_csv_alone(smoke) -> None:
    folder, _ = smoke
    assert (folder / "r.png").stat().st_size > 10_000
    table = invoke("--show", folder / "r.csv")
    assert table.exit_code == 0
    assert "| B1 H2 S64 D32 causal fp32 | fwd |" in table.output
    for name in ("again.png", "again.md"):
        assert invoke("--show", folder / "r.csv", "-o", folder / name).exit_code == 0
    assert (folder / "again.png").stat().st_size > 10_000
    assert (folder / "again.md").read_text() == table.output


@pytest.mark.skipif(not IS_GIT, reason="needs a git checkout")
def test_base_runs_the_other_commits_library(smoke) -> None:
    folder, rows = smoke
    commits = {row.provider: row.commit for row in rows}
    assert commits["base/cpu"] == commits["flashtile/cpu"].rstrip("+")
    with checked_out("HEAD") as tree:
        assert (tree / "flashtile" / "dispatch.py").exists()
        assert tree != LIBRARY
    assert not tree.exists()
    unknown = invoke("smoke", "--base", "no-such-revision", "-o", folder / "none.csv")
    assert unknown.exit_code == 2
    assert "base is 'no-such-revision'; it must be a revision that git knows" in unknown.output
    assert not (folder / "none.csv").exists()


def test_base_may_be_a_folder(tmp_path) -> None:
    (tmp_path / "flashtile").mkdir()
    (tmp_path / "flashtile" / "__init__.py").touch()
    with checked_out(str(tmp_path)) as tree:
        assert tree == tmp_path.resolve()
    assert tree.exists()


def test_shapes_of_a_user_s_own_stand_in_one_table_behind_suites(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runs, "Worker", lambda library, *rest, **more: FakeWorker(["flashtile/a", "b"]))
    own = ["attention(q=2x77x4x80,kv=77x4x80,fp16)", "attention(q=1x64x4x512,kv=64x4x512,bf16,band=9:0)"]
    result = invoke(own[0], "smoke", own[1], own[0], "-o", tmp_path / "r.csv")
    assert result.exit_code == 0, result.output
    assert "B2 H4 S77 D80 full fp16" in result.output
    found = dict.fromkeys((row.suite, row.spelling) for row in read(tmp_path / "r.csv"))
    assert list(found)[-2:] == [("shapes", text) for text in own]
    assert len(found) == len(suite_named("smoke").cases) + 2
    assert invoke(own[0], "--dtype", "bf16", "-o", tmp_path / "b.csv").exit_code == 0
    assert {row.dtype for row in read(tmp_path / "b.csv")} == {"bf16"}


def test_a_used_up_budget_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runs, "LEAST_LEFT_S", 1e9)
    monkeypatch.setattr(runs, "Worker", lambda library, *rest, **more: FakeWorker(["a"], kind="cpu"))
    order = runs.Order((suite_named("smoke"),), budget_s=100)
    said: list[str] = []
    rows = runs.run(order, tmp_path / "r.csv", said.append)
    assert [row.status for row in rows] == ["ok"] * 2 + ["skipped"] * 4
    assert rows[-1].reason == "the budget of 100 s was used up"
    assert said[0].startswith("No GPU here")
    assert [row.status for row in read(tmp_path / "r.csv")] == [row.status for row in rows]


@pytest.mark.parametrize("told", [None, "0123abcd"])
def test_a_copy_without_git_is_told_its_commit(tmp_path, monkeypatch, told) -> None:
    monkeypatch.setattr(runs, "commit", lambda library: "")
    monkeypatch.setattr(runs, "Worker", lambda library, *rest, **more: FakeWorker(["a"], kind="cpu"))
    result = invoke("smoke", "-o", tmp_path / "r.csv", *(["--commit", told] if told else []))
    assert result.exit_code == 0, result.output
    assert {row.commit for row in read(tmp_path / "r.csv")} == {told or ""}
    assert ("No git here" in result.output) == (told is None)


def test_a_machine_without_git_knows_no_commit(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(LIBRARY) == ""
    with pytest.raises(InvalidProblem, match="base is 'HEAD'; it must be a revision that git knows"), checked_out("HEAD"):
        pass


@pytest.mark.skipif(not IS_GIT, reason="needs a git checkout")
def test_a_library_inside_a_foreign_checkout_has_no_commit(tmp_path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "other"], check=True)
    (tmp_path / "flashtile").mkdir()
    (tmp_path / "flashtile" / "__init__.py").touch()
    assert commit(tmp_path) == ""
    assert commit(LIBRARY).rstrip("+").isalnum()


def test_wrong_and_failed_are_in_the_exit_code(tmp_path, monkeypatch) -> None:
    wrong = {"a": {"status": "wrong", "reason": "out is off"}}
    monkeypatch.setattr(runs, "Worker", lambda library, *rest, **more: FakeWorker(["a", "b"], wrong))
    result = invoke("smoke", "-o", tmp_path / "r.csv")
    assert result.exit_code == 1
    assert "wrong or failed: a" in result.output
    assert "WRONG" in result.output


def test_a_pattern_that_means_nobody_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runs, "Worker", lambda library, *rest, **more: FakeWorker(["flashtile/a", "b"]))
    result = invoke("smoke", "-o", tmp_path / "new" / "r.csv", "-p", "b", "-p", "nosuch")
    assert result.exit_code == 2
    assert "provider is 'nosuch'; it must match one of flashtile/a, b." in result.output
    assert not list((tmp_path / "new").iterdir())


def test_a_run_that_is_interrupted_before_its_first_rows_leaves_the_results_of_another(tmp_path, monkeypatch) -> None:
    def interrupted(*given) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "Worker", lambda library, *rest, **more: FakeWorker(["a"], kind="cpu"))
    assert invoke("smoke", "-o", tmp_path / "r.csv").exit_code == 0
    before = read(tmp_path / "r.csv")
    monkeypatch.setattr(runs, "compile_ahead", interrupted)
    assert invoke("smoke", "-o", tmp_path / "r.csv").exit_code != 0
    assert read(tmp_path / "r.csv") == before
    monkeypatch.undo()
    monkeypatch.setattr(runs, "Worker", lambda library, *rest, **more: FakeWorker(["b"], kind="cpu"))
    assert invoke("smoke", "-o", tmp_path / "r.csv").exit_code == 0
    assert {row.provider for row in read(tmp_path / "r.csv")} == {"b"}


def test_also_without_providers_is_said(tmp_path) -> None:
    (tmp_path / "also.py").write_text("x = 1\n")
    result = invoke("smoke", "-o", tmp_path / "r.csv", "--also", tmp_path / "also.py")
    assert result.exit_code == 2
    assert "also.py has no PROVIDERS; it must be a list of flashtile.bench.providers.Provider." in result.output


def test_what_cannot_be_shown_is_named(smoke, tmp_path) -> None:
    folder, _ = smoke
    lines = (folder / "r.csv").read_text().splitlines()
    (tmp_path / "cut.csv").write_text("\n".join(lines)[: len(lines[0]) + 40])
    for path in (folder / "r.png", tmp_path / "cut.csv"):
        refused = invoke("--show", path)
        assert (refused.exit_code, refused.output.count("\n")) == (2, 1)
        assert f"{path} cannot be read as a CSV written by flashtile bench" in refused.output


def test_what_is_shown_goes_into_a_new_folder_or_is_refused(smoke, tmp_path) -> None:
    folder, _ = smoke
    assert invoke("--show", folder / "r.csv", "-o", tmp_path / "new" / "r.md").exit_code == 0
    assert "| B1 H2 S64 D32 causal fp32 | fwd |" in (tmp_path / "new" / "r.md").read_text()
    for output in (tmp_path / "new" / "r.md" / "x.png", tmp_path / "new" / "r.md" / "x.md"):
        refused = invoke("--show", folder / "r.csv", "-o", output)
        assert (refused.exit_code, refused.output.count("\n")) == (2, 1)
        assert f"output is '{output}'" in refused.output
    refused = invoke("--show", folder / "r.csv", "-o", tmp_path / "plot")
    assert (refused.exit_code, refused.output.count("\n")) == (2, 1)
    assert "it must end in .md, or in a plot's format" in refused.output
    assert not list(tmp_path.glob("plot*"))


def test_listing_and_wrong_requests() -> None:
    listed = invoke("--list")
    assert listed.exit_code == 0
    assert all(suite.name in listed.output for suite in SUITES)
    for arguments, message in (
        ((), "no suite is named"),
        (("nope",), "suite is 'nope'; it must be one of"),
        (("attention(q=1x8x1x8)",), "spelling is 'attention(q=1x8x1x8)'; it lacks kv="),
        (("attention(q=1x8x1x8,kv=8x1x8,bf16,sink=1:fp32,lse)",), "leave out sink=1:fp32, lse: the benchmark times sizes"),
        (("attention(q=1x8x1x8,kv=8x1x8,fp64)",), "leave out fp64: "),
        (("attention(q=1x8x1x8,kv=0x1x8,bf16)",), "some query must see a key"),
    ):
        refused = invoke(*arguments)
        assert refused.exit_code == 2
        assert message in refused.output


def test_the_parent_needs_no_torch() -> None:
    code = "import sys, flashtile.bench.main; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=LIBRARY).returncode == 0
