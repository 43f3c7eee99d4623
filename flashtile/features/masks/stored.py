"""A boolean for every score: the mask of `jax.nn.dot_product_attention` and of PyTorch's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.problem.mask import Predicate
from flashtile.problem.score import Position, broadcasts
from flashtile.triton_glue.language import jit, tl


@jit
def stored_visible(at, args):
    strides = args[5]
    head = args[4] + args[0] * at.batch.to(tl.int64) * strides[0] + args[1] * at.head.to(tl.int64) * strides[1]
    return tl.load(head + args[2] * at.row.to(tl.int64) * strides[2] + args[3] * at.k.to(tl.int64) * strides[3]) != 0


@dataclass(frozen=True, eq=False)
class Stored(Predicate):
    """Query i sees key j where mask[b, h, i, j]; bool or ints, axes that broadcast to (batch, heads_q, seqlen_q, seqlen_k).

    Two axes are (seqlen_q, seqlen_k), the same for all items and heads.

    It is read where it lies, once for every tile; `Blocks` and bands visit fewer tiles. Dense batches only.
    """

    mask: Any

    name = "stored"
    visible = stored_visible
    broadcast = True
    truths = True

    def __post_init__(self) -> None:
        if len(getattr(self.mask, "shape", ())) == 2:
            object.__setattr__(self, "mask", self.mask[None, None])
        shape = getattr(self.mask, "shape", None)
        if shape is None or len(shape) != 4:
            raise InvalidProblem(
                f"stored mask is {type(self.mask).__name__ if shape is None else tuple(shape)}; it must have four axes "
                "that broadcast to (batch, heads_q, seqlen_q, seqlen_k), or two, (seqlen_q, seqlen_k). Of three, mask[:, None] "
                "has the batch first and mask[None] the heads."
            )

    @staticmethod
    def check(shapes: tuple[tuple[int, ...], ...], scores: tuple[int, int, int, int]) -> None:
        """A mask that has as many queries and keys as there are, or one."""
        for shape in shapes:
            if not broadcasts(shape, scores):
                raise InvalidProblem(
                    f"stored mask has shape {shape}; it must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = {scores}."
                )

    def scalars(self) -> tuple[int, ...]:
        return tuple(int(n != 1) for n in self.mask.shape)  # of a size that nobody knows yet, too

    def tensors(self, batch: int, heads_q: int) -> tuple[Any, ...]:
        return (self.mask,)

    @staticmethod
    def apply(at: Position, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> Any:
        places = (index * counts for index, counts in zip((at.batch, at.head, at.row, at.k), scalars, strict=True))
        return tensors[0][tuple(places)] != 0
