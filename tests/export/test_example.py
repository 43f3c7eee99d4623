"""examples/c: it is built by CMake and by hand without a warning, calls what it should, and finds what is wrong."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from flashtile.reference.attention import attention_reference
from tests.export.conftest import ROOT, compile_c, environment

EXAMPLE = ROOT / "examples" / "c"
FILES = [str(EXAMPLE / "attention.c"), str(EXAMPLE / "device.c")]


def export(folder: Path, arch: str, head_dim: int) -> None:
    problem = f"example=attention(q=1x1x2x{head_dim},kv=1x1x{head_dim},bf16,band=:0)"
    cached = f"decode=cached(attention(q=1x1x2x{head_dim},kv=16x1x{head_dim},bf16,band=:0,used=k),pages=1x16x1,split=128)"
    command = [sys.executable, "-m", "flashtile", "export", "--problem", problem, "--problem", cached, "--arch", arch]
    command += ["-o", str(folder)]
    subprocess.run(command, env=environment(), cwd=ROOT, check=True, capture_output=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, driver: Path) -> Path:
    folder = tmp_path_factory.mktemp("example")
    export(folder, "sm_80", 16)
    return folder


def check(program: Path, driver: Path, launches: Path) -> None:
    """Run it where nothing is computed: it launches the kernels of a forward and a backward, and says that they are wrong."""
    more = {"LD_LIBRARY_PATH": str(driver), "LAUNCHES": str(launches), "PARAMETERS": "1", "CAPABILITY": "80"}
    done = subprocess.run([program], env=environment(**more), capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("relative error 1.0e+00  WRONG\n") == 5
    kernels = Counter(line.split()[0] for line in launches.read_text().splitlines())
    assert kernels["attention_forward"] == kernels["attention_delta"] == kernels["attention_backward_keys"] == 1


def test_by_hand(made: Path, driver: Path, tmp_path: Path) -> None:
    extra = [FILES[1], str(made / "flashtile_attention.c"), f"-I{made}", "-DHEAD_DIM=16", "-std=c99", "-Wpedantic"]
    compile_c(Path(FILES[0]), tmp_path / "attention", *extra, "-ldl", "-lpthread", "-lm")
    check(tmp_path / "attention", driver, tmp_path / "launches")


def decode(folder: Path, functions: Path, output: Path, *flags: str) -> Path:
    """examples/c/decode.c, of `functions`."""
    extra = [FILES[1], str(functions), f"-I{folder}", "-DHEAD_DIM=16", "-std=c99", "-Wpedantic", *flags]
    compile_c(EXAMPLE / "decode.c", output / "decode", *extra, "-ldl", "-lpthread", "-lm")
    return output / "decode"


def test_decoding_launches_an_append_and_a_forward_a_step(made: Path, driver: Path, tmp_path: Path) -> None:
    """Where nothing is computed it says so; what the functions hand the driver is compared in test_launches.py."""
    program = decode(made, made / "flashtile_attention.c", tmp_path, "-DSTEPS=40")
    more = {"LD_LIBRARY_PATH": str(driver), "LAUNCHES": str(tmp_path / "launches"), "PARAMETERS": "1", "CAPABILITY": "80"}
    done = subprocess.run([program], env=environment(**more), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, ""), done.stdout + done.stderr
    assert done.stdout.endswith("WRONG\n")
    kernels = Counter(line.split()[0] for line in (tmp_path / "launches").read_text().splitlines())
    assert kernels["append_rows"] == kernels["decode_forward"] == 40


def test_strides_that_are_no_whole_vectors_are_named(made: Path, driver: Path, tmp_path: Path) -> None:
    compile_c(made / "flashtile_attention.c", tmp_path / "it.so", "-std=c99", "-shared", "-fPIC", "-ldl", "-lpthread")
    script = f"""
import ctypes
library = ctypes.CDLL({str(tmp_path / "it.so")!r})
library.flashtile_last_error.restype = ctypes.c_char_p
for strides in ((512, 24, 16), (512, 32, 16), (2**30, 32, 16)):
    sizes = [ctypes.c_int64(n) for n in (4, 1, 2, 40, 10, *strides)]
    print(library.flashtile_decode_append_scratch(*sizes, ctypes.byref(ctypes.c_size_t())), library.flashtile_last_error())
