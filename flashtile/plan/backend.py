"""What a backend must offer to `dispatch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from flashtile.plan.call import Plan
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import AppendProblem, CachedProblem
from flashtile.problem.options import Variant


@dataclass(frozen=True)
class Gradients:
    """What a backward has to produce, and from what.

    `wanted` lists outputs among "q", "k", "v"; captured tensors say it themselves (`TensorSpec.grad`).
    `dlse` tells whether a gradient of lse arrives. `wide_keys`: dk and dv of a 16-bit problem are stored in float32, for a
    caller who adds up those of several calls.
    """

    wanted: frozenset[str] = frozenset({"q", "k", "v"})
    dlse: bool = False
    wide_keys: bool = False


@dataclass(frozen=True)
class Direction:
    """What a pass beyond the first derivative goes along, and from what, by the names of buffers.

    moved: inputs that have a tangent, among "q", "k", "v", "score.I.J", "sink"; that of x is the buffer `tx`.
    given: of a second derivative, which of "dout", "dlse" and their own tangents "tdout", "tdlse" there are; what is not there
    is zero. wanted: of which of "q", "k", "v" it makes gradients; "out", "lse" where their tangents are wanted too; of
    statistics, which of "peak", "entropy", "mass". last: of how many of an item's last queries mass is, 0 for all.
    """

    moved: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()
    wanted: frozenset[str] = frozenset()
    last: int = 0


ROW_STATISTICS = ("peak", "entropy")  # of rows, which a forward can keep: largest score, entropy

# Passes that a backend may offer beyond forward and backward, what they are for, and what is said where one is missing.
PASSES = {
    "tangent": (
        "forward-mode differentiation",
        "tangents are not implemented; use reverse mode, such as torch.autograd.grad or torch.func.vjp",
    ),
    "second": ("the second derivative", "gradients of gradients are not implemented"),
    "statistics": ("statistics", "its kernels give no largest logit, entropy or mass"),
    "entropy": ("the entropy's gradient", "it is not implemented"),
}


Asked = Callable[[AttentionProblem, Device, Direction], list[str]]


def takes_all(problem: AttentionProblem, device: Device, direction: Direction) -> list[str]:
    """No reason against anything."""
    return []


@dataclass(frozen=True)
class OfferedPass:
    """What makes the plans of a pass, and says why it cannot: reasons beside those against the backend's forward."""

    plan: Callable[[AttentionProblem, Device, Direction], Plan]
    unsupported: Asked = takes_all


Passes = Mapping[str, OfferedPass]


class Backend(Protocol):
    """A way to run problems. `unsupported` is read by dispatch, error texts, the support matrix and the tests.

    passes: those of PASSES that there are, and perhaps "watched". "tangent" goes from inputs and tangents to `out`, `lse`,
    `tout`, `tlse`; "second" from the former, and the gradients that arrive, to the derivatives of dq, dk, dv (and
    `dscore.I.J`, `dsink`); "statistics" from inputs and lse to `peak`, `entropy`, `mass`, "entropy" from these two and
    `dentropy` to gradients; "watched" is the forward, which keeps those of ROW_STATISTICS that are wanted.
    """

    name: str
    passes: Passes

    def unsupported(self, problem: AttentionProblem, device: Device, variant: Variant | None = None) -> list[str]:
        """Reasons why this backend cannot run the problem there; empty when it can.

        With a variant the question is about the backward, without one about the forward.
        """
        ...

    def forward(self, problem: AttentionProblem, device: Device) -> Plan:
        """Plan from inputs q, k, v (and captured `score.I.J`) to outputs out, lse."""
        ...

    def backward(self, problem: AttentionProblem, device: Device, gradients: Gradients, variant: Variant) -> Plan:
        """Plan from q, k, v, out, lse, dout (dlse) to dq, dk, dv (and `dscore.I.J`), as far as wanted."""
        ...

    def unsupported_cached(self, problem: CachedProblem | AppendProblem, device: Device) -> list[str]:
        """Reasons why this backend cannot attend over a cache, or write into it, there; empty when it can."""
        ...

    def cached(self, problem: CachedProblem | AppendProblem, device: Device, general: bool = False) -> Plan:
        """Plan from q, the pools k and v, their table and lengths to out and lse; or from new k, v and slots into the pools.

        general: the sizes stand for others (exported C), so that no choice takes more than to compare them.
        """
        ...
