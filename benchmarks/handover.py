"""One warp hands numbers to four others and to one through two mbarriers: what a race detector says of it, it says of these.

racecheck (2026.4) finds one race, between four warps' reads and the next write to the same word: it follows what a thread did
before it arrived at an mbarrier, not what others did before a barrier that this thread met them at.
"""

from __future__ import annotations

import torch

from flashtile.kernels.sm90.device.ticket import make_tickets
from flashtile.triton_glue.gluon import fence_async_shared, gl, gluon

ROUNDS = 64


@gluon.jit
def give(tickets, rounds):
    for i in range(rounds):
        tickets.publish(i, (i * i,))


@gluon.jit
def receive(out_ptr, tickets, rounds, WARPS: gl.constexpr):
    for i in range(rounds):
        gl.store(out_ptr + i, tickets.read(i, WARPS))


@gluon.jit(do_not_specialize=["rounds"])
def attention_handover(out_ptr, rounds):
    tickets = make_tickets(2, 1)
    fence_async_shared()
    gl.warp_specialize([
        (receive, (out_ptr, tickets, rounds, 4)), (receive, (out_ptr + rounds, tickets, rounds, 1)), (give, (tickets, rounds)),
    ], [1, 1], [24, 24])  # fmt: skip


def all_arrive() -> bool:
    """Whether every number arrives, on the current GPU."""
    out = torch.zeros(2, ROUNDS, dtype=torch.int32, device="cuda")
    attention_handover[(1,)](out, ROUNDS, num_warps=4)
    return out.tolist() == 2 * [[i * i for i in range(ROUNDS)]]
