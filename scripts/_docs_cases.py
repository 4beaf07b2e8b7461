"""The table of README.md: a user's case, the cache for it, and what its memory, speed and quality were measured to be."""

from __future__ import annotations

import statistics

from _docs_numbers import Row, nats, one, percent, table, times, translated_recall, where
from _docs_real import FIRST, MODELS, PRUNED, kept_share, lost, text_of

SPEED = "speed-cpu"  # every cache at one size; the methods' own benchmarks differ in size
Line = tuple[str, str, str, str, str]
CHANGES = ("words", "paragraph", "pages")


def cases() -> str:
    """The table, and what it is measured on."""
    header = ("Your case", "Cache", "Memory", "Speed", "Quality")
    lines = [growing(), equip(), subspace(), segments(), warmstart(), translation()]
    return f"{table(header, lines)}\n\n{note()}"


def note() -> str:
    """The conditions of the measurements."""
    [(layers, hidden, threads, hardware)] = {(row["layers"], row["hidden"], row["threads"], row["hardware"]) for row in speeds()}
    return (
        "Memory is that of keys and values in 16 bits; speed is relative to `DynamicCache`, and for a first token to a full prefill.\n"
        f"Speed is that of {layers} layers of hidden size {int(hidden):,} with random weights, batch 1, {threads} "
        f"thread{'' if threads == '1' else 's'} of an {hardware}; no GPU was measured.\n"
        f"Quality is that of {MODELS[FIRST]}-Instruct in float32 ([all numbers, and those of other models]"
        f"(docs/benchmarks/real-models.md)), KL is in nats; codes were measured on {text_of()}.\n"
        "Recall behind translations is that of the [testbed](docs/testbed.md), a small laboratory model; for SmolLM2 and a "
        "fine-tune of it see [there](docs/translation.md#measurements). "
        "Measure your own model and prompts."
    )


def speeds() -> list[Row]:
    """The rows of the speed table for one text at a time, of the processor that has most."""
    single = where(SPEED, batch="1")
    most = statistics.mode(row["hardware"] for row in single)
    return [row for row in single if row["hardware"] == most]


def speed(what: str, column: str, cache: str, setting: str = "") -> str:
    """A ratio of the speed table for each length and dtype."""
    chosen = [row for row in speeds() if row["cache"] == cache and row["setting"].startswith(setting)]
    texts = []
    for length in sorted({int(row["context"]) for row in chosen}):
        ratios = [f"{times(row[column])} ({row['dtype']})" for row in chosen if int(row["context"]) == length]
        texts.append(f"{', '.join(ratios)} at {length:,} tokens")
    if not texts:
        raise LookupError(f"{SPEED}.csv has no row of {cache}({setting}) with one text. Measure it with scripts/bench_speed_table.py.")
    return f"{what} {'; '.join(texts)}"


def growing() -> Line:
    return (
        "Any generation; the text must not change",
        "[`GrowingCache`](docs/growing.md)",
        "100% and a small reserve",
        speed("decode step", "decode_ratio", "GrowingCache"),
        "the same text",
    )


def equip() -> Line:
    half, quarter = (kept_share(PRUNED, "future", ratio, "needles") for ratio in ("0.5", "0.25"))
    quality = f"{half} of needles found at half, {quarter} at a quarter; the text's continuation loses "
    return (
        "[Long chats](docs/guides/long-chats.md) and streams in bounded memory",
        "[`EquipCache`](docs/equip.md)",
        "a fixed number of tokens, such as a quarter of the prompt",
        speed('decode step of `"streaming"`', "decode_ratio", "EquipCache", "policy='streaming', budget=0.25"),
        f"{quality}{lost(PRUNED, 'future', '0.5')} and {lost(PRUNED, 'future', '0.25')} nats",
    )


def subspace() -> Line:
    exact, window = (one(FIRST, section="codes", cache="codec", share="0.125", recent=recent) for recent in ("0", "64"))
    perplexities = [f"{100 * float(row['change']):+.1f}%" for row in (window, exact)]
    return (
        "[Long documents](docs/guides/long-documents.md), more requests at once",
        "[`SubspaceCache`](docs/subspace.md)",
        "12.5%, and 64 exact tokens",
        speed("decode step", "decode_ratio", "SubspaceCache", "codec"),
        f"KL {nats(window['kl'])}, perplexity {perplexities[0]}; without exact tokens {nats(exact['kl'])}, {perplexities[1]}",
    )


def segments() -> Line:
    moved = one(FIRST, section="reuse", cache="segments approximate")
    return (
        "[Agents](docs/guides/shared-context.md) with shared instructions, tools, pages",
        "[`SegmentReuseCache`](docs/segments.md)",
        "100%, and a store",
        speed("first token", "prefill_ratio", "SegmentReuseCache"),
        f"prefix exact; moved pages KL {nats(moved['kl'])}, {percent(moved['saved'])} of the prefill saved",
    )


def warmstart() -> Line:
    words, page, pages = (float(one(FIRST, section="reuse", cache="warm start auto", task=kind)["kl"]) for kind in CHANGES)
    return (
        "[Servers](docs/guides/serving.md) with prompts that differ in a few words",
        "[`WarmStartCache`](docs/warmstart.md)",
        "100%, and a library",
        speed("first token", "prefill_ratio", "WarmStartCache"),
        f"KL {nats(words)} (four words changed), {nats(page)} (a page), {nats(pages)} (half of the pages)",
    )


def translation() -> Line:
    measured = [translated_recall(pair) for pair in ("base -> tuned", "tuned -> base", "base -> lora")]
    recalls = [float(row["recall"]) for row in measured]
    share = statistics.fmean(float(row["share"]) for row in measured)
    return (
        "[Fine-tuned families](docs/guides/fine-tuned-families.md): one model reads, another answers",
        "[`TranslatedCache`](docs/translation.md)",
        f"100%, of which {percent(share, 1)} are sent",
        speed("first token", "prefill_ratio", "TranslatedCache"),
        f"{min(recalls):.0f}% to {max(recalls):.0f}% of facts recalled by the testbed",
    )
