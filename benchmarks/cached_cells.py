"""The cells of cached.py: what a call over a cache is of, its tensors, a memcpy and SDPA beside it, and what is right."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashtile.torch.cache.attention import attention_cached

# heads_q, heads_kv, head_dim, head_dim_v of one layer
MODELS = {
    "llama3-8b": (32, 8, 128, 128), "llama3-70b-tp8": (8, 1, 128, 128), "qwen3-32b": (64, 8, 128, 128),
    "gpt-oss-120b": (64, 8, 64, 64), "gemma3-27b": (32, 16, 128, 128),
    "mla-16": (16, 1, 576, 512), "mla-128": (128, 1, 576, 512),
}  # fmt: skip
# What a cache may hold, and what its numbers, of a normal distribution, are divided by.
KINDS = {
    "bf16": (torch.bfloat16, 1.0), "e4m3": (torch.float8_e4m3fn, 1 / 16), "e5m2": (torch.float8_e5m2, 1 / 16),
    "int8": (torch.int8, 1 / 25),
}  # fmt: skip
LEAST_BYTES = 256 << 20  # of all caches of a graph: five times an H100's L2, so that nothing of it is found there
MOST_COPIES = 512
MOST_BYTES = 80 << 30
LENGTHS = ("equal", "lognormal", "one-long")
Call = Callable[[], tuple[torch.Tensor, ...]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """What all entrants of a rotation do."""

    model: str
    batch: int
    keys: int
    queries: int
    lengths: str = "equal"
    window: int = 0  # keys that a query sees, its own one with them; 0: every query sees all keys of its item

    @property
    def counts(self) -> list[int]:
        """Keys of each item."""
        if self.lengths == "lognormal":
            drawn = random.Random(0)
            wanted = [round(drawn.lognormvariate(math.log(self.keys / 4), 1.0)) for _ in range(self.batch)]
        else:
            rest = self.keys if self.lengths == "equal" else self.keys // 16
            wanted = [self.keys] + [rest] * (self.batch - 1)
        return [max(self.queries, min(self.keys, count)) for count in wanted]

    @property
    def seen(self) -> int:
        """Keys that any query of their item sees."""
        return sum(min(count, self.window + self.queries - 1) if self.window else count for count in self.counts)

    @property
    def shared(self) -> bool:
        """Whether values are columns of the keys."""
        return self.model.startswith("mla")

    @property
    def cache_bytes(self) -> int:
        """Of the bf16 keys and values that are seen."""
        return self.seen * self.key_bytes

    @property
    def key_bytes(self) -> int:
        """Of one bf16 key and its value, in all heads."""
        _, heads, dim, dim_v = MODELS[self.model]
        return 2 * heads * (dim if self.shared else dim + dim_v)

    @property
    def copies(self) -> int:
        """Caches that a graph goes through."""
        room = MOST_BYTES // (self.batch * self.keys * self.key_bytes)
        return max(1, min(MOST_COPIES, -(-LEAST_BYTES // self.cache_bytes), room))

    def all_bytes(self, kind: str) -> int:
        """What a call reads and writes at least."""
        heads, _, dim, dim_v = MODELS[self.model]
        return self.cache_bytes * KINDS[kind][0].itemsize // 2 + 2 * self.batch * self.queries * heads * (dim + dim_v)

    @property
    def flops(self) -> int:
        heads, _, dim, dim_v = MODELS[self.model]
        keys = sum(min(count, self.window or count) for count in self.counts)
        return 2 * self.queries * keys * heads * (dim + dim_v)

    def row(self) -> Row:
        heads, heads_kv, dim, _ = MODELS[self.model]
        odd = ({"lengths": self.lengths} if self.lengths != "equal" else {}) | ({"window": self.window} if self.window else {})
        return {
            "model": self.model, "heads_q": heads, "heads_kv": heads_kv, "head_dim": dim, "batch": self.batch,
            "keys": self.keys, "queries": self.queries, **odd,
        }  # fmt: skip

    def __str__(self) -> str:
        odd = f" {self.lengths}" * (self.lengths != "equal") + f" window {self.window}" * (self.window > 0)
        return f"{self.model} b{self.batch} k{self.keys} q{self.queries}{odd}"


class Caches:
    """The tensors of a cell: pools of each kind that all layouts share, which differ in their tables alone."""

    def __init__(self, cell: Cell, copies: int, device: torch.device):
        self.cell, self.copies, self.device = cell, copies, device
        heads, heads_kv, dim, dim_v = MODELS[cell.model]
        self.generator = torch.Generator(device).manual_seed(1)
        rows = (copies * cell.batch, cell.keys, heads_kv)
        self.k = self.normal((*rows, dim))
        self.v = self.k[..., :dim_v] if cell.shared else self.normal((*rows, dim_v))
        self.pools = {"bf16": (self.k, self.v)}
        self.q = self.normal((copies, cell.batch, cell.queries, heads, dim))
        self.used = torch.tensor(cell.counts, dtype=torch.int32, device=device)

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(generator=self.generator)

    def store(self, kind: str) -> None:
        """The same numbers in 8 bits, and their scale."""
        dtype, unit = KINDS[kind]
        made: list[torch.Tensor] = []
        for pool in (self.k,) if self.cell.shared else (self.k, self.v):
            made.append(torch.empty(pool.shape, dtype=dtype, device=self.device))
            for copy in range(self.copies):
                part = pool[self.part(copy)] / unit
                made[-1][self.part(copy)] = (part.round().clamp(-127, 127) if dtype is torch.int8 else part).to(dtype)
        self.pools[kind] = (made[0], made[0][..., : self.v.shape[3]] if self.cell.shared else made[1])

    def part(self, copy: int) -> slice:
        """The items of one cache."""
        return slice(copy * self.cell.batch, (copy + 1) * self.cell.batch)

    def table(self, page: int) -> torch.Tensor:
        """(copies, batch, columns): pages in random order."""
        columns = self.cell.keys // page
        order = torch.randperm(self.copies * self.cell.batch * columns, device=self.device, generator=self.generator)
        return order.int().view(self.copies, self.cell.batch, columns)

    def ours(self, page: int, kind: str, given: Mapping[str, Any], one: bool = False) -> tuple[Call, torch.Tensor | None]:
        """(a call, with what is given, over every cache; its table)."""
        number, how = range(1 if one else self.copies), {"seqused_k": self.used, **given}
        if self.cell.window:
            how["window"] = (self.cell.window - 1, 0)
        k, v = self.pools[kind]
        if kind != "bf16":
            scale = torch.full(k.shape[2:3], KINDS[kind][1], device=self.device)
            how |= {"k_scale": scale, "v_scale": scale}
        if not page:
            return lambda: tuple(attention_cached(self.q[i], k[self.part(i)], v[self.part(i)], **how) for i in number), None
        table = self.table(page)
        k = k.view(-1, page, *k.shape[2:])
        v = k[..., : v.shape[3]] if self.cell.shared else v.view(-1, page, *v.shape[2:])
        return lambda: tuple(attention_cached(self.q[i], k, v, table[i], **how) for i in number), table

    def sdpa(self, one: bool = False) -> Call:
        """SDPA over contiguous caches, by whichever of its kernels is allowed, without keys that nobody sees."""
        cell, first, mask = self.cell, 0, None
        if cell.window and cell.lengths == "equal":
            first = max(0, cell.keys - cell.window - cell.queries + 1)
        if cell.lengths != "equal" or (cell.window and cell.queries > 1):
            at = torch.arange(first, cell.keys, device=self.device)
            used = self.used.view(-1, 1, 1, 1)
            mask = (at < used).expand(-1, 1, cell.queries, -1)
            if cell.window:
                mask = visible(used, cell.queries, at, cell.window)

        def attend(i: int) -> torch.Tensor:
            q, k, v = (t.transpose(1, 2) for t in (self.q[i], self.k[self.part(i), first:], self.v[self.part(i), first:]))
            made = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
            )
            return made.transpose(1, 2)

        return lambda: tuple(attend(i) for i in range(1 if one else self.copies))

    def copy(self, share: int) -> Call:
        """A memcpy that reads and writes, together, what a call reads of bf16 keys and values, or a `share` of that."""
        size = self.cell.cache_bytes // 4 // share  # numbers of 16 bits that are read
        flat = self.k.view(-1)
        step = flat.numel() // self.copies
        target = torch.empty(size, dtype=flat.dtype, device=self.device)
        return lambda: tuple(target.copy_(flat[i * step : i * step + size]) for i in range(self.copies))

    def error(self, made: tuple[torch.Tensor, ...], table: torch.Tensor | None, page: int, kind: str = "bf16") -> float:
        """The largest error of the last cache's first and last item, over the largest value."""
        copy, worst, pools, unit = self.copies - 1, 0.0, self.pools[kind], KINDS[kind][1]
        for item in {0, self.cell.batch - 1}:
            place = copy * self.cell.batch + item
            if table is None:
                k, v = (t[place] for t in pools)
            else:
                pages = table[copy, item].long()
                k, v = (t.unflatten(1, (-1, page)).flatten(0, 1)[pages].flatten(0, 1) for t in pools)
            if kind != "bf16":
                k, v = (t.float() * unit for t in (k, v))
            n = self.cell.counts[item]
            exact = formula(self.q[copy, item], k[:n], v[:n], self.cell.window)
            worst = max(worst, ((made[-1][item].double() - exact).abs().max() / exact.abs().max()).item())
        return worst


def visible(used: torch.Tensor | int, queries: int, at: torch.Tensor, window: int) -> torch.Tensor:
    """(.., queries, keys): whether the last `queries` of an item with so many keys see the keys `at` these places."""
    place = used - queries + torch.arange(queries, device=at.device)[:, None]
    return (at <= place) & (at > place - window)


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int = 0) -> torch.Tensor:
    """Attention by its definition, in float64, a head of keys at a time."""
    group, parts = q.shape[1] // k.shape[1], list[torch.Tensor]()
    for head in range(k.shape[1]):
        queries = q[:, head * group : (head + 1) * group].double()
        scores = torch.einsum("qhd,kd->hqk", queries, k[:, head].double()) / math.sqrt(q.shape[-1])
        if window:
            seen = visible(k.shape[0], q.shape[0], torch.arange(k.shape[0], device=k.device), window)
            scores = scores.masked_fill(~seen, -math.inf)
        parts.append(torch.einsum("hqk,kd->qhd", scores.softmax(-1), v[:, head].double()))
    return torch.cat(parts, 1)
