"""The tables of README.md and of the guides, each from the CSV files of docs/benchmarks."""

from __future__ import annotations

from collections.abc import Callable

from _docs_cases import cases
from _docs_numbers import equip_perplexity, equip_recall, first_token, nats, one, percent, table, translated_recall

CODECS = ("codec 0.07", "codec 0.1", "codec 0.125", "codec 0.1875", "codec 0.25", "KIVI 4 bit")
POLICIES = ("compactor", "kvzip", "keydiff", "snapkv", "lagkv", "streaming")


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
