"""What the scripts share: where things are, which device, what to call this computer, and how a table is printed."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
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
