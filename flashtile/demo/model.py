"""A small GPT over characters. The attention function is an argument; everything else is shared by all contestants."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashtile

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (batch, seqlen, heads, head_dim) -> out, causal


def attend_flashtile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by flashtile."""
    return flashtile.attention(q, k, v, causal=True)


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by torch, which wants (batch, heads, seqlen, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def attend_naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as the formula stands, with the whole seqlen x seqlen matrix in memory."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


class Block(nn.Module):
    """One layer: attention, then a feed-forward network, each on the normalised residual stream."""

    def __init__(self, width: int, heads: int, layers: int, attend: Attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)
        # Small but not zero: from zero, Adam's first steps would divide rounding noise by itself, and two runs that
        # differ in the last bit would drift apart.
        for into_stream in (self.proj, self.down):
            nn.init.normal_(into_stream.weight, std=0.5 * (2 * layers * into_stream.in_features) ** -0.5)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream after this layer."""
        q, k, v = self.qkv(normalised(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = self.attend(rotated(normalised(q), rotation), rotated(normalised(k), rotation), v)
        x = x + self.proj(mixed.flatten(2))
        return x + self.down(F.gelu(self.up(normalised(x))))


class GPT(nn.Module):
    """Logits of the next character, (batch, seqlen, characters), for characters (batch, seqlen)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, characters: int, context: int, width: int, layers: int, heads: int, attend: Attend):
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.blocks = nn.ModuleList(Block(width, heads, layers, attend) for _ in range(layers))
        self.head = nn.Linear(width, characters, bias=False)
        half = width // heads // 2
        frequencies = 100.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(context), frequencies)[:, None, :]  # (context, 1, head_dim / 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits at every position."""
        length = tokens.shape[1]
        rotation = (self.cos[:length], self.sin[:length])
        x = normalised(self.embed(tokens))
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(normalised(x))


def normalised(x: Tensor) -> Tensor:
    """Vectors of root mean square 1 (RMSNorm without weights)."""
    return F.rms_norm(x, (x.shape[-1],))


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x (batch, seqlen, heads, head_dim) with rotary position embedding (arXiv 2104.09864)."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
