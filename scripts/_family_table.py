"""The table of families: which cache works with which architecture, and why not."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from shared import ROOT

from tests.families.outcomes import Outcome

PAGE = ROOT / "docs" / "families.md"
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


def table(found: Iterable[Outcome], left_out: dict[str, str]) -> list[str]:
    """Lines of Markdown: families that get the same share a row."""
    by_family: dict[str, dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for outcome in found:
        by_family[outcome.family][outcome.cache].append(outcome)
    notes: dict[str, int] = {}
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for family, caches in by_family.items():
        rows[tuple(_cell([o for name in names for o in caches[name]], notes) for names in SHOWN.values())].append(family)
    lines = [f"| Families | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 1) + "|"]
    for cells, names in sorted(rows.items(), key=lambda row: -len(row[1])):
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(cells)} |")
    lines += ["", f"{len(by_family)} families. A number is the reason why it is refused:", ""]
    lines += [f"{number}. {note}" for note, number in notes.items()]
    reasons: dict[str, list[str]] = defaultdict(list)
    for family, why in left_out.items():
        reasons[why].append(f"`{family}`")
    lines += ["", "Not run, because they don't write text with a `DynamicCache`:", ""]
    return lines + [f"- {', '.join(names)}: {why}" for why, names in reasons.items()]


def _cell(found: list[Outcome], notes: dict[str, int]) -> str:
    if any(outcome.fails for outcome in found):
        return "**fails**"
    asked = [outcome for outcome in found if outcome.scenario in CALLED and outcome.verdict != "absent"]
    refused: dict[str, list[str]] = defaultdict(list)
    for outcome in asked:
        if outcome.verdict == "refused":
            refused[_reason(outcome.detail)].append(CALLED[outcome.scenario])
    for reason in refused:
        notes.setdefault(reason, len(notes) + 1)
    numbers = ", ".join(str(notes[reason]) for reason in refused)
    if not asked:
        return "-"
    if all(outcome.verdict == "refused" for outcome in asked):
        return f"no ({numbers})"
    return "yes" if not refused else "yes, but " + "; ".join(f"no {', '.join(what)} ({notes[reason]})" for reason, what in refused.items())


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
