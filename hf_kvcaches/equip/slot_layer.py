"""The state of one layer of an `EquipCache`, and what transformers may ask of it between passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from hf_kvcaches import compat
from hf_kvcaches.core.call import AnsweringLayer
from hf_kvcaches.core.files import part_of
from hf_kvcaches.core.parallel import require_heads
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.step import Passes
from hf_kvcaches.equip.budgets import Assembly
from hf_kvcaches.equip.coded import ragged_like
from hf_kvcaches.equip.policies.tokens import ModuleCall
from hf_kvcaches.equip.rotation import KeyRotation
from hf_kvcaches.equip.settings import EquipSettings
from hf_kvcaches.equip.slots import SlotTable
from hf_kvcaches.equip.storage import Flat, Slots
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError


class Undo:
    """What a layer was before a change that brings so many new tokens: drafts that are refused, or an edit that fails.

    Args:
        slots: Those that a step overwrites, (batch, 1 or kv_heads, 1); None for all.
    """

    def __init__(self, layer: SlotLayer, slots: Slots | None = None, tokens: int = 0) -> None:
        self.slots, self.tokens, self.table = slots, tokens, copy.deepcopy(layer.table)
        self.storage, self.rotation = layer.storage, layer.rotation
        self.content: Any
        if slots is None:
            self.content = {name: tensor.clone() for name, tensor in self.storage.export().items()}
        else:
            self.content = self.storage.gather(slots)

    def restore(self, layer: SlotLayer) -> None:
        """Make the layer what it was. Of several changes the newest is undone first."""
        layer.table, layer.storage, layer.rotation = self.table, self.storage, self.rotation
        if self.slots is None:
            layer.storage.restore(self.content, self.table.kept(), layer.slots)
        else:
            layer.storage.write(self.slots, self.content)
        layer.table.reserve(layer.storage.capacity)


class SlotLayer(AnsweringLayer):
    """Slots for at most a budget of tokens.

    Attributes:
        geometry: How the model rotates the layer's keys; `rotation` is how they are kept.
        slots: How many slots there may be in each head, in the mean; 0 before the prompt. `recent` of the newest tokens are protected.
        waiting: Whether nothing is pruned yet, because the policy waits for `EquipCache.compress`.
        journal: What new tokens changed since the last crop, the newest last; None where nothing is recorded.
        heads: KV heads of the model's layer in all processes together; None where nothing looks at several heads.
        frozen: Whether tensors may be from inference mode, outside of which they can't be written in place.
        detour: What new tokens do in place of being appended: of (layer, query, keys, values, call, pass) their attention.
    """

    is_croppable = True
    cache_name = "EquipCache"
    arrival: Any
    detour: Callable[..., torch.Tensor] | None

    def __init__(
        self,
        settings: EquipSettings,
        geometry: RotaryGeometry,
        rotation: KeyRotation,
        passes: Passes,
        storage: Flat,
        assembly: Assembly,
        layer_idx: int,
        heads: int | None = None,
    ) -> None:
        super().__init__()
        self.settings, self.policy, self.geometry, self.passes = settings, settings.policy, geometry, passes
        self.assembly, self.shard, self.layer_idx, self.heads = assembly, assembly.shard, layer_idx, heads
        self.frozen, self._first = False, (rotation, storage)
        self.journal: list[Undo] | None = None
        self._clear()

    def _clear(self) -> None:
        self.rotation, self.storage = self._first
        self.storage.clear()
        self.table, self.slots, self.recent = SlotTable(), 0, 0
        self.waiting, self.scaling = self.policy.deferred > 0, 1.0
        self.module_call: ModuleCall | None = None
        self.detour, self.arrival = None, None

    @property
    def seen(self) -> int:  # type: ignore[override]
        return int(self.table.clock) if self.table.stale and self.table.clock is not None else self.table.seen

    @property
    def kept(self) -> int:
        """Slots that hold a token, in the mean over the heads of the fullest row."""
        return 0 if self.table.positions is None else round(float(self.table.kept().float().mean(1).max()))

    def kept_positions(self) -> torch.Tensor:
        """For each slot the index of its token in the text, padding included, (batch, kv_heads, slots); -1: empty."""
        table = self.table
        table.catch_up()
        if table.positions is None:
            return torch.empty(0, 0, 0, dtype=torch.long)
        slots = self.slots if table.rooms is None else int(table.rooms.max())
        index = (table.positions.long() if table.text is None else table.text)[..., :slots]
        return nn.functional.pad(index, (0, slots - index.shape[-1]), value=-1).expand(-1, self.storage.shape[1], -1)

    def get_seq_length(self) -> int:
        table, compiling = self.table, torch.compiler.is_compiling()
        return table.clock if compiling and table.clock is not None else self.seen  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if torch.compiler.is_compiling():
            return query_length, 0  # any other number would grow with each step, and a graph would take it for a constant
        if query_length == 1:
            return 1, self.seen  # slots need no mask of the text: which of them hold a token is known here
        return super().get_mask_sizes(query_length)

    def check_new_tokens(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.storage.check(key_states, value_states)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self.heads is not None:
            require_heads(key_states.shape[1], self.shard, self.heads, "EquipCache with these settings")
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def own(self, *new: torch.Tensor) -> None:
        """Make sure that tensors may be written in place, with what is `new`: no autograd graph or inference mode holds on to them."""
        inside = torch.is_inference_mode_enabled()
        needs_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in new)
        if needs_graph or (self.frozen and not inside):
            if needs_graph and self.storage.no_gradients:
                raise UnsupportedError(self.storage.no_gradients)
            for part in (self.storage, self.table):
                part.map(torch.clone)
            self.frozen = False
        self.frozen |= inside

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether `torch.compile` may take single tokens.

        A graph takes a number for a constant: it reads `SlotTable.clock` for `seen`, searches a victim always, and masks empty slots.
        """
        settings, rotation, policy = self.settings, self.rotation, self.policy
        late = settings.decode_budget is not None or settings.question_start is not None or self.journal is not None
        changing = self.geometry.changes_at is not None and rotation.moves
        unmoved = rotation.streams and self.table.sink_keys is None and settings.sinks and self.table.seen
        return policy.in_graphs and self.storage.in_graphs and not (late or changing or unmoved or (self.shard and policy.asks_all_heads))

    def prepare_graphs(self) -> None:
        """Make sure after an uncompiled pass, or a change from outside, that the next pass may be compiled."""
        table, storage, self.frozen = self.table, self.storage, self.frozen or torch.is_inference_mode_enabled()
        if table.positions is None or not compat.compiles(self.device) or not self.is_compileable:
            table.clock = None
            return
        device = table.positions.device
        if table.rooms is None:
            storage.reserve(self.slots, self.slots)
            table.reserve(storage.capacity)
        with torch.inference_mode(False):  # a graph may run outside of that mode, in which alone the mode's tensors can be changed
            if table.clock is None or table.clock.device != device:
                table.clock = torch.zeros((), dtype=torch.long, device=device)
            for part in (table, storage):
                part.map(lambda tensor: tensor.clone() if tensor.is_inference() else tensor)
        table.clock.fill_(table.seen)
        if self.rotation.unrotated:
            self.rotation.on_read(torch.zeros(1, 1, 1, dtype=torch.int32, device=device), storage.capacity)
        for tensor in (*storage.tensors().values(), *table.tensors().values()):
            compat.mark_static(tensor)  # without it CUDA graphs would leave out what changes them

    # How keys are rotated.

    def places(self, positions: torch.Tensor | None) -> torch.Tensor:
        """The model's position of the newest token, (batch or 1, 1); counted where it does not tell."""
        if positions is not None:  # the axes of an image agree for text
            return positions[0, ..., -1:] if positions.ndim == 3 else positions[..., -1:]
        count = self.table.count
        return torch.full((1, 1), count - 1, device=self.device) if isinstance(count, int) else count.reshape(-1, 1).long() - 1

    def keep_sinks(self) -> None:
        """Keep the keys in the first slots of a stream as the model rotated them, unless that was done."""
        if self.rotation.streams and self.table.sink_keys is None and self.storage.keys is not None:
            self.table.sink_keys = self.storage.keys[:, :, : self.settings.sinks].clone()

    def follow(self, newest: torch.Tensor | None) -> None:
        """Have the sinks of a stream follow its newest token, at the model's position (batch or 1, 1); None: counted."""
        rotation, table, sinks = self.rotation, self.table, self.table.sink_keys
        if sinks is None:
            return
        if torch.compiler.is_compiling():
            turn = rotation.follow(self.places(newest), table.count.clamp(max=self.slots))  # type: ignore[union-attr]
        elif table.seen == table.filled:
            return  # nothing was lost behind them
        else:
            kept: Any = table.filled
            turn = self.passes.memo(("follow", rotation.otherwise, kept), newest, lambda: rotation.follow(self.places(newest), kept))
        self.storage.keys[:, :, : sinks.shape[2]] = turn(sinks)

    def unshift(self) -> None:
        """Of a stream, rotate keys on the way from now on: what is evicted next need not be the oldest token, or rows differ."""
        if self.rotation.streams:
            self.unrotate(0)

    def unrotate(self, ahead: int | torch.Tensor) -> None:
        """Rotate keys on the way from now on; the model's positions are so far `ahead` of a row's own count, or (batch or 1, 1, 1)."""
        table, storage, rotation, sinks = self.table, self.storage, self.rotation.otherwise, self.table.sink_keys
        if rotation is None:
            return
        if self.journal is not None:
            self.journal.append(Undo(self))
        if sinks is not None:
            self.own()
            storage.keys[:, :, : sinks.shape[2]] = sinks
            table.sink_keys = None
        if table.positions is not None:
            (keys, values), positions = storage.read(table.used), table.positions[..., : table.used]
            keys = rotation.undo(positions.clamp(min=0) + ahead)(keys)
            storage.prepare(keys, positions >= 0, None)
            with storage.rewriting():
                storage.rebuild(None, storage.encode(keys, values), 0, self.slots)
                storage.reserve(table.positions.shape[-1], self.slots)
            table.find_distances(True)
            table.reserve(storage.capacity)
        self.rotation = rotation

    # What is taken back.

    def activate_past_recording(self) -> None:
        """From now on tokens can be taken back with `crop`, up to the last crop. Several tokens at once count as so many steps."""
        if self.settings.head_budgets == "global" and not self.seen:
            raise UnsupportedError(
                "activate_past_recording: with head_budgets='global' a prompt is pruned when its last layer has been read, and drafts in "
                "the same call would need the pruned prompt before. Feed the prompt first, pass head_budgets='layer' or None, or decode "
                "without an assistant."
            )
        self.record_past = True

    @property
    def record_past(self) -> bool:
        return self.journal is not None

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.table.catch_up()
        self.journal = (self.journal or []) if value else None
        self.prepare_graphs()

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, as in transformers: slots and scores are as if they had never come. 0 makes final what came."""
        self.table.catch_up()
        table, journal, tokens = self.table, self.journal or [], -int(tokens_to_remove)
        if not 0 <= tokens <= self.seen:
            raise ConfigError.of("tokens_to_remove", f"a number from -{self.seen} to 0", -tokens, "crop(-n) removes the last n tokens.")
        recorded = [0, *accumulate(undo.tokens for undo in reversed(journal))]  # steps, and blocks with all of their tokens
        whole = self.policy.order_only and table.filled == table.seen and table.counts is None  # every token is there, in order
        if tokens not in recorded and not whole:
            why = "tokens were pruned or scored, so EquipCache can take back only what it has recorded"
            if self.journal is not None:
                why = f"{tokens} tokens are to be taken back, and EquipCache remembers {recorded[-1]}: those since the last crop"
            raise UnsupportedError(
                f"crop: {why}. Call activate_past_recording() before the tokens that may be taken back, or build the cache anew from the "
                "shorter text."
            )
        sinks = table.sink_keys if tokens else None
        with self.storage.rewriting() if tokens and (tokens in recorded or sinks is not None) else nullcontext():
            if sinks is not None:
                self.storage.keys[:, :, : sinks.shape[2]] = sinks
            if tokens in recorded:
                for undo in reversed(journal[len(journal) - recorded.index(tokens) :]):
                    undo.restore(self)
            else:
                table.filled = table.seen - tokens
                table.positions[..., table.filled :] = -1
                table.scores[..., table.filled :] = -torch.inf
                table.find_distances(self.rotation.unrotated)
                table.advance(-tokens)
                table.sink_keys = table.sink_keys if table.seen >= self.settings.sinks else None
            if sinks is not None:
                self.follow(None)
        self.make_final()

    def make_final(self) -> None:
        """End a change that came from outside of a forward pass: what came before can't be taken back any more."""
        self.journal = None if self.journal is None else []
        self.storage.trim(self.table.kept())
        self.prepare_graphs()

    # What transformers may do with all rows.

    def owned_tensors(self) -> dict[str, torch.Tensor]:
        return self.storage.tensors() | self.table.tensors()

    def reset(self) -> None:
        self._clear()
        self.assembly.clear()
        self.is_initialized = False
        self.journal = None if self.journal is None else []

    def _map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        table = self.table
        table.catch_up()
        self.storage.map_rows(function)
        table.map(function, rows=True)
        if table.rooms is not None:
            table.reserve(self.storage.capacity)  # the row of the longest head may be gone
        if table.positions is not None and table.filled is None:
            table.find_filled()
        self.make_final()

    def _move(self, device: torch.device | str) -> None:
        for part in (self.storage, self.table):
            part.map(lambda tensor: tensor.to(device, non_blocking=True))

    def export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        self.table.catch_up()
        tensors, counters = self.table.export()
        stored = {f"slots.{name}": tensor for name, tensor in self.storage.export().items()}
        limits = {"slots": self.slots, "recent": self.recent, "waiting": self.waiting, "unrotated": self.rotation.unrotated}
        return tensors | stored, counters | limits

    def import_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        self.reset()
        stored, counters = part_of(tensors, "slots"), dict(values)
        limits = {name: counters.pop(name, None) for name in ("slots", "recent", "waiting", "unrotated")}
        if [*map(type, limits.values())] != [int, int, bool, bool]:
            raise ArtifactError(f"The stored state of an EquipLayer doesn't fit: {limits}. Save the cache again.")
        self.slots, self.recent, self.waiting, unrotated = limits.values()
        self.table = SlotTable.imported({name: tensors[name] for name in tensors if not name.startswith("slots.")}, counters)
        if self.rotation.otherwise is not None and unrotated:
            self.rotation = self.rotation.otherwise
        if stored:
            self.storage = ragged_like(self.storage) if "rooms" in stored else self.storage
            if wrong := sorted({*self.storage.names, *self.storage.beside} ^ set(stored)):
                raise ArtifactError(f"A layer's slots are stored without these tensors, or with others: {wrong}. Save the cache again.")
            self.storage.restore(stored, self.table.kept(), self.slots)
            self.lazy_initialization(*self.storage.read(1))
        self.prepare_graphs()
