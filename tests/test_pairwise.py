"""Every two features together, forward and backward, on every backend."""

from __future__ import annotations

import pytest
import torch

from flashtile import dispatch
from flashtile.torch.execute.bound import device_of
from tests.backends import PORTABLE
from tests.cases import Case
from tests.judge import expected, judge, run
from tests.pairwise import AXES, TABLE, cases, choices, pairs_of
from tests.test_attention import problem_of

COUNT = 320


def test_every_pair_is_covered() -> None:
    covered = {pair for choice in choices(COUNT) for pair in pairs_of(choice)}
    assert covered >= TABLE.pairs()
    assert all(any((axis, name) in pair for pair in covered) for axis, names in AXES.items() for name in names)


@pytest.mark.parametrize("case", cases(COUNT), ids=lambda case: case.name)
@pytest.mark.parametrize("backend", list(PORTABLE))
def test_pair(backend: str, place: torch.device, case: Case) -> None:
    tensors = case.tensors(place)
    arguments, options = {**case.given(tensors), **case.masks(place)}, case.options(backend)
    problem = problem_of(case, [tensors[name] for name in "qkv"], arguments, options)
    reasons = dispatch.backend_named(backend).unsupported(problem, device_of(place), case.backward)
    if reasons:
        assert case.backward in PORTABLE[backend], reasons
        return
    judge(case, run(backend, case, tensors), *expected(case, tensors))
