"""Decoding steps under `torch.compile`: the counters of a ring as tensors beside those in Python.

A compiled graph takes a Python number that it reads for a constant, and is compiled anew when it changes. So a graph reads none of a
layer's counters. It has `origin`, the counters as they were written down last, and `clock`, the number of tokens that came since, one
at a time and each of them real; all else follows from the two. A graph only moves the clock. An uncompiled step leaves word for the
next graph to move it too, and whatever else happens to a layer has its origin written down anew. The other way round, the counters in
Python are read from the clock when someone asks for them after a graph has run.

A graph never brings the two frames back together. It takes angles in float64, which is as exact; the next uncompiled step does it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.attention import previous_attention
from hf_kvcaches.equip.budgets import check_budget, slots_for
from hf_kvcaches.equip.frames import Frames, Turn
from hf_kvcaches.equip.storage import SlotStorage
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.slots import slot_attention, write_slots

if TYPE_CHECKING:
    from hf_kvcaches.core.calls import Call
    from hf_kvcaches.equip.layer import EquipLayer
    from hf_kvcaches.equip.rollback import Recording
    from hf_kvcaches.equip.settings import EquipSettings


class _Counter:
    """A counter that is read from the clock where a graph has moved it. Kept in the instance's dict, under its own name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type) -> Any:
        if layer.behind:
            layer.catch_up()
        return layer.__dict__[self.name]

    def __set__(self, layer: Any, value: Any) -> None:
        if layer.behind:
            layer.catch_up()
        layer.__dict__[self.name] = value


