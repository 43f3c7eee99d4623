"""The order in which the tiles of a problem's heads are computed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flashtile.kernels.device.tile import Items
from flashtile.kernels.device.varlen import assign_tile
from flashtile.kernels.portable.tile import Schedule
from flashtile.triton_glue.language import jit, tl


@dataclass(frozen=True)
class Order:
    """What `tile_of` reads of a tile."""

    schedule: Schedule
    items: Items


def order_of(swizzle: int, wave: int, last_first: bool = False) -> Order:
    return Order(Schedule(swizzle, last_first, wave), Items(ragged=False, varlen=False, together=False))


@jit
def list_tiles(tile_ptr, head_ptr, seqlen, heads, T: tl.constexpr):
    tile, head, item, _ = assign_tile(None, seqlen, seqlen, seqlen, heads, 16, False, T)
    tl.store(tile_ptr + tl.program_id(0), tile)
    tl.store(head_ptr + tl.program_id(0), item.batch * heads + head)


def listed(order: Order, tiles: int, heads: int, device: torch.device) -> list[tuple[int, int]]:
    """(tile, head) of each program."""
    found = [torch.full((tiles * heads,), -1, dtype=torch.int32, device=device) for _ in range(2)]
    list_tiles[(tiles * heads,)](*found, 16 * tiles - 3, heads, order)
    return list(zip(*(f.tolist() for f in found), strict=True))


@pytest.mark.parametrize("order", [order_of(1, 0), order_of(4, 0), order_of(4, 16), order_of(8, 6, last_first=True)])
@pytest.mark.parametrize(("tiles", "heads"), [(1, 1), (3, 7), (5, 9), (20, 3)])
def test_each_tile_of_each_head_comes_once(order: Order, tiles: int, heads: int, device: torch.device) -> None:
    assert sorted(listed(order, tiles, heads, device)) == list(product(range(tiles), range(heads)))


@pytest.mark.parametrize(("order", "together"), [(order_of(2, 0), 2), (order_of(2, 12), 3), (order_of(2, 1000), 10)])
def test_long_tiles_of_a_wave_come_first(order: Order, together: int, device: torch.device) -> None:
    """Heads together: as many as swizzle says, or more where these have fewer tiles than a wave."""
    tiles, heads = 4, 10
    found = listed(order, tiles, heads, device)
    assert [tile for tile, _ in found[: together * tiles]] == [tile for tile in range(tiles) for _ in range(together)]
    assert {head for _, head in found[: together * tiles]} == set(range(together))
