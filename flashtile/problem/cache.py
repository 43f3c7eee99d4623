"""CachedProblem: attention over a key/value cache, as one frozen value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.problem.attention import MAX_HEAD_DIM, AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.problem.number import told
from flashtile.problem.stored import Scaling, Stored

SPLIT_STEP = 128  # keys: every key tile divides it, or is offered where it divides the split
LONGEST_PART = 2**30  # keys: kernels count them in 32 bits, up to the end of a part that begins behind the last one
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

    @staticmethod
    def parse(value: str) -> Pages:
        """What `spell` wrote behind its "="; ValueError for what it did not."""
        shape, *words = value.split(":")
        if words not in ([], ["contiguous"], ["first"], ["contiguous", "first"]):
            raise ValueError(value)
        pages, page_size, columns = map(int, shape.split("x"))
        return Pages(pages, page_size, columns, "contiguous" not in words, "first" in words)


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
    if split > LONGEST_PART:
        raise InvalidProblem(f"split is {split}; it must be at most {LONGEST_PART} keys. Give 0 for one pass.")
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
    apart: of such keys the columns behind the values are a pool of their own: v has the values, and k the other columns.
    addressable: pools have a dense last axis, and addresses and strides that are multiples of 16 bytes.
    """

    attention: AttentionProblem
    pages: Pages
    split: int = 0
    stored: Stored | None = None
    shared: bool = False
    apart: bool = False
    addressable: bool = True

    def __post_init__(self) -> None:
        check_split(self.split, self.pages)
        if self.shared and self.attention.head_dim_v > self.attention.head_dim:
            raise InvalidProblem(
                f"head_dim_v is {self.attention.head_dim_v} and values are columns of keys, which have "
                f"{self.attention.head_dim}; it must be at most as many."
            )
        if self.apart and not (self.shared and self.attention.head_dim_v < self.attention.head_dim):
            raise InvalidProblem(
                f"head_dim_v is {self.attention.head_dim_v} and head_dim {self.attention.head_dim}; of keys whose columns "
                "behind the values lie apart it must be less."
            )

    @property
    def one_pool(self) -> bool:
        """Whether there is no v: its numbers are in k."""
        return self.shared and not self.apart

    @property
    def columns_k(self) -> int:
        """Of the pool k."""
        return self.attention.head_dim - (self.attention.head_dim_v if self.apart else 0)

    @property
    def remedies(self) -> list[str]:
        """What a refusal of wide keys says besides."""
        p = self.attention
        if self.shared or not p.head_dim_v <= MAX_HEAD_DIM < p.head_dim:
            return []
        return [f"values that are columns of the keys may stand beside more of these: v_cache=k_cache[..., :{p.head_dim_v}]"]

    @property
    def bytes(self) -> int:
        """Fewest bytes through device memory where every item has all rows that it may have; the table is left out."""
        p, stored = self.attention, self.stored
        rows = p.batch * self.pages.capacity * p.heads_kv
        size = p.dtype.size_bytes if stored is None else 1
        columns = p.head_dim + (0 if self.shared else p.head_dim_v)
        scales = 0 if stored is None else 4 * (stored.k_scale, stored.v_scale).count("token")
        queries = p.slabs * p.span_q * p.heads_q
        return rows * (columns * size + scales) + queries * ((p.head_dim + p.head_dim_v) * p.dtype.size_bytes + 4)

    @property
    def splits(self) -> int:
        """Parts that an item's keys may have."""
        return parts_of(self.split, self.pages)

    def spell(self) -> str:
        """One canonical string."""
        parts = [self.attention.spell(), self.pages.spell()]
        parts += [f"split={self.split}"] if self.split else []
        parts += [self.stored.spell_cache()] if self.stored is not None else []
        parts += ["v<k:apart" if self.apart else "v<k"] if self.shared else []
        parts += [] if self.addressable else ["unaligned"]
        return f"cached({','.join(parts)})"

    @staticmethod
    def parse(text: str) -> CachedProblem:
        """The problem that `spell` wrote; "split=default" is `default_split`. Raises InvalidProblem on anything else."""
        found = re.fullmatch(r"cached\((attention\(.*\)),(pages=[^()]*)\)", text.strip())
        if found is None:
            raise InvalidProblem(f"spelling is {told(text)}; it must be 'cached(attention(...),pages=PAGESxROWSxCOLUMNS,...)'.")
        p = AttentionProblem.parse(found.group(1))
        fields: dict[str, Any] = {}
        for part in found.group(2).split(","):
            name, _, value = part.partition("=")
            try:
                read = _PARTS[name](value) if name in _PARTS else _WORDS[part]
            except (LookupError, ValueError) as error:
                known = ", ".join((*(f"{n}=" for n in _PARTS), *_WORDS))
                raise InvalidProblem(f"spelling is {told(text)}; {part!r} is none of {known}.") from error
            if not fields.keys().isdisjoint(read):
                raise InvalidProblem(f"spelling is {told(text)}; {name} appears twice.")
            fields |= read
        pages = fields["pages"]
        if not p.lengths.used_k:
            raise InvalidProblem(
                f"spelling is {told(text)}; attention(...) must say used=k, for items of a cache have lengths."
            )
        if p.seqlen_k != pages.capacity:
            raise InvalidProblem(
                f"spelling is {told(text)}; attention(...) has {p.seqlen_k} keys and an item may have {pages.capacity} rows, "
                f"{pages.columns} pages of {pages.page_size}; they must be as many."
            )
        if fields.get("split") is None:
            fields["split"] = default_split(p, pages) if "split" in fields else 0
        return CachedProblem(p, **fields)


