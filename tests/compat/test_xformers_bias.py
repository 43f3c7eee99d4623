"""xformers' bias classes, each against its definition in xformers 0.0.35, written out here query by query and key by key."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch

from flashtile import InvalidProblem, NotSupported
from flashtile.compat import xformers_bias as ours
from flashtile.compat import xformers_paged as paged
from flashtile.compat.xformers import memory_efficient_attention
from flashtile.compat.xformers_items import _PaddedSeqLenInfo, _SeqLenInfo
from tests.compat.formula import attend
from tests.compat.test_flash_attn import agree, draw

WINDOW, LEFT, RIGHT = 3, 2, 1
Sees = Callable[[int, int, int], bool]  # of a query, a key and how many more keys than queries their item has


def whole(i: int, j: int, more: int) -> bool:
    return True


def first(i: int, j: int, more: int) -> bool:
    return j <= i


def last(i: int, j: int, more: int) -> bool:
    return j <= i + more


def first_local(i: int, j: int, more: int) -> bool:
    return i - WINDOW < j <= i


def last_local(i: int, j: int, more: int) -> bool:
    return i + more - WINDOW < j <= i + more


def sides(i: int, j: int, more: int) -> bool:
    return i + more - LEFT <= j <= i + more + RIGHT


DENSE: dict[str, tuple[Callable[[Any], Any], Sees]] = {
    "LowerTriangularMask": (lambda m: m.LowerTriangularMask(), first),
    "LowerTriangularFromBottomRightMask": (lambda m: m.LowerTriangularFromBottomRightMask(), last),
    "its local": (lambda m: m.LowerTriangularFromBottomRightMask().make_local_attention(WINDOW), last_local),
    "the local one's local": (
        lambda m: m.LowerTriangularFromBottomRightLocalAttentionMask(9).make_local_attention(WINDOW),
        last_local,
    ),
    "LocalAttentionFromBottomRightMask": (lambda m: m.LocalAttentionFromBottomRightMask(LEFT, RIGHT), sides),
}
# What a method makes of a mask of items, or of a causal one, depends on the method alone.
MADE = {
    "": whole, "make_causal": first, "make_causal_from_bottomright": last, "make_local_attention": first_local,
    "make_local_attention_from_bottomright": last_local,
}  # fmt: skip
CHAINS = [
    (before, then) for before in ("", "make_causal", "make_causal_from_bottomright", "make_local_attention") for then in MADE
    if before or then != ""
]  # fmt: skip
# Of items: queries and keys of each.
LENGTHS = {
    "fewer queries": ((2, 5), (3, 3), (1, 4)),
    "as many": ((4, 4), (1, 1), (3, 3)),
    "more queries": ((5, 3), (4, 4), (3, 2)),
    "alike more": ((5, 3), (6, 4)),
    "mixed, and empty ones": ((2, 4), (0, 3), (6, 4), (2, 0)),
}
PADDED: dict[str, tuple[Callable[..., Any], Sees]] = {
    "BlockDiagonalPaddedKeysMask": (lambda m, *given: m.BlockDiagonalPaddedKeysMask.from_seqlens(*given), whole),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (
        lambda m, *given: m.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(*given),
        last,
    ),
    "its local": (
        lambda m, *given: m.BlockDiagonalPaddedKeysMask.from_seqlens(*given).make_local_attention(LEFT, RIGHT),
        sides,
    ),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (
        lambda m, *given: m.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(*given, LEFT, RIGHT),
        sides,
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (
        lambda m, *given: m.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(*given, WINDOW),
        last_local,
    ),
}
GAPPY: dict[str, tuple[Callable[..., Any], Sees]] = {
    "BlockDiagonalGappyKeysMask": (lambda m, *given: m.BlockDiagonalGappyKeysMask.from_seqlens(*given), whole),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (
        lambda m, *given: m.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(*given),
        last,
    ),
}
STARTS = {  # of items with 5, 3 and 4 keys, of 20
    "gaps": [0, 6, 12, 20], "a gap before": [2, 7, 11, 20], "any order": [12, 0, 6, 20], "shared keys": [1, 3, 4, 20],
}  # fmt: skip


def written(sees: Sees, queries: Sequence[int], keys: Sequence[int], starts: Sequence[int], total: int) -> torch.Tensor:
    """0 and -inf, (queries, keys), where item i has keys[i] keys from starts[i] on."""
    made = torch.full((sum(queries), total), -math.inf)
    for n, row, m, start in zip(queries, accumulate([0, *queries]), keys, starts, strict=False):
        for i in range(n):
            for j in range(m):
                if sees(i, j, m - n):
                    made[row + i, start + j] = 0.0
    return made


def same(bias: Any, true: torch.Tensor, place: torch.device) -> None:
    """What the bias writes, and what it makes of attention and its gradients, is the definition's."""
    writes(bias, true)
    packs = draw((1, true.shape[0], 2, 16), *[(1, true.shape[1], 2, 16)] * 2, place=place)
    agree(packs, memory_efficient_attention(*packs, attn_bias=bias), attend(*packs, true == 0)[0])


