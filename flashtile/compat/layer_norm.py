"""flash-attention's norms: the names of `flash_attn.ops.layer_norm`, `.rms_norm` and `.triton.layer_norm`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from flashtile import ops
from flashtile.errors import InvalidProblem, NotSupported

FUNCTIONS = {False: ops.layer_norm, True: ops.rms_norm}


def _draw(dropout_p: float, x: torch.Tensor) -> Any:
    return ops.Dropout.draw(dropout_p, x.device) if dropout_p else 0.0


def _mask(dropout: Any, shape: Any, x: torch.Tensor, branch: int) -> torch.Tensor:
    return dropout.mask(shape, branch) if dropout else torch.ones(shape, dtype=torch.bool, device=x.device)


def _residual_dtype(residual: torch.Tensor | None, in_fp32: bool) -> torch.dtype | None:
    return torch.float32 if residual is None and in_fp32 else None


def layer_norm_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None, weight1: torch.Tensor | None = None, bias1: torch.Tensor | None = None, eps: float = 1e-6,
    dropout_p: float = 0.0, rowscale: torch.Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False,
    zero_centered_weight: bool = False, is_rms_norm: bool = False, return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None, residual_out: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """`flash_attn.ops.triton.layer_norm.layer_norm_fn`: y, and y1, the residual, the masks (bool) as asked for."""
    if (out is not None or residual_out is not None) and torch.is_grad_enabled():
        raise NotSupported("out and residual_out with gradients", {"torch": ["a tensor that is given has no history"]})
    if bias1 is not None and weight1 is None:
        raise InvalidProblem("bias1 is given without weight1; a second output needs its weight.")
    dropout = _draw(dropout_p, x)
    branch = None if x1 is None and weight1 is None else ops.Branch(x1, weight1, bias1)
    made = FUNCTIONS[is_rms_norm](
        x, weight, bias, eps, residual=residual, prenorm=prenorm, residual_dtype=_residual_dtype(residual, residual_in_fp32),
        dropout=dropout, rowscale=rowscale, branch=branch, zero_centered=zero_centered_weight, out_dtype=out_dtype,
    )  # fmt: skip
    found = list(made) if isinstance(made, tuple) else [made]
    if out is not None:
        found[0] = out.copy_(found[0])
    if prenorm and residual_out is not None:
        found[-1] = residual_out.copy_(found[-1])
    if return_dropout_mask:
        found += [_mask(dropout, x.shape, x, 0), None if x1 is None else _mask(dropout, x.shape, x, 1)]
    return found[0] if len(found) == 1 else tuple(found)


rms_norm_fn = partial(layer_norm_fn, is_rms_norm=True)


def layer_norm_linear_fn(
    x: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor | None, linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None, residual: torch.Tensor | None = None, eps: float = 1e-6, prenorm: bool = False,
    residual_in_fp32: bool = False, is_rms_norm: bool = False,
) -> Any:  # fmt: skip
    """A dense layer of the norm, in autocast's dtype, or with prenorm (that, the residual)."""
    made = layer_norm_fn(
        x, norm_weight, norm_bias, residual, eps=eps, prenorm=True, residual_in_fp32=residual_in_fp32, is_rms_norm=is_rms_norm
    )
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else made[0].dtype
    out = F.linear(made[0].to(dtype), linear_weight.to(dtype), None if linear_bias is None else linear_bias.to(dtype))
    return (out, made[1]) if prenorm else out


