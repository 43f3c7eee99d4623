"""Random cached calls: everything that no query may look at is NaN, or rubbish in tables."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

import flashtile
from flashtile.reference.cached import cached_plain, cached_reference
from tests.judge import FACTOR, FLOOR_ULP, LSE_TOLERANCE, measure_lse

CPU = torch.device("cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SCALES = ("k_scale", "v_scale")
PAGES = (1, 3, 16, 64, 128, 256)
RUBBISH = (-1, 0, 2147480000, -(2**31))


@dataclass
class Drawn:
    """One call: what `attention_cached` and the reference take alike, and the keys' split."""

    tensors: tuple[torch.Tensor, ...]  # q, k_cache, v_cache, page_table or none
    arguments: dict[str, Any]
    split: int | None
    about: str


def pool(pages: int, size: int, heads: int, dim: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """NaN, in some memory order."""
    if layout == "heads first":
        return torch.full((pages, heads, size, dim), torch.nan, dtype=dtype).transpose(1, 2)
    if layout == "padded":
        return torch.full((pages, size + 1, heads, dim + 3), torch.nan, dtype=dtype)[:, :size, :, :dim]
    return torch.full((pages, size, heads, dim), torch.nan, dtype=dtype)


def stored_pool(pool: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The pool in 8 bits, in its memory order; what is NaN in it is NaN there, too, or of int8 the largest."""
    made = torch.empty_strided(pool.shape, pool.stride(), dtype=dtype)
    wide = pool.float()
    made.copy_((wide * 30).clamp(-127, 127).nan_to_num(127).round() if dtype is torch.int8 else wide)
    return made


def scale_of(pool: torch.Tensor, batch: int, r: random.Random, generator: torch.Generator) -> torch.Tensor | None:
    """Scales of a pool of 8 bits, by all, head, item and head, or row; of rows that nobody may look at they are NaN."""
    shape = r.choice((None, (), (pool.shape[2],), (batch, pool.shape[2]), tuple(pool.shape[:3])))
    if shape is None:
        return None
    scale = (torch.rand(shape, generator=generator) + 0.5) * (0.03 if pool.dtype is torch.int8 else 1.0)
    return scale.masked_fill(pool[..., 0].float().isnan(), torch.nan) if len(shape) == 3 else scale


def draw(seed: int, small: bool = False, device: torch.device = CPU, stored: bool = False, variant: int | None = None) -> Drawn:
    """The call of a seed; small ones have shapes that compile and run quickly where kernels are interpreted. stored: its cache
    is one of 8 bits, and has scales. variant: the seed of what kernels are compiled for, if not this seed.
    """
    r, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kind = r if variant is None else random.Random(variant)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    dtype, size = kind.choice(DTYPES), kind.choice(PAGES)
    batch, heads_kv, group = r.randint(1, 3), kind.choice((1, 2)), kind.choice((1, 2, 3, 8))
    dim = kind.choice((16, 24) if small else (8, 24, 64, 80))
    dim_v = dim if kind.random() < 0.7 else kind.choice((16, 40))
    most = r.choice((40, 150) if small else (40, 200, 400))
    packed, contiguous, padded_left = kind.random() < 0.4, kind.random() < 0.2, kind.random() < 0.3
    counts = [r.choice((0, 1, 1, 2, 5, 9)) for _ in range(batch)]
    seqlen_q = kind.choice((1, 1, 2, 4, 7))
    used = [0 if r.random() < 0.15 else r.randint(1, most) for _ in range(batch)]
    first = [r.randint(0, n) if padded_left and n else 0 for n in used]
    if contiguous:
        size = max(*used, 1) + r.randint(0, 3)
    columns = 1 if contiguous else -(-max(*used, 1) // size) + r.randint(0, 2)
    layout = kind.choice(("dense", "heads first", "padded"))
    pages = batch if contiguous else batch * columns + 3
    k_cache, v_cache = (pool(pages, size, heads_kv, n, dtype, layout) for n in (dim, dim_v))
    table = torch.tensor([r.choice(RUBBISH) for _ in range(batch * columns)], dtype=torch.int32).view(batch, columns)
    free = r.sample(range(pages), pages)
    for i in range(batch):
        for t in range(first[i], used[i]):
            column = t // size
            if not contiguous and (t == first[i] or t % size == 0):
                table[i, column] = free.pop()
            page = i if contiguous else int(table[i, column])
            k_cache[page, t % size], v_cache[page, t % size] = normal(heads_kv, dim), normal(heads_kv, dim_v)
    heads = heads_kv * group
    cu = [sum(counts[:i]) for i in range(batch + 1)]
    tail = r.choice((0, 2))
    q = normal(*((cu[-1] + tail,) if packed else (batch, seqlen_q)), heads, dim).to(dtype)
    if packed and tail:
        q[cu[-1] :] = torch.nan
    arguments: dict[str, Any] = {"seqused_k": torch.tensor(used, dtype=torch.int32, device=device)}
    if packed:
        arguments["cu_seqlens_q"] = torch.tensor(cu, dtype=torch.int32, device=device)
    if padded_left:
        arguments["first_k"] = torch.tensor(first, dtype=torch.int32, device=device)
    arguments["causal"] = kind.random() < 0.5
    if kind.random() < 0.3:
        arguments["window"] = (kind.choice((0, 5, 60, None)), kind.choice((0, 3, None)))
    predicate = kind.choice((None, None, None, "dilated", "prefix"))
    if predicate == "dilated":
        arguments["mask"] = flashtile.Dilated(kind.choice((2, 3)))
    elif predicate == "prefix":
        lengths = torch.tensor([r.randint(0, 20) for _ in range(batch)], dtype=torch.int32, device=device)
        arguments["mask"] = flashtile.Prefix(lengths) | flashtile.Band(right=0)
    modifiers = kind.choice(((), (), ("softcap",), ("alibi",), ("bias",), ("softcap", "alibi")))
    made = {
        "softcap": lambda: flashtile.Softcap(5.0),
        "alibi": lambda: flashtile.Alibi(torch.rand(heads, generator=generator).to(device)),
        "bias": lambda: flashtile.Bias(
            (normal(batch, heads, 1, 1) if packed else normal(1, heads, seqlen_q, columns * size)).to(device)
        ),
    }
    arguments["score"] = tuple(made[name]() for name in modifiers)
    if kind.random() < 0.3:
        arguments["sink"] = normal(heads).to(device)
    if kind.random() < 0.2:
        arguments["scale"] = 0.3
    split = kind.choice((None, 0, 128, 128, 256))
    about = (
        f"seed {seed}: {dtype}, page {size}, {layout}, used {used}, first {first}, {sorted(arguments)}, {modifiers}, {split}"
    )
    if stored:
        number = kind.choice((torch.float8_e4m3fn, torch.float8_e5m2, torch.int8))
        shared = dim_v <= dim and kind.random() < 0.3
        k_cache = stored_pool(k_cache, number)
        v_cache = k_cache[..., :dim_v] if shared else stored_pool(v_cache, number)
        for name, one in (("k_scale", k_cache), ("v_scale", v_cache)):
            scale = scale_of(one, batch, kind, generator)
            if scale is not None:
                arguments[name] = scale.to(device)
        about += f", {number}, {[(n, tuple(arguments[n].shape)) for n in SCALES if n in arguments]}, shared {shared}"
    elif (seed if variant is None else variant) % 7 == 0 and dim_v <= dim:
        v_cache = k_cache[..., :dim_v]
        about += ", shared"
    tensors = (q, k_cache, v_cache, *(() if contiguous else (table,)))
    return Drawn(moved(tensors, device), arguments, split, about)


def moved(tensors: tuple[torch.Tensor, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The tensors there; values that are columns of the keys stay so."""
    q, k_cache, v_cache, *rest = (t.to(device) for t in tensors)
    if tensors[1].data_ptr() == tensors[2].data_ptr():
        v_cache = k_cache[..., : v_cache.shape[3]]
    return q, k_cache, v_cache, *rest


def taken_apart(drawn: Drawn) -> tuple[tuple[torch.Tensor, ...], torch.Tensor] | None:
    """The same call of keys in two tensors, and its qv; None where values are no columns of keys, or all of them."""
    q, k_cache, v_cache, *rest = drawn.tensors
    columns = v_cache.shape[3]
    if k_cache.data_ptr() != v_cache.data_ptr() or columns == k_cache.shape[3]:
        return None
    return (q[..., columns:], k_cache[..., columns:].clone(), v_cache.clone(), *rest), q[..., :columns]


def check(drawn: Drawn, backend: str) -> None:
    """Assert the accuracy rule, and that nothing but numbers comes back; of keys in two tensors the same bits."""
    options = flashtile.Options(backend=backend)
    with torch.no_grad():
        out, lse = flashtile.attention_cached(
            *drawn.tensors, **drawn.arguments, split=drawn.split, return_lse=True, options=options
        )
        exact, sums = cached_reference(*drawn.tensors, **drawn.arguments)
        plain, _ = cached_plain(*drawn.tensors, **drawn.arguments)
        apart = taken_apart(drawn)
        if apart is not None:
            how = dict(drawn.arguments, split=drawn.split, return_lse=True, options=options)
            whole = (out, lse)
            if how.get("v_scale") is not how.get("k_scale"):  # in two tensors latents have the values' alone
                how["v_scale"] = how.get("k_scale")
                whole = flashtile.attention_cached(*drawn.tensors, **how)
            for got, want in zip(flashtile.attention_cached(*apart[0], **how, qv=apart[1]), whole, strict=True):
                assert torch.equal(got, want), drawn.about
    assert (out.dtype, lse.dtype) == (drawn.tensors[0].dtype, torch.float32), drawn.about
    assert (out.shape, lse.shape) == (exact.shape, sums.shape), drawn.about
    assert out.isfinite().all(), drawn.about
    assert measure_lse(lse, sums) <= LSE_TOLERANCE, drawn.about
    if exact.numel():
        floor = FLOOR_ULP * torch.finfo(out.dtype).eps * exact.abs().max().item()
        error, theirs = ((t.double() - exact).abs().max().item() for t in (out, plain))
        assert error <= max(FACTOR * theirs, floor), f"{drawn.about}: off by {error}, plain PyTorch by {theirs}"
