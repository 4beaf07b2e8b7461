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
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers
from shared import ROOT
from shared.cli import arguments, run_script
from shared.results import write_csv

from tests.families.caches import KINDS
from tests.families.models import Family, families
from tests.families.outcomes import Outcome, as_dict, outcomes
from tests.families.special import LEFT_OUT

PAGE = ROOT / "docs" / "families.md"
SUPPORT = ROOT / "hf_kvcaches" / "cli" / "families.csv"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
# Columns of the table, and the runs that each sums up.
SHOWN = {
    "GrowingCache": ("growing",),
    "EquipCache": ("equip", "equip_scored"),
    '... positions="original"': ("equip_original",),
    "SubspaceCache": ("subspace",),
    '... rotation="post"': ("subspace_post",),
    "... adaptive": ("subspace_adaptive",),
    "SegmentReuseCache, exact": ("segments",),
    "... moved segments": ("segments_moved",),
    "WarmStartCache": ("warmstart",),
    "TranslatedCache": ("translated",),
}
# What each scenario that a cache may refuse alone is called.
CALLED = {
    "single": "one prompt",
    "padded": "padded batches",
    "second": "later requests",
    "chunks": "chunked prefill",
    "chat": "chats",
    "beams": "beams",
    "lookup": "prompt lookup",
    "loop": "a loop of your own",
    "moved": "moved segments",
    "pruned": "eviction",
}


@dataclass(frozen=True)
class Answer:
    """What a cache does for a family.

    Args:
        verdict: "yes", "no", "-" for nothing to ask, or "**fails**".
        refusals: Each reason, and the uses that are refused for it.
    """

    verdict: str
    refusals: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def text(self, cite: Callable[[str], str]) -> str:
        """A cell of a table.

        Args:
            cite: How a reason is written.
        """
        if self.verdict == "no":
            return f"no ({', '.join(cite(reason) for reason, _ in self.refusals)})"
        if self.refusals:
            return f"{self.verdict}, but " + "; ".join(f"no {', '.join(uses)} ({cite(reason)})" for reason, uses in self.refusals)
        return self.verdict


Answers = dict[str, tuple[Answer, ...]]  # by family, in the order of SHOWN


def answers(found: Iterable[Outcome]) -> Answers:
    by_family: dict[str, dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for outcome in found:
        by_family[outcome.family][outcome.cache].append(outcome)
    return {
        family: tuple(answer([outcome for name in names for outcome in caches[name]]) for names in SHOWN.values())
        for family, caches in by_family.items()
    }


def answer(found: list[Outcome]) -> Answer:
    """The outcomes of one cell."""
    if any(outcome.fails for outcome in found):
        return Answer("**fails**")
    asked = [outcome for outcome in found if outcome.scenario in CALLED and outcome.verdict != "absent"]
    refused: dict[str, list[str]] = defaultdict(list)
    for outcome in asked:
        if outcome.verdict == "refused":
            refused[_reason(outcome.detail)].append(CALLED[outcome.scenario])
    if not asked:
        return Answer("-")
    verdict = "no" if all(outcome.verdict == "refused" for outcome in asked) else "yes"
    return Answer(verdict, tuple((reason, tuple(uses)) for reason, uses in refused.items()))


def table(given: Answers, left_out: dict[str, str]) -> list[str]:
    """Lines of Markdown: families that get the same share a row."""
    notes: dict[str, int] = {}
    rows = _rows(given, lambda reason: str(notes.setdefault(reason, len(notes) + 1)))
    lines = [f"| Families | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 1) + "|"]
    for cells, names in rows:
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(cells)} |")
    lines += ["", f"{len(given)} families. A number is the reason why it is refused:", ""]
    lines += [f"{number}. {note}" for note, number in notes.items()]
    reasons: dict[str, list[str]] = defaultdict(list)
    for family, why in left_out.items():
        reasons[why].append(f"`{family}`")
    lines += ["", "Not run, because they don't write text with a `DynamicCache`:", ""]
    return lines + [f"- {', '.join(names)}: {why}" for why, names in reasons.items()]


def support_rows(given: Answers) -> list[dict[str, str]]:
    """The same as rows of a CSV file, with the reasons themselves; names of families are separated by spaces."""
    columns: list[str] = []
    for name in SHOWN:
        columns.append(name.replace("...", f"{columns[-1].partition(',')[0]},") if name.startswith("...") else name)
    rows = _rows(given, lambda reason: reason)
    return [{"families": " ".join(names), **dict(zip(columns, cells, strict=True))} for cells, names in rows]


def _rows(given: Answers, cite: Callable[[str], str]) -> list[tuple[tuple[str, ...], list[str]]]:
    """The cells of each row and its families; rows with the most families first."""
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for family, cells in given.items():
        rows[tuple(cell.text(cite) for cell in cells)].append(family)
    return sorted(rows.items(), key=lambda row: -len(row[1]))


def _reason(detail: str) -> str:
    """A refusal without what differs from family to family."""
    named = re.sub(r"\b[A-Z]\w*(ForCausalLM|ForConditionalGeneration|LMHeadModel|Attention|Decoder|DecoderLayer)\b", "this model", detail)
    named = re.sub(r"\b[0-9a-f]{16,}\b", "...", named)
    return re.sub(r"\b\d+\b", "n", named).replace("|", "\\|")


def write_between(page: Path, lines: Iterable[str]) -> None:
    """Puts the table between its marks in a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]), encoding="utf-8")


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
