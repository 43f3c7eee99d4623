"""Caches of 8 bits, and values that are columns of keys, against the float64 reference of what is stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashtile
from flashtile.kernels.cpu.cached import STORED
from flashtile.plan.device import NAMED
from tests.cached.draw import Drawn, check, draw, moved, pool, stored_pool

KINDS = tuple(STORED.values())


def absorbed(
    seqlen_q: int, heads: int, kind: torch.dtype | None, place: torch.device, dim: int = 576, dim_v: int = 512
) -> Drawn:
    """A call of absorbed MLA: pages of 64, of which one item has half, and everything else NaN."""
    generator = torch.Generator().manual_seed(seqlen_q)
    table, used = torch.tensor([[3, 1], [0, -1]], dtype=torch.int32), torch.tensor([70, 33], dtype=torch.int32)
    k_cache = pool(5, 64, 1, dim, torch.bfloat16, "dense")
    for item, count in enumerate(used.tolist()):
        for row in range(count):
            k_cache[int(table[item, row // 64]), row % 64] = torch.randn(1, dim, generator=generator)
    arguments: dict[str, Any] = {"seqused_k": used.to(place), "causal": True, "scale": 0.1}
    if kind is not None:
        k_cache = stored_pool(k_cache, kind)
        arguments |= {name: torch.tensor(0.5, device=place) for name in ("k_scale", "v_scale")}
    q = torch.randn(2, seqlen_q, heads, dim, generator=generator).bfloat16()
    tensors = moved((q, k_cache, k_cache[..., :dim_v], table), place)
    return Drawn(tensors, arguments, 128, f"{seqlen_q} queries, {heads} heads, {kind}")


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_random_calls_on_the_cpu(first: int) -> None:
    for seed in range(first, first + 40):
        check(draw(seed, stored=True), "cpu")


@pytest.mark.parametrize("first", range(1000, 1032, 16))
def test_random_calls_of_the_portable_kernels(first: int, device: torch.device) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    for seed in range(first, first + 16):
        check(draw(seed, True, device, stored=True), "triton")


@pytest.mark.parametrize("kind", [None, torch.float8_e4m3fn], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(("seqlen_q", "heads"), [(1, 16), (3, 32)])
def test_absorbed_mla(backend: str, place: torch.device, seqlen_q: int, heads: int, kind: torch.dtype | None) -> None:
    check(absorbed(seqlen_q, heads, kind, place), backend)


@pytest.mark.parametrize("shape", [(2,), (3, 2), (3, 9, 2)], ids=["heads", "items", "tokens"])
def test_latents_in_a_tensor_of_their_own_have_the_values_scale(
    backend: str, place: torch.device, shape: tuple[int, ...]
) -> None:
    """As keys, too: scores are those of both caches as their own scales have them, with gradients or without."""
    generator = torch.Generator().manual_seed(0)
    q, qv, k, v = (torch.randn(3, *n, generator=generator).to(place) for n in ((2, 4, 16), (2, 4, 32), (9, 2, 16), (9, 2, 32)))
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    scales = [(torch.rand(shape, generator=generator) + low).to(place) for low in (0.2, 1.0)]
    how: dict[str, Any] = dict(seqused_k=torch.tensor([9, 0, 5], dtype=torch.int32, device=place), causal=True, scale=0.1)
    how["options"] = flashtile.Options(backend=backend)
    whole = [s.expand(3, 2)[:, None, :, None] if s.dim() < 3 else s[..., None] for s in scales]
    wide_k, wide_v = (t.float() * s for t, s in zip((k, v), whole, strict=True))
    with torch.no_grad():
        exact = flashtile.attention_cached(q, wide_k, wide_v, qv=qv, **how)
        torch.testing.assert_close(
            flashtile.attention_cached(q, k, v, qv=qv, k_scale=scales[0], v_scale=scales[1], **how), exact
        )
        one = [flashtile.attention_cached(q, *wide, qv=qv, **how) for wide in ((k.float(), wide_v), (wide_k, v.float()))]
        for want, name in zip(one, ("v_scale", "k_scale"), strict=True):
            scale = scales[name == "v_scale"]
            torch.testing.assert_close(flashtile.attention_cached(q, k, v, qv=qv, **{name: scale}, **how), want)
    how["options"] = flashtile.Options()
    made = flashtile.attention_cached(q.requires_grad_(), k, v, qv=qv, k_scale=scales[0], v_scale=scales[1], **how)
    torch.testing.assert_close(made, exact)


def test_columns_of_keys_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are columns of keys are no input of the plan; a copy of them is, and 576 columns beside it are refused."""
    from flashtile.torch.cache import operator

    drawn = absorbed(1, 16, None, torch.device("cpu"), 48, 32)
    found: list[Any] = []
    layout_of = operator.layout_of
    monkeypatch.setattr(operator, "layout_of", lambda *given: found.append(layout_of(*given)) or found[-1])
    alone = flashtile.attention_cached(*drawn.tensors, **drawn.arguments)
    q, k_cache, v_cache, table = drawn.tensors
    apart = flashtile.attention_cached(q, k_cache, v_cache.clone(), table, **drawn.arguments)
    assert torch.equal(alone, apart)
    assert [layout.problem.shared for layout, _ in found] == [True, False]
    assert ["v" in layout.names for layout, _ in found] == [False, True]
    q, k_cache, v_cache, table = absorbed(1, 16, None, torch.device("cpu")).tensors
    with pytest.raises(
        flashtile.NotSupported, match=r"(?s)head_dim is 576; supported up to 512.*v_cache=k_cache\[\.\.\., :512\]"
    ):
        flashtile.attention_cached(q, k_cache, v_cache.clone(), table, seqused_k=drawn.arguments["seqused_k"])


