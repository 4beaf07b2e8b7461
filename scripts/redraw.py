"""Draws the pictures of docs/benchmarks from the committed files again, without measuring anything.

    python scripts/redraw.py [--folder docs/benchmarks] [--only equip-cpu real]

A picture has the name of its file, or of the files of several models: `real-*.csv`. What has no rows yet is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import bench_equip
import eval_pruning
import eval_real
from shared import ROOT
from shared.cli import arguments, run_script
from shared.plot import Panel, draw, title_from
from shared.results import Row, read_csv

# The file's name, what is drawn of its rows, and the title behind the name of the computer.
PICTURES: dict[str, tuple[Callable[[Sequence[Row]], list[Panel]], str]] = {
    "equip-cpu": (bench_equip.panels, bench_equip.PICTURE),
    "pruning": (eval_pruning.panels, eval_pruning.PICTURE),
    "real": (eval_real.panels, eval_real.PICTURE),
}


def rows_of(name: str, folder: Path) -> list[Row]:
    """The rows of a picture."""
    paths = [folder / f"{name}.csv", *sorted(folder.glob(f"{name}-*.csv"))]
    return [row for path in paths if path.exists() for row in read_csv(path)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "benchmarks", help="of the files")
    parser.add_argument("--only", nargs="+", choices=list(PICTURES), default=list(PICTURES))
    args = parser.parse_args()
    for name in args.only:
        rows, path = rows_of(name, args.folder), args.folder / f"{name}.png"
        if rows:
            panels, title = PICTURES[name]
            computers = dict.fromkeys(title_from(row, "").removesuffix(": ") for row in rows)
            draw(path, f"{'; '.join(computers)}: {title}", panels(rows))
            print(path)


if __name__ == "__main__":
    run_script(main)
