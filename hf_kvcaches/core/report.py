"""What a cache holds, for people and for measurements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch


@dataclass(frozen=True)
class CacheReport:
    """What a cache holds. Methods add fields of their own in a subclass.

    Args:
        cache: The class of the cache.
        seen: Tokens that the model has fed in.
        kept: Slots that hold a token, for each layer.
        bytes: Memory of every tensor that the cache owns, reserves included.
        decode_with: Of the cache that holds the tokens for this one, if there is one.
    """

    cache: str
    seen: int
    kept: tuple[int, ...]
    bytes: int
    decode_with: CacheReport | None = field(default=None, kw_only=True)

    def as_dict(self) -> dict[str, Any]:
        """The fields as a plain dict; `decode_with` where there is one."""
        return {name: value for name, value in asdict(self).items() if name != "decode_with" or value is not None}

    def __str__(self) -> str:
        rows = {"tokens seen": f"{self.seen:,}", "slots kept": summarise(self.kept), "memory": f"{self.bytes / 2**20:,.2f} MiB"}
        rows |= {
            f.name.replace("_", " "): _shown(getattr(self, f.name)) for f in fields(self) if f.name not in CacheReport.__dataclass_fields__
        }
        width = max(len(name) for name in rows)
        lines = [self.cache, *(f"  {name:<{width}}  {value}" for name, value in rows.items())]
        return "\n".join([*lines, f"decodes with {self.decode_with}"] if self.decode_with is not None else lines)


def _shown(value: Any) -> str:
    """A field for people: no more digits than they read."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def measured_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind tensors, each block counted once.

    Args:
        tensors: Any tensors; views of one block share it.
    """
    blocks = {(tensor.device, tensor.untyped_storage().data_ptr()): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(blocks.values())


def foreign_tensors(layer: Any) -> dict[str, torch.Tensor]:
    """The tensors in a layer of transformers, also those in dicts (the states of linear attention)."""
    found: dict[str, torch.Tensor] = {}
    for name, value in vars(layer).items():
        inside = value.items() if isinstance(value, dict) else [("", value)]
        found |= {f"{name}{key}": tensor for key, tensor in inside if isinstance(tensor, torch.Tensor)}
    return found


def foreign_kept(layer: Any) -> int:
    """The slots of a layer of transformers."""
    keys = getattr(layer, "keys", None)
    return int(keys.shape[-2]) if isinstance(keys, torch.Tensor) and keys.ndim == 4 else 0


def summarise(kept: tuple[int, ...]) -> str:
    """The slots of all layers in a few words."""
    return str(kept[0]) if len(set(kept)) == 1 else f"{min(kept, default=0)} to {max(kept, default=0)}"
