"""Puts the emulator of Gluon (`gluon_emulator`) under flashtile's Hopper kernels, and what those have in assembly.

`install` puts it and the words below under the kernels before they are imported, for the whole process: a process
that emulates does nothing else. Found are wrong indices, masks, phases and turns, deadlocks, tiles let go of too early,
missing waits and fences, and wrong arguments of a plan. Not found is what layouts, registers and the compiler do.
"""

from __future__ import annotations

import struct
import sys
from types import SimpleNamespace
from typing import Any

import torch

import gluon_emulator
from gluon_emulator import language, launch
from gluon_emulator.launch import jit, unchanged
from gluon_emulator.machine import Abreast, Memory, NamedBarrier, extend_tensors, here
from gluon_emulator.words import (
    fence_async_shared,
    mbarrier,
    store_wait,
    tma_add,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip


def check_awaited(tensor: launch.Described) -> None:
    """A float32 tensor is what the pass before has made: what callers bring has 16 bits."""
    if tensor.dtype is torch.float32:
        here().check_awaited()


def recast(tile: Memory, dtype: torch.dtype, shape: list[int], layout: object) -> Memory:
    """The shared memory of a tile, or its beginning, as another one."""
    flat = (tile.tiles if isinstance(tile, Abreast) else tile.tensor).view(-1).view(dtype)
    count = torch.Size(shape).numel()
    assert count <= len(flat), "more than what is looked at"
    return Memory(flat[:count].view(shape))


def strips(tile: Memory, rows: int) -> Memory:
    """The strips of a tile: swizzled memory is row by row here."""
    down, across = tile.shape[0] // rows, tile.shape[1] // 64
    return Memory(tile.tensor.view(down, rows, across, 64).permute(2, 0, 1, 3).reshape(-1, rows, 64))


def abreast(tiles: Memory, place: Any, rows: int, columns: int, count: int = 2) -> Memory:
    first = count * int(place)
    return Abreast(tiles.tensor[first : first + count].view(count, rows, columns))


def named_arrive(number: int, threads: int) -> tuple[NamedBarrier, int]:
    """The barrier, and which of its openings this arrival belongs to."""
    barrier = here().block.named.setdefault(number, NamedBarrier())
    return barrier, barrier.arrive(threads)


def named_wait(number: int, threads: int) -> None:
    barrier, opening = named_arrive(number, threads)
    here().block.wait(lambda: barrier.opened > opening, f"named barrier {number}")


def await_turn(lock: language.Pointer, reports: Any) -> None:
    what = f"{int(reports)} reports to lock {int(lock.offset)}"
    here().block.wait(lambda: int(language.load(lock)) == int(reports), what)


def take(counter: language.Pointer) -> Any:
    here().check_awaited()
    ticket = language.load(counter)
    language.store(counter, ticket + 1)
    here().block.pause()
    return ticket


def claim(lock: language.Pointer) -> Any:
    here().check_awaited()
    found = language.load(lock)
    if int(found) == 0:
        language.store(lock, found + 1)
    here().block.pause()
    return found


def is_first(lock: language.Pointer, answer: Any = None) -> bool:
    answer = claim(lock) if answer is None or int(answer) < 0 else answer
    here().block.wait(lambda: int(answer) == 0 or int(language.load(lock)) > 1, "the first share of a part")
    return int(answer) == 0


def report(lock: language.Pointer) -> None:
    language.store(lock, language.load(lock) + here().warps)
    here().block.pause()


def choose_bytes(a: torch.Tensor, b: torch.Tensor, selector: int) -> torch.Tensor:
    eight = torch.stack([word >> 8 * byte & 255 for word in (a, b) for byte in range(4)])
    chosen = [eight[selector >> 4 * place & 15] << 8 * place for place in range(4)]
    return torch.stack(chosen).sum(0)


def compared(word: torch.Tensor, limit: torch.Tensor, flip: torch.Tensor) -> torch.Tensor:
    """What a half of a word, without its sign, keeps; limits are so small that no half of them is NaN."""
    assert bool(((limit & 0xFF == 0) & (limit < 0x7C00)).all())
    return (word & 0x7FFF < limit) ^ (flip == 0)


def keep_singles(
    x: torch.Tensor, words: torch.Tensor, limits: torch.Tensor, flip: torch.Tensor, by_predicates: bool
) -> torch.Tensor:
    """Odd columns have the upper half."""
    upper = torch.arange(x.shape[1]) % 2 == 1
    word, limit = (torch.where(upper, both >> 16, both) & 0xFFFF for both in (words, limits))
    return torch.where(compared(word, limit, flip), x, 0.0)


def keep_pairs(
    low: torch.Tensor, high: torch.Tensor, words: torch.Tensor, limits: torch.Tensor, flip: torch.Tensor, kind: str
) -> torch.Tensor:
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    lower, upper = (
        torch.where(compared(words >> shift & 0xFFFF, limits >> shift & 0xFFFF, flip), x, 0.0)
        .to(dtype).view(torch.int16).to(torch.int32)
        for shift, x in ((0, low), (16, high))
    )  # fmt: skip
    return lower & 0xFFFF | upper << 16


def pack_e4m3(*four: torch.Tensor) -> torch.Tensor:
    eight = (x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32) for x in four)
    return sum(byte << 8 * place for place, byte in enumerate(eight))  # pyright: ignore[reportReturnType]


