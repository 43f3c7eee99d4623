"""Docstrings as the site shows them: what they say of arguments, line by line, becomes a list. griffe calls this."""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"(\*{0,2}\w+(?:(?:, | and )\w+)*(?: = [^:]*)?): ")


class Lists(griffe.Extension):
    """Rewrites each docstring as it is loaded."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    """The text with "name: what it is" lines, and those indented below them, as items of a list."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if found := ARGUMENT.match(line):
            lines += [] if inside else [""]
            lines.append(f"- `{found[1]}`: {line[found.end() :]}")
            inside = True
        elif inside and line.startswith("    "):
            lines.append("  " + line.strip())
        else:
            lines += [""] if inside and line.strip() else []
            lines.append(line)
            inside = False
    return "\n".join(lines)
