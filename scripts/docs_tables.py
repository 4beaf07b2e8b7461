"""Writes the tables of README.md and of docs/ from the measurements in docs/benchmarks.

    python scripts/docs_tables.py            rewrite every table
    python scripts/docs_tables.py --check    only say which tables are out of date, and fail if one is

A table stands between `<!-- table NAME: begin -->` and `<!-- table NAME: end -->`; `TABLES` has a function for each name.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from shared import BENCHMARKS, ROOT
from shared.measured import (
    DEFAULT_PAYLOAD,
    FIRST,
    PRUNED,
    TITLES,
    Row,
    cases,
    first_token,
    kept_share,
    lost,
    matching,
    models,
    nats,
    needles,
    percent,
    reused,
    rows,
    table,
    translated,
    where,
)

BUDGETS = {"0.5": "half", "0.25": "a quarter", "0.125": "an eighth"}
# Caches that one would choose, and a peer.
CHOSEN = ("future", "future, refit", "probe, refit", "kvzip, refit", "compactor, HeadBudgets", "streaming", "kvpress kvzip")
_MARKED = re.compile(r"(<!-- table ([\w-]+): begin -->\n).*?(<!-- table \2: end -->)", flags=re.DOTALL)


def pruning(name: str = PRUNED, caches: Sequence[str] = (), budgets: Sequence[str] = tuple(BUDGETS)) -> str:
    """Needles, facts and continuation by cache and budget, and facts recalled in chats; with `caches` of those, without chats."""
    chats = {row["cache"]: f"{row['facts']} of {row['of_facts']}" for row in matching(name, task="chat")}
    header = ("Cache", *(f"{what} at {BUDGETS[ratio]}" for what in ("needles", "facts", "loss") for ratio in budgets))
    everything = dict.fromkeys(row["cache"] for row in sorted(where(name, task="prompt"), key=lambda row: row["peer"] == "True"))

    def line(cache_name: str) -> tuple[str, ...]:
        kept = (kept_share(name, cache_name, ratio, what) for what in ("needles", "facts") for ratio in budgets)
        return cache_name, *kept, *(lost(name, cache_name, ratio) for ratio in budgets), *(() if caches else (chats.get(cache_name, ""),))

    return table(header if caches else (*header, "chats"), map(line, caches or everything))


def codes(*names: str) -> str:
    """KL and perplexity of codes by their bytes, with and without a window."""
    header = ["Codes", "bytes of 16 bits"]
    for name in names:
        header += [f"{TITLES[name]}: KL", "perplexity", "KL with 64 recent", "perplexity with 64 recent"]
    keys = {(row["cache"], row["share"]) for name in names for row in where(name, section="codes", recent="0")}

    def line(cache_name: str, share: str) -> Iterator[str]:
        yield f"`bytes_ratio={share}`" if cache_name == "codec" else cache_name
        yield percent(share, 1)
        for name in names:
            for recent in ("0", "64"):
                found = matching(name, section="codes", cache=cache_name, share=share, recent=recent)
                yield from (nats(found[0]["kl"]), f"{100 * float(found[0]['change']):+.1f}%") if found else ("", "")

    return table(header, [tuple(line(*key)) for key in sorted(keys, key=lambda key: (key[0] != "codec", key[0], float(key[1])))])


def quantized(name: str) -> str:
    """KL token by token behind an exact prompt, for caches that can't be read in one pass."""
    lines = [(row["cache"], percent(row["share"], 1), row["recent"], nats(row["kl"])) for row in matching(name, section="quantized")]
    return table(("Cache", "bytes of 16 bits", "exact newest tokens", "KL"), lines)


def saved_and_lost(row: Row, digits: int = 0) -> tuple[str, ...]:
    return percent(row["saved"], digits), nats(row["kl"]), nats(row["worst"]), percent(row["agreement"])


def reuse(name: str) -> str:
    """What moved segments and warm starts save and lose."""
    lines = [(row["cache"], row["task"], *saved_and_lost(row)) for row in where(name, section="reuse")]
    return table(("Cache", "prompts", "saved", "mean KL", "worst prompt", "same token"), lines)


def of_all(make: Callable[[str], str], section: str) -> str:
    """A table for each model in which a section was measured, under its name."""
    measured = {name: title for name, title in models().items() if any(row["kl"] for row in matching(name, section=section))}
    return "\n\n".join(f"**{title}**\n\n{make(name)}" for name, title in measured.items())


def pruning_of_all() -> str:
    files = {name.replace("real-", "pruning-"): title for name, title in models().items()}
    return "\n\n".join(f"**{title}**\n\n{pruning(name)}" for name, title in files.items() if (BENCHMARKS / f"{name}.csv").exists())


