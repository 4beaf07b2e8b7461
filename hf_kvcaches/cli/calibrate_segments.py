"""`hf-kvcaches calibrate segments`: a `SegmentPolicy` from prompts as they come."""

from __future__ import annotations

import argparse
import time

from hf_kvcaches.cli.options import begin, load
from hf_kvcaches.cli.tables import show_measured
from hf_kvcaches.cli.texts import read_prompts
from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.segments.calibration import calibrate


def run(args: argparse.Namespace) -> None:
    """Calibrates, prints all settings that were measured, and saves."""
    device = begin(args)
    model, tokenizer = load(args.model, device, getattr(args, "dtype", "auto"))
    prompts = {args.prompts.stem: read_prompts(args.prompts, tokenizer)[: args.requests]}
    quantization = None if args.quantization == "none" else args.quantization
    if args.codec is not None:
        quantization = KVCodec.from_pretrained(args.codec, model=model)
    began = time.perf_counter()
    bounds = {"bound": args.bound, "worst": args.worst, "least_same": args.least_same}
    policy = calibrate(model, tokenizer, prompts, **bounds, asked=args.asked, quantization=quantization)
    seconds = time.perf_counter() - began
    policy.save_pretrained(args.out)
    print(f"{show_measured(policy.measured)}\n\n{seconds:.0f} s; written to {args.out}: {policy}\n")
