"""Runs every architecture of transformers with every cache, and writes the table in docs/families.md.

    python scripts/family_table.py [--jobs 2]               all families, all caches; goes on where it was interrupted
    python scripts/family_table.py --families llama gpt2    some of them; the table stays as it is
    python scripts/family_table.py --write                  the table, from the results that are there

Results are JSON lines in `.families/`, one file for each version of transformers; `--fresh` starts anew, as is needed after a change.
The script fails where a cache does: with a wrong answer, or with an error that is none of this package's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from _family_runs import RESULTS, read, run
from _family_table import PAGE, table, write_between
from shared.cli import arguments, run_script

from tests.families.caches import KINDS
from tests.families.models import families
from tests.families.special import LEFT_OUT


def main() -> None:
    options = parse_arguments()
    wanted = [f for f in families() if f.name not in LEFT_OUT and f.name in (options.families or [f.name])]
    caches = options.caches or [kind.name for kind in KINDS]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        options.results.unlink(missing_ok=True)
    if not options.write:
        run(wanted, caches, options.results, options.jobs)
    names = {family.name for family in wanted}
    found = [outcome for outcome in read(options.results) if outcome.family in names and outcome.cache in caches]
    if not options.families and not options.caches:
        write_between(options.page, table(found, LEFT_OUT))
    failures = [f"{o.family}: {o.cache}, {o.scenario}: {o.verdict}: {o.detail}" for o in found if o.fails]
    print(*failures, f"{len({outcome.family for outcome in found})} families, {len(failures)} failures", sep="\n")
    if failures:
        raise SystemExit(1)


def parse_arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--families", nargs="+", metavar="NAME", help="names as in the table; all if left out")
    parser.add_argument("--caches", nargs="+", choices=[kind.name for kind in KINDS], help="all if left out")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each on one thread")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table stands, between its marks")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--write", action="store_true", help="run nothing, write the table")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
