"""Dropout: the bits that the contract names, in every backend, and what seeds do."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile import Dropout, InvalidProblem, NotSupported, Options, dropout_mask
from flashtile.fuzz.tiles import forced
from flashtile.problem.dropout import LATTICE, ORIGINS, Origin, keep, limits, numbers, philox
from flashtile.problem.options import Variant
from flashtile.torch.context.context import against_dropout

# Random123's kat_vectors (Salmon et al., SC 2011): counter, key, rounds, words
KNOWN = (
    ((0, 0, 0, 0), (0, 0), 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0, 0, 0, 0), (0, 0), 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (((2**32 - 1),) * 4, (2**32 - 1,) * 2, 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (((2**32 - 1),) * 4, (2**32 - 1,) * 2, 10, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
)


@pytest.mark.parametrize(("counter", "key", "rounds", "expected"), KNOWN)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], rounds: int, expected: tuple[int, ...]
) -> None:
    assert philox(counter, key, rounds) == expected  # type: ignore[arg-type]
    given = [[torch.tensor(n) for n in numbers] for numbers in (counter, key)]
    assert tuple(int(n) for n in philox(*map(tuple, given), rounds)) == expected  # type: ignore[arg-type]


SEED, HEADS, PLACES = ((5 << 32) + 7, 11), 3, ((0, 0, 0, 0), (1, 2, 9, 3), (4, 1, 24, 40), (0, 2, 4095, 7), (2, 0, 70, 200))


def dither_at(batch: int, head: int, i: int, j: int) -> int:
    """The word that rounds the limit of a position under SEED."""
    index = (batch * HEADS + head, i // 64 * 4 + i // 2 % 4, j // 64 * 4 + j // 2 % 4)
    first = philox((11, 2**32 - 1, 0, 2**32 - 1), (7, 5))[0]
    return (first + sum(n * step for n, step in zip(index, LATTICE, strict=True))) % 2**32


@pytest.mark.parametrize("place", PLACES)
def test_a_number_is_found_as_the_definition_says(place: tuple[int, ...]) -> None:
    batch, head, i, j = place
    counter = (11, j // 16 * 4 + j // 2 % 4, batch * HEADS + head, i // 16 * 4 + i // 2 % 4)
    word = philox(counter, (7, 5))[2 * (i % 2) + j // 8 % 2]
    number = word >> 8 * (2 * (j % 2) + i // 8 % 2) & 127
    seed, at = torch.tensor(SEED), [torch.tensor(n) for n in place]
    assert int(numbers(*at, HEADS, seed)) == number
    for p in (0.0, number / 128, (number + 1) / 128):  # no limit is rounded
        below = number < min(p, 1 - p) * 128
        assert bool(keep(p, *at, HEADS, seed)) == (below if p > 0.5 else not below)


@pytest.mark.parametrize("place", PLACES)
def test_a_limit_is_rounded_up_by_as_many_dithers_as_were_rounded_away(place: tuple[int, ...]) -> None:
    """So that the chance is p to 2^-32: of 2^32 dithers those below the rest, which is a multiple of 128."""
    at, dither = [torch.tensor(n) for n in place], dither_at(*place)
    for whole in (0, 12, 63):
        for rest in (0, dither >> 7, (dither >> 7) + 1, 2**25 - 1):
            chance = whole << 25 | rest
            for p in (chance / 2**32, 1 - chance / 2**32):
                limit = int(limits(p, *at, HEADS, torch.tensor(SEED)))
                assert limit == whole + (dither < rest << 7), (p, rest)


def seen_mask(backend: str, place: torch.device, variant: Variant, dropout: Dropout, *, seqlen_q: int, seqlen_k: int) -> None:
    """The mask as a forward and a backward applied it, read from values and gradients of one-hot vectors."""
    batch, heads = 2, 3
    q = torch.zeros(batch, seqlen_q, heads, 16, device=place)
    k = torch.zeros(batch, seqlen_k, heads, 16, device=place)
    columns = 64
    expected = dropout_mask(dropout, batch, heads, seqlen_q, seqlen_k, place)
    options = Options(backend=backend, backward=variant)
    for start in range(0, seqlen_k, columns):
        v = torch.zeros(batch, seqlen_k, heads, columns, device=place)
        here = torch.arange(start, min(start + columns, seqlen_k), device=place)
        v[:, here, :, here - start] = 1.0
        v.requires_grad_()
        out = flashtile.attention(q, k, v, dropout=dropout, options=options)
        factor = 1 / seqlen_k / (1 - dropout.p)
        want = expected.float().transpose(1, 2)[..., here] * factor
        torch.testing.assert_close(out[..., : len(here)], want, rtol=1e-5, atol=1e-9)
    for start in range(0, seqlen_q, columns):
        dout = torch.zeros(batch, seqlen_q, heads, columns, device=place)
        here = torch.arange(start, min(start + columns, seqlen_q), device=place)
        dout[:, here, :, here - start] = 1.0
        (dv,) = torch.autograd.grad(flashtile.attention(q, k, v, dropout=dropout, options=options), v, dout)
        want = expected.float()[:, :, here].permute(0, 3, 1, 2) * factor
        torch.testing.assert_close(dv[..., : len(here)], want, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 70), (37, 129)])
def test_every_backend_keeps_the_same(
    backend: str, place: torch.device, variant: Variant, seqlen_q: int, seqlen_k: int
) -> None:
    seed = torch.tensor([-(2**62) + 12345, 2**40 + 99], device=place)
    for dropout in (Dropout(0.3, seed), Dropout(0.5, seed=-8)):
        seen_mask(backend, place, variant, dropout, seqlen_q=seqlen_q, seqlen_k=seqlen_k)


@pytest.mark.parametrize("up", [False, True], ids=["down", "up"])
@pytest.mark.parametrize("flipped", [False, True], ids=["dropped", "kept"])
def test_every_backend_rounds_limits_the_same(
    backend: str, place: torch.device, variant: Variant, up: bool, flipped: bool
) -> None:
    """By a probability whose number is below its limit if that is rounded up, and a rest next to its dither."""
    seed, at = torch.tensor(SEED, device=place), (1, 2, 7, 66)
    number = int(numbers(*map(torch.tensor, at), HEADS, seed.cpu()))
    assert number < 64
    chance = (number << 25 | (dither_at(*at) >> 7) + up) / 2**32
    dropout = Dropout(1 - chance if flipped else chance, seed)
    assert bool(dropout_mask(dropout, 2, HEADS, 16, 72)[at]) == (up == flipped)
    seen_mask(backend, place, variant, dropout, seqlen_q=16, seqlen_k=72)


WIDE = ";".join(f"{which}:16x128x4x1x8x0" for which in ("forward", "keys", "queries", "fused"))


@pytest.mark.parametrize("up", [False, True], ids=["down", "up"])
@pytest.mark.parametrize(("backend", "variant"), [("triton", "split"), ("triton", "fused")])
def test_a_tile_of_more_than_a_dither_s_keys_rounds_limits_the_same(
    backend: str, place: torch.device, variant: Variant, up: bool
) -> None:
    """The 64 keys behind the first of a tile have dithers of their own."""
    with forced(WIDE):
        test_every_backend_rounds_limits_the_same(backend, place, variant, up, False)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_rate_of_what_is_kept(p: float) -> None:
    kept = dropout_mask(Dropout(p, seed=3), 2, 4, 512, 512)
    sigma = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * sigma
    for axis in range(4):  # also along every axis by itself
        rates = kept.double().mean([a for a in range(4) if a != axis])
        sigma = (p * (1 - p) / (kept.numel() / kept.shape[axis])) ** 0.5
        assert (rates - (1 - p)).abs().max() < 5 * sigma


def test_neighbours_are_independent() -> None:
    kept = dropout_mask(Dropout(0.5, seed=4), 2, 4, 512, 512).double() - 0.5
    for shift in itertools.product((0, 1), (0, 1), (0, 1, 2, 8, 16), (0, 1, 2, 8, 16)):
        if any(shift):
            other = kept.roll(shift, (0, 1, 2, 3))
            assert abs((kept * other).mean().item() * 4) < 5 / kept.numel() ** 0.5, shift


def drawn(backend: str, place: torch.device, dropout: Dropout | None, heads: int = 2) -> torch.Tensor:
    """Which of 64 keys were kept: (batch, seqlen_q, heads, 64)."""
    q = torch.zeros(1, 16, heads, 16, device=place)
    k = torch.zeros(1, 64, heads, 16, device=place)
    v = torch.eye(64, device=place)[None, :, None].expand(1, 64, heads, 64)
    return flashtile.attention(q, k, v, dropout=dropout, options=Options(backend=backend)) > 0


def test_masks_differ_across_calls_and_heads(backend: str, place: torch.device) -> None:
    first, second = (drawn(backend, place, Dropout(0.5)) for _ in range(2))
    assert not torch.equal(first, second)
    assert not torch.equal(first[:, :, 0], first[:, :, 1])
    assert 0.3 < first.float().mean() < 0.7


def test_the_generator_of_torch_repeats_them(backend: str, place: torch.device) -> None:
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append(drawn(backend, place, Dropout(0.5)))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_a_seed_gives_the_same_mask_and_an_offset_another(backend: str, place: torch.device) -> None:
    assert torch.equal(drawn(backend, place, Dropout(0.5, 7)), drawn(backend, place, Dropout(0.5, 7)))
    masks = [drawn(backend, place, Dropout(0.5, torch.tensor([7, n], device=place))) for n in (0, 1)]
    assert torch.equal(masks[0], drawn(backend, place, Dropout(0.5, 7)))
    assert not torch.equal(*masks)


def test_no_dropout_at_0(backend: str, place: torch.device) -> None:
    assert drawn(backend, place, Dropout(0.0)).all()
    assert flashtile.AttentionProblem.parse("attention(q=1x8x1x16,kv=8x1x16,fp16,dropout=0.0)").dropout is None


def leaves(place: torch.device) -> list[torch.Tensor]:
    return [torch.randn(1, 24, 2, 16, device=place, requires_grad=True) for _ in range(3)]


def test_checkpointing_repeats_the_mask(backend: str, place: torch.device) -> None:
    inputs, options = leaves(place), Options(backend=backend)
    results = []
    for reentrant in (None, False, True):
        torch.manual_seed(5)

        def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return flashtile.attention(q, k, v, dropout=Dropout(0.4), options=options)

        out = layer(*inputs) if reentrant is None else checkpoint(layer, *inputs, use_reentrant=reentrant)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in inputs)])
        for x in inputs:
            x.grad = None
    for plain, *again in zip(*results, strict=True):
        assert all(torch.equal(plain, one) for one in again)


def test_a_seed_that_moves_on_before_the_backward(backend: str, place: torch.device) -> None:
    inputs, options, grads = leaves(place), Options(backend=backend), []
    for step in (0, 1):
        seed = torch.tensor([3, 4], device=place)
        out = flashtile.attention(*inputs, dropout=Dropout(0.4, seed), options=options)
        seed[1] += step
        grads.append(torch.autograd.grad(out.square().sum(), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.gpu
def test_a_captured_graph_draws_anew(device: torch.device) -> None:
    q, k, v = leaves(device)
    dropout = Dropout(0.5)
    for _ in range(2):
        flashtile.attention(q, k, v, dropout=dropout).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.attention(q, k, v, dropout=dropout)
        (dv,) = torch.autograd.grad(out.sum(), v)
    runs = []
    for _ in range(2):
        graph.replay()
        runs.append((out.clone(), dv.clone()))
    assert not torch.equal(runs[0][0], runs[1][0])
    assert not torch.equal(runs[0][1], runs[1][1])


def test_a_mask_without_a_seed_is_an_error() -> None:
    with pytest.raises(InvalidProblem, match="dropout has no seed; every call draws a new one"):
        dropout_mask(Dropout(0.5), 1, 1, 8, 8)
    with pytest.raises(InvalidProblem, match="heads_q is -1; it must be an int, at least 0"):
        dropout_mask(Dropout(0.5, 1), 1, -1, 8, 8)
    with pytest.raises(InvalidProblem, match=r"dropout is a float; it must be a flashtile.Dropout"):
        dropout_mask(0.5, 1, 1, 8, 8)  # type: ignore[arg-type]


def test_a_part_of_a_larger_call_keeps_what_that_keeps(backend: str, place: torch.device, variant: Variant) -> None:
    """Some heads, queries and keys of it, by its positions; a kernel where they begin at multiples of 64."""
    origin = Origin(head=2, heads=3, more=4, query=192, key=64)
    whole, dropout = dropout_mask(Dropout(0.3, 11), 2, 7, 232, 140, place), Dropout(0.3, 11, origin)
    assert torch.equal(dropout_mask(dropout, 2, 3, 40, 70, place), whole[:, 2:5, 192:232, 64:134])
    seen_mask(backend, place, variant, dropout, seqlen_q=40, seqlen_k=70)
    steps = Dropout(0.3, 11, Origin(heads=3, more=4, query=5, key=1, query_step=4, key_step=2))
    assert torch.equal(dropout_mask(steps, 2, 3, 40, 60, place), whole[:, :3, 5:165:4, 1:121:2])
    if backend == "cpu":
        seen_mask(backend, place, variant, steps, seqlen_q=40, seqlen_k=60)
    else:
        with pytest.raises(NotSupported, match=r"dropout.s origin is not aligned; .* from multiples of 64"):
            seen_mask(backend, place, variant, steps, seqlen_q=40, seqlen_k=60)
    seen_mask(backend, place, variant, Dropout(0.3, 11), seqlen_q=40, seqlen_k=70)  # a call of its own again


def test_an_origin_is_a_place() -> None:
    for name, value in (("query", -1), ("heads", 0), ("key_step", 1.5), ("key", 2**31)):
        with pytest.raises(InvalidProblem, match=f"dropout origin's {name} is"):
            Origin(**{name: value})  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidProblem, match="dropout origin is a tuple; it must be an Origin"):
        Dropout(0.1, 1, (0, 0))  # pyright: ignore[reportArgumentType]
    for kind in ORIGINS:
        spelled = f"attention(q=1x8x1x16,kv=8x1x16,fp16,dropout=0.1,origin={kind})"
        assert flashtile.AttentionProblem.parse(spelled).spell() == spelled
    with pytest.raises(InvalidProblem, match="'origin=here' must be origin=aligned or origin=any"):
        flashtile.AttentionProblem.parse("attention(q=1x8x1x16,kv=8x1x16,fp16,dropout=0.1,origin=here)")


def test_ranks_on_gpus_drop_where_kernels_can_count() -> None:
    fit, odd, other = (4 * 128, 4 * 128), (4 * 96, 4 * 128), (4 * 128, 4 * 96)
    laws: list[tuple[str, str, tuple[int, int], bool, str]] = [
        ("ulysses", "striped", odd, True, ""), ("allgather", "zigzag", fit, False, ""), ("ring", "contiguous", fit, False, ""),
        ("ring", "striped", fit, False, "layout 'striped'"), ("allgather", "zigzag", odd, False, "multiples of 64"),
        ("usp", "contiguous", odd, False, "multiples of 64"), ("usp_ring", "zigzag", other, False, "multiples of 64"),
        ("allgather", "contiguous", other, False, ""), ("ring", "zigzag", fit, True, "packed documents"),
    ]  # fmt: skip
    for method, layout, lengths, packed, words in laws:
        found = against_dropout(method, layout, lengths, 4, "cuda", packed)
        assert bool(found) == bool(words), (method, layout, found)
        assert words in "".join(found)
        assert packed or not against_dropout(method, layout, lengths, 4, "cpu", packed)


def test_another_chance_is_another_mask(backend: str, place: torch.device) -> None:
    for p in (0.1, 0.9, 0.1):
        q = torch.zeros(1, 16, 2, 16, device=place)
        v = torch.eye(64, device=place)[None, :, None].expand(1, 64, 2, 64)
        kept = flashtile.attention(q, v[..., :16], v, dropout=Dropout(p, 5), options=Options(backend=backend)) > 0
        assert torch.equal(kept, dropout_mask(Dropout(p, 5), 1, 2, 16, 64, place).transpose(1, 2))
