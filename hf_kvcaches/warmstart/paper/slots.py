"""`Slots`: the summary of a prompt, a few keys and values for each layer and key head that stand for all its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hf_kvcaches.core.layers import append
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.layout import LayerStates


@dataclass(frozen=True, eq=False)
class Slots:
    """A prompt's summary: the slots of each layer, in order of position, which are attended to like tokens."""

    layers: Sequence[LayerStates]  # keys, rotated to `positions`, and values, (kv_heads, slots, head_dim)
    positions: torch.Tensor  # (slots,), float32: the weighted mean positions of the tokens that slots stand for
    length: int  # tokens of the prompt, including the last ones, which no slot stands for

    def shifted(self, delta: int, geometries: Sequence[RotaryGeometry]) -> Slots:
        """Move the slots to the end of a prompt that is `delta` tokens longer: the paper's phase shift.

        One rotation is right for all slots, because a mean of rotated keys is the rotated mean, and every slot keeps its distance to the
        prompt's end.
        """
        keys = [geometry.shift(layer.keys[None], delta)[0] for layer, geometry in zip(self.layers, geometries, strict=True)]
        layers = [LayerStates(moved, layer.values) for moved, layer in zip(keys, self.layers, strict=True)]
        return Slots(layers, self.positions + delta, self.length + delta)


def summary(layers: Sequence[LayerStates], length: int, slots: int = 64) -> Slots:
    """Summarise a prompt in a number of slots; a prompt of no more tokens than slots is kept as it is.

    "CP-KVP", section 2.2: a slot is the mean of the tokens under a triangle, and the triangles are spread evenly over the prompt.

    Args:
        layers: Of the prompt's first tokens, fewer than `length`. The others are recomputed behind the slots.
    """
    tokens = layers[0].keys.shape[1]
    weights = torch.eye(tokens)
    if tokens > slots:
        # In float64: with as many slots as tokens, a token may lie near the foot of a triangle.
        centres = (torch.arange(slots, dtype=torch.float64) + 0.5) / slots
        heights = (1 - (torch.arange(1, tokens + 1) / tokens - centres[:, None]).abs() * slots).clamp_min(0)
        weights = (heights / heights.sum(-1, keepdim=True)).float()
    means = [LayerStates(*((weights.to(states.device) @ states.float()).to(states.dtype) for states in layer)) for layer in layers]
    return Slots(means, weights @ torch.arange(tokens).float(), length)


class SummaryLayer(SplicedLayer):
    """A layer that begins, after `take_slots`, with slots in place of a prompt's first tokens.

    `seen` counts the replaced tokens, and `offset` how many more these are than their slots.
    """

    counters: ClassVar[tuple[str, ...]] = (*SplicedLayer.counters, "slots")
    slots: int = 0  # how many stand for tokens

    def take_slots(self, layer: LayerStates, seen: int) -> None:
        """Begin with slots that stand for `seen` tokens; of more slots than tokens, with the last ones."""
        keys, values = layer.keys[None, :, -seen:], layer.values[None, :, -seen:]
        self.lazy_initialization(keys, values)
        self.key_buffer, self.value_buffer, self.slots = append(None, keys, 0), append(None, values, 0), keys.shape[2]
        self.offset = self.dropped = seen - self.slots
        self.seen = seen

    def take_tokens(self, keys: torch.Tensor, values: torch.Tensor, seen: int) -> None:
        """Replace the content by all tokens, in buffers whose first `seen` slots are filled."""
        self.key_buffer, self.value_buffer, self.slots = keys, values, 0
        self.seen, self.dropped, self.offset = seen, 0, 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.kept + query_length, self.offset

    def exact_states(self, window: bool = False) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        return None if self.slots else super().exact_states(window)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self.slots:
            return super().update(key_states, value_states, *args, **kwargs)
        self.check_new_tokens(key_states, value_states)
        keys, values = append(self.key_buffer, key_states, self.kept), append(self.value_buffer, value_states, self.kept)
        self.key_buffer, self.value_buffer = keys, values
        self.seen += key_states.shape[2]
        return keys.narrow(2, 0, self.kept), values.narrow(2, 0, self.kept)

    def crop(self, tokens_to_remove: int) -> None:
        if self.slots and -int(tokens_to_remove) > self.kept - self.slots:
            raise UnsupportedError("crop: the last tokens reach into a prompt of which only a summary is kept. reset() the cache.")
        super().crop(tokens_to_remove)
