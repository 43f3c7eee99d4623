"""The portable kernels of tangents and second derivatives, by themselves: any direction, against the CPU in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import flashtile
from flashtile import Bias, NotSupported, Options, Score, Softcap, dispatch
from flashtile.kernels.portable.directed import plan_second
from flashtile.kernels.portable.tile import Launch, products
from flashtile.reference.attention import attention_plain
from flashtile.torch.call.lengths import given_lengths
from flashtile.torch.execute.directed import second_derivatives, tangents
from flashtile.torch.execute.prepared import PreparedCall
from flashtile.torch.routes.eager import prepare
from tests.cases import Case
from tests.torch.test_second_order import drawn

DRAWS, SHARDS = 160, 4
ARRIVING = ("dout", "dlse", "tdout", "tdlse")


@dataclass
class Asked:
    """A prepared call, its tensors, tangents of some, gradients that arrive, and which gradients are wanted."""

    call: PreparedCall
    packs: tuple[torch.Tensor, ...]
    others: list[torch.Tensor]
    moved: list[torch.Tensor | None]
    arriving: dict[str, torch.Tensor | None]
    needs: list[bool]
    along: bool = True  # the second pass makes tangents of out and lse, too

    def results(self) -> list[torch.Tensor]:
        """All that the two passes make; 0 for -inf in lse."""
        out, lse, *moved = tangents(self.call, self.packs, self.others, self.moved)
        made = second_derivatives(self.call, self.packs, self.others, self.moved, self.arriving, self.needs, self.along)
        return [out, lse.masked_fill(lse == -torch.inf, 0.0), *moved, *(t for t in made if t is not None)]


def asked(case: Case, seed: int, dtype: torch.dtype, place: torch.device, backend: str) -> Asked:
    """The same direction whatever dtype and backend."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tensors = {n: t.to(dtype) for n, t in case.tensors(place).items()}
    if case.cu_q is not None:
        tensors = {n: t[None] if n in ("q", "k", "v", "dout", "dlse") else t for n, t in tensors.items()}
    sunk = "sink" in tensors and draw.random() < 0.7
    if sunk:
        tensors["sink"].requires_grad_()
    given = case.given(tensors)
    packs = tuple(tensors[n] for n in "qkv")
    lengths: dict[str, Any] = dict(case.lengths(place))
    call, others = prepare(
        *packs, **given, **case.masks(place), return_lse=True, options=Options(backend=backend), given=given_lengths(**lengths)
    )

    def like(t: torch.Tensor, chance: float) -> torch.Tensor | None:
        made = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(place, dtype)
        return made if draw.random() < chance else None

    moved = [like(t, 0.7) if t.is_floating_point() else None for t in (*packs, *others)]
    shapes = {"out": tensors["dout"], "lse": tensors["dlse"]}
    arriving = {name: like(shapes[name[-3:]], 0.7) for name in ARRIVING}
    needs = [draw.random() < 0.8 for _ in packs] + [sunk and t is tensors["sink"] for t in others]
    return Asked(call, packs, list(others), moved, arriving, needs, draw.random() < 0.3)


def portable(seed: int) -> Case:
    """A random case of what the kernels do, some of more than a tile."""
    case = drawn(seed)
    case = replace(case, score=tuple(name for name in case.score if name != "table"))
    if seed % 5 == 0 and case.cu_q is None and case.used_q is None:
        case = replace(case, seqlen_q=37, seqlen_k=45)
    return case


@pytest.mark.parametrize("shard", range(SHARDS))
def test_any_direction(shard: int, device: torch.device) -> None:
    """Of float32's grade, whatever moves, arrives and is wanted."""
    for seed in range(shard, DRAWS, SHARDS):
        case = portable(seed)
        found = asked(case, seed, torch.float32, device, "triton").results()
        exact = asked(case, seed, torch.float64, torch.device("cpu"), "cpu").results()
        assert len(found) == len(exact)
        for one, truth in zip(found, exact, strict=True):
            error = (one.double().cpu() - truth).abs().max() if truth.numel() else 0.0
            assert error <= 1e-5 * (1.0 + truth.abs().max()), f"{seed}: {case}" if truth.numel() else ""


