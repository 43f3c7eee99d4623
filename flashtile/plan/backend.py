"""What a backend must offer to `dispatch`."""

from __future__ import annotations

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
    `dlse` tells whether a gradient of lse arrives.
    """

    wanted: frozenset[str] = frozenset({"q", "k", "v"})
    dlse: bool = False


class Backend(Protocol):
    """A way to run problems. `unsupported` is read by dispatch, error texts, the support matrix and the tests."""

    name: str

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

    def cached(self, problem: CachedProblem | AppendProblem, device: Device) -> Plan:
        """Plan from q, the pools k and v, their table and lengths to out and lse; or from new k, v and slots into the pools."""
        ...
