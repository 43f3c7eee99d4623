"""Sizes that are not known: their expressions give what plain integers give, in Python and as C."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtile.plan.size import Guard, Size, Trace, divisor, evaluate, fixed, guard_in_c, in_c, terms_of

NAMES = ("a", "b", "c")
VALUES = st.fixed_dictionaries({name: st.integers(1, 5000) for name in NAMES})
OPERATIONS = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "//": lambda x, y: x // y if y != 0 else x,
    "%": lambda x, y: x % y if y != 0 else x,
    "max": max,
    "min": min,
}
STEPS = st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8)


def compute(sizes: dict[str, int], steps: list[tuple[str, int, int]], constants: list[int]) -> list[int]:
    """What a straight-line program makes of the sizes."""
    known = [*(sizes[name] for name in NAMES), *constants]
    for name, i, j in steps:
        x, y = known[i % len(known)], known[j % len(known)]
        if -(2**28) < x < 2**28 and -(2**28) < y < 2**28:
            known.append(OPERATIONS[name](x, y))
    return known


def traced(values: dict[str, int]) -> tuple[Trace, dict[str, int]]:
    trace = Trace()
    return trace, {name: trace.size(name, value) for name, value in values.items()}


@settings(max_examples=300)
@given(first=VALUES, second=VALUES, steps=STEPS, constants=st.lists(st.integers(-130, 130), max_size=3))
def test_expressions_hold_wherever_their_guards_do(
    first: dict[str, int], second: dict[str, int], steps: list[tuple[str, int, int]], constants: list[int]
) -> None:
    trace, sizes = traced(first)
    made = compute(sizes, steps, constants)
    assert [int(n) for n in made] == compute(first, steps, constants)
    assert [evaluate(n, first) for n in made] == compute(first, steps, constants)
    assert all(guard.met(first) for guard in trace.guards)
    if all(guard.met(second) for guard in trace.guards):
        assert [evaluate(n, second) for n in made] == compute(second, steps, constants)


def test_a_remainder_of_a_remainder() -> None:
    _, sizes = traced({"a": 7, "b": 3, "c": 1})
    rest = sizes["a"] % sizes["b"]
    assert terms_of(rest % sizes["b"]) == terms_of(rest)
    assert rest // sizes["b"] == 0


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_c_computes_the_same(tmp_path: Path) -> None:
    values = {"a": 1000, "b": 17, "c": 3}
    trace, sizes = traced(values)
    a, b, c = sizes["a"], sizes["b"], sizes["c"]
    assert a > 5 * b
    assert b % 16 != 0
    assert a != b
    made = [
        a + b - c, -a // 128, -(-a // 128), a // 16 * 16, (a - 4 * b) // 7, (b - a) // 7, a % 16, (b - a) % 16,
        a * b // b, 12 * c // 4, math.ceil(a / 64) * c, (3 * a + b) // (2 * c), 5 - a, a - a,
    ]  # fmt: skip
    helpers = (Path(__file__).resolve().parents[2] / "flashtile/export/helpers.c").read_text().split("/* @zero")[0]
    variables = "".join(f"const int64_t {name} = {value}; (void){name};" for name, value in values.items())
    prints = "".join(f'printf("%lld\\n", (long long)({in_c(n)}));' for n in made)
    checks = "".join(f'printf("%d\\n", {guard_in_c(guard)});' for guard in trace.guards)
    source = tmp_path / "it.c"
    source.write_text(
        f"#include <stdint.h>\n#include <stdio.h>\n{helpers}\nint main(void) {{{variables}{prints}{checks}return 0;}}\n"
    )
    subprocess.run(["cc", str(source), "-o", str(tmp_path / "it")], check=True)
    lines = subprocess.run([tmp_path / "it"], capture_output=True, text=True, check=True).stdout.split()
    assert [int(n) for n in lines[: len(made)]] == [int(n) for n in made]
    assert lines[len(made) :] == ["1"] * len(trace.guards)
    assert len(trace.guards) == 3


def test_what_holds_for_all_sizes_is_no_guard() -> None:
    trace, sizes = traced({"a": 5, "b": 7, "c": 1})
    a, b = sizes["a"], sizes["b"]
    assert not a < 1
    assert a * b > 0
    assert a + 1 != a
    assert a - b == a - b
    assert 2 * a // 2 == a
    assert not a >= 2**31
    assert not trace.guards
    assert a < b
    assert list(trace.guards) == [Guard(terms_of(a - b), "<", True)]


def test_divisors() -> None:
    _, sizes = traced({"a": 5, "b": 7, "c": 1})
    assert divisor(terms_of(3 * 64 * sizes["a"] + 32 * sizes["b"])) == 32
    assert divisor(terms_of(-(-sizes["a"] // 128) * 256)) == 256


def test_a_fixed_size_is_guarded() -> None:
    trace, sizes = traced({"a": 5, "b": 7, "c": 1})
    assert type(fixed(sizes["a"])) is int
    assert [guard.met({"a": 5}) for guard in trace.guards] == [True]
    assert [guard.met({"a": 6}) for guard in trace.guards] == [False]


def test_widths_are_not_to_be_had() -> None:
    _, sizes = traced({"a": 5, "b": 7, "c": 1})
    assert isinstance(sizes["a"], Size)
    with pytest.raises(TypeError, match="width"):
        sizes["a"].bit_length()


def test_a_guard_is_turned_by_the_nearest_sizes_and_by_multiples() -> None:
    trace, sizes = traced({"a": 100, "b": 7})
    assert not sizes["a"] * sizes["b"] > 5000
    assert sizes["a"] % 64 != 0
    larger, whole = trace.guards
    assert list(larger.turned({"a": 100, "b": 7}, "a")) == [{"a": 715, "b": 7}]
    assert list(larger.turned({"a": 100, "b": 7}, "b")) == [{"a": 100, "b": 51}]
    assert list(whole.turned({"a": 100, "b": 7}, "a")) == [{"a": 128, "b": 7}]
    assert not list(whole.turned({"a": 100, "b": 7}, "b"))