def writes(bias: Any, true: torch.Tensor) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        assert torch.equal(bias.materialize(true.shape, dtype), true.to(dtype))
    wide = bias.materialize((2, 3, *true.shape))
    assert torch.equal(wide, true.expand(2, 3, -1, -1))


@pytest.mark.parametrize("lengths", [(4, 9), (6, 6), (9, 4)])
@pytest.mark.parametrize("name", DENSE)
def test_dense(through: str, place: torch.device, name: str, lengths: tuple[int, int]) -> None:
    make, sees = DENSE[name]
    same(make(ours), written(sees, [lengths[0]], [lengths[1]], [0], lengths[1]), place)


def test_a_tensor_beside_the_order() -> None:
    bias = torch.randn(6, 9)
    true = written(first, [6], [9], [0], 9) + bias
    mask = ours.LowerTriangularMask().add_bias(bias)
    assert torch.equal(mask.materialize((6, 9)), true)
    assert mask.to("meta")._bias.device.type == "meta"


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("made", MADE)
def test_items(through: str, place: torch.device, made: str, lengths: str) -> None:
    queries, keys = ([pair[side] for pair in LENGTHS[lengths]] for side in (0, 1))
    true = written(MADE[made], queries, keys, [0, *accumulate(keys)], sum(keys))
    same(made_by(ours, "", made, queries, keys), true, place)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("before", "then"), CHAINS)
def test_masks_made_of_others(before: str, then: str, lengths: str) -> None:
    queries, keys = ([pair[side] for pair in LENGTHS[lengths]] for side in (0, 1))
    mask, direct = (made_by(ours, *names, queries, keys) for names in ((before, then), ("", then or before)))
    writes(mask, written(MADE[then or before], queries, keys, [0, *accumulate(keys)], sum(keys)))
    assert type(mask) is type(direct)
    assert mask.mask() == direct.mask()


def made_by(module: Any, before: str, then: str, queries: list[int], keys: list[int]) -> Any:
    mask = module.BlockDiagonalMask.from_seqlens(queries, keys)
    for name in filter(None, (before, then)):
        mask = getattr(mask, name)(*([WINDOW] if "local" in name else []))
    return mask


@pytest.mark.parametrize("lengths", ["fewer queries", "more queries", "mixed, and empty ones"])
@pytest.mark.parametrize("name", PADDED)
def test_padded_keys(through: str, place: torch.device, name: str, lengths: str) -> None:
    make, sees = PADDED[name]
    queries, keys = ([pair[side] for pair in LENGTHS[lengths]] for side in (0, 1))
    same(make(ours, queries, 6, keys), written(sees, queries, keys, range(0, 99, 6), 6 * len(keys)), place)


@pytest.mark.parametrize("queries", [[3, 3, 2], [6, 2, 7]])
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("name", GAPPY)
def test_gappy_keys(through: str, place: torch.device, name: str, starts: str, queries: list[int]) -> None:
    make, sees = GAPPY[name]
    mask = make(ours, queries, STARTS[starts], [5, 3, 4])
    same(mask, written(sees, queries, [5, 3, 4], STARTS[starts], 20), place)
    halves = [torch.randn(1, n, 2, 16, device=place).half() for n in (sum(queries), 20, 20)]
    with torch.autocast(place.type, torch.bfloat16):  # under which torch.cat refuses float16
        out = memory_efficient_attention(*halves, attn_bias=mask)
    assert torch.equal(out, memory_efficient_attention(*halves, attn_bias=mask))


