"""Calibrates a `WarmStartGate` for a model: how much a prompt must resemble an earlier one to be answered from its state.

    python scripts/calibrate_warmstart.py --out FOLDER [--model FOLDER_OR_HUB_ID] [--pairs FILE.jsonl] [--bound 0.02] [--worst 0.05]

A line of the file is one pair: an object with an earlier prompt under "source" and a new one under "target", each a string or a list of
token ids. Give pairs as your prompts come, those included that must not be taken for each other. Without a file, generated ones are taken.
Printed are the limits that were tried, with how many pairs each admits, and how far the first token's distribution, or the mean over the
`--following` ones behind it, diverges from that of the model alone (KL, in nats): in the mean and at most.
"""

from __future__ import annotations

from typing import Any

from shared.cli import arguments, check_counts, load, run_script

from hf_kvcaches.cli import arguments as options
from hf_kvcaches.cli import calibrate_warmstart as command
from hf_kvcaches.cli.texts import Text

# Seeds of generated pairs begin here.
CALIBRATION_SEED = 2 * 10**6


def generated_pairs(tokenizer: Any, count: int, lengths: list[int], seed: int = CALIBRATION_SEED) -> list[tuple[Text, Text]]:
    """Pairs of all kinds, so many of each kind, length and way to ask."""
    from tests.testbed.pairs import KINDS, make_pairs

    groups = (make_pairs(tokenizer, kind, count, seed, n, asks=asks) for kind in KINDS for n in lengths for asks in ("same", "other"))
    return [(pair.source.prompt, pair.target.prompt) for group in groups for pair in group]


def main() -> None:
    parser = arguments(__doc__, "model", "device", "quick")
    options.warmstart(parser, generated=True)
    parser.add_argument("--each", type=int, default=6, help="generated pairs of each kind, length and way to ask")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 300, 600], help="of generated prompts, in tokens")
    args = parser.parse_args()
    check_counts(args, ["each"])
    each, lengths = (1, [300]) if args.quick else (args.each, args.lengths)
    command.run(args, load, lambda tokenizer: generated_pairs(tokenizer, each, lengths))


if __name__ == "__main__":
    run_script(main)
