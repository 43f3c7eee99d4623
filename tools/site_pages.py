"""Pages of the site that are no files in docs: the front page, CONTRIBUTING, CHANGELOG, the API. mkdocs-gen-files runs this."""

from __future__ import annotations

import sys
from pathlib import Path

import mkdocs_gen_files

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import api_pages

ROOT = api_pages.ROOT
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

for source, page in PAGES.items():
    text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
    for other, its_page in PAGES.items():
        text = text.replace(f"]({other})", f"]({its_page})")
    with mkdocs_gen_files.open(page, "w") as file:
        file.write(text)
    mkdocs_gen_files.set_edit_path(page, source)

for page, text in api_pages.pages().items():
    with mkdocs_gen_files.open(f"reference/{page}.md", "w") as file:
        file.write(text)
