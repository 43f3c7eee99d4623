"""A case: one call of attention with all that decides about its results, as one line of text."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.problem.mask import Band
from flashtile.problem.options import DELTAS

EPS = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}
# Names of modifiers by the axes of (batch, heads_q, seqlen_q, seqlen_k) that their tensor has; the others have size 1.
BIASES = {
    "bias": "bhqk", "bias-heads": "hqk", "bias-batch": "bqk", "bias-plane": "qk", "bias-keys": "bk", "bias-rows": "hq",
    "bias-each-head": "h", "bias-each-item": "b", "bias-number": "",
}  # fmt: skip
SLOPES = {"alibi": "h", "alibi-items": "bh", "relative": "h", "relative-items": "bh"}
CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": tuple(EPS),
    "where": (
        "", "document", "holes", "prefix", "dilated", "chunks", "top-left", "bands", "stored", "stored-heads", "stored-keys",
        "holes-documents", "table", "padded-document", "tree",
    ),
    "eight": ("", "e4m3", "e5m2", "int8"),
    "items": ("", "varlen", "self"),
    "used": ("", "q", "k", "qk"),
    "layout": ("bshd", "bhsd", "gaps", "packed", "kvpacked", "shared", "odd"),
    "upstream": ("both", "out", "lse", "alone", "none"),
    "backward": ("auto", "split", "fused"),
    "precision": ("tf32x3", "tf32", "ieee"),
    "delta": DELTAS,
    "score_dtype": tuple(EPS),
    "sink": ("", *EPS),
    "fixed": ("", "score", "sink", "score+sink"),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call, forward and backward; everything random in it follows from `seed`.

    band: left:right, either empty; where: what else masks (CHOICES); blocks: QxK of the lists of blocks, if there are.
    items: varlen, or self, whose keys lie as its queries do; seqlen_q and seqlen_k are then totals, batch counts items.
    used: which sides have seqused; holes: as boolean masks. score: modifiers joined by +. fixed: captured tensors without
    gradient. wants: which of q, k, v have one. layout: how tensors lie in memory. upstream: which outputs a gradient arrives
    at; alone: out, of a call that returns no lse; none: forward alone. dirty: NaN in whatever nobody may look at. again: the
    call is made twice, and the second one judged too, from kept memory. tile: PASS:QxKxWARPSxSTAGES[xHELD];... in the place of
    the chosen ones. eight: what k and v are stored as, with scales, of a forward alone. data: what q, k, v and the bias hold
    (make.py).
    """

    batch: int = 1
    seqlen_q: int = 32
    seqlen_k: int = 32
    heads_q: int = 1
    heads_kv: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "bf16"
    band: str = ":"
    where: str = ""
    blocks: str = ""
    items: str = ""
    used: str = ""
    holes: bool = False
    score: str = ""
    score_dtype: str = "fp32"
    fixed: str = ""
    sink: str = ""
    dropout: float = 0.0
    scale: float = math.nan  # NaN: 1 / sqrt(head_dim)
    layout: str = "bshd"
    upstream: str = "both"
    wants: str = "qkv"
    backward: str = "auto"
    deterministic: bool = False
    precision: str = "tf32x3"
    delta: str = "rounded"
    eight: str = ""
    backend: str = ""
    tile: str = ""
    data: str = "normal"
    dirty: bool = False
    again: bool = False
    seed: int = 0

    def spell(self) -> str:
        """The line; `parse` is its inverse."""
        words = [
            f"q={self.batch}x{self.seqlen_q}x{self.heads_q}x{self.head_dim}",
            f"kv={self.seqlen_k}x{self.heads_kv}x{self.head_dim_v}",
            self.dtype,
        ]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in SPELLED or value == field.default or value != value:
                continue
            words.append(field.name if value is True else f"{field.name}={value}")
        return " ".join(words)

    @staticmethod
    def parse(text: str) -> Case:
        """The case that `spell` wrote. Raises InvalidProblem on anything else."""
        given: dict[str, Any] = {}
        kinds = {field.name: type(field.default) for field in fields(Case)}
        for word in text.split():
            name, told, value = word.partition("=")
            try:
                if name == "q":
                    given |= dict(zip(SPELLED[:4], map(int, value.split("x")), strict=True))
                elif name == "kv":
                    given |= dict(zip(SPELLED[4:7], map(int, value.split("x")), strict=True))
                elif name in EPS and not told:
                    given["dtype"] = name
                elif kinds.get(name) is bool and not told:
                    given[name] = True
                elif name in kinds and name not in SPELLED and kinds[name] is not bool and told:
                    given[name] = kinds[name](value)
                else:
                    raise ValueError(word)
            except (ValueError, TypeError):
                known = ", ".join(f"{n}" if k is bool else f"{n}=" for n, k in kinds.items() if n not in SPELLED)
                raise InvalidProblem(
                    f"case is {text!r}; {word!r} must be q=BxSxHxD, kv=SxHxD, a dtype ({', '.join(EPS)}), or one of {known}."
                ) from None
        case = Case(**given)
        case.check()
        return case

    def check(self) -> None:
        """Raise InvalidProblem for what no case can be."""
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise InvalidProblem(f"case has {name}={getattr(self, name)}; it must be one of {', '.join(choices)}.")
        for name in self.modifiers:
            if name not in BIASES and name not in SLOPES and not name.startswith("softcap"):
                raise InvalidProblem(f"case has the modifier {name}; there are {', '.join((*BIASES, *SLOPES, 'softcapN'))}.")
        if self.items and (self.holes or "table" in self.where or self.where.startswith("stored") or self.blocks):
            raise InvalidProblem(
                "case has items one after another beside holes, stored masks or blocks, which are of one length."
            )
        if self.items == "self" and self.seqlen_q != self.seqlen_k:
            raise InvalidProblem("case has items=self and seqlen_q other than seqlen_k; they must be equal.")
        if self.eight and (self.dtype == "fp32" or self.upstream != "none" or "packed" in self.layout or self.holes):
            raise InvalidProblem("case has eight beside fp32, gradients, holes or packed tensors, which 8 bits have none of.")
        if self.layout == "packed" and (
            (self.seqlen_q, self.head_dim) != (self.seqlen_k, self.head_dim_v)
            or self.items == "varlen"
            or self.used in ("q", "k")
        ):
            raise InvalidProblem("case has layout=packed; its q, k and v must be of one shape, and their items alike.")
        if self.layout == "kvpacked" and self.head_dim != self.head_dim_v:
            raise InvalidProblem("case has layout=kvpacked; head_dim must be head_dim_v.")
        last = self.modifiers[-1:]
        if self.kind in ("offset", "masked") and not (last and last[0] in BIASES):
            raise InvalidProblem(f"case has data={self.data}; its last modifier must be a bias.")
        if self.kind == "masked" and not all("k" in BIASES[name] for name in last):
            raise InvalidProblem(f"case has data={self.data}; its bias must differ from key to key.")
        if self.kind == "offset" and self.sink:
            raise InvalidProblem("case has data=offset:... beside a sink, which the offset does not reach.")
        if self.kind in ("offset", "huge") and math.frexp(self.scale)[0] != 0.5:
            raise InvalidProblem(f"case has data={self.data} and scale={self.scale}; it must be a power of two.")
        by_token = any(set(BIASES.get(name, "")) & set("qk") for name in self.modifiers)
        if self.holes and (self.where or by_token):
            raise InvalidProblem(
                "case has holes beside a mask or a bias that goes by the tokens' own places, which would move."
            )
        if self.holes and self.layout in ("packed", "kvpacked"):
            raise InvalidProblem("case has holes beside packed tensors, which take none.")

    # -- derived ------------------------------------------------------------------------------------------------

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.score.split("+")) if self.score else ()

    @property
    def scale_value(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if math.isnan(self.scale) else self.scale

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        left, right = self.band.split(":")
        return int(left) if left else None, int(right) if right else None

    @property
    def block_size(self) -> tuple[int, int]:
        rows, columns = self.blocks.split("x")
        return int(rows), int(columns)

    @property
    def value(self) -> float:
        """The number behind the colon of `data`."""
        return float(self.data.partition(":")[2] or 0.0)

    @property
    def kind(self) -> str:
        """What `data` is, without its number."""
        return self.data.partition(":")[0]

    @property
    def returns_lse(self) -> bool:
        return self.upstream != "alone"

    def mask_arguments(self) -> dict[str, Any]:
        """The band as one of the arguments that can say it."""
        left, right = self.bounds
        how = random.Random(f"{self.seed}-band").randrange(3)
        if left is None and right is None:
            return {}
        if (left is None or left >= 0) and (right is None or right >= 0):
            if how == 0 and right == 0:
                return {"causal": True} if left is None else {"causal": True, "window": (left, None)}
            if how <= 1 or self.where:
                return {"window": (left, right)}
        return {"mask": Band(left, right)}

    def lengths(self) -> Lengths:
        """How long the items are."""
        return Lengths.of(self)

    def smaller(self, **changes: Any) -> Case:
        return replace(self, **changes)


SPELLED = ("batch", "seqlen_q", "heads_q", "head_dim", "seqlen_k", "heads_kv", "head_dim_v", "dtype")


@dataclass(frozen=True)
class Lengths:
    """Of both sides where items start (None: each has a slab of its own), how many tokens count, and which if there are holes.

    tokens: of every item the places of its tokens within its slab.
    """

    cu_q: tuple[int, ...] | None
    cu_k: tuple[int, ...] | None
    used_q: tuple[int, ...] | None
    used_k: tuple[int, ...] | None
    tokens_q: tuple[tuple[int, ...], ...]
    tokens_k: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(case: Case) -> Lengths:
        dice = random.Random(f"{case.seed}-lengths")
        cu: dict[str, tuple[int, ...] | None] = {"q": None, "k": None}
        used: dict[str, tuple[int, ...] | None] = {"q": None, "k": None}
        tokens: dict[str, tuple[tuple[int, ...], ...]] = {}
        for side, span in (("q", case.seqlen_q), ("k", case.seqlen_k)):
            if case.items == "self" and side == "k":
                cu["k"] = cu["q"]
            elif case.items:
                cu[side] = cuts(span, case.batch, dice)
            ends = cu[side]
            sizes = [span] * case.batch if ends is None else [b - a for a, b in pairwise(ends)]
            starts = [0] * case.batch if ends is None else list(ends[:-1])
            counts = sizes
            if side in case.used:
                counts = [dice.choice((n, n, 0, n // 2, dice.randint(0, n))) for n in sizes]
                if case.layout == "packed" and side == "k":
                    counts = list(used["q"] or ())
                used[side] = tuple(counts)
            if side in case.used and case.holes:
                tokens[side] = tuple(tuple(sorted(dice.sample(range(n), m))) for n, m in zip(sizes, counts, strict=True))
            else:
                tokens[side] = tuple(tuple(range(a, a + n)) for a, n in zip(starts, counts, strict=True))
        return Lengths(cu["q"], cu["k"], used["q"], used["k"], tokens["q"], tokens["k"])


def cuts(span: int, items: int, dice: random.Random) -> tuple[int, ...]:
    """Where so many items start in `span` tokens: some of them empty, and now and then tokens behind the last one."""
    end = span if dice.random() < 0.6 else dice.randint(span // 2, span)
    inner = sorted(dice.choice((dice.randint(0, end), dice.randint(0, end), 0, end)) for _ in range(items - 1))
    return (0, *inner, end) if items else (0,)
