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
FIRST, PRUNED = "real-smollm2", "pruning-smollm2"
BUDGETS = {"0.5": "half", "0.25": "a quarter", "0.125": "an eighth"}


def cells(name: str, **values: str) -> Row | None:
    """The row with these values, if it was measured."""
    found = [row for row in rows(name) if all(row[column] == value for column, value in values.items())]
    return found[0] if found else None


def kept_share(name: str, cache: str, ratio: str, what: str) -> str:
    """Needles or facts that are answered, of those that the full cache answers."""
    row = cells(name, task="prompt", cache=cache, ratio=ratio)
    return "" if row is None or row[f"of_{what}"] in ("", "0") else percent(int(row[what]) / int(row[f"of_{what}"]))


def lost(name: str, cache: str, ratio: str) -> str:
    """What a context's own continuation loses, in nats."""
    row = cells(name, task="prompt", cache=cache, ratio=ratio)
    return "" if row is None else f"{float(row['loss']):+.3f}"


def pruning(name: str = PRUNED) -> str:
    """Needles, facts and continuation by cache and budget, and facts recalled in chats."""
    chats = {row["cache"]: row for row in where(name, task="chat")} if cells(name, task="chat") else {}
    header = ("Cache", *(f"{what} at {word}" for what in ("needles", "facts", "loss") for word in BUDGETS.values()), "chats")
    named = dict.fromkeys(row["cache"] for row in sorted(where(name, task="prompt"), key=lambda row: row["peer"] == "True"))

    def line(cache: str) -> tuple[str, ...]:
        kept = (kept_share(name, cache, ratio, what) for what in ("needles", "facts") for ratio in BUDGETS)
        chat = f"{chats[cache]['facts']} of {chats[cache]['of_facts']}" if cache in chats else ""
        return cache, *kept, *(lost(name, cache, ratio) for ratio in BUDGETS), chat

    return table(header, map(line, named))


def pruning_in_short(name: str = PRUNED) -> str:
    """The caches that one would choose, at a quarter and an eighth of the tokens."""
    caches = ("future", "future, refit", "probe, refit", "kvzip, refit", "compactor, HeadBudgets", "streaming", "kvpress kvzip")
    budgets = {ratio: word for ratio, word in BUDGETS.items() if ratio != "0.5"}
    header = ("Policy", *(f"{what} at {word}" for word in budgets.values() for what in ("needles", "facts", "loss")))

    def line(cache: str) -> tuple[str, ...]:
        measured = [
            (*(kept_share(name, cache, ratio, what) for what in ("needles", "facts")), lost(name, cache, ratio)) for ratio in budgets
        ]
        return cache, *(cell for cells in measured for cell in cells)

    return table(header, map(line, caches))


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


def pruning_of_all() -> str:
    """Pruning of each model in which it was measured, under its name."""
    files = {name.replace("real-", "pruning-"): title for name, title in MODELS.items()}
    return "\n\n".join(f"**{title}**\n\n{pruning(name)}" for name, title in files.items() if (BENCHMARKS / f"{name}.csv").exists())


def text_of(name: str = FIRST) -> str:
    """The text that codes were measured on."""
    return where(name, section="codes")[0]["task"]


def of_all(make: Callable[[str], str], section: str) -> str:
    """A table for each model in which a section was measured, under its name."""
    measured = {name: title for name, title in MODELS.items() if any(row["section"] == section and row["kl"] for row in rows(name))}
    return "\n\n".join(f"**{title}**\n\n{make(name)}" for name, title in measured.items())


def codes_of_all() -> str:
    """Codes of all models in which they were measured."""
    return codes(*(name for name in MODELS if any(row["section"] == "codes" for row in rows(name))))
