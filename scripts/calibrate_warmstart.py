"""Calibrates a `WarmStartGate` for a model: how much a prompt must resemble an earlier one to be answered from its state.

    python scripts/calibrate_warmstart.py --out FOLDER [--model FOLDER_OR_HUB_ID] [--pairs FILE.jsonl] [--budget 0.01]

A line of the file is one pair: an object with an earlier prompt under "source" and a new one under "target", each a string or a list of
token ids. Give pairs as your prompts come, those included that must not be taken for each other. Without a file, generated ones are taken.
Printed are the limits that were tried, with how many pairs each admits and how many of these are false hits: the first token's
distribution, or the mean over the `--following` ones behind it, differs by more than 0.05 nats from that of the model alone. `first`,
`following` and `right` are means over the admitted pairs: both divergences, and the share of following tokens that the model chooses, too.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from shared.cli import arguments, begin, check_counts, load, run_script
from shared.results import show_measured
from shared.texts import as_text, read_lines

from hf_kvcaches.warmstart.calibration import CLOSED, calibrate_gate
from hf_kvcaches.warmstart.library import Prompt

# Seeds of generated pairs begin here; those that `eval_warmstart.py` measures on begin at 0.
CALIBRATION_SEED = 2 * 10**6


def read_pairs(path: Path) -> list[tuple[Prompt, Prompt]]:
    """The pairs of a file."""

    def parse(line: Any) -> tuple[Prompt, Prompt] | None:
        source, target = (as_text(line, name) if isinstance(line, dict) and name in line else None for name in ("source", "target"))
        return None if source is None or target is None else (source, target)

    return read_lines(path, parse, "an object with a string or token ids as source and as target")


def generated_pairs(tokenizer: Any, count: int, lengths: list[int], seed: int = CALIBRATION_SEED) -> list[tuple[Prompt, Prompt]]:
    """Pairs of all kinds, so many of each kind, length and way to ask."""
    from tests.testbed.pairs import KINDS, make_pairs

    groups = (make_pairs(tokenizer, kind, count, seed, n, asks=asks) for kind in KINDS for n in lengths for asks in ("same", "other"))
    return [(pair.source.prompt, pair.target.prompt) for group in groups for pair in group]


def limit_text(limit: float) -> str:
    return f"{limit:.4f}" if limit < CLOSED else f"{limit:g}, which refuses everything"


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "model", "device", "quick")
    parser.add_argument("--out", type=Path, required=True, help="the folder that the gate is written to")
    parser.add_argument("--pairs", type=Path, help="one pair a line, as JSON")
    parser.add_argument("--each", type=int, default=6, help="generated pairs of each kind, length and way to ask")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 300, 600], help="of generated prompts, in tokens")
    parser.add_argument("--budget", type=float, default=0.01, help="the largest share of false hits in what is admitted")
    parser.add_argument("--slots", type=int, default=64, help="of the library that the gate is for")
    parser.add_argument("--layout", choices=("salient", "paper"), default="salient", help="of its slots")
    parser.add_argument("--encoder", help="of that library; default: the model's input embeddings")
    parser.add_argument("--following", type=int, default=16, help="tokens behind the first one that are compared")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none", help="how it keeps keys and values")
    parser.add_argument("--slots-only", action="store_true", help="it keeps summaries, and no keys and values of whole prompts")
    args = parser.parse_args()
    check_counts(args, ["each"])
    if args.quick:
        args.each, args.lengths = 1, [300]
    return args


def main() -> None:
    args = parse()
    device = begin(args)
    pairs = None if args.pairs is None else read_pairs(args.pairs)
    model, tokenizer = load(args.model, device)
    pairs = generated_pairs(tokenizer, args.each, args.lengths) if pairs is None else pairs
    options = {"slots": args.slots, "layout": args.layout, "encoder": args.encoder, "full": not args.slots_only}
    options["quantization"] = None if args.quantization == "none" else args.quantization
    began = time.perf_counter()
    gate = calibrate_gate(model, tokenizer, options, pairs, budget=args.budget, following=args.following)
    seconds = time.perf_counter() - began
    gate.save_pretrained(args.out)
    print(f"{show_measured(gate.measured)}\n\n{len(pairs)} pairs, {seconds:.0f} s; written to {args.out}")
    print(f"tau: {limit_text(gate.tau)}\nreusable: {limit_text(gate.reusable)}\nencoder: {gate.encoder}")


if __name__ == "__main__":
    run_script(main)
