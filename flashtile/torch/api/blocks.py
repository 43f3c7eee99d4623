"""Blocks: a mask with the lists of its blocks, so that kernels visit those alone that hold anything."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import product
from typing import Any

import torch
from torch.nn.functional import pad

from flashtile.errors import InvalidProblem
from flashtile.features.masks.block_table import BlockTable
from flashtile.features.masks.key_padding import KeyPadding
from flashtile.features.masks.stored_blocks import StoredBlocks
from flashtile.memory import Memory
from flashtile.problem.blocks import BlockSpec
from flashtile.problem.mask import Band, Joined, Predicate, Terms, terms_of
from flashtile.problem.number import plain
from flashtile.problem.score import Position
from flashtile.torch.api.block_mask import HIDDEN, PARTIAL, WHOLE, Said, said_of
from flashtile.torch.api.classify import state_of
from flashtile.torch.call.masks import predicates_of
from flashtile.torch.execute.inference_safe import lasting

# Axes of blocks, and how many axes a tensor has at least whose same axis counts them: any tensor's first, and the second of
# those that go by scores.
AXES = {"batch": 1, "head": 4}
Lists = dict[str, torch.Tensor]
MOST_CALLS = 64  # shapes of calls that are remembered, per mask


class Blocks(Joined):
    """Mask made of blocks: those that hold no visible score are not visited, those visible whole cost no masking.

    Built once, used in many calls of the same lengths. `&` and `|` with another mask give Blocks, of the larger block sizes of
    both: where these serve all items or heads, those of the other mask differ as the shapes of its tensors do. A predicate
    that goes by `at.batch` or `at.head` without such a tensor is refused: it is built first, for as many as there are, by
    `Blocks.build(.., heads=8)`.

    Where items differ in length (`attention_varlen`, seqused) a call asks the mask itself, everywhere: lists are made for one
    length. `padded` hides padding by them.

    state: int8 (batch or 1, heads or 1, rows, columns); 0 hidden, 1 visible in part, 2 whole.
    """

    @lasting
    def __init__(
        self, mask: Band | Joined, state: torch.Tensor, seqlens: tuple[int, int], spec: BlockSpec, lists: Lists | None = None
    ):  # fmt: skip
        self.mask, self.state, self.seqlens, self.spec = mask, state, seqlens, spec
        self._lists = _lists_of(state) if lists is None else lists
        self.calls = Memory(MOST_CALLS)
        # Made once, and here: what a compiled forward makes cannot be kept.
        self._in_part = (state.clamp(max=PARTIAL), _in_part(self._lists)) if lists is None else (state, lists)

    @property
    def unlisted(self) -> Band | Joined:
        return self.mask

    @property
    def lists(self) -> dict[str, torch.Tensor]:
        """(visible in part, whole) counts and block indices of every row of blocks, and of every column; which are longest."""
        return self._lists

    @classmethod
    @lasting
    def build(
        cls, mask: Band | Joined, seqlen_q: int, seqlen_k: int, *, batch: int = 1, heads: int = 1,
        block_size: tuple[int, int] = (128, 128), device: torch.device | str | None = None,
    ) -> Blocks:  # fmt: skip
        """The blocks of a mask, found by evaluating it, a block at a time: memory is O(blocks).

        batch, heads: 1 where the mask is the same for all, else as in the calls to come.
        block_size: queries and keys of a block, powers of two; kernels want at least (128, 128), and use smaller tiles
            for smaller blocks.
        device: that of the mask's tensors by default, else torch's default device.
        """
        terms = terms_of(mask)
        if terms is None:
            raise InvalidProblem(f"mask is a {type(mask).__name__}; it must be a flashtile mask such as Band.")
        spec = BlockSpec(*_pair(block_size))
        predicates = predicates_of(False, None, mask if isinstance(mask, Joined) else Terms(((mask,),)), batch, heads)
        place = torch.device(device) if device is not None else _device_of(predicates.flat)
        if place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        predicates.check(place)
        state = state_of(predicates, (batch, heads, seqlen_q, seqlen_k), spec, place)
        return cls(mask, state, (seqlen_q, seqlen_k), spec)

    @classmethod
    @lasting
    def from_block_mask(
        cls, block_mask: torch.Tensor, seqlen_q: int, seqlen_k: int, *, block_size: tuple[int, int] = (128, 128)
    ) -> Blocks:
        """The mask of a table that says for each block whether it is visible; flash-attn v1's blocks are 16 x 256.

        block_mask: bool (rows, columns), or with (batch or 1, heads or 1) before them.
        """
        if not isinstance(block_mask, torch.Tensor):
            raise InvalidProblem(f"block_mask is a {type(block_mask).__name__}; it must be a torch.Tensor.")
        table = block_mask if block_mask.dim() == 4 else block_mask[None, None]
        size_q, size_k = _pair(block_size)
        wanted = (-(-seqlen_q // size_q), -(-seqlen_k // size_k))
        if table.dim() != 4 or table.dtype is not torch.bool or tuple(table.shape[2:]) != wanted:
            raise InvalidProblem(
                f"block_mask is {block_mask.dtype} {tuple(block_mask.shape)}; it must be bool with {wanted} as its last axes, "
                f"for {seqlen_q} x {seqlen_k} scores in blocks of {size_q} x {size_k}."
            )
        coarse = max(128, size_q), max(128, size_k)
        return cls.build(
            BlockTable(table, size_q, size_k), seqlen_q, seqlen_k, batch=table.shape[0], heads=table.shape[1],
            block_size=coarse, device=table.device,
        )  # fmt: skip

    @classmethod
    @lasting
    def from_flex(cls, block_mask: Any, *, batch: int | None = None, heads: int | None = None) -> Blocks:
        """The mask of a `torch.nn.attention.flex_attention.BlockMask`. Its `mask_mod` is asked once, for the blocks that
        are visible in part; what it says is stored, a byte for each of their scores.

        It is asked as torch asks it, with scalars (`torch.vmap`). batch, heads: how many there are, for a `mask_mod` that goes
        by them though the block mask was made for one: then it is asked of every score. Without them the first one's mask
        serves all. Raises NotSupported for a function that cannot be read, InvalidProblem for one that gives no booleans.
        """
        from torch.nn.attention.flex_attention import BlockMask  # it imports much, which who has one has imported

        if not isinstance(block_mask, BlockMask):
            raise InvalidProblem(
                f"block_mask is a {type(block_mask).__name__}; it must be a torch.nn.attention.flex_attention.BlockMask."
            )
        return cls.said(said_of(block_mask, batch, heads))

    @classmethod
    def said(cls, said: Said) -> Blocks:
        return cls(StoredBlocks(said.slot, said.values), said.state, said.seqlens, said.spec)

    @property
    def terms(self) -> tuple[tuple[Band | Predicate, ...], ...]:
        found = terms_of(self.mask)
        assert found is not None
        return found

    @property
    def density(self) -> float:
        """Blocks that are visited, of all. Waits for the device."""
        return (self.state != HIDDEN).float().mean().item()

    def __and__(self, other: Any) -> Blocks:
        return self._joined(other, lambda a, b: torch.where((a == 0) | (b == 0), 0, torch.minimum(a, b)), lambda a, b: a & b)

    __rand__ = __and__

    def __or__(self, other: Any) -> Blocks:
        return self._joined(other, torch.maximum, lambda a, b: a | b)

    __ror__ = __or__

    def padded(self, keep: torch.Tensor) -> Blocks:
        """The mask beside `KeyPadding(keep)`, bool (batch or 1, seqlen_k), for padding that each call has anew.

        No score is looked at and no list made, which `& KeyPadding(keep)` does: blocks that padding alone hides are visited all
        the same, and no block is spared the masking.
        """
        assert self.spec is not None
        state, lists = self._in_part
        return Blocks(self.mask & KeyPadding(keep), state, self.seqlens, self.spec, lists)

    @lasting
    def _joined(self, other: Any, of_states: Any, of_masks: Any) -> Blocks:
        mine = self.spec
        if terms_of(other) is None:
            return NotImplemented
        assert mine is not None
        if not isinstance(other, Blocks):
            other = self._blocks_of(other, (mine.block_q, mine.block_k))
        if other.seqlens != self.seqlens:
            one, two = (" x ".join(map(str, blocks.seqlens)) for blocks in (self, other))
            raise InvalidProblem(f"blocks for {one} scores meet blocks for {two}; they must be for the same scores.")
        theirs = other.spec
        assert theirs is not None
        spec = BlockSpec(max(mine.block_q, theirs.block_q), max(mine.block_k, theirs.block_k))
        sizes = tuple(self.state.shape[:2]), tuple(other.state.shape[:2])
        if any(a != b and 1 not in (a, b) for a, b in zip(*sizes, strict=True)):
            raise InvalidProblem(f"blocks for {sizes[0]} (batch, heads) meet blocks for {sizes[1]}; they must be alike, or 1.")
        state = of_states(*(_coarser(blocks, spec) for blocks in (self, other))).to(torch.int8)
        return Blocks(of_masks(self.mask, other.mask), state, self.seqlens, spec)

    def _blocks_of(self, mask: Any, block_size: tuple[int, int]) -> Blocks:
        """A mask's blocks beside these; where these serve all items or heads, it may differ among what its tensors have.

        By trial, for shapes do not say it: the first axis may count items (`Prefix`), tokens (`Document`) or stored blocks.
        What every predicate takes is what the mask means, and the fewest come first.
        """
        leaves = [leaf for term in terms_of(mask) or () for leaf in term if isinstance(leaf, Predicate)]
        alone = {axis for axis, size in zip(AXES, self.state.shape, strict=False) if size == 1}
        for leaf in leaves if not torch.compiler.is_compiling() else ():
            if unsaid := alone & _unsaid(leaf, self.state.device):
                raise InvalidProblem(
                    f"{leaf.name} goes by at.{min(unsaid)} and no tensor of it says how many there are; its blocks must be "
                    "built first, by Blocks.build(mask, seqlen_q, seqlen_k, batch=.., heads=..)."
                )
        shapes = [t.shape for leaf in leaves for t in _tensors_of(leaf)]
        sizes: list[list[int]] = []
        for axis, least in enumerate(AXES.values()):
            mine = self.state.shape[axis]
            more = {shape[axis] for shape in shapes if len(shape) >= least} - {0, 1} if mine == 1 else ()
            sizes.append([mine, *sorted(more)])
        refusals: list[InvalidProblem] = []
        for batch, heads in product(*sizes):
            try:
                return Blocks.build(
                    mask, *self.seqlens, batch=batch, heads=heads, block_size=block_size, device=self.state.device
                )
            except InvalidProblem as refusal:
                refusals.append(refusal)
        raise refusals[0]


def _coarser(blocks: Blocks, spec: BlockSpec) -> torch.Tensor:
    """The state in blocks of these sizes, multiples of their own: hidden beyond the scores, so that no block is whole there."""
    state, mine = blocks.state, blocks.spec
    assert mine is not None
    times_q, times_k = spec.block_q // mine.block_q, spec.block_k // mine.block_k
    if times_q == times_k == 1:
        return state
    parts = pad(state, (0, -state.shape[3] % times_k, 0, -state.shape[2] % times_q))
    parts = parts.unflatten(3, (-1, times_k)).unflatten(2, (-1, times_q))
    return torch.where(parts.amin((3, 5)) == WHOLE, WHOLE, parts.amax((3, 5)).clamp(max=PARTIAL))


class _Noting(Position):
    """A position that notes what is read of it."""

    def __getattribute__(self, name: str) -> Any:
        super().__getattribute__("__dict__").setdefault(name)
        return super().__getattribute__(name)


def _tensors_of(leaf: Predicate) -> list[torch.Tensor]:
    # The compiler of PyTorch 2.11 cannot follow vars() of a frozen dataclass.
    values = [getattr(leaf, field.name) for field in fields(leaf)] if is_dataclass(leaf) else vars(leaf).values()
    return [value for value in values if isinstance(value, torch.Tensor)]


def _unsaid(leaf: Predicate, place: torch.device) -> set[str]:
    """Which of AXES a predicate goes by though no shape of its tensors can say how many there are.

    Found by evaluating its formula in PyTorch for one score; what cannot be evaluated says so where blocks are made.
    """
    dims = max((tensor.dim() for tensor in _tensors_of(leaf)), default=0)
    at = _Noting(*torch.zeros((5, 1, 1, 1, 1), dtype=torch.int64, device=place))
    with suppress(Exception):
        leaf.apply(at, leaf.scalars(), leaf.tensors(1, 1))
    return {axis for axis, least in AXES.items() if dims < least and axis in vars(at)}


def _lists_of(state: torch.Tensor) -> Lists:
    """The tensors of `BlockSpec`, of what each block holds."""
    lists: Lists = {}
    for side, table in (("q", state), ("k", state.mT)):
        whole, partial = table == WHOLE, table == PARTIAL
        order = torch.where(partial, 0, torch.where(whole, 1, 2)).to(torch.int8)
        lists[f"blocks.count_{side}"] = torch.stack([partial.sum(-1), whole.sum(-1)], -1).to(torch.int32)
        lists[f"blocks.index_{side}"] = order.argsort(dim=-1, stable=True).to(torch.int32).contiguous()
        visited = (table != HIDDEN).sum(-1)
        lists[f"blocks.order_{side}"] = visited.argsort(dim=-1, descending=True, stable=True).to(torch.int32).contiguous()
    long = (visited * visited.shape[-1] > 2 * visited.sum(-1, keepdim=True)).sum(-1).amax()  # of keys, the latter side
    longest = pad(visited, (0, 1), value=1).amax()  # at least 1, of no columns, too
    alike = visited.sum(-1).double().mean() // longest
    order = lists["blocks.order_k"]
    more = torch.stack([long, alike.long()]).to(torch.int32)
    lists["blocks.order_k"] = torch.cat([order, more.expand(*order.shape[:2], 2)], -1)
    return lists


def _in_part(lists: Lists) -> Lists:
    """The lists of the same blocks, all of them visible in part: the same but for what is counted as what."""
    counts = {n: pad(t.sum(-1, keepdim=True, dtype=t.dtype), (0, 1)) for n, t in lists.items() if n.startswith("blocks.count")}
    return {**lists, **counts}


def _pair(block_size: Any) -> tuple[int, int]:
    """Queries and keys of a block. Raises InvalidProblem unless they are positive ints; `BlockSpec` knows which."""
    sizes = tuple(map(plain, block_size)) if isinstance(block_size, (tuple, list)) else ()
    if len(sizes) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise InvalidProblem(f"block_size is {block_size!r}; it must be a pair of positive ints (queries, keys).")
    return sizes[0], sizes[1]


def _device_of(tensors: tuple[Any, ...]) -> torch.device:
    return tensors[0].device if tensors else torch.get_default_device()
