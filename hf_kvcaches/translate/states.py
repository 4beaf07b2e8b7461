"""Prompts, and the keys, values and attention inputs that a model computes for them, read while the model runs.

Positions and padding are left out: keys are unrotated, and the real tokens of all rows are concatenated, (tokens, width), with the heads
side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import attention_module, decoder_layers
from hf_kvcaches.core.rope import Rotation, rotation_of
from hf_kvcaches.core.source import SourceCache
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.reuse.partial import Arguments, PassEnded, ToldModule, name_of, run_module, twin_of, with_layers


class LayerState(NamedTuple):
    """What a layer computes for some tokens."""

    states: Tensor  # unrotated keys and values side by side, (tokens, width)
    shape: tuple[int, int, int]  # KV heads, and the dimensions of a key and a value
    hidden: Tensor = torch.empty(0)  # the normalised input of the attention, (tokens, hidden), where that is read

    def sides(self) -> list[Tensor]:
        """Keys and values, (kv_heads, tokens, head_dim) each."""
        heads, *dims = self.shape
        return [side.unflatten(1, (heads, -1)).transpose(0, 1) for side in self.states.split([heads * dim for dim in dims], dim=1)]


class PromptTokens(NamedTuple):
    """Prompts as a model reads them."""

    ids: Tensor  # (batch, tokens)
    padding: tuple[int, ...]  # slots without a token at the start of each row
    starts: tuple[int, ...]  # the slot of each row from which on states are read

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any = None) -> PromptTokens:
        """Check a batch, (batch, tokens) or (tokens,), a tensor or lists, which may be padded on the left only."""
        ids = _batch("input_ids", input_ids)
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool or not ids.numel():
            raise ConfigError.of("input_ids", "token ids, (batch, tokens)", (tuple(ids.shape), ids.dtype))
        mask = torch.ones_like(ids) if attention_mask is None else _batch("attention_mask", attention_mask)
        if mask.shape == ids.shape:
            padding = (mask == 0).sum(-1)
            real = torch.arange(ids.shape[1], device=mask.device) >= padding[:, None]
            if bool(real[:, -1].all()) and torch.equal(mask, real.to(mask)):  # an additive mask has 0 where this one has 1
                rows = tuple(padding.tolist())
                return cls(ids.long(), rows, rows)
        expected = f"1 and 0 of the shape {tuple(ids.shape)}, with 0 on the left only"
        raise ConfigError.of("attention_mask", expected, (tuple(mask.shape), mask.dtype))

    def inputs(self, seen: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what `run_module` takes for the slots from `seen` on: ids, positions counted without padding, and the mask."""
        positions = torch.arange(self.ids.shape[1], device=self.ids.device) - torch.tensor(self.padding, device=self.ids.device)[:, None]
        mask = (positions >= 0).long() if any(self.padding) else None
        return self.ids[:, seen:], positions.clamp_min(0)[:, seen:], mask

    def rows(self) -> list[Tensor]:
        """The real ids of each row, on the CPU."""
        return [ids[before:] for ids, before in zip(self.ids.cpu(), self.padding, strict=True)]

    def read_of(self, states: Tensor) -> Tensor:
        """Return the states of all tokens that are read, (tokens, width), of (batch, tokens, width)."""
        rows = [row[start:] for row, start in zip(states, self.starts, strict=True)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


def _batch(argument: str, values: Any) -> Tensor:
    """Return numbers as a tensor; a single row is a batch of one."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        hint = "Tokenize texts, and pad rows on the left."
        raise ConfigError.of(argument, "a tensor or lists of numbers, (batch, tokens)", type(values).__name__, hint) from error
    return tensor[None] if tensor.ndim == 1 else tensor


def rotation_of_model(model: PreTrainedModel) -> Rotation:
    """Return how a model's keys are rotated; refuse a model with layers whose keys and values can't be translated."""
    config = compat.decoder_config(model.config)
    foreign = sorted({kind for kind, _ in compat.layer_plan(config) if kind not in SourceCache.own_layer_types})
    if foreign:
        raise UnsupportedError(f"model: layers of the types {foreign} keep no keys and values that could be translated. Use another cache.")
    rotation = rotation_of(config)
    if rotation.refused or {geometry.kind for geometry in rotation.layers} - {"rope", "none", "learned"}:
        raise UnsupportedError(f"model: {rotation.why}, so its keys can't be translated. Use another cache.")
    return rotation


@torch.no_grad()
def read(
    model: PreTrainedModel,
    tokens: PromptTokens,
    on_state: Callable[[int, LayerState], None],
    *,
    hidden: Collection[int] = (),
    last: int | None = None,
) -> None:
    """Run a model up to the attention of the last layer, and pass on each state, some with the attention's input, as it is computed."""
    rotation, layers, cache = rotation_of_model(model), list(decoder_layers(model)[2]), DynamicCache()
    tokens = tokens._replace(ids=tokens.ids.to(compat.input_device(model)))
    (ids, positions, mask), inputs = tokens.inputs(), dict[int, Tensor]()

    def update(keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if layer >= len(rotation.layers):
            raise UnsupportedError("model: it runs layers in loops, with keys of each loop, which can't be translated. Use another cache.")
        geometry = rotation.layers[layer]
        content = geometry.unrotate(keys, positions.to(keys.device)) if geometry.kind == "rope" else keys  # learned positions stay in keys
        sides = [tokens.read_of(states.transpose(1, 2).flatten(2)) for states in (content, values)]
        state = LayerState(torch.cat(sides, dim=1), (keys.shape[1], keys.shape[3], values.shape[3]))
        on_state(layer, state._replace(hidden=tokens.read_of(inputs.pop(layer))) if layer in inputs else state)
        if layer == last:
            raise PassEnded
        return keys, values

    cache.update = update  # type: ignore[method-assign]  # it holds nothing
    for layer in hidden:
        layers[layer] = with_watched_input(layers[layer], partial(inputs.__setitem__, layer))
    with suppress(PassEnded):
        run_module(with_layers(model, layers), cache, ids, positions, mask)


def with_watched_input(layer: nn.Module, watch: Callable[[Tensor], Any]) -> nn.Module:
    """Return a twin of a decoder layer that passes its attention's input, (batch, tokens, hidden), to `watch`."""

    def on_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        watch(args[0] if args else kwargs["hidden_states"])
        return args, kwargs

    attention = attention_module(layer)
    return twin_of(layer, {name_of(layer, attention): ToldModule(attention, on_call)})
