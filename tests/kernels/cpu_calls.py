"""Problems, inputs and calls of the CPU backend."""

from __future__ import annotations

from typing import Any

import torch

import flashtile
from flashtile import Options
from flashtile.kernels.cpu.backend import BACKEND
from flashtile.plan.backend import Gradients
from flashtile.plan.device import CPU
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType

OPTIONS = Options(backend="cpu")
PLACE = torch.device("cpu")


def problem(seqlen_q: int = 64, seqlen_k: int = 64, **changes: Any) -> AttentionProblem:
    return AttentionProblem(
        **{"batch": 1, "heads_q": 2, "heads_kv": 2, "head_dim": 16, "head_dim_v": 16, "dtype": DType.FP32, **changes},
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
    )


def inputs(batch: int = 1, seqlen_q: int = 50, seqlen_k: int = 50, heads_q: int = 4, heads_kv: int = 2, head_dim: int = 16,
           dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:  # fmt: skip
    """q, k, v, dout."""
    keys = (batch, seqlen_k, heads_kv, head_dim)
    queries = (batch, seqlen_q, heads_q, head_dim)
    return [torch.randn(shape).to(dtype) for shape in (queries, keys, keys, queries)]


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None = None, **how: Any):
    """out, lse, dq, dk, dv."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = flashtile.attention(*leaves, return_lse=True, options=OPTIONS, **how)
    flows = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    return out.detach(), lse.detach(), *torch.autograd.grad(flows[0], leaves, flows[1])


def notes(p: AttentionProblem, dlse: bool = False) -> tuple[str, str]:
    forward = BACKEND.forward(p, CPU)
    backward = BACKEND.backward(p, CPU, Gradients(dlse=dlse), "auto")
    return forward.notes[0], backward.notes[0]
