"""Every block of code of docs/jax.md and docs/answers/jax.md runs, but those that want PyTorch beside JAX."""

from __future__ import annotations

import pytest

from tests.docs_code import blocks, given_jax, inline, look_up, run

PAGES = ("docs/jax.md", "docs/answers/jax.md")


@pytest.mark.parametrize(("page", "index"), [(page, index) for page in PAGES for index in range(len(blocks(page)))])
def test_a_block_runs(page: str, index: int) -> None:
    assert run(blocks(page)[index], given_jax) in ("ran", "needs torch")


@pytest.mark.parametrize("page", PAGES)
def test_names_are_there(page: str) -> None:
    told = [look_up(text) for text in inline(page)]
    assert not [line for line in told if line.startswith("needs ") and line != "needs torch"]
