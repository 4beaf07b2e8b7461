"""`hf-kvcaches calibrate translator`: a `CacheTranslator` for a producer and a consumer."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from hf_kvcaches.cli.options import begin, load
from hf_kvcaches.cli.tables import table
from hf_kvcaches.cli.texts import read_texts, spaced
from hf_kvcaches.errors import require
from hf_kvcaches.translate.config import TranslatorConfig
from hf_kvcaches.translate.translator import CacheTranslator


def run(args: argparse.Namespace) -> None:
    """Calibrates, prints what each stage took, and saves."""
    device, state = begin(args), _launched()
    first = state is None or state.is_main_process
    device = state.device if state is not None and args.device == "auto" else device
    dtype = getattr(args, "dtype", "auto")
    (producer, one), (consumer, other) = (load(name, device, dtype) for name in (args.producer, args.consumer))
    texts = spaced([text for path in args.texts for text in read_texts(path, other, args.length)], args.prefixes)
    options = {
        "payload": args.payload,
        "recompute_layers": int(args.recompute_layers) if args.recompute_layers.isdigit() else args.recompute_layers,
        "config": TranslatorConfig(layers_per_code=args.layers_per_code, metric=args.metric, memory=args.memory),
        "max_length": max(args.length, 8),
    }
    began = time.perf_counter()
    translator = CacheTranslator.fit(producer, consumer, (one, other), texts, progress=first, **options)
    seconds = time.perf_counter() - began
    if not first:
        return
    translator.save_pretrained(args.out)
    print(f"{_seconds_table(dict(translator.settings.seconds))}\n\n{translator.describe_calibration()}\n")
    print(f"{len(texts)} texts, {seconds:.1f} s; written to {args.out}")
    if args.push_to_hub:
        print(f"uploaded: {translator.push_to_hub(args.push_to_hub)}")


def _launched() -> Any:
    """The state of this process where `accelerate launch` or torchrun started several, else None."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    return require("accelerate", "distributed", "A calibration in several processes").PartialState()


def _seconds_table(seconds: dict[str, float]) -> str:
    """What each stage took, and its share."""
    whole = max(sum(seconds.values()), 1e-9)
    rows = [[stage, f"{spent:.1f}", f"{spent / whole:.0%}"] for stage, spent in seconds.items()]
    return table(["stage", "seconds", "share"], [*rows, ["together", f"{sum(seconds.values()):.1f}", ""]])
