"""All keys and values of a cache in the packed form, for files and messages: the first tokens of each row stay exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ArtifactError

States = tuple[Tensor, Tensor]
"""Keys as the model rotated them, and values, (batch, kv_heads, tokens, head_dim) each."""
Stored = dict[int, dict[str, Tensor]]
"""By layer: `codes.0` and so on, a record for each row, and the first tokens, `first_keys` and `first_values`."""


class Codec(Protocol):
    """What is needed of a `KVCodec`."""

    @property
    def exact_tokens(self) -> int: ...

    def geometry(self, config: Any, layer_idx: int) -> RotaryGeometry | None: ...

    def pack(self, keys: Mapping[int, Tensor], values: Mapping[int, Tensor], left_out: int = 0) -> dict[int, Tensor]: ...

    def unpack(self, spans: Sequence[tuple[int, Tensor, int, int | None]], dtype: torch.dtype) -> list[States]: ...


def encode(codec: Codec, config: Any, layers: Mapping[int, States], padding: list[int]) -> Stored:
    """Return what is stored of layers.

    Args:
        padding: For each row, how many slots at its start hold no token.
    """
    stored: Stored = {layer: {} for layer in layers}
    for row, start in enumerate(padding):
        keys = {layer: _unrotated(codec.geometry(config, layer), states[0][row, :, start:]) for layer, states in layers.items()}
        values = {layer: states[1][row, :, start:] for layer, states in layers.items()}
        for layer, record in codec.pack(keys, values, codec.exact_tokens).items():
            stored[layer][f"codes.{row}"] = record
    for layer, states in layers.items():
        for name, exact in zip(("first_keys", "first_values"), states, strict=True):
            rows = [_first(exact[row], start, codec.exact_tokens) for row, start in enumerate(padding)]
            stored[layer][name] = torch.stack(rows) if rows else exact[:, :, :0]
    return stored


def decode(codec: Codec, config: Any, stored: Stored, padding: list[int]) -> dict[int, States]:
    """Return keys and values from what `encode` gave."""
    found: dict[int, States] = {}
    for layer, tensors in stored.items():
        first, rows = (tensors["first_keys"], tensors["first_values"]), []
        if len(first[0]) != len(padding):
            raise ArtifactError(f"{len(first[0])} rows in a layer, and there are {len(padding)}")
        spans = [(layer, tensors[f"codes.{row}"], 0, None) for row in range(len(padding))]
        for row, (keys, values) in enumerate(codec.unpack(spans, first[0].dtype)):
            geometry, start = codec.geometry(config, layer), padding[row]
            if geometry is not None:
                keys = geometry.rotate(keys[None], torch.arange(keys.shape[1], device=keys.device))[0]
            both = []
            for states, exact in ((keys, first[0][row]), (values, first[1][row])):
                count = min(codec.exact_tokens, states.shape[1])
                both.append(torch.nn.functional.pad(torch.cat([exact[:, :count], states[:, count:]], 1), (0, 0, start, 0)))
            rows.append(both)
        found[layer] = (torch.stack([keys for keys, _ in rows]), torch.stack([values for _, values in rows])) if rows else first
    return found


def _unrotated(geometry: RotaryGeometry | None, keys: Tensor) -> Tensor:
    return keys if geometry is None else geometry.unrotate(keys[None].float(), torch.arange(keys.shape[1], device=keys.device))[0]


def _first(states: Tensor, start: int, count: int) -> Tensor:
    """Return a row's first tokens, (kv_heads, count, head_dim); zeros behind them where there are fewer."""
    own = states[:, start : start + count]
    return torch.nn.functional.pad(own, (0, 0, 0, count - own.shape[1]))
