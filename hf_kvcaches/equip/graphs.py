"""Decoding steps under `torch.compile(fullgraph=True)`.

A compiled graph takes a number in Python that it reads for a constant, and is compiled anew when it changes. So it reads `SlotState.clock`
in place of `seen`, and counts what is kept. The numbers in Python are read from the clock when the next uncompiled pass begins.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.view import previous_attention
from hf_kvcaches.equip import steps
from hf_kvcaches.equip.rotation import EXACT_UP_TO, PairRotation, rotation_between
from hf_kvcaches.errors import UnsupportedError

if TYPE_CHECKING:
    from hf_kvcaches.core.call import Call
    from hf_kvcaches.core.rope import RotaryGeometry
    from hf_kvcaches.equip.layer import EquipLayer


class GraphPass:
    """What a graph knows of its pass: the model's positions, (batch or 1, tokens), and that all new tokens are real."""

    valid = allowed = None

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions

    def rotation(self, geometry: RotaryGeometry, target: int | torch.Tensor, *, still: bool = False) -> PairRotation:
        """The rotation from the model's positions to others, a number or (batch or 1, heads or 1, tokens)."""
        target = torch.as_tensor(target, device=self.positions.device)
        if target.ndim < 3:
            target = target.view(1, 1, -1)
        same = (self.positions[:, None] == target) & (target < EXACT_UP_TO)
        rotation = rotation_between(geometry, self.positions, target)
        cos, sin = torch.where(same[..., None], 1.0, rotation.cos), torch.where(same[..., None], 0.0, rotation.sin)
        return PairRotation(cos, sin, rotation.layout)


def prepare(layer: EquipLayer) -> None:
    """Makes sure after an uncompiled pass that the next one may be compiled."""
    state, store = layer.state, layer.store
    if state.positions is None or not layer.is_compileable:
        state.clock = None
        return
    device = state.positions.device
    with torch.inference_mode(False):  # A graph may run outside of that mode, in which alone the mode's tensors can be changed.
        if state.clock is None or state.clock.device != device:
            state.clock = torch.zeros((), dtype=torch.long, device=device)
        for part in (state, store):
            part.map(lambda tensor: tensor.clone() if tensor.is_inference() else tensor)
    state.clock.fill_(state.seen)
    if layer.rotation.geometry is not None:
        layer.rotation.geometry.frequencies_on(device)
    if layer.rotation.unrotated:
        layer.rotation.table(state.slots, device)
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:  # Loaded by whoever compiles; loading it takes seconds.
        for tensor in (*store.tensors().values(), *state.tensors().values()):
            # Without it CUDA graphs would leave out what changes them.
            dynamo.mark_static_address(tensor, guard=False)


def attend(layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
    """`EquipLayer.attend` in a graph: of a first prompt without padding, or of one real token a row."""
    first, tokens = layer.state.positions is None, keys.shape[2]
    if not layer.is_compileable or not (first or layer.state.clock is not None):
        raise UnsupportedError(
            "torch.compile: of EquipCache only decoding steps can be compiled, with a policy that says so and without recording. "
            "Ask cache.is_compileable, and leave the model uncompiled where it says False."
        )
    if tokens > 1 and not (first and layer.policy.order_only):
        raise UnsupportedError(
            "torch.compile: several tokens at once can be compiled as the first ones of the streaming policy only. "
            "Feed them to the uncompiled model, or singly."
        )
    if call.bias is not None or (call.mask is not None and call.mask.shape[-1] != tokens):
        raise UnsupportedError(
            "torch.compile: EquipCache can't compile steps with a position bias or a mask over more than the new tokens."
        )
    if call.mask is not None:
        newest = call.mask[:, 0, -1]  # the last query's row
        compat.assert_in_graph(
            (newest if newest.dtype == torch.bool else newest == 0).all(),
            "EquipCache: padding among the new tokens of a compiled call. Feed them to the uncompiled model. If no new token is padding, "
            "call hf_kvcaches.enable(model) before the model is compiled.",
        )
    if first:
        return _first_block(layer, query, keys, values, call)
    index = layer.state.row_tokens()
    assert isinstance(index, torch.Tensor)
    return steps.step(layer, query, keys, values, call, GraphPass(_positions(call, index.reshape(-1, 1))))


def _positions(call: Call, counted: torch.Tensor) -> torch.Tensor:
    """The model's positions of new tokens, (batch or 1, tokens): `counted` where it didn't say."""
    ids = call.options.get("position_ids")
    # The axes of an image agree for text, and images don't get as far as here.
    return counted if ids is None else ids[0] if ids.ndim == 3 else ids


def _first_block(layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
    """The prompt of a policy that evicts the oldest token: what stays is known without looking at it."""
    state, rotation, tokens, sinks = layer.state, layer.rotation, keys.shape[2], layer.settings.sinks
    limit = layer.settings.limit_of(tokens)
    layer.take_limits(limit, tokens)
    index = torch.arange(tokens, device=keys.device)
    stored = keys
    if rotation.geometry is not None:
        running = GraphPass(_positions(call, index[None]))
        to = running.rotation(rotation.geometry, index)
        query, keys = to(query), to(keys)
        stored = running.rotation(rotation.geometry, torch.zeros_like(index))(stored) if rotation.unrotated else keys
    output, _ = previous_attention(call.module, query, keys, values, call.mask, **call.options)
    kept = torch.cat([index[:sinks], index[max(sinks, tokens - limit.slots + sinks) :]])
    stored, stored_values = stored.index_select(2, kept), values.index_select(2, kept)
    layer.store.install(stored, stored_values, keys.new_full((keys.shape[0], 1, 1), len(kept), dtype=torch.long), state.slots)
    state.positions = kept.to(torch.int32).expand(keys.shape[0], 1, -1).contiguous()
    if rotation.unrotated:
        state.ranks = torch.arange(len(kept), device=keys.device).to(torch.int32).expand_as(state.positions).contiguous()
    state.clock, state.stale = torch.full((), tokens, dtype=torch.long, device=keys.device), True
    layer.reserve_for_step()
    return output.to(values.dtype)
