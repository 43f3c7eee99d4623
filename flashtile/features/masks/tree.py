"""Trees of drafted tokens: what speculative decoding verifies in one call (SpecInfer, arXiv 2305.09781, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.problem.mask import Predicate
from flashtile.problem.number import plain
from flashtile.problem.score import Position, broadcasts, expanded, not_empty
from flashtile.triton_glue.language import jit, tl


@jit
def tree_visible(at, args):
    node = at.k - (at.q - at.row)
    place = args[3] + at.batch.to(tl.int64) * args[4][0] + tl.minimum(at.row, args[0] - 1) * args[4][1]
    line = tl.load(place + tl.minimum(tl.maximum(node, 0), args[0] - 1) * args[4][2]) != 0
    return (node < 0) | (line & (node < args[0]))


@dataclass(frozen=True, eq=False)
class Tree(Predicate):
    """Queries are nodes of a tree that stands behind a prefix: one sees the prefix, its ancestors and itself.

    parents: ints (seqlen_q,) or (batch or 1, seqlen_q): the number of each node's parent among its item's queries, which comes
    before it; -1 for one that follows the prefix. The last seqlen_q keys of an item are its nodes, in the order of the
    queries; those before them are the prefix. A chain, [-1, 0, 1, ...], is causal order.

    Where items differ in their number of queries the last axis is that of the longest one. Ancestors are found here, on the
    parents' device, in batch * seqlen_q**2 booleans: make it again where parents have other numbers.
    """

    parents: Any
    _lines: Any = field(default=None, repr=False)  # bool (batch or 1, nodes, nodes): whether the second is on the first's line

    name = "tree"
    visible = tree_visible
    along = (("tree parents", "q"),)

    def __post_init__(self) -> None:
        shape = getattr(self.parents, "shape", None)
        if shape is None or len(shape) not in (1, 2):
            raise InvalidProblem(
                f"tree parents are {type(self.parents).__name__ if shape is None else tuple(shape)}; they must be an "
                "int32 or int64 tensor, (seqlen_q,) or (batch, seqlen_q)."
            )
        if str(self.parents.dtype).removeprefix("torch.") not in ("int32", "int64"):
            raise InvalidProblem(f"tree parents are {self.parents.dtype}; they must be int32 or int64.")
        parents = self.parents if shape[-1] else not_empty(self.parents) - 1  # no node: one that follows the prefix
        parents = parents if len(shape) == 2 else parents[None]
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "_lines", _lines_of(parents))

    def scalars(self) -> tuple[int, ...]:
        return (self.parents.shape[-1],)

    def tensors(self, batch: int, heads_q: int) -> tuple[Any, ...]:
        """The first for its shape, which errors tell."""
        count, nodes = self.parents.shape
        if not broadcasts((count,), (batch,)):
            raise InvalidProblem(f"tree parents are of {count} items; their first axis must be the batch, {batch}, or 1.")
        return expanded(self.parents, batch, nodes), expanded(self._lines, batch, nodes, nodes)

    @staticmethod
    def apply(at: Position, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> Any:
        node, last = at.k - (at.q - at.row), scalars[0] - 1
        line = tensors[1][at.batch, at.row.clip(max=last), node.clip(min=0, max=last)]
        return (node < 0) | (line & (node <= last))


def _lines_of(parents: Any) -> Any:
    """bool (items, nodes, nodes): row i is true at i and all of its ancestors; each round doubles how far up it looks."""
    index = (parents * 0 + 1).cumsum(-1) - 1
    wrong = (parents < -1) | (parents >= index)
    if plain(wrong.any()) is True:
        item, node = divmod(int((wrong * 1).reshape(-1).argmax()), parents.shape[-1])
        raise InvalidProblem(
            f"tree parents[{item}] has {int(parents[item, node])} for node {node}; it must be -1 or an earlier node's number: "
            "a parent comes before its child."
        )
    parents = parents.clip(-1, None)
    items = index[:, :1] * 0 + (parents[:, 0] * 0 + 1).cumsum(0)[:, None] - 1
    lines, up = index[:, :, None] == index[:, None, :], parents
    for _ in range(parents.shape[-1].bit_length()):
        at = up.clip(0, None)
        lines = lines | (lines[items, at] & (up >= 0)[:, :, None])
        up = up[items, at] * (up >= 0) - (up < 0) * 1
    return lines