@pytest.mark.parametrize("target", ["sm80", "sm86", "sm90"])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_every_tile_of_absorbed_mla_fits(target: str, heads: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from flashtile.kernels.portable import cached
    from flashtile.problem.attention import AttentionProblem
    from flashtile.problem.cache import CachedProblem, Pages

    p = AttentionProblem.parse(f"attention(q=8x2x{heads}x576,kv=4096x1x512,bf16,band=:0,used=k)")
    for pages in (Pages(512, 64, 64), Pages(8, 4096, 1, False)):
        problem, device = CachedProblem(p, pages, 512, None, True), NAMED[target]
        assert cached.refusals(problem, device) == []
        for tile in cached.candidates(problem, device, cached.heads_packed(problem, device)):
            assert cached.tile_bytes(problem, tile) <= device.smem_bytes


@pytest.mark.parametrize(("split", "most"), [(128, 128), (256, 256), (0, 256)])
def test_every_tile_divides_a_part(split: int, most: int) -> None:
    """One of 256 keys reached beyond the end of a part of 128: what it did not load were keys of zeros."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from flashtile.kernels.portable import cached
    from flashtile.problem.attention import AttentionProblem
    from flashtile.problem.cache import CachedProblem, Pages
    from flashtile.problem.stored import Stored

    p = AttentionProblem.parse("attention(q=2x1x4x64,kv=1024x1x64,bf16,used=k)")
    problem = CachedProblem(p, Pages(2, 1024, 1, False), split, Stored("e4m3"))
    tiles = cached.candidates(problem, NAMED["sm90"], 4)
    assert max(tile.block_k for tile in tiles) == most
    assert all(split % tile.block_k == 0 for tile in tiles)


@pytest.mark.parametrize("kind", KINDS, ids=STORED)
def test_every_number_of_8_bits_is_read_as_it_is(backend: str, place: torch.device, kind: torch.dtype) -> None:
    """256 heads-worth of bytes as values of one key: out is what they are, NaN and infinity included."""
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(kind)
    k_cache = torch.zeros(1, 1, 8, 32, dtype=torch.uint8).view(kind).to(place)
    v_cache = every.view(1, 1, 8, 32).to(place)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        q, used = torch.ones(1, 1, 8, 32, dtype=dtype, device=place), torch.ones(1, dtype=torch.int32, device=place)
        options = flashtile.Options(backend=backend)
        out = flashtile.attention_cached(q, k_cache, v_cache, seqused_k=used, options=options)
        assert torch.equal(out.flatten().float().nan_to_num(7e7, 8e7, -8e7).cpu(), every.float().nan_to_num(7e7, 8e7, -8e7))


@pytest.mark.parametrize("kind", KINDS, ids=STORED)
def test_an_append_rounds_to_the_nearest(backend: str, place: torch.device, kind: torch.dtype) -> None:
    """Beside torch's own cast of what is within the range; what is beyond is the largest, and NaN stays."""
    most = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}[kind]
    generator = torch.Generator().manual_seed(1)
    random = torch.randn(2048, generator=generator) * torch.exp2(torch.randint(-20, 17, (2048,), generator=generator).float())
    halves = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(kind).float()
    middle = (halves[:-1] + halves[1:]) / 2
    x = torch.cat([random, middle, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])])
    x = torch.cat([x, x.new_zeros(-len(x) % 64)]).view(1, -1, 2, 32)
    want = x.clamp(-most, most)
    want = (want.round().nan_to_num(0) if kind is torch.int8 else want).to(kind)
    k_cache, v_cache = (torch.zeros(1, x.shape[1], 2, 32, dtype=torch.uint8, device=place).view(kind) for _ in "kv")
    scale, used = torch.tensor([1.0, 0.5], device=place), torch.zeros(1, dtype=torch.int32, device=place)
    k = x.to(place)
    flashtile.append_to_cache(k, k, k_cache, v_cache, seqused_k=used, v_scale=scale, backend=backend)
    got = k_cache.cpu().float(), want.float()
    assert torch.equal(*(t.nan_to_num(9e9) for t in got))
    assert torch.equal(v_cache[:, :, 0].cpu().view(torch.uint8), k_cache[:, :, 0].cpu().view(torch.uint8))
    double = (x[:, :, 1] * 2).clamp(-most, most)
    double = (double.round().nan_to_num(0) if kind is torch.int8 else double).to(kind)
    assert torch.equal(v_cache[:, :, 1].cpu().float().nan_to_num(9e9), double.float().nan_to_num(9e9))


