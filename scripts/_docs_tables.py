"""The tables of README.md and of the guides, each from the CSV files of docs/benchmarks."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
Row = dict[str, str]
CODECS = ("codec 0.07", "codec 0.1", "codec 0.125", "codec 0.1875", "codec 0.25", "KIVI 4 bit")
POLICIES = ("compactor", "kvzip", "keydiff", "snapkv", "lagkv", "streaming")


@cache
def rows(name: str) -> list[Row]:
    with (BENCHMARKS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def where(name: str, **values: str) -> list[Row]:
    """The rows of a file with these values in these columns; at least one."""
    found = [row for row in rows(name) if all(row[column] == value for column, value in values.items())]
    if not found:
        raise LookupError(f"{name}.csv has no row with {values}. A renewed measurement may name it otherwise: change _docs_tables.py.")
    return found


def one(name: str, **values: str) -> Row:
    """The first of these rows."""
    return where(name, **values)[0]


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines))
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )


def times(number: str | float, digits: int = 1) -> str:
    return f"{float(number):.{digits}f}x"


def percent(share: str | float, digits: int = 0) -> str:
    return f"{100 * float(share):.{digits}f}%"


def nats(divergence: str | float) -> str:
    return f"{float(divergence):.2g}"


def growing_step(batch: str, tokens: str) -> str:
    return times(one("growing-cpu", dtype="float32", kv="mha", batch=batch, tokens=tokens)["step_ratio"])


def equip_flat(tokens: str) -> str:
    return f"{float(one('equip-cpu', measure='flat', policy='streaming', kv='mha', tokens=tokens)['step_ms']):.1f} ms"


def equip_recall(policy: str, budget: str) -> str:
    return percent(one("equip-recall", task="recall", policy=policy, budget=budget)["share"])


def equip_perplexity(policy: str, budget: str) -> str:
    return f"+{percent(one('equip-recall', task='prefix', policy=policy, budget=budget)['excess'], 2)}"


def codec_step(dtype: str, batch: str = "1") -> str:
    return times(one("subspace-speed-cpu", section="step", dtype=dtype, batch=batch, side="codec 0.125")["ratio"])


def first_token(section: str, side: str, stored: str = "bit-equal") -> str:
    return times(one("reuse-speed-cpu", section=section, side=side, stored=stored)["ratio"])


def translated_first_token(length: str) -> str:
    found = where("translation-speed-cpu", section="larger", measure="first token", side="codes as bytes", length=length)
    return times(min(float(row["ratio"]) for row in found))


def translated_recall(pair: str, side: str = "joint 0.025 (default)") -> Row:
    return one("translation-quality", pair=pair, side=side, workload="documents")


def cases() -> str:
    """Which cache for which case, on the front page."""
    codec = one("subspace-quality", model="deep", variant="codec 0.125", text="prose.txt")
    full = one("subspace-quality", model="deep", variant="full cache", text="prose.txt")
    moved = one("segments-quality", workload="agents", side="approximate", quantization="none", cap="")
    warm = [row for row in where("warmstart-quality", side="auto") if row["kind"] != "unrelated"]
    pairs = ("base -> tuned", "tuned -> base", "base -> lora")
    recalls = [float(translated_recall(pair)["recall"]) for pair in pairs]
    shares = statistics.fmean(float(translated_recall(pair)["share"]) for pair in pairs)
    return table(
        ("Your case", "Cache", "Memory", "Speed", "Quality"),
        [
            (
                "Any generation; the text must not change",
                "[`GrowingCache`](docs/growing.md)",
                "100% and a small reserve",
                f"decode step {growing_step('1', '8192')} at 1 x 8,192 tokens, {growing_step('8', '2048')} at 8 x 2,048",
                "the same text",
            ),
            (
                "[Long chats](docs/guides/long-chats.md) and streams in bounded memory",
                "[`EquipCache`](docs/equip.md)",
                "a fixed number of tokens, such as a quarter of the prompt",
                f"decode step {equip_flat('1000')} at 1,000 tokens seen, {equip_flat('100000')} at 100,000",
                f"{equip_recall('compactor', '0.25')} of facts recalled, perplexity {equip_perplexity('compactor', '0.25')} at a quarter",
            ),
            (
                "[Long documents](docs/guides/long-documents.md), more requests at once",
                "[`SubspaceCache`](docs/subspace.md)",
                percent(codec["share"], 1),
                f"decode step {codec_step('float32')} (bfloat16: {codec_step('bfloat16')}) at 8,192 tokens",
                f"KL {nats(codec['kl'])}, {codec['right']} facts recalled of the full cache's {full['right']}",
            ),
            (
                "[Agents](docs/guides/shared-context.md) with shared instructions, tools, pages",
                "[`SegmentReuseCache`](docs/segments.md)",
                "100%, and a store",
                f"first token {first_token('prefix', 'memory')} for a shared prefix, {first_token('moved', 'memory')} for moved pages",
                f"prefix exact; moved pages KL {nats(moved['kl_mean'])}, {percent(moved['recall'])} of facts recalled",
            ),
            (
                "[Servers](docs/guides/serving.md) with prompts that differ in a few words",
                "[`WarmStartCache`](docs/warmstart.md)",
                "100%, and a library",
                f"first token {first_token('aligned', 'memory')}",
                f"KL up to {nats(max(float(row['kl_first']) for row in warm))}, {percent(min(float(row['right']) for row in warm))}"
                " of answers right",
            ),
            (
                "[Fine-tuned families](docs/guides/fine-tuned-families.md): one model reads, another answers",
                "[`TranslatedCache`](docs/translation.md)",
                f"100%, of which {percent(shares, 1)} are sent",
                f"first token {translated_first_token('2048')}",
                f"{min(recalls):.0f}% to {max(recalls):.0f}% of facts recalled",
            ),
        ],
    )


def long_chats() -> str:
    """What policies keep of a context, by budget."""
    budgets = ("0.125", "0.25", "0.5")
    lines = [
        (f"`{policy}`", *(equip_recall(policy, budget) for budget in budgets), *(equip_perplexity(policy, budget) for budget in budgets))
        for policy in POLICIES
    ]
    header = ("Policy", "facts recalled at an eighth", "a quarter", "half", "perplexity at an eighth", "a quarter", "half")
    return table(header, lines)


def long_documents() -> str:
    """What a codec costs, by its bytes."""

    def line(variant: str) -> tuple[str, ...]:
        row = one("subspace-quality", model="deep", variant=variant, text="prose.txt")
        name = f"`bytes_ratio={variant.split()[1]}`" if variant.startswith("codec") else variant
        return (
            name,
            percent(row["share"], 1),
            nats(row["kl"]),
            f"{float(row['change_percent']):+.2f}%",
            f"{row['right']} of {row['questions']}",
        )

    lines = [
        ("full cache", "100%", "0", "0", "{right} of {questions}".format(**one("subspace-quality", model="deep", variant="full cache")))
    ]
    return table(("Codec", "bytes of 16 bits", "KL (nats)", "perplexity", "facts recalled"), [*lines, *map(line, CODECS)])


def shared_context() -> str:
    """What reuse saves and costs, by mode."""
    sides = {"prefix caching": '`"exact"` (default)', "auto": '`"auto"`', "approximate": '`"approximate"`'}
    speed = {"prefix caching": first_token("prefix", "memory"), "approximate": first_token("moved", "memory"), "auto": "not measured"}

    def line(side: str) -> tuple[str, ...]:
        row = one("segments-quality", workload="agents", side=side, quantization="none", cap="")
        return sides[side], percent(row["saved"], 1), nats(row["kl_mean"]), nats(row["kl_max"]), percent(row["recall"], 1), speed[side]

    header = ("`mode=`", "FLOPs of the prefill saved", "mean KL (nats)", "largest KL", "facts recalled", "first token at 2,048 tokens")
    return table(header, map(line, sides))


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
    "long-chats": long_chats,
    "long-documents": long_documents,
    "shared-context": shared_context,
    "fine-tuned-families": fine_tuned_families,
    "serving": serving,
}
