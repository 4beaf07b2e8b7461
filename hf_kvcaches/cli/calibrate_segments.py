"""`hf-kvcaches calibrate segments`: a `SegmentPolicy` from prompts as they come."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from hf_kvcaches.cli.options import begin, check_counts, load, require_files
from hf_kvcaches.cli.tables import show_measured
from hf_kvcaches.cli.texts import read_prompts
from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.segments.calibration import calibrate

# From a tokenizer and a number: lists of prompts by name, and how many tokens at the end of each are withheld.
Generator = Callable[[Any, int], tuple[dict[str, list[list[int]]], int]]


def run(args: argparse.Namespace, load_model: Callable[..., tuple[Any, Any]] = load, generator: Generator | None = None) -> None:
    """Calibrates, prints all settings that were measured, and saves.

    Args:
        generator: Makes prompts where there is no file.
    """
    check_counts(args, ["requests", "asked"])
    device = begin(args)
    if args.prompts is not None:
        require_files("--prompts", [args.prompts])
    model, tokenizer = load_model(args.model, device, getattr(args, "dtype", "auto"))
    if args.prompts is None:
        assert generator is not None
        prompts, asked = generator(tokenizer, args.requests)
    else:
        prompts, asked = {args.prompts.stem: read_prompts(args.prompts, tokenizer)[: args.requests]}, args.asked
    quantization = None if args.quantization == "none" else args.quantization
    if args.codec is not None:
        quantization = KVCodec.from_pretrained(args.codec, model=model)
    began = time.perf_counter()
    bounds = {"bound": args.bound, "worst": args.worst, "least_same": args.least_same}
    policy = calibrate(model, tokenizer, prompts, **bounds, asked=asked, quantization=quantization)
    seconds = time.perf_counter() - began
    policy.save_pretrained(args.out)
    print(f"{show_measured(policy.measured)}\n\n{seconds:.0f} s; written to {args.out}: {policy}\n")
