"""Every public name stands on an API page of the site."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from flashtile.compat.trees import TREES
from tools import api_pages

ROOT = Path(__file__).parent.parent
TEXTS = api_pages.pages()
SHOWN = {name for text in TEXTS.values() for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}
# Modules of flashtile.compat that others are made of: nobody imports from them.
INNER = {
    "asked", "descale", "device_code", "device_text", "flash_attn_cache", "flashinfer_asked", "flashinfer_pages",
    "flashinfer_states", "probabilities", "scalar_score", "score_mod", "trees",
}  # fmt: skip


@pytest.mark.parametrize("package", ["flashtile", "flashtile.distributed", "flashtile.nn", "flashtile.ops", "flashtile.compat"])
def test_every_public_name_is_shown(package: str) -> None:
    names = import_module(package).__all__
    assert len(names) > 1
    assert {f"{package}.{name}" for name in names} - SHOWN == set()


def test_every_public_name_of_jax_is_shown() -> None:
    """Read as text: JAX is in another environment. `flax` is a module, whose function is shown."""
    names = set[str]()
    for module in ("__init__", "flax"):
        (listed,) = re.findall(r"__all__ = \[(.*?)\]", (ROOT / "flashtile" / "jax" / f"{module}.py").read_text(), re.DOTALL)
        names |= {
            ("flashtile.jax." if module == "__init__" else "flashtile.jax.flax.") + n for n in re.findall(r'"(\w+)"', listed)
        }
    assert len(names) > 15
    assert names - SHOWN == {"flashtile.jax.flax"}


@pytest.mark.parametrize("library", TREES)
def test_every_name_that_install_gives_is_shown_or_named(library: str) -> None:
    for sources in TREES[library].values():
        for home, names in sources:
            (page,) = (page for page, (_, modules) in api_pages.COMPAT.items() if home in modules)
            (section,) = re.findall(rf"^## `flashtile.compat.{home}`$(.*?)(?=^## |\Z)", TEXTS[page], re.MULTILINE | re.DOTALL)
            for name in (entry.rpartition("=")[2].partition(".")[0] for entry in names):
                assert f"::: flashtile.compat.{home}.{name}\n" in section or f"`{name}`" in section, f"{home}.{name}"


def test_every_module_of_compat_is_on_a_page_or_inner() -> None:
    modules = {path.stem for path in (ROOT / "flashtile" / "compat").glob("*.py")} - {"__init__"}
    shown = [module for _, named in api_pages.COMPAT.values() for module in named]
    assert len(shown) == len(set(shown)), "one page for each"
    assert modules == INNER | set(shown)
    assert not INNER & set(shown)


def test_what_the_documentation_calls_is_shown() -> None:
    """`flashtile.compat.x.y`, `flashtile.integrations.x.y`, and what blocks of code import from them."""
    found = set[str]()
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]:
        text = path.read_text()
        found |= set(re.findall(r"(flashtile\.(?:compat|integrations)\.[a-z]\w*\.\w+)\(", text))
        for module, names in re.findall(r"from (flashtile\.(?:compat|integrations)\.\w+) import ([\w, ]+)", text):
            found |= {f"{module}.{name.split(' as ')[0].strip()}" for name in names.split(",")}
    assert len(found) > 8
    assert found - SHOWN == set()


def test_every_name_and_member_exists() -> None:
    for name in sorted(SHOWN):
        if name.startswith(("flashtile.jax.", "flashtile.integrations.")):
            continue  # of libraries that may not be here; the site is built strictly
        package, _, last = name.rpartition(".")
        shown = getattr(import_module(package), last)
        assert shown.__doc__ or package.startswith("flashtile.compat"), f"{name} says nothing"
        for member in api_pages.MEMBERS.get(last, ()) if not package.startswith("flashtile.compat") else ():
            assert hasattr(shown, member), f"{name}.{member}"
            assert getattr(shown, member).__doc__ or package == "flashtile.nn", f"{name}.{member} says nothing"


def test_every_page_is_in_the_menu() -> None:
    menu = re.findall(r"reference/([\w-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    written = {path.stem for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert set(menu) - written == TEXTS.keys()
