"""Starts processes that form a group, each with a part of the heads or with prompts of its own."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# A collective that waits longer means that processes take different decisions.
_PATIENCE = timedelta(seconds=120)


def in_processes(work: Callable[..., Any], folder: Path, *arguments: Any, count: int = 2) -> list[Any]:
    """What each of some processes returns, which form a group over gloo."""
    torch.multiprocessing.spawn(_begin, args=(count, work, folder, arguments), nprocs=count)
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(count)]


def _begin(rank: int, count: int, work: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "CUDA_VISIBLE_DEVICES": ""})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count, timeout=_PATIENCE)
    torch.save(work(folder, *arguments), folder / f"result-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
