"""What transformers takes positions for, which docs/pytorch.md tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from flashtile.integrations.transformers import register
from tests.integrations.test_transformers import OPTIONS, models, tokens


@pytest.mark.parametrize("positions", [[*range(5), *range(7)], [*range(5), *range(50, 57)]], ids=["anew", "a gap"])
@pytest.mark.parametrize(
    ("given", "hides"),
    [
        ({"use_cache": False}, True),
        ({}, False),
        ({"use_cache": False, "attention_mask": torch.ones(2, 12, dtype=torch.long)}, False),
    ],
    ids=["no cache", "a cache", "a mask of ones"],
)
def test_positions_hide_what_the_docs_say(positions: list[int], given: dict[str, Any], hides: bool) -> None:
    """Any step but one begins a sequence where there is no cache and no mask, in eager and here; elsewhere none does."""
    register(options=OPTIONS)
    ids = tokens()
    others = ids.clone()
    others[:, :5] = ids[:, :5].flip(1)
    for model in models("qwen"):
        with torch.no_grad():
            one, other = (model(input_ids=x, position_ids=torch.tensor([positions] * 2), **given).logits for x in (ids, others))
        assert torch.equal(one[:, 5:], other[:, 5:]) == hides
