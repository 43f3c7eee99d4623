"""The wheel: pure Python, without the tests, importable without PyTorch and Triton, in little time."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flashtile

ROOT = Path(__file__).parent.parent
IMPORT_SECONDS = 0.1  # 0.001 on a 2 GHz core; PyTorch alone takes 1


def run(code: str, where: Path) -> str:
    """What a new interpreter prints that sees no other packages than those in `where`: no site, no PYTHONPATH."""
    named = f"import sys; sys.path.insert(0, {str(where)!r})\n{code}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", named], capture_output=True, text=True, timeout=120, cwd=where)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source tree, built by the backend that pyproject.toml names."""
    pytest.importorskip("hatchling", reason="hatchling, which builds wheels, is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    code = f"import hatchling.build; print(hatchling.build.build_wheel({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


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


def test_the_import_takes_little_time() -> None:
    """By the processor's clock, the least of three: the machine may be busy."""
    code = "import time; start = time.process_time(); import flashtile; print(time.process_time() - start)"
    assert min(float(run(code, ROOT)) for _ in range(3)) < IMPORT_SECONDS
