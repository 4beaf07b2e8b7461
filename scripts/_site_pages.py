"""Pages of the documentation site whose source lies outside of docs/: a hook of mkdocs, named in mkdocs.yml.

Links are written for a checkout (`docs/equip.md` in README.md, `../README.md` in docs/equip.md) and are rewritten here to the site's own
addresses; links to other files of the repository become plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# File of the repository -> page of the site.
PAGES = {"README.md": "index.md", "LICENSE": "license.md"}
PAGES |= {f"{name}.md": f"{name.lower()}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")}
_LINK = re.compile(r"\[([^\]\n]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose source is outside of docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        content = text if source.endswith(".md") else f"# {source.capitalize()}\n\n```text\n{text}```\n"
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between docs/ and the rest of the repository."""
    return rewritten(markdown, page.file.src_uri)


def rewritten(markdown: str, page: str) -> str:
    """The text of a page, such as `guides/serving.md`, with the links of the site."""
    source = {site_page: name for name, site_page in PAGES.items()}.get(page, f"docs/{page}")

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.groups(default="")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        site_target = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if site_target is not None:
            return f"[{text}]({posixpath.relpath(site_target, posixpath.dirname(page) or '.')}{anchor})"
        return text if (ROOT / target).exists() else match[0]  # what is nowhere stays, and fails the build

    return _LINK.sub(link, markdown)
