"""Tables of what caches lose on real models, from docs/benchmarks/real-*.csv."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from _docs_numbers import BENCHMARKS, Row, nats, percent, rows, table, where

# Files that `eval_real.py` has written, and what documents call their models.
MODELS = {
    name: title
    for name, title in (("real-smollm2", "SmolLM2-135M"), ("real-gemma3", "Gemma 3 270M"))
    if (BENCHMARKS / f"{name}.csv").exists()
}
FIRST = "real-smollm2"
BUDGETS = {"0.5": "half", "0.25": "a quarter", "0.125": "an eighth"}


def cells(name: str, **values: str) -> Row | None:
    """The row with these values, if it was measured."""
    found = [row for row in rows(name) if all(row[column] == value for column, value in values.items())]
    return found[0] if found else None


def found_needles(name: str, cache: str, share: str, task: str = "all") -> str:
    """Needles found of those that the full cache finds."""
    row = cells(name, section="needles", task=task, cache=cache, share=share)
    return "" if row is None else f"{row['right']} of {row['questions']}"


def continuation(name: str, cache: str, share: str) -> str:
    """What a context's own continuation loses, in nats."""
    row = cells(name, section="needles", task="all", cache=cache, share=share)
    return "" if row is None else f"{float(row['continuation_loss']):+.2f}"


def caches(name: str, section: str, column: str = "cache") -> list[str]:
    """The caches of a section in the order in which they were measured, those of the package first."""
    found = [row for row in rows(name) if row["section"] == section and row[column] and row["kl"] + row["questions"]]
    return list(dict.fromkeys(row[column] for row in sorted(found, key=lambda row: row["peer"] == "True")))


def shown(cache: str) -> str:
    """A cache's name in a table: policies of this package as code, peers as they are."""
    return cache if cache.startswith(("kvpress", "KIVI", "rotation", "QuantizedCache")) or " " in cache else f"`{cache}`"


def pruning(name: str = FIRST, tasks: bool = False) -> str:
    """Needles and continuation by cache and budget.

    Args:
        tasks: Whether each kind of needle has a column, at each budget a line.
    """
    named = [cache for cache in caches(name, "needles") if cache != "full cache"]
    if not tasks:
        header = (
            "Policy",
            *(f"needles found at {word}" for word in BUDGETS.values()),
            *(f"continuation at {word}" for word in BUDGETS.values()),
        )
        lines = (
            (
                shown(cache),
                *(found_needles(name, cache, share) for share in BUDGETS),
                *(continuation(name, cache, share) for share in BUDGETS),
            )
            for cache in named
        )
        return table(header, lines)
    kinds = [task for task in dict.fromkeys(row["task"] for row in rows(name) if row["section"] == "needles") if task not in ("", "all")]
    lines = (
        (shown(cache), word, *(found_needles(name, cache, share, kind) for kind in kinds), continuation(name, cache, share))
        for cache in named
        for share, word in BUDGETS.items()
    )
    return table(("Cache", "tokens kept", *kinds, "continuation, nats"), lines)


def codes(*names: str) -> str:
    """KL and perplexity of codes by their bytes, with and without a window."""
    header = ["Codes", "bytes of 16 bits"]
    for name in names:
        header += [f"{MODELS[name]}: KL", "perplexity", "KL with 64 recent", "perplexity with 64 recent"]
    found = {(row["cache"], row["share"]): row for name in names for row in where(name, section="codes", recent="0")}

    def line(cache: str, share: str) -> Iterator[str]:
        yield f"`bytes_ratio={share}`" if cache == "codec" else cache
        yield percent(share, 1)
        for name in names:
            for recent in ("0", "64"):
                row = cells(name, section="codes", cache=cache, share=share, recent=recent)
                yield from ("", "") if row is None else (nats(row["kl"]), f"{100 * float(row['change']):+.1f}%")

    return table(header, [tuple(line(*key)) for key in sorted(found, key=lambda key: (key[0] != "codec", key[0], float(key[1])))])


def quantized(name: str = FIRST) -> str:
    """KL token by token behind an exact prompt, for caches that can't be read in one pass."""
    lines = [
        (row["cache"], percent(row["share"], 1), row["recent"], nats(row["kl"]) if row["kl"] else row["note"])
        for row in rows(name)
        if row["section"] == "quantized"
    ]
    return table(("Cache", "bytes of 16 bits", "exact newest tokens", "KL"), lines)


def reuse(name: str = FIRST) -> str:
    """What moved segments and warm starts save and lose."""
    lines = [
        (row["cache"], row["task"], percent(row["saved"]), nats(row["kl"]), nats(row["worst"]), percent(row["agreement"]))
        for row in where(name, section="reuse")
    ]
    return table(("Cache", "prompts", "saved", "mean KL", "worst prompt", "same token"), lines)


def text_of(name: str = FIRST) -> str:
    """The text that codes were measured on."""
    return where(name, section="codes")[0]["task"]


def of_all(make: Callable[[str], str], section: str) -> str:
    """A table for each model in which a section was measured, under its name."""
    measured = {
        name: title
        for name, title in MODELS.items()
        if any(row["section"] == section and row["kl"] + row["questions"] for row in rows(name))
    }
    return "\n\n".join(f"**{title}**\n\n{make(name)}" for name, title in measured.items())


def codes_of_all() -> str:
    """Codes of all models in which they were measured."""
    return codes(*(name for name in MODELS if any(row["section"] == "codes" for row in rows(name))))