@pytest.mark.parametrize("kind", KINDS, ids=STORED)
def test_scales_of_tokens_are_written_beside_them(backend: str, place: torch.device, kind: torch.dtype) -> None:
    """Rows keep their largest number, zeros are zeros, and attention of the cache is that of nearly the same numbers."""
    k, v = (torch.randn(2, 5, 2, 32, device=place) * 10 for _ in "kv")
    k[0, 2] = 0
    pools = [torch.zeros(6, 4, 2, 32, dtype=torch.uint8, device=place).view(kind) for _ in "kv"]
    scales = [torch.full((6, 4, 2), torch.nan, device=place) for _ in "kv"]
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32, device=place)
    used = torch.zeros(2, dtype=torch.int32, device=place)
    cache = flashtile.PagedCache(pools[0], pools[1], table, used, k_scale=scales[0], v_scale=scales[1])
    cache = cache.append(k, v, backend=backend)
    dense = [t[:, :5] for t in cache.dense()]
    step = {torch.float8_e4m3fn: 1 / 16, torch.float8_e5m2: 1 / 8, torch.int8: 1 / 127}[kind]
    for got, want in zip(dense, (k, v), strict=True):
        assert ((got - want).abs() <= step * want.abs().amax(-1, keepdim=True)).all()
        largest = want.abs().amax(-1)
        torch.testing.assert_close(got.abs().amax(-1), largest)
    q = torch.randn(2, 1, 4, 32, device=place)
    out = cache.attention(q, causal=True, options=flashtile.Options(backend=backend))
    torch.testing.assert_close(out, flashtile.attention(q, *dense, options=flashtile.Options(backend=backend)))


