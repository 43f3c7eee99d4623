"""Exported C answers wrong arguments, a missing or failing driver and unknown GPUs with an error that says what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.export.conftest import ROOT, compile_c, environment


@pytest.fixture(scope="module")
def library(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("library") / "libsmall.so"
    compile_c(exported / "flashtile_attention.c", made, "-std=c99", "-shared", "-fPIC")
    return made


def answer(library: Path, case: str, **more: str) -> tuple[str, str]:
    command = [sys.executable, "-m", "tests.export.errors", str(library), case]
    done = subprocess.run(command, env=environment(**more), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    status, _, message = done.stdout.partition("|")
    return status, message


@pytest.mark.parametrize(
    ("case", "status", "message"),
    [
        ("right", "ok", ""),
        ("null", "invalid argument", "k is NULL"),
        ("misaligned", "invalid argument", "out is 0x100008; it must be a multiple of 16"),
        ("zero", "invalid argument", "seqlen_q is 0; it must be from 1 to 2147483647"),
        ("negative", "invalid argument", "batch is -2; it must be from 1 to 2147483647"),
        ("large", "invalid argument", "seqlen_q is 2147483648; it must be from 1 to 2147483647"),
        ("product", "not supported", "the product of all sizes is beyond 1e15"),
        ("limits", "not supported", "a stride or the number of tiles is beyond 32 bits"),
        ("no-tensors", "invalid argument", "tensors is NULL"),
        ("no-result", "invalid argument", "bytes is NULL"),
        ("scratch", "ok", ""),
        ("no-scratch", "invalid argument", "scratch is NULL; "),
        ("little-scratch", "invalid argument", "are needed"),
        ("misaligned-scratch", "invalid argument", "scratch is 0x1000004; it must be a multiple of 16"),
        ("prepare", "ok", ""),
    ],
)
def test_arguments(driver: Path, library: Path, tmp_path: Path, case: str, status: str, message: str) -> None:
    more = {"CAPABILITY": "80", "LD_LIBRARY_PATH": str(driver), "LAUNCHES": str(tmp_path / "launches"), "PARAMETERS": "1"}
    found = answer(library, case, **more)
    assert found[0] == status
    assert message in found[1]
    assert (found[1] == "") == (status == "ok")
    assert (tmp_path / "launches").exists() == (case in ("right", "scratch")), "a call that is refused launches nothing"


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        ({"CAPABILITY": "86"}, "ok", ""),  # sm_80's kernels run on its whole generation
        ({"CAPABILITY": "90"}, "unknown device", "the GPU is sm_90; kernels were exported for sm_80"),
        ({"CAPABILITY": "75"}, "unknown device", "the GPU is sm_75"),
        ({"CAPABILITY": "80", "CONTEXT": "0"}, "no context", "no CUDA context is current"),
        ({"CAPABILITY": "80", "FAIL": "cuInit"}, "no driver", "does not start: error 999"),
        ({"CAPABILITY": "80", "FAIL": "cuCtxGetDevice"}, "driver error", "the query of the device failed: recorded driver"),
        ({"CAPABILITY": "80", "FAIL": "cuModuleLoadData"}, "driver error", "loading of attention_forward failed"),
        ({"CAPABILITY": "80", "FAIL": "cuLaunchKernel"}, "driver error", "the launch of attention_forward failed"),
        ({"CAPABILITY": "80", "LD_LIBRARY_PATH": ""}, "no driver", "the CUDA driver cannot be loaded"),
    ],
)
def test_drivers(driver: Path, library: Path, tmp_path: Path, more: dict[str, str], status: str, message: str) -> None:
    base = {"LD_LIBRARY_PATH": str(driver), "LAUNCHES": str(tmp_path / "launches"), "PARAMETERS": "1"}
    found = answer(library, "right", **{**base, **more})
    assert found[0] == status
    assert message in found[1]
