"""`hf-kvcaches eval --suite`: needles, requests of agents and pairs of similar prompts, on any model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_kvcaches.cli import prompts, suite
from hf_kvcaches.cli.suite import Item, Log, MakeCache
from hf_kvcaches.cli.tables import Row, show
from hf_kvcaches.cli.texts import read_text
from hf_kvcaches.core.per_call import PerCall

NEEDLE_COLUMNS = {
    "cache": "{cache}",
    "needles": "{task}",
    "right": "{right} of {questions}",
    "answer, nats": "{answer_loss:+.2f}",
    "continuation, nats": "{continuation_loss:+.3f}",
}
REUSE_COLUMNS = {
    "cache": "{cache}",
    "prompts": "{task}",
    "saved": "{saved:.1%}",
    "mean KL": "{kl:.2g}",
    "worst prompt": "{worst:.2g}",
    "agreement": "{agreement:.1%}",
}


def evaluate(args: argparse.Namespace, model: Any, tokenizer: Any, recipes: Mapping[str, PerCall]) -> list[Row]:
    """Measures the tasks of `--suite`, prints a table of each kind, if not `--json`, and returns their rows.

    Args:
        recipes: Caches by their specs.
    """
    prose = read_text(args.texts[0]) if args.texts else None
    caches: dict[str, MakeCache] = {name: lambda made=made: made.new_cache(model) for name, made in recipes.items()}  # type: ignore[misc]
    items = [item for task in args.suite for item in _items(task, args, model, tokenizer, caches, prose)]
    rows, summaries = suite.run(items, Log(args.state)), []
    for task in dict.fromkeys(item.task for item in items):
        own, is_needle = [row for row in rows if row["task"] == task], task.startswith("needles")
        names = [*([suite.FULL_CACHE] if is_needle else []), *caches]
        summaries += [{"task": task} | (suite.needle_summary if is_needle else suite.reuse_summary)(own, name) for name in names]
    for columns, column in ((NEEDLE_COLUMNS, "right"), (REUSE_COLUMNS, "kl")):
        if not args.json and (chosen := [row for row in summaries if column in row]):
            print(show(chosen, columns), end="\n\n")
    return summaries


def _items(
    task: str, args: argparse.Namespace, model: Any, tokenizer: Any, caches: Mapping[str, MakeCache], prose: str | None
) -> Iterator[Item]:
    if task == "needles":
        for kind in prompts.NEEDLE_KINDS:
            for needles in (1, 4):
                found = prompts.needle_prompts(tokenizer, args.limit, kind, needles, tokens=args.context, prose=prose)
                yield from suite.needle_items(model, found, caches)
        return
    page = max(8, args.context // 6)
    if task == "requests":
        requests = prompts.agent_prompts(tokenizer, args.limit + 1, page_tokens=page, prose=prose)
        yield from suite.request_items(model, "requests", requests, caches)
        return

    def served(make: MakeCache) -> Any:
        """What reads an earlier prompt through a cache, so that what caches share knows it."""

        def prepare(earlier: Sequence[int]) -> MakeCache:
            suite.read_context(model, make(), earlier)
            return make

        return prepare

    for change in prompts.PAIR_KINDS:
        pairs = prompts.prompt_pairs(tokenizer, args.limit, change, page_tokens=page, prose=prose)
        yield from suite.pair_items(model, pairs, {name: served(make) for name, make in caches.items()})
