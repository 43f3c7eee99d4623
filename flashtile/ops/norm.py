"""layer_norm and rms_norm: the public functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.kernels.ops.host import keep_elements
from flashtile.torch.ops.call import NAMES
from flashtile.torch.ops.run import check_tensor, rows, run


@dataclass(frozen=True)
class Dropout:
    """Drops elements with probability p, exact to 2^-32: Philox4x32-7 of `seed`, int64 (1,), at (branch, row, column)."""

    p: float
    seed: torch.Tensor

    @staticmethod
    def draw(p: float, device: torch.device) -> Dropout:
        """With a seed of torch's generator of that device; no synchronisation, and anew in each replay of a CUDA graph."""
        return Dropout(p, torch.randint(2**63 - 1, (1,), device=device))

    def mask(self, shape: torch.Size | tuple[int, ...], branch: int = 0) -> torch.Tensor:
        """What is kept of a tensor (..., hidden), as booleans, computed by plain torch; branch 1 is `Branch.x`."""
        count = 1
        for n in shape[:-1]:
            count *= n
        return keep_elements(self.seed, count, shape[-1], self.p, branch).reshape(shape)


@dataclass(frozen=True)
class Branch:
    """A second branch: x is added to h, dropped out for itself; weight (and bias) make a second output of the same h."""

    x: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Subset:
    """Rows by 1-based index, 0 for none: `x[i]` is the row of x that row i takes (zeros for none), `out[i]` the row of out
    that it goes to (nowhere for none; rows of the `out_rows` that none goes to are 0). int32 or int64 (rows,).

    No row is named twice, nor one that is not there: what the tensors hold is checked on the CPU alone."""

    x: torch.Tensor | None = None
    out: torch.Tensor | None = None
    out_rows: int | None = None


_NO_BRANCH, _NO_SUBSET = Branch(), Subset()
_CALLED = {
    "x1": "branch.x", "weight1": "branch.weight", "bias1": "branch.bias", "x_subset": "subset.x", "out_subset": "subset.out",
    "out_rows": "subset.out_rows", "dropout_p": "dropout", "seed": "dropout.seed", "scale": "rowscale",
}  # fmt: skip


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_dtype: torch.dtype | None = None,
    dropout: float | Dropout = 0.0,
    rowscale: torch.Tensor | float | None = None,
    colscale: torch.Tensor | None = None,
    branch: Branch | None = None,
    subset: Subset | None = None,
    zero_centered: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Any:
    """(h - mean(h)) / sqrt(var(h) + eps) * weight + bias, with h = colscale * dropout(rowscale * x) + residual.

    x, residual: (..., hidden), fp16, bf16 or fp32, any strides; weight, bias, colscale: (hidden,).
    prenorm: also return h, in residual_dtype (residual's dtype, or x's, by default), to which it is rounded first.
    dropout: a probability, whose seed torch's generator gives, or a `Dropout`; pass 0 outside of training.
    rowscale: (...) one factor a row, without a gradient, or one number.
    branch, subset: see `Branch` and `Subset`; with a subset tensors are (rows, hidden).
    zero_centered: weights are stored without their 1. out_dtype: x's by default.
    backend: "triton", "cpu", or None for the first that runs on the tensors' device; NotSupported says why one does not.

    Returns out, or (out, the branch's out if it has a weight, h if prenorm). Differentiable in x, residual, colscale,
    weights and biases; sums over rows in a fixed order, so that gradients repeat bit by bit. dx and dresidual may be one
    tensor, as the gradients of an addition are. Raises InvalidProblem for a request without meaning.

    LayerNorm: arXiv 1607.06450.
    """
    norm = _Norm("layer", x, weight, bias, eps, residual, dropout, rowscale, colscale, branch, subset)
    return norm.run(prenorm, residual_dtype, zero_centered, out_dtype, backend)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_dtype: torch.dtype | None = None,
    dropout: float | Dropout = 0.0,
    rowscale: torch.Tensor | float | None = None,
    colscale: torch.Tensor | None = None,
    branch: Branch | None = None,
    subset: Subset | None = None,
    zero_centered: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Any:
    """h / sqrt(mean(h^2) + eps) * weight + bias; all else as in `layer_norm`. RMSNorm: arXiv 1910.07467."""
    norm = _Norm("rms", x, weight, bias, eps, residual, dropout, rowscale, colscale, branch, subset)
    return norm.run(prenorm, residual_dtype, zero_centered, out_dtype, backend)


