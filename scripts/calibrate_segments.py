"""Calibrates a `SegmentPolicy` for a model: which segments of earlier prompts may stand behind another text, and what is run again.

    python scripts/calibrate_segments.py --out FOLDER [--model FOLDER_OR_HUB_ID] [--prompts FILE.jsonl] [--bound 0.05]

A line of the file is one prompt: a string, a list of token ids, or an object with one of these under "prompt"; in the order in which
they came, since later ones reuse what earlier ones stored. Without a file, generated requests of agents are taken. Printed are all settings
that were measured.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from shared.cli import arguments, begin, check_counts, load, run_script
from shared.results import show_measured
from shared.texts import read_prompts

from hf_kvcaches import KVCodec
from hf_kvcaches.segments.calibration import calibrate


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "model", "device")
    parser.add_argument("--out", type=Path, required=True, help="the folder that the policy is written to")
    parser.add_argument("--prompts", type=Path, help="one prompt a line, as JSON")
    parser.add_argument("--requests", type=int, default=40, help="how many to generate, or to read at most")
    parser.add_argument("--asked", type=int, default=16, help="tokens at the end of each prompt of a file that are withheld and compared")
    parser.add_argument("--bound", type=float, default=0.05, help="the most that the mean KL divergence may be, in nats")
    parser.add_argument("--least-same", type=float, default=0.0, help="the least share of next tokens that are the model's own")
    parser.add_argument("--quantization", choices=("int8", "int4", "none"), default="none", help="of the store that the policy is for")
    parser.add_argument("--cuts", type=int, help="of that store: guards of the lower layers are calibrated, too")
    parser.add_argument("--codec", help="in place of it: the folder or hub id of a KVCodec, for a store of its codes")
    args = parser.parse_args()
    check_counts(args, ["requests", "asked"])
    return args


def main() -> None:
    args = parse()
    model, tokenizer = load(args.model, begin(args))
    if args.prompts is None:
        from _segments_quality import calibration_prompts

        prompts, asked = calibration_prompts(tokenizer, args.requests)
    else:
        prompts, asked = {args.prompts.stem: read_prompts(args.prompts, tokenizer)[: args.requests]}, args.asked
    quantization = None if args.quantization == "none" else args.quantization
    if args.codec is not None:
        quantization = KVCodec.from_pretrained(args.codec, model=model)
    began = time.perf_counter()
    bounds = {"bound": args.bound, "least_same": args.least_same}
    policy = calibrate(model, tokenizer, prompts, **bounds, asked=asked, quantization=quantization, cuts=args.cuts)
    seconds = time.perf_counter() - began
    policy.save_pretrained(args.out)
    print(f"{show_measured(policy.measured)}\n\n{seconds:.0f} s; written to {args.out}: {policy}\n")


if __name__ == "__main__":
    run_script(main)
