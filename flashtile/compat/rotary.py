"""flash-attention's rotary embeddings: `flash_attn.layers.rotary`, `flash_attn.ops.triton.rotary`, and `rotary_emb`.

Where those leave a token beyond the tables as it is, these raise, or give NaN (see `flashtile.ops.rotary`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashtile import ops
from flashtile.errors import InvalidProblem
from flashtile.torch.execute.inference_safe import keeps, lasting


def apply_rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None, interleaved: bool = False, inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`flash_attn.ops.triton.rotary.apply_rotary`; max_seqlen is not needed."""
    options: Any = dict(interleaved=interleaved, conjugate=conjugate, offset=seqlen_offsets, cu_seqlens=cu_seqlens)
    if not inplace:
        return ops.rotary(x, None, cos, sin, **options)
    return _written_over(x, lambda t: ops.rotary(t, None, cos, sin, inplace=True, **options))


def apply_rotary_emb(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0, cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """`flash_attn.layers.rotary.apply_rotary_emb`."""
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None, interleaved: bool = False, seqlen_offsets: int | torch.Tensor = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """qkv (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, heads of q, k and v, head_dim); q and k are written over."""
    if qkv.dim() == 5:
        heads = keys = qkv.shape[3]
    elif num_heads_q is None:
        raise InvalidProblem("num_heads_q is None and qkv has four axes; it must say how many of its heads are queries.")
    else:
        heads, keys = num_heads_q, (qkv.shape[2] - num_heads_q) // 2
    options: dict[str, Any] = dict(interleaved=interleaved, offset=seqlen_offsets, inplace=True)

    def turn(t: torch.Tensor) -> None:
        flat = t.flatten(2, 3) if t.dim() == 5 else t
        if cos_k is None:
            ops.rotary(flat[:, :, : heads + keys], None, cos, sin, **options)
        else:
            ops.rotary(flat[:, :, :heads], None, cos, sin, **options)
            ops.rotary(flat[:, :, heads : heads + keys], None, cos_k, sin if sin_k is None else sin_k, **options)

    return _written_over(qkv, turn)


def apply_rotary_emb_kv_(
    kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False, seqlen_offsets: int | torch.Tensor = 0
) -> torch.Tensor:
    """kv (batch, seqlen, 2, heads, head_dim); k is written over."""
    options: Any = dict(interleaved=interleaved, offset=seqlen_offsets, inplace=True)
    return _written_over(kv, lambda t: ops.rotary(t[:, :, 0], None, cos, sin, **options))


def _written_over(x: torch.Tensor, turn: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """x after `turn` has written over it; a leaf that wants a gradient, which autograd lets nobody write to, by way of a copy,
    which is then what is returned.
    """
    kept = torch.is_grad_enabled() and x.requires_grad
    if kept and not torch.compiler.is_compiling():
        kept = (x._base if x._is_view() else x).is_leaf  # pyright: ignore[reportOptionalMemberAccess]
    if not kept:
        turn(x)
        return x
    made = x.clone()
    turn(made)
    x.detach().copy_(made.detach())
    return made


def apply_rotary_emb_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """The same in plain PyTorch, in x's dtype: what flash-attention's tests compare with."""
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    first, second = turning.unflatten(-1, (half, 2)).unbind(-1) if interleaved else turning.chunk(2, -1)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = (first * c - second * s, first * s + second * c)
    return torch.cat([torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1), rest], -1)


class RotaryEmbedding(torch.nn.Module):
    """`flash_attn.layers.rotary.RotaryEmbedding`; scale_base is that of xPos (arXiv 2212.10554).

    It has no buffers: the tables are made, in float32, on the device of what arrives, and `device` is not needed.
    """

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None, device: Any = None
    ):
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self._tables: dict[Any, tuple[torch.Tensor, ...]] = {}

    def tables(self, seqlen: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """(cos, sin) of q, or with a scale (cos, sin, cos_k, sin_k), each (seqlen or more, dim / 2); angles are float32."""
        made = self._tables.get((device, dtype)) if keeps() else None
        if made is None or made[0].shape[0] < seqlen:
            made = self._made(seqlen, device, dtype)
            if keeps():
                self._tables[device, dtype] = made
        return made

    @lasting
    def _made(self, seqlen: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        place = torch.arange(seqlen, device=device, dtype=torch.float32)
        angle = torch.outer(place, self.base ** (-even / self.dim))
        made = (angle.cos(), angle.sin())
        if self.scale_base is not None:
            power = (place - seqlen // 2) / self.scale_base
            grown = ((even + 0.4 * self.dim) / (1.4 * self.dim)) ** power[:, None]
            made = (made[0] * grown, made[1] * grown, made[0] / grown, made[1] / grown)
        return tuple(table.to(dtype) for table in made)

    def forward(
        self, qkv: torch.Tensor, kv: torch.Tensor | None = None, seqlen_offset: int | torch.Tensor = 0,
        max_seqlen: int | None = None, num_heads_q: int | None = None,
    ) -> Any:  # fmt: skip
        """qkv, or (q, kv) where kv is given, written over. max_seqlen: how long tables must be, beside a tensor's offset."""
        if max_seqlen is None and isinstance(seqlen_offset, torch.Tensor):
            raise InvalidProblem("seqlen_offset is a tensor and max_seqlen is None; it must be given, for the tables.")
        length = qkv.shape[1] + seqlen_offset if max_seqlen is None else max_seqlen
        cos, sin, *of_keys = self.tables(length, qkv.device, qkv.dtype)  # pyright: ignore[reportArgumentType]
        how: Any = dict(interleaved=self.interleaved, seqlen_offsets=seqlen_offset)
        if kv is None:
            for_keys = dict(zip(("cos_k", "sin_k"), of_keys, strict=False))
            return apply_rotary_emb_qkv_(qkv, cos, sin, **for_keys, num_heads_q=num_heads_q, **how)
        q = apply_rotary_emb(qkv, cos, sin, inplace=True, **how)
        return q, apply_rotary_emb_kv_(kv, of_keys[0] if of_keys else cos, of_keys[1] if of_keys else sin, **how)


def rotary_emb_apply_rotary(
    x1: torch.Tensor, x2: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out1: torch.Tensor, out2: torch.Tensor, conj: bool
) -> None:
    """`rotary_emb.apply_rotary` of version 1: halves that broadcast with cos and sin; out1 and out2 may be x1 and x2."""
    first, second, c, s = (t.float() for t in (x1, x2, cos, sin))
    s = -s if conj else s
    turned = first * c - second * s, first * s + second * c
    out1.copy_(turned[0])
    out2.copy_(turned[1])
