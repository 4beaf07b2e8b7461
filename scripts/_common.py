"""What the scripts share: where things are, which device, what to call this computer, and how a script is asked, started and printed."""

from __future__ import annotations

import argparse
import csv
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
TESTBED = ROOT / "tests" / "testbed"
sys.path.insert(0, str(ROOT))  # the scripts run from a checkout, installed or not


def pick_device(name: str) -> torch.device:
    """The named device; `auto` takes the first accelerator that works, else the CPU."""
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def hardware(device: torch.device) -> str:
    """The name of the processor that does the work."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def environment(device: torch.device) -> dict[str, str | int]:
    """What a measurement depends on beside its own settings."""
    from hf_kvcaches import __version__

    return {
        "hardware": hardware(device),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_kvcaches": __version__,
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, ["-" * width for width in widths], *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def write_table(path: Path, names: Iterable[str], rows: Iterable[Mapping[str, Any]], fixed: Mapping[str, Any] | None = None) -> None:
    """A CSV file."""
    fixed = fixed or {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys([*fixed, *names])), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**fixed, **row} for row in rows)


def load(name: str, device: torch.device) -> tuple[Any, Any]:
    """A model to measure, and its tokenizer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    if next(model.parameters()).device.type == "cpu" and model.dtype == torch.float16:
        model = model.float()  # half precision on a CPU is a storage format
    return model.to(device).eval(), transformers.AutoTokenizer.from_pretrained(name)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Asks for what every evaluation needs: a model, a device, and how documents are made."""
    parser.add_argument("--model", default=str(TESTBED / "base"), help="a folder or a hub id; default: the small model of this repository")
    parser.add_argument("--length", type=int, default=800, help="of a document, in tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")


def check_counts(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuses arguments below 1."""
    from hf_kvcaches.errors import ConfigError

    for name in names:
        if getattr(args, name) < 1:
            raise ConfigError.of(f"--{name.replace('_', '-')}", "at least 1", getattr(args, name))


def prepare(args: argparse.Namespace) -> None:
    """Sees to it that `--plot` can be done in the end, and silences transformers."""
    from hf_kvcaches.errors import require

    if args.plot:
        require("matplotlib", "plots", "The plot")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def run_script(main: Callable[[], None]) -> None:
    """Runs a script; what its user can mend ends it with a sentence instead of a traceback."""
    from hf_kvcaches import KVCacheError

    try:
        main()
    except (KVCacheError, OSError) as error:  # transformers says with an OSError that there is no such model
        raise SystemExit(f"error: {error}") from error
