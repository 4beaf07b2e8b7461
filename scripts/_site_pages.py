"""Pages of the documentation site whose source lies outside of docs/: a hook of mkdocs, named in mkdocs.yml.

README.md is the site's first page; the changelog, the guide for contributors and the licence are further ones. Links are written for a
checkout (`docs/equip.md` in README.md, `../README.md` in docs/equip.md) and are rewritten here to the site's own addresses.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

# File of the repository -> page of the site.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "LICENSE": "license.md"}
_LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose source is outside of docs/."""
    root = posixpath.dirname(config.config_file_path)
    for source, page in PAGES.items():
        with open(posixpath.join(root, source), encoding="utf-8") as file:
            text = file.read()
        content = text if source.endswith(".md") else f"# {source.capitalize()}\n\n```text\n{text}```\n"
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between docs/ and the rest of the repository."""
    return rewritten(markdown, page.file.src_uri)


def rewritten(markdown: str, page: str) -> str:
    """A page's text with links to files of the repository as links within the site.

    Args:
        page: The page's address in the site's sources, such as `guides/serving.md`.
    """
    sources = {site_page: source for source, site_page in PAGES.items()}
    source = sources.get(page, f"docs/{page}")

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        site_target = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if site_target is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(site_target, posixpath.dirname(page) or '.')}{match[3]}"

    return _LINK.sub(link, markdown)
