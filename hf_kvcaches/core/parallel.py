"""Tensor parallelism: which heads of each layer this process has, and how processes, which all make the same calls, decide as one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError, UnsupportedError

Items = TypeVar("Items", Tensor, tuple[Any, ...])
# Where a plan splits the columns of a module of attention and does not gather its output, each process has some of the heads.
_ATTENTION, _SPLIT = re.compile(r"attn|attention"), "colwise"


@dataclass(frozen=True, eq=False)
class HeadShard:
    """The heads of this process: of each layer the `rank`-th of `size` equal spans of heads."""

    rank: int
    size: int
    group: Any = None  # of `torch.distributed`; None for the default one

    def span(self, heads: int) -> slice:
        """Return the indices of this process's heads, of the heads of all processes."""
        if heads % self.size:
            raise ConfigError.of("model", f"a number of heads that {self.size} processes can share", f"{heads} heads")
        count = heads // self.size
        return slice(self.rank * count, (self.rank + 1) * count)

    def own(self, items: Items) -> Items:
        """Return those of this process's heads, of one item for each head, or of a tensor with all heads first."""
        return items[self.span(len(items))]

    def gather(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return a tensor of all heads, which are in dimension `dim`. All processes call it, with tensors of one shape and dtype."""
        tensor = tensor.detach().contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor, group=self.group)
        return torch.cat(parts, dim)

    def decisions(self, decision: str) -> set[str]:
        """Return what the processes have decided: one text where they agree."""
        decisions: list[str] = [""] * self.size
        distributed.all_gather_object(decisions, decision, group=self.group)
        return set(decisions)

    def most(self, number: int, device: torch.device) -> int:
        largest = torch.tensor([number], device=device)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=self.group)
        return int(largest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError("A cache of a tensor-parallel model can't be pickled: it belongs to a group of processes. Use cache.save.")


def shard_of(model: Any) -> HeadShard | None:
    """Return the heads of this process; None where it has all of them, or where a config was given, which does not tell."""
    base, _ = compat.split_model(model)
    if base is None or not is_tensor_parallel(base) or not _shards_heads(base):
        return None
    for mesh in filter(None, (getattr(parameter, "device_mesh", None) for parameter in base.parameters())):
        names = mesh.mesh_dim_names or ()
        if "tp" in names or mesh.ndim == 1:
            axis = names.index("tp") if "tp" in names else 0
            return HeadShard(mesh.get_local_rank(axis), mesh.size(axis), mesh.get_group(axis))
    if _processes() == base.tp_size:
        return HeadShard(distributed.get_rank(), base.tp_size)
    raise UnsupportedError(
        "model: expected tensor parallelism over a DeviceMesh with the dimension 'tp', or over all processes, got "
        f"tp_size={base.tp_size} and neither. Use a model that from_pretrained has loaded with a tp_plan."
    )


def is_tensor_parallel(model: PreTrainedModel) -> bool:
    """Return whether each of several processes has a part of the model's weights, and computes with the others."""
    return (model.tp_size or 1) > 1


def _processes() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _shards_heads(model: PreTrainedModel) -> bool:
    given = getattr(getattr(model.config, "distributed_config", None), "tp_plan", None)
    plan = given if isinstance(given, dict) else model.tp_plan or {}
    return any(style == _SPLIT and _ATTENTION.search(name) for name, style in plan.items())


def require_all_heads(model: Any, what: str, instead: str, *, any_plan: bool = False) -> None:
    """Refuse a tensor-parallel model, each of whose processes has only some of the heads; with `any_plan` also where all are whole."""
    base, _ = compat.split_model(model)
    if base is not None and is_tensor_parallel(base) and (any_plan or _shards_heads(base)):
        raise UnsupportedError(f"{what} needs all heads of a layer, and under tensor parallelism each process has only some. {instead}")


def require_heads(heads: int, shard: HeadShard | None, total: int, what: str) -> None:
    """Refuse keys with other heads than the `total` of all processes tells, as those of a sharded model that a cache does not know."""
    expected = total if shard is None else total // shard.size
    # Configs of whole models may name another number, as with latents, but no process has a part of the heads without a group.
    sharded = shard is not None or (heads < total and total % heads == 0 and _processes() % (total // heads) == 0)
    if heads != expected and sharded:
        raise UnsupportedError(
            f"{what} expects keys with {expected} heads, and the model came with {heads}. Of a tensor-parallel model, load it with "
            "from_pretrained and a tp_plan, and build the cache with the model and not with its config."
        )
