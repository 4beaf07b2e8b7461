"""What a cache holds, for people and for measurements."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

_MOST = 8  # items of a list that are shown
_ID = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{24}\b")


@dataclass(frozen=True)
class CacheReport:
    """What a cache holds. Methods add fields of their own in a subclass.

    Args:
        cache: The class of the cache.
        seen: Tokens that the model has fed in.
        kept: Slots that hold a token, for each layer.
        bytes: Memory of every tensor that the cache owns, reserves included.
        others: For each layer that the method does not apply to, its index and what the model keeps in its place.
        decode_with: Of the cache that holds the tokens for this one, if there is one.
    """

    cache: str
    seen: int
    kept: tuple[int, ...]
    bytes: int
    decode_with: CacheReport | None = field(default=None, kw_only=True)
    others: Mapping[int, str] = field(default_factory=dict, kw_only=True, hash=False)

    @property
    def own_kept(self) -> tuple[int, ...]:
        """`kept` of the layers that the method applies to."""
        return tuple(kept for layer, kept in enumerate(self.kept) if layer not in self.others)

    def as_dict(self) -> dict[str, Any]:
        """The fields as a plain dict; `decode_with` and `others` where there are any."""
        return {name: value for name, value in asdict(self).items() if name not in ("decode_with", "others") or value}

    def __str__(self) -> str:
        rows = {"tokens seen": f"{self.seen:,}", "slots kept": summarise(self.own_kept), "memory": f"{self.bytes / 2**20:,.2f} MiB"}
        if self.others:
            others = [f"{count} {'keeps' if count == 1 else 'keep'} {what}" for what, count in Counter(self.others.values()).items()]
            rows["layers"] = f"{len(self.own_kept)} of {len(self.kept)}; {', '.join(others)}"
        own = [f.name for f in fields(self) if f.name not in CacheReport.__dataclass_fields__]
        rows |= {name.replace("_", " "): text for name in own if (text := self._shown(name))}
        width = max(map(len, rows))
        lines = [self.cache, *(f"  {name:<{width}}  {value}" for name, value in rows.items())]
        return "\n".join(lines if self.decode_with is None else [*lines, f"decodes with {self.decode_with}"])

    def _shown(self, name: str) -> str:
        """The value of a method's own field on one line, with no more digits than people read; "" where there is none."""
        value = getattr(self, name)
        return f"{value:.1%}" if isinstance(value, float) and name.endswith(("_saved", "_share")) else _text(value)


def _text(value: Any) -> str:
    """A value as people read it: of a long list the beginning, and of ids of 32 digits the first 8; "" where there is nothing."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if type(value) in (tuple, list):
        more = [f"{len(value) - _MOST} more"] if len(value) > _MOST else []
        return ", ".join([*map(_text, value[:_MOST]), *more]) if any(item is not None and item != "" for item in value) else ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else _ID.sub(r"\1…", str(value))


def measured_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory behind tensors, each block counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({(storage.device, storage.data_ptr()): storage.nbytes() for storage in storages}.values())


def foreign_tensors(layer: Any) -> dict[str, Tensor]:
    """Return the tensors in a layer of transformers, also those in dicts (the states of linear attention)."""
    inside = {name: value if isinstance(value, dict) else {"": value} for name, value in vars(layer).items()}
    return {f"{name}{key}": item for name, items in inside.items() for key, item in items.items() if isinstance(item, Tensor)}


def foreign_kept(layer: Any) -> int:
    keys = getattr(layer, "keys", None)
    return int(keys.shape[-2]) if isinstance(keys, Tensor) and keys.ndim == 4 else 0


def foreign_kind(layer: Any) -> str:
    """Return what a layer of transformers keeps, in a few words, as the object of a sentence."""
    if isinstance(layer, CacheLayerMixin):
        window = getattr(layer, "sliding_window", None)
        return f"the model's {type(layer).__name__ if window is None else f'windows of {window}'}"
    return "a state of the model's own" if foreign_tensors(layer) or isinstance(layer, LinearAttentionCacheLayerMixin) else "no tokens"


def summarise(kept: Sequence[float]) -> str:
    return str(kept[0]) if len(set(kept)) == 1 else f"{min(kept, default=0)} to {max(kept, default=0)}"