@pytest.mark.parametrize("shard", range(SHARDS))
def test_scores_of_queries_by_keys(shard: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The pass over keys, upright."""
    plan_pass = dispatch.plan_pass

    def plan(name: str, problem: Any, device: Any, direction: Any, backend: Any) -> Any:
        if name != "second" or backend != "triton":
            return plan_pass(name, problem, device, direction, backend)
        tile = Launch(16, 32, products=products(problem, device, "second_keys"), upright=True)
        return plan_second(problem, device, direction, {"second_keys": tile})

    monkeypatch.setattr(dispatch, "plan_pass", plan)
    for seed in range(DRAWS + shard, DRAWS + 64, SHARDS):
        case = portable(seed)
        found = asked(case, seed, torch.float32, device, "triton").results()
        exact = asked(case, seed, torch.float64, torch.device("cpu"), "cpu").results()
        for one, truth in zip(found, exact, strict=True):
            error = (one.double().cpu() - truth).abs().max() if truth.numel() else 0.0
            assert error <= 1e-5 * (1.0 + truth.abs().max()), f"{seed}: {case}" if truth.numel() else ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_as_exact_as_plain_pytorch(dtype: torch.dtype, offset: float, device: torch.device) -> None:
    """At most 1.5 times as far from float64 as attention in a few lines of the dtype, tangents with a common offset too."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 90, 2, 32, generator=generator).to(device, dtype) for _ in range(3))
    moved = [torch.randn(t.shape, generator=generator).to(device, dtype) for t in (q, k, v)]
    q[..., 0], k[..., 0], moved[1][..., 0] = 1.0, 0.0, offset  # T of every score of a row is larger by the same
    given = {"causal": True, "score": (Softcap(50.0),)}

    def of(function: Callable[..., Any], wide: torch.dtype) -> list[torch.Tensor]:
        x, t = (tuple(one.to(wide) for one in some) for some in ((q, k, v), moved))
        tangent = torch.func.jvp(lambda *x: function(*x)[0], x, t)[1]
        grads = torch.func.grad(lambda *x: function(*x)[0].square().sum(dtype=torch.float32), argnums=(0, 1, 2))
        return [one.double() for one in (tangent, *torch.func.jvp(grads, x, t)[1])]

    exact = of(lambda *x: attention_plain(*x, **given), torch.float64)
    plain = of(lambda *x: attention_plain(*x, **given), dtype)
    ours = Options(backend="triton")
    found = of(lambda *x: flashtile.attention(*x, **given, return_lse=True, options=ours), dtype)
    for truth, one, other in zip(exact, found, plain, strict=True):
        ulp = torch.finfo(dtype).eps * truth.abs().max()
        assert (one - truth).abs().max() <= max(1.5 * (other - truth).abs().max(), 2 * ulp)


@pytest.mark.parametrize("name", ["table", "prefix-blocks"])
def test_lists_of_blocks(name: str, device: torch.device) -> None:
    """Masks that come with lists, which both kinds of pass walk."""
    case = Case("second-lists", seqlen_q=150, seqlen_k=140, mask=name, sink="fp32", dropout=0.2)
    found = asked(case, 1, torch.float32, device, "triton").results()
    for one, truth in zip(found, asked(case, 1, torch.float64, torch.device("cpu"), "cpu").results(), strict=True):
        assert (one.double().cpu() - truth).abs().max() <= 1e-5 * (1.0 + truth.abs().max())


def test_what_nobody_sees_reaches_nothing(device: torch.device) -> None:
    """Values and tangents at hidden keys and padded queries may hold NaN."""
    q, k, v = (torch.randn(2, 40, 2, 16, device=device) for _ in range(3))
    used = torch.tensor([11, 40], dtype=torch.int32, device=device)

    def step(value: float) -> list[torch.Tensor]:
        x = [t.clone() for t in (q, k, v)]
        moved = [t.sin() for t in x]
        arriving = {"dout": torch.ones_like(q), "tdout": torch.ones_like(q), "dlse": None, "tdlse": None}
        for t in (*x, *moved, arriving["dout"], arriving["tdout"]):
            t[0, 11:] = value
        call, others = prepare(
            *x, causal=True, return_lse=True, options=Options(backend="triton"),
            given=given_lengths(seqused_q=used, seqused_k=used),
        )  # fmt: skip
        along = [*moved, *(None for _ in others)]
        return Asked(call, tuple(x), list(others), along, arriving, [True] * 3 + [False] * len(others)).results()

    for clean, dirty in zip(step(0.0), step(float("nan")), strict=True):
        assert torch.equal(clean, dirty)


class Bent(Score):
    """A modifier of a user's that says nothing of second derivatives."""

    name = "bent"
    forward = Softcap.forward
    backward = Softcap.backward
    apply = Softcap.apply

    def scalars(self) -> tuple[float, ...]:
        return (5.0,)


def test_what_is_missing_says_so(device: torch.device) -> None:
    q, k, v = (torch.randn(1, 4, 1, 16, device=device, requires_grad=True) for _ in range(3))
    ours = Options(backend="triton")

    def twice(score: Any) -> None:
        out = flashtile.attention(q, k, v, score=score, options=ours)
        (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        first.sum().backward()

    with pytest.raises(NotSupported, match="bent has no `second`"):
        twice((Bent(),))
    bias = torch.randn(4, 4, device=device, requires_grad=True)
    with pytest.raises(NotSupported, match="second derivatives by bias's tensor"):
        twice((Bias(bias),))
    wide = [torch.randn(1, 4, 1, 320, device=device, dtype=torch.float16) for _ in range(3)]
    with pytest.raises(NotSupported, match="head_dim is 320; tangents and second derivatives are supported up to 256"):
        torch.func.jvp(lambda q: flashtile.attention(q, *wide[1:], options=ours), (wide[0],), (wide[0],))