def dtype_name(name: str, dtype: Any) -> str:
    """What a problem calls the dtype of an argument of this name. Raises InvalidProblem for what is none of a norm."""
    if dtype not in NAMES:
        raise InvalidProblem(f"{name} is {dtype!r}; it must be torch.float16, bfloat16 or float32, or None.")
    return NAMES[dtype]


class _Norm:
    """The tensors of a call, as rows, and the options that they imply."""

    def __init__(
        self, kind: str, x: Any, weight: Any, bias: Any, eps: Any, residual: Any, dropout: Any, rowscale: Any, colscale: Any,
        branch: Branch | None, subset: Subset | None,
    ):  # fmt: skip
        check_tensor("x", x)
        branch, subset = _NO_BRANCH if branch is None else branch, _NO_SUBSET if subset is None else subset
        if not isinstance(branch, Branch) or not isinstance(subset, Subset):
            raise InvalidProblem("branch and subset must be a flashtile.ops.Branch and a flashtile.ops.Subset, or None.")
        if isinstance(dropout, (int, float)) and not isinstance(dropout, bool):
            dropout = Dropout.draw(dropout, x.device) if dropout else None
        elif not isinstance(dropout, Dropout):
            raise InvalidProblem(f"dropout is {dropout!r}; it must be a probability or a flashtile.ops.Dropout.")
        scale = 1.0
        if isinstance(rowscale, (int, float)):
            scale, rowscale = rowscale, None
        self.options: dict[str, Any] = {"kind": kind, "eps": eps, "scale": scale}
        seed = None
        if dropout is not None and dropout.p != 0.0:
            self.options["dropout_p"], seed = dropout.p, dropout.seed
        if subset.out is not None or subset.out_rows is not None:
            self.options["out_rows"] = subset.out_rows
        self.tensors: dict[str, torch.Tensor] = {}
        self.shape = x.shape if subset.x is None else None
        for name, tensor in (("x", x), ("residual", residual), ("x1", branch.x)):
            if tensor is not None:
                check_tensor(_CALLED.get(name, name), tensor)
                if tensor.dim() == 0 or (self.shape is not None and tensor.shape != self.shape):
                    must = "(..., hidden)" if tensor is x or self.shape is None else f"that of x, {tuple(self.shape)}"
                    raise InvalidProblem(f"{_CALLED.get(name, name)} has shape {tuple(tensor.shape)}; it must be {must}.")
                self.tensors[name] = rows(tensor)
        narrow = (
            ("weight", weight), ("bias", bias), ("weight1", branch.weight), ("bias1", branch.bias), ("rowscale", rowscale),
            ("colscale", colscale), ("x_subset", subset.x), ("out_subset", subset.out), ("seed", seed),
        )  # fmt: skip
        for name, tensor in narrow:
            if tensor is not None:
                check_tensor(_CALLED.get(name, name), tensor)
                flat = tensor.reshape(-1) if name == "rowscale" else tensor
                self.tensors[name] = flat if flat.is_contiguous() else flat.contiguous()

    def run(self, prenorm: Any, residual_dtype: Any, zero_centered: Any, out_dtype: Any, backend: Any) -> Any:
        for name, dtype in (("residual_dtype", residual_dtype), ("out_dtype", out_dtype)):
            if dtype is not None:
                self.options[name] = dtype_name(name, dtype)
        self.options |= {"prenorm": prenorm, "zero_centered": zero_centered}
        made = run("norm", self.tensors, self.options, backend, _CALLED)
        count = 1 + ("weight1" in self.tensors) + bool(prenorm)
        shaped = made[:count]
        if self.shape is not None and len(self.shape) != 2 and "out_subset" not in self.tensors:
            shaped = tuple(t.view(self.shape) for t in shaped)
        return shaped[0] if count == 1 else shaped
