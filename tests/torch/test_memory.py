"""Memory grows with seqlen and not with its square: nothing of seqlen_q x seqlen_k is ever stored."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from itertools import accumulate
from statistics import linear_regression
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import flashtile
from flashtile import Alibi, Options, Softcap
from flashtile.problem.options import Variant
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.describe import make_problem
from flashtile.torch.execute.bound import device_of
from tests.backends import OF_KERNELS
from tests.cases import DTYPES

GPU_LENGTHS = tuple(2**n for n in range(10, 17))
MOST_EXPONENT = 1.02
ASKED = "requested_bytes.all"  # what is allocated depends on the blocks that earlier tests left


@dataclass(frozen=True)
class Call:
    """A kind of call, for any length."""

    name: str
    dtype: str = "fp32"
    head_dim_v: int = 32
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    modified: bool = False
    dlse: bool = False

    def tensors(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> list[torch.Tensor]:
        """q, k, v, dout and slopes; the first three and the last are leaves."""
        shapes = ((seqlen_q, 2, 32), (seqlen_k, 1, 32), (seqlen_k, 1, self.head_dim_v), (seqlen_q, 2, self.head_dim_v))
        made = [torch.randn(1, *shape, device=device, dtype=DTYPES[self.dtype]) for shape in shapes]
        made.append(torch.rand(2, device=device))
        return [t.requires_grad_(i != 3) for i, t in enumerate(made)]

    def arguments(self, slopes: torch.Tensor, options: Options) -> dict[str, Any]:
        score = (Softcap(20.0), Alibi(slopes)) if self.modified else ()
        return {"causal": self.causal, "window": self.window, "score": score, "options": options}

    def step(self, tensors: list[torch.Tensor], options: Options) -> list[torch.Tensor]:
        """out, lse and the gradients."""
        q, k, v, dout, slopes = tensors
        out, lse = flashtile.attention(q, k, v, **self.arguments(slopes, options), return_lse=True)
        leaves = [q, k, v, slopes] if self.modified else [q, k, v]
        loss, given = ([out, lse], [dout, torch.ones_like(lse)]) if self.dlse else ([out], [dout])
        return [out, lse, *torch.autograd.grad(loss, leaves, given)]


CALLS = (
    Call("full"),
    Call("causal", causal=True),
    Call("causal-bf16", dtype="bf16", causal=True),
    Call("causal-dlse", causal=True, dlse=True),
    Call("head_dim_v", head_dim_v=48, causal=True),
    Call("window", dtype="fp16", window=(300, 40)),
    Call("modified", causal=True, modified=True, dlse=True),
)


@pytest.mark.parametrize("lengths", [(2048, 2048), (1500, 3000), (3000, 1500)], ids=str)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_the_cpu_never_holds_a_score_matrix(call: Call, lengths: tuple[int, int]) -> None:
    """No allocation, also inside torch's own kernels, has room for one byte per score of one head."""
    largest, peak = cpu_bytes(call, *lengths)
    assert largest < lengths[0] * lengths[1]
    _, peak_twice = cpu_bytes(call, *(2 * length for length in lengths))
    assert peak < peak_twice < 2.1 * peak


def cpu_bytes(call: Call, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """(the largest allocation, the most held at once) of a forward and backward."""
    tensors = call.tensors(seqlen_q, seqlen_k, torch.device("cpu"))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call.step(tensors, Options(backend="cpu"))
    profiler: Any = record.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(sizes), max(accumulate(sizes))


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
@pytest.mark.parametrize(("backend", "variant"), OF_KERNELS)
def test_gpu_memory_is_linear(
    backend: str, variant: Variant, call: Call, device: torch.device, record_property: pytest.RecordProperty
) -> None:
    """From 1k to 64k tokens, beyond inputs and outputs, for the forward and for forward and backward."""
    options = Options(backend=backend, backward=variant)
    probe = call.tensors(1024, 1024, device)
    problem, _ = make_problem(*probe[:3], Arguments(**call.arguments(probe[4], options)))
    if reasons := flashtile.dispatch.backend_named(backend).unsupported(problem, device_of(device), variant):
        pytest.skip("; ".join(reasons))
    for what, steps in {"forward": forward_bytes, "forward and backward": step_bytes}.items():
        sizes = {seqlen: steps(call, seqlen, options, device) for seqlen in GPU_LENGTHS}
        slope = linear_regression(
            *zip(*((math.log(n), math.log(max(size, 1))) for n, size in sizes.items()), strict=True)
        ).slope
        record_property(what, f"seqlen^{slope:.4f}")
        assert slope <= MOST_EXPONENT, f"{what} needs seqlen^{slope:.3f}: {sizes}"


def forward_bytes(call: Call, seqlen: int, options: Options, device: torch.device) -> int:
    """Peak of a forward beyond q, k, v and out: what is kept for the backward, and scratch."""
    q, k, v, _, slopes = call.tensors(seqlen, seqlen, device)
    before = start(device)
    out = flashtile.attention(q, k, v, **call.arguments(slopes, options))
    return torch.cuda.memory_stats(device)[f"{ASKED}.peak"] - before - out.nbytes


def step_bytes(call: Call, seqlen: int, options: Options, device: torch.device) -> int:
    """Peak of forward and backward beyond q, k, v, dout, out and the gradients."""
    tensors = call.tensors(seqlen, seqlen, device)
    before = start(device)
    made = call.step(tensors, options)
    return torch.cuda.memory_stats(device)[f"{ASKED}.peak"] - before - sum(t.nbytes for i, t in enumerate(made) if i != 1)


def start(device: torch.device) -> int:
    """Bytes held now; the peak is counted from here."""
    gc.collect()  # what earlier tests left goes now or later
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_stats(device)[f"{ASKED}.current"]
