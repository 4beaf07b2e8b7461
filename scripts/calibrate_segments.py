"""Calibrates a `SegmentPolicy` for a model: which segments of earlier prompts may stand behind another text, and what is run again.

    python scripts/calibrate_segments.py --out FOLDER [--model FOLDER_OR_HUB_ID] [--prompts FILE.jsonl] [--bound 0.05]

A line of the file is one prompt: a string, a list of token ids, or an object with one of these under "prompt"; in the order in which
they came, since later ones reuse what earlier ones stored. Without a file, generated requests of agents are taken. Printed are all settings
that were measured.
"""

from __future__ import annotations

from typing import Any

from shared.cli import arguments, load, run_script

from hf_kvcaches.cli import arguments as options
from hf_kvcaches.cli import calibrate_segments as command

# Seeds of generated requests begin here.
SEED = 10**6


def calibration_prompts(tokenizer: Any, requests: int) -> tuple[dict[str, list[list[int]]], int]:
    """Prompts by workload, and how many tokens at their ends to ask for."""
    from tests.testbed.agents import adversarial_workload, agent_workload

    made = {
        "agents": agent_workload(tokenizer, requests=requests, seed=SEED),
        "hanging": agent_workload(tokenizer, requests=max(2, requests // 2), seed=SEED + 1, hanging=True),
        "adversarial": adversarial_workload(tokenizer, requests=max(2, requests), seed=SEED),
    }
    asked = min(len(request.continuation) for own in made.values() for request in own)
    return {name: [request.prompt + request.continuation for request in own] for name, own in made.items()}, asked


def main() -> None:
    parser = arguments(__doc__, "model", "device")
    options.segments(parser, generated=True)
    command.run(parser.parse_args(), load, calibration_prompts)


if __name__ == "__main__":
    run_script(main)
