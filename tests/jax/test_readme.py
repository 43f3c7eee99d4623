"""The JAX of README and of its tutorial runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def test_the_readme_s_jax_runs() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (example,) = (block for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if "jax" in block)
    names: dict[str, Any] = {}
    exec(example.replace("2, 1024, 8, 64", "1, 32, 2, 16"), names)
    assert names["dq"].shape == names["dk"].shape == (1, 32, 2, 16)


def test_the_tutorial_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tutorials" / "jax.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(found) == 2
    exec("\n".join(found), {})
