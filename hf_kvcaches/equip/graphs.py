"""Decode steps under `torch.compile(fullgraph=True)`.

A graph takes a number in Python for a constant, and is compiled anew when it changes. So it reads `SlotTable.clock` in place of `seen`,
looks for a victim also where there is room, and masks empty slots. The numbers are read from the clock before the next uncompiled pass.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.call import Call
from hf_kvcaches.errors import UnsupportedError


def prepare(layer: Any) -> None:
    """Make sure after an uncompiled pass of an `EquipLayer`, or a change from outside, that the next pass may be compiled."""
    table, storage, layer.frozen = layer.table, layer.storage, layer.frozen or torch.is_inference_mode_enabled()
    if table.positions is None or not compat.compiles(layer.device) or not layer.is_compileable:
        table.clock = None
        return
    device = table.positions.device
    if table.rooms is None:
        storage.reserve(layer.slots, layer.slots)
        table.reserve(storage.capacity)
    with torch.inference_mode(False):  # a graph may run outside of that mode, in which alone the mode's tensors can be changed
        if table.clock is None or table.clock.device != device:
            table.clock = torch.zeros((), dtype=torch.long, device=device)
        for part in (table, storage):
            part.map(lambda tensor: tensor.clone() if tensor.is_inference() else tensor)
    table.clock.fill_(table.seen)
    if layer.rotation.unrotated:
        layer.rotation.on_read(torch.zeros(1, 1, 1, dtype=torch.int32, device=device), storage.capacity)
    for tensor in (*storage.tensors().values(), *table.tensors().values()):
        compat.mark_static(tensor)  # without it CUDA graphs would leave out what changes them


def require_compileable(layer: Any, call: Call, tokens: int) -> None:
    """Refuse what a graph of an `EquipLayer` can't do, with so many new tokens in each row."""
    rotation = layer.rotation
    if not layer.is_compileable or layer.table.clock is None:
        raise UnsupportedError(
            "torch.compile: of EquipCache only decoding steps can be compiled, with a policy that says so and without recording. "
            "Ask cache.is_compileable, and leave the model uncompiled where it says False."
        )
    if tokens > 1:
        raise UnsupportedError("torch.compile: several tokens at once can't be compiled. Feed them to the uncompiled model, or singly.")
    if call.bias is not None or (call.mask is not None and call.mask.shape[-1] != tokens):
        raise UnsupportedError(
            "torch.compile: EquipCache can't compile steps with a position bias or a mask over more than the new tokens."
        )
    if rotation.otherwise is not None and not rotation.streams:
        compat.assert_in_graph(
            layer.table.clock < rotation.window,
            "EquipCache: the text outgrows the model's window in a compiled step. Ask cache.get_seq_length() before each step, as "
            "`generate` does, or pass positions='compact'.",
        )
    if call.mask is not None:
        newest = call.mask[:, 0, -1]  # the last query's row
        compat.assert_in_graph(
            (newest if newest.dtype == torch.bool else newest == 0).all(),
            "EquipCache: padding among the new tokens of a compiled call. Feed them to the uncompiled model. If no new token is padding, "
            "call hf_kvcaches.enable(model) before the model is compiled.",
        )
