"""Request: what a call asks for besides its tensors, as text and numbers, which is what an operator's schema takes.

The text holds what compiled code may be specialised on; numbers (scale, window, a softcap) are apart and may be symbolic.
`write` is traced by torch.compile and so is plain Python over the caller's objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashtile.errors import InvalidProblem
from flashtile.memory import remembered
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.blocks import BlockSpec
from flashtile.problem.describe import Wanted, describe
from flashtile.problem.dropout import ORIGINS, OriginKind, threshold
from flashtile.problem.lengths import ALIKE
from flashtile.problem.mask import PREDICATES, Band, Joined, make_mask
from flashtile.problem.number import plain
from flashtile.problem.options import DEFAULT, Options
from flashtile.problem.predicate import PredicateSpec
from flashtile.problem.score import SCORES, ScoreSpec, TensorSpec
from flashtile.problem.stored import Stored
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.describe import out_dtype
from flashtile.torch.call.dropout import check_dropout, draw_seed
from flashtile.torch.call.inputs import check_arguments, check_modifier, check_sink, modifiers
from flashtile.torch.call.lengths import Given
from flashtile.torch.call.masks import KINDS, predicates_of
from flashtile.torch.execute.bound import DTYPE_NAMES, DTYPES
from flashtile.torch.execute.packing import APART, KV, QKV, Pack, Packing

SIDES = ("left", "right")
# To be raised when operators return other shapes or strides: compilers keep graphs on disk by the text of a call alone.
REVISION = 1


def write(
    packing: Packing, q: torch.Tensor, given: Given | None, arguments: Arguments
) -> tuple[str, list[float], list[int], list[torch.Tensor], list[torch.Tensor]]:
    """(text, floats, ints, tensors that may have a gradient, others besides q, k, v) of a call; `Request.named` is the inverse.

    q: the queries, (batch, seqlen_q, heads_q, head_dim), (1, total, ...) of varlen; only its sizes and device are looked at.
    """
    causal, window, mask, score, scale, sink, dropout, return_lse, options, stored = arguments
    options = DEFAULT if options is None else options
    score, scale, return_lse = modifiers(score), plain(scale), plain(return_lse)
    check_arguments(score, scale, options, return_lse)  # errors within the operator would say its arguments
    batch, heads_q = q.shape[0] if given is None else given.batch(q), q.shape[2]
    floats: list[float] = []
    ints: list[int] = []
    captured: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    parts = [
        f"revision={REVISION}",
        f"options={options.backend or ''},{options.backward},{options.deterministic},{options.precision}",
        f"lse={int(return_lse)}",
    ]
    if options.delta == "exact":
        parts.append("exact_delta")
    if packing is QKV:
        parts.append("packing=qkv")
    elif packing is KV:
        parts.append("packing=kv")
    elif packing is not APART:
        parts.append("packing=heads")
        ints += list(packing.packs[0].heads or ())[:2]
    if scale is not None:
        parts.append("scale")
        floats.append(scale)
    kinds: list[str] = []
    for modifier in score:
        scalars, tensors = modifier.scalars(), modifier.tensors(batch, heads_q)
        check_modifier(modifier, scalars, tensors, q)
        kinds.append(f"{modifier.name}:{len(scalars)}:{len(tensors)}")
        floats += [plain(scalar) for scalar in scalars]  # no map: the compiler of PyTorch 2.11 adds none to a list
        captured += tensors
    if kinds:
        parts.append("score=" + "+".join(kinds))
    if sink is not None:
        check_sink(sink, q)
        parts.append("sink")
        captured.append(sink)
    if stored is not None:
        parts.append(stored.kind.spell())
        others += stored.tensors
    if dropout is not None:
        check_dropout(dropout, q.device)
    if dropout is not None and threshold(dropout.p):
        parts.append("dropout")
        if dropout.origin is not None:
            parts.append(f"origin={dropout.origin.kind}")
        floats.append(dropout.p)
        others.append(draw_seed(dropout, q.device))
    if isinstance(mask, Joined):
        predicates = predicates_of(causal, window, mask, batch, heads_q)
        predicates.check(q.device)
        band, (where, scalars) = predicates.band, predicates.written()
        ints += scalars
        others += predicates.flat
        if where:
            parts.append(f"where={where}")
        if mask.spec is not None:
            parts.append("blocks")
            ints += (mask.spec.block_q, mask.spec.block_k, *mask.seqlens)
    else:
        band = make_mask(causal, window, mask)
    for side, bound in zip(SIDES, (band.left, band.right), strict=True):
        if bound is not None:
            parts.append(side)
            ints.append(bound)
    if given is not None:
        parts.append("lengths=" + ",".join(given.tensors))
        for tensor in given.tensors.values():
            others.append(tensor)
        for name, most in (("max_seqlen_q", given.max_seqlen_q), ("max_seqlen_k", given.max_seqlen_k)):
            if most is not None:
                parts.append(name)
                ints.append(most)
    return ";".join(parts), floats, ints, captured, others


@remembered(4096, "texts of traced calls")
def read(text: str) -> Request:
    """What `write` wrote, without the numbers."""
    return Request({name: value for name, _, value in (part.partition("=") for part in text.split(";"))})


@dataclass(frozen=True)
class Named:
    """A call's problem, how to run it, and its tensors besides q, k, v by what they are."""

    problem: AttentionProblem
    options: Options
    packing: Packing
    given: Given | None


