"""Gluon's words for Hopper: barriers, bulk copies, products of a warpgroup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gluon_emulator import language
from gluon_emulator.launch import Described
from gluon_emulator.machine import Barrier, Memory, Product, here, nothing


class mbarrier:  # noqa: N801 (as Gluon spells it)
    """Gluon's words for barriers."""

    MBarrierLayout = language.Layout

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.init(count)

    @staticmethod
    def expect(barrier: Barrier, nbytes: int) -> None:
        barrier.arrive(1, nbytes)

    @staticmethod
    def arrive(barrier: Barrier, count: int = 1) -> None:
        barrier.arrive(count)

    @staticmethod
    def invalidate(barrier: Barrier) -> None:
        pass

    @staticmethod
    def wait(barrier: Barrier, parity: Any) -> None:
        barrier.wait(int(parity))


def fence_async_shared() -> None:
    here().fence()


def tma_load(source: Described, coordinates: list[Any], barrier: Barrier, tile: Memory) -> None:
    outside, inside = source.overlap(coordinates)
    target = tile.tensor.view(source.block)
    tile.check_read()
    target.fill_(nothing(target.dtype))

    def fill() -> None:
        target.zero_()
        target[inside] = source.tensor[outside]

    barrier.copies.append((source.block_type.nbytes, fill))
    here().block.pause()


def tma_store(target: Described, coordinates: list[Any], tile: Memory) -> None:
    outside, inside = target.overlap(coordinates)
    source = tile.tensor.view(target.block)
    tile.check_fenced()

    def write() -> None:
        target.tensor[outside] = source[inside]

    here().stores.append(write)


def tma_add(target: Described, coordinates: list[Any], tile: Memory) -> None:
    outside, inside = target.overlap(coordinates)
    source = tile.tensor.view(target.block)
    tile.check_fenced()

    def add() -> None:
        target.tensor[outside] += source[inside]

    here().stores.append(add)


def store_wait(pendings: int = 0) -> None:
    stores = here().stores
    while len(stores) > pendings:
        stores.pop(0)()


def warpgroup_mma(a: Any, b: Memory, acc: Any, use_acc: Any = True, is_async: bool = False) -> Product:
    assert is_async
    product = Product(a, b, acc, bool(use_acc))
    here().products.append(product)
    here().block.pause()
    return product


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    """The values of deps, once all but the last `num_outstanding` products are done; of one of these itself, to add to."""
    products = here().products
    while len(products) > num_outstanding:
        products.pop(0).finish()
    values = [x.value if isinstance(x, Product) and x not in products else x for x in deps]
    return tuple(values) if len(values) > 1 else values[0]
