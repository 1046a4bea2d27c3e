"""Hooks for `mkdocs`, to build a site from files that are also read in the repository: pages and links outside
docs/.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: Pages at the repository's root that are part of the site.
PAGES = ("CONTRIBUTING.md",)
_DOTTED = re.compile(r"<code>((?:\w+\.){2,}\w+)</code>")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages at the root."""
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links between docs/ and the root lead to the site's pages; others become text, with the path of a page."""
    here = page.file.src_uri
    folder = "" if here in PAGES else normpath(f"docs/{dirname(here)}")

    def rewritten(link: re.Match[str]) -> Any:
        text, path, anchor = link[1], normpath(f"{folder}/{link[2]}".lstrip("/")), link[3] or ""
        target = path.removeprefix("docs/") if path.startswith("docs/") else path if path in PAGES else None
        if path == "README.md":
            target = "README.md"
        if target is None:
            return text if text.strip("`") == path or not path.endswith(".md") else f"{text} (`{path}`)"
        return f"[{text}]({relpath(target, dirname(here) or '.')}{anchor})"

    return _LINK.sub(rewritten, markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let long dotted names break after their dots: they would make a column of a table wider than the others."""
    return _DOTTED.sub(lambda name: f"<code>{name[1].replace('.', '.<wbr>')}</code>", html)
