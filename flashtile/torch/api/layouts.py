"""attention_varlen and the packed forms: `attention` of tensors that lie in other ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from flashtile.errors import InvalidProblem, check_names
from flashtile.problem.number import plain, told
from flashtile.problem.statistics import Mass
from flashtile.torch.api.dtensor import attend_watched
from flashtile.torch.api.statistics import attend_with
from flashtile.torch.api.stored import SCALES, attend_stored, is_stored, refuse_statistics
from flashtile.torch.call.arguments import NAMES, Arguments, Keywords, ScaledKeywords, arguments_of
from flashtile.torch.call.lengths import Given, given_lengths
from flashtile.torch.call.sharded import refuse_shards
from flashtile.torch.execute.packing import APART, KV, QKV, Pack, Packing
from flashtile.torch.routes.eager import attend, prepare_call
from flashtile.torch.routes.traced import autocast, is_plain, is_traced

if TYPE_CHECKING:
    from typing_extensions import Unpack

OF_LENGTHS = ("max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k")


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    returns: Sequence[str | Mass] | str | Mass = (),
    **arguments: Unpack[ScaledKeywords],
) -> Any:
    """`attention` of sequences of any lengths, packed one after another; differentiable in everything.

    q: (total_q, heads_q, head_dim); k: (total_k, heads_kv, head_dim); v: (total_k, heads_kv, head_dim_v).
    cu_seqlens_q, cu_seqlens_k: where items start, int32 (batch + 1,): item i has the tokens cu_seqlens[i] <= t <
        cu_seqlens[i + 1], none where both are equal, and starts with 0. cu_seqlens_k is cu_seqlens_q by default.
    max_seqlen_q, max_seqlen_k: no item is longer, as far as the caller knows: `explain` counts by them, and a bias of scores
        has so many queries and keys. By default all tokens; max_seqlen_k is max_seqlen_q where cu_seqlens_k is not given.
    seqused_q, seqused_k: how many of an item's tokens count, int32 (batch,); all by default.
    returns: statistics, as of `attention`: (out, `Statistics`) is then returned.
    arguments: those of `attention`, with the same meaning, each item by itself; scales of tokens are (total, heads).

    Returns out (total_q, heads_q, head_dim_v) or (out, lse) with lse float32 (heads_q, total_q). Tokens of no item, past
    cu_seqlens[-1], and those beyond seqused are never looked at; out is 0 there, lse -inf, and gradients are 0.
    The host does not wait for the device, whatever is given. Raises InvalidProblem and NotSupported as `attention` does;
    what the tensors of lengths hold is checked on the CPU alone.
    """
    beside = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", *OF_LENGTHS, "returns")
    check_names("attention_varlen", arguments, (*NAMES, *SCALES), beside)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if isinstance(tensor, torch.Tensor) and tensor.dim() != 3:
            raise InvalidProblem(f"{name} has shape {tuple(tensor.shape)}; it must be (total, heads, head_dim).")
    if cu_seqlens_q is None:
        raise InvalidProblem("cu_seqlens_q is None; it must be a torch.Tensor.")
    given = given_lengths(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    scales = {name: arguments.pop(name) for name in SCALES if name in arguments}
    eight = is_stored(k, arguments.get("options"), scales)
    if returns != ():
        refuse_statistics(eight)
        q, k, v = autocast(q, k, v)
        alone = lambda asked: _attend_packed(APART, (q, k, v), given, asked)  # noqa: E731
        return attend_with(returns, alone, (q, k, v), given, arguments_of(arguments))
    if eight:
        return attend_stored((q, k, v), given, arguments_of(arguments), scales)
    return _attend_packed(APART, (q, k, v), given, arguments_of(arguments))


def attention_qkvpacked(
    qkv: torch.Tensor,
    *,
    heads_q: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    seqused: torch.Tensor | None = None,
    **arguments: Unpack[Keywords],
) -> Any:
    """`attention` of one tensor that holds q, k and v; its gradient is written as one tensor, in qkv's memory order.

    qkv: (batch, seqlen, 3, heads, head_dim), as llm.c has it too; or with grouped heads (batch, seqlen, heads_q + 2
        heads_kv, head_dim), where heads_q says how many come first. With cu_seqlens, int32 (batch + 1,), the first two
        axes are one: (total, ...), as in `attention_varlen`.
    max_seqlen, seqused: as in `attention_varlen`, of queries and keys alike.
    arguments: those of `attention`.

    Returns what `attention`, or with cu_seqlens `attention_varlen`, does.
    """
    check_names("attention_qkvpacked", arguments, NAMES, ("qkv", "heads_q", "cu_seqlens", "max_seqlen", "seqused"))
    packing, axes = QKV, (4 if heads_q is not None else 5) - (cu_seqlens is not None)
    _check_pack("qkv", qkv, axes, 3 if heads_q is None else None)
    heads_q = plain(heads_q)
    if heads_q is not None:
        heads_kv, odd = divmod(qkv.shape[-2] - heads_q, 2) if isinstance(heads_q, int) else (0, 1)
        if isinstance(heads_q, bool) or odd or heads_kv < 1 or heads_q < 1:
            raise InvalidProblem(
                f"heads_q is {told(heads_q)} and qkv has {qkv.shape[-2]} heads; what heads_q leaves must be as many for k as "
                "for v."
            )
        packing = Packing((Pack(("q", "k", "v"), (heads_q, heads_kv, heads_kv)),))
    given = given_lengths(
        True, cu_seqlens_q=cu_seqlens, seqused_q=seqused, seqused_k=seqused, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen
    )
    return _attend_packed(packing, (qkv,), given, arguments_of(arguments))


def attention_kvpacked(
    q: torch.Tensor,
    kv: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    **arguments: Unpack[Keywords],
) -> Any:
    """`attention` of q and one tensor that holds k and v, whose gradient is written as one tensor, in kv's memory order.

    q: (batch, seqlen_q, heads_q, head_dim); kv: (batch, seqlen_k, 2, heads_kv, head_dim). With cu_seqlens_q, as in
    `attention_varlen`, (total_q, heads_q, head_dim) and (total_k, 2, heads_kv, head_dim). The other arguments, and what is
    returned, are those of `attention` or `attention_varlen`.
    """
    check_names("attention_kvpacked", arguments, NAMES, ("q", "kv", "cu_seqlens_q", "cu_seqlens_k", *OF_LENGTHS))
    varlen = cu_seqlens_q is not None
    if not varlen and cu_seqlens_k is not None:
        raise InvalidProblem("cu_seqlens_k is given and cu_seqlens_q is None; cu_seqlens_q must be given too.")
    _check_pack("q", q, 4 - varlen, None)
    _check_pack("kv", kv, 5 - varlen, 2)
    given = given_lengths(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    return _attend_packed(KV, (q, kv), given, arguments_of(arguments))


def _check_pack(name: str, tensor: Any, axes: int, parts: int | None) -> None:
    """Raise InvalidProblem unless it is a tensor of so many axes, with `parts` before (heads, head_dim)."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidProblem(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor.")
    first = ("batch", "seqlen") if axes == (4 if parts is None else 5) else ("total",)
    must = ", ".join((*first, *(() if parts is None else (str(parts),)), "heads", "head_dim"))
    if tensor.dim() != axes or (parts is not None and tensor.shape[-3] != parts):
        raise InvalidProblem(f"{name} has shape {tuple(tensor.shape)}; it must be ({must}).")


def _attend_packed(packing: Packing, packs: tuple[Any, ...], given: Given | None, arguments: Arguments) -> Any:
    """out, or (out, lse), of tensors that hold q, k and v; (total, ...) where `given` says varlen."""
    varlen = given is not None and given.varlen
    if not is_plain(*packs):
        packs = autocast(*packs)
        if is_traced(*packs):
            return attend_watched(packing, packs, given, arguments)
        refuse_shards()
    if varlen:
        packs = tuple(t.unsqueeze(0) if isinstance(t, torch.Tensor) else t for t in packs)
    with torch.no_grad():
        parts = packing.unpack(packs)
    call, others = prepare_call(parts["q"], parts["k"], parts["v"], arguments, given)
    made = attend(call if packing is APART else call.packed(packing), others, *packs, parts=parts)
    if not varlen:
        return made
    return tuple(t.squeeze(0) for t in made) if call.problem.returns_lse else made.squeeze(0)