class ClockedStorage(SlotStorage):
    """Slots whose counters a compiled graph can move.

    Attributes:
        clock: Tokens that came since `origin` was written down, one at a time, ().
        origin: `seen`, `fed`, how many slots are in use, `cursor` and how far the frames are apart, (1 or batch, 5).
        behind: Whether a graph has moved the clock since the counters were read from it.
        wound: Whether `origin` and `clock` are right, but for the ticks.
        ticks: Tokens that came since and that the clock has not been told of. The next graph does it.
        gappy: Whether tokens were taken out of the middle, so that others than sinks are far, or will be.
    """

    shared_tensors = ("clock", "origin")
    clock: torch.Tensor | None = None
    origin: torch.Tensor | None = None
    behind = False
    ticks = 0
    wound = False
    gappy = False
    seen: Any = _Counter()
    fed: Any = _Counter()
    filled: Any = _Counter()
    cursor: Any = _Counter()
    offset: Any = _Counter()
    kept_rows: Any = _Counter()
    offset_rows: Any = _Counter()

    settings: EquipSettings
    recent: int
    recording: Recording | None
    config: Any
    positions: torch.Tensor | None
    first: torch.Tensor | None

    def __init__(self) -> None:
        self.kept_rows = self.offset_rows = None
        super().__init__()

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether `torch.compile` may take single tokens: the oldest goes, and the far keys are the sinks."""
        if not self.settings.policy.order_only or self.frames.unrotated:
            return False
        if self.recording is not None or self.gappy:
            return False
        if self.settings.decode_budget is not None or self.settings.question_start is not None:
            return False
        sinks, budget, recent = self.settings.sinks, self.settings.budget, self.settings.recent
        if self.slots:
            budget, recent = self.slots, self.recent
        elif isinstance(budget, float):  # nobody knows yet what it comes to
            return recent is None and self.settings.policy.recent(sinks + 1, sinks) == 1
        elif recent is None:
            recent = self.settings.policy.recent(budget, sinks)
        return bool(recent == budget - sinks and recent > 0)

    def get_seq_length(self) -> int:
        if torch.compiler.is_compiling() and self.origin is not None and self.clock is not None:
            return self.origin[0, 0] + self.clock + self.ticks  # type: ignore[return-value]
        return int(self.seen)

    def counters_now(self) -> dict[str, Any]:
        """The counters by name, to be read and written without the question that each of them asks."""
        if self.behind:
            self.catch_up()
        return self.__dict__

    def catch_up(self) -> None:
        """Reads the counters from the clock."""
        assert self.clock is not None
        assert self.origin is not None
        self.behind = False
        self.thaw()
        held = self.__dict__
        (seen, fed, filled, cursor, offset, clock) = torch.cat([self.origin[0], self.clock[None]]).tolist()
        evicted, sinks = max(0, filled + clock - self.slots), self.settings.sinks
        if held["kept_rows"] is not None or held["offset_rows"] is not None:
            now = Now.of(self)
            if held["kept_rows"] is not None:
                held["kept_rows"] = now.kept
            if held["offset_rows"] is not None:
                held["offset_rows"] = now.offset
        held["seen"], held["fed"] = seen + clock, fed + clock
        held["filled"] = filled + clock - evicted if held["kept_rows"] is None else 0
        held["offset"] = offset + evicted if held["offset_rows"] is None else 0
        if self.positions is None:
            held["cursor"] = sinks + (cursor - sinks + evicted) % (self.slots - sinks)

    def thaw(self) -> None:
        """Makes sure that a graph may write in place outside of inference mode; unlike `own`, it can't ask for itself."""
        if torch.is_inference_mode_enabled():
            return
        for name in ("keys", "values", "positions", *self.shared_tensors):
            tensor = getattr(self, name)
            if tensor is not None and tensor.is_inference():
                setattr(self, name, tensor.clone())

    def wind(self, stepped: bool) -> None:
        """Tells the clock of an uncompiled call."""
        if stepped and self.wound:
            self.ticks += 1
        elif self.settings.policy.order_only and not (stepped and self.gappy):
            self.write_down()

    def write_down(self) -> None:
        """Makes the counters as they are now the origin."""
        self.wound = self.gappy = False
        self.ticks = 0
        if self.keys is None or not self.is_compileable:
            return
        self.gappy = self.frames.two and self._has_gaps()
        if self.gappy:
            return
        numbers = torch.tensor([[self.seen, self.fed, self.filled, self.cursor, self.offset]], device=self.keys.device)
        if self.kept_rows is not None or self.offset_rows is not None:
            numbers = numbers.repeat(self.keys.shape[0], 1)
            for column, rows in ((2, self.kept_rows), (4, self.offset_rows)):
                if rows is not None:
                    numbers[:, column] = rows[:, 0, 0]
        # The clock outlives a `torch.inference_mode`, in which alone its tensors could be changed.
        with torch.inference_mode(False):
            self.thaw()
            if self.clock is None or self.clock.device != numbers.device:
                self.clock = torch.zeros((), dtype=torch.long, device=numbers.device)
            self.clock.zero_()
            if self.origin is None or self.origin.shape != numbers.shape or self.origin.device != numbers.device:
                self.origin = torch.empty(numbers.shape, dtype=torch.long, device=numbers.device)
            self.origin.copy_(numbers)
        if self.frames.geometry is not None:
            exact_frequencies(self.frames, self.keys.device)
        self.wound = True
        _mark_static(self.keys, self.values, self.clock, self.origin)

    def _has_gaps(self) -> bool:
        """Whether a row lacks a token between its sinks and its newest ones, or has an older one instead."""
        held = self.positions
        if held is None:
            return False
        sinks, first = self.settings.sinks, torch.zeros((), device=held.device) if self.first is None else self.first[:, None, None]
        older = (held >= first + sinks) & (held < self.fed - (self.slots - sinks))
        wanted = (self.fed - first).clamp(max=self.slots)
        return bool((older.any(-1, keepdim=True) | ((held >= 0).sum(-1, keepdim=True) != wanted)).any())

    def restore(self, before: dict[str, Any]) -> None:
        super().restore(before)
        self.write_down()

    def reset(self) -> None:
        self.behind = self.wound = self.gappy = False
        super().reset()
        self.clock, self.origin, self.ticks = None, None, 0

    def import_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        super().import_state(tensors, values)
        self.write_down()

    def _map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._map_rows(function)
        self.write_down()

    def __deepcopy__(self, memo: dict[int, Any]) -> ClockedStorage:
        if self.behind:
            self.catch_up()
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, ClockedStorage)
        return copied


