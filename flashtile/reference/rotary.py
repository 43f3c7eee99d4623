"""Rotary embedding as a product of complex numbers, in float64 or float32, differentiated by autograd."""

from __future__ import annotations

import torch


def rotary_reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x (batch, seqlen, heads, head_dim) turned by row `positions` (batch, seqlen) of cos and sin (length, rotary_dim / 2)."""
    exact = x.dtype == torch.float64
    half = cos.shape[1]
    angle = torch.complex(*(t.double() if exact else t.float() for t in (cos, sin)))[positions.long()][:, :, None]
    part = x[..., : 2 * half] if exact else x[..., : 2 * half].float()
    pairs = part.unflatten(-1, (half, 2)) if interleaved else part.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.complex(pairs[..., 0].contiguous(), pairs[..., 1].contiguous()) * (angle.conj() if conjugate else angle)
    turned = torch.stack([turned.real, turned.imag], -1)
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)
