"""One layer of an `EquipCache`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch

from hf_kvcaches.core.call import AnsweringLayer, Call
from hf_kvcaches.core.holder import LastQueries
from hf_kvcaches.core.parallel import HeadShard, require_heads
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.step import Passes
from hf_kvcaches.equip import blocks, drafts, graphs, steps
from hf_kvcaches.equip.budgets import Limit, slots_for
from hf_kvcaches.equip.heads import reserve_for_whole_heads
from hf_kvcaches.equip.policies import Policy
from hf_kvcaches.equip.rollback import Recording
from hf_kvcaches.equip.rotation import RotatingPass, SlotRotation
from hf_kvcaches.equip.scoring import part_of
from hf_kvcaches.equip.settings import EquipSettings
from hf_kvcaches.equip.state import SlotState
from hf_kvcaches.equip.store import FlatStore
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError


class Detour(Protocol):
    """What new tokens do in place of being appended, for the passes of one operation."""

    def attend(
        self, layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: RotatingPass
    ) -> torch.Tensor:
        """The attention of the new tokens, (batch, tokens, heads, head_dim); arguments as in `EquipLayer.attend`."""


@contextmanager
def detours(layers: Sequence[EquipLayer], passes: Sequence[Detour]) -> Iterator[None]:
    """Has each layer's new tokens take a detour, without gradients."""
    for layer, detour in zip(layers, passes, strict=True):
        layer.detour = detour
    try:
        with torch.no_grad():
            yield
    finally:
        for layer in layers:
            layer.detour = None


