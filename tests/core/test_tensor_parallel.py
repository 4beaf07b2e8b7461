"""Tensor parallelism: the heads of a model in several processes, which a cache either serves as one process would, or refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel

from hf_kvcaches import AdaptiveSubspace, EquipCache, GrowingCache, KVCodec, SubspaceCache, UnsupportedError
from tests import tiny

SERVED: dict[str, Callable[[PreTrainedModel], Cache]] = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "growing": GrowingCache,
    "streaming": lambda model: EquipCache(model, "streaming", 16, sinks=2, recent=4),
    "h2o": lambda model: EquipCache(model, "h2o", 16, sinks=2, recent=4),
    "snapkv": lambda model: EquipCache(model, "snapkv", 16, sinks=2, recent=4),
    "adaptive": lambda model: SubspaceCache(model, adaptive=adaptive(rank=(3, 4)), sinks=1, recent=4),
}
REFUSED: dict[str, Callable[[PreTrainedModel], Cache]] = {
    "tova": lambda model: EquipCache(model, "tova", 16),
    "random": lambda model: EquipCache(model, "random", 16),
    "codec": lambda model: SubspaceCache(model, codec()),
    "bytes_ratio": lambda model: SubspaceCache(model, adaptive=adaptive(bytes_ratio=0.5)),
}


def adaptive(**options) -> AdaptiveSubspace:
    return AdaptiveSubspace(warmup=16, chunk=16, **options)


def codec() -> KVCodec:
    return KVCodec.calibrate(tiny.llama(), None, [tiny.ids(96).tolist()], rank=4, progress=False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_heads_is_refused_where_a_process_has_some(name: str) -> None:
    model = tiny.llama()
    REFUSED[name](model)
    model._tp_size = 2  # as `from_pretrained(tp_plan="auto")` leaves it in each of two processes
    with pytest.raises(UnsupportedError, match=r"tensor parallelism.* Use "):
        REFUSED[name](model)


@pytest.mark.full
def test_two_processes_give_the_logits_of_one(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    torch.multiprocessing.spawn(compare, args=(tmp_path,), nprocs=2)
    for rank in range(2):
        differences = torch.load(tmp_path / f"{rank}.pt")
        assert set(differences) == set(SERVED)
        assert all(difference < 1e-3 for difference in differences.values()), differences


def compare(rank: int, folder: Path) -> None:
    """What one of the processes does."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    for make in REFUSED.values():
        with pytest.raises(UnsupportedError):
            make(model)
    differences = {name: float((logits(model, make) - logits(whole, make)).abs().max()) for name, make in SERVED.items()}
    torch.save(differences, folder / f"{rank}.pt")
    dist.destroy_process_group()


@torch.no_grad()
def logits(model: PreTrainedModel, make: Callable[[PreTrainedModel], Cache]) -> torch.Tensor:
    text, held = tiny.ids(1, 40), make(model)
    chunks = [text[:, :20], *text[:, 20:].split(1, 1)]
    return torch.cat([model(chunk, past_key_values=held).logits for chunk in chunks], 1)
