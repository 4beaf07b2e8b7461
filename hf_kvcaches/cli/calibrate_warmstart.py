"""`hf-kvcaches calibrate warmstart`: a `WarmStartGate` from pairs of prompts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from hf_kvcaches.cli.options import begin, load, require_files
from hf_kvcaches.cli.tables import show_measured
from hf_kvcaches.cli.texts import Text, read_pairs
from hf_kvcaches.warmstart.calibration import CLOSED, calibrate_gate

# From a tokenizer: pairs of an earlier prompt and a new one.
Generator = Callable[[Any], list[tuple[Text, Text]]]


def run(args: argparse.Namespace, load_model: Callable[..., tuple[Any, Any]] = load, generator: Generator | None = None) -> None:
    """Calibrates, prints the limits that were tried, and saves.

    Args:
        generator: Makes pairs where there is no file.
    """
    device = begin(args)
    if args.pairs is not None:
        require_files("--pairs", [args.pairs])
    pairs = None if args.pairs is None else read_pairs(args.pairs)
    model, tokenizer = load_model(args.model, device, getattr(args, "dtype", "auto"))
    if pairs is None:
        assert generator is not None
        pairs = generator(tokenizer)
    options = {"encoder": args.encoder, "quantization": None if args.quantization == "none" else args.quantization}
    began = time.perf_counter()
    gate = calibrate_gate(model, tokenizer, options, pairs, bound=args.bound, worst=args.worst, following=args.following)
    seconds = time.perf_counter() - began
    gate.save_pretrained(args.out)
    print(f"{show_measured(gate.measured)}\n\n{len(pairs)} pairs, {seconds:.0f} s; written to {args.out}")
    print(f"reusable: {_limit_text(gate.reusable)}\nrepair: {gate.repair:g}\nencoder: {gate.encoder}")


def _limit_text(limit: float) -> str:
    return f"{limit:.4f}" if limit < CLOSED else f"{limit:g}, which refuses everything"
