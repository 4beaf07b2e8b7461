"""Runs every architecture of transformers with every cache, and writes the table in docs/families.md and hf_kvcaches/cli/families.csv.

    python scripts/family_table.py [--jobs 2]               all families, all caches; goes on where it was interrupted
    python scripts/family_table.py --families llama gpt2    some of them; the table stays as it is
    python scripts/family_table.py --write                  the table, from the results that are there

Results are JSON lines in `.families/`, one file for each version of transformers; `--fresh` starts anew, as is needed after a change.
The script fails where a cache does: with a wrong answer, or with an error that is none of this package's.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers
from _family_table import PAGE, SUPPORT, answers, support_rows, table, write_between
from shared import ROOT
from shared.cli import arguments, run_script
from shared.results import write_csv

from tests.families.caches import KINDS
from tests.families.models import Family, families
from tests.families.outcomes import Outcome, as_dict, outcomes
from tests.families.special import LEFT_OUT

Job = tuple[Family, list[str]]
# JSON lines, one file for each version of transformers.
RESULTS = ROOT / ".families" / f"{transformers.__version__}.jsonl"


def read(results: Path) -> Iterator[Outcome]:
    """The results in a file."""
    if results.exists():
        yield from (Outcome(**json.loads(line)) for line in results.read_text(encoding="utf-8").splitlines())


def run(families: Iterable[Family], caches: Sequence[str], results: Path, jobs: int) -> None:
    """Runs what has no results yet; each family's are written at once, so that an interrupted run goes on where it was."""
    done = {(outcome.family, outcome.cache) for outcome in read(results)}
    todo = [(family, missing) for family in families if (missing := [name for name in caches if (family.name, name) not in done])]
    for (family, _), found in zip(todo, _all_of(todo, jobs), strict=True):
        with results.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(as_dict(outcome)) + "\n" for outcome in found)
        print(family.name, "fails" if any(outcome.fails for outcome in found) else "holds", flush=True)


def _all_of(todo: Sequence[Job], jobs: int) -> Iterator[list[Outcome]]:
    if jobs == 1:
        _be_quiet()
        yield from map(_of_family, todo)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_be_quiet) as pool:
        yield from pool.map(_of_family, todo)


def _be_quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)


def _of_family(job: Job) -> list[Outcome]:
    family, caches = job
    return outcomes(family, [kind for kind in KINDS if kind.name in caches])


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
        given = answers(found)
        write_between(options.page, table(given, LEFT_OUT))
        write_csv(options.support, support_rows(given))
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
    parser.add_argument("--support", type=Path, default=SUPPORT, help="the same table for `hf-kvcaches recommend`")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--write", action="store_true", help="run nothing, write the table")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