def layer_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None, weight1: torch.Tensor | None = None, bias1: torch.Tensor | None = None, eps: float = 1e-6,
    dropout_p: float = 0.0, rowscale: torch.Tensor | None = None, prenorm: bool = False, zero_centered_weight: bool = False,
    dropout_mask: torch.Tensor | None = None, dropout_mask1: torch.Tensor | None = None, upcast: bool = False,
    is_rms_norm: bool = False,
) -> Any:  # fmt: skip
    """`layer_norm_fn` in plain PyTorch and x's dtype, or float32 with upcast, dropping what the masks (bool) do not keep."""
    masks = (1.0, 1.0) if not dropout_p else (dropout_mask, dropout_mask1)
    if masks[0] is None or (x1 is not None and masks[1] is None):
        raise InvalidProblem(f"dropout_p is {dropout_p} and a dropout mask is None; it must say what is kept.")
    dtype = x.dtype
    if upcast:
        x, weight, bias, residual, x1, weight1, bias1 = (
            None if t is None else t.float() for t in (x, weight, bias, residual, x1, weight1, bias1)
        )  # pyright: ignore[reportAssignmentType]
    h = x if rowscale is None else x * rowscale[..., None]
    h = h * masks[0] / (1.0 - dropout_p)
    if x1 is not None and masks[1] is not None:
        h = h + x1 * masks[1] / (1.0 - dropout_p)
    h = h if residual is None else (h + residual).to(h.dtype)
    found = [_norm_ref(h, w + 1.0 if zero_centered_weight else w, b, eps, is_rms_norm).to(dtype)
             for w, b in ((weight, bias), (weight1, bias1)) if w is not None]  # fmt: skip
    found += [h] if prenorm else []
    return found[0] if len(found) == 1 else tuple(found)


rms_norm_ref = partial(layer_norm_ref, is_rms_norm=True)


def _norm_ref(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float, is_rms_norm: bool) -> torch.Tensor:
    if not is_rms_norm:
        return F.layer_norm(h.to(w.dtype), h.shape[-1:], w, b, eps)
    y = h * (h.square().mean(-1, keepdim=True) + eps).rsqrt() * w
    return y if b is None else y + b


