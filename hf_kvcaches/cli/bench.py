"""`hf-kvcaches bench`: prefill and decode steps of caches, beside a `DynamicCache`."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import Cache, DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.cli.calls import CallSpec, parse
from hf_kvcaches.cli.options import begin, load, load_config
from hf_kvcaches.cli.specs import caches_of
from hf_kvcaches.cli.tables import Row, environment, hardware, print_environment, print_json, show, write_csv
from hf_kvcaches.cli.timing import in_turns, ratios, spread
from hf_kvcaches.core.rope_families import head_sizes
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.evaluate.measures import cache_bytes
from hf_kvcaches.evaluate.runner import ModelRunner, Seconds

COLUMNS = {
    "cache": "{cache}({setting})",
    "prefill s": "{prefill_s:.4f}",
    "times as fast": "{prefill_ratio:.2f}x",
    "step ms": "{decode_ms:.3f}",
    "times as fast ": "{decode_ratio:.2f}x",
    "quartiles": "{decode_ratio_q1:.2f}-{decode_ratio_q3:.2f}",
    "MiB": "{mib:.1f}",
}
# The columns of speed tables, which `recommend` reads.
SPEED_COLUMNS = (
    *("hardware", "device", "threads", "dtype", "cache", "setting", "hidden", "layers", "heads", "kv_heads", "head_dim"),
    *("batch", "context", "prefill_s", "decode_ms", "prefill_ratio", "decode_ratio", "mib"),
)


@torch.no_grad()
def run(args: argparse.Namespace) -> int:
    device, specs = begin(args), [parse(text) for text in args.cache]
    model, tokenizer = _random_model(args.model, device, args.dtype) if args.random else load(args.model, device, args.dtype)
    if not args.json:
        print_environment(device)
    recipes = [(spec, caches_of(spec, model, tokenizer)) for spec in specs]
    sides = [TimedSide(CallSpec("DynamicCache", (), {}), lambda: DynamicCache(config=model.config))]
    sides += [TimedSide(spec, lambda caches=caches: caches.new_cache(model)) for spec, caches in recipes]  # type: ignore[misc]
    rows = _measured(model, sides, args)
    if args.json:
        print_json({"environment": environment(device), "model": args.model, "caches": rows})
    else:
        print(show(rows, COLUMNS))
    if args.csv:
        write_csv(args.csv, [{name: row[name] for name in SPEED_COLUMNS} for row in rows])
    return 0


@dataclass(frozen=True)
class TimedSide:
    """A cache to time."""

    spec: CallSpec
    make: Callable[[], Cache]


def _random_model(name: str, device: torch.device, dtype: str) -> tuple[Any, None]:
    """A model with random weights; `auto` is the dtype that its config names."""
    config = load_config(name)
    chosen = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=chosen).eval(), None


def _measured(model: Any, sides: Sequence[TimedSide], args: argparse.Namespace) -> list[Row]:
    """A row for each side. All have the same prompt in all rounds, so that stores and libraries are timed on a hit."""
    text = compat.decoder_config(model.config)
    ids = torch.randint(1, text.vocab_size, (args.batch, args.context + args.steps), generator=torch.Generator().manual_seed(0))
    runner, tokens = ModelRunner(model, ids[:, : args.context]), ids[:, args.context :].to(model.device).unbind(1)
    allocated: dict[str, int] = {}

    def timed(side: TimedSide) -> Seconds:
        cache = side.make()
        logits, prefill = runner.prefill(cache)
        if not bool(logits.isfinite().all()):
            raise UnsupportedError(f"{side.spec}: the logits behind the prompt are not finite, so nothing is timed.")
        decode = sum(runner.decode(cache, token, step)[1] for step, token in enumerate(tokens, 1))
        allocated[repr(side.spec)] = cache_bytes(cache)
        return Seconds(prefill, decode / args.steps)

    works = {repr(side.spec): lambda _, side=side: timed(side) for side in sides}
    seconds = in_turns(works, args.rounds, warm_up=1)
    base = seconds[repr(sides[0].spec)]
    shape = _shape(model, args)
    rows = []
    for side in sides:
        name = repr(side.spec)
        rows.append({**shape, **_times(side.spec, seconds[name], base), "mib": round(allocated[name] / 2**20, 2)})
    return rows


def _times(spec: CallSpec, seconds: Sequence[Seconds], base: Sequence[Seconds]) -> Row:
    """Medians, and how many times as fast as the full cache."""
    row: Row = {"cache": spec.name, "setting": spec.arguments, "prefill_s": statistics.median(each.prefill for each in seconds)}
    row |= spread("decode", [each.decode for each in seconds], 1e3)
    for name in ("prefill", "decode"):
        quotients = ratios([getattr(each, name) for each in base], [getattr(each, name) for each in seconds])
        row |= {f"{name}_{column}": value for column, value in quotients.items()}
    return row


def _shape(model: Any, args: argparse.Namespace) -> Row:
    """The columns that all rows share."""
    text = compat.decoder_config(model.config)
    sizes = head_sizes(text, 0)
    heads = getattr(text, "num_attention_heads", "")
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
