"""Numbers of the CSV files in docs/benchmarks as the documents show them, and the table of README.md."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from functools import cache

from shared import BENCHMARKS

SPEED = "speed-cpu"  # every cache at one size; the methods' own benchmarks differ in size
TITLES = {"real-smollm2": "SmolLM2-135M", "real-gemma3": "Gemma 3 270M"}
FIRST, PRUNED = "real-smollm2", "pruning-smollm2"
PAIR, DEFAULT_PAYLOAD = "translation-smollm2-smollm2-verse", "payload 0.025"
Row = dict[str, str]
Line = tuple[str, str, str, str, str]


@cache
def rows(name: str) -> list[Row]:
    with (BENCHMARKS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def matching(name: str, **values: str) -> list[Row]:
    """The rows of a file with these values in these columns."""
    return [row for row in rows(name) if all(row[column] == value for column, value in values.items())]


def where(name: str, **values: str) -> list[Row]:
    """At least one such row."""
    if not (found := matching(name, **values)):
        raise LookupError(f"{name}.csv has no row with {values}. A new measurement may name it otherwise: change scripts/docs_tables.py.")
    return found


def one(name: str, **values: str) -> Row:
    return where(name, **values)[0]


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [f"| {' | '.join(line)} |" for line in (header, *lines)]
    return "\n".join([cells[0], f"|{'---|' * len(header)}", *cells[1:]])


def times(number: str | float, digits: int = 1) -> str:
    return f"{float(number):.{digits}f}x"


def percent(share: str | float, digits: int = 0) -> str:
    return f"{100 * float(share):.{digits}f}%"


def nats(divergence: str | float) -> str:
    return f"{float(divergence):.2g}"


def models() -> dict[str, str]:
    """Files of `eval.py real`, and what documents call their models."""
    return {name: title for name, title in TITLES.items() if (BENCHMARKS / f"{name}.csv").exists()}


def first_token(section: str, side: str, stored: str = "bit-equal") -> str:
    return times(one("reuse-speed-cpu", section=section, side=side, stored=stored)["ratio"])


def translated(side: str = DEFAULT_PAYLOAD) -> dict[str, Row]:
    """What a side of a translation keeps, by workload."""
    return {row["workload"]: row for row in where(PAIR, side=side)}


def reused(cache_name: str, **values: str) -> Row:
    return one(FIRST, section="reuse", cache=cache_name, **values)


def kept_share(name: str, cache_name: str, ratio: str, what: str) -> str:
    """Needles or facts that are answered, of those that the full cache answers."""
    found = matching(name, task="prompt", cache=cache_name, ratio=ratio)
    return percent(int(found[0][what]) / int(found[0][f"of_{what}"])) if found and found[0][f"of_{what}"] not in ("", "0") else ""


def lost(name: str, cache_name: str, ratio: str) -> str:
    """What a context's own continuation loses, in nats."""
    found = matching(name, task="prompt", cache=cache_name, ratio=ratio)
    return f"{float(found[0]['loss']):+.3f}" if found else ""


def cases() -> str:
    """The table of README.md: a user's case, the cache for it, and its memory, speed and quality."""
    header = ("Your case", "Cache", "Memory", "Speed", "Quality")
    return f"{table(header, [growing(), equip(), subspace(), segments(), warmstart(), translation()])}\n\n{note()}"


def note() -> str:
    """The conditions of the measurements."""
    [(layers, hidden, threads, hardware)] = {(row["layers"], row["hidden"], row["threads"], row["hardware"]) for row in speeds()}
    return (
        "Memory is that of keys and values in 16 bits; speed is relative to `DynamicCache`, and for a first token to a full prefill.\n"
        f"Speed is that of {layers} layers of hidden size {int(hidden):,} with random weights, batch 1, {threads} "
        f"thread{'' if threads == '1' else 's'} of an {hardware}; no GPU was measured.\n"
        f"Quality is that of {TITLES[FIRST]}-Instruct in float32 ([all numbers, and those of other models]"
        f"(docs/benchmarks/real-models.md)), KL is in nats; codes were measured on {where(FIRST, section='codes')[0]['task']}.\n"
        f"Translations are from {TITLES[FIRST]} to a [fine-tune of it on verse](docs/translation.md#measurements). "
        "Measure your own model and prompts."
    )


def speeds() -> list[Row]:
    """The rows of the speed table for one text at a time, of the processor that has most."""
    single = where(SPEED, batch="1")
    most = statistics.mode(row["hardware"] for row in single)
    return [row for row in single if row["hardware"] == most]


