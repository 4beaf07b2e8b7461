"""Writes the tables of README.md and of the guides from the measurements in docs/benchmarks.

    python scripts/docs_tables.py            rewrite every table
    python scripts/docs_tables.py --check    only say which tables are out of date, and fail if one is

A table stands between `<!-- table NAME: begin -->` and `<!-- table NAME: end -->`; `_docs_tables.py` has a function for each name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from _docs_tables import TABLES

ROOT = Path(__file__).resolve().parents[1]
_MARKED = re.compile(r"(<!-- table ([\w-]+): begin -->\n).*?(<!-- table \2: end -->)", flags=re.DOTALL)


def pages() -> list[Path]:
    """The pages that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def renewed(text: str, tables: dict[str, Callable[[], str]] = TABLES) -> str:
    """A page's text with its tables as they are measured now."""
    return _MARKED.sub(lambda match: f"{match[1]}\n{tables[match[2]]()}\n\n{match[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is out of date")
    check = parser.parse_args().check
    stale = [page for page in pages() if renewed(text := page.read_text(encoding="utf-8")) != text]
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'out of date' if check else 'written'}")
        if not check:
            page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
    if check and stale:
        raise SystemExit("Run python scripts/docs_tables.py")


if __name__ == "__main__":
    main()
