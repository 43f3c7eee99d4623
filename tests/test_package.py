"""The wheel: pure Python, importable without PyTorch and Triton, in little time; it and the sdist hold what they should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import flashtile
from tests.test_docs import blocks

ROOT = Path(__file__).parent.parent
IMPORT_SECONDS = 0.1  # 0.001 on a 2 GHz core; PyTorch alone takes 1


# Their distributions' names, where what is imported is called otherwise; tools that are no modules are asked for by theirs.
MODULES = {"pytest-xdist": "xdist", "pytest-timeout": "pytest_timeout", "import-linter": "importlinter",
           "pytorch-lightning": "pytorch_lightning"}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="Triton, and what the tests of other libraries need, is promised on Linux")
def test_every_library_of_the_dev_group_is_there() -> None:
    """Tests of these skip where one is missing, which here would hide them."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    named = [re.split(r"[^\w-]", line)[0] for line in groups["dev"] if isinstance(line, str)]
    assert len(named) > 20
    for name in ["torch", "triton", *named]:
        import_module(MODULES.get(name, name))


def run(code: str, where: Path) -> str:
    """What a new interpreter prints that sees no other packages than those in `where`: no site, no PYTHONPATH."""
    named = f"import sys; sys.path.insert(0, {str(where)!r})\n{code}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", named], capture_output=True, text=True, timeout=120, cwd=where)
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(kind: str, folder: Path, source: Path = ROOT) -> Path:
    """The wheel or sdist of a source tree, built by the backend that pyproject.toml names."""
    pytest.importorskip("hatchling", reason="hatchling, which builds wheels, is not installed")
    code = f"import hatchling.build; print(hatchling.build.build_{kind}({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python in an environment of its own in which pip put the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("clean") / "env"
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    command = [*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return python


def outcome(python: Path, code: str) -> Any:
    """How that Python ends with this code, where nothing of ours is on its path."""
    without = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON_INTERPRET"))}
    command = [str(python), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=python.parent, env=without)


def test_the_wheel_is_for_every_python_3_and_every_system(wheel: Path) -> None:
    assert wheel.name == f"flashtile-{flashtile.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        required = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist: ")]
        assert required
        assert all("extra == " in line for line in required), "something is required of everybody"
        (wheel_file,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: true" in archive.read(wheel_file).decode()


def test_the_wheel_holds_the_library_whole_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = [p for p in (ROOT / "flashtile").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert held == {p.relative_to(ROOT).as_posix() for p in files}
    assert any(name.endswith("sm90.json") for name in held), "the tiles that were measured are missing"


def test_it_is_imported_without_torch_and_triton(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
import flashtile
from flashtile import AttentionProblem, dispatch
from flashtile.plan.device import named
problem = AttentionProblem.parse("attention(q=2x100x4x64,kv=200x2x64,bf16,band=:0)")
try:
    dispatch.plan_forward(problem, named("sm90"))
except flashtile.NotSupported as refusal:
    print(refusal.reasons["triton"][0])
try:
    flashtile.attention
except ModuleNotFoundError as error:
    print(error.name)
print(flashtile.__file__)
"""
    refusal, missing, file = run(code, tmp_path).splitlines()
    assert (refusal, missing) == ("Triton is not installed", "torch")
    assert Path(file).is_relative_to(tmp_path)


def metadata(wheel: Path) -> Any:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def test_the_wheel_says_who_what_and_for_whom(wheel: Path) -> None:
    told = metadata(wheel)
    assert told["Author"] == "flashtile developers"
    assert set(told.get_all("Provides-Extra")) == {"torch", "jax", "cli", "export", "all"}
    assert "attention" in told["Keywords"].split(",")
    assert "Typing :: Typed" in told.get_all("Classifier")


def test_readme_renders_where_its_files_are_not(wheel: Path) -> None:
    told = metadata(wheel)
    text = told.get_payload()
    assert told["Description-Content-Type"] == "text/markdown"
    assert text.startswith("# flashtile\n")
    for left in ("](docs", "![", "<!--"):
        assert left not in text
    assert "Most names of flash_attn" in text, "what links say stays"


def test_extras_that_are_named_exist(wheel: Path) -> None:
    extras = set(metadata(wheel).get_all("Provides-Extra"))
    files = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "flashtile").rglob("*.py")]
    named = {word for file in files for found in re.findall(r'(?:flashtile|"\.)\[([a-z,]+)\]', file.read_text(encoding="utf-8"))
             for word in found.split(",")}  # fmt: skip
    assert {"torch", "jax", "export", "cli"} <= named <= extras


def test_the_sdist_holds_sources_without_measurements_and_pictures(tmp_path: Path) -> None:
    """And the wheel that is made of it is that of the tree."""
    sdist = built("sdist", tmp_path)
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
        archive.extractall(tmp_path, filter="data")
    assert [name for name in names if name.endswith((".csv", ".kernels", ".png", ".svg", ".pyc"))] == []
    for wanted in (
        "flashtile/__init__.py",
        "tests/conftest.py",
        "docs/architecture.md",
        "pyproject.toml",
        "LICENSE",
        "PKG-INFO",
    ):
        assert wanted in names
    assert not any(name.startswith((".venv", ".git/")) for name in names)
    assert sdist.stat().st_size < 2 * 2**20
    again = built("wheel", tmp_path, tmp_path / sdist.name.removesuffix(".tar.gz"))
    with zipfile.ZipFile(again) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {
        p.relative_to(ROOT).as_posix() for p in (ROOT / "flashtile").rglob("*") if p.is_file() and p.suffix != ".pyc"
    }
    assert metadata(again).get_payload().startswith("# flashtile\n")


def test_the_wheel_installed_alone_is_imported_and_says_what_is_missing(installed: Path) -> None:
    done = outcome(installed, "import flashtile; print(flashtile.__version__, flashtile.Softcap(30.0)); flashtile.attention")
    assert done.stdout == f"{flashtile.__version__} Softcap(cap=30.0)\n"
    assert "No module named 'torch'" in done.stderr
    done = subprocess.run([installed.parent / "flashtile", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert 'pip install "flashtile[cli]"' in done.stderr


def test_the_wheel_runs_readme_s_blocks_beside_torch(installed: Path) -> None:
    """Torch is that of the tests' environment; its flashtile, a link to this tree, is not seen."""
    import torch

    code = "\n".join(blocks("README.md", "python")[:2]).replace("2, 1024, 8, 64", "1, 32, 2, 16")
    path = f"import sys; sys.path.append({str(Path(torch.__file__).parents[1])!r})\n"
    done = outcome(installed, path + code + "\nprint(flashtile.__file__, out.shape)")
    assert done.returncode == 0, done.stderr
    assert str(installed.parents[1]) in done.stdout, "another flashtile was imported"


def test_the_wheel_runs_readme_s_block_beside_jax(wheel: Path, tmp_path: Path) -> None:
    python = ROOT / ".venv-jax" / "bin" / "python"
    if not python.exists():
        pytest.skip("there is no .venv-jax (`make jax` builds it)")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = blocks("README.md", "python")[2].replace("2, 1024, 8, 64", "1, 32, 2, 16")
    done = outcome(python, f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}\nprint(dq.shape)")
    assert done.stdout == "(1, 32, 2, 16)\n", done.stderr


def test_the_wheel_exports_c_beside_triton(installed: Path, tmp_path: Path) -> None:
    """Four small kernels; `make package` runs README's line, whose kernels take minutes, in an environment of its own."""
    triton = pytest.importorskip("triton")
    pytest.importorskip("typer")
    command = ["flashtile", "export", "--problem", "norm(x=1x64:bf16,weight=64:bf16)", "--arch", "sm_90", "-o", str(tmp_path)]
    code = f"import sys; sys.path.append({str(Path(triton.__file__).parents[1])!r}); sys.argv = {command}\n"
    done = outcome(installed, code + "from flashtile.cli import app; app()")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^4 plans, 4 kernels: about a minute", done.stdout + done.stderr, re.MULTILINE)
    assert {path.name for path in tmp_path.iterdir()} == {"flashtile_attention.c", "flashtile_attention.h"}


def test_the_version_is_one() -> None:
    assert f"version: {flashtile.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    versions = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[:2] == ["Unreleased", flashtile.__version__]


def test_the_table_of_versions_is_what_is_asked_for() -> None:
    asked = (ROOT / "pyproject.toml").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) or newer", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert rows.keys() == {"Python", "PyTorch", "JAX", "Triton"}
    for name, version in rows.items():
        package = {"Python": 'requires-python = "', "PyTorch": "torch"}.get(name, name.lower())
        assert f"{package}>={version}" in asked, name


def test_the_import_takes_little_time() -> None:
    """By the processor's clock, the least of three: the machine may be busy."""
    code = "import time; start = time.process_time(); import flashtile; print(time.process_time() - start)"
    assert min(float(run(code, ROOT)) for _ in range(3)) < IMPORT_SECONDS
