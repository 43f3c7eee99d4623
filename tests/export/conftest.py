"""Things that the tests of exported C share: a recording driver, and a small library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("cc")
SMALL = "attention(q=1x1x2x16,kv=1x1x16,bf16)"  # grouped heads, no mask: kernels that compile in a second


def environment(**more: str) -> dict[str, str]:
    """Of a process that compiles kernels."""
    return {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), **more}


def compile_c(source: Path, output: Path, *flags: str, compiler: Sequence[str] = ()) -> None:
    """Compile as strictly as users may; no warning is accepted."""
    libraries = [flag for flag in flags if flag.startswith("-l")]  # the linker wants them last
    others = [flag for flag in flags if flag not in libraries]
    strict = [*(compiler or (COMPILER or "cc",)), "-O1", "-Wall", "-Wextra", "-Werror"]
    command = [*strict, *others, str(source), "-o", str(output), *libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda that records (tests/driver/libcuda.c)."""
    if torch.cuda.is_available():
        pytest.skip("here launches reach a GPU")
    if COMPILER is None:
        pytest.skip("no C compiler")
    pytest.importorskip("triton", reason="Triton is not installed")
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libcuda.so.1"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(library), str(ROOT / "tests/driver/libcuda.c")], check=True)
    (folder / "libcuda.so").symlink_to(library.name)
    return folder


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, driver: Path) -> Path:
    """A folder with the C of a small problem for sm_80 and llm.c's functions for one dtype, made by the command."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exported"
    with FileLock(f"{folder}.lock"):
        if not (folder / "flashtile_attention.c").exists():  # else another worker of the session has made it
            export(folder)
    return folder


def export(folder: Path) -> None:
    command = [sys.executable, "-m", "flashtile", "export", "-o", str(folder), "--arch", "sm_80", "--jobs", "1"]
    packed = "attention(q=1x1x1x16,kv=1x1x16,bf16,band=:0)"
    both = ["--layout", "llmc", "--problem", packed]
    subprocess.run([*command, *both], env=environment(), cwd=ROOT, check=True, capture_output=True)
    (folder / "packed").mkdir()
    for name in ("flashtile_attention.c", "flashtile_attention.h"):
        (folder / name).rename(folder / "packed" / name)
    subprocess.run([*command, "--problem", f"small={SMALL}"], env=environment(), cwd=ROOT, check=True, capture_output=True)
