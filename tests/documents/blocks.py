"""Code blocks of the documents: found, and run in the order of the text."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """One block of code."""

    language: str
    line: int  # of the document, where the code begins
    code: str


def documents() -> list[Path]:
    """All documents for users and contributors."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(document: Path, language: str) -> Iterator[Block]:
    """The blocks of a document in one language."""
    text = document.read_text(encoding="utf-8")
    for match in _FENCED.finditer(text):
        if match[1] == language:
            yield Block(language, text.count("\n", 0, match.start()) + 2, match[2])


def missing_outputs(document: Path, printed: str) -> list[str]:
    """The `output` blocks of a document that were not printed when its code ran."""
    return [block.code for block in blocks(document, "output") if block.code.strip() not in printed]


def run(document: Path, name: str = "reader") -> dict[str, Any]:
    """Run the Python blocks of a document one after the other, as one module, and return its names."""
    module = sys.modules[name] = ModuleType(name)
    try:
        for block in blocks(document, "python"):
            # Blank lines before the code let a traceback name the document's own line.
            exec(compile("\n" * (block.line - 1) + block.code, str(document), "exec"), module.__dict__)
    finally:
        del sys.modules[name]
    return module.__dict__