def test_bad_scales_are_named() -> None:
    drawn = absorbed(1, 16, torch.float8_e4m3fn, torch.device("cpu"), 48, 32)
    bad: list[tuple[Any, str]] = [
        (0.0, "k_scale is 0.0; it must be positive and finite"),
        (float("nan"), "k_scale is nan"),
        (1e-60, "k_scale is 1e-60; it must be positive and finite in float32"),
        (1e300, "k_scale is 1e+300; it must be positive and finite in float32"),
        (10**400, "it must be positive and finite in float32"),
        ("x", "k_scale is a str"),
        (torch.tensor([0.0]), "k_scale holds 0.0"),
        (torch.tensor(-2.0), "k_scale holds -2.0"),
        (torch.tensor(torch.nan), "k_scale holds nan"),
        (torch.ones(1).double(), "k_scale is torch.float64; it must be float32"),
        (torch.ones(3), "k_scale has shape (3,); it must be () for a scale of all"),
        (torch.ones(5, 64), "k_scale has shape (5, 64)"),
    ]
    for scale, says in bad:
        with pytest.raises(flashtile.InvalidProblem) as error:
            flashtile.attention_cached(*drawn.tensors, **{**drawn.arguments, "k_scale": scale})
        assert says in str(error.value)
    q, k_cache, v_cache, table = drawn.tensors
    used = drawn.arguments["seqused_k"]
    wide = k_cache.view(torch.uint8).bfloat16()
    with pytest.raises(flashtile.InvalidProblem, match="scales belong to caches of float8_e4m3fn"):
        flashtile.attention_cached(q, wide, wide, table, seqused_k=used, k_scale=2.0)
    with pytest.raises(flashtile.InvalidProblem, match=r"v_cache is torch\.float8_e5m2 and k_cache is torch\.float8_e4m3fn"):
        flashtile.attention_cached(q, k_cache, v_cache.view(torch.uint8).view(torch.float8_e5m2), table, seqused_k=used)
    with pytest.raises(flashtile.InvalidProblem, match=r"k_cache is torch\.float8_e4m3fnuz; it must be"):
        flashtile.attention_cached(q, k_cache.view(torch.float8_e4m3fnuz), v_cache, table, seqused_k=used)
    with pytest.raises(flashtile.InvalidProblem, match=r"k_cache is torch\.uint8; .*: k_cache\.view\(torch\.float8_e4m3fn\)"):
        flashtile.attention_cached(q, k_cache.view(torch.uint8), v_cache.view(torch.uint8), table, seqused_k=used)
    k = torch.randn(2, 1, 1, 48).bfloat16()
    with pytest.raises(flashtile.InvalidProblem, match=r"v must be those of k: k\[\.\.\., :32\]"):
        flashtile.append_to_cache(k, k[..., :32].clone(), k_cache, v_cache, table, seqused_k=used)


def test_what_is_written_once_is_said_alike() -> None:
    """Values that are columns of keys: new values are those of new keys, by slots too, and scales are one."""
    k_cache, k = torch.zeros(4, 2, 1, 48, dtype=torch.int8), torch.randn(2, 1, 1, 48)
    v_cache, used, slots = k_cache[..., :32], torch.zeros(4, dtype=torch.int32)[:2], torch.tensor([[0], [2]])
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    ways: list[dict[str, Any]] = [{"slots": slots}, {"seqused_k": used, "page_table": table}]
    tokens = [torch.ones(4, 2, 1) for _ in "kv"]
    for where in ways:
        with pytest.raises(flashtile.InvalidProblem, match=r"v must be those of k: k\[\.\.\., :32\]"):
            flashtile.append_to_cache(k, k[..., :32].clone(), k_cache, v_cache, **where)
        for scales in ((0.5, 0.25), (0.5, None), tokens, (tokens[0], 0.5)):
            with pytest.raises(flashtile.InvalidProblem, match="they must be the same: v_scale=k_scale"):
                flashtile.append_to_cache(k, k[..., :32], k_cache, v_cache, k_scale=scales[0], v_scale=scales[1], **where)
        for scale in (0.5, tokens[0], torch.tensor([0.5])):
            flashtile.append_to_cache(k, k[..., :32], k_cache, v_cache, k_scale=scale, v_scale=scale, **where)
    assert k_cache.any()


