"""The float64 answer that every provider is held against before it is timed."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType

CHUNK_BYTES = 256 * 2**20  # of float64 scores at a time: 16k x 16k fits any card, and the products still fill it

# Largest admissible ||x - exact|| / ||x||, (out, gradients). Correct kernels stay 2 to 5 times below (rounding of
# inputs to the unit's operands: bf16 4e-3, fp16 5e-4, single-pass tf32 5e-4); fp16 gradients lose more at long
# seqlen, where probabilities near 1 / seqlen are subnormal. A single missed tile costs at least 5e-2.
TOLERANCE: Mapping[str, tuple[float, float]] = {
    "fp16": (2e-3, 1e-2),
    "bf16": (1e-2, 2e-2),
    "tf32": (3e-3, 5e-3),
    "tf32x3": (1e-4, 2e-4),
    "ieee": (1e-4, 2e-4),
}

Tensors = Mapping[str, torch.Tensor]


def tolerance(problem: AttentionProblem) -> tuple[float, float]:
    """Largest relative error of out, and of each gradient."""
    return TOLERANCE[problem.precision if problem.dtype is DType.FP32 else problem.dtype.value]


class Yardstick:
    """out, dq, dk, dv in float64 for the first and the last (batch, key/value head); tensors are (b, s, h, d)."""

    def __init__(self, problem: AttentionProblem, inputs: Tensors, backward: bool = True):
        self.problem = problem
        places = {(0, 0), (problem.batch - 1, problem.heads_kv - 1)}
        self.answers = {place: _exact(problem, self._slice_all(inputs, place), backward) for place in places}

    def error(self, name: str, tensor: torch.Tensor) -> float:
        """Relative error norm of `tensor`, called "out", "dq", "dk" or "dv"; nan if any element anywhere is not finite."""
        if not bool(torch.isfinite(tensor).all()):
            return math.nan
        worst = 0.0
        for place, answer in self.answers.items():
            exact = answer[name]
            gap = self._slice(name, tensor, place).double() - exact
            worst = max(worst, _norm(gap) / max(_norm(exact), 1e-30))
        return worst

    def _slice_all(self, inputs: Tensors, place: tuple[int, int]) -> dict[str, torch.Tensor]:
        return {name: self._slice(name, tensor, place).double() for name, tensor in inputs.items()}

    def _slice(self, name: str, tensor: torch.Tensor, place: tuple[int, int]) -> torch.Tensor:
        """(heads of this group, seqlen, columns)."""
        batch, head = place
        width = 1 if name in ("k", "v", "dk", "dv") else self.problem.group
        return tensor[batch, :, head * width : (head + 1) * width].transpose(0, 1)


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.square().sum().sqrt())


def _exact(problem: AttentionProblem, given: Tensors, backward: bool) -> dict[str, torch.Tensor]:
    """The formulas of the contract, in chunks of query rows; k, v, dk, dv have one head, the others `group`."""
    q, k, v, dout = (given[name] for name in ("q", "k", "v", "dout"))
    keys, values = k[0], v[0]
    out, dq, dk, dv = torch.empty_like(dout), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    step = max(1, CHUNK_BYTES // (8 * problem.group * max(problem.seqlen_k, 1)))
    columns = torch.arange(problem.seqlen_k, device=q.device)
    left, right = problem.mask.left, problem.mask.right
    for first in range(0, problem.seqlen_q, step):
        rows = slice(first, min(first + step, problem.seqlen_q))
        scores = q[:, rows] @ keys.T * problem.scale_value
        position = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + problem.shift
        if left is not None:
            scores.masked_fill_(columns < position - left, -math.inf)
        if right is not None:
            scores.masked_fill_(columns > position + right, -math.inf)
        weights = torch.softmax(scores, dim=-1).nan_to_num_(nan=0.0)  # a row that sees nothing gives 0
        out[:, rows] = weights @ values
        if backward:
            given_rows = dout[:, rows]
            dv[0] += (weights.transpose(1, 2) @ given_rows).sum(0)
            dweights = given_rows @ values.T
            mean = (weights * dweights).sum(-1, keepdim=True)  # of these very numbers: where one key is all, dq and dk are 0
            dscores = weights * (dweights - mean) * problem.scale_value
            dq[:, rows] = dscores @ keys
            dk[0] += (dscores.transpose(1, 2) @ q[:, rows]).sum(0)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}
