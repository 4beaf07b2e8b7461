"""Calibrates a `CacheTranslator` for a producer and a consumer: what one model has read becomes the other's keys and values.

    python scripts/calibrate_translator.py --producer base --consumer tuned --out FOLDER [--texts FILE ...]
    accelerate launch --num_processes 2 scripts/calibrate_translator.py --producer ... --consumer ... --out FOLDER

Models are folders, hub ids, or `base`, `tuned` and `lora`, the small models of this repository. A text file is cut into pieces; of a file
that ends in .jsonl each line is one text: a string, a list of token ids, or an object with one of these under "text". Give texts as your
prompts come. Without a file, held-out pages of this repository's small models are taken. Under `accelerate` each process reads its share.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.cli import arguments, begin, check_counts, load, run_script
from shared.results import table
from shared.texts import as_text, read_lines

from hf_kvcaches.errors import ConfigError, require
from hf_kvcaches.translate.config import TranslatorConfig
from hf_kvcaches.translate.translator import CacheTranslator

Text = str | list[int]


def read_texts(path: Path, tokenizer: Any, length: int) -> list[Text]:
    """The texts of a file; a text file is cut into pieces of so many tokens."""
    if path.suffix != ".jsonl":
        return pieces(path.read_text(encoding="utf-8"), tokenizer, length)
    return read_lines(path, lambda line: as_text(line, "text"), "a string, token ids, or an object with one of these as text")


def pieces(text: str, tokenizer: Any, length: int) -> list[Text]:
    """Token ids of a text, cut; a last piece of less than half the length is left out, unless it is the only one."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    cut: list[Text] = [ids[start : start + length] for start in range(0, len(ids), length)]
    return cut[:-1] if len(cut) > 1 and 2 * len(cut[-1]) < length else cut


def held_out(tokenizer: Any, length: int) -> list[Text]:
    """Pieces of this repository's texts, both kinds in turns."""
    from tests import testbed

    kinds = [pieces(testbed.held_out(domain), tokenizer, length) for domain in ("prose", "verse")]
    return [text for both in zip(*kinds, strict=False) for text in both]


def spaced(texts: Sequence[Text], most: int) -> list[Text]:
    """No more than so many, from all over."""
    return [texts[number * len(texts) // most] for number in range(most)] if len(texts) > most else list(texts)


def layers_of(text: str) -> Any:
    """What `patch_layers` is to be."""
    if text in ("auto", "none"):
        return {"auto": "auto", "none": None}[text]
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError.of("--patch-layers", "auto, none, or numbers as in 1,3", text) from None


def launched() -> Any:
    """The state of this process where `accelerate launch` or torchrun started several, else None."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    return require("accelerate", "distributed", "A calibration in several processes").PartialState()


def seconds_table(seconds: dict[str, float]) -> str:
    """What each stage took, and its share."""
    whole = max(sum(seconds.values()), 1e-9)
    rows = [[stage, f"{own:.1f}", f"{own / whole:.0%}"] for stage, own in seconds.items()]
    return table(["stage", "seconds", "share"], [*rows, ["together", f"{sum(seconds.values()):.1f}", ""]])


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "device")
    parser.add_argument("--producer", required=True, help="the model that will read prompts: a folder, a hub id, base, tuned or lora")
    parser.add_argument("--consumer", required=True, help="the model that will answer, likewise")
    parser.add_argument("--out", type=Path, required=True, help="the folder that the translator is written to")
    parser.add_argument("--push-to-hub", metavar="ID", help="also uploads it, as owner/name")
    parser.add_argument("--texts", type=Path, nargs="+", metavar="FILE", default=[], help="text files, or .jsonl with one text a line")
    parser.add_argument("--prefixes", type=int, default=64, help="texts at most, taken from all over the files")
    parser.add_argument("--length", type=int, default=512, help="of a text, in tokens at most")
    parser.add_argument("--method", choices=("joint", "paper"), default="joint")
    parser.add_argument("--payload", type=float, default=0.025, help="bytes that are sent, as a share of bfloat16 keys and values")
    parser.add_argument("--layers-per-code", type=int, default=4, help="how many consecutive layers share a code")
    parser.add_argument("--patch-layers", default="none", help="auto, none, or numbers as in 1,3")
    parser.add_argument("--aligner", choices=("ridge", "mlp"), default="ridge", help="of patched layers")
    parser.add_argument("--recompute-layers", default="0", help="how many of its lowest layers the consumer runs itself, or auto")
    parser.add_argument("--metric", choices=("loss", "attention", "plain"), default="loss", help="what errors cost")
    args = parser.parse_args()
    check_counts(args, ["prefixes", "length"])
    return args


def main() -> None:
    args = parse()
    device, patch_layers, state = begin(args), layers_of(args.patch_layers), launched()
    first = state is None or state.is_main_process
    # Texts are read before models, which take long.
    for path in args.texts:
        if not path.is_file():
            raise ConfigError.of("--texts", "files that exist", str(path))
    device = state.device if state is not None and args.device == "auto" else device
    (producer, one), (consumer, other) = (load(name, device) for name in (args.producer, args.consumer))
    texts = [text for path in args.texts for text in read_texts(path, other, args.length)]
    texts = spaced(texts if args.texts else held_out(other, args.length), args.prefixes)
    names = ("method", "layers_per_code", "aligner", "metric")
    options = {
        "payload": args.payload,
        "recompute_layers": int(args.recompute_layers) if args.recompute_layers.isdigit() else args.recompute_layers,
        "patch_layers": patch_layers,
        "config": TranslatorConfig(**{name: getattr(args, name) for name in names}),
        "max_length": max(args.length, 8),
    }
    began = time.perf_counter()
    translator = CacheTranslator.fit(producer, consumer, (one, other), texts, progress=first, **options)
    seconds = time.perf_counter() - began
    if not first:
        return
    translator.save_pretrained(args.out)
    print(f"{seconds_table(dict(translator.settings.seconds))}\n\n{translator.describe_calibration()}\n")
    print(f"{len(texts)} texts, {seconds:.1f} s; written to {args.out}")
    if args.push_to_hub:
        translator.push_to_hub(args.push_to_hub)
        print(f"uploaded to {args.push_to_hub}")


if __name__ == "__main__":
    run_script(main)
