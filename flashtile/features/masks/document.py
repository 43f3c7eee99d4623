"""Documents: a query sees the keys of its own document, wherever those lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.problem.mask import Predicate
from flashtile.problem.score import Position, broadcasts, expanded, not_empty
from flashtile.triton_glue.language import jit, tl


@jit
def document_visible(at, args):
    of_query = args[2] + at.batch * args[3][0] + tl.minimum(at.row, args[0] - 1) * args[3][1]
    of_key = args[4] + at.batch * args[5][0] + tl.minimum(at.k, args[1] - 1) * args[5][1]
    return tl.load(of_query) == tl.load(of_key)


@dataclass(frozen=True, eq=False)
class Document(Predicate):
    """Query i sees key j where queries[i] == keys[j]; ints (seqlen,) or (batch or 1, seqlen), `keys` is `queries` by default.

    Of as many queries and keys as there are: where a cache holds more keys, Document(ids[:, -seqlen_q:], ids). Where items
    differ in length they may be as short as the longest one; in `attention_varlen` they count each item's own tokens.
    """

    queries: Any
    keys: Any = None

    name = "document"
    visible = document_visible
    along = (("document queries", "q"), ("document keys", "k"))

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", self.queries if self.keys is None else self.keys)
        for name in ("queries", "keys"):
            tensor = getattr(self, name)
            if not hasattr(tensor, "shape") or len(tensor.shape) not in (1, 2):
                shape = getattr(tensor, "shape", type(tensor).__name__)
                raise InvalidProblem(f"document {name} are {shape}; they must be a tensor (seqlen,) or (batch, seqlen).")
            object.__setattr__(self, name, not_empty(tensor))

    def scalars(self) -> tuple[int, ...]:
        return self.queries.shape[-1], self.keys.shape[-1]

    def tensors(self, batch: int, heads_q: int) -> tuple[Any, ...]:
        for name in ("queries", "keys"):
            shape = tuple(getattr(self, name).shape)
            if len(shape) == 2 and not broadcasts(shape[:1], (batch,)):
                raise InvalidProblem(f"document {name} have shape {shape}; their first axis must be the batch, {batch}, or 1.")
        return tuple(expanded(ids, batch, ids.shape[-1]) for ids in (self.queries, self.keys))

    @staticmethod
    def apply(at: Position, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> Any:
        queries, keys = tensors
        return queries[at.batch, at.row.clip(max=scalars[0] - 1)] == keys[at.batch, at.k.clip(max=scalars[1] - 1)]
