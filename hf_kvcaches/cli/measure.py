"""`hf-kvcaches verify`, `eval` and `bench`: what caches change on prompts and texts, and how fast they are."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import Cache, DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.cli import prompts, suite
from hf_kvcaches.cli.inputs import begin, from_pretrained, load, makers, read_text, read_texts, spaced, token_ids
from hf_kvcaches.cli.suite import MakeCache
from hf_kvcaches.cli.tables import Row, emit, environment, print_environment, show
from hf_kvcaches.core.rope_families import head_sizes
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.evaluate.measures import cache_bytes
from hf_kvcaches.evaluate.runner import ModelRunner
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
BENCH_COLUMNS = {
    "cache": "{cache}({setting})",
    "prefill s": "{prefill_s:.4f}",
    "times as fast": "{prefill_ratio:.2f}x",
    "step ms": "{decode_ms:.3f}",
    "times as fast ": "{decode_ratio:.2f}x",
    "quartiles": "{decode_ratio_q1:.2f}-{decode_ratio_q3:.2f}",
    "MiB": "{mib:.1f}",
}
# Shorter texts say little of a cache.
_LEAST_CONTEXT = 16


def run_verify(args: argparse.Namespace) -> int:
    device, text = begin(args), args.prompt if args.file is None else read_text(args.file)
    model, tokenizer = load(args.model, device, args.dtype)
    [(name, make_cache)] = makers([args.cache], model, tokenizer).items()
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, : args.context]
    report = verify(model, make_cache, ids, args.max_new_tokens, prefill_chunk_size=args.prefill_chunk_size)
    document = {"environment": environment(device), "model": args.model, "cache": name, "prompt_tokens": ids.shape[1], **report.as_dict()}
    emit(args, document, f"{name}: {ids.shape[1]:,} tokens and {report.steps} steps behind them\n{report}")
    differs = args.exact and report.first_divergence is not None
    if differs:
        print(f"The text differs from step {report.first_divergence} on.", file=sys.stderr if args.json else sys.stdout)
    return int(differs)


def run_eval(args: argparse.Namespace) -> int:
    model, tokenizer = load(args.model, begin(args), args.dtype)
    texts = [] if args.suite else _long_enough(args.texts, tokenizer, args.context, args.following)
    caches = makers(args.cache, model, tokenizer)
    fixed = _about(args, model)
    if args.suite:
        rows = _suite_rows(args, model, tokenizer, caches)
        emit(args, {"environment": fixed, "caches": rows}, show(rows, SUITE_COLUMNS), rows, fixed)
    else:
        rows = _text_rows(model, caches, spaced(texts, args.limit), args.following)
        summaries = [_summary(name, [row for row in rows if row["cache"] == name]) for name in caches]
        emit(args, {"environment": fixed, "caches": summaries, "rows": rows}, show(summaries, COLUMNS), rows, fixed)
    return 0


def _about(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """The columns that all rows of a run share."""
    return {**environment(model.device), "model": args.model, "dtype": str(model.dtype).removeprefix("torch.")}


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


@torch.no_grad()
def run_bench(args: argparse.Namespace) -> int:
    device = begin(args)
    model, tokenizer = (_random_model(args.model, device, args.dtype), None) if args.random else load(args.model, device, args.dtype)
    if not args.json:
        print_environment(device)
    caches = {"DynamicCache()": lambda: DynamicCache(config=model.config), **makers(args.cache, model, tokenizer)}
    measured, rows = _timed(model, caches, args), []
    base_prefill, base_decode, _ = zip(*measured["DynamicCache()"], strict=True)
    for name in caches:
        prefill, decode, mebibytes = zip(*measured[name], strict=True)
        times = {"prefill_s": statistics.median(prefill), **ratios(base_prefill, prefill, "prefill_ratio")}
        times |= {**spread("decode", decode, 1e3), **ratios(base_decode, decode, "decode_ratio")}
        kind, _, setting = name.partition("(")
        rows.append({"cache": kind, "setting": setting[:-1], **times, "mib": round(mebibytes[-1], 2)})
    fixed = _about(args, model) | _shape(model) | {"batch": args.batch, "context": args.context}
    emit(args, {"environment": fixed, "model": args.model, "caches": rows}, show(rows, BENCH_COLUMNS), rows, fixed)
    return 0


def _random_model(name: str, device: torch.device, dtype: str) -> Any:
    """A model with random weights; `auto` is the dtype that its config names."""
    config = from_pretrained(transformers.AutoConfig, name)
    chosen = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=chosen).eval()


def _timed(model: Any, caches: Mapping[str, Callable[[], Cache]], args: argparse.Namespace) -> dict[str, list[tuple[float, ...]]]:
    """Seconds of the prompt and of a step, and mebibytes, of each round. All have the same prompt: stores are timed on a hit."""
    vocabulary = compat.decoder_config(model.config).vocab_size
    ids = torch.randint(1, vocabulary, (args.batch, args.context + args.steps), generator=torch.Generator().manual_seed(0))
    runner, tokens = ModelRunner(model, ids[:, : args.context]), ids[:, args.context :].to(model.device).unbind(1)

    def timed(name: str, _: int) -> tuple[float, ...]:
        cache = caches[name]()
        logits, prefill = runner.prefill(cache)
        if not bool(logits.isfinite().all()):
            raise UnsupportedError(f"{name}: the logits behind the prompt are not finite, so nothing is timed.")
        decode = sum(runner.decode(cache, token, step)[1] for step, token in enumerate(tokens, 1))
        return prefill, decode / args.steps, cache_bytes(cache) / 2**20

    return in_turns({name: partial(timed, name) for name in caches}, args.rounds, warm_up=1)


def _shape(model: Any) -> Row:
    text = compat.decoder_config(model.config)
    sizes, heads = head_sizes(text, 0), getattr(text, "num_attention_heads", "")
    names = {"hidden": "hidden_size", "layers": "num_hidden_layers"}
    shape = {column: getattr(text, name, "") for column, name in names.items()}
    return shape | {"heads": heads, "kv_heads": getattr(text, "num_key_value_heads", heads), "head_dim": "" if sizes is None else sizes[0]}


def in_turns(works: Mapping[str, Callable[[int], Any]], rounds: int, warm_up: int = 0) -> dict[str, list[Any]]:
    """Call every work with the number of the round, round by round, each time another one first: what slows the computer for a while
    slows all. Results of the warm-up rounds are dropped."""
    names = list(works)
    results: dict[str, list[Any]] = {name: [] for name in names}
    for index in range(-warm_up, rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            result = works[name](max(index, 0))
            if index >= 0:
                results[name].append(result)
    return results


def spread(name: str, values: Sequence[float], factor: float = 1.0) -> dict[str, float]:
    """Median and quartiles as columns; in milliseconds with a factor of 1,000."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    unit = "" if factor == 1 else "_ms"
    numbers = {"": statistics.median(values), "_q1": low, "_q3": high}
    return {f"{name}{quartile}{unit}": round(value * factor, 4) for quartile, value in numbers.items()}


def ratios(base: Sequence[float], seconds: Sequence[float], name: str = "ratio") -> dict[str, float]:
    """Columns of how many times as fast a side is, taken round by round."""
    return spread(name, [before / after for before, after in zip(base, seconds, strict=True)])
