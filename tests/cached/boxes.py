"""Random calls that Hopper's kernel over a cache takes: what no query may look at is NaN, or rubbish in tables."""

from __future__ import annotations

import random
from typing import Any

import torch

from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import CachedProblem, Pages
from flashtile.problem.dtype import DType
from flashtile.problem.lengths import Lengths
from flashtile.problem.mask import Band
from flashtile.problem.score import TensorSpec
from flashtile.problem.stored import Stored
from flashtile.torch.execute.bound import TORCH_DTYPES
from tests.cached.draw import RUBBISH, pool, stored_pool

Tensors = dict[str, torch.Tensor]
EIGHT_BITS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def draw(
    seed: int, stored: bool = False, full: bool = False, latent: bool = False, even: bool = False
) -> tuple[CachedProblem, Tensors]:
    """The problem of a seed, and its tensors by name: in rows and pages that no query may look at, and in no others, NaN.

    stored: its cache is one of 8 bits, with scales or without. full: items end with a page, the longest with its table. latent:
    values are the first 512 of the keys' 576 columns. even: items' lengths are alike, and more than a program goes through.
    """
    r, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, size = r.choice((DType.BF16, DType.FP16)), r.choice((0, 8, 16, 64, 256))
    heads_kv, group, batch, seqlen = r.choice((1, 2)), r.choice((1, 3, 4, 8, 40, 70)), r.choice((1, 2)), r.choice((1, 1, 2, 5))
    dim = r.choice((64, 128, 80, 48 if stored else 24))
    dim_v = dim if r.random() < 0.7 else r.choice((64, 128, 32 if stored else 40))
    if latent:
        group, dim, dim_v = r.choice((16, 16, 64, 128, 128, 5, 70)), 576, 512
    most = r.choice((60, 300, 300, 500, 500, 500, 2300))
    used = [r.choice((r.randint(0, most), r.randint(1, most), most)) for _ in range(batch)]
    used = [count - count % 128 + 64 for count in used] if full else used  # amid a tile of 128 keys
    if even:
        heads_kv, group, batch, seqlen = r.choice((1, 2)), r.choice((1, 3, 4, 8)), r.choice((2, 3, 35)), r.choice((1, 1, 2))
        used = [r.choice((2300, 2300 - 140)) for _ in range(batch)]
        heads_kv = 1 if batch > 3 else heads_kv
    columns = -(-max(*used, 1) // size) + r.randint(0, 2) * (not full) if size else 1
    rows = size or max(*used, 1) + r.randint(0, 3)
    before = [0] * batch  # rows of padding
    if not size and random.Random(-seed - 1).random() < 0.4:
        before = [random.Random(f"{seed} {i}").choice((0, 1, 5, 64, 100)) for i in range(batch)]
        rows += max(before)
    pages = Pages(batch * columns + 2 if size else batch, rows, columns, size > 0, any(before))
    split = r.choice((128, 256) if even else (0, 0, 128, 256))
    bands = ((None, None), (None, 0), (None, 0), (100, 0), (7, 3), (30, None), (90, -20))
    band = Band(*r.choice(bands[:2] if even else bands))
    heads = heads_kv * group
    p = AttentionProblem(
        batch, seqlen, pages.capacity, heads, heads_kv, dim, dim_v, dtype, band, lengths=Lengths(used_k=True), returns_lse=True,
        sink=TensorSpec((heads,), "fp32", False) if r.random() < 0.3 else None, scale=r.choice((None, -0.3)),
    )  # fmt: skip
    kind = TORCH_DTYPES[dtype.value]
    layout = r.choice(("dense", "heads first"))
    pools = [pool(pages.pages, rows, heads_kv, n, kind, layout) for n in ((dim,) if latent else (dim, dim_v))]
    table = torch.tensor([r.choice(RUBBISH) for _ in range(batch * columns)], dtype=torch.int32).view(batch, columns)
    free = r.sample(range(pages.pages), pages.pages)
    for i, count in enumerate(used):
        # of keys before the first query's window nothing may be looked at
        first = 0 if band.left is None else max(count - seqlen - band.left, 0)
        last = count if band.right is None else max(min(count, count + band.right), 0)
        for t in range(first, last):
            if size and (t == first or t % size == 0):
                table[i, t // size] = free.pop()
            page = int(table[i, t // size]) if size else i
            for one in pools:
                one[page, t % rows if size else before[i] + t] = torch.randn(heads_kv, one.shape[3], generator=generator)
    tensors = {"q": torch.randn(batch, seqlen, heads, dim, generator=generator).to(kind), "k": pools[0]}
    tensors["v"] = pools[0][..., :dim_v] if latent else pools[1]
    tensors |= {"seqused_k": torch.tensor([a + b for a, b in zip(used, before, strict=True)], dtype=torch.int32)}
    tensors |= {"first_k": torch.tensor(before, dtype=torch.int32)} if pages.first else {}
    tensors |= {"page_table": table} if size else {}
    tensors |= {"sink": torch.randn(heads, generator=generator)} if p.sink is not None else {}
    if not stored:
        return CachedProblem(p, pages, split, shared=latent), tensors
    kept = Stored(r.choice(tuple(EIGHT_BITS)), r.choice(("", "head")), r.choice(("", "head")))
    for side, scaled in (("k", kept.k_scale), ("v", kept.v_scale)):
        tensors[side] = stored_pool(tensors[side], EIGHT_BITS[kept.dtype])
        tensors |= {f"{side}_scale": torch.rand(batch, heads_kv, generator=generator) + 0.5} if scaled else {}
    return CachedProblem(p, pages, split, kept), tensors


def given(problem: CachedProblem, tensors: Tensors) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """(tensors, arguments by name) of `attention_cached` and of the reference."""
    p = problem.attention
    names = ("q", "k", "v", *(("page_table",) if problem.pages.table else ()))
    more = {n: tensors[n] for n in ("sink", "k_scale", "v_scale", "first_k") if n in tensors}
    how: dict[str, Any] = {"seqused_k": tensors["seqused_k"], "mask": p.mask, "scale": p.scale}
    return [tensors[name] for name in names], how | more


def cleaned(problem: CachedProblem, tensors: Tensors) -> Tensors:
    """The same without NaN and rubbish, which the reference looks at and forgets."""
    made = {name: t.float().nan_to_num().to(t.dtype) if name in "kv" else t for name, t in tensors.items()}
    return made | ({"page_table": made["page_table"].clamp(0, problem.pages.pages - 1)} if problem.pages.table else {})
