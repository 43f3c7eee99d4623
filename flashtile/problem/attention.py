"""AttentionProblem: the one value that travels below the public functions."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from flashtile.errors import InvalidProblem
from flashtile.problem.blocks import BlockSpec
from flashtile.problem.dropout import ORIGINS, OriginKind, check_chance, threshold
from flashtile.problem.dtype import DType
from flashtile.problem.lengths import ALIKE, Lengths
from flashtile.problem.mask import FULL, Band
from flashtile.problem.number import PLAIN, plain, told
from flashtile.problem.predicate import PredicateSpec, Where, parse_where, spell_where
from flashtile.problem.score import ScoreSpec, TensorSpec, broadcasts
from flashtile.problem.stored import Stored

Precision = Literal["tf32x3", "ieee", "tf32", "fp8"]
PRECISIONS: tuple[Precision, ...] = ("tf32x3", "ieee", "tf32")  # of fp32
MAX_HEAD_DIM = 512
LENGTHS = tuple(ALIKE.__dataclass_fields__)
FORMS = {  # how the parts of a spelling with a value are written
    "q": "q=BATCHxSEQLENxHEADSxHEAD_DIM", "kv": "kv=SEQLENxHEADSxHEAD_DIM", "band": "band=LEFT:RIGHT, whole numbers or nothing",
    "score": "score=NAME(NUMBER;...;SHAPE:DTYPE;...)+...", "sink": "sink=HEADS:DTYPE, or with :grad behind it",
    "dropout": "dropout=NUMBER", "scale": "scale=NUMBER", "blocks": "blocks=QUERIESxKEYS", "varlen": "varlen=TOTAL_QxTOTAL_K",
    "where": "where=NAME(NUMBER;...;SHAPE:DTYPE;...)&...|...", "used": "used=q, used=k or used=qk",
    "stored": "stored=DTYPE:K_SCALE:V_SCALE, with :Q_SCALE behind it where q is stored too",
    "origin": "origin=aligned or origin=any",
}  # fmt: skip
DTYPES = tuple(dtype.value for dtype in DType)
NUMBERS = (
    "batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v", "scale", "deterministic", "returns_lse",
    "dropout", "exact_delta",
)  # fmt: skip
WORDS = (*DTYPES, *PRECISIONS, "deterministic", "lse", "exact_delta")


@dataclass(frozen=True)
class AttentionProblem:
    """What is to be computed; holds no tensor, is hashable, and is the key of every cache.

    q is (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim),
    v (batch, seqlen_k, heads_kv, head_dim_v), out (batch, seqlen_q, heads_q, head_dim_v).
    `precision` matters for fp32 alone. `deterministic` asks for a bitwise repeatable backward.
    `where` narrows the mask: an "or" of "and"s of predicates, one of which must hold; empty where nothing must.
    `blocks`: the mask comes with lists of its blocks, which repeat what `mask` and `where` say.
    `lengths` says whether items differ in length. Where they do, seqlen_q and seqlen_k are the longest that they may be;
    varlen tensors are (1, total, heads, head_dim), and lse is (1, heads_q, total_q).
    `returns_lse`: the caller sees lse; otherwise it serves the backward alone and need not be more exact than that takes.
    `sink`: a tensor (heads_q,) of logits, one more key per head whose value is zero. `dropout`: the chance that a
    probability is dropped; None for 0. `origin`: the kind of the Origin by whose positions; None for the call's own.
    `exact_delta`: below float32's grade the backward forms delta of the probabilities themselves, as
    `Options(delta="exact")` has it. `stored`: k and v are of 8 bits, with scales; q too where it says so, and `dtype` is then
    that of out alone. `precision` "fp8" multiplies them as they are stored, and nothing else has it.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: DType
    mask: Band = FULL
    score: tuple[ScoreSpec, ...] = ()
    scale: float | None = None  # None becomes 1 / sqrt(head_dim)
    precision: Precision = "tf32x3"
    deterministic: bool = False
    returns_lse: bool = False
    sink: TensorSpec | None = None
    dropout: float | None = None
    lengths: Lengths = ALIKE
    where: Where = ()
    blocks: BlockSpec | None = None
    exact_delta: bool = False
    origin: OriginKind | None = None
    stored: Stored | None = None

    def __post_init__(self) -> None:
        for name in NUMBERS:
            if type(getattr(self, name)) not in PLAIN:
                object.__setattr__(self, name, plain(getattr(self, name)))
        for name in ("batch", "seqlen_q", "seqlen_k"):
            _check_int(name, getattr(self, name), 0)
        for name in ("heads_q", "heads_kv", "head_dim", "head_dim_v"):
            _check_int(name, getattr(self, name), 1)
        if self.heads_q % self.heads_kv:
            raise InvalidProblem(
                f"heads_q is {self.heads_q} and heads_kv is {self.heads_kv}; heads_q must be a multiple of heads_kv."
            )
        if not isinstance(self.dtype, DType):
            raise InvalidProblem(f"dtype is {self.dtype!r}; it must be one of {', '.join(d.value for d in DType)}.")
        if not isinstance(self.mask, Band):
            raise InvalidProblem(f"mask is a {type(self.mask).__name__}; it must be a flashtile mask such as Band.")
        terms = self.where if isinstance(self.where, tuple) else ((None,),)
        if not all(isinstance(t, tuple) and t and all(isinstance(s, PredicateSpec) for s in t) for t in terms):
            raise InvalidProblem(f"where is {self.where!r}; it must be a tuple of tuples of PredicateSpec, none of them empty.")
        if not (self.blocks is None or isinstance(self.blocks, BlockSpec)):
            raise InvalidProblem(f"blocks is {self.blocks!r}; it must be a BlockSpec or None.")
        if not isinstance(self.lengths, Lengths):
            raise InvalidProblem(f"lengths is {self.lengths!r}; it must be a Lengths.")
        if not isinstance(self.score, tuple) or not all(isinstance(s, ScoreSpec) for s in self.score):
            raise InvalidProblem(f"score is {self.score!r}; it must be a tuple of ScoreSpec.")
        scores = (self.batch, self.heads_q, self.seqlen_q, self.seqlen_k)
        for spec in self.score:
            _check_tensors(spec, scores, self.dtype, self.lengths.varlen)
        for leaf in self.leaves:
            leaf.check(scores, self.lengths)
        _check_sink(self.sink, self.heads_q, self.dtype)
        if self.dropout is not None:
            check_chance(self.dropout)
            object.__setattr__(self, "dropout", float(self.dropout) if threshold(self.dropout) else None)
        if self.origin not in (None, *ORIGINS):
            raise InvalidProblem(f"origin is {self.origin!r}; it must be 'aligned', 'any' or None.")
        if self.dropout is None:
            object.__setattr__(self, "origin", None)
        for name in ("deterministic", "returns_lse", "exact_delta"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidProblem(f"{name} is {getattr(self, name)!r}; it must be True or False.")
        if self.precision not in (*PRECISIONS, "fp8"):
            raise InvalidProblem(f"precision is {self.precision!r}; it must be one of {', '.join(PRECISIONS)}.")
        if not (self.stored is None or isinstance(self.stored, Stored)):
            raise InvalidProblem(f"stored is {self.stored!r}; it must be a Stored or None.")
        if self.stored is not None and self.stored.queries is not None:
            object.__setattr__(self, "precision", "fp8")
            if not self.dtype.is_narrow:
                raise InvalidProblem(f"q, k and v are stored and out is {self.dtype}; it must be fp16 or bf16.")
        elif self.precision == "fp8":
            raise InvalidProblem("precision is 'fp8' and q is not stored; it must be e4m3, as flashtile.quantize returns it.")
        elif self.dtype is not DType.FP32:
            object.__setattr__(self, "precision", "tf32x3")
        if self.float32_grade:  # which has it by itself
            object.__setattr__(self, "exact_delta", False)
        scale = 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise InvalidProblem(f"scale is {told(scale)}; it must be a number.")
        if not abs(scale) <= sys.float_info.max:  # also of ints, which math.isfinite cannot convert
            raise InvalidProblem(f"scale is {scale}; it must be finite.")
        object.__setattr__(self, "scale", float(scale) + 0.0)  # -0.0 becomes 0.0: equal problems have one spelling

    # -- derived ------------------------------------------------------------------------------------------------

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def shift(self) -> int:
        """Aligned position of query 0."""
        return self.seqlen_k - self.seqlen_q

    @property
    def sum_dtype(self) -> str:
        """The dtype of lse and of sums over scores, as plans name it: float32, or float64 beside float64."""
        return "fp64" if self.dtype is DType.FP64 else "fp32"

    @property
    def float32_grade(self) -> bool:
        """Whether results are to be as exact as float32's arithmetic; tf32 is content with less, as 16 bits are."""
        return self.dtype is DType.FP32 and self.precision != "tf32"

    @property
    def shares_offset(self) -> bool:
        """Whether the scores of a row may share a large offset, below float32's grade: that of a tensor which is added to them.

        A whole row of an additive mask's -1e9, or of the least float32, is one. Kernels then add up scores in their own units,
        as plain attention does, and take the difference to a maximum or lse before anything is scaled, which is exact.
        """
        captured = [pair for spec in self.score for pair in zip(spec.kind.captured, spec.tensors, strict=True)]
        return not self.float32_grade and any(one.broadcast for one, _ in captured)

    @property
    def scale_value(self) -> float:
        assert self.scale is not None
        return self.scale

    @property
    def leaves(self) -> tuple[PredicateSpec, ...]:
        """All predicates, in order."""
        return tuple(leaf for term in self.where for leaf in term)

    @property
    def slabs(self) -> int:
        """The size of the tensors' first axis."""
        return 1 if self.lengths.varlen else self.batch

    @property
    def span_q(self) -> int:
        """The size of q's second axis: no item is longer, whatever it was announced as."""
        return self.seqlen_q if self.lengths.total_q is None else self.lengths.total_q

    @property
    def span_k(self) -> int:
        return self.seqlen_k if self.lengths.total_k is None else self.lengths.total_k

    @cached_property
    def band(self) -> Band:
        """The mask without the bounds that hide nothing, whatever the items' lengths."""
        return self.mask.clipped(self.span_q, self.span_k)

    @cached_property
    def listed(self) -> AttentionProblem:
        """The same for kernels that walk the lists of blocks: without predicates, if they are the same all over a block.

        Where a bound cuts blocks anywhere but along their diagonal, some of a block's queries and keys see nothing of it, and
        nothing at all where the next block is not listed: kernels find these, which may hold NaN, by the predicates.
        """
        if self.blocks is None:
            return self
        block = self.blocks.block_q, self.blocks.block_k
        grains = [leaf.kind.grain(leaf.scalars) for leaf in self.leaves]
        whole = all(grain % size == 0 for some in grains for grain, size in zip(some, block, strict=True))
        left, right = self.band.left, self.band.right
        bounds = [self.shift + bound for bound in (None if left is None else -left, right) if bound is not None]
        diagonal = not bounds or (block[0] == block[1] and all(bound % block[0] == 0 for bound in bounds))
        return replace(self, where=()) if whole and diagonal else self

    @property
    def lone(self) -> bool:
        """Whether no query sees more than one key, and there is no sink: softmax gives 1, whatever the score."""
        left, right = self.band.left, self.band.right
        most = [self.span_k]
        if right is not None:
            most.append(self.span_k + right)  # of the last query, which sees the most keys of a band without a left end
        if left is not None:
            most.append(self.span_q + left)  # of the first query
        if left is not None and right is not None:
            most.append(left + right + 1)
        return min(most) <= 1 and self.sink is None

    @property
    def multiplies_fp8(self) -> bool:
        """Whether q, k and v are stored and multiplied so."""
        return self.precision == "fp8"

    @property
    def dequantised(self) -> AttentionProblem:
        """The same of q, k and v in `dtype`: what computes gradients."""
        return self if self.stored is None else replace(self, stored=None, precision="tf32x3")

    @property
    def empty(self) -> bool:
        """No visible score at all because a dimension is zero."""
        return self.batch == 0 or self.span_q == 0 or self.span_k == 0

    @cached_property
    def visible_pairs(self) -> int:
        """Visible scores; at most so many where items differ in length or a predicate hides more."""
        items, q, k = self.batch, self.seqlen_q, self.seqlen_k
        if self.lengths.varlen:  # as if all tokens were in items of the greatest length: there cannot be more
            q, k = min(q, self.span_q), min(k, self.span_k)
            items = min(items, max(-(-self.span_q // max(q, 1)), -(-self.span_k // max(k, 1))))
        return self.mask.count_visible(q, k) * items * self.heads_q

    def flops(self, direction: Literal["forward", "backward"] = "forward") -> int:
        """Matrix FLOPs on visible scores: 2 products forward, 5 backward (scores are recomputed once)."""
        d, dv = self.head_dim, self.head_dim_v
        return 2 * self.visible_pairs * (d + dv if direction == "forward" else 3 * d + 2 * dv)

    def bytes(self, direction: Literal["forward", "backward"] = "forward") -> int:
        """Fewest bytes through device memory: every input read once, every output written once."""
        q = self.slabs * self.span_q * self.heads_q
        kv = self.slabs * self.span_k * self.heads_kv
        tensors = q * (self.head_dim + self.head_dim_v) + kv * (self.head_dim + self.head_dim_v)
        if self.stored is not None and direction == "forward":  # bytes, and scales, which are left out
            read = (kv + q if self.multiplies_fp8 else kv) * (self.head_dim + self.head_dim_v)
            read -= q * self.head_dim_v if self.multiplies_fp8 else 0
            return (tensors - read) * self.dtype.size_bytes + read + 4 * q
        if direction == "backward":  # reads q k v out dout lse, writes dq dk dv
            tensors = 2 * tensors + q * self.head_dim_v
        return tensors * self.dtype.size_bytes + 4 * q

    # -- the canonical spelling ---------------------------------------------------------------------------------

    def spell(self) -> str:
        """One canonical string; `parse` is its inverse. Test id, tuning key, benchmark row, log line."""
        parts = [
            f"q={self.batch}x{self.seqlen_q}x{self.heads_q}x{self.head_dim}",
            f"kv={self.seqlen_k}x{self.heads_kv}x{self.head_dim_v}",
            self.dtype.value,
        ]
        if not self.mask.unbounded:
            left, right = ("" if b is None else str(b) for b in (self.mask.left, self.mask.right))
            parts.append(f"band={left}:{right}")
        if self.score:
            parts.append("score=" + "+".join(s.spell() for s in self.score))
        if self.sink is not None:
            parts.append(f"sink={self.sink.spell()}")
        if self.dropout is not None:
            parts.append(f"dropout={self.dropout!r}")
        if self.origin is not None:
            parts.append(f"origin={self.origin}")
        if self.scale != 1.0 / math.sqrt(self.head_dim):
            parts.append(f"scale={self.scale!r}")
        if self.dtype is DType.FP32:
            parts.append(self.precision)
        if self.deterministic:
            parts.append("deterministic")
        if self.returns_lse:
            parts.append("lse")
        if self.exact_delta:
            parts.append("exact_delta")
        parts += [] if self.stored is None else [self.stored.spell()]
        parts += self.lengths.spell()
        if self.where:
            parts.append("where=" + spell_where(self.where))
        if self.blocks is not None:
            parts.append(f"blocks={self.blocks.block_q}x{self.blocks.block_k}")
        return f"attention({','.join(parts)})"

    @staticmethod
    def parse(text: str) -> AttentionProblem:
        """The problem that `spell` wrote. Raises InvalidProblem on anything else."""
        if not isinstance(text, str):
            raise InvalidProblem(f"spelling is {text!r}; it must be a str.")
        body = text.strip()
        if not (body.startswith("attention(") and body.endswith(")")):
            raise InvalidProblem(f"spelling is {text!r}; it must be 'attention(q=...,kv=...,dtype,...)'.")
        fields: dict[str, object] = {}
        for part in body[len("attention(") : -1].split(","):
            name, _, value = part.partition("=")
            try:
                parsed = _parse_part(name, value)
            except InvalidProblem:
                raise
            except (TypeError, LookupError, ValueError) as error:
                form = FORMS.get(name) or f"one of {', '.join((*WORDS, *(f'{known}=' for known in FORMS)))}"
                raise InvalidProblem(f"spelling is {text!r}; {part!r} must be {form}.") from error
            if not fields.keys().isdisjoint(parsed):
                raise InvalidProblem(f"spelling is {text!r}; {name} appears twice.")
            fields.update(parsed)
        needed = {"batch": FORMS["q"], "seqlen_k": FORMS["kv"], "dtype": f"a dtype ({', '.join(DTYPES)})"}
        missing = [form for name, form in needed.items() if name not in fields]
        if missing:
            raise InvalidProblem(f"spelling is {text!r}; it lacks {' and '.join(missing)}.")
        if not fields.keys().isdisjoint(LENGTHS):
            fields["lengths"] = Lengths(**{name: fields.pop(name) for name in LENGTHS if name in fields})  # pyright: ignore[reportArgumentType]
        return AttentionProblem(**fields)  # pyright: ignore[reportArgumentType]


def _parse_part(name: str, value: str) -> dict[str, object]:
    if name == "q":
        batch, seqlen_q, heads_q, head_dim = (int(n) for n in value.split("x"))
        return dict(batch=batch, seqlen_q=seqlen_q, heads_q=heads_q, head_dim=head_dim)
    if name == "kv":
        seqlen_k, heads_kv, head_dim_v = (int(n) for n in value.split("x"))
        return dict(seqlen_k=seqlen_k, heads_kv=heads_kv, head_dim_v=head_dim_v)
    if name == "band":
        left, right = (int(n) if n else None for n in value.split(":"))
        return dict(mask=Band(left, right))
    if name == "score":
        return dict(score=tuple(ScoreSpec.parse(s) for s in re.split(r"(?<=\))\+", value)))  # not the + of 1e+16
    if name == "sink":
        return dict(sink=TensorSpec.parse(value))
    if name == "dropout":
        return dict(dropout=float(value))
    if name == "origin":
        if value not in ORIGINS:
            raise ValueError(value)
        return dict(origin=value)
    if name == "scale":
        return dict(scale=float(value))
    if name == "blocks":
        block_q, block_k = (int(n) for n in value.split("x"))
        return dict(blocks=BlockSpec(block_q, block_k))
    if name == "where":
        return dict(where=parse_where(value))
    if name == "varlen":
        total_q, total_k = (int(n) for n in value.split("x"))
        return dict(total_q=total_q, total_k=total_k)
    if name == "used":
        if value not in ("q", "k", "qk"):
            raise ValueError(value)
        return dict(used_q="q" in value, used_k="k" in value)
    if name == "stored":
        return dict(stored=Stored.parse(value))
    if name == "deterministic" and not value:
        return dict(deterministic=True)
    if name == "lse" and not value:
        return dict(returns_lse=True)
    if name == "exact_delta" and not value:
        return dict(exact_delta=True)
    if name in PRECISIONS and not value:
        return dict(precision=name)
    if not value:
        return dict(dtype=DType(name))
    raise KeyError(name)


def _check_tensors(spec: ScoreSpec, scores: tuple[int, int, int, int], dtype: DType, varlen: bool) -> None:
    rows = scores[:2]
    for captured, tensor in zip(spec.kind.captured, spec.tensors, strict=True):
        if tensor.grad or not captured.exact:
            _check_wide(f"{spec.kind.name}'s tensor", tensor, dtype)
        if captured.broadcast:
            if not broadcasts(tensor.shape, scores):
                packed = " Packed items are as long as max_seqlen_q and max_seqlen_k say, by default as all tokens." * varlen
                raise InvalidProblem(
                    f"{spec.kind.name}'s tensor has shape {tensor.shape}; it must broadcast to "
                    f"(batch, heads_q, seqlen_q, seqlen_k) = {scores}.{packed}"
                )
        elif captured.index is None and tensor.shape != rows:
            raise InvalidProblem(
                f"{spec.kind.name}'s tensor has shape {tensor.shape}; a captured tensor without `index` must be "
                f"(batch, heads_q) = {rows}."
            )


def _check_wide(name: str, tensor: TensorSpec, dtype: DType) -> None:
    if tensor.dtype == DType.FP64 and dtype is not DType.FP64:
        raise InvalidProblem(f"{name} is fp64 and q is {dtype}; float64 stands beside float64 alone.")


def _check_sink(sink: object, heads_q: int, dtype: DType) -> None:
    if sink is None:
        return
    if not isinstance(sink, TensorSpec):
        raise InvalidProblem(f"sink is {sink!r}; it must be a TensorSpec or None.")
    sink.check_real()
    _check_wide("sink", sink, dtype)
    if sink.shape != (heads_q,):
        raise InvalidProblem(f"sink has shape {sink.shape}; it must be (heads_q,) = ({heads_q},).")


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidProblem(f"{name} is {value!r}; it must be an int.")
    if value < least:
        raise InvalidProblem(f"{name} is {value}; it must be at least {least}.")
    if value >= 2**31:
        raise InvalidProblem(f"{name} is {value}; it must be below 2**31.")