class EquipLayer(AnsweringLayer):
    """Keeps at most a budget of tokens; a new one overwrites the eviction victim.

    Attributes:
        geometry: How the model rotates the layer's keys.
        state: Which token each slot holds.
        store: Their keys and values.
        rotation: How keys are rotated.
        recording: What can be taken back, while that is asked for.
        detour: What the passes of `EquipCache.edit` and `EquipCache.compress` do; else None.
        inputs: What the model's attention is called with in the running pass, for policies that read it.
        shard: Which heads the layer has, under tensor parallelism; None for all.
        heads: KV heads of the model's layer in all processes together; None where nothing looks at several heads.
    """

    is_croppable = True
    cache_name = "EquipCache"

    def __init__(
        self,
        settings: EquipSettings,
        geometry: RotaryGeometry,
        rotation: SlotRotation,
        passes: Passes[RotatingPass],
        store: FlatStore,
        shard: HeadShard | None = None,
        heads: int | None = None,
    ) -> None:
        super().__init__()
        self.settings, self.geometry, self.rotation, self.passes, self.store = settings, geometry, rotation, passes, store
        self.shard, self.heads = shard, heads
        self.state = self._empty_state()
        self.recording: Recording | None = None
        self.detour: Detour | None = None
        self.inputs: Mapping[str, Any] | None = None

    def _empty_state(self) -> SlotState:
        return SlotState(deferring=self.policy.deferred > 0)

    @property
    def policy(self) -> Policy:
        """Which tokens stay."""
        return self.settings.policy

    @property
    def seen(self) -> int:  # type: ignore[override]
        """Tokens fed in."""
        return int(self.state.count())

    @property
    def kept(self) -> int:
        return 0 if self.state.positions is None else int(self.state.kept_rows().max())

    @property
    def positions(self) -> torch.Tensor:
        """The positions of the tokens in the slots in use, (batch, 1 or kv_heads, slots in use)."""
        assert self.state.positions is not None
        return self.state.positions[..., : self.state.used()]

    @property
    def sinks_end(self) -> int | torch.Tensor:
        """The position before which tokens are sinks."""
        return self.settings.sinks + self.state.row_start()

    @property
    def limit(self) -> Limit:
        """How many tokens stay of all that came."""
        return Limit(self.state.slots, self.state.recent)

    def text_positions(self) -> torch.Tensor:
        """For each slot in use the index of its token in the text, (batch, kv_heads, slots in use)."""
        return self.kept_positions()[..., : self.state.used()]

    def kept_positions(self) -> torch.Tensor:
        """For each slot the index of its token in the text, padding included, (batch, kv_heads, slots); -1: empty."""
        self.state.catch_up()
        return self.state.text_positions(self.store.shape[1])

    def get_seq_length(self) -> int:
        return self.state.count()  # type: ignore[return-value]  # a tensor in a graph

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if torch.compiler.is_compiling():
            # Any number but that of the new tokens would grow with each step, and a graph would take it for a constant.
            return query_length, 0
        if query_length == 1 and self.is_compileable:
            return 1, self.seen  # `generate` makes this mask ahead, for a graph to come
        return super().get_mask_sizes(query_length)

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether `torch.compile` may take single tokens: see `graphs.py`."""
        settings, policy = self.settings, self.policy
        if settings.decode_budget is not None or settings.question_start is not None or self.recording is not None:
            return False
        if self.geometry.changes_at is not None and self.rotation.compact:
            return False
        if self.shard is not None and policy.asks_all_heads:
            return False
        return policy.in_graphs and self.store.in_graphs and not self.eviction_rotates

    @property
    def eviction_rotates(self) -> bool:
        """Whether evicting a token rotates all kept keys behind it."""
        return self.rotation.kept_rotated and not self.evicts_in_order

    @property
    def evicts_in_order(self) -> bool:
        """Whether the first slots hold all sinks, and the oldest token behind them is always evicted next."""
        return self.policy.order_only and not self.state.sinks_missing

    def look_for_sinks(self, positions: torch.Tensor) -> None:
        """Notes whether some of the sinks are missing.

        Args:
            positions: Of all tokens that are kept, (batch, 1 or kv_heads, tokens); -1: none.
        """
        sinks = ((positions >= 0) & (positions < self.sinks_end)).sum(-1)
        expected = torch.as_tensor(self.state.row_tokens(), device=sinks.device).clamp(max=self.settings.sinks)
        self.state.sinks_missing = bool((sinks < expected.view(-1, 1)).any())

    def check_new_tokens(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Refuses keys and values that can't follow those of the layer, (batch, kv_heads, tokens, head_dim)."""
        self.store.check(key_states, value_states)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self.heads is not None:
            require_heads(key_states.shape[1], self.shard, self.heads, "EquipCache with these settings")
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
        """Takes the new tokens and gives their queries' attention, (batch, tokens, heads, head_dim).

        Args:
            query: (batch, heads, tokens, head_dim), as the model rotated them.
            keys: (batch, kv_heads, tokens, head_dim), as the model rotated them.
        """
        call.check("EquipCache", sinks=True)
        if torch.compiler.is_compiling():
            return graphs.attend(self, query, keys, values, call)
        self.state.catch_up()
        tokens = keys.shape[-2]
        running = self.enter(call, tokens, keys.device)
        self._choose_angles(running)
        if self.detour is not None:
            self.inputs = None
            return self.detour.attend(self, query, keys, values, call, running)
        if self.state.deferring and tokens == 1 and self.state.seen:
            raise UnsupportedError(
                f"policy: {self.policy.name!r} prunes in cache.compress(model), which has to be called after the context and before the "
                "first token that follows. A context may come in several calls of more than one token each."
            )
        block = self.passes.block_length(tokens, begun=bool(self.state.seen), recording=self.recording is not None)
        self.own(torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad))
        with self.store.space_for(keys.shape[0], running, block):
            output = self.take(query, keys, values, call, running, block)
        if block or self.state.clock is None:
            graphs.prepare(self)
        return output

    def enter(self, call: Call, tokens: int, device: torch.device) -> RotatingPass:
        """The pass that new tokens belong to."""
        state = self.state
        real_before = state.seen if state.first is None else (state.seen - state.first)[:, None]
        return self.passes.enter(call, state.seen, tokens, device, real_before)

    def _choose_angles(self, running: RotatingPass) -> None:
        """Follows a model whose angles depend on how far a text reaches; refuses a text that passes from the ones to the others."""
        geometry = self.geometry
        if geometry.changes_at is not None and self.rotation.compact:
            now = geometry.at(running.positions(), self.rotation.geometry if self.state.seen else None)
            if now is not self.rotation.geometry:
                self.rotation = self.store.rotation = SlotRotation(self.rotation.scheme, now)

    def take(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: RotatingPass, block: int
    ) -> torch.Tensor:
        """Takes new tokens: the first `block` of them together, the others one by one."""
        outputs = []
        for start, stop, limit in self._spans(running, block):
            part, span = running.part(start, stop), slice(start, stop)
            inputs, self.inputs = self.inputs, part_of(self.inputs, start, stop)
            if self.recording is not None:
                self.recording.note_block(self, stop - start)
            outputs.append(blocks.take_block(self, query[:, :, span], keys[:, :, span], values[:, :, span], call, part, limit))
            self.inputs = inputs
        self.inputs = None
        tokens = keys.shape[-2]
        rest, span = running.part(block, tokens) if block < tokens else None, slice(block, tokens)
        if rest is not None and drafts.fits(self, tokens - block, call, rest):
            outputs.append(drafts.take_drafts(self, query[:, :, span], keys[:, :, span], values[:, :, span], call, rest))
            block = tokens
        for index in range(block, tokens):
            part, span = running.part(index, index + 1), slice(index, index + 1)
            if self.policy.queries:
                self.state.scaling = call.scaling
                self.state.note_queries(LastQueries(query[:, :, span], call.scaling), part.valid, self.policy.queries)
            outputs.append(steps.step(self, query[:, :, span], keys[:, :, span], values[:, :, span], call, part))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _spans(self, running: RotatingPass, block: int) -> list[tuple[int, int, Limit]]:
        """The blocks of new tokens with what each is pruned to: a first prompt's question is one of its own."""
        if not block:
            return []
        if self.state.seen:
            return [(0, block, self.limit)]
        ends = sorted({0, self.settings.question_in(block), block})
        first = self.resolve(running, ends[1])
        return [(start, stop, self.limit if start else first) for start, stop in pairwise(ends)]

    def adopt(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        padding: torch.Tensor | None,
        queries: LastQueries | None = None,
    ) -> None:
        running = self.passes.of_prompt(positions, padding, keys.shape[2], keys.device)
        self._choose_angles(running)
        observed = blocks.observed_by(self, queries, keys, running)
        with self.store.space_for(keys.shape[0], running, running.tokens):
            blocks.prune_block(self, keys, values, running, self.resolve(running, running.tokens), observed, queries)
        graphs.prepare(self)

    def resolve(self, running: RotatingPass, tokens: int) -> Limit:
        """Decides on the number of slots when the first tokens are there; returns what these are pruned to."""
        prompt = tokens if running.valid is None else int(running.valid[:, :tokens].sum(-1).max())
        if self.state.deferring:
            self.state.recent = self.settings.recent or 1
            return self.limit
        limit = self.settings.limit_of(prompt)
        self.take_limits(limit, prompt)
        return limit

    def take_limits(self, limit: Limit, prompt: int) -> None:
        """Sets how many slots there are from now on.

        Args:
            limit: What the prompt is pruned to.
            prompt: Its tokens, in the longest row.
        """
        decode = self.settings.decode_budget
        slots = limit.slots if decode is None else slots_for(decode, prompt)
        if slots < limit.slots:
            raise ConfigError.of("decode_budget", f"at least the budget, {limit.slots} tokens", slots)
        self.state.slots, self.state.deferring = slots, False
        self.state.recent = self.settings.recent_of(slots)

    def window(self, tokens: int) -> int | None:
        """How many of a block's last queries the policy observes."""
        window = self.policy.observes
        return None if window is None or (self.state.used() and tokens < window) else window

    def reserve_for_step(self) -> None:
        """Makes room for one more token a row; in a compiled graph for all."""
        state = self.state
        used = state.slots if torch.compiler.is_compiling() else (state.seen if state.filled is None else state.filled) + 1
        if state.shares is None:
            self.store.reserve(min(state.slots, used), state.slots)
        else:
            reserve_for_whole_heads(self)
        state.reserve(self.store.capacity)

    def own(self, needs_graph: bool) -> None:
        """Makes sure that tensors may be written in place: not where an autograd graph or inference mode holds on to them."""
        outside = not torch.is_inference_mode_enabled()

        def owned(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if needs_graph or (outside and tensor.is_inference()) else tensor

        self.state.map(owned)
        self.store.own(owned, needs_graph)

    def activate_past_recording(self) -> None:
        """From now on tokens can be taken back with `crop`, up to the last crop. Several tokens at once count as so many steps."""
        self.record_past = True

    @property
    def record_past(self) -> bool:
        """Whether tokens can be taken back."""
        return self.recording is not None

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.state.catch_up()
        self.recording = (self.recording or Recording()) if value else None
        graphs.prepare(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last tokens back: slots and scores are as if they had never come.

        Args:
            tokens_to_remove: Minus the number of tokens, as in transformers. 0 only makes final what came.
        """
        tokens, state = -int(tokens_to_remove), self.state
        if not 0 <= tokens <= self.seen:
            raise ConfigError.of("tokens_to_remove", f"a number from -{self.seen} to 0", -tokens, "crop(-n) removes the last n tokens.")
        state.catch_up()
        whole = self.policy.order_only and state.filled == state.seen and state.first is None
        if self.recording is not None and (self.recording.covers(tokens) or not whole):
            self.recording.take_back(self, tokens)
        elif tokens and not whole:
            raise UnsupportedError(
                "crop: tokens were pruned or scored, so EquipCache can take back only what it has recorded. "
                "Call activate_past_recording() before the tokens that may be taken back, or build the cache anew from the shorter text."
            )
        elif tokens:
            blocks.forget_last(self, tokens)
        self.make_final()

    def make_final(self) -> None:
        """Ends a change that came from outside of a forward pass: what came before can't be taken back any more."""
        if self.recording is not None:
            self.recording.clear()
        self.store.trim(None if self.state.positions is None else self.state.kept_rows())
        graphs.prepare(self)

    def owned_tensors(self) -> dict[str, torch.Tensor]:
        return self.store.tensors() | self.state.tensors()

    def reset(self) -> None:
        self.state = self._empty_state()
        self.store.clear()
        self.is_initialized = False
        if self.recording is not None:
            self.recording.clear()

    def _map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.state.catch_up()
        self.store.map_rows(function)
        self.state.map(function, rows=True)
        if self.state.positions is not None:
            self.state.filled = self.state.common(self.state.kept_rows())
        self.make_final()

    def _move(self, device: torch.device | str) -> None:
        for part in (self.store, self.state):
            part.map(lambda tensor: tensor.to(device, non_blocking=True))

    def export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        self.state.catch_up()
        tensors, counters = self.state.export()
        return tensors | self.store.export(), counters

    def import_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        self.reset()
        names = [name for name in tensors if name in self.store.exported]
        self.state = SlotState.imported({name: tensor for name, tensor in tensors.items() if name not in names}, values)
        missing = set(self.store.exported) - set(names)
        if names and missing:
            raise ArtifactError(f"A layer's slots are stored without {sorted(missing)}. Save the cache again.")
        if names:
            kept = None if self.state.positions is None else self.state.kept_rows()
            self.store.take({name: tensors[name] for name in names}, kept, self.state.slots)
            self.lazy_initialization(*self.store.read(1))
            self.look_for_sinks(self.positions)
        graphs.prepare(self)
