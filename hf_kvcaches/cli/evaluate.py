"""`hf-kvcaches eval`: what caches lose on texts, beside a `DynamicCache`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache

from hf_kvcaches.cli import evaluate_suite
from hf_kvcaches.cli.calls import parse
from hf_kvcaches.cli.options import begin, load
from hf_kvcaches.cli.specs import caches_of
from hf_kvcaches.cli.tables import Row, environment, print_json, show, write_csv
from hf_kvcaches.cli.texts import Text, read_texts, spaced
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.verify import VerifyReport, verify_text

COLUMNS = {
    "cache": "{cache}",
    "texts": "{texts}",
    "mean KL": "{mean_kl:.3g}",
    "worst text": "{worst_kl:.3g}",
    "agreement": "{agreement:.1%}",
    "bytes a token": "{bytes_per_token:,.0f}",
    "of full": "{bytes_ratio:.1%}",
}
# Shorter texts say little of a cache.
_LEAST_CONTEXT = 16


def run(args: argparse.Namespace) -> int:
    device, specs = begin(args), [parse(text) for text in args.cache]
    model, tokenizer = load(args.model, device, args.dtype)
    texts = [] if args.suite else _long_enough(args.texts, tokenizer, args.context, args.following)
    recipes = {repr(spec): caches_of(spec, model, tokenizer) for spec in specs}
    fixed = {**environment(device), "model": args.model, "dtype": str(model.dtype).removeprefix("torch.")}
    if args.suite:
        found = evaluate_suite.evaluate(args, model, tokenizer, recipes)
        if args.json:
            print_json({"environment": fixed, "caches": found})
        if args.csv:
            write_csv(args.csv, found, fixed)
        return 0
    makers: dict[str, Callable[[], Cache]] = {name: lambda made=made: made.new_cache(model) for name, made in recipes.items()}  # type: ignore[misc]
    rows: list[Row] = []
    for number, ids in enumerate(tqdm(spaced(texts, args.limit), desc="Evaluating", unit=" texts")):
        prompt, following = torch.tensor([ids[: -args.following]]), torch.tensor([ids[-args.following :]])
        reports = verify_text(model, makers, prompt, following)
        rows += [{"cache": name, "text": number, **_numbers(report, len(ids))} for name, report in reports.items()]
    summaries = [_summary(name, [row for row in rows if row["cache"] == name]) for name in recipes]
    if args.json:
        print_json({"environment": fixed, "caches": summaries, "rows": rows})
    else:
        print(show(summaries, COLUMNS))
    if args.csv:
        write_csv(args.csv, rows, fixed)
    return 0


def _long_enough(paths: Sequence[Path], tokenizer: Any, context: int, following: int) -> list[Text]:
    """The beginnings of texts, as token ids; those too short to compare are left out."""
    length = context + following
    texts = [text for path in paths for text in read_texts(path, tokenizer, length)]
    ids = [(tokenizer(text, verbose=False)["input_ids"] if isinstance(text, str) else text)[:length] for text in texts]
    kept: list[Text] = [text for text in ids if len(text) >= _LEAST_CONTEXT + following]
    if not kept:
        longest = f"{len(ids)} texts of {max(map(len, ids), default=0)} tokens at most"
        raise ConfigError.of("--texts", f"a text of {_LEAST_CONTEXT} tokens and the {following} that follow", longest, "Give longer ones.")
    return kept


def _numbers(report: VerifyReport, tokens: int) -> Row:
    return {
        "tokens": tokens,
        "mean_kl": report.mean_kl,
        "max_kl": report.max_kl,
        "agreement": report.agreement,
        "bytes_per_token": report.bytes / tokens,
        "bytes_ratio": report.bytes / report.reference_bytes,
    }


def _summary(name: str, rows: Sequence[Row]) -> Row:
    means = {column: fmean(row[column] for row in rows) for column in ("mean_kl", "agreement", "bytes_per_token", "bytes_ratio")}
    return {"cache": name, "texts": len(rows), "worst_kl": max(row["mean_kl"] for row in rows), **means}
