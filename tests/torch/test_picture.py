"""mask.show(): what it draws is what the mask hides, for every kind of mask."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtile import Band, Blocks, Dilated, Document, InvalidProblem, KeyPadding, Prefix
from flashtile.problem.mask import terms_of
from flashtile.reference.attention import holds, positions

IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2], dtype=torch.int32)


def test_causal_is_a_staircase_that_ends_at_the_last_key() -> None:
    text = str(Band(right=0).show(3, 5))
    assert text.splitlines() == [
        "3 queries down, 5 keys across",
        "███··",
        "████·",
        "█████",
        "█ visible 80 %, · hidden 20 %",
    ]
    assert repr(Band(right=0).show(3, 5)) == text


@pytest.mark.parametrize(
    "mask",
    [
        Band(left=2, right=1), Band(), Document(IDS) & Band(right=0),
        Prefix(torch.tensor([3], dtype=torch.int32)) | Band(right=0),
        Dilated(3) & Band(right=0), KeyPadding(IDS[None] < 2),
    ],
    ids=["band", "full", "documents", "prefix", "dilated", "padding"],
)  # fmt: skip
def test_a_cell_of_one_score_is_visible_or_hidden(mask: Any) -> None:
    expected = holds(terms_of(mask) or (), positions(1, 1, 8, 8, torch.device("cpu")), (1, 1)).expand(1, 1, 8, 8)[0, 0]
    assert torch.equal(mask.show(8).state, 2 * expected.to(torch.int8))


def test_long_masks_share_cells() -> None:
    picture = Band(left=100, right=0).show(300, 500)
    assert picture.state.shape == (38, 63)
    assert picture.cell == (8, 8)
    exact = torch.tensor([[Band(left=100, right=0).visible(i, j, 200) for j in range(500)] for i in range(300)])
    for row, column in ((0, 0), (0, 25), (0, 12), (0, 13), (37, 62), (10, 20)):
        part = exact[8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        assert picture.state[row, column] == (2 if part.all() else 1 if part.any() else 0)


def test_items_and_heads_differ() -> None:
    mask = Prefix(torch.tensor([1, 4], dtype=torch.int32))
    assert str(mask.show(1, 4, batch=2, item=1)).splitlines()[1] == "████"
    assert str(mask.show(1, 4, batch=2)).splitlines()[1] == "█···"


def test_blocks_show_their_blocks() -> None:
    blocks = Blocks.build(Band(right=0), 96, 96, block_size=(32, 32))
    lines = str(blocks.show()).splitlines()
    assert lines[0] == "96 queries down, 96 keys across, in blocks of 32 x 32"
    assert lines[1:4] == ["▒··", "█▒·", "██▒"]
    assert "▒ in part 33 %" in lines[4]


def test_a_picture_is_written(tmp_path: Path) -> None:
    picture = Band(right=0).show(20)
    picture.save(tmp_path / "mask.png")
    assert (tmp_path / "mask.png").read_bytes()[:4] == b"\x89PNG"
    assert picture._repr_png_()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "seqlen_q is None; it must be a positive int"),
        ({"seqlen_q": 0}, "seqlen_q is 0"),
        ({"seqlen_q": 4, "seqlen_k": 2.0}, "seqlen_k is 2.0"),
        ({"seqlen_q": 4, "item": 1}, "item is 1; it must be from 0 to 0"),
        ({"seqlen_q": 4, "heads": 2, "head": -1}, "head is -1; it must be from 0 to 1"),
    ],
)
def test_what_cannot_be_shown_is_said(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        Band(right=0).show(**arguments)


def test_blocks_have_lengths_of_their_own() -> None:
    with pytest.raises(InvalidProblem, match="blocks are for 64 x 64 scores"):
        Blocks.build(Band(right=0), 64, 64, block_size=(32, 32)).show(32)


def test_a_mask_needs_no_torch_until_it_is_shown() -> None:
    code = "import sys; import flashtile; flashtile.Band(right=0); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
