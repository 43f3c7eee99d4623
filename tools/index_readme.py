"""README as a package index shows it, where neither its picture nor the files beside it are. hatchling calls this."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class IndexReadme(MetadataHookInterface):
    """Sets `readme`, which pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": alone(text)}


def alone(text: str) -> str:
    """The text without pictures, comments and links to files; what a link says stays."""
    text = re.sub(r"^!\[[^]]*\]\([^)]*\)\n\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r"^<!--.*?-->\n|<!--.*?-->", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
