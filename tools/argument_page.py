"""docs/reference/arguments.md: signatures and docstrings of the calls that most people make, as the code has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import flashtile

CALLS: tuple[Callable[..., Any], ...] = (
    flashtile.attention,
    flashtile.attention_varlen,
    flashtile.attention_cached,
    flashtile.append_to_cache,
    flashtile.quantize,
    flashtile.Blocks.build,
    flashtile.Blocks.from_block_mask,
    flashtile.explain,
)


def page() -> str:
    """The page."""
    parts = [
        "# Arguments",
        "",
        "Of the calls that most people make, as the code has them. The site (`make site`) has the whole API, and",
        "`help(flashtile.attention)` prints the same.",
    ]
    for call in CALLS:
        told = (inspect.getdoc(call) or "").splitlines()
        parts += ["", f"## flashtile.{call.__qualname__}", "", "```text", *signature(call), "```"]
        parts += ["", f"### What {call.__qualname__} takes and returns", "", "```text", *told, "```"]
    return "\n".join([*parts, ""])


def signature(call: Callable[..., Any]) -> list[str]:
    """An argument a line, with its default."""
    lines, named = [f"{call.__qualname__}("], False
    for parameter in inspect.signature(call).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            lines.append("    *,")
            named = True
        star = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"    {star}{parameter.name}: {parameter.annotation}{default},")
    return [*lines, ")"]
