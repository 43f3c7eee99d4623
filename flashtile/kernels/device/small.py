"""Which problems are so small that what a pass does twice, or in float64, costs nothing that can be seen."""

from __future__ import annotations

from flashtile.problem.attention import AttentionProblem

# Of a forward. float64's matrix units (67 TFLOP/s on an H100) are done with it before the host has launched the next kernel.
SMALL_FLOPS = 10**9


def is_small(problem: AttentionProblem) -> bool:
    """Whether its forward has few floating-point operations, counted without a mask."""
    scores = problem.batch * problem.heads_q * problem.span_q * problem.span_k
    return 2 * scores * (problem.head_dim + problem.head_dim_v) <= SMALL_FLOPS