def dropout_add_layer_norm(
    x0: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, dropout_p: float,
    epsilon: float, rowscale: torch.Tensor | None = None, layerscale: torch.Tensor | None = None, prenorm: bool = False,
    residual_in_fp32: bool = False, return_dropout_mask: bool = False, is_rms_norm: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn.ops.layer_norm.dropout_add_layer_norm`: z, with x if prenorm and the mask (uint8) if it is asked for."""
    return _dropped(
        is_rms_norm, x0, residual, weight, bias, dropout_p, epsilon, prenorm, residual_in_fp32, return_dropout_mask,
        rowscale=rowscale, colscale=layerscale,
    )  # fmt: skip


def dropout_add_layer_norm_subset(
    x0: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, dropout_p: float,
    epsilon: float, layerscale: torch.Tensor | None = None, x0_subset: torch.Tensor | None = None,
    out_subset: torch.Tensor | None = None, rowscale_const: float = 1.0, out_numrows: int = 0, prenorm: bool = False,
    residual_in_fp32: bool = False, return_dropout_mask: bool = False, is_rms_norm: bool = False,
) -> Any:  # fmt: skip
    """`dropout_add_layer_norm` of subsets of rows: 1-based indices (...), 0 for a row that is absent.

    z and x have x0's axes but for the first. The mask has x0's shape, and 1 in rows that x0_subset does not name.
    """
    flat = [None if s is None else s.reshape(-1) for s in (x0_subset, out_subset)]
    rows = x0.shape[:-1] if flat[0] is None else flat[0].shape
    made = _dropped(
        is_rms_norm, x0.flatten(0, -2), None if residual is None else residual.flatten(0, -2), weight, bias, dropout_p,
        epsilon, prenorm, residual_in_fp32, return_dropout_mask, shape=(*rows, x0.shape[-1]), colscale=layerscale,
        rowscale=rowscale_const, subset=ops.Subset(flat[0], flat[1], None if out_subset is None else out_numrows),
    )  # fmt: skip
    found = list(made) if isinstance(made, tuple) else [made]
    if return_dropout_mask and flat[0] is not None:  # from rows of x to rows of x0
        mask = found[-1].new_ones((x0.shape[:-1].numel() + 1, x0.shape[-1])).index_copy(0, flat[0].long(), found[-1])
        found[-1] = mask[1:]
    found = [t.reshape(-1, *x0.shape[1:]) for t in found]
    return found[0] if len(found) == 1 else tuple(found)


def dropout_add_layer_norm_parallel_residual(
    x0: torch.Tensor, x1: torch.Tensor | None, residual: torch.Tensor | None, weight0: torch.Tensor, bias0: torch.Tensor | None,
    weight1: torch.Tensor | None, bias1: torch.Tensor | None, dropout_p: float, epsilon: float, prenorm: bool = False,
    residual_in_fp32: bool = False, return_dropout_mask: bool = False, is_rms_norm: bool = False,
) -> Any:  # fmt: skip
    """Two inputs and two norms of one residual: (z0, z1), z1 None without weight1; then x, then the masks."""
    dropout = _draw(dropout_p, x0)
    made = FUNCTIONS[is_rms_norm](
        x0, weight0, bias0, epsilon, residual=residual, prenorm=prenorm, dropout=dropout,
        residual_dtype=_residual_dtype(residual, residual_in_fp32), branch=ops.Branch(x1, weight1, bias1),
    )  # fmt: skip
    found = list(made) if isinstance(made, tuple) else [made]
    if weight1 is None:
        found.insert(1, None)
    if return_dropout_mask:
        found += [_mask(dropout, x0.shape, x0, 0).byte(), None if x1 is None else _mask(dropout, x0.shape, x0, 1).byte()]
    return tuple(found)


def _dropped(
    rms: bool, x0: torch.Tensor, residual: Any, weight: Any, bias: Any, dropout_p: float, eps: float, prenorm: bool,
    in_fp32: bool, masks: bool, shape: Any = None, **more: Any,
) -> Any:  # fmt: skip
    dropout = _draw(dropout_p, x0)
    made = FUNCTIONS[rms](
        x0, weight, bias, eps, residual=residual, prenorm=prenorm, dropout=dropout,
        residual_dtype=_residual_dtype(residual, in_fp32), **more,
    )  # fmt: skip
    if not masks:
        return made
    found = made if isinstance(made, tuple) else (made,)
    return (*found, _mask(dropout, shape or x0.shape, x0, 0).byte())


dropout_add_rms_norm = partial(dropout_add_layer_norm, is_rms_norm=True)
dropout_add_rms_norm_subset = partial(dropout_add_layer_norm_subset, is_rms_norm=True)
dropout_add_rms_norm_parallel_residual = partial(dropout_add_layer_norm_parallel_residual, is_rms_norm=True)


class RMSNorm(torch.nn.Module):
    """`flash_attn.ops.rms_norm.RMSNorm`; `bias` is None."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, None, self.eps)


class DropoutAddRMSNorm(torch.nn.Module):
    """`flash_attn.ops.rms_norm.DropoutAddRMSNorm`; `bias` is None."""

    is_rms_norm = True

    def __init__(
        self, hidden_size: int, prenorm: bool = False, p: float = 0.0, eps: float = 1e-5, residual_in_fp32: bool = False,
        device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__()
        self.prenorm, self.p, self.eps, self.residual_in_fp32 = prenorm, p, eps, residual_in_fp32
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        zeros = None if self.is_rms_norm else torch.nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))
        self.bias: torch.nn.Parameter | None
        self.register_parameter("bias", zeros)

    def forward(self, x0: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        p = self.p if self.training else 0.0
        return dropout_add_layer_norm(
            x0, residual, self.weight, self.bias, p, self.eps, prenorm=self.prenorm, residual_in_fp32=self.residual_in_fp32,
            is_rms_norm=self.is_rms_norm,
        )  # fmt: skip


class DropoutAddLayerNorm(DropoutAddRMSNorm):
    """`flash_attn.ops.layer_norm.DropoutAddLayerNorm`."""

    is_rms_norm = False
