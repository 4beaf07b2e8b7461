"""What a consumer says behind caches that were translated from another model's, against its own prefill of the same prefix.

    python scripts/eval_translation.py [--pairs base:tuned ...] [--texts 24] [--csv FOLDER] [--quick]

For each pair of the testbed's models (producer:consumer) translators are fitted to prefixes of the first halves of the held-out texts, and
measured on the second halves. **prose**, **verse**: 32 tokens behind a piece of a book. **documents**: a context with facts, behind which
all questions are asked with their true answers; divergences are of the first 32 tokens, recall is of all answers.

All sides hold all tokens of the prefix but the last, which the consumer runs. `raw K/V` and `int4 K/V` are the producer's keys and values
as they are. `zero bytes` makes all of the token ids. `full rank, float32` is the limit of linear maps. Shares are of the keys and values
of all layers in bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean

import torch
from _translation_quality import SIDES, TOKENS, WORKLOADS, Answer, Bench, calibration_texts, evaluation_texts
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.results import Row, environment, rows_where, show, write_csv
from tqdm import tqdm

PAIRS = ("base:tuned", "tuned:base", "base:lora")
SHOWN = {"bytes": "{bytes:,}", "share": "{share:.4f}", **{name: f"{{{name}:.4f}}" for name in WORKLOADS}, "recall": "{recall:.1f}%"}


def summary(answers: Sequence[Answer]) -> Row:
    """The numbers of a side on a workload."""
    total = lambda name: sum(getattr(answer, name) for answer in answers)  # noqa: E731
    row = {"texts": len(answers), "tokens": total("tokens"), "bytes": total("bytes"), "share": round(total("bytes") / total("plain"), 5)}
    row |= {"kl": round(fmean(kl for answer in answers for kl in answer.kls), 6), "recall": "", "recall_alone": ""}
    if asked := total("asked"):
        row |= {"recall": round(100 * total("right") / asked, 2), "recall_alone": round(100 * total("right_alone") / asked, 2)}
    return row | {"questions": asked}


def measure(args: argparse.Namespace, pair: str, device: torch.device) -> list[Row]:
    """A row for each side and workload of a pair."""
    (producer, tokenizer), (consumer, _) = (load(name, device) for name in pair.split(":"))
    bench = Bench(producer, consumer, tokenizer, calibration_texts(tokenizer, args.calibration, args.longest))
    name = pair.replace(":", " -> ")
    seconds = {side.name: bench.prepare(side) for side in tqdm(SIDES, unit=" fits", desc=name)}
    answers: dict[tuple[str, str], list[Answer]] = {(side.name, workload): [] for side in SIDES for workload in WORKLOADS}
    with torch.no_grad():
        for text in tqdm(evaluation_texts(tokenizer, args.texts, args.seed, args.longest), unit=" texts", desc=name):
            for side, answer in bench.ask(text, SIDES):
                answers[side.name, text.workload].append(answer)
    return [
        {"pair": name, "side": side, "workload": workload, **summary(found), "fit_seconds": seconds[side]}
        for (side, workload), found in answers.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """A line for each side of a pair: its divergences by workload, and bytes and recall of documents."""
    lines = []
    for row in rows_where(rows, workload="documents"):
        lines.append(row | {each["workload"]: each["kl"] for each in rows_where(rows, side=row["side"])})
    return show(lines, {rows[0]["pair"]: "{side}", **SHOWN})


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "seed", "device", "csv", "quick")
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
    device, rows = begin(args), []
    for pair in dict.fromkeys(args.pairs):
        rows += (found := measure(args, pair, device))
        print(f"{table(found)}\n")
    if args.csv:
        settings = {"seed": args.seed, "calibration": args.calibration, "longest": args.longest}
        write_csv(args.csv / "translation-quality.csv", rows, {**environment(device), **settings})


if __name__ == "__main__":
    run_script(main)
