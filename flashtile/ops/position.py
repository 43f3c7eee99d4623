"""rotary: the public function."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.torch.execute.plain import is_compiling, is_traced
from flashtile.torch.ops.call import AS_IT_IS, make_problem
from flashtile.torch.ops.run import check_tensor, check_tensors, run


def rotary(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    conjugate: bool = False,
    offset: int | torch.Tensor = 0,
    positions: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False,
    backend: str | None = None,
) -> Any:
    """q, or (q, k), rotated by the angles of their positions, both in one launch, in float32.

    q: (batch, seqlen, heads_q, head_dim), k: (batch, seqlen, heads_kv, head_dim) or None; any strides. With cu_seqlens,
        int32 (batch + 1,), they are (total, heads, head_dim), and positions begin at 0 in each sequence.
    cos, sin: (length, rotary_dim / 2), fp32 for exact positions; elements from rotary_dim on are left as they are.
    interleaved: element 2 i is paired with 2 i + 1 (GPT-J), not i with i + rotary_dim / 2 (NeoX).
    offset: the position of each sequence's first token, an int or a tensor (batch,); positions: those of all tokens,
        (batch, seqlen), (seqlen,) or (total,), instead.
    conjugate: turn back. inplace: q and k are written over (not under torch.compile, which plans memory itself).
    backend: "triton", "cpu", or None for the first that runs on the tensors' device; NotSupported says why one does not.

    A position beyond the tables raises InvalidProblem where it is known on the host, and gives NaN where it is in a tensor.
    Differentiable in q and k; the gradient that arrives is never written to. RoFormer: arXiv 2104.09864.
    """
    given = {"q": q, "k": k, "cos": cos, "sin": sin, "positions": positions, "cu_seqlens": cu_seqlens}
    for name, tensor in given.items():
        if tensor is not None or name in ("q", "cos", "sin"):
            check_tensor(name, tensor)
    if cu_seqlens is not None:
        check_tensors({"q": q, "cu_seqlens": cu_seqlens})
    if not isinstance(inplace, bool):
        raise InvalidProblem(f"inplace is {inplace!r}; it must be True or False.")
    shape = (3, "(total, heads, head_dim)") if cu_seqlens is not None else (4, "(batch, seqlen, heads, head_dim)")
    for name, tensor in (("q", q), ("k", k)):
        if tensor is not None and tensor.dim() != shape[0]:
            raise InvalidProblem(f"{name} has shape {tuple(tensor.shape)}; it must be {shape[1]}.")
    wide = [t if t is None or cu_seqlens is None else t[None] for t in (q, k)]
    assert wide[0] is not None
    batch, seqlen = wide[0].shape[:2]
    if positions is None and (cu_seqlens is not None or isinstance(offset, torch.Tensor)):
        positions = _positions(seqlen, offset, cu_seqlens, q)
        offset = 0
    if isinstance(offset, torch.Tensor):
        raise InvalidProblem("offset and positions are given; offset must be 0 beside positions.")
    if positions is not None and positions.dim() == 1:
        positions = positions.expand(batch, -1)
    traced = is_traced(*(t for t in (q, k) if t is not None))
    if inplace and torch.is_grad_enabled():
        for name, tensor in (("q", q), ("k", k)):
            _check_written(name, tensor)
    options = dict(interleaved=interleaved, conjugate=conjugate, offset=offset, inplace=inplace and not traced)
    tensors = {"q": wide[0], "k": wide[1], "cos": cos, "sin": sin, "positions": positions}
    if options["inplace"] and torch.is_grad_enabled() and _one_by_one(wide):
        # both are found right before one is written over
        make_problem("rotary", {name: t for name, t in tensors.items() if t is not None}, options, AS_IT_IS)
        made = tuple(run("rotary", {**tensors, "q": t, "k": None}, options, backend)[0] for t in wide)
    else:
        made = run("rotary", tensors, options, backend)
    if cu_seqlens is not None:
        made = tuple(t[0] for t in made)
    if inplace and traced:
        made = tuple(t.copy_(m) for t, m in zip((q, k), made, strict=False) if t is not None)
    return made[0] if k is None else (made[0], made[1])


def _check_written(name: str, tensor: torch.Tensor | None) -> None:
    """Raise InvalidProblem for what autograd would refuse to have written over, before it is."""
    there = () if tensor is None else (tensor, tensor._base)
    if any(t is not None and t.is_leaf and t.requires_grad for t in there):
        raise InvalidProblem(f"{name} is a leaf of autograd's, or a view of one; with inplace it must not be.")
    if tensor is None or is_compiling() or not (tensor.requires_grad and tensor._is_view()):
        return
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    if autograd._get_creation_meta(tensor) != autograd.CreationMeta.DEFAULT:
        raise InvalidProblem(
            f"{name} is a view that autograd lets nobody write over, such as one of several that unbind, split or chunk make; "
            "with inplace it must be a tensor of its own or a view by an index, such as qkv[:, :, 0]."
        )


def _one_by_one(tensors: list[torch.Tensor | None]) -> bool:
    """Whether two would be written over, one of them a view: autograd knows no Function that does so."""
    there = [t for t in tensors if t is not None]
    return len(there) == 2 and any(t.requires_grad for t in there) and any(t._is_view() for t in there)


def _positions(seqlen: int, offset: int | torch.Tensor, cu_seqlens: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
    """(batch, seqlen), or (1, total) of packed sequences, without synchronisation."""
    index = torch.arange(seqlen, device=q.device)
    if isinstance(offset, torch.Tensor):
        check_tensors({"q": q, "offset": offset})
        if offset.dim() != 1 or offset.is_floating_point() or offset.is_complex():
            raise InvalidProblem(f"offset is {offset.dtype} of shape {tuple(offset.shape)}; it must be ints (batch,).")
    if cu_seqlens is None:
        assert isinstance(offset, torch.Tensor)
        return offset[:, None] + index
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.is_complex() or len(cu_seqlens) < 2:
        raise InvalidProblem(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; it must be ints (batch + 1,)."
        )
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), index.to(cu_seqlens.dtype), right=True)
    sequence = sequence.clamp(max=len(cu_seqlens) - 2)  # tokens past the last sequence
    begins = index - cu_seqlens[sequence]
    return (begins + (offset[sequence] if isinstance(offset, torch.Tensor) else offset))[None]
