"""Every block of code of docs/jax.md runs, but those that want PyTorch beside JAX."""

from __future__ import annotations

import pytest

from tests.docs_code import blocks, given_jax, inline, look_up, run


@pytest.mark.parametrize("index", range(len(blocks("docs/jax.md"))))
def test_a_block_runs(index: int) -> None:
    assert run(blocks("docs/jax.md")[index], given_jax) in ("ran", "needs torch")


def test_names_are_there() -> None:
    told = [look_up(text) for text in inline("docs/jax.md")]
    assert not [line for line in told if line.startswith("needs ") and line != "needs torch"]
