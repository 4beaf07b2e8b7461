"""What a consumer says behind caches that were translated from another model's, against its own prefill of the same prefix.

    python scripts/eval_translation.py [--pairs base:tuned ...] [--texts 24] [--sweep] [--csv FOLDER] [--plot FOLDER] [--quick]

For each pair of the testbed's models (producer:consumer) translators are fitted to prefixes of the first halves of the held-out texts, and
measured on the second halves. **prose**, **verse**: 32 tokens behind a piece of a book. **documents**: a context with facts, behind which
all questions are asked with their true answers; divergences are of the first 32 tokens, recall is of all answers.

All sides hold all tokens of the prefix but the last, which the consumer runs. `raw K/V` and `int4 K/V` are the producer's keys and values
as they are. `selective recompute` replaces half of the layers, side by side, by the consumer's own, exactly and not from the producer's
hidden states, which flatters it. `zero bytes` makes all of the token ids; it says how much of a text these small models need at all.
`full rank, float32` is the limit of linear maps. Shares are of the keys and values of all layers in bfloat16. No translator sends layer 0,
the paper's as little as ours: a payload of 0.25 in half precision, of 3 layers in 4, is a share of 0.19. In the last tables one layer at a
time is translated, among the consumer's own.

The default, the paper's Reuse + Patch, and the sides with other ways of reading come from `CacheTranslator.fit`. The others follow from
sums that are read once, as it would read them without texts kept apart for patches.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from _common import check_counts, environment, pick_device, prepare, run_script
from _translation_quality import TOKENS, WORKLOADS, Bench, calibration_texts, evaluation_texts
from _translation_report import Details, Found, bars, explain, show, write_csv, write_plot
from _translation_sides import ORACLE, SELECTIVE, SIDES, Side, Workshop, alone_sides, budget_sides, rank_sides, translators
from tqdm import tqdm

from hf_kvcaches.translate.translator import CacheTranslator
from tests import testbed

PAIRS = ("base:tuned", "tuned:base", "base:lora")


def sides_of(workshop: Workshop, sweep: bool) -> list[Side]:
    """What is run for a pair."""
    swept = []
    if sweep:
        keys, values, _ = workshop.sums.shapes["consumer"]
        swept = [*rank_sides(keys, values), *budget_sides(workshop.pair.layers)]
    return [*SIDES, *swept, *alone_sides(workshop.pair.layers)]


def details_of(side: Side, workshop: Workshop, made: dict[str, CacheTranslator]) -> Details:
    """What is known of a side but for its answers."""
    if side == ORACLE:
        return Details(run_layers=workshop.pair.layers)
    if side == SELECTIVE:
        return Details(run_layers=len(workshop.selected), chosen=workshop.selected)
    if side.name in made:
        translator = made[side.name]
        return Details(translator.settings.recompute_layers, translator.patched_layers, translator.settings.seconds)
    return Details()


def measure(args: argparse.Namespace, pair: str, found: Found) -> None:
    """Adds all answers of a pair."""
    device = pick_device(args.device)
    (producer, tokenizer), (consumer, _) = (testbed.load(name) for name in pair.split(":"))
    texts = calibration_texts(tokenizer, args.calibration, args.longest)
    workshop = Workshop(producer.to(device), consumer.to(device), tokenizer, texts)
    asked = evaluation_texts(tokenizer, args.texts, args.seed, args.longest)
    name = pair.replace(":", " -> ")
    sides = sides_of(workshop, args.sweep)
    made: dict[str, CacheTranslator] = {}
    with tqdm(translators(workshop, sides), total=sum(side.kind in ("solved", "fitted") for side in sides), unit=" fits", desc=name) as bar:
        for side, translator in bar:
            made[side] = translator
    found.details.update({(name, side): details_of(side, workshop, made) for side in sides})
    found.answers.update({(name, side, workload): [] for side in sides for workload in WORKLOADS})
    bench = Bench(workshop, made)
    for text in tqdm(asked, unit=" texts", desc=name):
        for side, answer in bench.ask(text, sides):
            found.answers[name, side, text.workload].append(answer)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS), help="producer:consumer, of the testbed")
    parser.add_argument("--texts", type=int, default=24, help="of each workload")
    parser.add_argument("--calibration", type=int, default=64, help="prefixes that translators are fitted to")
    parser.add_argument("--longest", type=int, default=TOKENS[1], help="prefix, in tokens")
    parser.add_argument("--sweep", action="store_true", help="with more ranks and more patched layers of the paper's method")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--csv", type=Path, help="write a table into this folder")
    parser.add_argument("--plot", type=Path, help="write a picture into this folder (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="few short texts, to see that everything runs")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(texts=1, calibration=8, longest=300)
    check_counts(args, ["texts", "calibration"])
    if not TOKENS[0] <= args.longest <= TOKENS[1]:
        parser.error(f"--longest: expected {TOKENS[0]} to {TOKENS[1]}, got {args.longest}")
    return args


def main() -> None:
    args = parse()
    prepare(args)
    found = Found()
    with torch.no_grad():
        for pair in dict.fromkeys(args.pairs):
            measure(args, pair, found)
    print(f"{show(found)}\n\n{explain(found)}\n")
    print("\n".join(bars(found)))
    if args.csv:
        settings = {"seed": args.seed, "calibration": args.calibration, "longest": args.longest}
        write_csv(args.csv, found, {**environment(pick_device(args.device)), **settings})
    if args.plot:
        write_plot(args.plot, found)


if __name__ == "__main__":
    run_script(main)
