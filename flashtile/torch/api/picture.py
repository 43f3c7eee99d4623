"""A mask as a picture: text for the terminal, PNG for notebooks and files. `mask.show()` makes it."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.problem.mask import FULL, Band, Joined, terms_of
from flashtile.reference.attention import holds, positions

HIDDEN, PARTIAL, WHOLE = 0, 1, 2
SIGNS = ("·", "▒", "█")  # by these numbers
COLUMNS = 64  # of a mask without lists of blocks: scores beyond share a cell, so that a terminal holds it


@dataclass(frozen=True, repr=False)
class Picture:
    """Queries down, keys across. Its `str` and `repr` are text; a notebook shows a picture, and `save` writes one.

    state: int8 (rows, columns) on the CPU; 0 where a cell holds no visible score, 2 where all are visible, else 1.
    cell: queries and keys of a cell.
    """

    title: str
    state: torch.Tensor
    cell: tuple[int, int]

    def __str__(self) -> str:
        words = ("hidden", "in part", "visible")
        shares = [(self.state == number).float().mean().item() if self.state.numel() else 0.0 for number in range(3)]
        legend = ", ".join(f"{SIGNS[n]} {words[n]} {100 * shares[n]:.0f} %" for n in (2, 1, 0) if shares[n])
        lines = ["".join(SIGNS[number] for number in row) for row in self.state.tolist()]
        return "\n".join([self.title, *lines, legend])

    __repr__ = __str__

    def save(self, path: str | Path) -> None:
        """Write it as a picture, whose format the file's ending says. Needs matplotlib (the extra `cli`)."""
        self._figure().savefig(path, dpi=140)

    def _repr_png_(self) -> bytes | None:
        """For notebooks; None where matplotlib is missing, and the text is shown."""
        try:
            figure = self._figure()
        except ModuleNotFoundError:
            return None
        buffer = BytesIO()
        figure.savefig(buffer, dpi=80, format="png")
        return buffer.getvalue()

    def _figure(self) -> Any:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure

        figure: Any = Figure(figsize=(5.0, 5.0), layout="constrained")
        axes = figure.add_subplot()
        rows, columns = self.state.shape
        extent = (0, columns * self.cell[1], rows * self.cell[0], 0)
        colours = ListedColormap(["#f2f2f2", "#f4a6a6", "#d62728"])
        axes.imshow(self.state.numpy(), cmap=colours, vmin=0, vmax=2, interpolation="nearest", extent=extent)
        axes.set(title=self.title, xlabel="key", ylabel="query")
        axes.title.set_fontsize(8)
        return figure


def show(
    mask: Band | Joined, seqlen_q: int | None, seqlen_k: int | None, sizes: tuple[int, int], at: tuple[int, int]
) -> Picture:
    """The picture of a mask for a (batch entry, head), of so many `sizes`. Raises InvalidProblem."""
    if isinstance(mask, Joined) and mask.spec is not None:
        return _of_blocks(mask, (seqlen_q, seqlen_k), at)
    lengths = seqlen_q, seqlen_q if seqlen_k is None else seqlen_k
    for name, value in zip(("seqlen_q", "seqlen_k", "batch", "heads"), (*lengths, *sizes), strict=True):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidProblem(f"{name} is {value!r}; it must be a positive int.")
    queries, keys = lengths
    assert queries is not None
    assert keys is not None
    _check_place(sizes, at)
    size = -(-max(queries, keys) // COLUMNS)
    rows = [
        _cells(mask, (first, min(first + size, queries)), (queries, keys), sizes, at, size) for first in range(0, queries, size)
    ]
    cells = "" if size == 1 else f", {size} x {size} a cell"
    return Picture(f"{queries} queries down, {keys} keys across{cells}", torch.stack(rows), (size, size))


def _cells(
    mask: Band | Joined, rows: tuple[int, int], seqlens: tuple[int, int], sizes: tuple[int, int], at: tuple[int, int], size: int
) -> torch.Tensor:
    """One row of cells: what the queries from rows[0] to rows[1] see."""
    terms = terms_of(mask) or ()
    place = next((t.device for term in terms for leaf in term if leaf != FULL and not isinstance(leaf, Band)
                  for t in leaf.tensors(*sizes)), torch.device("cpu"))  # fmt: skip
    everywhere = positions(1, 1, *seqlens, place)
    here = everywhere._replace(
        batch=everywhere.batch + at[0],
        head=everywhere.head + at[1],
        row=everywhere.row[slice(*rows)],
        q=everywhere.q[slice(*rows)],
    )
    keep = holds(terms, here, sizes).expand(1, 1, rows[1] - rows[0], seqlens[1])[0, 0].cpu()
    parts = keep.split(size, 1)
    return torch.tensor([WHOLE if p.all() else PARTIAL if p.any() else HIDDEN for p in parts], dtype=torch.int8)


def _of_blocks(blocks: Any, given: tuple[int | None, int | None], at: tuple[int, int]) -> Picture:
    if given != (None, None) and given != blocks.seqlens:
        raise InvalidProblem(
            f"blocks are for {blocks.seqlens[0]} x {blocks.seqlens[1]} scores; show() of them takes no lengths."
        )
    state = blocks.state
    _check_place(tuple(state.shape[:2]), at)
    cell = blocks.spec.block_q, blocks.spec.block_k
    title = f"{blocks.seqlens[0]} queries down, {blocks.seqlens[1]} keys across, in blocks of {cell[0]} x {cell[1]}"
    return Picture(title, state[at].cpu(), cell)


def _check_place(sizes: tuple[int, int], at: tuple[int, int]) -> None:
    for name, value, size in zip(("item", "head"), at, sizes, strict=True):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
            raise InvalidProblem(f"{name} is {value!r}; it must be from 0 to {size - 1}.")
