"""Calibrates a `WarmStartGate` for a model: how much a prompt must resemble an earlier one to be answered from its state.

    python scripts/calibrate_warmstart.py --out FOLDER [--model FOLDER_OR_HUB_ID] [--pairs FILE.jsonl] [--budget 0.01]

A line of the file is one pair: an object with an earlier prompt under "source" and a new one under "target", each a string or a list of
token ids. Give pairs as your prompts come, those included that must not be taken for each other. Without a file, generated ones are taken,
which were made for the tokenizer of this repository's small model.

Printed are the limits that were tried, with how many pairs each lets through and how many of these are false hits: their next token's
distribution differs by more than 0.05 nats from that of the model alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from _common import TESTBED, check_counts, load, pick_device, run_script, table
from transformers.utils import logging

from hf_kvcaches import WarmStartGate
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.warmstart.calibration import CLOSED, calibrate_gate
from hf_kvcaches.warmstart.prompts import Prompt

# Seeds of generated pairs begin here; those that `eval_warmstart.py` measures on begin at 0.
CALIBRATION_SEED = 2 * 10**6


def read_pairs(path: Path) -> list[tuple[Prompt, Prompt]]:
    """The pairs of a file."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            pair = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        prompts = [pair.get(name) for name in ("source", "target")] if isinstance(pair, dict) else [None]
        if not all(_is_prompt(prompt) for prompt in prompts):
            raise ConfigError.of(f"{path}, line {number}", "an object with a string or token ids as source and as target", line[:80])
        found.append((prompts[0], prompts[1]))
    return found


def _is_prompt(given: Any) -> bool:
    return isinstance(given, str) or (isinstance(given, list) and all(isinstance(token, int) for token in given))


def generated_pairs(tokenizer: Any, each: int, lengths: list[int], seed: int = CALIBRATION_SEED) -> list[tuple[Prompt, Prompt]]:
    """Pairs of all kinds, so many of each kind, length and way to ask."""
    from tests.testbed.pairs import KINDS, make_pairs

    made = [
        make_pairs(tokenizer, kind, each, seed, length, asks=asks) for kind in KINDS for length in lengths for asks in ("same", "other")
    ]
    return [(pair.source.prompt, pair.target.prompt) for own in made for pair in own]


def settings_table(gate: WarmStartGate) -> str:
    """All limits that were tried, the chosen ones marked."""
    names = [name for name in gate.measured[0] if name != "chosen"] if gate.measured else []
    rows = [["*" if row["chosen"] else "", *(_cell(row[name]) for name in names)] for row in gate.measured]
    return table(["", *names], rows)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _told(limit: float) -> str:
    return f"{limit:.4f}" if limit < CLOSED else f"{limit:g}, which refuses everything"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TESTBED / "base"), help="a folder or a hub id; default: the small model of this repository")
    parser.add_argument("--out", type=Path, required=True, help="the folder that the gate is written to")
    parser.add_argument("--pairs", type=Path, help="one pair a line, as JSON")
    parser.add_argument("--each", type=int, default=6, help="generated pairs of each kind, length and way to ask")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 300, 600], help="of generated prompts, in tokens")
    parser.add_argument("--budget", type=float, default=0.01, help="the largest share of false hits in what is let through")
    parser.add_argument("--slots", type=int, default=64, help="of the library that the gate is for")
    parser.add_argument("--layout", choices=("salient", "paper"), default="salient", help="of its slots")
    parser.add_argument("--encoder", help="of that library; default: the model's input embeddings")
    parser.add_argument("--full", choices=("int8", "int4", "exact", "none"), default="int8", help="how it keeps keys and values")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="few short pairs, to see that everything runs")
    args = parser.parse_args()
    check_counts(args, ["each"])
    if args.quick:
        args.each, args.lengths = 1, [300]
    return args


def main() -> None:
    args = parse()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    given = None if args.pairs is None else read_pairs(args.pairs)
    model, tokenizer = load(args.model, pick_device(args.device))
    pairs = generated_pairs(tokenizer, args.each, args.lengths) if given is None else given
    full = None if args.full == "none" else args.full
    options = {"slots": args.slots, "layout": args.layout, "encoder": args.encoder, "full": full}
    began = time.perf_counter()
    gate = calibrate_gate(model, tokenizer, options, pairs, budget=args.budget)
    seconds = time.perf_counter() - began
    gate.save_pretrained(args.out)
    print(f"{settings_table(gate)}\n\n{len(pairs)} pairs, {seconds:.0f} s; written to {args.out}")
    print(f"tau: {_told(gate.tau)}\nreusable: {_told(gate.reusable)}\nencoder: {gate.encoder}")


if __name__ == "__main__":
    run_script(main)
