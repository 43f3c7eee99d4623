"""Links of pages to files of the repository that are no pages: what they say stays, the link goes. mkdocs calls this."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page's text; its links lead to pages alone."""
    markdown = markdown.replace("](../CONTRIBUTING.md)", "](contributing.md)").replace(
        "](../../CHANGELOG.md)", "](../changelog.md)"
    )
    return re.sub(r"\[([^]]*)\]\((?:\.\./)+(?:examples|tests|flashtile|benchmarks|tools)\b[^)]*\)|\[([^]]*)\]\(\.github[^)]*\)",
                  lambda link: link[1] or link[2], markdown)  # fmt: skip
