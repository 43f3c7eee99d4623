"""DTensors: attention of what each rank holds, where batch or heads are sharded; over ranks where positions are."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.errors import NotSupported
from flashtile.features.masks.chunked import Chunked
from flashtile.features.masks.dilated import Dilated
from flashtile.features.masks.document import Document
from flashtile.features.masks.key_padding import KeyPadding
from flashtile.features.masks.prefix import Prefix
from flashtile.features.masks.top_left import TopLeft
from flashtile.problem.mask import Band, Joined, terms_of
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.inputs import check_tensors, modifiers
from flashtile.torch.call.lengths import Given
from flashtile.torch.call.sharded import refuse_shards
from flashtile.torch.context.attention import attention
from flashtile.torch.context.context import Context
from flashtile.torch.execute.eagerly import eagerly
from flashtile.torch.execute.packing import APART, KV, QKV, Packing
from flashtile.torch.execute.plain import is_compiling, is_distributed
from flashtile.torch.routes.functional import ATTENTION
from flashtile.torch.routes.operator import dense_strides, spread
from flashtile.torch.routes.request import write
from flashtile.torch.routes.traced import attend_traced

# Masks that know nothing of heads, and of the batch what is the first axis of their tensors.
SHARDED = (Band, Chunked, Dilated, Document, KeyPadding, Prefix, TopLeft)


def attend_watched(packing: Packing, packs: tuple[Any, ...], given: Given | None, arguments: Arguments) -> Any:
    """What `attention` and its kin return of tensors that are no plain ones, or that somebody watches."""
    if is_distributed(*packs):
        return attend_distributed(packing, packs, given, Arguments(**arguments.named(score=modifiers(arguments.score))))
    if not is_compiling():
        refuse_shards()
    return attend_traced(packing, packs, given, arguments)


def attend_distributed(packing: Packing, packs: tuple[Any, ...], given: Given | None, arguments: Arguments) -> Any:
    """What `attention` and its kin return, as DTensors sharded as the first of `packs` is. The others are laid as that is.

    Raises NotSupported where head_dim is sharded, or positions of packed tensors, and for what would depend on the shard.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    first = packs[0]
    if not isinstance(first, DTensor):
        _refuse("a first tensor that is none; all are laid as that one is")
    mesh, varlen = first.device_mesh, given is not None and given.varlen
    if packing is APART and not varlen and Shard(1) in first.placements:
        return _over_positions(packs, given, arguments)
    heads_axis = first.dim() - 2
    roles: list[str | None] = []
    for placement in first.placements:
        known = {Replicate(): None, Shard(heads_axis): "heads", **({} if varlen else {Shard(0): "batch"})}
        if placement not in known:
            _refuse(f"{placement} of a tensor {tuple(first.shape)}; batch and heads may be sharded, or nothing")
        roles.append(known[placement])
    _check(packing, roles, arguments)

    def local(tensor: Any, axes: dict[str, int]) -> torch.Tensor:
        """This rank's part of a tensor whose batch and heads lie on these axes; it is whole where it is no DTensor."""
        there = [axes.get(role or "") for role in roles]
        placements = [Replicate() if axis is None else Shard(axis) for axis in there]
        sums = [
            p if role is None or axis is not None else Partial() for p, role, axis in zip(placements, roles, there, strict=True)
        ]
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return tensor.redistribute(mesh, placements).to_local(grad_placements=sums)

    whole = packing.unpack(tuple(t[None] for t in packs) if varlen else packs)
    q, k, v = whole["q"], whole["k"], whole["v"]
    check_tensors(q, k, v, given)
    shared = k.shape[2] == 1 and packing is not QKV  # one head of keys and values, whole on every rank
    for name, tensor in (("q", q), ("k", k)):
        for size, role in zip(mesh.shape, roles, strict=True):
            if role == "heads" and tensor.shape[2] % size and not (name == "k" and shared):
                _refuse(f"{tensor.shape[2]} heads of {name} over {size} ranks; they must be a multiple")
    parts: list[torch.Tensor] = []
    for i, tensor in enumerate(packs):
        heads = {} if i and shared else {"heads": tensor.dim() - 2}
        parts.append(local(tensor, heads if varlen else {"batch": 0, **heads}))
    text, floats, ints, captured, others = write(packing, q, given, arguments)
    kinds = [kind for modifier in arguments.score for kind in modifier.captured]
    for i, tensor in enumerate(captured):
        if i == len(kinds):
            axes = {"heads": 0}  # the sink
        else:
            axes = {"batch": 0, "heads": 1}
            if kinds[i].broadcast:
                axes = {name: axis for name, axis in axes.items() if tensor.shape[axis] > 1}
        captured[i] = local(tensor, axes)
    others = [local(t, {} if varlen else {"batch": 0}) for t in others]
    wanted = 0
    if torch.is_grad_enabled():
        for i, tensor in enumerate((*parts, *captured)):
            wanted |= int(tensor.requires_grad) << i
    out, lse, _ = ATTENTION(*spread(parts), [*captured, *others], wanted, text, floats, ints)

    def joined(tensor: torch.Tensor, shape: tuple[int, ...], axes: dict[str, int]) -> Any:
        placements = [Replicate() if role is None else Shard(axes[role]) for role in roles]
        stride = dense_strides(shape, tensor)
        return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    rows = (*q.shape[:-1], v.shape[-1])[varlen:]
    out = joined(out, rows, {"batch": 0, "heads": out.dim() - 2})
    if not arguments.return_lse:
        return out
    return out, joined(lse, (*rows[:-3], rows[-2], rows[-3]), {"batch": 0, "heads": lse.dim() - 2})


