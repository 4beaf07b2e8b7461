"""A block of new tokens: their attention over slots and each other, without the layer that they come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from hf_kvcaches.core.call import Call
from hf_kvcaches.core.holder import LastQueries
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.blocks import Visibility, block_attention, observers

# Arguments of the model's attention with one entry for each new token.
_BY_TOKEN = ("hidden_states", "position_embeddings")


# What a step's mask says: which tokens of the text the query may see, (batch or 1, tokens), or None for all; and which rows have a new
# token, (batch or 1, 1, 1), or None for all.
StepMask = tuple[torch.Tensor | None, torch.Tensor | None]


class ModuleCall(NamedTuple):
    """What the model's attention module is called with.

    Args:
        mask: The mask that it will attend with; False where it has another name.
        positions: The model's positions of the new tokens, (batch or 1, tokens), or None.
        inputs: All arguments, for policies that read them, or None.
    """

    module: nn.Module
    mask: Any
    positions: torch.Tensor | None
    inputs: Mapping[str, Any] | None


@dataclass(frozen=True)
class Incoming:
    """The new tokens of a block.

    Args:
        keys: As they will be kept.
        frame: The same keys, rotated as their queries are.
        positions: How many real tokens came before each in its row, (batch, 1, tokens), int32; -1: padding.
        index: To which position `frame` is rotated, as `positions`.
        text: Their indices in the text, (batch, 1, tokens), or None where no row was ever padded.
        newest: The model's position of the last one, (batch or 1, 1).
    """

    keys: torch.Tensor
    frame: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    index: torch.Tensor
    text: torch.Tensor | None
    newest: torch.Tensor


@dataclass(frozen=True)
class Arrival:
    """Kept and new tokens side by side, the kept ones first, before some of them are pruned.

    Args:
        positions: Of all tokens, (batch, 1 or kv_heads, slots in use + tokens), int32; -1: none.
        text: Their indices in the text, or None.
        scores: What the policy says of them, +inf for sinks, -inf where there is no token.
    """

    new: Incoming | None
    positions: torch.Tensor
    text: torch.Tensor | None
    scores: torch.Tensor


@dataclass(frozen=True)
class Questions:
    """The queries of a block, and what else a policy may be shown of it.

    Args:
        states: (batch, heads, queries, head_dim), rotated to `index`.
        index: (batch or 1, queries); -1: padding.
        module: The model's attention.
        inputs: What that is called with, or None.
    """

    states: torch.Tensor | None = None
    index: torch.Tensor | None = None
    module: nn.Module | None = None
    inputs: Mapping[str, Any] | None = None


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, visible: Visibility, bias: Any) -> torch.Tensor:
    """Attention of new tokens over slots and themselves, (batch, tokens, heads, head_dim); arguments as in `block_attention`."""
    if call.softcap is None and bias is None and call.sink_logits is None:
        mask = visible.rows(0, query.shape[2], keys.device)
        groups = query.shape[1] // keys.shape[1]
        mask = mask if mask.shape[1] == 1 else mask.repeat_interleave(groups, 1)
        output = functional.scaled_dot_product_attention(query, keys, values, mask, scale=call.scaling, enable_gqa=groups > 1)
        return output.transpose(1, 2).nan_to_num(0.0)  # a query that sees nothing is padding
    attended, _ = block_attention(query, keys, values, call.scaling, visible, softcap=call.softcap, bias=bias, sink_logits=call.sink_logits)
    assert attended is not None
    return attended


def observe(
    query: torch.Tensor, keys: torch.Tensor, call: Call | LastQueries, visible: Visibility, window: int | None, bias: Any = None
) -> torch.Tensor:
    """What slots and new tokens got from the last `window` queries of each row, or all, (batch, kv_heads, slots + tokens), float32."""
    tokens = query.shape[2]
    _, observed = block_attention(
        query,
        keys,
        None,
        call.scaling,
        visible,
        softcap=call.softcap,
        bias=bias,
        sink_logits=call.sink_logits,
        observers=observers(window, visible.new, tokens, keys.device),
    )
    assert observed is not None
    return observed


def observe_adopted(queries: LastQueries | None, keys: torch.Tensor, valid: torch.Tensor | None, window: int | None) -> torch.Tensor:
    """What an adopted prompt's keys, as the model rotated them, got from its last queries, (batch, kv_heads, tokens)."""
    tokens = keys.shape[2]
    count = tokens if window is None else min(window, tokens)
    available = 0 if queries is None else queries.states.shape[2]
    if queries is None or available < count:
        raise UnsupportedError(f"queries: the policy scores a prompt of {tokens} tokens by its last {count} queries, and got {available}.")
    earlier = tokens - count
    slots, new = (None, None) if valid is None else (valid[:, None, :earlier], valid[:, earlier:])
    return observe(queries.states[:, :, available - count :], keys, queries, Visibility(slots, earlier, new), window)


def mask_of_slots(allowed: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """What a mask of the model's own says about slots, (batch, 1 or kv_heads, tokens, slots).

    Args:
        allowed: (batch or 1, 1, tokens, tokens of the text).
        text: As `SlotTable.text_index` gives it.
    """
    index = text.clamp(min=0)[:, :, None].expand(-1, -1, allowed.shape[2], -1)
    return allowed.expand(*text.shape[:2], -1, -1).gather(-1, index)


def bias_of_slots(bias: torch.Tensor, columns: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The columns, (batch, 1 or kv_heads, slots), of a bias by position that belong to slots, (batch, heads, tokens, slots)."""
    heads = max(bias.shape[1], kv_heads)
    columns = columns.long().expand(-1, kv_heads, -1).repeat_interleave(heads // kv_heads, 1)
    bias = bias.expand(columns.shape[0], heads, -1, -1)
    return bias.gather(-1, columns[:, :, None].expand(-1, -1, bias.shape[2], -1))


def with_new(of_slots: torch.Tensor, of_text: torch.Tensor) -> torch.Tensor:
    """What a mask or a bias says of slots, (batch, heads, tokens, slots), and of the new tokens, which are its last columns."""
    return torch.cat([of_slots, of_text[..., -of_slots.shape[2] :].expand(*of_slots.shape[:2], -1, -1)], -1)


def inputs_of(inputs: Mapping[str, Any] | None, start: int, stop: int) -> Mapping[str, Any] | None:
    """What the model's attention is called with, for some of the new tokens."""
    return inputs and {name: _part(value, start, stop) if name in _BY_TOKEN else value for name, value in inputs.items()}


def _part(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_part(entry, start, stop) for entry in value)
    return value[:, start:stop] if isinstance(value, torch.Tensor) else value


def require_one(mask: torch.Tensor) -> None:
    """Refuse a mask, (batch or 1, heads, tokens, tokens of the text), that differs by head."""
    if mask.shape[1] != 1:
        raise UnsupportedError("attention_mask: EquipCache can't follow a mask that differs by head. Give one for all heads.")
