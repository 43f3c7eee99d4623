"""The emulated blocks notice what a GPU would answer with a hang or with wrong numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from gluon_emulator.machine import Barrier, Deadlock, Grid, Memory, Product, here

Program = Callable[[], None]


def run(*roles: Program, before: Program = lambda: None, seed: int = 0) -> None:
    """A block that prepares and then runs roles side by side."""
    run_blocks(1, lambda _: roles, before, seed)


def run_blocks(
    count: int, roles: Callable[[int], Sequence[Program]], before: Program = lambda: None, seed: int = 0
) -> None:  # fmt: skip
    """So many blocks, and which roles each has."""

    def program() -> None:
        before()
        mine = roles(here().block.index)
        here().block.specialise([(role, ()) for role in mine], [4] * len(mine))

    Grid(count, random.Random(seed)).run(program)


def tile() -> Memory:
    return Memory(torch.ones(16, 16, dtype=torch.float16))


def test_roles_that_wait_for_one_another_are_a_deadlock() -> None:
    barriers: list[Barrier] = []

    def before() -> None:
        barriers.extend([Barrier(), Barrier()])
        for barrier in barriers:
            barrier.init(1)

    def one() -> None:
        barriers[0].wait(0)
        barriers[1].arrive(1)

    def other() -> None:
        barriers[1].wait(0)
        barriers[0].arrive(1)

    with pytest.raises(Deadlock, match="one 0 waits for a barrier's phase 0"):
        run(one, other, before=before)


def test_an_operand_that_changes_under_its_product_is_noticed() -> None:
    shared = tile()

    def multiply() -> None:
        product = Product(shared, shared, torch.zeros(16, 16), True)
        here().block.pause()
        product.finish()

    def overwrite() -> None:
        shared.store(torch.zeros(16, 16, dtype=torch.float16))

    def attempt(seed: int) -> bool:
        shared.tensor.fill_(1.0)
        try:
            run(multiply, overwrite, seed=seed)
        except AssertionError as error:
            return "changed while" in str(error)
        return False

    assert any(attempt(seed) for seed in range(40))


def test_a_product_must_be_waited_for() -> None:
    product = Product.__new__(Product)
    product.result = None
    with pytest.raises(AssertionError, match="before it was waited for"):
        _ = product.value


def test_writes_must_be_fenced() -> None:
    def role(fenced: bool) -> None:
        shared = tile()
        shared.store(torch.zeros(16, 16, dtype=torch.float16))
        if fenced:
            here().fence()
        Product(shared, shared, torch.zeros(16, 16), True).finish()

    run(lambda: role(True))
    with pytest.raises(AssertionError, match="has not fenced"):
        run(lambda: role(False))


def test_reads_must_be_fenced_before_a_load_overwrites() -> None:
    def role(fenced: bool) -> None:
        shared = tile()
        shared.load()
        if fenced:
            here().fence()
        shared.index(0).check_read()

    run(lambda: role(True))
    with pytest.raises(AssertionError, match=r"overwrites what .* read and has not fenced"):
        run(lambda: role(False))


def test_a_load_arrives_when_it_is_waited_for_and_not_before() -> None:
    target, seen = torch.zeros(4), []

    def fill() -> None:
        target.fill_(7.0)

    def role() -> None:
        barrier = Barrier()
        barrier.init(1)
        barrier.arrive(1, 16)
        barrier.copies.append((16, fill))
        seen.append(target.sum().item())
        barrier.wait(0)
        seen.append(target.sum().item())

    run(role)
    assert seen == [0.0, 28.0]


def test_who_has_not_waited_for_the_kernel_before_is_told() -> None:
    def patient() -> None:
        here().await_stream()
        here().check_awaited()

    def hasty() -> None:
        here().check_awaited()

    run(patient)
    run(hasty, before=lambda: here().await_stream())
    with pytest.raises(AssertionError, match="hasty 1 has not waited for the kernel before"):
        run(patient, hasty)


@pytest.mark.parametrize(("count", "passes"), [(Grid.FEW, True), (Grid.FEW + 1, False)])
def test_who_waits_for_a_later_block_goes_on_only_where_all_run_side_by_side(count: int, passes: bool) -> None:
    done: list[int] = []

    def roles(index: int) -> Sequence[Program]:
        def waits() -> None:
            here().block.wait(lambda: index == count - 1 or index + 1 in done, "the block after")
            done.append(index)

        return (waits,)

    if passes:
        run_blocks(count, roles)
        assert done == list(reversed(range(count)))
    else:
        with pytest.raises(Deadlock, match=f"block 0 of {count}: waits 0 waits for the block after"):
            run_blocks(count, roles)