@eagerly
def _over_positions(packs: tuple[Any, ...], given: Given | None, arguments: Arguments) -> Any:
    """The same where one axis of the mesh shards positions: `flashtile.distributed.attention` over that axis."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    refuse_shards(distributed=True)
    mesh, placements = packs[0].device_mesh, packs[0].placements
    axis = placements.index(Shard(1))
    if any(p not in (Replicate(), Shard(0), Shard(2)) for i, p in enumerate(placements) if i != axis):
        _refuse(f"{placements}; one axis may shard positions, and others batch and heads")
    plain = arguments.mask is None or isinstance(arguments.mask, Band)
    if given is not None or not plain or arguments.sink is not None or any(m.captured for m in arguments.score):
        _refuse("sharded positions beside tensors of masks, modifiers, sinks or lengths; flashtile.distributed.attention "
                "takes them with this rank's shards")  # fmt: skip
    for name, tensor in zip("qkv", packs, strict=True):
        for size, placement in zip(mesh.shape, placements, strict=True):
            if isinstance(placement, Shard) and tensor.shape[placement.dim] % size:
                _refuse(f"{tensor.shape[placement.dim]} of axis {placement.dim} of {name} over {size} ranks; pad to a multiple")
    locals_: list[torch.Tensor] = []
    for tensor in packs:
        if not isinstance(tensor, DTensor):
            _refuse("tensors of which one is none; q, k and v must all be")
        locals_.append(tensor.redistribute(mesh, placements).to_local(grad_placements=placements))
    some = {name: value for name, value in arguments.named().items() if value is not None}
    made = attention(*locals_, context=Context(mesh.get_group(axis)), **some)
    if not arguments.return_lse:
        return DTensor.from_local(made, mesh, placements, run_check=False)
    of_lse = [Shard((0, 2, 1)[p.dim]) if isinstance(p, Shard) else p for p in placements]
    return tuple(DTensor.from_local(t, mesh, p, run_check=False) for t, p in zip(made, (placements, of_lse), strict=True))


def _check(packing: Packing, roles: list[str | None], arguments: Arguments) -> None:
    """Raise NotSupported for what a rank cannot know of its part alone."""
    if not any(roles):
        return
    if packing not in (APART, QKV, KV):
        _refuse("heads of q, k and v along one axis; give them apart")
    if arguments.dropout is not None:
        _refuse("dropout, which depends on the positions of batch and head in the whole")
    for modifier in arguments.score:
        if any(captured.index is not None for captured in modifier.captured):
            _refuse(f"score modifier {modifier.name}, whose tensor is indexed in its own way")
    mask = arguments.mask
    leaves = [leaf for term in terms_of(mask) or () for leaf in term]
    if isinstance(mask, Joined) and (mask.spec is not None or not all(isinstance(leaf, SHARDED) for leaf in leaves)):
        _refuse("a mask with blocks, or with a predicate that is not known to have the batch first")


def _refuse(reason: str) -> None:
    raise NotSupported("attention of DTensors", {"torch": [reason]})