_PARTS: dict[str, Any] = {
    "pages": lambda value: {"pages": Pages.parse(value)},
    "split": lambda value: {"split": None if value == "default" else int(value)},
    "cache": lambda value: {"stored": Stored.parse(value)},
}
_WORDS: dict[str, dict[str, bool]] = {
    "v<k": {"shared": True}, "v<k:apart": {"shared": True, "apart": True}, "unaligned": {"addressable": False},
}  # fmt: skip


def why_split(problem: CachedProblem) -> str:
    """How the keys are split, and why, in words."""
    p, pages = problem.attention, problem.pages
    default, rows = default_split(p, pages), p.seqlen_q * p.group
    if p.lengths.varlen:
        why = "queries lie one after another, and how many an item has is not known"
    elif rows > 64:
        why = f"{rows} rows of queries share each key/value head, more than 64"
    elif pages.capacity <= 512:
        why = f"an item has at most {pages.capacity} keys, no more than 512"
    else:
        why = f"{rows} rows of queries share each key/value head, and an item may have {pages.capacity} keys"
    how = f"{problem.splits} parts of {problem.split} keys" if problem.split else "one pass"
    if problem.split == default:
        return f"split: {how}, the default: {why}"
    return f"split: {how}, as asked; by default {f'parts of {default} keys' if default else 'one pass'}: {why}"


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
    """New keys and values written into a cache: by slots, page * page_size + row, those of negative slots nowhere; or by the
    items' lengths, each item's into the last of its rows.

    k is (slabs, seqlen, heads_kv, head_dim), v the same with head_dim_v, slots int64 (slabs, seqlen). Into a cache of 8 bits a
    number goes over its scale, float32 (slabs, seqlen, heads_kv) where `stored` says "head", rounded to the nearest that there
    is, the largest where it is beyond. Where it says "token" the scale is the largest number of a row over the largest stored
    one, and is written beside the row. `shared`: values are columns of keys, which alone are written.

    items: how many there are, where seqused_k, int32 (items,), rows that each has with its new ones, stands for slots; item i's
    are slab i, or, `packed`, tokens cu_seqlens[i] to cu_seqlens[i + 1] of the one slab. columns: of page_table, int32 (items,
    columns), which names their pages; without it item i has page i. A row that an item has no page for is written nowhere.
    grows: seqused_k counts rows without the new ones, and `after`, int32 (items,), becomes how many there are with them.
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
    items: int | None = None
    columns: int | None = None
    packed: bool = False
    grows: bool = False

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
        made: dict[str, tuple[int, ...]] = {side: (*new, dims[side]) for side in self.sides}
        made |= {f"{side}_cache": (*pool, dims[side]) for side in self.sides}
        made |= {f"{s}_scale": new if self.scaling(s) == "head" else pool for s in self.sides if self.scaling(s)}
        return made | self._places()

    def _places(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that say where rows go."""
        if self.items is None:
            return {"slots": (self.slabs, self.seqlen)}
        table = {} if self.columns is None else {"page_table": (self.items, self.columns)}
        return {"seqused_k": (self.items,), **table, **({"cu_seqlens": (self.items + 1,)} if self.packed else {})}

    def spell(self) -> str:
        """One canonical string."""
        k, pool = "x".join(map(str, self.shapes()["k"])), "x".join(map(str, self.shapes()["k_cache"]))
        parts = [f"k={k}", f"v={self.head_dim_v}", self.dtype.value, f"pool={pool}"]
        if self.items is not None:
            columns = "" if self.columns is None else f"x{self.columns}"
            parts.append(f"items={self.items}{columns}{':packed' * self.packed}{':grows' * self.grows}")
        parts += ([] if self.stored is None else [self.stored.spell_cache()]) + ["v<k"] * self.shared
        return f"append({','.join(parts)})"


def append_of(problem: CachedProblem) -> AppendProblem:
    """What writes as many new keys as there are queries, by the items' lengths, into the cache of a problem."""
    p, pages, items = problem.attention, problem.pages, problem.attention.batch
    return AppendProblem(
        p.slabs, p.span_q, p.heads_kv, problem.columns_k, p.head_dim_v, p.dtype, pages.pages, pages.page_size, problem.stored,
        problem.one_pool, items, pages.columns if pages.table else None, p.lengths.varlen,
    )  # fmt: skip
