"""`hf-kvcaches bench`: prefill and decode steps of caches, beside a `DynamicCache`."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from transformers import Cache, DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.cli.arguments import CallSpec
from hf_kvcaches.cli.inputs import begin, from_pretrained, load, makers
from hf_kvcaches.cli.tables import Row, emit, environment, hardware, print_environment, show
from hf_kvcaches.core.rope_families import head_sizes
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.evaluate.measures import cache_bytes
from hf_kvcaches.evaluate.runner import ModelRunner

COLUMNS = {
    "cache": "{cache}({setting})",
    "prefill s": "{prefill_s:.4f}",
    "times as fast": "{prefill_ratio:.2f}x",
    "step ms": "{decode_ms:.3f}",
    "times as fast ": "{decode_ratio:.2f}x",
    "quartiles": "{decode_ratio_q1:.2f}-{decode_ratio_q3:.2f}",
    "MiB": "{mib:.1f}",
}


@torch.no_grad()
def run_bench(args: argparse.Namespace) -> int:
    device = begin(args)
    model, tokenizer = (_random_model(args.model, device, args.dtype), None) if args.random else load(args.model, device, args.dtype)
    if not args.json:
        print_environment(device)
    specs = {repr(spec): spec for spec in (CallSpec("DynamicCache", (), {}), *args.cache)}
    caches = {"DynamicCache()": lambda: DynamicCache(config=model.config), **makers(args.cache, model, tokenizer)}
    measured, shape, rows = _timed(model, caches, args), _shape(model, args), []
    base_prefill, base_decode, _ = zip(*measured["DynamicCache()"], strict=True)
    for name, spec in specs.items():
        prefill, decode, mebibytes = zip(*measured[name], strict=True)
        times = {"prefill_s": statistics.median(prefill), **ratios(base_prefill, prefill, "prefill_ratio")}
        times |= {**spread("decode", decode, 1e3), **ratios(base_decode, decode, "decode_ratio")}
        rows.append({**shape, "cache": spec.name, "setting": spec.arguments, **times, "mib": round(mebibytes[-1], 2)})
    emit(args, {"environment": environment(device), "model": args.model, "caches": rows}, show(rows, COLUMNS), rows, {})
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


def _shape(model: Any, args: argparse.Namespace) -> Row:
    """The columns that all rows share."""
    text = compat.decoder_config(model.config)
    sizes, heads = head_sizes(text, 0), getattr(text, "num_attention_heads", "")
    return {
        "hardware": hardware(model.device),
        "device": model.device.type,
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "hidden": getattr(text, "hidden_size", ""),
        "layers": getattr(text, "num_hidden_layers", ""),
        "heads": heads,
        "kv_heads": getattr(text, "num_key_value_heads", heads),
        "head_dim": "" if sizes is None else sizes[0],
        "batch": args.batch,
        "context": args.context,
    }


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
