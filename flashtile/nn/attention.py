"""Attention as a module: projections, norm of queries and keys, rotary, attention, projection."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from flashtile.dispatch import backend_named
from flashtile.errors import InvalidProblem, check_names, check_sizes
from flashtile.features.masks.key_padding import KeyPadding
from flashtile.nn.norm import RMSNorm
from flashtile.ops.position import rotary
from flashtile.problem.dropout import Dropout
from flashtile.problem.mask import Joined, make_mask
from flashtile.problem.number import plain, told
from flashtile.problem.options import DEFAULT
from flashtile.problem.predicate import narrowed
from flashtile.problem.score import broadcasts
from flashtile.torch.api.attention import attention
from flashtile.torch.api.blocks import Blocks
from flashtile.torch.api.layouts import attention_qkvpacked, attention_varlen
from flashtile.torch.call.inputs import check_arguments

# Of `flashtile.attention`: sinks and dropout are the module's own, and what it returns is one tensor.
OWN = ("width", "heads", "heads_kv", "head_dim", "bias", "qk_norm", "rotary_base", "sinks", "dropout_p", "device", "dtype")
ARGUMENTS = ("causal", "window", "mask", "score", "scale", "options")


class Attention(torch.nn.Module):
    """Multi-head attention of `width` features, with as many heads of keys and values as `heads_kv` says.

    heads_kv: heads by default; fewer for grouped queries. head_dim: width / heads by default.
    qk_norm: RMSNorm over head_dim of queries and keys. rotary_base: of their positions' angles (10000 is usual); None
        for none. sinks: a learned logit per head that joins the softmax. dropout_p: of probabilities, while training.
    arguments: those of `flashtile.attention`: causal, window, mask, score (such as `(Softcap(30.0),)`), scale, options.
    Raises TypeError for another one, InvalidProblem for a value without meaning.

    Parameters are named and laid out as in `torch.nn.MultiheadAttention`, whose state_dict it loads: in_proj_weight
    ((heads + 2 heads_kv) head_dim, width), in_proj_bias, out_proj; and q_norm, k_norm, sink where they are asked for.
    """

    def __init__(
        self, width: int, heads: int, heads_kv: int | None = None, head_dim: int | None = None, *, bias: bool = True,
        qk_norm: bool = False, rotary_base: float | None = None, sinks: bool = False, dropout_p: float = 0.0,
        device: Any = None, dtype: Any = None, **arguments: Any,
    ):  # fmt: skip
        super().__init__()
        check_names("Attention", arguments, ARGUMENTS, OWN)
        width, heads, heads_kv, head_dim, rotary_base = map(plain, (width, heads, heads_kv, head_dim, rotary_base))
        check_sizes(width=width, heads=heads)
        heads_kv = heads if heads_kv is None else heads_kv
        if head_dim is None and width % heads:
            raise InvalidProblem(
                f"width is {width} and heads is {heads}; width must be a multiple of heads, or head_dim be given."
            )
        self.width, self.heads, self.heads_kv = width, heads, heads_kv
        self.head_dim = width // heads if head_dim is None else head_dim
        check_sizes(heads_kv=heads_kv, head_dim=self.head_dim)
        if heads % heads_kv:
            raise InvalidProblem(f"heads is {heads} and heads_kv is {heads_kv}; heads must be a multiple of heads_kv.")
        if rotary_base is not None:
            _check_rotary(rotary_base, self.head_dim)
        _check(**arguments)
        self.rotary_base, self.dropout, self.arguments = rotary_base, Dropout(dropout_p), _listed(arguments)
        made = {"device": device, "dtype": dtype}
        rows = (heads + 2 * heads_kv) * self.head_dim
        self.in_proj_weight = torch.nn.Parameter(torch.empty(rows, width, **made))
        self.in_proj_bias = torch.nn.Parameter(torch.empty(rows, **made)) if bias else None
        self.out_proj = torch.nn.Linear(heads * self.head_dim, width, bias, **made)
        self.q_norm = RMSNorm(self.head_dim, **made) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, **made) if qk_norm else None
        self.sink = torch.nn.Parameter(torch.empty(heads, **made)) if sinks else None
        self.reset_parameters()

    def extra_repr(self) -> str:
        shown = {"width": self.width, "heads": self.heads, "heads_kv": self.heads_kv, "head_dim": self.head_dim}
        shown |= {"rotary_base": self.rotary_base, "dropout_p": self.dropout.p, **self.arguments}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())

    def reset_parameters(self) -> None:
        """As `torch.nn.MultiheadAttention` begins; sinks at 0."""
        torch.nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        for bias in (self.in_proj_bias, self.out_proj.bias, self.sink):
            if bias is not None:
                torch.nn.init.zeros_(bias)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()

    def forward(
        self, x: torch.Tensor, context: torch.Tensor | None = None, *, padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None, **unknown: NoReturn,
    ) -> torch.Tensor:  # fmt: skip
        """(batch, seqlen, width); with cu_seqlens, int32 (batch + 1,), of sequences one after another: (total, width).

        x: queries, and keys and values too unless there is a context, (batch, seqlen_k, width), which has no rotary.
        padding_mask: bool or ints (batch or 1, seqlen_k), True for the keys that count; beside `Blocks` their lists stay as
            they are (`Blocks.padded`). max_seqlen: no sequence is longer; with cu_seqlens alone.
        Raises InvalidProblem for what does not fit.
        """
        if unknown:
            _refuse(unknown)
        varlen = cu_seqlens is not None
        if x.dim() != 3 - varlen or x.shape[-1] != self.width:
            must = f"({'total' if varlen else 'batch, seqlen'}, {self.width})"
            raise InvalidProblem(f"x has shape {tuple(x.shape)}; it must be {must}.")
        if varlen and (context is not None or padding_mask is not None):
            raise InvalidProblem("cu_seqlens is given beside context or padding_mask; it must be alone.")
        if max_seqlen is not None and not varlen:
            raise InvalidProblem(f"max_seqlen is {max_seqlen} without cu_seqlens; it must be given with them alone.")
        if context is not None and self.rotary_base is not None:
            raise InvalidProblem("context is given and the module has rotary; its positions are those of x alone.")
        arguments = {**self.arguments, "sink": self.sink}
        if self.training and self.dropout.p:
            arguments["dropout"] = self.dropout
        if padding_mask is not None:
            wanted = tuple((x if context is None else context).shape[:2])
            shape = tuple(getattr(padding_mask, "shape", ()))
            if shape[1:] != wanted[1:] or not broadcasts(shape[:1], wanted[:1]):
                raise InvalidProblem(f"padding_mask has shape {shape}; it must be (batch, seqlen_k) = {wanted}.")
            if padding_mask.is_floating_point():  # these are often added to scores, where 0 is a key that counts
                raise InvalidProblem(
                    f"padding_mask is {padding_mask.dtype}; it must be bool, True for the keys that count, or ints likewise."
                )
            mask = arguments.get("mask")
            if isinstance(mask, Blocks):
                arguments["mask"] = mask.padded(padding_mask)
            else:
                arguments["mask"] = KeyPadding(padding_mask) if mask is None else KeyPadding(padding_mask) & mask
        if context is None and self.q_norm is None and self.rotary_base is None:
            packed = self._project(x, 0, self.heads + 2 * self.heads_kv)
            lengths = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen} if varlen else {}
            out = attention_qkvpacked(packed, heads_q=self.heads, **lengths, **arguments)
            return self.out_proj(out.flatten(-2))
        q, k, v = self._queries_keys_values(x, context, cu_seqlens, max_seqlen)
        if cu_seqlens is not None:
            out = attention_varlen(q, k, v, cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, **arguments)
        else:
            out = attention(q, k, v, **arguments)
        return self.out_proj(out.flatten(-2))

    def _project(self, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """The heads first .. last - 1 of x, of all of q, k and v."""
        rows = slice(first * self.head_dim, last * self.head_dim)
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        return F.linear(x, self.in_proj_weight[rows], bias).unflatten(-1, (last - first, self.head_dim))

    def _queries_keys_values(
        self, x: torch.Tensor, context: torch.Tensor | None, cu_seqlens: torch.Tensor | None, max_seqlen: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = (self.heads, self.heads_kv, self.heads_kv)
        if context is None:
            q, k, v = self._project(x, 0, sum(heads)).split(heads, -2)
        else:
            q = self._project(x, 0, self.heads)
            k, v = self._project(context, self.heads, sum(heads)).split(heads[1:], -2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary_base is not None:
            length = x.shape[-2] if max_seqlen is None else max_seqlen
            half = torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float32) / self.head_dim
            angles = torch.outer(torch.arange(length, device=x.device, dtype=torch.float32), self.rotary_base**-half)
            q, k = rotary(q, k, angles.cos(), angles.sin(), cu_seqlens=cu_seqlens)
        return q, k, v


def _refuse(unknown: dict[str, NoReturn]) -> None:
    """Raise TypeError for arguments of a forward that it does not take."""
    if "key_padding_mask" in unknown:
        raise TypeError(
            "forward() got an unexpected keyword argument 'key_padding_mask'; did you mean padding_mask, which is True for "
            "keys that count? torch.nn.MultiheadAttention's is True for those that do not: padding_mask=~key_padding_mask."
        )
    if {"attn_mask", "is_causal"} & unknown.keys():
        name = next(iter({"attn_mask", "is_causal"} & unknown.keys()))
        raise TypeError(
            f"forward() got an unexpected keyword argument {name!r}; masks are the module's own: Attention(.., causal=True) or "
            "mask=.., and padding_mask here."
        )
    check_names("forward", unknown, ("x", "context", "padding_mask", "cu_seqlens", "max_seqlen"))


def _check_rotary(base: Any, head_dim: int) -> None:
    if isinstance(base, bool) or not isinstance(base, (int, float)) or not 0 < base < float("inf"):
        raise InvalidProblem(f"rotary_base is {told(base)}; it must be a positive, finite number or None.")
    if head_dim % 2:
        raise InvalidProblem(f"head_dim is {head_dim}; it must be even for rotary.")


def _check(
    causal: Any = False, window: Any = None, mask: Any = None, score: Any = (), scale: Any = None, options: Any = None
) -> None:  # fmt: skip
    """Raise InvalidProblem for arguments that no forward could go on with."""
    options = DEFAULT if options is None else options
    check_arguments(score, scale, options)
    if options.backend is not None:
        backend_named(options.backend)
    make_mask(causal, window, None if isinstance(mask, Joined) else mask)


def _listed(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, but `Blocks` say causal and window too, whose lists are thus made once and not in forwards."""
    rest = dict(arguments)
    if isinstance(mask := rest.get("mask"), Blocks):
        rest["mask"] = narrowed(rest.pop("causal", False), rest.pop("window", None), mask)
    return rest