def unpack_e4m3(words: torch.Tensor) -> torch.Tensor:
    place = torch.arange(words.shape[1]) % 4
    return (words >> 8 * place & 255).to(torch.uint8).view(torch.float8_e4m3fn)


def ones(bit: torch.Tensor, below: bool) -> torch.Tensor:
    lower = (1 << bit.to(torch.int64).clamp(0, 32)) - 1
    return lower if below else lower ^ 0xFFFFFFFF


def select_bits(x: torch.Tensor, words: torch.Tensor, first: int, other: str, columns: int) -> torch.Tensor:
    column = torch.arange(columns)
    (number,) = struct.unpack(">f", bytes.fromhex(other.removeprefix("0f")))
    return torch.where(words >> (first + column // 8 * 2 + column % 2) & 1 > 0, x, number)


def greatest(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1, keepdim=True)


def raised(
    score: torch.Tensor, top: torch.Tensor, factor: torch.Tensor, wild: torch.Tensor, blind: bool, votes: bool, columns: int
) -> torch.Tensor:
    assert votes or all((of_warp == of_warp.flatten()[0]).all() for of_warp in wild.split(16))
    unseen, most = top == -torch.inf, greatest(score)
    far = torch.exp2(most * factor - torch.where(unseen, 0.0, top)) > 2.0**64
    looks = (wild != (0x7FFFFFFF if votes else 0)) | (unseen if blind else torch.zeros_like(unseen))
    return torch.where(looks & (far | unseen & (most > -torch.inf)), most * factor, top)


def rebased(p: torch.Tensor, top: torch.Tensor, sums: torch.Tensor, columns: int) -> tuple[torch.Tensor, ...]:
    most, much = greatest(p), ~(sums <= 256.0).all(1, keepdim=True)
    power = torch.where(much & most.isfinite(), torch.floor(torch.log2(most)), 0.0)
    sums = torch.where(much & (most > 2.0**64), torch.inf, sums * torch.exp2(-power))
    return p * torch.exp2(-power), top + power, sums


def row_products(a: torch.Tensor, b: torch.Tensor, columns: int) -> torch.Tensor:
    made = (a * b).reshape(a.shape[0], columns // 8, 4, 2).sum((1, 3))  # four lanes hold a row
    return made[:, None, :, None].expand(-1, columns // 8, -1, 2).reshape(a.shape)


def install(seed: int = 0) -> None:
    """Stand in for Triton and Gluon in this process."""
    assert "flashtile.kernels.device.mask" not in sys.modules, "kernels were imported before the emulator was installed"
    from flashtile.triton_glue import language as _triton

    assert not _triton.INTERPRETED
    gluon_emulator.seed(seed)
    extend_tensors()
    replace(launch.Described, check=check_awaited)
    replace(_triton, jit=jit, tl=language, constexpr=unchanged, shared=unchanged)
    from flashtile.triton_glue import gluon

    replace(
        gluon,
        gl=language,
        gluon=SimpleNamespace(jit=jit, constexpr_function=unchanged),
        aggregate=unchanged,
        pack=lambda value, dtype: value.to(dtype),
        pack_e4m3=pack_e4m3,
        unpack_e4m3=unpack_e4m3,
        zeros_of=lambda x, total: (x.float() * 0.0 + total.float()).to(x.dtype),
        add_pairs=lambda a, b: (a.float() + b.float()).to(a.dtype),
        choose_bytes=choose_bytes,
        keep_pairs=keep_pairs,
        keep_singles=keep_singles,
        ones=ones,
        select_bits=select_bits,
        raised=raised,
        role_barrier=lambda: None,
        arrive_each=lambda barrier: barrier.arrive(32 * here().warps),
        rebased=rebased,
        row_products=row_products,
        scale_unless_one=lambda acc, factor, columns: acc * factor,
        afresh=unchanged,
        settled=unchanged,
        stay=unchanged,
        uniform=unchanged,
        of_any=lambda x: x.amax(1, keepdim=True).expand_as(x),  # of 0 and 1, [warps, lanes]
        first_lane=lambda own, other: own,
        first_thread=lambda own, other: own,
        of_first_lane=unchanged,
        prefetch=lambda pointers, wanted: pointers.places(wanted),
        lane=lambda: torch.arange(32),
        of_lane=lambda x, number: language.Scalar(x[int(number)]) if x.dim() else x,
        **{word.__name__: word for word in WORDS},
    )
    from flashtile.kernels.device import stream
    from flashtile.kernels.sm90.device import locks as order
    from flashtile.kernels.sm90.device import strips as of_strips
    from flashtile.kernels.sm90.device import ticket
    from flashtile.kernels.sm90.host import tile_forward as tile

    replace(tile, LOST=0.0)  # sums are not cut off here
    replace(ticket, take=take)
    replace(of_strips, strips=strips)
    replace(stream, await_stream=lambda soon=True: here().await_stream(), let_next=lambda: None)
    replace(order, await_turn=await_turn, claim=claim, is_first=is_first, report=report, writes_done=store_wait)


WORDS: tuple[Any, ...] = (
    abreast, fence_async_shared, mbarrier, named_arrive, named_wait, recast, store_wait, tma_add, tma_load, tma_store,
    warpgroup_mma, warpgroup_mma_wait,
)  # fmt: skip


def replace(module: Any, **names: Any) -> None:
    """Set names that a module has."""
    for name, value in names.items():
        assert hasattr(module, name), f"{module.__name__} has no {name}"
        setattr(module, name, value)
