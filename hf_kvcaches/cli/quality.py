"""`hf-kvcaches verify` and `eval`: what caches change on a prompt, on texts, and on made-up prompts with known answers."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache

from hf_kvcaches.cli import prompts, suite
from hf_kvcaches.cli.inputs import begin, load, makers, read_text, read_texts, spaced, token_ids
from hf_kvcaches.cli.suite import MakeCache
from hf_kvcaches.cli.tables import Row, emit, environment, print_json, show
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.verify import verify, verify_text

COLUMNS = {
    "cache": "{cache}",
    "texts": "{texts}",
    "mean KL": "{mean_kl:.3g}",
    "worst text": "{worst_kl:.3g}",
    "agreement": "{agreement:.1%}",
    "bytes a token": "{bytes_per_token:,.0f}",
    "of full": "{bytes_ratio:.1%}",
}
SUITE_COLUMNS = {
    "cache": "{cache}",
    "prompts": "{task}",
    "right": "{right} of {questions}",
    "answer, nats": "{answer_loss:+.2f}",
    "continuation, nats": "{continuation_loss:+.3f}",
    "saved": "{saved:.1%}",
    "mean KL": "{kl:.2g}",
    "worst prompt": "{worst:.2g}",
    "agreement": "{agreement:.1%}",
}
# Shorter texts say little of a cache.
_LEAST_CONTEXT = 16


def run_verify(args: argparse.Namespace) -> int:
    device, text = begin(args), args.prompt if args.file is None else read_text(args.file)
    model, tokenizer = load(args.model, device, args.dtype)
    [(name, make_cache)] = makers([args.cache], model, tokenizer).items()
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, : args.context]
    report = verify(model, make_cache, ids, args.max_new_tokens, prefill_chunk_size=args.prefill_chunk_size)
    if args.json:
        fixed = {"model": args.model, "cache": name, "prompt_tokens": ids.shape[1]}
        print_json({"environment": environment(device), **fixed, **report.as_dict()})
    else:
        print(f"{name}: {ids.shape[1]:,} tokens and {report.steps} steps behind them\n{report}")
    differs = args.exact and report.first_divergence is not None
    if differs:
        print(f"The text differs from step {report.first_divergence} on.", file=sys.stderr if args.json else sys.stdout)
    return int(differs)


def run_eval(args: argparse.Namespace) -> int:
    device = begin(args)
    model, tokenizer = load(args.model, device, args.dtype)
    texts = [] if args.suite else _long_enough(args.texts, tokenizer, args.context, args.following)
    caches = makers(args.cache, model, tokenizer)
    fixed = {**environment(device), "model": args.model, "dtype": str(model.dtype).removeprefix("torch.")}
    if args.suite:
        rows = _suite_rows(args, model, tokenizer, caches)
        emit(args, {"environment": fixed, "caches": rows}, show(rows, SUITE_COLUMNS), rows, fixed)
    else:
        rows = _text_rows(model, caches, spaced(texts, args.limit), args.following)
        summaries = [_summary(name, [row for row in rows if row["cache"] == name]) for name in caches]
        emit(args, {"environment": fixed, "caches": summaries, "rows": rows}, show(summaries, COLUMNS), rows, fixed)
    return 0


def _long_enough(paths: Sequence[Path], tokenizer: Any, context: int, following: int) -> list[list[int]]:
    """The beginnings of texts; those too short to compare are left out."""
    length = context + following
    ids = [token_ids(text, tokenizer)[:length] for text in read_texts(paths, tokenizer, length)]
    kept = [text for text in ids if len(text) >= _LEAST_CONTEXT + following]
    if not kept:
        longest = f"{len(ids)} texts of {max(map(len, ids), default=0)} tokens at most"
        raise ConfigError.of("--texts", f"a text of {_LEAST_CONTEXT} tokens and the {following} that follow", longest, "Give longer ones.")
    return kept


def _text_rows(model: Any, caches: Mapping[str, MakeCache], texts: Sequence[list[int]], following: int) -> list[Row]:
    """A row for each text and cache."""
    rows = []
    for number, ids in enumerate(tqdm(texts, desc="Evaluating", unit=" texts")):
        reports = verify_text(model, caches, torch.tensor([ids[:-following]]), torch.tensor([ids[-following:]]))
        for name, report in reports.items():
            row = {"cache": name, "text": number, "tokens": len(ids), "mean_kl": report.mean_kl, "max_kl": report.max_kl}
            sizes = {"bytes_per_token": report.bytes / len(ids), "bytes_ratio": report.bytes / report.reference_bytes}
            rows.append(row | {"agreement": report.agreement} | sizes)
    return rows


def _summary(name: str, rows: Sequence[Row]) -> Row:
    means = {column: fmean(row[column] for row in rows) for column in ("mean_kl", "agreement", "bytes_per_token", "bytes_ratio")}
    return {"cache": name, "texts": len(rows), "worst_kl": max(row["mean_kl"] for row in rows), **means}


def _suite_rows(args: argparse.Namespace, model: Any, tokenizer: Any, caches: Mapping[str, MakeCache]) -> list[Row]:
    """A row for each task and cache."""
    log, prose, page = suite.Log(args.state), read_text(args.texts[0]) if args.texts else None, max(8, args.context // 6)
    measured: list[Row] = []
    if "needles" in args.suite:
        for kind, needles in itertools.product(prompts.NEEDLE_KINDS, (1, 4)):
            made = prompts.needle_prompts(tokenizer, args.limit, kind, needles, tokens=args.context, prose=prose)
            measured += suite.ask_needles(log, model, f"needles {kind} {needles}", made, caches)
    if "requests" in args.suite:
        requests = prompts.agent_prompts(tokenizer, args.limit + 1, page_tokens=page, prose=prose)
        measured += suite.follow_requests(log, model, requests, caches)
    if "pairs" in args.suite:
        prepares = {name: partial(_after, model, make) for name, make in caches.items()}
        for change in prompts.PAIR_KINDS:
            pairs = prompts.prompt_pairs(tokenizer, args.limit, change, page_tokens=page, prose=prose)
            measured += suite.follow_pairs(log, model, f"pairs {change}", pairs, prepares)
    rows = []
    for task, name in dict.fromkeys((row["task"], row["cache"]) for row in measured):
        own = [row for row in measured if row["task"] == task]
        rows.append({"task": task} | (suite.needle_summary if "right" in own[0] else suite.reuse_summary)(own, name))
    return rows


def _after(model: Any, make: MakeCache, earlier: Sequence[int]) -> Cache:
    """A cache that is made when an earlier prompt was read through another, so that what caches share knows it."""
    suite.read_context(model, make(), earlier)
    return make()