def speed_of(what: str, column: str, cache_name: str, setting: str = "") -> str:
    """A ratio of the speed table for each length and dtype."""
    chosen = [row for row in speeds() if row["cache"] == cache_name and row["setting"].startswith(setting)]
    texts = []
    for length in sorted({int(row["context"]) for row in chosen}):
        ratios = [f"{times(row[column])} ({row['dtype']})" for row in chosen if int(row["context"]) == length]
        texts.append(f"{', '.join(ratios)} at {length:,} tokens")
    if not texts:
        raise LookupError(f"{SPEED}.csv has no row of {cache_name}({setting}) with one text. Measure it with scripts/bench.py speed.")
    return f"{what} {'; '.join(texts)}"


def growing() -> Line:
    case, speed = "Any generation; the text must not change", speed_of("decode step", "decode_ratio", "GrowingCache")
    return case, "[`GrowingCache`](docs/growing.md)", "100% and a small reserve", speed, "the same text"


def equip() -> Line:
    half, quarter = (kept_share(PRUNED, "future", ratio, "needles") for ratio in ("0.5", "0.25"))
    losses = " and ".join(lost(PRUNED, "future", ratio) for ratio in ("0.5", "0.25"))
    case = "[Long chats](docs/guides/long-chats.md) and streams in bounded memory"
    speed = speed_of('decode step of `"streaming"`', "decode_ratio", "EquipCache", "policy='streaming', budget=0.25")
    quality = f"{half} of needles found at half, {quarter} at a quarter; the text's continuation loses {losses} nats"
    return case, "[`EquipCache`](docs/equip.md)", "a fixed number of tokens, such as a quarter of the prompt", speed, quality


def subspace() -> Line:
    exact, window = (one(FIRST, section="codes", cache="codec", share="0.125", recent=recent) for recent in ("0", "64"))
    perplexities = [f"{100 * float(row['change']):+.1f}%" for row in (window, exact)]
    case, speed = "[Long documents](docs/guides/long-documents.md), more requests at once", ("decode step", "decode_ratio", "SubspaceCache")
    quality = f"KL {nats(window['kl'])}, perplexity {perplexities[0]}; without exact tokens {nats(exact['kl'])}, {perplexities[1]}"
    return case, "[`SubspaceCache`](docs/subspace.md)", "12.5%, and 64 exact tokens", speed_of(*speed, "codec"), quality


def segments() -> Line:
    moved, speed = reused("segments approximate"), speed_of("first token", "prefill_ratio", "SegmentReuseCache")
    case = "[Agents](docs/guides/shared-context.md) with shared instructions, tools, pages"
    quality = f"prefix exact; moved pages KL {nats(moved['kl'])}, {percent(moved['saved'])} of the prefill saved"
    return case, "[`SegmentReuseCache`](docs/segments.md)", "100%, and a store", speed, quality


def warmstart() -> Line:
    words, page, pages = (nats(reused("warm start auto", task=kind)["kl"]) for kind in ("words", "paragraph", "pages"))
    case = "[Servers](docs/guides/serving.md) with prompts that differ in a few words"
    speed = speed_of("first token", "prefill_ratio", "WarmStartCache")
    quality = f"KL {words} (four words changed), {page} (a page), {pages} (half of the pages)"
    return case, "[`WarmStartCache`](docs/warmstart.md)", "100%, and a library", speed, quality


def translation() -> Line:
    sent = translated()
    divergences, raw = ([nats(kl) for kl in sorted(float(row["kl"]) for row in side.values())] for side in (sent, translated("raw K/V")))
    memory = f"100%, of which {percent(statistics.fmean(float(row['share']) for row in sent.values()))} are sent"
    case = "[Fine-tuned families](docs/guides/fine-tuned-families.md): one model reads, another answers"
    speed = speed_of("first token", "prefill_ratio", "TranslatedCache")
    quality = (
        f"KL {divergences[0]} to {divergences[-1]} (the producer's own keys and values: {raw[0]} to {raw[-1]}), {needles(sent)} needles"
    )
    return case, "[`TranslatedCache`](docs/translation.md)", memory, speed, quality


def needles(side: dict[str, Row]) -> str:
    asked = int(side["documents"]["questions"])
    return f"{round(asked * float(side['documents']['recall']) / 100)} of {asked}"
