"""softmax: the public function."""

from __future__ import annotations

import torch

from flashtile.errors import InvalidProblem
from flashtile.problem.score import broadcasts
from flashtile.torch.ops.run import check_tensor, run


def softmax(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    masked_score: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """softmax(scale * x) along the last axis, over the scores that are seen; 0 elsewhere and in rows that see none.

    x: (..., rows, columns), up to four axes, fp16, bf16 or fp32, any strides.
    mask: true where a score is hidden, bool or uint8, of a shape that broadcasts to x's.
    causal: row i sees columns j <= i + columns - rows; the others are not read.
    masked_score: the score of what the mask hides, instead of -inf: apex's and Megatron's is -10000, which a row of still
        lower scores would see. It has no gradient; a row whose largest score it is gives 0.
    backend: "triton", "cpu", or None for the first that runs on the tensors' device; NotSupported says why one does not.

    Differentiable in x. Raises InvalidProblem for a request without meaning.
    """
    check_tensor("x", x)
    if not 2 <= x.dim() <= 4:
        raise InvalidProblem(f"x has shape {tuple(x.shape)}; it must be (..., rows, columns), of two to four axes.")
    missing = (None,) * (4 - x.dim())
    if mask is not None:
        check_tensor("mask", mask)
        if mask.dim() > x.dim() or not broadcasts(mask.shape, x.shape[x.dim() - mask.dim() :]):
            raise InvalidProblem(f"mask has shape {tuple(mask.shape)}; it must broadcast to that of x {tuple(x.shape)}.")
        mask = mask.expand(x.shape)[missing]
    options = dict(scale=scale, causal=causal, masked_score=masked_score)
    (out,) = run("softmax", {"x": x[missing] if missing else x, "mask": mask}, options, backend)
    return out.view(x.shape) if missing else out
