"""Calibrates a `SegmentPolicy` for a model: which segments of earlier prompts may stand behind another text, and what is run again.

    python scripts/calibrate_segments.py --out FOLDER [--model FOLDER_OR_HUB_ID] [--prompts FILE.jsonl] [--bound 0.05]

A line of the file is one prompt: a string, a list of token ids, or an object with one of these under "prompt"; in the order in which
they came, since later ones reuse what earlier ones stored. Without a file, generated requests of agents are taken. Printed are all settings
that were measured.
"""

from __future__ import annotations

from _segments_quality import calibration_prompts
from shared.cli import arguments, load, run_script

from hf_kvcaches.cli import arguments as options
from hf_kvcaches.cli import calibrate_segments as command


def main() -> None:
    parser = arguments(__doc__, "model", "device")
    options.segments(parser, generated=True)
    command.run(parser.parse_args(), load, calibration_prompts)


if __name__ == "__main__":
    run_script(main)