"""
    more = environment(LD_LIBRARY_PATH=str(driver), CAPABILITY="80")
    done = subprocess.run([sys.executable, "-c", script], env=more, capture_output=True, text=True, check=True)
    first, *others = done.stdout.splitlines()
    assert first.startswith("1 ")
    assert "flashtile_decode_append: row_stride is 24; it must be a multiple of 16" in first
    assert [line[0] for line in others] == ["0", "0"]


def test_decoding_is_right_where_its_functions_are(made: Path, driver: Path, tmp_path: Path) -> None:
    """With both functions in plain C: pages, lengths and strides are handed over as the header says."""
    program = decode(made, ROOT / "tests/export/decode_plain.c", tmp_path)
    done = subprocess.run([program], env=environment(LD_LIBRARY_PATH=str(driver)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all right\n")


@pytest.mark.skipif(shutil.which("cmake") is None, reason="CMake is not installed")
def test_by_cmake(made: Path, driver: Path, tmp_path: Path) -> None:
    folder = tmp_path / "build"
    options = [f"-DFLASHTILE_FOLDER={made}", "-DHEAD_DIM=16", "-DCMAKE_C_FLAGS=-Wall -Wextra -Werror"]
    for command in (["cmake", "-S", str(EXAMPLE), "-B", str(folder), *options], ["cmake", "--build", str(folder)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    check(folder / "attention", driver, tmp_path / "launches")
    assert (folder / "decode").is_file()


def test_what_it_compares_with_is_attention(made: Path, tmp_path: Path) -> None:
    """Its `plain` against the reference of all tests."""
    names = ("q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv")
    wrapper = """
#define main program
#include "attention.c"
void fill(uint16_t *x, int n) { while (n--) *x++ = some_number(); }
void call(const uint16_t *q, const uint16_t *k, const uint16_t *v, const uint16_t *dout, double *out, double *lse, double *dq,
          double *dk, double *dv) { plain(q, k, v, dout, out, lse, dq, dk, dv); }
"""
    (tmp_path / "wrapper.c").write_text(wrapper)
    extra = ["-shared", "-fPIC", f"-I{EXAMPLE}", f"-I{made}", FILES[1], str(made / "flashtile_attention.c"), "-DHEAD_DIM=16"]
    compile_c(tmp_path / "wrapper.c", tmp_path / "plain.so", *extra, "-ldl", "-lpthread", "-lm")
    library = ctypes.CDLL(str(tmp_path / "plain.so"))
    shapes = (
        dict.fromkeys(names, (2, 100, 6, 16)) | {"lse": (2, 6, 100)} | dict.fromkeys(("k", "v", "dk", "dv"), (2, 130, 3, 16))
    )
    tensors = {n: torch.zeros(shapes[n], dtype=torch.bfloat16 if n in names[:4] else torch.float64) for n in names}
    for name in names[:4]:
        library.fill(ctypes.c_void_p(tensors[name].data_ptr()), tensors[name].numel())
    library.call(*(ctypes.c_void_p(tensors[name].data_ptr()) for name in names))
    q, k, v = (tensors[name].double().requires_grad_() for name in "qkv")
    out, lse = attention_reference(q, k, v, causal=True)
    out.backward(tensors["dout"].double())
    found = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    for name, exact in found.items():
        torch.testing.assert_close(tensors[name], exact.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    export(tmp_path, f"sm_{major}{minor}", 16)
    extra = [FILES[1], str(tmp_path / "flashtile_attention.c"), f"-I{tmp_path}", "-DHEAD_DIM=16", "-std=c99"]
    compile_c(Path(FILES[0]), tmp_path / "attention", *extra, "-ldl", "-lpthread", "-lm")
    done = subprocess.run([tmp_path / "attention"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all right\n")
    program = decode(tmp_path, tmp_path / "flashtile_attention.c", tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all right\n")
