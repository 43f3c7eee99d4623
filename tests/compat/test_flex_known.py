"""What a score_mod does is recorded once for calls between which nothing of what it reads has changed, and again otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from flashtile import NotSupported
from flashtile.compat import score_mod as reading
from flashtile.compat.flex import flex_attention
from flashtile.compat.score_mod import modifiers_of
from flashtile.torch.api.fingerprint import fingerprint

SIZES = (1, 2, 4, 4)
FACTOR = 2.0
Mod = Callable[..., Any]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that were recorded."""
    made: list[Any] = []
    inner = reading.record

    def counted(function: Any, *given: Any) -> Any:
        made.append(function)
        return inner(function, *given)

    monkeypatch.setattr(reading, "record", counted)
    return made


def said(mod: Mod, shown: torch.dtype = torch.float32) -> Any:
    """What a modifier makes of ones: a factor, then what each modifier adds or does."""
    factor, modifiers = modifiers_of(mod, SIZES, torch.device("cpu"), shown)
    return factor, [(type(m).__name__, *m.scalars(), *(t.tolist() for t in m.tensors(1, 2))) for m in modifiers]


def with_cell(value: Any) -> Mod:
    return lambda s, b, h, i, j: s * value


def test_a_function_that_reads_plain_values_and_tensors_is_recorded_once(recorded: list[Any]) -> None:
    slopes, number = torch.tensor([0.5, 0.25]), 3.0
    helper = lambda x: torch.tanh(x / math.sqrt(4.0))  # noqa: E731

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return helper(s * number) + slopes[h] * FACTOR

    first = said(mod)
    assert said(mod) == first
    assert recorded == [mod]
    slopes.data.mul_(2.0)  # other numbers in the same tensor are read all the same
    assert said(mod) != first
    assert recorded == [mod]


