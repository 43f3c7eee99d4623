"""LayerNorm and RMSNorm as modules."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.errors import check_sizes
from flashtile.ops import norm as ops
from flashtile.problem.op import Described
from flashtile.torch.ops.call import AS_IT_IS, check_options


class _Norm(torch.nn.Module):
    """What both have: parameters, dropout, residual."""

    def __init__(
        self, hidden: int, eps: float, bias: bool, prenorm: bool, dropout_p: float, residual_dtype: Any, zero_centered: bool,
        device: Any, dtype: Any,
    ):  # fmt: skip
        super().__init__()
        check_sizes(hidden=hidden)
        options: dict[str, Any] = {"eps": eps, "prenorm": prenorm, "dropout_p": dropout_p, "zero_centered": zero_centered}
        if residual_dtype is not None:
            options["residual_dtype"] = ops.dtype_name("residual_dtype", residual_dtype)
        given = {"x": Described((1, hidden), "fp32"), "weight": Described((hidden,), "fp32")}
        if dropout_p != 0.0:
            given["seed"] = Described((1,), "int64")
        check_options("norm", given, options, AS_IT_IS)
        made = (
            torch.zeros(hidden, device=device, dtype=dtype) if zero_centered else torch.ones(hidden, device=device, dtype=dtype)
        )
        self.weight = torch.nn.Parameter(made)
        self.bias = torch.nn.Parameter(torch.zeros(hidden, device=device, dtype=dtype)) if bias else None
        self.hidden, self.eps, self.prenorm, self.dropout_p = hidden, eps, prenorm, dropout_p
        self.residual_dtype, self.zero_centered = residual_dtype, zero_centered

    def extra_repr(self) -> str:
        return f"{self.hidden}, eps={self.eps}, prenorm={self.prenorm}, dropout_p={self.dropout_p}"

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """out, or (out, h) if prenorm: x (..., hidden), dropped out while training, is added to residual first."""
        function = ops.layer_norm if isinstance(self, LayerNorm) else ops.rms_norm
        return function(
            x, self.weight, self.bias, self.eps, residual=residual, prenorm=self.prenorm, residual_dtype=self.residual_dtype,
            dropout=self.dropout_p if self.training else 0.0, zero_centered=self.zero_centered,
        )  # fmt: skip


class LayerNorm(_Norm):
    """`flashtile.ops.layer_norm` with its weight and bias, of `hidden` elements.

    eps, prenorm, residual_dtype, zero_centered: as there; dropout_p: of x, while training. Raises InvalidProblem for a value
    without meaning.
    """

    def __init__(
        self, hidden: int, eps: float = 1e-5, *, bias: bool = True, prenorm: bool = False, dropout_p: float = 0.0,
        residual_dtype: torch.dtype | None = None, zero_centered: bool = False, device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__(hidden, eps, bias, prenorm, dropout_p, residual_dtype, zero_centered, device, dtype)


class RMSNorm(_Norm):
    """`flashtile.ops.rms_norm` with its weight, of `hidden` elements, and a bias if `bias`; all else as in `LayerNorm`."""

    def __init__(
        self, hidden: int, eps: float = 1e-6, *, bias: bool = False, prenorm: bool = False, dropout_p: float = 0.0,
        residual_dtype: torch.dtype | None = None, zero_centered: bool = False, device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__(hidden, eps, bias, prenorm, dropout_p, residual_dtype, zero_centered, device, dtype)