class Request:
    """The parts of a request's text, in order."""

    def __init__(self, parts: dict[str, str]):
        self.parts = parts
        backend, backward, deterministic, precision = parts["options"].split(",")
        asked = {"True": True, "False": False, "None": None}[deterministic]
        delta = "exact" if "exact_delta" in parts else "rounded"
        self.options = Options(backend or None, backward, asked, precision, delta)  # pyright: ignore[reportArgumentType]
        self.score = [_counted(kind) for kind in parts["score"].split("+")] if "score" in parts else []
        self.captured = sum(tensors for *_, tensors in self.score) + ("sink" in parts)  # tensors that may have a gradient
        terms = parts["where"].split("|") if "where" in parts else []
        self.where = [[_counted(leaf) for leaf in term.split("&")] for term in terms]
        self.lengths = parts["lengths"].split(",") if "lengths" in parts else []
        self.varlen = "cu_seqlens_q" in self.lengths
        self.stored = Stored.parse(parts["stored"]) if "stored" in parts else None

    def packing(self, ints: list[int]) -> Packing:
        """How q, k and v lie."""
        kind = self.parts.get("packing", "")
        if kind == "heads":
            heads_q, heads_kv = ints[:2]
            return Packing((Pack(("q", "k", "v"), (heads_q, heads_kv, heads_kv)),))
        return {"": APART, "qkv": QKV, "kv": KV}[kind]

    def named(
        self, packs: tuple[torch.Tensor, ...], others: Sequence[torch.Tensor], wanted: int, floats: list[float],
        ints: list[int],
    ) -> Named:  # fmt: skip
        """The call of these tensors, packs as the schema has them: (total, ...) of varlen.

        wanted: bit i says whether the i-th of all tensors is to have a gradient. Raises InvalidProblem as `attention` does.
        """
        packing = self.packing(ints)
        parts = packing.unpack(tuple(t[None] for t in packs) if self.varlen else packs)
        q, k, v = parts["q"], parts["k"], parts["v"]
        numbers, counts = iter(floats), iter(ints[2 * (self.parts.get("packing") == "heads") :])
        tensors = iter(enumerate(others, len(packs)))
        scale = next(numbers) if "scale" in self.parts else None
        score = tuple(
            ScoreSpec(
                SCORES.named(name), tuple(next(numbers) for _ in range(scalars)),
                tuple(_tensor_spec(*next(tensors), wanted) for _ in range(captured)),
            )
            for name, scalars, captured in self.score
        )  # fmt: skip
        sink = _tensor_spec(*next(tensors), wanted) if "sink" in self.parts else None
        for _ in () if self.stored is None else self.stored.scaled:
            next(tensors)
        dropout = next(numbers) if "dropout" in self.parts else None
        if dropout is not None:
            next(tensors)
        where = tuple(
            tuple(
                PredicateSpec(
                    PREDICATES.named(name), tuple(next(counts) for _ in range(scalars)),
                    tuple((tuple(t.shape), KINDS[t.dtype]) for _, t in (next(tensors) for _ in range(captured))),
                )
                for name, scalars, captured in term
            )
            for term in self.where
        )  # fmt: skip
        blocks = None
        if "blocks" in self.parts:
            blocks = BlockSpec(next(counts), next(counts))
            made = (next(counts), next(counts))
            if made != (q.shape[1], k.shape[1]):
                raise InvalidProblem(
                    f"the mask's blocks are for {made[0]} x {made[1]} scores; they must be for {q.shape[1]} x {k.shape[1]}."
                )
            for _ in range(4):
                next(tensors)
        band = Band(*(next(counts) if side in self.parts else None for side in SIDES))
        given, batch, lengths, longest = None, q.shape[0], ALIKE, (None, None)
        if self.lengths:
            some = {name: next(tensors)[1] for name in self.lengths}
            most = [next(counts) if name in self.parts else None for name in ("max_seqlen_q", "max_seqlen_k")]
            given = Given(some, *most, alike=packing not in (APART, KV))
            given.check(q)
            batch, lengths, longest = given.batch(q), given.lengths(q.shape[1], k.shape[1]), given.longest
        origin: OriginKind | None = None
        if "origin" in self.parts:
            origin = ORIGINS[[str(kind) for kind in ORIGINS].index(self.parts["origin"])]
        returns = self.parts["lse"] == "1"
        asked = Wanted(band, where, blocks, score, scale, sink, dropout, returns, self.options, origin, self.stored)
        problem = describe((q.shape, k.shape, v.shape), DTYPES[out_dtype(q)], asked, batch, lengths, longest)
        return Named(problem, self.options, packing, given)


def _counted(text: str) -> tuple[str, int, int]:
    name, scalars, captured = text.split(":")
    return name, int(scalars), int(captured)


def _tensor_spec(index: int, tensor: torch.Tensor, wanted: int) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], bool(wanted >> index & 1))
