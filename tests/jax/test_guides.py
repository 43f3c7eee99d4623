"""The code of tutorials and guides that begins with "# needs JAX" runs, and what it computes is right."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashtile.jax import dot_product_attention, target
from flashtile.jax.launch import HANDLER
from tests.docs_code import ROOT, blocks

FOUND = [
    (str(page.relative_to(ROOT)), block)
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for block in blocks(str(page.relative_to(ROOT)))
    if block.startswith("# needs JAX")
]


def ran(block: str, folder: Path) -> dict[str, Any]:
    (folder / "block.py").write_text(block)  # Triton reads sources from files
    return runpy.run_path(str(folder / "block.py"))


@pytest.mark.parametrize(("page", "block"), FOUND, ids=[page for page, _ in FOUND])
def test_a_block_runs(page: str, block: str, tmp_path: Path) -> None:
    assert ran(block, tmp_path)


def test_the_learned_modifier_has_the_gradient_of_its_formula(tmp_path: Path) -> None:
    (block,) = (block for page, block in FOUND if page == "docs/tutorials/modifier.md")
    there = ran(block, tmp_path)
    q, k, v = there["q"], there["k"], there["v"]
    rows = jnp.arange(q.shape[1])

    def plain(strength: jax.Array) -> jax.Array:
        scores = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") / q.shape[-1] ** 0.5
        scores -= strength[:, None, None] * jnp.log1p(jnp.abs(rows[:, None] - rows))
        weights = jax.nn.softmax(jnp.where(rows[:, None] >= rows, scores, -jnp.inf), -1)
        return (jnp.einsum("bhij,bjhd->bihd", weights, v, precision="highest") ** 2).sum()

    np.testing.assert_allclose(there["dstrength"], jax.grad(plain)(jnp.array([0.5, 0.1])), rtol=1e-4)


def test_its_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    (block,) = (block for page, block in FOUND if page == "docs/tutorials/modifier.md")
    modifier = ran(block, tmp_path)["NearbyHeads"]

    def loss(strength: jax.Array, q: jax.Array) -> jax.Array:
        return dot_product_attention(q, q, q, is_causal=True, score=(modifier(strength),)).astype(jnp.float32).sum()

    given = jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((1, 64, 2, 32), jnp.bfloat16)
    check = jax.export.DisabledSafetyCheck.custom_call(HANDLER)
    with target("sm80"):
        made = jax.export.export(jax.jit(jax.grad(loss)), platforms=["cuda"], disabled_checks=[check])(*given)
    assert HANDLER in made.mlir_module()
