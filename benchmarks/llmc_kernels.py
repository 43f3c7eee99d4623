"""llm.c's own fp32 attention kernels and FlashAttention.C's, compiled from their sources for a comparison and kept nowhere.

Their programs are included whole, with a function of ours behind them; tensors are llm.c's: inp (B, T, 3, NH, 64), out
(B, T, NH, 64). Products are cuBLAS's, in TF32, as their programs choose on such a card.
"""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HEADER = """
#define main theirs
#include "{source}"
#undef main
"""
CUBLAS = """
static void ready(void) {
    if (cublas_handle) return;
    cublasCheck(cublasCreate(&cublas_handle));
    cublasCheck(cublasSetMathMode(cublas_handle, CUBLAS_TF32_TENSOR_OP_MATH));
}
"""
FORWARD = """
extern "C" void run(float *out, float *vaccum, float *qkvr, float *preatt, float *att, float *inp,
                    int B, int T, int C, int NH) {
    ready();
    attention_forward4(out, vaccum, qkvr, preatt, att, inp, B, T, C, NH, 256);
}
"""
BACKWARD = """
extern "C" void run(float *dinp, float *dqkvr, float *dpreatt, float *datt, float *dvaccum, float *dout, float *inp,
                    float *qkvr, float *preatt, float *att, float *vaccum, int B, int T, int C, int NH) {
    ready();
    attention_backward(8, dinp, dqkvr, dpreatt, datt, dvaccum, dout, inp, qkvr, preatt, att, vaccum, B, T, C, NH, 256);
}
"""
FLASH = """
extern "C" void run(float *out, float *k, float *q, float *v, int B, int T, int NH) {
    int tiles = (T + 31) / 32;
    flashattention<<<dim3(B * NH, tiles), dim3(8, 8)>>>(out, k, q, v, 0.125f, tiles, tiles, T);
}
"""


def build(source: Path, code: str) -> Any:
    """The function `run` of a source with our code behind it. Raises RuntimeError with nvcc's words."""
    cublas = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"
    with tempfile.TemporaryDirectory() as folder:
        wrapper, library = Path(folder) / "wrapper.cu", Path(folder) / "it.so"
        wrapper.write_text(HEADER.format(source=source.resolve()) + code)
        found = [f"-I{source.parent.resolve()}", *([f"-I{cublas}/include"] if cublas.exists() else [])]
        for name in ("cublas", "cublasLt"):
            at = next((cublas / "lib").glob(f"lib{name}.so*"), None)
            found += ["-Xlinker", f"{at},-rpath={at.parent}"] if at else [f"-l{name}"]  # nvcc knows no names like .so.13
        command = ["nvcc", "-O3", "--use_fast_math", "-arch=sm_90", "-shared", "-Xcompiler", "-fPIC", str(wrapper), *found]
        done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"nvcc, for {source}: {done.stderr[-1500:]}")
        return ctypes.CDLL(str(library)).run


def _call(run: Any, tensors: list[torch.Tensor], numbers: tuple[int, ...]) -> Callable[[], None]:
    given = [*(ctypes.c_void_p(t.data_ptr()) for t in tensors), *numbers]
    return lambda: run(*given)


class Theirs:
    """Their kernels, for problems of head_dim 64.

    llmc: llm.c's dev/cuda; flash: FlashAttention.C's src/llm.c.
    """

    def __init__(self, llmc: Path, flash: Path):
        self.forward = build(llmc / "attention_forward.cu", CUBLAS + FORWARD)
        self.backward = build(llmc / "attention_backward.cu", CUBLAS + BACKWARD)
        self.flash = build(flash / "attention_forward.cu", FLASH)

    def calls(self, inp: torch.Tensor, dout: torch.Tensor, out: torch.Tensor, dinp: torch.Tensor) -> dict[str, dict[str, Any]]:
        """By direction, then by name: calls that compute the causal problem, each checked here against our results.

        FlashAttention.C's is the kernel alone, of tensors that were permuted before. Raises ArithmeticError.
        """
        b, t, _, heads, width = inp.shape
        numbers = (b, t, heads * width, heads)
        like = lambda *shape: torch.zeros(shape, device=inp.device)  # noqa: E731
        found, vaccum, qkvr = torch.empty_like(out), torch.empty_like(out), torch.empty_like(inp)
        preatt, att = like(b, heads, t, t), like(b, heads, t, t)
        forward = _call(self.forward, [found, vaccum, qkvr, preatt, att, inp], numbers)
        forward()
        check("llm.c", found, out)
        grads = [
            torch.zeros_like(inp),
            torch.zeros_like(inp),
            like(b, heads, t, t),
            like(b, heads, t, t),
            torch.zeros_like(out),
        ]
        backward = _call(self.backward, [*grads, dout, inp, qkvr, preatt, att, vaccum], numbers)
        backward()
        check("llm.c, backward", grads[0], dinp)
        q, k, v = (part.transpose(1, 2).contiguous() for part in inp.unbind(2))
        made = torch.empty_like(q)
        flash = _call(self.flash, [made, k, q, v], (b, t, heads))
        flash()
        check("FlashAttention.C", made.transpose(1, 2), out)
        return {"forward": {"llm.c": forward, "FlashAttention.C": flash}, "backward": {"llm.c": backward}}


def check(name: str, found: torch.Tensor, ours: torch.Tensor) -> None:
    error = float((found - ours).norm() / ours.norm())
    if not error < 1e-2:
        raise ArithmeticError(f"{name} is off by {error:.2g}")
