"""`hf-kvcaches calibrate warmstart`: a `WarmStartGate` from pairs of prompts."""

from __future__ import annotations

import argparse
import time

from hf_kvcaches.cli.options import begin, load
from hf_kvcaches.cli.tables import show_measured
from hf_kvcaches.cli.texts import read_pairs
from hf_kvcaches.warmstart.calibration import CLOSED, calibrate_gate


def run(args: argparse.Namespace) -> None:
    """Calibrates, prints the limits that were tried, and saves."""
    device = begin(args)
    pairs = read_pairs(args.pairs)
    model, tokenizer = load(args.model, device, getattr(args, "dtype", "auto"))
    options = {"encoder": args.encoder, "quantization": None if args.quantization == "none" else args.quantization}
    began = time.perf_counter()
    gate = calibrate_gate(model, tokenizer, options, pairs, bound=args.bound, worst=args.worst, following=args.following)
    seconds = time.perf_counter() - began
    gate.save_pretrained(args.out)
    print(f"{show_measured(gate.measured)}\n\n{len(pairs)} pairs, {seconds:.0f} s; written to {args.out}")
    print(f"reusable: {_limit_text(gate.reusable)}\nrepair: {gate.repair:g}\nencoder: {gate.encoder}")


def _limit_text(limit: float) -> str:
    return f"{limit:.4f}" if limit < CLOSED else f"{limit:g}, which refuses everything"
