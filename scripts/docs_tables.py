"""Writes the tables of README.md and of the guides from the measurements in docs/benchmarks.

    python scripts/docs_tables.py            rewrite every table
    python scripts/docs_tables.py --check    only say which tables are out of date, and fail if one is

A table stands between `<!-- table NAME: begin -->` and `<!-- table NAME: end -->`; `TABLES` has a function for each name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from _docs_cases import cases
from _docs_numbers import first_token, nats, one, percent, table, translated_recall
from _docs_real import FIRST, codes, codes_of_all, of_all, pruning, pruning_in_short, pruning_of_all, quantized, reuse


def shared_context() -> str:
    """What reuse saves and costs, by mode."""
    modes = {"segments exact": '`"exact"` (default)', "segments auto": '`"auto"`', "segments approximate": '`"approximate"`'}
    speed = {"segments exact": first_token("prefix", "memory"), "segments approximate": first_token("moved", "memory")}

    def line(cache: str) -> tuple[str, ...]:
        row = one(FIRST, section="reuse", cache=cache)
        return (
            modes[cache],
            percent(row["saved"], 1),
            nats(row["kl"]),
            nats(row["worst"]),
            percent(row["agreement"]),
            speed.get(cache, "not measured"),
        )

    header = ("`mode=`", "FLOPs of the prefill saved", "mean KL (nats)", "worst request", "same next token", "first token at 2,048 tokens")
    return table(header, map(line, modes))


def warm_starts() -> str:
    """What warm starts save and cost, by what changed."""
    kinds = {"words": "four words", "paragraph": "one page of six", "pages": "three pages of six"}

    def line(kind: str) -> tuple[str, ...]:
        row = one(FIRST, section="reuse", cache="warm start auto", task=kind)
        return kinds[kind], percent(row["saved"]), nats(row["kl"]), nats(row["worst"]), percent(row["agreement"])

    return table(("What changed", "tokens not computed", "mean KL (nats)", "worst prompt", "same next token"), map(line, kinds))


def fine_tuned_families() -> str:
    """What arrives of a text, by pair and bytes."""
    sides = {
        "joint 0.0125": "`payload=0.0125`",
        "joint 0.025 (default)": "`payload=0.025` (default)",
        "joint 0.05": "`payload=0.05`",
        "joint, 1 layer run": "`payload=0.025`, `recompute_layers=1`",
    }
    pairs = ("base -> tuned", "tuned -> base", "base -> lora")
    header = ("Option", "bytes of bfloat16 keys and values", *(f"{pair.replace('->', 'to')}: recall" for pair in pairs))
    own = ("own prefill", "", *(f"{float(translated_recall(pair)['recall_alone']):.1f}%" for pair in pairs))

    def line(side: str) -> tuple[str, ...]:
        measured = [translated_recall(pair, side) for pair in pairs]
        return sides[side], percent(measured[0]["share"], 1), *(f"{float(row['recall']):.1f}%" for row in measured)

    return table(header, [own, *map(line, sides)])


def serving() -> str:
    """How soon the first token comes, by where state is kept."""
    kinds = {
        "prefix": "`SegmentReuseCache`, shared prefix",
        "moved": "`SegmentReuseCache`, moved pages",
        "aligned": "`WarmStartCache`, ten other words",
    }
    places = ("memory", "disk", "Redis")
    lines = [
        (name, *(first_token(section, place) for place in places), *(first_token(section, place, "int8") for place in places))
        for section, name in kinds.items()
    ]
    header = ("First token, times as fast as a prefill", "memory", "disk", "Redis", "memory, `int8`", "disk, `int8`", "Redis, `int8`")
    return table(header, lines)


TABLES: dict[str, Callable[[], str]] = {
    "cases": cases,
    "long-chats": pruning,
    "equip": pruning_in_short,
    "long-documents": lambda: codes(FIRST),
    "warm-starts": warm_starts,
    "real-pruning": pruning_of_all,
    "real-codes": codes_of_all,
    "real-quantized": lambda: of_all(quantized, "quantized"),
    "real-reuse": lambda: of_all(reuse, "reuse"),
    "shared-context": shared_context,
    "fine-tuned-families": fine_tuned_families,
    "serving": serving,
}


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
