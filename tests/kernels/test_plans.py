"""Plans of drawn problems are told by hashes, which name what a change of planning code changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from flashtile.audit.plans import against, rows, write
from flashtile.kernels.portable.backend import BACKEND as TRITON
from flashtile.kernels.portable.choose import INTERPRETED
from flashtile.kernels.portable.tile import Launch
from flashtile.kernels.sm90.backend import BACKEND as HOPPER
from flashtile.plan.backend import Backend, Gradients
from flashtile.plan.call import Descriptor, KernelCall, Pointer, Strides
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.options import Variant


def test_plans_are_told_again_and_changes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "before.csv"
    made = list(rows(["sm80"], 6, 3))
    assert sum(not row.plan.startswith("refused") for row in made) > 12
    write(made, file)
    assert against(list(rows(["sm80"], 6, 3)), file) == (len(made), [])
    other = replace(made[0], plan="0" * 16)
    assert against([other, *made[1:-1]], file) == (len(made) - 1, [other])
    assert against([replace(made[0], problem="another")], file) == (0, [])
    wider = dict.fromkeys(INTERPRETED, Launch(32, 32))
    monkeypatch.setattr("flashtile.kernels.portable.choose.INTERPRETED", wider)
    compared, changed = against(list(rows(["sm80"], 6, 3)), file)
    assert compared == len(made)
    assert changed
    assert {row.backend for row in changed} == {"triton"}


def named(args: Any) -> Iterator[str]:
    """Buffers that are among arguments."""
    if isinstance(args, (Pointer, Strides, Descriptor)):
        yield args.name
    elif isinstance(args, tuple):
        for arg in args:
            yield from named(arg)


@pytest.mark.parametrize("backend", [HOPPER, TRITON], ids=lambda backend: backend.name)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("rest", ["", ",varlen=16384x16384"])
@pytest.mark.parametrize("grouped", [1, 4])
def test_a_backward_s_calls_take_buffers_that_it_has(
    backend: Backend, head_dims: tuple[int, int], rest: str, grouped: int
) -> None:
    """Whichever gradients are wanted. That of dv alone has a pass of its own in wide heads."""
    dim, dim_v = head_dims
    problem = AttentionProblem.parse(f"attention(q=4x4096x16x{dim},kv=4096x{16 // grouped}x{dim_v},bf16{rest})")
    variants: tuple[Variant, ...] = ("split", "fused")
    for variant in variants:
        for wanted in (some for n in (1, 2, 3) for some in combinations("qkv", n)):
            for wide_keys in (False, True):
                plan = backend.backward(problem, H100, Gradients(frozenset(wanted), wide_keys=wide_keys), variant)
                there = {buffer.name for buffer in plan.buffers}
                for call in plan.calls:
                    taken = set(named(call.args)) if isinstance(call, KernelCall) else set(call.outputs)
                    assert taken <= there, (variant, wanted, wide_keys, taken - there)
