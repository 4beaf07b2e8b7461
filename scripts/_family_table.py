"""The table of families: which cache works with which architecture, and why not; for people, and for the command line."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from shared import ROOT

from tests.families.outcomes import Outcome

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
