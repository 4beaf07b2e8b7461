"""What a consumer says behind caches that were translated from another model's, against its own prefill of the same prefix.

    python scripts/eval_translation.py [--pairs base:tuned ...] [--texts 24] [--csv FOLDER] [--plot FOLDER] [--quick]

For each pair of the testbed's models (producer:consumer) translators are fitted to prefixes of the first halves of the held-out texts, and
measured on the second halves. **prose**, **verse**: 32 tokens behind a piece of a book. **documents**: a context with facts, behind which
all questions are asked with their true answers; divergences are of the first 32 tokens, recall is of all answers.

All sides hold all tokens of the prefix but the last, which the consumer runs. `raw K/V` and `int4 K/V` are the producer's keys and values
as they are. `zero bytes` makes all of the token ids. `full rank, float32` is the limit of linear maps. Shares are of the keys and values
of all layers in bfloat16.
"""

from __future__ import annotations

import argparse

import torch
from _translation_quality import SIDES, TOKENS, WORKLOADS, Bench, Side, calibration_texts, evaluation_texts
from _translation_report import Details, Found, bars, report, write_file, write_plot
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.results import environment
from tqdm import tqdm

PAIRS = ("base:tuned", "tuned:base", "base:lora")


def details_of(side: Side, bench: Bench) -> Details:
    """What is known of a side but for its answers."""
    if side.kind == "paper":
        bench.fit_paper(side)
    return Details(bench.fit(side).settings.seconds) if side.kind == "fitted" else Details()


def measure(args: argparse.Namespace, pair: str, found: Found, device: torch.device) -> None:
    """Add all answers of a pair."""
    (producer, tokenizer), (consumer, _) = (load(name, device) for name in pair.split(":"))
    bench = Bench(producer, consumer, tokenizer, calibration_texts(tokenizer, args.calibration, args.longest))
    name = pair.replace(":", " -> ")
    for side in tqdm(SIDES, unit=" fits", desc=name):
        found.details[name, side] = details_of(side, bench)
    found.answers.update({(name, side, workload): [] for side in SIDES for workload in WORKLOADS})
    with torch.no_grad():
        for text in tqdm(evaluation_texts(tokenizer, args.texts, args.seed, args.longest), unit=" texts", desc=name):
            for side, answer in bench.ask(text, SIDES):
                found.answers[name, side, text.workload].append(answer)


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "seed", "device", "csv", "plot", "quick")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS), help="producer:consumer, of the testbed")
    parser.add_argument("--texts", type=int, default=24, help="of each workload")
    parser.add_argument("--calibration", type=int, default=64, help="prefixes that translators are fitted to")
    parser.add_argument("--longest", type=int, default=TOKENS[1], help="prefix, in tokens")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(texts=1, calibration=8, longest=300)
    check_counts(args, ["texts", "calibration"])
    if not TOKENS[0] <= args.longest <= TOKENS[1]:
        parser.error(f"--longest: expected {TOKENS[0]} to {TOKENS[1]}, got {args.longest}")
    return args


def main() -> None:
    args = parse()
    device, found = begin(args), Found()
    for pair in dict.fromkeys(args.pairs):
        measure(args, pair, found, device)
    print(f"{report(found)}\n")
    print("\n".join(bars(found)))
    if args.csv:
        settings = {"seed": args.seed, "calibration": args.calibration, "longest": args.longest}
        write_file(args.csv, found, {**environment(device), **settings})
    if args.plot:
        write_plot(args.plot, found)


if __name__ == "__main__":
    run_script(main)
