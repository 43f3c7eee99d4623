"""What mkdocs calls for every page and in the end: links to files that are no pages, and what pages load from servers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

RECORDS = ("lab/", "changelog.md", "benchmarks.md", "benchmarks/", "goals.md")
NO_PAGE = re.compile(
    r"\[([^]]*)\]\((?:\.\./)*(?:\.github|(?:examples|tests|flashtile|tools|benchmarks(?!/[\w-]+\.md))(?=[/)]))[^)]*\)"
)
LOADED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)\s*=\s*["']?((?:https?:)?//[^"'\s>]+)""")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page's text; its links lead to pages alone, and the search puts records behind pages for users."""
    if page.file.src_uri.startswith(RECORDS):
        page.meta.setdefault("search", {"boost": 0.1})
    if page.file.src_uri.startswith("answers/"):
        page.meta.setdefault("search", {"boost": 4})
    markdown = markdown.replace("](../CONTRIBUTING.md)", "](contributing.md)").replace("](../CHANGELOG.md", "](changelog.md")
    markdown = markdown.replace("](../../CHANGELOG.md", "](../changelog.md").replace("](../../README.md", "](../index.md")
    markdown = markdown.replace("](../../CONTRIBUTING.md", "](../contributing.md").replace("](../README.md", "](index.md")
    return NO_PAGE.sub(lambda link: link[1], markdown)


def on_post_build(*, config: Any) -> None:
    """Raise where a page loads something from elsewhere: the site is read without a network, too."""
    told = {
        f"{page.name} loads {url}" for page in Path(config["site_dir"]).rglob("*.html") for url in elsewhere(page.read_text())
    }
    if told:
        raise RuntimeError("; ".join(sorted(told)))


def elsewhere(html: str) -> list[str]:
    """Scripts, styles, pictures and frames that a page gets from a server. Links that a reader may follow are none."""
    return LOADED.findall(html)
