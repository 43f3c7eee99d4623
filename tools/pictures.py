"""Draws the pictures of docs/explanation as SVG: `python tools/pictures.py` writes docs/explanation/*.svg."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "explanation"
LOAD, SCORES, SOFTMAX, VALUES, PLAIN = "#c9d6e5", "#f4b6a6", "#fbe3a1", "#d98f80", "#f3f3f3"


class Picture:
    """Rectangles, lines and words on white."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' font-family="sans-serif" font-size="13" role="img">',
            f"<title>{title}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, colour: str, text: str = "") -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" stroke="#555555"/>')
        if text:
            self.words(x + width / 2, y + height / 2 + 4.5, text, "middle")

    def words(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="#222222">{text}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(
            f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" stroke="#222222" fill="none"/>'
            f'<circle cx="{to_x:g}" cy="{to_y:g}" r="3" fill="#222222"/>'
        )

    def text(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def timeline(title: str, rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]], below: str) -> str:
    """Who works when: for each role its pieces (start, length, colour, words)."""
    picture = Picture(820, 46 + 46 * len(rows) + 34, title)
    for number, (name, pieces) in enumerate(rows):
        y = 20 + 46 * number
        picture.words(10, y + 22, name)
        for start, length, colour, words in pieces:
            picture.box(130 + start, y, length, 34, colour, words)
    picture.arrow(130, 28 + 46 * len(rows), 800, 28 + 46 * len(rows))
    picture.words(130, 48 + 46 * len(rows), below)
    return picture.text()


def forward_pipeline() -> str:
    loader = [
        (at, 75, LOAD, words)
        for at, words in zip(range(0, 640, 80), ("K3", "K2", "V3", "K1", "V2", "K0", "V1", "V0"), strict=True)
    ]
    step = ((0, 60, SCORES, "S = QK"), (60, 60, VALUES, "O += PV"), (120, 120, SOFTMAX, "exp2"))
    first = [(70 + 240 * i + at, length, colour, words) for i in range(2) for at, length, colour, words in step]
    second = [(190 + 240 * i + at, length, colour, words) for i in range(2) for at, length, colour, words in step]
    rows = (("loading warp", loader), ("warpgroup 1", first), ("warpgroup 2", second))
    return timeline("The forward's pipeline", rows, "time: while one warpgroup exponentiates, the other one multiplies")


def backward_pipeline() -> str:
    loader = [
        (at, 105, LOAD, words)
        for at, words in zip(
            range(0, 660, 110), ("Q0, dO0", "Q1, dO1", "Q2, dO2", "Q3, dO3", "Q4, dO4", "Q5, dO5"), strict=True
        )
    ]
    step = ((0, 60, SCORES, "S, dP"), (60, 60, SOFTMAX, "p, ds"), (120, 80, VALUES, "dV, dQ, dK"))
    first = [(110 + 200 * i + at, length, colour, words) for i in range(2) for at, length, colour, words in step]
    second = [(140 + 200 * i + at, length, colour, words) for i in range(2) for at, length, colour, words in step]
    adder = [(330 + 200 * i, 90, LOAD, f"dQ{i} to memory") for i in range(2)]
    rows = (("loading warp", loader), ("warpgroup 1", first), ("warpgroup 2", second), ("adding warp", adder))
    return timeline("The backward's pipeline", rows, "time: each step is one tile of queries; keys, dK and dV stay")


def tile() -> str:
    """One query tile of a causal problem among its key tiles."""
    picture = Picture(640, 330, "A tile of a causal forward")
    cell, left, top = 44, 150, 40
    for row in range(6):
        for column in range(6):
            colour = SCORES if column < row else SOFTMAX if column == row else PLAIN
            picture.box(left + cell * column, top + cell * row, cell, cell, colour)
    picture.words(left + 3 * cell, top - 12, "key tiles, 128 keys each", "middle")
    picture.words(10, top + 4 * cell + 27, "one query tile:")
    picture.words(10, top + 4 * cell + 43, "2 x 64 rows")
    for half in range(2):
        picture.box(left - 26, top + 4 * cell + half * cell / 2, 20, cell / 2, LOAD, str(half + 1))
    picture.arrow(left + 4.8 * cell, top + 4.5 * cell, left + 0.2 * cell, top + 4.5 * cell)
    for number, (colour, words) in enumerate(
        (
            (SCORES, "seen whole: no mask"),
            (SOFTMAX, "seen in part: mask"),
            (PLAIN, "not seen: not visited"),
            (LOAD, "a warpgroup's 64 rows"),
        )
    ):
        picture.box(450, 60 + 34 * number, 22, 22, colour)
        picture.words(480, 76 + 34 * number, words)
    picture.words(left, top + 6 * cell + 20, "The line is the walk: from the last visible key tile to the first.")
    return picture.text()


PICTURES = {"hopper-forward": forward_pipeline, "hopper-backward": backward_pipeline, "tile": tile}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")