class Now(NamedTuple):
    """What the clock says, (1 or batch, 1, 1) each."""

    fed: torch.Tensor
    kept: torch.Tensor
    evicted: torch.Tensor
    offset: torch.Tensor
    cursor: torch.Tensor

    @classmethod
    def of(cls, layer: ClockedStorage) -> Now:
        """The clock of a layer, read."""
        assert layer.clock is not None
        assert layer.origin is not None
        _, fed, filled, cursor, offset = layer.origin[:, :, None, None].unbind(1)
        total = filled + layer.clock
        evicted, sinks = (total - layer.slots).clamp(min=0), layer.settings.sinks
        cursor = sinks + (cursor - sinks + evicted) % (layer.slots - sinks)
        return cls(fed + layer.clock, total - evicted, evicted, offset + evicted, cursor)


def attend(layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
    """`EquipLayer.attend` in a graph: of a first prompt without padding, or of one real token a row."""
    first, tokens = layer.keys is None, keys.shape[2]
    if not layer.is_compileable or not (first or layer.wound):
        raise UnsupportedError(
            "torch.compile: of EquipCache only steps of the streaming policy can be compiled, with positions='original' or rope='frames', "
            "and without recording. Ask cache.is_compileable, and leave the model uncompiled where it says False."
        )
    if layer.ticks:
        assert layer.clock is not None
        layer.clock.add_(layer.ticks)
        layer.ticks = 0
    if not first and tokens > 1:
        raise UnsupportedError(
            "torch.compile: several tokens at once can be compiled as the first ones only. Feed them to the uncompiled model, or singly."
        )
    if call.bias is not None or (call.mask is not None and call.mask.shape[-1] != tokens):
        raise UnsupportedError(
            "torch.compile: EquipCache can't compile steps with a position bias or a mask over more than the new tokens."
        )
    if call.mask is not None:
        compat.assert_in_graph(
            _newest(call.mask).all(),
            "EquipCache: padding among the new tokens of a compiled call. Feed them to the uncompiled model. If no new token is padding, "
            "call hf_kvcaches.enable(model) before the model is compiled.",
        )
    return _first_block(layer, query, keys, values, call) if first else _step(layer, query, keys, values, call)


def _newest(mask: torch.Tensor) -> torch.Tensor:
    """True where a new token is real, as the last query's row of a mask of the new tokens says."""
    newest = mask[:, 0, -1]
    return newest if newest.dtype == torch.bool else newest == 0


def _first_block(layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
    tokens, sinks = keys.shape[2], layer.settings.sinks
    layer.slots = slots = slots_for(layer.settings.budget, tokens)
    layer.recent = slots - sinks
    check_budget(slots, sinks, layer.recent)
    if layer.frames.geometry is not None:
        places = torch.arange(tokens, device=keys.device)
        turn = _turn(layer.frames, _came(layer, call, places), places[None, None])
        query, keys = turn(query), turn(keys)
    output, _ = previous_attention(call.module, query, keys, values, call.mask, **call.options)
    gone = max(0, tokens - slots)
    if gone:
        # Sinks stand where they stood, and the others are near: nothing is turned.
        keys, values = (torch.cat([held[:, :, :sinks], held[:, :, sinks + gone :]], 2) for held in (keys, values))
    layer.install(keys, values, keys.new_full((keys.shape[0], 1, 1), tokens - gone, dtype=torch.long))
    layer.reserve(slots)
    numbers = [keys.new_full((1,), number, dtype=torch.long) for number in (tokens, tokens, tokens - gone, sinks, gone)]
    layer.origin, layer.clock = torch.cat(numbers)[None], torch.zeros((), dtype=torch.long, device=keys.device)
    layer.wound = layer.behind = True
    return output.to(values.dtype)


def _step(layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
    layer.reserve(layer.slots)
    frames, sinks = layer.frames, layer.settings.sinks
    before = Now.of(layer)
    assert layer.clock is not None
    layer.clock.add_(1)
    layer.behind = True
    now, far_query = Now.of(layer), None
    if frames.geometry is not None:
        came = _came(layer, call, now.fed[:, 0] - 1)
        near = _turn(frames, came, now.kept - 1 + now.offset)
        if sinks:
            far_query = _turn(frames, came, now.kept - 1)(query)
        query, keys = near(query), near(keys)
    assert layer.keys is not None
    assert layer.values is not None
    if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    places = torch.arange(layer.capacity, device=keys.device)
    if layer.positions is None:
        slot = torch.where(before.kept < layer.slots, before.kept, before.cursor)[:1]
        valid = places[None, None] < now.kept[:1]
        far = (places < sinks)[None, None]  # as a mask it has the keys read once, for both queries
    else:
        slot = _oldest(layer, places)
        layer.positions.scatter_(2, slot, before.fed.to(layer.positions.dtype).expand_as(slot))
        valid = layer.positions >= 0
        far = valid & (layer.positions < now.fed - layer.near)
    write_slots(layer.keys, layer.values, slot, keys, values, backend="torch")
    output, _ = slot_attention(
        query,
        layer.keys,
        layer.values,
        call.scaling,
        valid=valid,
        far=None if far_query is None else far,
        far_query=far_query,
        softcap=call.softcap,
        sink_logits=call.sink_logits,
        backend="torch",
    )
    return output


def _oldest(layer: EquipLayer, places: torch.Tensor) -> torch.Tensor:
    """The first empty slot of each row, or that of the oldest token behind the sinks, (batch, 1, 1)."""
    held = layer.positions
    assert held is not None
    worth = torch.where(held < layer.sinks_end, torch.iinfo(held.dtype).max, held)
    return torch.where(held < 0, places.to(held.dtype) - len(places), worth).argmin(-1, keepdim=True)


def _came(layer: EquipLayer, call: Call, places: torch.Tensor) -> torch.Tensor:
    """The model's positions of the new tokens, (batch or 1, tokens).

    Args:
        places: Those of its own counting, likewise, where it didn't say.
    """
    ids = call.options.get("position_ids")
    if ids is None:
        places = places if places.ndim == 2 else places[None]
        return places if layer.first is None else places - layer.first[:, None]
    # The axes of an image agree for text, and images don't get as far as here.
    return ids[0] if ids.ndim == 3 else ids


def _turn(frames: Frames, came: torch.Tensor, target: torch.Tensor) -> Turn:
    """The rotation from the model's positions to others, as in `TurningPass.turn`.

    Args:
        came: (batch or 1, tokens).
        target: (batch or 1, 1, 1 or tokens).
    """
    assert frames.geometry is not None
    exact = exact_frequencies(frames, target.device)
    came = came.to(target.device)[:, None]
    # The model multiplies in float32: undoing its angle needs the rounded one.
    rounded = (came[..., None].float() * exact.float()).double()
    angles = torch.where((came == target)[..., None], 0.0, target[..., None].double() * exact - rounded)
    return Turn.by(angles, frames.geometry.layout)


def exact_frequencies(frames: Frames, device: torch.device) -> torch.Tensor:
    """The frequencies of `frames.geometry` on a device, where they stay."""
    assert frames.geometry is not None
    if device.type == "cpu":
        return frames.geometry.inv_freq
    key = ("exact", str(device))
    if key not in frames._tables:
        frames._tables[key] = frames.geometry.inv_freq.to(device)
    found: torch.Tensor = frames._tables[key]
    return found


def _mark_static(*tensors: torch.Tensor | None) -> None:
    """Says that tensors stay where they are, without which CUDA graphs would leave out what changes them."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:  # Loaded by whoever compiles; loading it takes seconds.
        for tensor in tensors:
            if tensor is not None:
                dynamo.mark_static_address(tensor, guard=False)
