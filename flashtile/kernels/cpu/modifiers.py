"""The score modifiers of one call, by their formulas in PyTorch and, backwards, by autograd."""

from __future__ import annotations

import torch

from flashtile.problem.attention import AttentionProblem
from flashtile.problem.score import Position


class Modifiers:
    """The score modifiers of a problem with their captured tensors, and the gradients of those so far (`dscore.I.J`)."""

    def __init__(self, p: AttentionProblem, tensors: dict[str, torch.Tensor], dtype: torch.dtype):
        self.chain, self.captured, self.grads = p.score, {}, {}
        for i, spec in enumerate(p.score):
            for j, described in enumerate(spec.tensors):
                tensor = tensors[f"score.{i}.{j}"].detach()
                if described.grad:
                    tensor = tensor.to(dtype).requires_grad_()
                    sums = dtype if spec.kind.captured[j].broadcast else torch.float64  # of many scores, or of few
                    self.grads[f"dscore.{i}.{j}"] = torch.zeros_like(tensor, dtype=sums)
                self.captured[i, j] = tensor
        self.hide = any(spec.kind.curve is None for spec in self.chain)  # -inf and what is near it: whether there may be such
        self.leaves = [t for t in self.captured.values() if t.requires_grad]
        self.adds = not self.leaves and all(spec.kind.add is not None for spec in self.chain)  # a gradient passes as it is

    def apply(self, score: torch.Tensor, at: Position, seen: torch.Tensor | None = None) -> torch.Tensor:
        """The modified scores, in the dtype and shape (batch, heads_q, rows, width) of `score`.

        Given which are `seen`, each modifier takes the others as 0, and so sends no NaN that is hidden backwards.
        """
        given = score
        for i, spec in enumerate(self.chain):
            captured = tuple(self.captured[i, j] for j in range(len(spec.tensors)))
            if seen is not None:
                score = torch.where(seen, score, 0.0)
            score = spec.kind.apply(score, at, spec.scalars, captured).to(given.dtype)
        return score

    def write(self, score: torch.Tensor, at: Position) -> None:
        """`apply`, in place."""
        for i, spec in enumerate(self.chain):
            spec.kind.apply_(score, at, spec.scalars, tuple(self.captured[i, j].detach() for j in range(len(spec.tensors))))

    def record(self, score: torch.Tensor, at: Position, seen: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(score, modified score) with autograd's graph between them. seen: which are; None for all of them."""
        # operators run where autograd sees nothing; formulas are differentiated there all the same
        with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
            score = score.detach().requires_grad_()
            return score, self.apply(score, at, seen)

    def pull(self, saved: tuple[torch.Tensor, torch.Tensor], grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the score, given that of the modified score; what captured tensors receive is added up."""
        score, modified = saved
        if not modified.requires_grad:  # as where it is made of positions alone
            return torch.zeros_like(score)
        ds, *given = torch.autograd.grad(modified, (score, *self.leaves), grad, allow_unused=True)
        for total, share in zip(self.grads.values(), given, strict=True):
            if share is not None:
                total += share
        return torch.zeros_like(score) if ds is None else ds