def test_what_is_expanded_is_not_written() -> None:
    k, slots = torch.randn(2, 2, 16), torch.tensor([0, 2])
    pool, scale = torch.zeros(4, 2, 2, 16, dtype=torch.int8), torch.ones(4, 2, 1)
    for name, given in (
        ("v_cache", {"v_cache": pool[:, :, :1].expand(4, 2, 2, 16)}),
        ("k_scale", {"v_cache": pool.clone(), "k_scale": scale.expand(4, 2, 2)}),
    ):
        with pytest.raises(flashtile.InvalidProblem, match=f"{name} is expanded, with strides"):
            flashtile.append_to_cache(k, k, pool, slots=slots, **given)


def test_new_rows_of_absorbed_mla_are_written_once(backend: str, place: torch.device) -> None:
    drawn = absorbed(1, 16, torch.float8_e4m3fn, place, 48, 32)
    q, k_cache, v_cache, table = drawn.tensors
    k = torch.randn(2, 1, 1, 48, device=place).bfloat16()
    how: dict[str, Any] = {**drawn.arguments, "options": flashtile.Options(backend=backend)}
    out = flashtile.attention_cached(q, k_cache, v_cache, table, append=(k, k[..., :32]), **how)
    assert torch.equal(k_cache[1, 6].float(), (k[0, 0].float() * 2).to(torch.float8_e4m3fn).float())
    used = how.pop("seqused_k") + 1
    assert torch.equal(out, flashtile.attention_cached(q, k_cache, v_cache, table, seqused_k=used, **how))


