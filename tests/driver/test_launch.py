"""Direct launches, and graphs of them, hand the driver what Triton's own launches do, bulk copy descriptors included; and
launches find compiled what `export.compile` compiled without a GPU.

A recording stand-in for libcuda is compiled and given to Triton; what a GPU would get is compared word by word.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COMPILER = shutil.which("cc")


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="here launches reach a GPU")
compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler to build the recording driver with")


def printed(tmp_path: Path, script: str, *arguments: str) -> list[str]:
    """The lines that a script of this folder prints, given arguments, with the recording driver."""
    assert COMPILER is not None
    library = tmp_path / "libcuda.so.1"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(library), str(HERE / "libcuda.c")], check=True)
    (tmp_path / "libcuda.so").symlink_to(library.name)
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path), "LAUNCHES": str(tmp_path / "launches"),
        "EARLY": str(tmp_path / "early"), "PARAMETERS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", f"tests.driver.{script}", *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@on_cpu
@compiler
@pytest.mark.parametrize(
    "spelling",
    [
        "attention(q=2x257x8x128,kv=300x2x128,bf16,band=:0,score=softcap(30.0))",
        "attention(q=1x128x2x64,kv=128x2x64,fp16)",
        "attention(q=1x1024x4x64,kv=1024x2x64,fp16)",  # dk and dv of query heads are summed
        # strides that equal 1, inside tuples
        "attention(q=2x70x4x16,kv=40x2x16,fp16,where=block_table(128;128;2x4x1x1:bool),blocks=128x128)",
    ],
)
def test_direct_launches_equal_tritons_own(tmp_path: Path, spelling: str) -> None:
    seen: list[str] = []
    for line in printed(tmp_path, "launches", spelling):
        backend, kernel, direct, known, text = line.split("|")
        if kernel == "replay":
            assert ast.literal_eval(direct) == ast.literal_eval(known) == ast.literal_eval(text) != []
            seen.append(f"{backend} {kernel}")
            continue
        first, *others = ast.literal_eval(text)
        assert direct == "True", f"{kernel} is still launched through the JIT"
        assert known == "True", f"{kernel} is compiled anew, whatever export.compile left on disk, or launched too early"
        assert others == [first, first], f"{backend} {kernel}"
        seen.append(f"{backend} {kernel}")
    assert {"hopper attention_forward", "hopper attention_backward", "hopper replay", "triton attention_backward_keys"} <= set(
        seen
    )


@on_cpu
@compiler
def test_a_plan_s_kernels_are_compiled_side_by_side_and_once(tmp_path: Path) -> None:
    lines = printed(tmp_path, "ahead", "attention(q=1x128x2x256,kv=128x2x256,fp16)")
    ahead, after_failure = (sorted(ast.literal_eval(line)) for line in lines)
    names = ["attention_backward", "attention_backward", "attention_dq", "attention_rows"]
    assert ahead == [(name, False, False) for name in names]
    assert after_failure == [(name, True, True) for name in names]  # by the launches themselves


@on_cpu
@compiler
def test_a_first_forward_that_compiles_and_wants_gradients_compiles_the_backward_too(tmp_path: Path) -> None:
    (line,) = printed(tmp_path, "first")
    kernels = ("attention_backward", "attention_dq", "attention_rows")
    assert sorted(ast.literal_eval(line)) == sorted(
        [
            ("alone", "attention_forward", False),
            ("on disk", "attention_forward", True),
            *(("forward", name, False) for name in ("attention_forward", *kernels)),
            *(("backward", name, True) for name in kernels),
        ]
    )


@on_cpu
@compiler
def test_calls_that_are_known_run_from_their_inputs_alone(tmp_path: Path) -> None:
    """After the first forward and the first backward, which compile; without a gradient no lse is made."""
    alone, every, one = (ast.literal_eval(line) for line in printed(tmp_path, "direct", "-", "qkv", "k"))
    assert alone == 3 * [["out", None]]
    assert every == [["out", "lse"]] + 3 * [["out", "lse"], ["dq", "dk", "dv"]]
    assert one[:2] == 2 * [["out", "lse"]]
    assert all("dk" in outputs for outputs in one[2::2])


@on_cpu
@compiler
def test_outputs_are_written_where_a_caller_has_them_alone_where_they_fit(tmp_path: Path) -> None:
    found = [ast.literal_eval(line) for line in printed(tmp_path, "into")]
    assert found == [("rows", True, True), ("heads", False, False), ("dtype", False, False), ("address", False, False)]


@on_cpu
@compiler
def test_calls_find_on_disk_what_warm_compiled(tmp_path: Path) -> None:
    *counts, found = printed(tmp_path, "warmed")
    expected = (1, 1, 0), (4, 3, 1), (4, 0, 4)  # a forward, both, both again
    assert counts == [f"{all_} kernels, {now} compiled now, {before} on disk before" for all_, now, before in expected]
    assert sorted(ast.literal_eval(found)) == [
        (name, True) for name in ("attention_backward", "attention_dq", "attention_forward", "attention_rows")
    ]
