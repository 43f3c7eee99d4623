"""Key padding with holes: a boolean per key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.problem.mask import Predicate
from flashtile.problem.score import Position, broadcasts, expanded, not_empty
from flashtile.triton_glue.language import jit, tl


@jit
def key_padding_visible(at, args):
    return tl.load(args[1] + at.batch * args[2][0] + tl.minimum(at.k, args[0] - 1) * args[2][1]) != 0


@dataclass(frozen=True, eq=False)
class KeyPadding(Predicate):
    """Key j is visible where keep[b, j]; (batch or 1, seqlen_k), bool or ints. The other keys keep their positions.

    Where items differ in length it may be as short as the longest one; in `attention_varlen` it counts each item's own keys.

    Where padding stands at the end, `seqused_k` says the same and costs nothing. With holes, `seqused_k=keep` takes the hidden
    keys out first: a copy, and positions that count the others alone, but no time for what is hidden.
    """

    keep: Any

    name = "key_padding"
    visible = key_padding_visible
    along = (("key padding", "k"),)
    truths = True

    def __post_init__(self) -> None:
        shape = getattr(self.keep, "shape", None)
        if shape is None or len(shape) != 2:
            raise InvalidProblem(f"key padding is {shape or type(self.keep).__name__}; it must be a (batch, seqlen_k) tensor.")
        object.__setattr__(self, "keep", not_empty(self.keep))

    def scalars(self) -> tuple[int, ...]:
        return (self.keep.shape[1],)

    def tensors(self, batch: int, heads_q: int) -> tuple[Any, ...]:
        if not broadcasts(self.keep.shape[:1], (batch,)):
            raise InvalidProblem(f"key padding has shape {tuple(self.keep.shape)}; its first axis must be the batch, {batch}.")
        return (expanded(self.keep, batch, self.keep.shape[1]),)

    @staticmethod
    def apply(at: Position, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> Any:
        return tensors[0][at.batch, at.k.clip(max=scalars[0] - 1)] != 0