def test_gradients_go_straight_through_a_cache_of_8_bits(backend: str, place: torch.device) -> None:
    """The value of what is stored, the gradient of what was given."""
    cache = torch.zeros(2, 6, 2, 16, dtype=torch.uint8, device=place).view(torch.float8_e4m3fn)
    used = torch.tensor([3, 0], dtype=torch.int32, device=place)
    q, k, v = (torch.randn(2, 2, 2, 16, device=place, requires_grad=True) for _ in "qkv")
    how: dict[str, Any] = dict(
        seqused_k=used, causal=True, k_scale=0.5, v_scale=0.25, options=flashtile.Options(backend=backend)
    )
    pools = [cache, cache.clone()]
    out = flashtile.attention_cached(q, *pools, append=(k, v), **how)
    with torch.no_grad():
        again = flashtile.attention_cached(q, *pools, **{**how, "seqused_k": used + 2})
    torch.testing.assert_close(out, again)
    dense = [t.float() * s for t, s in zip(pools, (0.5, 0.25), strict=True)]
    new = [(k, 0), (v, 1)]
    for given, side in new:
        for item, first in enumerate(used.tolist()):
            for i in range(2):
                one = given[item, i]
                dense[side] = dense[side].clone()
                dense[side][item, first + i] = dense[side][item, first + i].detach() + one - one.detach()
    want = flashtile.attention(
        q, *dense, seqused_k=used + 2, causal=True, options=flashtile.Options(backend="cpu" if place.type == "cpu" else backend)
    )
    weight = torch.randn(out.shape, device=place)
    got, exact = (torch.autograd.grad((o * weight).sum(), (q, k, v)) for o in (out, want))
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_whole_graph_does_what_eager_calls_do() -> None:
    """Scales of tokens are written in place, as pools are, and values that are columns of keys are still found to be."""

    def run(q: torch.Tensor, k: torch.Tensor, pool: torch.Tensor, scale: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        cache = flashtile.PagedCache(pool, pool[..., :32], None, used, k_scale=scale, v_scale=scale)
        return cache.append(k, k[..., :32]).attention(q, causal=True)

    made: list[tuple[torch.Tensor, ...]] = []
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        generator = torch.Generator().manual_seed(5)
        q, k = (torch.randn(2, 3, heads, 48, generator=generator).bfloat16() for heads in (4, 1))
        pool = torch.zeros(2, 8, 1, 48, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scale = torch.ones(2, 8, 1)
        made.append((call(q, k, pool, scale, torch.tensor([4, 0], dtype=torch.int32)), pool.view(torch.uint8), scale))
    assert made[0][2][0, 4:7].ne(1).all()
    for got, want in zip(*made, strict=True):
        assert torch.equal(got, want)


def test_shapes_alone_on_meta() -> None:
    k, pool = torch.empty(2, 1, 1, 32, device="meta"), torch.empty(2, 8, 1, 32, device="meta")
    pools, used = [pool.to(torch.float8_e4m3fn) for _ in "kv"], torch.empty(2, dtype=torch.int32, device="meta")
    out = flashtile.attention_cached(k, *pools, seqused_k=used, k_scale=0.5)
    assert (out.shape, out.dtype, out.device.type) == (k.shape, k.dtype, "meta")
    q, latent = torch.empty(2, 1, 16, 576, device="meta"), torch.empty(2, 8, 1, 576, device="meta")
    assert flashtile.attention_cached(q, latent, latent[..., :512], seqused_k=used).shape == (2, 1, 16, 512)
    for apart in (latent[..., 64:], latent.clone()[..., :512]):
        with pytest.raises(flashtile.NotSupported, match="head_dim is 576"):
            flashtile.attention_cached(q, latent, apart, seqused_k=used)


@pytest.mark.parametrize(("dim", "options", "says"), [
    (576, flashtile.Options(), r"gradients go up to 512.*torch\.no_grad"),
    (32, flashtile.Options(backend="cpu", backward="fused"), r"(?s)cpu: backward is 'fused'"),
])  # fmt: skip
def test_gradients_that_nobody_has_are_refused_before_anything_is_written(
    dim: int, options: flashtile.Options, says: str
) -> None:
    latent, used = torch.zeros(2, 8, 1, dim), torch.zeros(2, dtype=torch.int32)
    q, k = torch.randn(2, 1, 2, dim, requires_grad=True), torch.randn(2, 1, 1, dim)
    some, how = dim * 8 // 9, dict[str, Any](seqused_k=used, options=options)
    with pytest.raises(flashtile.NotSupported, match=says):
        flashtile.attention_cached(q, latent, latent[..., :some], append=(k, k[..., :some]), **how)
    assert not latent.any()


def test_queries_of_any_size_beside_fp8(device: torch.device) -> None:
    """bf16 queries are multiplied in fp16, each row in its own unit: beyond its range, below it, zero, and of mixed sizes."""
    pytest.importorskip("triton", reason="Triton is not installed")
    generator = torch.Generator().manual_seed(9)
    q = torch.randn(1, 1, 8, 32, generator=generator)
    q *= torch.tensor([1e30, 1e-30, 0, 1, 1e5, 1e-6, 3e38 / 8, 1])[:, None]
    q[..., ::2] *= 1e-5
    pools = [torch.randn(1, 40, 1, 32, generator=generator).to(torch.float8_e4m3fn) for _ in "kv"]
    sizes = torch.tensor([1e-30, 1e30, 1, 1, 1e-5, 1e6, 1e-38, 1])
    for head in range(8):
        one = Drawn(
            (q[:, :, head : head + 1].bfloat16().to(device), *(t.to(device) for t in pools)),
            {"seqused_k": torch.tensor([40], dtype=torch.int32, device=device), "k_scale": sizes[head : head + 1].to(device)},
            0, f"head {head}",
        )  # fmt: skip
        check(one, "triton")