def test_classes_are_related_as_there() -> None:
    items = ours.BlockDiagonalMask.from_seqlens([3, 4])
    assert isinstance(items.make_local_attention(2), ours.BlockDiagonalCausalMask)
    assert isinstance(items.make_local_attention_from_bottomright(2), ours.BlockDiagonalCausalFromBottomRightMask)
    assert not isinstance(ours.BlockDiagonalGappyKeysMask.from_seqlens([1], [0, 2], [2]), ours.BlockDiagonalMask)
    assert items.q_seqinfo is items.k_seqinfo
    assert ours.BlockDiagonalMask.from_seqlens([3, 4], [3, 4]).q_seqinfo.max_seqlen == 4
    assert items.q_seqinfo.min_seqlen == 3


def test_items_move_with_their_tensors(place: torch.device) -> None:
    mask = ours.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([2, 3], 6, [4, 5], device=place)
    assert mask.k_seqinfo.seqlen.device.type == place.type
    assert mask.to(torch.device(place)) is mask
    moved = mask.to("meta")
    assert type(moved) is type(mask)
    assert moved.q_seqinfo.seqstart.device.type == moved.k_seqinfo.seqlen.device.type == "meta"
    items = ours.BlockDiagonalMask.from_seqlens([2, 3], device=place).to("meta")
    assert items.q_seqinfo is items.k_seqinfo


def test_what_is_written_into_their_tensors_counts(through: str, place: torch.device) -> None:
    """A graph's replay writes lengths into the tensors of a mask, by its methods or by hand."""
    packs = draw((1, 5, 2, 16), *[(1, 12, 2, 16)] * 2, place=place)
    kind = ours.BlockDiagonalCausalWithOffsetPaddedKeysMask
    after = memory_efficient_attention(*packs, attn_bias=kind.from_seqlens([2, 3], 6, [3, 6]))
    mask = kind.from_seqlens([2, 3], 6, [6, 4])
    assert not torch.equal(memory_efficient_attention(*packs, attn_bias=mask), after)
    mask.k_seqinfo.from_seqlens_padded_inplace([3, 6])
    assert torch.equal(memory_efficient_attention(*packs, attn_bias=mask), after)
    assert torch.equal(mask.materialize((5, 12)), kind.from_seqlens([2, 3], 6, [3, 6]).materialize((5, 12)))
    mask = kind.from_seqlens([2, 3], 6, [6, 4])
    memory_efficient_attention(*packs, attn_bias=mask)
    mask.k_seqinfo.seqlen.copy_(torch.tensor([3, 6]))
    assert torch.equal(memory_efficient_attention(*packs, attn_bias=mask), after)
    info = _SeqLenInfo.from_seqlens([2, 4, 1])
    start = info.seqstart
    info.from_seqlens_inplace([1, 1, 4])
    assert info.seqstart is start
    assert start.tolist() == info.seqstart_py == [0, 1, 2, 6]
    with pytest.raises(InvalidProblem, match=r"seqlens are \[1, 5, 1\]; there must be 3 as before, and none above 4"):
        info.from_seqlens_inplace([1, 5, 1])


PAGED = {
    "PagedBlockDiagonalPaddedKeysMask": (whole, False),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": (last, False),
    "PagedBlockDiagonalGappyKeysMask": (whole, True),
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": (last, True),
}


