"""The emitted C compiles everywhere without a warning, and is free of races and of memory errors on the host."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.export.conftest import ROOT, compile_c, environment
from tests.test_docs import blocks

COMPILERS = [
    ("gcc", "-std=c99", "-Wpedantic", "-O0"), ("gcc", "-std=c99", "-Wpedantic", "-O3"), ("clang", "-std=c99", "-O2"),
    ("g++", "-xc++", "-std=c++11", "-O2"), ("clang++", "-xc++", "-std=c++11", "-O2"),
]  # fmt: skip
LINK = ("-ldl", "-lpthread")
ZIG = ROOT / ".venv" / "clang" / "ziglang" / "zig"  # Zig's compiler of C and C++ is clang; tools/setup.sh gets it


def command_of(name: str) -> list[str]:
    """How a compiler is called here; empty where there is none."""
    if shutil.which(name):
        return [name]
    return [str(ZIG), "c++" if name == "clang++" else "cc"] if name.startswith("clang") and ZIG.exists() else []


@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda flags: " ".join(flags))
@pytest.mark.parametrize("folder", [".", "packed"])
def test_it_compiles_without_a_warning(exported: Path, tmp_path: Path, compiler: tuple[str, ...], folder: str) -> None:
    command = command_of(compiler[0])
    if not command:
        pytest.skip(f"{compiler[0]} is not installed")
    compile_c(exported / folder / "flashtile_attention.c", tmp_path / "it.o", *compiler[1:], "-c", compiler=command)


def test_the_test_program_compiles(exported: Path, tmp_path: Path) -> None:
    packed = exported / "packed"
    extra = ["-std=c99", f"-I{packed}", str(packed / "flashtile_attention.c")]
    compile_c(ROOT / "examples/llmc/test_attention.c", tmp_path / "test_attention", *extra, *LINK, "-lm")


RUNTIME = """
typedef struct stream *cudaStream_t;
typedef enum { cudaSuccess } cudaError_t;
cudaError_t cudaMalloc(void **, size_t);
cudaError_t cudaFree(void *);
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize("dtype", ["", "-DENABLE_FP32", "-DENABLE_FP16"])
def test_the_recipe_for_llmc_compiles(exported: Path, tmp_path: Path, dtype: str) -> None:
    (tmp_path / "cuda_runtime.h").write_text(RUNTIME)
    (tmp_path / "use.cpp").write_text("""
#include "attention.cuh"
void step(void *a, int B, int T, int NH, int C) {
    create_attention(B, T, NH, C);
    if (attention_stats_bytes(B, T, NH, C) == 0) return;
    attention_forward(a, a, a, B, T, NH, C, NULL);
    attention_backward(a, a, a, a, a, B, T, NH, C, NULL);
    destroy_attention();
}
""")
    folders = [f"-I{folder}" for folder in (tmp_path, ROOT / "examples/llmc", exported / "packed")]
    compile_c(tmp_path / "use.cpp", tmp_path / "use.o", "-c", *folders, *dtype.split(), compiler=["g++"])


def program(exported: Path, folder: Path) -> Path:
    made = folder / "program"
    extra = ["-std=c99", "-D_XOPEN_SOURCE=600", "-g", f"-I{exported}", str(exported / "flashtile_attention.c")]
    compile_c(ROOT / "tests/export/program.c", made, *extra, *LINK)
    return made


def test_the_c_of_the_readme_runs(exported: Path, driver: Path, tmp_path: Path) -> None:
    """With the functions of a smaller problem, for which there are kernels here, and addresses that nothing looks at."""
    (code,) = blocks("README.md", "c")
    main = "int main(void) { void *at = (void *)4096; return (int)attend(at, at, at, at, at, NULL); }\n"
    (tmp_path / "readme.c").write_text(code.replace("causal_forward", "small_forward") + main)
    extra = ["-std=c99", "-Wpedantic", f"-I{exported}", str(exported / "flashtile_attention.c")]
    compile_c(tmp_path / "readme.c", tmp_path / "readme", *extra, *LINK)
    more = {"LD_LIBRARY_PATH": str(driver), "LAUNCHES": str(tmp_path / "launches"), "PARAMETERS": "1", "CAPABILITY": "80"}
    done = subprocess.run([tmp_path / "readme"], env=environment(**more), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert launched(tmp_path / "launches") == {"attention_forward": 1}


def launched(file: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in file.read_text().splitlines())


def test_threads_may_call_at_once(exported: Path, driver: Path, tmp_path: Path) -> None:
    more = {"LD_LIBRARY_PATH": str(driver), "LAUNCHES": str(tmp_path / "launches"), "PARAMETERS": "1", "CAPABILITY": "80"}
    done = subprocess.run([program(exported, tmp_path)], env=environment(**more), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    found = launched(tmp_path / "launches")
    assert found["attention_forward"] == 20
    assert found["attention_delta"] == found["attention_backward_keys"] == found["attention_backward_queries"] == 20


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "helgrind"])
def test_valgrind_finds_nothing(exported: Path, driver: Path, tmp_path: Path, tool: str) -> None:
    more = {"LD_LIBRARY_PATH": str(driver), "LAUNCHES": str(tmp_path / "launches"), "PARAMETERS": "1", "CAPABILITY": "80"}
    command = ["valgrind", "-q", f"--tool={tool}", "--error-exitcode=9", str(program(exported, tmp_path))]
    done = subprocess.run(command, env=environment(**more), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert launched(tmp_path / "launches")["attention_forward"] == 20


def test_the_header_says_what_each_tensor_is(exported: Path) -> None:
    text = (exported / "flashtile_attention.h").read_text()
    assert "const void *q; /* bf16 (batch, seqlen_q, heads_kv * 2, 16)" in text
    assert "void *lse; /* fp32 (batch, heads_kv * 2, seqlen_q)" in text
    uses = dict(re.findall(r"(\w+); /\* .*; (.*) \*/", text.partition("backward_tensors {")[2]))
    assert uses == {
        **dict.fromkeys(("q", "k", "v", "out", "dout", "lse"), "read"),
        "dq": "written",
        "dk": "written",
        "dv": "written",
    }
    for word in ("natural logarithm", "-infinity", "aligned to 16 bytes", "may be NULL", "nothing is added"):
        assert word in " ".join(text.split())
    assert (
        "flashtile_small_backward_scratch(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t heads_kv, size_t *bytes)"
        in text
    )
