"""Calibrates a `CacheTranslator` for a producer and a consumer: what one model has read becomes the other's keys and values.

    python scripts/calibrate_translator.py --producer base --consumer tuned --out FOLDER [--texts FILE ...]
    accelerate launch --num_processes 2 scripts/calibrate_translator.py --producer ... --consumer ... --out FOLDER

Models are folders, hub ids, or `base`, `tuned` and `lora`, the small models of this repository. A text file is cut into pieces; of a file
that ends in .jsonl each line is one text: a string, a list of token ids, or an object with one of these under "text". Give texts as your
prompts come. Without a file, held-out pages of this repository's small models are taken. Under `accelerate` each process reads its share.
"""

from __future__ import annotations

from typing import Any

from shared.cli import arguments, load, run_script

from hf_kvcaches.cli import arguments as options
from hf_kvcaches.cli import calibrate_translator as command
from hf_kvcaches.cli.texts import Text, pieces


def held_out(tokenizer: Any, length: int) -> list[Text]:
    """Pieces of this repository's texts, both kinds in turns."""
    from tests import testbed

    kinds = [pieces(testbed.held_out(domain), tokenizer, length) for domain in ("prose", "verse")]
    return [text for both in zip(*kinds, strict=False) for text in both]


def main() -> None:
    parser = arguments(__doc__, "device")
    options.translator(parser, generated=True)
    command.run(parser.parse_args(), load, held_out)


if __name__ == "__main__":
    run_script(main)
