"""What a score modifier is called, and what a tensor that its formula captures may be."""

from __future__ import annotations

import re

import pytest

from flashtile import Captured, Score, Softcap
from flashtile.problem.score import SCORES


def test_a_captured_tensor_is_indexed_or_broadcast() -> None:
    with pytest.raises(TypeError, match="a captured tensor has an index or is broadcast, not both"):
        Captured(abs, index=abs, broadcast=True)


@pytest.mark.parametrize("name", ["", "two words", "1st", "a-b"])
def test_a_modifier_without_a_proper_name(name: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"Nameless.name is {name!r}; a score modifier's name must be an identifier")):
        type("Nameless", (Score,), {"name": name})


def test_a_modifier_with_another_s_name() -> None:
    with pytest.raises(
        TypeError, match=re.escape("Impostor.name is 'softcap', which flashtile.features.scores.softcap.Softcap has")
    ):
        type("Impostor", (Score,), {"name": "softcap"})
    assert SCORES.named("softcap") is Softcap
