"""Writes the table in docs/families.md and hf_kvcaches/cli/families.csv from what the suite of all architectures found.

    FAMILY_RESULTS=.families/results.jsonl pytest tests/families    # every architecture of transformers with every cache
    python scripts/family_table.py .families/results.jsonl

The script fails where a cache does: with a wrong answer, or with an error that is none of this package's.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
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
Rows = list[tuple[list[str], tuple[str, ...]]]  # families, and what each cache does for them; reasons stand between two REASON
REASON = "\0"


def rows_of(outcomes: Iterable[Outcome]) -> Rows:
    """Families that get the same share a row; rows with the most families first."""
    by_family: dict[str, dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        by_family[outcome["family"]][outcome["cache"]].append(outcome)
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for family, caches in by_family.items():
        rows[tuple(answer([outcome for name in names for outcome in caches[name]]) for names in SHOWN.values())].append(family)
    return sorted(((families, cells) for cells, families in rows.items()), key=lambda row: -len(row[0]))


def fails(outcome: Outcome) -> bool:
    return outcome["verdict"] in ("wrong", "error")


def answer(outcomes: list[Outcome]) -> str:
    """What a cache does for a family."""
    if any(map(fails, outcomes)):
        return "**fails**"
    asked = [outcome for outcome in outcomes if outcome["scenario"] in CALLED and outcome["verdict"] != "absent"]
    refused: dict[str, list[str]] = defaultdict(list)
    for outcome in asked:
        if outcome["verdict"] == "refused":
            refused[f"{REASON}{general(outcome['detail'])}{REASON}"].append(CALLED[outcome["scenario"]])
    if not asked:
        return "-"
    if all(outcome["verdict"] == "refused" for outcome in asked):
        return f"no ({', '.join(refused)})"
    refusals = "; ".join(f"no {', '.join(uses)} ({reason})" for reason, uses in refused.items())
    return f"yes, but {refusals}" if refusals else "yes"


def general(reason: str) -> str:
    """A refusal without what differs from family to family."""
    named = re.sub(r"\b[A-Z]\w*(ForCausalLM|ForConditionalGeneration|LMHeadModel|Attention|Decoder|DecoderLayer)\b", "this model", reason)
    named = re.sub(r"\b[0-9a-f]{16,}\b", "...", named)
    return re.sub(r"\b\d+\b", "n", named).replace("|", "\\|")


def table(rows: Rows, left_out: dict[str, str]) -> list[str]:
    """Lines of Markdown, with numbers for reasons."""
    notes: dict[str, int] = {}
    number = lambda match: str(notes.setdefault(match[1], len(notes) + 1))  # noqa: E731
    lines = [f"| Families | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 1) + "|"]
    for families, cells in rows:
        line = f"| {', '.join(f'`{name}`' for name in families)} | {' | '.join(cells)} |"
        lines.append(re.sub(f"{REASON}(.*?){REASON}", number, line))
    lines += ["", f"{sum(len(families) for families, _ in rows)} families. A number is the reason why it is refused:", ""]
    lines += [f"{number}. {note}" for note, number in notes.items()]
    reasons: dict[str, list[str]] = defaultdict(list)
    for family, why in left_out.items():
        reasons[why].append(f"`{family}`")
    lines += ["", "Not run, because they don't write text with a `DynamicCache`:", ""]
    return lines + [f"- {', '.join(names)}: {why}" for why, names in reasons.items()]


def support_rows(rows: Rows) -> list[dict[str, str]]:
    """The same as rows of a CSV file, with the reasons themselves; names of families are separated by spaces."""
    columns: list[str] = []
    for name in SHOWN:
        columns.append(name.replace("...", f"{columns[-1].partition(',')[0]},") if name.startswith("...") else name)
    plain = lambda cells: (cell.replace(REASON, "") for cell in cells)  # noqa: E731
    return [{"families": " ".join(families), **dict(zip(columns, plain(cells), strict=True))} for families, cells in rows]


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
    rows = rows_of(outcomes)
    before, _, rest = args.page.read_text(encoding="utf-8").partition(BEGIN)
    shown = "\n".join([before + BEGIN, "", *table(rows, left_out), "", END + rest.partition(END)[2]])
    args.page.write_text(shown, encoding="utf-8")
    write_csv(args.support, support_rows(rows))
    failures = [f"{row['family']}: {row['cache']}, {row['scenario']}: {row['verdict']}: {row['detail']}" for row in filter(fails, outcomes)]
    print(*failures, f"{sum(len(families) for families, _ in rows)} families, {len(failures)} failures", sep="\n")
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    run_script(main)