def shared_context() -> str:
    """What reuse saves and costs, by mode."""
    modes = {"segments exact": '`"exact"` (default)', "segments auto": '`"auto"`', "segments approximate": '`"approximate"`'}
    speed = {"segments exact": first_token("prefix", "memory"), "segments approximate": first_token("moved", "memory")}

    header = ("`mode=`", "FLOPs of the prefill saved", "mean KL (nats)", "worst request", "same next token", "first token at 2,048 tokens")
    lines = [(modes[name], *saved_and_lost(reused(name), 1), speed.get(name, "not measured")) for name in modes]
    return table(header, lines)


def warm_starts() -> str:
    """What warm starts save and cost, by what changed."""
    kinds = {"words": "four words", "paragraph": "one page of six", "pages": "three pages of six"}
    lines = [(name, *saved_and_lost(reused("warm start auto", task=kind))) for kind, name in kinds.items()]
    return table(("What changed", "tokens not computed", "mean KL (nats)", "worst prompt", "same next token"), lines)


def fine_tuned_families() -> str:
    """What arrives of a text, by bytes."""
    sides = {"own prefill": "the consumer's own prefill", "raw K/V": "the producer's keys and values"}
    sides |= {DEFAULT_PAYLOAD: "`payload=0.025` (default)", "payload 0.07": "`payload=0.07`", "payload 0.125": "`payload=0.125`"}
    header = ("What is sent", "bytes", "KL, prose", "KL, verse", "KL, needles", "needles found")

    def line(side: str) -> tuple[str, ...]:
        kept = translated(side)
        share = statistics.fmean(float(row["share"]) for row in kept.values())
        return sides[side], percent(share, 1), *(nats(kept[workload]["kl"]) for workload in ("prose", "verse", "documents")), needles(kept)

    return table(header, map(line, sides))


def serving() -> str:
    """How soon the first token comes, by where state is kept."""
    sections = {"prefix": "`SegmentReuseCache`, shared prefix", "moved": "`SegmentReuseCache`, moved pages"}
    sections["aligned"] = "`WarmStartCache`, ten other words"
    places = ("memory", "disk", "Redis")
    header = ("First token, times as fast as a prefill", *places, *(f"{place}, `int8`" for place in places))
    return table(
        header,
        [(name, *(first_token(key, place, kind) for kind in ("bit-equal", "int8") for place in places)) for key, name in sections.items()],
    )


def speed() -> str:
    """Every cache beside DynamicCache: a table for each processor and precision."""
    measured = [row for path in sorted(BENCHMARKS.glob("speed-*.csv")) for row in rows(path.stem)]
    # DynamicCache first, then cells by their tokens.
    measured.sort(key=lambda row: (row["dtype"] != "float32", row["cache"] != "DynamicCache"))
    parts = []
    for key in dict.fromkeys((row["hardware"], row["device"], row["threads"], row["dtype"]) for row in measured):
        group = [row for row in measured if (row["hardware"], row["device"], row["threads"], row["dtype"]) == key]
        cells = sorted({(int(row["batch"]), int(row["context"])) for row in group}, key=lambda cell: (cell[0] * cell[1], cell[0]))
        shown = {(row["cache"], row["setting"], int(row["batch"]), int(row["context"])): speed_cell(row) for row in group}
        sides = dict.fromkeys((row["cache"], row["setting"]) for row in group)
        lines = [
            (f"`{cache}({setting})`" if setting else f"`{cache}`", *(shown.get((cache, setting, *cell), "-") for cell in cells))
            for cache, setting in sides
        ]
        hardware, device, threads, dtype = key
        where_measured = f"{threads} thread{'' if threads == '1' else 's'} of {hardware}" if device == "cpu" else hardware
        header = ["cache", *(f"{batch} x {context:,}" for batch, context in cells)]
        parts.append(f"### {dtype}, {where_measured}\n\n{table(header, lines)}")
    return "\n\n".join(parts)


def speed_cell(row: Row) -> str:
    memory = f"{float(row['mib']):,.0f} MiB"
    if row["cache"] == "DynamicCache":
        return f"{float(row['prefill_s']):.2f} s, {float(row['decode_ms']):.0f} ms, {memory}"
    return f"{float(row['prefill_ratio']):.2f}x, {float(row['decode_ratio']):.2f}x, {memory}"


TABLES: Mapping[str, Callable[[], str]] = {
    "cases": cases,
    "long-chats": pruning,
    "equip": lambda: pruning(PRUNED, CHOSEN, ("0.25", "0.125")),
    "long-documents": lambda: codes(FIRST),
    "warm-starts": warm_starts,
    "real-pruning": pruning_of_all,
    "real-codes": lambda: codes(*(name for name in models() if matching(name, section="codes"))),
    "real-quantized": lambda: of_all(quantized, "quantized"),
    "real-reuse": lambda: of_all(reuse, "reuse"),
    "shared-context": shared_context,
    "fine-tuned-families": fine_tuned_families,
    "serving": serving,
    "speed": speed,
}


def pages() -> list[Path]:
    """The pages that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def renewed(text: str) -> str:
    """A page's text with its tables as they are measured now."""
    return _MARKED.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


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
