"""A device that nothing here runs on is named, with the remedy, at every front door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile import InvalidProblem
from flashtile.torch.execute import bound as executor


@pytest.mark.parametrize("device", ["mps", "xpu:1"])
def test_a_device_that_nothing_runs_on_is_named_with_the_remedy(device: str) -> None:
    with pytest.raises(InvalidProblem, match=rf"a tensor is on {device}; it must be on cpu or cuda \(move it: \.cpu\(\)\)"):
        executor.device_of(torch.device(device))


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_every_front_door_names_it(device: str) -> None:
    """Tensors without memory stand for those of a machine that is not here."""
    with FakeTensorMode():
        q, pool = torch.empty(2, 1, 2, 32, device=device), torch.empty(4, 4, 2, 32, device=device)
        used = torch.empty(2, dtype=torch.int32, device=device)
        calls: dict[str, Callable[[], Any]] = {
            "q": lambda: flashtile.attention(q, q, q),
            "q of a cache": lambda: flashtile.attention_cached(q, pool, pool, seqused_k=used),
            "k": lambda: flashtile.append_to_cache(q, q, pool, pool.clone(), seqused_k=used),
            "x": lambda: flashtile.ops.softmax(q),
            "q of explain": lambda: flashtile.explain(q, q, q),
        }
        for name, call in calls.items():
            with pytest.raises(InvalidProblem, match=rf"^{name.partition(' ')[0]} is on {device}:0; it must be on cpu or cuda"):
                call()
