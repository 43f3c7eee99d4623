"""Masks of predicates and blocks: how they join, what they list, what hides behind them, bad input."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import flashtile
from flashtile import (
    AttentionProblem,
    Band,
    Blocks,
    Dilated,
    Document,
    InvalidProblem,
    KeyPadding,
    NotSupported,
    Options,
    Prefix,
    Stored,
)
from flashtile.features.masks.within import Within
from flashtile.kernels.cpu.blocks import classify
from flashtile.problem.dtype import DType
from flashtile.problem.mask import FULL, Predicate
from flashtile.problem.options import Variant
from flashtile.problem.predicate import normal_form
from flashtile.reference.attention import attention_plain, attention_reference, holds, positions, visible
from flashtile.torch.api.blocks import MOST_CALLS
from flashtile.torch.api.blocks import Blocks as BlocksOfTorch
from flashtile.torch.call.masks import call_mask, predicates_of
from tests.backends import OF_KERNELS
from tests.cases import MASKS, Case
from tests.judge import run, run_clean
from tests.torch.test_nan import VALUES, assert_same

triton = pytest.importorskip("triton")
tl = triton.language


def dense(mask: Any, case: Case, place: torch.device) -> torch.Tensor:
    """The mask by its definition: bool (items, heads_q, seqlen_q, seqlen_k)."""
    band, terms = normal_form(False, None, mask)
    at = positions(case.items, case.heads_q, case.seqlen_q, case.seqlen_k, place)
    keep = visible(band, case.seqlen_q, case.seqlen_k, place) & holds(terms, at, (case.items, case.heads_q))
    return keep.expand(case.items, case.heads_q, case.seqlen_q, case.seqlen_k)


CASE = Case("poisoned-mask", batch=2, seqlen_q=50, seqlen_k=66, heads_q=2, heads_kv=2, head_dim=8)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["holes", "document-causal", "holes-blocks"])
def test_what_a_predicate_hides_does_not_leak(
    backend: str, place: torch.device, variant: Variant, name: str, value: float
) -> None:
    """A key that no query of its item sees, and one that only the queries of another tile see."""
    case = replace(CASE, mask=name, backward=variant)
    keep = dense(case.masks(place)["mask"], case, place)
    clean = case.tensors(place)
    dirty = {key: t.clone() for key, t in clean.items()}
    unseen = ~keep.any(1).any(1)
    assert unseen.any()
    dirty["k"][unseen], dirty["v"][unseen] = value, value
    blind = ~keep.any(1).any(2)
    dirty["q"][blind], dirty["dout"][blind] = value, value
    got = run(backend, case, dirty)
    assert_same(case, got, run_clean(backend, case, place))
    assert (got["dk"][unseen] == 0).all()
    assert (got["dq"][blind] == 0).all()


@pytest.mark.parametrize(("backend", "variant"), OF_KERNELS)  # the CPU's tiles hold both documents
def test_a_poisoned_document_stays_by_itself(backend: str, place: torch.device, variant: Variant) -> None:
    """Documents that share no tile with it get the bits that they get beside a clean one."""
    case = replace(CASE, batch=1, seqlen_q=64, seqlen_k=64, backward=variant)
    ids = (torch.arange(64, device=place) // 32).to(torch.int32)
    given = {"mask": Document(ids), "return_lse": True, "options": case.options(backend)}
    clean = case.tensors(place)
    dirty = {key: t.clone() for key, t in clean.items()}
    for name in ("q", "k", "v"):
        dirty[name][:, 32:] = float("nan")
    results = []
    for tensors in (clean, dirty):
        leaves = [tensors[name].requires_grad_() for name in "qkv"]
        out, lse = flashtile.attention(*leaves, **given)
        grads = torch.autograd.grad((out, lse), leaves, (tensors["dout"], tensors["dlse"]))
        results.append([out[:, :32], lse[:, :, :32], *(grad[:, :32] for grad in grads)])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6 if place.type == "cuda" else 0)
    assert torch.isnan(out[:, 32:]).all()


@pytest.mark.parametrize(
    "name", [name for name, make in MASKS.items() if "blocks" in name or name in ("table", "one-long", "flash-attn-v1")]
)
def test_lists_are_what_the_mask_says(device: torch.device, name: str) -> None:
    case = replace(CASE, seqlen_q=150, seqlen_k=170)
    mask: BlocksOfTorch = MASKS[name](case, device)
    spec = mask.spec
    assert spec is not None
    keep = dense(mask, case, device)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in (2, 2, *mask.state.shape[2:]))).tolist():
        block = keep[b, h, i * spec.block_q : (i + 1) * spec.block_q, j * spec.block_k : (j + 1) * spec.block_k]
        state = mask.state[b % mask.state.shape[0], h % mask.state.shape[1], i, j].item()
        whole = block.all() and block.numel() == spec.block_q * spec.block_k
        exact = 2 if whole else int(block.any())
        assert state == exact or (name == "joined-blocks" and state == 1), (i, j)
    for side, table in (("q", mask.state), ("k", mask.state.mT)):
        count, index = mask.lists[f"blocks.count_{side}"], mask.lists[f"blocks.index_{side}"]
        for place in torch.cartesian_prod(*(torch.arange(n) for n in table.shape[:3])).tolist():
            line, (partial, whole) = table[tuple(place)], count[tuple(place)].tolist()
            listed = index[tuple(place)].tolist()
            assert sorted(listed[:partial]) == (line == 1).nonzero().flatten().tolist()
            assert sorted(listed[partial : partial + whole]) == (line == 2).nonzero().flatten().tolist()
        order, lines = mask.lists[f"blocks.order_{side}"].long(), table.shape[2]
        if side == "k":
            visited = count.sum(-1)
            long = (visited > 2 * visited.double().mean(-1, keepdim=True)).sum(-1).max()
            alike = visited.sum(-1).double().mean() // max(visited.max().item(), 1)
            assert bool((order[..., lines:] == torch.tensor([long, alike], device=device)).all())
            assert order.shape[-1] == lines + 2
            order = order[..., :lines]
        assert torch.equal(order.sort(-1).values, torch.arange(order.shape[-1], device=device).expand(order.shape))
        assert bool((count.sum(-1).gather(-1, order).diff(dim=-1) <= 0).all())


@pytest.mark.parametrize("seqlens", [(0, 200), (200, 0), (0, 0)])
def test_blocks_of_nothing(seqlens: tuple[int, int], device: torch.device) -> None:
    rows, columns = (-(-n // 128) for n in seqlens)
    made = Blocks.build(Prefix(torch.tensor([3], dtype=torch.int32, device=device)), *seqlens, device=device)
    given = Blocks.from_block_mask(torch.zeros(1, 1, rows, columns, dtype=torch.bool, device=device), *seqlens)
    for mask in (made, given):
        assert mask.lists["blocks.order_q"].shape == (1, 1, rows)
        assert mask.lists["blocks.order_k"].tolist() == [[[*range(columns), 0, 0]]]


def test_kernel_and_torch_classify_alike(device: torch.device) -> None:
    case = replace(CASE, seqlen_q=100, seqlen_k=140)
    for name in ("document-causal", "global-and-dilated", "two-bands", "holes-and-documents"):
        mask = MASKS[name](case, device)
        made = Blocks.build(mask, 100, 140, batch=2, heads=2, block_size=(32, 64), device=device)
        found = predicates_of(False, None, mask, 2, 2)
        problem = AttentionProblem(2, 100, 140, 2, 2, 1, 1, DType.FP16, mask=found.band, where=found.where, blocks=made.spec)
        names = [f"mask.{i}.{j}" for i, some in enumerate(found.tensors) for j in range(len(some))]
        tensors = {key: t.cpu() for key, t in zip(names, found.flat, strict=True)}
        assert torch.equal(made.state.cpu(), classify(problem, tensors))


@pytest.mark.parametrize(("backend", "variant"), OF_KERNELS)  # the CPU reads the mask, not its lists
def test_whole_blocks_are_not_asked(backend: str, place: torch.device, variant: Variant) -> None:
    """A list that calls every block whole is believed: the predicate, which hides all, is asked by nobody."""
    case = replace(CASE, seqlen_q=64, seqlen_k=64, backward=variant)
    nothing = Blocks.build(KeyPadding(torch.zeros(1, 64, dtype=torch.bool, device=place)), 64, 64, block_size=(32, 32))
    assert nothing.density == 0
    believed = Blocks(nothing.mask, torch.full_like(nothing.state, 2), nothing.seqlens, nothing.spec)  # pyright: ignore[reportArgumentType]
    tensors = case.tensors(place)
    inputs = [tensors[name] for name in "qkv"]
    options = case.options(backend)
    torch.testing.assert_close(
        flashtile.attention(*inputs, mask=believed, options=options), flashtile.attention(*inputs, options=options)
    )
    assert (flashtile.attention(*inputs, mask=nothing, options=options) == 0).all()


def test_masks_of_flex_attention(backend: str, place: torch.device) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    ids = (torch.arange(200, device=place) // 70).to(torch.int32)
    flex = create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), 2, None, 200, 200, device=str(place))
    case = replace(CASE, seqlen_q=200, seqlen_k=200, heads_q=1, heads_kv=1, dtype="fp16")
    tensors = case.tensors(place)
    inputs, options = [tensors[name] for name in "qkv"], Options(backend=backend)
    mine = flashtile.attention(*inputs, mask=Blocks.from_flex(flex), options=options)
    other = flashtile.attention(*inputs, mask=Document(ids), causal=True, options=options)
    torch.testing.assert_close(mine, other, rtol=2e-3, atol=2e-3)


@triton.jit
def checkers_visible(at, args):
    return tl.load(args[1] + (at.row + at.k + at.head + args[0]) % 2 * args[2][0]) != 0


@dataclass(frozen=True, eq=False)
class Checkers(Predicate):
    """A user's own: a chessboard by head, whose colours a tensor switches on."""

    colours: Any
    offset: int = 0

    name = "checkers"
    visible = checkers_visible

    def scalars(self) -> tuple[int, ...]:
        return (self.offset,)

    def tensors(self, batch: int, heads_q: int) -> tuple[Any, ...]:
        return (self.colours,)

    @staticmethod
    def apply(at: Any, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> torch.Tensor:
        return tensors[0][(at.row + at.k + at.head + scalars[0]) % 2] != 0


@pytest.mark.parametrize("offset", [0, 1])
def test_a_user_s_predicate(backend: str, place: torch.device, variant: Variant, offset: int) -> None:
    case = replace(CASE, heads_q=4, backward=variant)
    tensors = case.tensors(place)
    mask = Checkers(torch.tensor([True, False], device=place), offset) & Band(right=4)
    results = []
    for function, wide, extra in (
        (flashtile.attention, False, {"return_lse": True, "options": case.options(backend)}),
        (attention_reference, True, {}),
        (attention_plain, False, {}),
    ):
        leaves = [(tensors[n].double() if wide else tensors[n]).detach().requires_grad_() for n in "qkv"]
        out, lse = function(*leaves, mask=mask, **extra)
        results.append([out, *torch.autograd.grad((out, lse), leaves, (tensors["dout"].to(out), tensors["dlse"].to(lse)))])
    for mine, exact, plain in zip(*results, strict=True):
        assert (mine - exact).abs().max() <= 1.5 * (plain - exact).abs().max() + 1e-6


@dataclass(frozen=True, eq=False)
class Alternating(Predicate):
    """A user's own: every other key, which ones by item."""

    name = "alternating"

    @staticmethod
    def apply(at: Any, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> torch.Tensor:
        return (at.k + at.batch) % 2 == 0


def test_blocks_of_a_user_s_predicate_by_head_or_item() -> None:
    """Whose tensors do not say how many there are: they would be those of one."""
    mask, blocks = Checkers(torch.tensor([True, False])), Blocks.build(Band(right=0), 70, 70, block_size=(32, 32), device="cpu")
    for joined in (lambda: blocks & mask, lambda: mask | blocks):
        with pytest.raises(InvalidProblem, match=r"checkers goes by at.head .* Blocks.build\(mask"):
            joined()
    with pytest.raises(InvalidProblem, match=r"alternating goes by at.batch .* Blocks.build\(mask"):
        blocks & Alternating()
    both = blocks & Blocks.build(mask, 70, 70, heads=3, block_size=(32, 32))
    assert both.state.shape[:2] == (1, 3)
    assert (Blocks.build(Band(), 70, 70, heads=3, block_size=(32, 32), device="cpu") & mask).state.equal(
        Blocks.build(mask, 70, 70, heads=3, block_size=(32, 32)).state
    )


IDS = torch.zeros(8, dtype=torch.int32)


def test_joining() -> None:
    document, dilated = Document(IDS), Dilated(2)
    assert normal_form(True, None, Band(left=3)) == (Band(3, 0), ())
    assert normal_form(True, (4, None), document & Band(left=3)) == (Band(3, 0), ((document,),))
    assert normal_form(False, None, document & document) == (FULL, ((document,),))
    assert normal_form(False, None, Band(left=3) & (document | dilated)) == (Band(left=3), ((document,), (dilated,)))
    assert normal_form(False, None, document | Band(right=0)) == (FULL, ((document,), (Band(right=0),)))
    assert normal_form(True, None, document | FULL) == (Band(right=0), ())
    assert normal_form(False, None, Band(4, 0) | Band(2, 5)) == (Band(4, 5), ((Band(4, 0),), (Band(2, 5),)))
    assert normal_form(False, None, Band(4, 0) | Band(2, 0)) == (Band(4, 0), ())
    assert normal_form(False, None, (document | dilated) & (dilated | Band(right=0)))[1] == (
        (document, dilated), (document, Band(right=0)), (dilated,), (dilated, Band(right=0)),
    )  # fmt: skip


def test_spelling() -> None:
    text = (
        "attention(q=2x8x4x16,kv=8x2x16,fp16,band=:0,where=document(8;8;2x8:int32;2x8:int32)&dilated(3)|within(4;0)"
        "|prefix(2:int32),blocks=128x64)"
    )
    problem = AttentionProblem.parse(text)
    assert problem.spell() == text
    assert [leaf.kind for leaf in problem.leaves] == [Document, Dilated, Within, Prefix]


def call(**changed: Any) -> Callable[[], Any]:
    def made() -> Any:
        q, k = torch.zeros(2, 8, 4, 16), torch.zeros(2, 8, 2, 16)
        return flashtile.attention(q, k, k, **changed)

    return made


SMALL = Blocks.build(Band(right=0), 8, 8, device="cpu")
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "tensor": (call(mask=torch.ones(8, 8)), "mask is a Tensor; it must be a flashtile mask such as Band"),
    "and": (call(mask=None, causal="x"), "causal is 'x'; it must be True or False"),
    "causal": (call(mask=Dilated(2), causal=1), "causal is 1; it must be True or False"),
    "step": (lambda: Dilated(0), "dilated step is 0; it must be a positive int below 2**31."),
    "step-wide": (lambda: Dilated(2**31), "dilated step is 2147483648; it must be a positive int below 2**31."),
    "ids": (lambda: Document([1, 2]), "document queries are list; they must be a tensor (seqlen,) or (batch, seqlen)"),
    "ids-batch": (
        call(mask=Document(IDS.expand(3, 8))),
        "document queries have shape (3, 8); their first axis must",
    ),
    "ids-int16": (call(mask=Document(IDS.short())), "document's tensor is torch.int16; it must be one of int32, int64, int8"),
    "holes-added": (call(mask=KeyPadding(torch.zeros(2, 8))), "key_padding's tensor is fp32; it must be bool, or ints"),
    "stored-added": (call(mask=Stored(torch.zeros(8, 8))), "stored's tensor is fp32; it must be bool, or ints"),
    "stored-three": (
        lambda: Stored(torch.ones(2, 8, 8, dtype=torch.bool)),
        "stored mask is (2, 8, 8); it must have four axes that broadcast to (batch, heads_q, seqlen_q, seqlen_k), or two",
    ),
    "ids-meta": (call(mask=Document(IDS.to("meta"))), "document's tensor is on meta and q is on cpu; they must be on one"),
    "prefix": (call(mask=Prefix(IDS)), "prefix lengths are torch.Size([8]); they must be a tensor (2,)"),
    "prefix-number": (call(mask=Prefix(4)), "prefix lengths are a int; they must be a tensor (2,), a number for each sequence"),
    "holes": (lambda: KeyPadding(IDS), "it must be a (batch, seqlen_k) tensor"),
    "holes-batch": (call(mask=KeyPadding(IDS.expand(3, 8))), "its first axis must be the batch, 2"),
    "holes-short": (call(mask=KeyPadding(IDS[:7].expand(2, 7))), "shape of key padding is (2, 7); its last axis must be at"),
    "holes-one": (
        call(mask=Dilated(2) | KeyPadding(IDS[None, :1])),
        "key padding is (2, 1); its last axis must be at least seqlen_k, 8",
    ),
    "holes-blocks": (
        lambda: Blocks.build(KeyPadding(IDS[None, :3]), 8, 8),
        "key padding is (1, 3); its last axis must be at least",
    ),
    "ids-short": (call(mask=Document(IDS[:5])), "the shape of document queries is (2, 5); its last axis must be at least"),
    "ids-short-keys": (
        call(mask=Document(IDS, IDS[:1])),
        "document keys is (2, 1); its last axis must be at least seqlen_k, 8",
    ),
    "lengths": (call(mask=Blocks.build(Band(), 8, 9, device="cpu")), "blocks are for 8 x 9 scores; they must be for 8 x 8"),
    "heads": (
        call(mask=Blocks.build(Band(), 8, 8, heads=3, device="cpu")),
        "blocks are for (1, 3) (batch, heads); it must be (2, 4), or 1",
    ),
    "size": (
        lambda: Blocks.build(Band(), 8, 8, block_size=(96, 128), device="cpu"),
        "block_q is 96; it must be a power of",
    ),
    "small": (lambda: Blocks.build(Band(), 8, 8, block_size=(128, 16), device="cpu"), "block_k is 16; it must be a power of"),
    "size-number": (
        lambda: Blocks.build(Band(), 8, 8, block_size=128, device="cpu"),  # type: ignore[arg-type]
        "block_size is 128; it must be a pair of positive ints (queries, keys)",
    ),
    "size-zero": (
        lambda: Blocks.from_block_mask(torch.ones(1, 1, dtype=torch.bool), 8, 8, block_size=(0, 8)),
        "block_size is (0, 8); it must be a pair",
    ),
    "flex": (lambda: Blocks.from_flex("x"), "block_mask is a str; it must be a torch.nn.attention.flex_attention.BlockMask"),
    "build": (lambda: Blocks.build(None, 8, 8), "mask is a NoneType; it must be a flashtile mask such as Band"),  # type: ignore[arg-type]
    "table-list": (lambda: Blocks.from_block_mask([[True]], 8, 8), "block_mask is a list; it must be a torch.Tensor"),  # type: ignore[arg-type]
    "table": (
        lambda: Blocks.from_block_mask(torch.ones(2, 2, dtype=torch.bool), 8, 8),
        "block_mask is torch.bool (2, 2); it must be bool with (1, 1) as its last axes",
    ),
    "unlike": (
        lambda: SMALL & Blocks.build(Band(), 8, 9, device="cpu"),
        "blocks for 8 x 8 scores meet blocks for 8 x 9; they must be for the same scores",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_masks(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(InvalidProblem, match=re.escape(message)):
        make()


def test_masks_of_items_of_unequal_lengths_are_as_long_as_the_longest() -> None:
    q, cu = torch.randn(11, 4, 16), torch.tensor([0, 5, 11], dtype=torch.int32)
    keep, ids = torch.arange(12).view(2, 6) % 3 > 0, torch.arange(6, dtype=torch.int32) // 2
    for mask in (KeyPadding(keep), Document(ids)):
        out = flashtile.attention_varlen(q, q, q, cu, mask=mask)
        torch.testing.assert_close(out, flashtile.attention_varlen(q, q, q, cu, max_seqlen_q=8, max_seqlen_k=8, mask=mask))
    q, used = torch.randn(2, 8, 4, 16), torch.tensor([4, 6], dtype=torch.int32)
    flashtile.attention(q, q, q, mask=KeyPadding(keep), seqused_k=used)
    with pytest.raises(InvalidProblem, match=r"document queries is \(2, 6\); its last axis must be at least seqlen_q, 8"):
        flashtile.attention(q, q, q, mask=Document(ids), seqused_k=used)


def test_joining_with_what_is_no_mask() -> None:
    with pytest.raises(TypeError):
        _ = Dilated(2) & 3
    with pytest.raises(TypeError):
        _ = SMALL | "causal"


class Formless(Predicate):
    name = "masks_formless"


def test_a_predicate_without_formulas() -> None:
    q = torch.zeros(2, 8, 4, 16)
    with pytest.raises(NotSupported) as refusal:
        flashtile.attention(q, q, q, mask=Formless())
    assert "predicate masks_formless has no `visible`, its formula for kernels" in refusal.value.reasons["triton"]
    assert "predicate masks_formless has no `apply`, its formula in PyTorch" in refusal.value.reasons["cpu"]
    with pytest.raises(TypeError, match=re.escape("Nameless.name is ''; a predicate's name must be an identifier")):
        type("Nameless", (Predicate,), {"name": ""})


def test_blocks_remember_what_calls_found_of_them() -> None:
    ids = (torch.arange(256) // 100).to(torch.int32)
    mask = Blocks.build(Document(ids), 256, 256)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 256, 2, 16, generator=generator) for _ in range(3))
    found: list[object] = []
    for batch, causal in ((3, False), (1, False), (1, True), (3, False), (1, True)):
        part = [t[:batch] for t in (q, k, v)]
        out = flashtile.attention(*part, causal=causal, mask=mask)
        torch.testing.assert_close(out, flashtile.attention(*part, causal=causal, mask=Document(ids)))
        assert mask.calls is not None
        found.append(mask.calls[causal, batch, 2])
    assert found[0] is found[3]
    assert found[2] is found[4]
    assert len(mask.calls or ()) == 3
    with pytest.raises(InvalidProblem, match="causal is 1"):  # which equals True
        flashtile.attention(q[:1], k[:1], v[:1], causal=1, mask=mask)  # type: ignore[arg-type]
    for batch in range(4, 4 + MOST_CALLS):
        call_mask(False, None, mask, batch, 2)
    assert len(mask.calls or ()) <= MOST_CALLS


def test_what_may_change_is_not_remembered() -> None:
    mask = Document(torch.zeros(256, dtype=torch.int32))
    assert call_mask(False, None, mask, 1, 2) is not call_mask(False, None, mask, 1, 2)


def test_blocks_remember_windows() -> None:
    """Each by itself: their blocks would be found anew in each call."""
    mask = Blocks.build(Document((torch.arange(256) // 100).to(torch.int32)), 256, 256)
    windows: list[Any] = [None, (3, 3), (9, 9), (None, 1), [9, 9]]
    found = [call_mask(False, window, mask, 1, 2) for window in windows]
    assert found[1].key != found[2].key
    for window, before in zip(windows, found, strict=True):
        assert call_mask(False, window, mask, 1, 2) is before
        assert call_mask(True, window, mask, 1, 2) is not before
    q, k, v = (torch.randn(1, 256, 2, 16) for _ in range(3))
    for window in ((None, True), (9.0, 9), (9, 9, 9), (-1, 1), 9, ([9], 9)):
        with pytest.raises(InvalidProblem, match=r"^window "):
            flashtile.attention(q, k, v, mask=mask, window=window)  # type: ignore[arg-type]


def test_blocks_made_or_narrowed_in_inference_mode_serve_training() -> None:
    ids = (torch.arange(256) // 100).to(torch.int32)
    q, k, v = (torch.randn(1, 256, 2, 16, requires_grad=True) for _ in range(3))
    mask, table = Blocks.build(Document(ids), 256, 256), torch.ones(2, 2, dtype=torch.bool)
    with torch.inference_mode():
        masks = [mask, Blocks.build(Document(ids), 256, 256), mask & Band(left=9), Blocks.from_block_mask(table, 256, 256)]
        seen = [flashtile.attention(q, k, v, mask=some, causal=True) for some in masks]
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
    for some, before in zip(masks, seen, strict=True):
        out = flashtile.attention(q, k, v, mask=some, causal=True)
        assert torch.equal(out, before)
        out.sum().backward()
