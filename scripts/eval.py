"""What caches lose, on the small models of this repository and on real ones, beside their peers.

    python scripts/eval.py real [--model .models/smollm2 ...] [--tasks ...] [--wikitext FILE] [--csv docs/benchmarks]
    python scripts/eval.py pruning [--model .models/smollm2 ...] [--samples 48] [--chats 12] [--kvpress PYTHON] [--csv docs/benchmarks]
    python scripts/eval.py translation [--pairs base:tuned ...] [--payloads 0.07 0.07:1 ...] [--csv docs/benchmarks]

**real**: codes, segments and warm starts. `codes`: rows of text are read in one pass, in which each token sees a coded past, the newest
token included, but for 4 first tokens. `quantized`: the same token by token after a prompt of 256 tokens that is read exactly, for caches
that can't be read in one pass; `QuantizedCache` needs optimum-quanto and hqq. `requests`: an agent's prompts with the same pages in other
orders. `pairs`: prompts that resemble the one before. Texts are this repository's prose unless `--wikitext` names a file of WikiText-2.

**pruning**: contexts of book text are read in one call and pruned before any question is known; each question is asked of a copy. Counted
are the exact answers that the full cache gives, and what the next 32 tokens lose in nats. `--chats`: turns of 3,000 tokens in 512 slots.
`--codes`: contexts read from codes of a `KVCodec`, in place or packed. `--kvpress` names the interpreter of an environment with kvpress.

**translation**: a consumer's answers after codes of what a producer has read, against its own prefill: 32 tokens after prose and verse, and
facts recalled. Models are those of the testbed, or folders such as `.models/smollm2:.models/smollm2-verse` (scripts/tune_smollm2.py).

Rows and artifacts are kept in `--state` as they are measured: a run that is cut off goes on where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from shared import ROOT, TESTBED, pruning, quality, translation
from shared.cli import OPTIONS, add_options, arguments, begin, check_counts, run_script
from shared.results import tabulated

from hf_kvcaches.cli.tables import Row, environment, write_csv

PAIRS = ["base:tuned", "tuned:base", "base:lora"]
MODELS = [str(ROOT / ".models" / name) for name in ("smollm2", "gemma3")]
QUICK: dict[str, dict[str, Any]] = {
    "real": {"rows": 1, "row_tokens": 64, "calibrate": 1024, "page": 40, "requests_count": 1, "pairs_count": 1, "quantized": (32, 4)},
    "pruning": {"samples": 3, "tokens": 150},
    "translation": {"texts": 1, "calibration": 8, "longest": 300},
}


def real(args: argparse.Namespace, device: torch.device) -> None:
    for name in args.model:
        measured = quality.Quality(args, name, device)
        rows, fixed = measured.rows(), {"dtype": args.dtype, "calibrated_tokens": args.calibrate}
        print(tabulated(rows, f"model {quality.SHOWN}"))
        save(args, f"real-{measured.name}", rows, environment(device) | fixed, quality.COLUMNS)


def prune(args: argparse.Namespace, device: torch.device) -> None:
    for name in args.model:
        measured = pruning.Pruning(args, name, device)
        rows, fixed = measured.rows(), {"text": args.text.name, "tokens": measured.tokens, "seed": args.seed}
        print(tabulated(rows, pruning.SHOWN))
        save(args, f"pruning-{measured.name}", rows, environment(device) | {"model": measured.name} | fixed, pruning.COLUMNS)


def translate(args: argparse.Namespace, device: torch.device) -> None:
    if not translation.SHORTEST <= args.longest <= 900:
        raise SystemExit(f"error: --longest: expected {translation.SHORTEST} to 900, got {args.longest}")
    rows: list[Row] = []
    for pair in dict.fromkeys(args.pairs):
        measured = translation.measure(args, pair, device)
        print(f"{tabulated(measured, translation.SHOWN)}\n")
        rows += measured
    name = "quality" if args.pairs == PAIRS else "-".join(Path(part).name for part in args.pairs[0].split(":"))
    fixed = {"seed": args.seed, "calibration": args.calibration, "longest": args.longest}
    save(args, f"translation-{name}", rows, environment(device) | fixed)


def save(args: argparse.Namespace, name: str, rows: Sequence[Row], fixed: Row, columns: Sequence[str] | None = None) -> None:
    """Write a file of the folder that `--csv` names."""
    if args.csv:
        known = [{column: value for column, value in row.items() if columns is None or column in columns} for row in rows]
        write_csv(args.csv / f"{name}.csv", known, fixed, columns)


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    kinds = parser.add_subparsers(metavar="WHAT", required=True)
    parsers = {}
    for name, run, *options in (
        ("real", real, "dtype", "threads", "device", "state", "quick"),
        ("pruning", prune, "threads", "device", "state", "quick"),
        ("translation", translate, "seed", "threads", "device", "quick"),
    ):
        parsers[name] = add_options(kinds.add_parser(name), *options)
        parsers[name].add_argument("--csv", type=Path, metavar="FOLDER", help="of the files that are written")
        parsers[name].set_defaults(run=run, what=name)
    for name, models in (("real", MODELS), ("pruning", MODELS)):
        parsers[name].add_argument("--model", **OPTIONS["model"] | {"nargs": "+", "default": models, "help": "folders"})
    add_real(parsers["real"])
    add_pruning(parsers["pruning"])
    add_translation(parsers["translation"])
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK[args.what])
    return args


def add_real(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(dtype="float32", quantized=quality.QUANTIZED)
    parser.add_argument("--tasks", nargs="+", choices=quality.TASKS, default=list(quality.TASKS))
    parser.add_argument("--wikitext", type=Path, help="WikiText-2, as one file of text")
    parser.add_argument("--rows", type=int, default=6, help="rows of a text that are read with coded past")
    parser.add_argument("--row-tokens", type=int, default=384)
    parser.add_argument("--calibrate", type=int, default=16384, help="tokens at the beginning of a text that a codec is calibrated on")
    parser.add_argument("--requests-count", type=int, default=6, help="of an agent, besides the first one")
    parser.add_argument("--pairs-count", type=int, default=3, help="of each kind")
    parser.add_argument("--page", type=int, default=100, help="tokens of a page in requests and pairs")


def add_pruning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=48, help="needles, and as many facts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, help="of a context; default: 600, and more for models with windows")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 0.25, 0.125], help="shares of the context that are kept")
    parser.add_argument("--caches", nargs="*", choices=tuple(pruning.CACHES), default=list(pruning.CACHES))
    parser.add_argument("--codes", nargs="*", type=float, default=[0.125, 0.0625], help="shares of the bytes of codes")
    parser.add_argument("--chats", type=int, nargs="?", const=12, default=0, help="also so many chats; default: none, or 12")
    parser.add_argument("--kvpress", help="the Python of an environment in which kvpress is installed")
    parser.add_argument("--text", type=Path, default=TESTBED / "prose.txt", help="a book")


def add_translation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", nargs="+", default=PAIRS, metavar="PRODUCER:CONSUMER", help="models of the testbed, or folders")
    parser.add_argument("--payloads", nargs="+", default=[], metavar="PAYLOAD[:LAYERS]", help="and the layers that the consumer runs")
    parser.add_argument("--texts", type=int, default=24, help="of each workload")
    parser.add_argument("--calibration", type=int, default=64, help="prefixes that translators are fitted to")
    parser.add_argument("--longest", type=int, default=900, help="prefix, in tokens")


def main() -> None:
    args = parse()
    names = "rows row_tokens calibrate requests_count pairs_count page samples tokens texts calibration".split()
    check_counts(args, [name for name in names if hasattr(args, name)])
    args.run(args, begin(args))


if __name__ == "__main__":
    run_script(main)
