"""What a policy is shown, what the model's attention modules are called with among it, and what the policy says."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches.core.decoder import attention_module, decoder_layers
from hf_kvcaches.core.holder import LastQueries
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.step import Pass
from hf_kvcaches.equip.frames import as_model_rotated
from hf_kvcaches.equip.state import padding_first
from hf_kvcaches.equip.tokens import Tokens
from hf_kvcaches.errors import UnsupportedError

if TYPE_CHECKING:
    from hf_kvcaches.equip.cache import EquipCache
    from hf_kvcaches.equip.entries import Entries
    from hf_kvcaches.equip.layer import EquipLayer


# Arguments with one entry for each new token.
_BY_TOKEN = ("hidden_states", "position_embeddings")


def seen_by_policy(layer: EquipLayer, **shown: Any) -> Tokens:
    """What the layer's policy is shown; further arguments are those of `Tokens`."""
    first = 0 if layer.state.first is None else layer.state.first
    geometry = layer.rotation.geometry or layer.geometry
    settings, state = layer.settings, layer.state
    return Tokens(sinks=settings.sinks, first=first, scaling=state.scaling, geometry=geometry, shard=layer.shard, **shown)


def score(layer: EquipLayer, entries: Entries, budget: int, module: nn.Module | None, after: int = 0) -> torch.Tensor:
    """What the policy says of entries, (batch, 1 or kv_heads, tokens).

    Args:
        budget: How many of them will stay.
        module: The model's attention, where it is asked.
        after: How many tokens were seen after all entries.
    """
    state, policy = layer.state, layer.policy
    queries = state.queries if entries.queries is None else entries.queries
    queries = queries[:, :, : queries.shape[2] - after] if queries is not None and after else queries
    keys = as_model_rotated(layer, entries.keys, entries.positions, entries.rotated_to) if policy.directions else entries.keys
    tokens = seen_by_policy(
        layer,
        keys=keys,
        values=entries.values,
        positions=entries.positions,
        attention=entries.attention,
        seen=state.seen - after,
        scores=entries.scores,
        queries=queries,
        budget=budget,
        module=module,
        inputs=layer.inputs,
    )
    return policy.checked_score(tokens)


def shown_queries(layer: EquipLayer, queries: LastQueries | None, running: Pass) -> torch.Tensor | None:
    """The queries of new tokens that the policy is shown, padding first; remembered where it has to see some while decoding."""
    policy, state = layer.policy, layer.state
    if queries is None or not (policy.sees_block or policy.queries):
        return None
    states = queries.states
    valid = None if running.valid is None else running.valid[:, -states.shape[2] :]
    state.scaling = queries.scaling
    if policy.queries:
        state.note_queries(queries, valid, policy.queries)
    if not policy.sees_block:
        return None
    return states if valid is None else padding_first(states, valid)


def mask_of_slots(layer: EquipLayer, allowed: torch.Tensor) -> torch.Tensor:
    """What a mask of the model's own says about the slots in use, (batch, 1 or kv_heads, tokens, slots in use).

    Args:
        allowed: (batch or 1, 1, tokens, tokens of the text).
    """
    if allowed.shape[1] != 1:
        raise UnsupportedError("attention_mask: EquipCache can't follow a mask that differs by head. Give one for all heads.")
    held = layer.text_positions()[:, : layer.positions.shape[1]].clamp(min=0)
    return allowed.expand(*held.shape[:2], -1, -1).gather(-1, held[:, :, None].expand(-1, -1, allowed.shape[2], -1))


def bias_columns(layer: EquipLayer, bias: torch.Tensor, used: int, heads: int) -> torch.Tensor:
    """For each query head and slot in use the column of a bias by position, (batch, heads, slots).

    Args:
        bias: Its last column belongs to the newest token, which is in a slot.
    """
    if layer.rotation.compact:
        ranks = layer.state.find_ranks()
        columns = ranks + bias.shape[-1] - used
    else:
        columns = layer.text_positions().clamp(min=0)
    columns = columns.expand(-1, layer.store.shape[1], -1)
    return columns.repeat_interleave(heads // columns.shape[1], 1)


def watch_inputs(model: PreTrainedModel, cache: EquipCache) -> None:
    """Has a cache's layers shown what the model's attention modules are called with, for as long as the cache lives."""
    reference = weakref.ref(cache)

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        watching = reference()
        if watching is None or kwargs is None or not any(value is watching for value in kwargs.values()):
            return
        layer: Any = watching.layers[module.layer_idx]
        if isinstance(layer, KVLayer):  # the model's own layers have no policy, and would keep them
            hidden = args[0] if args else kwargs["hidden_states"]
            layer.inputs = {**{name: value for name, value in kwargs.items() if value is not watching}, "hidden_states": hidden}

    before.only_observes = True  # type: ignore[attr-defined]
    for layer in decoder_layers(model)[2]:
        handle = attention_module(layer).register_forward_pre_hook(before, with_kwargs=True)
        weakref.finalize(cache, handle.remove)


def part_of(inputs: Mapping[str, Any] | None, start: int, stop: int) -> Mapping[str, Any] | None:
    """The arguments for some of the new tokens."""
    if inputs is None:
        return None
    return {name: _part(value, start, stop) if name in _BY_TOKEN else value for name, value in inputs.items()}


def _part(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_part(entry, start, stop) for entry in value)
    return value[:, start:stop] if isinstance(value, torch.Tensor) else value
