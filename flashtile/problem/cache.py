"""CachedProblem: attention over a key/value cache, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.problem.attention import MAX_HEAD_DIM, AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.problem.number import told
from flashtile.problem.stored import Scaling, Stored

SPLIT_STEP = 128  # keys: every key tile divides it
MOST_SPLITS = 4096


@dataclass(frozen=True)
class Pages:
    """Where a cache's rows lie: the sibling of `Lengths`.

    pages: how many the pools have, which are (pages, page_size, heads_kv, head_dim). columns: how many of them one item may
    have. table: whether an int32 tensor (batch, columns) names them; without one item i has page i alone (contiguous).
    first: whether an int32 tensor (batch,) says in which row an item's first key lies; rows before it are no keys.
    """

    pages: int
    page_size: int
    columns: int
    table: bool = True
    first: bool = False

    def __post_init__(self) -> None:
        for name in ("pages", "page_size"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InvalidProblem(f"{name} is {told(size)}; it must be an int of at least 1.")
        if self.capacity >= 2**31:
            raise InvalidProblem(
                f"an item has {self.columns} pages of {self.page_size} rows; it must have fewer than 2**31 rows. "
                "Give fewer columns of page_table."
            )

    @property
    def capacity(self) -> int:
        """Rows that one item may have."""
        return self.columns * self.page_size

    def spell(self) -> str:
        shape = f"{self.pages}x{self.page_size}x{self.columns}"
        return f"pages={shape}{'' if self.table else ':contiguous'}{':first' if self.first else ''}"


def contiguous(items: int, rows: int, batch: int, first: bool) -> Pages:
    """The Pages of a cache without a table: item i has all rows of page i. Raises InvalidProblem where there are others."""
    if items != batch:
        raise InvalidProblem(
            f"k_cache has {items} items and the batch {batch}; they must be equal, or page_table say which page is whose."
        )
    return Pages(items, rows, 1, False, first)


def check_split(split: Any, pages: Pages) -> int:
    """The keys of one part, 0 for one pass; InvalidProblem for what is no such number."""
    if isinstance(split, bool) or not isinstance(split, int) or split < 0 or split % SPLIT_STEP:
        raise InvalidProblem(f"split is {told(split)}; it must be None, 0 or a multiple of {SPLIT_STEP}, in keys.")
    if parts_of(split, pages) > MOST_SPLITS:
        raise InvalidProblem(
            f"split is {split} of up to {pages.capacity} keys, which are {parts_of(split, pages)} parts; "
            f"at most {MOST_SPLITS} are added up. Choose a larger split."
        )
    return split


def parts_of(split: int, pages: Pages) -> int:
    """Parts that an item's keys may have."""
    return -(-pages.capacity // split) if split else 1


@dataclass(frozen=True)
class CachedProblem:
    """Attention of new queries over keys that lie in pages; holds no tensor, is hashable, and is the key of every cache.

    attention: the problem as it were if every item's pages were copied side by side, `pages.capacity` rows an item. Its
        lengths are `used_k`, and varlen where queries lie one after another.
    split: keys of one part of the sum; parts begin at multiples of it, so that an item's bits do not depend on its batch.
        0 for one pass.
    stored: what the cache holds, if not numbers of the queries' dtype.
    shared: values are the first head_dim_v columns of the keys, in the same memory: there is no v (MLA, absorbed).
    """

    attention: AttentionProblem
    pages: Pages
    split: int = 0
    stored: Stored | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        check_split(self.split, self.pages)
        if self.shared and self.attention.head_dim_v > self.attention.head_dim:
            raise InvalidProblem(
                f"head_dim_v is {self.attention.head_dim_v} and values are columns of keys, which have "
                f"{self.attention.head_dim}; it must be at most as many."
            )

    @property
    def remedies(self) -> list[str]:
        """What a refusal of wide keys says besides."""
        p = self.attention
        if self.shared or not p.head_dim_v <= MAX_HEAD_DIM < p.head_dim:
            return []
        return [f"values that are columns of the keys may stand beside more of these: v_cache=k_cache[..., :{p.head_dim_v}]"]

    @property
    def splits(self) -> int:
        """Parts that an item's keys may have."""
        return parts_of(self.split, self.pages)

    def spell(self) -> str:
        """One canonical string."""
        parts = [self.attention.spell(), self.pages.spell()]
        parts += [f"split={self.split}"] if self.split else []
        parts += [self.stored.spell_cache()] if self.stored is not None else []
        parts += ["v<k"] if self.shared else []
        return f"cached({','.join(parts)})"


def default_split(p: AttentionProblem, pages: Pages) -> int:
    """The split where the caller names none: of static facts alone, never of lengths or of the batch.

    Up to 64 rows of queries per key/value head and more than 512 keys: 256 keys, doubled until there are at most 32 parts.
    Else, and where queries lie one after another (their longest item is not known), one pass.
    """
    if p.lengths.varlen or p.seqlen_q * p.group > 64 or pages.capacity <= 512:
        return 0
    split = 256
    while pages.capacity > split * 32:
        split *= 2
    return split


@dataclass(frozen=True)
class AppendProblem:
    """New keys and values written into a cache, each into its slot: page * page_size + row; those of negative slots nowhere.

    k is (slabs, seqlen, heads_kv, head_dim), v the same with head_dim_v, slots int64 (slabs, seqlen). Into a cache of 8 bits a
    number goes over its scale, float32 (slabs, seqlen, heads_kv) where `stored` says "head", rounded to the nearest that there
    is, the largest where it is beyond. Where it says "token" the scale is the largest number of a row over the largest stored
    one, and is written beside the row. `shared`: values are columns of keys, which alone are written.
    """

    slabs: int
    seqlen: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: DType
    pages: int
    page_size: int
    stored: Stored | None = None
    shared: bool = False

    @property
    def sides(self) -> str:
        """Of k and v, those that are written."""
        return "k" if self.shared else "kv"

    def scaling(self, side: str) -> Scaling:
        """How k or v is scaled."""
        return "" if self.stored is None else self.stored.k_scale if side == "k" else self.stored.v_scale

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, by name."""
        new, pool = (self.slabs, self.seqlen, self.heads_kv), (self.pages, self.page_size, self.heads_kv)
        dims = {"k": self.head_dim, "v": self.head_dim_v}
        made = {side: (*new, dims[side]) for side in self.sides}
        made |= {f"{side}_cache": (*pool, dims[side]) for side in self.sides}
        made |= {f"{s}_scale": new if self.scaling(s) == "head" else pool for s in self.sides if self.scaling(s)}
        return {**made, "slots": new[:2]}

    def spell(self) -> str:
        """One canonical string."""
        k, pool = "x".join(map(str, self.shapes()["k"])), "x".join(map(str, self.shapes()["k_cache"]))
        stored = "" if self.stored is None else f",{self.stored.spell_cache()}"
        return f"append(k={k},v={self.head_dim_v},{self.dtype.value},pool={pool}{stored}{',v<k' if self.shared else ''})"
