"""Writes the table in docs/families.md and hf_kvcaches/cli/families.csv from what the suite of all architectures found.

    FAMILY_RESULTS=.families/results.jsonl pytest tests/families    # every architecture of transformers with every cache
    python scripts/family_table.py .families/results.jsonl

The script fails where a cache does: with a wrong answer, or with an error that is none of this package's.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from shared import ROOT
from shared.cli import arguments, run_script

from hf_kvcaches.cli.tables import write_csv

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
Outcome = dict[str, str]  # family, cache, scenario, verdict, detail


@dataclass(frozen=True)
class Answer:
    """What a cache does for a family."""

    verdict: str  # "yes", "no", "-" for nothing to ask, or "**fails**"
    refusals: tuple[tuple[str, tuple[str, ...]], ...] = ()  # each reason, and the uses that are refused for it

    def text(self, cite: Callable[[str], str]) -> str:
        """A cell of a table; `cite` says how a reason is written."""
        if self.verdict == "no":
            return f"no ({', '.join(cite(reason) for reason, _ in self.refusals)})"
        if self.refusals:
            return f"{self.verdict}, but " + "; ".join(f"no {', '.join(uses)} ({cite(reason)})" for reason, uses in self.refusals)
        return self.verdict


Answers = dict[str, tuple[Answer, ...]]  # by family, in the order of SHOWN


def answers(outcomes: Iterable[Outcome]) -> Answers:
    by_family: dict[str, dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        by_family[outcome["family"]][outcome["cache"]].append(outcome)
    return {
        family: tuple(answer([outcome for name in names for outcome in caches[name]]) for names in SHOWN.values())
        for family, caches in by_family.items()
    }


def fails(outcome: Outcome) -> bool:
    return outcome["verdict"] in ("wrong", "error")


def answer(outcomes: list[Outcome]) -> Answer:
    """The outcomes of one cell."""
    if any(map(fails, outcomes)):
        return Answer("**fails**")
    asked = [outcome for outcome in outcomes if outcome["scenario"] in CALLED and outcome["verdict"] != "absent"]
    refused: dict[str, list[str]] = defaultdict(list)
    for outcome in asked:
        if outcome["verdict"] == "refused":
            refused[general(outcome["detail"])].append(CALLED[outcome["scenario"]])
    if not asked:
        return Answer("-")
    verdict = "no" if all(outcome["verdict"] == "refused" for outcome in asked) else "yes"
    return Answer(verdict, tuple((reason, tuple(uses)) for reason, uses in refused.items()))


def general(reason: str) -> str:
    """A refusal without what differs from family to family."""
    named = re.sub(r"\b[A-Z]\w*(ForCausalLM|ForConditionalGeneration|LMHeadModel|Attention|Decoder|DecoderLayer)\b", "this model", reason)
    named = re.sub(r"\b[0-9a-f]{16,}\b", "...", named)
    return re.sub(r"\b\d+\b", "n", named).replace("|", "\\|")


def rows_of(given: Answers, cite: Callable[[str], str]) -> list[tuple[tuple[str, ...], list[str]]]:
    """The cells of each row and its families; rows with the most families first."""
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for family, cells in given.items():
        rows[tuple(cell.text(cite) for cell in cells)].append(family)
    return sorted(rows.items(), key=lambda row: -len(row[1]))


def table(given: Answers, left_out: dict[str, str]) -> list[str]:
    """Lines of Markdown: families that get the same share a row."""
    notes: dict[str, int] = {}
    rows = rows_of(given, lambda reason: str(notes.setdefault(reason, len(notes) + 1)))
    lines = [f"| Families | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 1) + "|"]
    lines += [f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(cells)} |" for cells, names in rows]
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
    rows = rows_of(given, lambda reason: reason)
    return [{"families": " ".join(names), **dict(zip(columns, cells, strict=True))} for cells, names in rows]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("results", type=Path, help="JSON lines of the suite; the last one of a family, cache and scenario counts")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table stands, between its marks")
    parser.add_argument("--support", type=Path, default=SUPPORT, help="the same table for `hf-kvcaches recommend`")
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.results.read_text(encoding="utf-8").splitlines()]
    lines.sort(key=lambda row: ("+" in row["family"], "@" in row["family"], row["family"]))
    outcomes = list({(row["family"], row["cache"], row["scenario"]): row for row in lines}.values())
    left_out = {row["family"]: row["detail"] for row in outcomes if row["verdict"] == "left out"}
    outcomes = [row for row in outcomes if row["verdict"] != "left out"]
    given = answers(outcomes)
    before, _, rest = args.page.read_text(encoding="utf-8").partition(BEGIN)
    shown = "\n".join([before + BEGIN, "", *table(given, left_out), "", END + rest.partition(END)[2]])
    args.page.write_text(shown, encoding="utf-8")
    write_csv(args.support, support_rows(given))
    failures = [f"{row['family']}: {row['cache']}, {row['scenario']}: {row['verdict']}: {row['detail']}" for row in filter(fails, outcomes)]
    print(*failures, f"{len(given)} families, {len(failures)} failures", sep="\n")
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    run_script(main)
