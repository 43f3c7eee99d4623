"""Peak memory of one attention, forward and backward, as torch's allocator saw it."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from flashtile.demo.model import Attend

BATCH, HEADS, HEAD_DIM = 1, 4, 32


def peak_bytes(attend: Attend, seqlen: int, device: torch.device) -> int:
    """Bytes held at the highest point of a forward and backward beyond q, k, v and dout: outputs, gradients, scratch."""
    shape = (BATCH, seqlen, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
    dout = torch.randn(shape, device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        attend(q, k, v).backward(dout)
        return torch.cuda.max_memory_allocated(device) - before
    # The CPU allocator keeps no peak, but the profiler sees each allocation and release, also those inside kernels.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        attend(q, k, v).backward(dout)
    profiler: Any = record.profiler
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def naive_bytes(seqlen: int) -> int:
    """What the formula as it stands needs: about three float32 matrices of seqlen x seqlen per head."""
    return 3 * 4 * BATCH * HEADS * seqlen * seqlen