@pytest.mark.parametrize("queries", [[1, 1, 1], [2, 1, 4]])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", PAGED)
def test_paged_keys(through: str, place: torch.device, name: str, size: int, queries: list[int]) -> None:
    """Against the definition over all rows of the pages; what no item has is NaN."""
    (sees, gappy), kind = PAGED[name], getattr(paged, name)
    keys, starts = [5, 1, 7], [2, 0, 1] if gappy else [0, 0, 0]
    columns, rows = 8 // size, 8 * 3 + size
    order = torch.randperm(rows // size, generator=torch.Generator().manual_seed(0))
    table = order[: 3 * columns].view(3, columns).int()
    mask = kind.from_seqlens(queries, *([starts] if gappy else []), keys, table.to(place), size)
    true = torch.full((sum(queries), rows), -math.inf)
    for i, (n, m, begin, row) in enumerate(zip(queries, keys, starts, accumulate([0, *queries]), strict=False)):
        for a in range(n):
            for b in range(m):
                t = begin + b
                if sees(a, b, m - n):
                    true[row + a, int(table[i, t // size]) * size + t % size] = 0.0
    for dtype in (torch.float32, torch.float16):
        end = (int(table.max()) + 1) * size
        assert torch.equal(mask.materialize((sum(queries), 24), dtype), true[:, :end].to(dtype))
    q, k, v = (t.detach() for t in draw((1, sum(queries), 4, 16), *[(1, rows, 2, 16)] * 2, place=place))
    want = attend(q, k, v, true == 0)[0].float()
    unseen = torch.ones(rows, dtype=torch.bool)
    for i, (m, begin) in enumerate(zip(keys, starts, strict=True)):
        for t in range(begin, begin + m):
            unseen[int(table[i, t // size]) * size + t % size] = False
    k[:, unseen], v[:, unseen] = torch.nan, torch.nan
    torch.testing.assert_close(memory_efficient_attention(q, k, v, attn_bias=mask), want.to(q.dtype), rtol=1e-5, atol=1e-5)
    wide = [t[:, :, :, None].expand(-1, -1, -1, 2, -1) for t in (k, v)]
    groups = memory_efficient_attention(q.view(1, -1, 2, 2, 16), *wide, attn_bias=mask)
    torch.testing.assert_close(groups.view(want.shape), want.to(q.dtype), rtol=1e-5, atol=1e-5)


def test_masks_become_paged() -> None:
    table, q = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32), torch.randn(1, 3, 2, 16)
    k, v = torch.randn(1, 16, 2, 16), torch.randn(1, 16, 2, 16)
    padded = ours.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1, 2], 8, [5, 7])
    kind = paged.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
    direct = kind.from_seqlens([1, 2], [5, 7], table, 4)
    made = padded.make_paged(table, 4, kind)
    assert torch.equal(*(memory_efficient_attention(q, k, v, attn_bias=mask) for mask in (made, direct)))
    gappy = ours.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens([1, 2], [2, 9, 16], [3, 6])
    other = paged.PagedBlockDiagonalCausalWithOffsetGappyKeysMask
    want = memory_efficient_attention(q, k, v, attn_bias=other.from_seqlens([1, 2], [2, 1], [3, 6], table, 4))
    assert torch.equal(memory_efficient_attention(q, k, v, attn_bias=gappy.make_paged(table, 4, 8, other)), want)
    gappy = ours.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens([1, 2], [2, 9, 16], [3, 6], device="cpu")
    gappy.k_seqinfo.seqlen.copy_(torch.tensor([3, 6]))  # somebody may have written other ones
    assert torch.equal(memory_efficient_attention(q, k, v, attn_bias=gappy.make_paged(table, 4, 8, other)), want)
    assert made.to("meta").block_tables.device.type == "meta"


def test_bad_pages_are_named() -> None:
    table = torch.zeros(1, 2, dtype=torch.int32)
    kind = paged.PagedBlockDiagonalPaddedKeysMask
    with pytest.raises(InvalidProblem, match="reaches row 9 and block_tables has 2 pages of 4"):
        kind.from_seqlens([1], [9], table, 4)
    with pytest.raises(InvalidProblem, match=r"block_tables is \(1, 2\); it must be .* of 2 items"):
        kind.from_seqlens([1, 1], [2, 2], table, 4)
    for wrong, says in (([[0, 1]], "list"), (table[0], r"\(2,\)"), (table[0, 0], r"\(\)"), (table.float(), r"torch\.float32")):
        with pytest.raises(InvalidProblem, match=f"block_tables is {says}; it must be"):
            kind.from_seqlens([1], [2], wrong, 4)
    with pytest.raises(InvalidProblem, match="page_size is None"):
        kind.from_seqlens([1], [2], table, None)
    with pytest.raises(InvalidProblem, match="kv_seqstarts has 2 numbers and kv_seqlen 1"):
        paged.PagedBlockDiagonalGappyKeysMask.from_seqlens([1], [0, 2], [2], table, 4)
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 8, 1, 16)
    mask = kind.from_seqlens([1], [6], table + 5, 4)
    with pytest.raises(InvalidProblem, match=r"block_tables\[0\] names page 5"):
        memory_efficient_attention(q, k, k, attn_bias=mask)
    with pytest.raises(InvalidProblem, match=r"key has shape \(1, 7, 1, 16\)"):
        memory_efficient_attention(q, k[:, :7], k, attn_bias=mask)
    with pytest.raises(NotSupported, match=r"p is 0\.1; attention over pages has no dropout"):
        memory_efficient_attention(q, k, k, attn_bias=mask, p=0.1)
    gappy = ours.BlockDiagonalGappyKeysMask.from_seqlens([1], [0, 8], [2])
    with pytest.raises(InvalidProblem, match="notional_padding is 6"):
        gappy.make_paged(table, 4, 6, paged.PagedBlockDiagonalGappyKeysMask)


def test_refusals() -> None:
    class Own(ours.AttentionBias):
        pass

    q = torch.randn(1, 3, 1, 16)
    with pytest.raises(NotSupported, match=r"Own:\n  flashtile: a bias of your own, .* give it as a tensor"):
        memory_efficient_attention(q, q, q, attn_bias=Own())
    for wrong, message in ((torch.tensor([3]), r"q_seqlen.tolist\(\)"), ([2.5], "a list of ints"), ([-1], "holds -1")):
        with pytest.raises(InvalidProblem, match=message):
            ours.BlockDiagonalMask.from_seqlens(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidProblem, match=r"shape is \(3, 4\); it must end with \(3, 3\)"):
        ours.BlockDiagonalMask.from_seqlens([3]).materialize((3, 4))
    with pytest.raises(InvalidProblem, match="kv_seqstarts has 1 numbers and kv_seqlen 1"):
        ours.BlockDiagonalGappyKeysMask.from_seqlens([3], [0], [2])
    with pytest.raises(InvalidProblem, match=r"item 0 ends at 1 \+ 4 .* within 4 keys"):
        ours.BlockDiagonalGappyKeysMask.from_seqlens([3], [1, 4], [4])
    with pytest.raises(InvalidProblem, match="from_seqlens_padded"):
        _PaddedSeqLenInfo.from_seqlens([3])
    for make in (
        lambda: ours.BlockDiagonalMask.from_seqlens([3]).make_local_attention(0),
        lambda: ours.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local([1], 2, [2], 0),
    ):
        with pytest.raises(InvalidProblem, match="window_size is 0"):
            make()
    with pytest.raises(InvalidProblem, match="window_right is -1"):
        ours.BlockDiagonalPaddedKeysMask.from_seqlens([1], 2, [2]).make_local_attention(1, -1)


def test_beside_xformers_itself() -> None:
    """Where xformers is installed: all that it makes is what is made here."""
    try:
        theirs = importlib.import_module("xformers.ops.fmha.attn_bias")
    except ImportError as error:
        pytest.skip(f"xformers is not installed: {error}")
    pairs: list[tuple[Any, Any, tuple[int, int]]] = []
    for make, _ in DENSE.values():
        pairs += [(make(theirs), make(ours), lengths) for lengths in ((4, 9), (6, 6), (9, 4))]
    for items in LENGTHS.values():
        queries, keys = ([pair[side] for pair in items] for side in (0, 1))
        for before, then in CHAINS:
            try:
                made = made_by(theirs, before, then, queries, keys)
            except (ValueError, RuntimeError):  # queries that see nothing
                continue
            pairs.append((made, made_by(ours, before, then, queries, keys), (sum(queries), sum(keys))))
        for make, _ in PADDED.values():
            both = [make(m, queries, 6, keys) for m in (theirs, ours)]
            pairs.append((*both, (sum(queries), 6 * len(keys))))
    for make, _ in GAPPY.values():
        pairs += [(*(make(m, [3, 3, 2], starts, [5, 3, 4]) for m in (theirs, ours)), (8, 20)) for starts in STARTS.values()]
    for made, mine, shape in pairs:
        assert torch.equal(made.materialize(shape), mine.materialize(shape))
