"""What the documents name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"))
    if path.name != "CHANGELOG.md"
)
FOLDERS = ("hf_kvcaches", "scripts", "tests", "docs")
FILES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")} | {path.name for path in ROOT.glob("*.*")}


def cited(text: str) -> set[str]:
    """Files in backticks, and the targets of links within the repository."""
    named = re.findall(r"`([\w./-]+\.(?:py|md|csv|png|json|toml))`", text)
    linked = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    return {*named, *linked}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_file_that_a_document_names_exists(document: Path) -> None:
    roots = (ROOT, ROOT / document.parent, *(ROOT / folder for folder in FOLDERS))
    missing = {
        name
        for name in cited((ROOT / document).read_text())
        if not any((root / name).exists() for root in roots) and ("/" in name or name not in FILES)
    }
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_section_that_a_link_names_exists(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", (ROOT / document).read_text()):
        text = (ROOT / document.parent / target if target else ROOT / document).read_text()
        names = re.findall(r"^::: (\S+)$", text, re.M)  # anchors of the API reference, in the site
        headings = set(names) | {
            re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", text, re.M)
        }
        assert anchor in headings, f"{target}#{anchor}"