def test_a_changed_variable_tensor_or_dtype_is_seen(recorded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cell: Any = 2.0
    mod = lambda s, b, h, i, j: s * cell * FACTOR  # noqa: E731
    assert said(mod) == (4.0, [])
    cell = 3.0
    assert said(mod) == (6.0, [])
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert said(mod) == (15.0, [])
    cell = torch.tensor(7.0)
    with_tensor = said(mod)
    cell = torch.tensor(8.0)
    assert said(mod) != with_tensor
    cell.data = torch.tensor([9.0, 9.0])  # of another shape
    with pytest.raises(Exception, match="shape"):
        said(mod)
    cell = -0.0
    negative = said(mod)
    cell = 0.0
    assert str(said(mod)) != str(negative)
    by_dtype = lambda s, b, h, i, j: s * (2.0 if s.dtype is torch.bfloat16 else 3.0)  # noqa: E731
    assert (said(by_dtype)[0], said(by_dtype, torch.bfloat16)[0], said(by_dtype)[0]) == (3.0, 2.0, 3.0)
    assert len(recorded) == 11


def test_a_default_and_a_helper_that_change_are_seen(recorded: list[Any]) -> None:
    def mod(s: Any, b: Any, h: Any, i: Any, j: Any, factor: float = 2.0) -> Any:
        return helper(s) * factor

    helper = with_one = lambda s: s * 3.0
    assert said(mod)[0] == 6.0
    mod.__defaults__ = (4.0,)
    assert said(mod)[0] == 12.0
    helper = lambda s: s * 5.0  # noqa: E731
    assert said(mod)[0] == 20.0
    helper = with_one
    with_one.__code__ = (lambda s: s * 7.0).__code__
    assert said(mod)[0] == 28.0
    assert len(recorded) == 4


class Holder:
    factor = 2.0

    def mod(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * self.factor


def calls_itself(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * 2.0 if isinstance(s, torch.Tensor) else calls_itself(s, b, h, i, j)


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_what_may_change_unseen_is_recorded_at_every_call(recorded: list[Any]) -> None:
    numbers, table, holder, called = [2.0], {"factor": 2.0}, Holder(), 0
    value = torch.tensor(2.0)

    def counts(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        nonlocal called
        called += 1
        return s * called

    mods: list[tuple[Mod, Callable[[], Any]]] = [
        (lambda s, b, h, i, j: s * numbers[0], lambda: numbers.__setitem__(0, 3.0)),
        (lambda s, b, h, i, j: s * table["factor"], lambda: table.update(factor=3.0)),
        (lambda s, b, h, i, j: s * holder.factor, lambda: setattr(holder, "factor", 3.0)),
        (Holder().mod, lambda: setattr(Holder, "factor", 3.0)),
        (lambda s, b, h, i, j: s * value.item(), lambda: value.data.fill_(3.0)),
        (lambda s, b, h, i, j: s * (3.0 if value > 2.5 else 2.0), lambda: value.data.fill_(3.0)),
        (lambda s, b, h, i, j: s * torch.tensor(value), lambda: value.data.fill_(3.0)),
        (lambda s, b, h, i, j: s * torch.ones(5)[torch.arange(5) < value].sum(), lambda: value.data.fill_(3.0)),
        (counts, lambda: None),
    ]
    for mod, change in mods:
        value.fill_(2.0)
        Holder.factor = 2.0
        first = said(mod)
        change()
        assert said(mod) != first, mod
    assert len(recorded) == 2 * len(mods)
    assert fingerprint(calls_itself) is None


def test_modes_and_computed_tensors_are_left_alone(recorded: list[Any]) -> None:
    """A mode may change what functions do; a tensor that was computed would keep alive what it was computed of."""

    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            return made * 2.0 if func is torch.Tensor.mul else made

    mod = with_cell(3.0)
    assert said(mod)[0] == 3.0
    with Doubling():
        assert said(mod)[0] == 6.0
    assert said(mod)[0] == 3.0
    assert len(recorded) == 2
    computed = torch.ones((), requires_grad=True) * 2.0
    assert fingerprint(with_cell(computed)) is None
    assert fingerprint(with_cell(computed.detach())) is not None
    assert fingerprint(torch.tanh) is None


def test_gradients_of_captured_tensors_do_not_come_from_an_earlier_call(recorded: list[Any]) -> None:
    slope = torch.tensor(0.5, requires_grad=True)
    mod = lambda s, b, h, i, j: s + torch.sin(slope) * h  # noqa: E731
    for _ in range(2):
        _, (bias,) = modifiers_of(mod, SIZES, torch.device("cpu"))
        (grad,) = torch.autograd.grad(bias.tensors(1, 2)[0].sum(), slope)
        assert grad.item() == pytest.approx(math.cos(0.5))
    with torch.no_grad():
        modifiers_of(mod, SIZES, torch.device("cpu"))
    _, (bias,) = modifiers_of(mod, SIZES, torch.device("cpu"))
    assert bias.tensors(1, 2)[0].requires_grad
    assert recorded == [mod]


LISTS: dict[str, Callable[[torch.Tensor], Mod]] = {
    "as_tensor": lambda t: lambda s, b, h, i, j: s * torch.as_tensor([t[0], t[1]])[1],
    "asarray": lambda t: lambda s, b, h, i, j: s * torch.asarray([1.0, t[0]])[1],
    "of-a-type": lambda t: lambda s, b, h, i, j: s * torch.FloatTensor([t[0], t[1]])[1],
    "new": lambda t: lambda s, b, h, i, j: s * t.new([t[0], t[1]])[1],
    "float": lambda t: lambda s, b, h, i, j: s * float(t[1]),
    "branch": lambda t: lambda s, b, h, i, j: s * (2.0 if t[0] < 1.0 else 3.0),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_numbers_that_are_read_of_tensors_are_read_at_every_call(name: str, recorded: list[Any]) -> None:
    t = torch.tensor([0.5, 1.5])
    mod = LISTS[name](t)
    said(mod)
    t.copy_(torch.tensor([2.0, 0.25]))
    assert said(mod) == said(LISTS[name](t))
    assert len(recorded) == 3


@pytest.mark.parametrize("name", LISTS)
def test_numbers_that_are_read_below_a_transform_are_the_tensors_own(name: str) -> None:
    """Under vmap there is no one number: refused, as torch refuses it."""
    t, q = torch.tensor([0.5, 1.5]), torch.randn(1, 1, 4, 8)
    attend = lambda t: flex_attention(q, q, q, LISTS[name](t))  # noqa: E731
    _, through_grad = torch.func.grad_and_value(lambda t: attend(t).sum())(t)
    assert torch.equal(through_grad, attend(t).sum())
    assert torch.equal(torch.func.jvp(attend, (t,), (t,))[0], attend(t))
    with pytest.raises(NotSupported, match=r"asks for a value of a tensor that torch\.vmap maps"):
        torch.func.vmap(attend)(t[None])
