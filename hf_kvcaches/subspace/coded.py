"""One layer of a `SubspaceCache` with a codec: exact ends, codes between them, and the attention over both."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.codec.coder import LayerCoder
from hf_kvcaches.core.call import AnsweringLayer, Call
from hf_kvcaches.core.layers import TensorLayer, append
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.step import Pass, Passes
from hf_kvcaches.core.view import previous_attention
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.attention_parts import KeyRotation, exact_attention, merge_attention
from hf_kvcaches.kernels.blocks import Visibility, block_attention
from hf_kvcaches.kernels.codes import CodeMap, code_attention, decode_codes, packed_rows
from hf_kvcaches.kernels.launch import Backend
from hf_kvcaches.subspace.placement import Intake, Placement

# Buffers of codes have room for one token more for each so many.
_RESERVE = 64
# How many of the last tokens can be taken back: each recorded one keeps the window before it alive.
_RECORDED = 256


@dataclass(frozen=True)
class CodedSettings:
    """What all layers have in common.

    Args:
        sinks: First tokens of each row that stay exact.
        recent: Newest tokens that stay exact.
        backend: Of the kernels.
    """

    sinks: int
    recent: int
    backend: Backend


class Bases(NamedTuple):
    """What codes stand for: see `code_attention`."""

    keys: CodeMap
    values: CodeMap
    key_basis_of: torch.Tensor | None = None
    value_basis_of: torch.Tensor | None = None


class CodedLayer(TensorLayer, AnsweringLayer):
    """Keeps a few tokens exactly, and of all others only their codes.

    Attributes:
        sink_keys: The first tokens of each row, as the model rotated them, (batch, kv_heads, slots, head_dim); and `sink_values`.
        recent_keys: The last ones, oldest first, of the same shape; and `recent_values`.
        codes: Of the tokens between them, (batch, bytes, capacity), uint8.
        columns: See `Placement`; and `positions`.
    """

    is_croppable = True
    cache_name: ClassVar[str] = "SubspaceCache"
    row_tensors: ClassVar[tuple[str, ...]] = (
        *("sink_keys", "sink_values", "recent_keys", "recent_values"),
        *("codes", "columns", "positions"),
    )
    counters: ClassVar[tuple[str, ...]] = ("seen", "coded")
    sink_keys: torch.Tensor | None = None
    sink_values: torch.Tensor | None = None
    recent_keys: torch.Tensor | None = None
    recent_values: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def __init__(
        self,
        codec: KVCodec | None,
        settings: CodedSettings,
        layer_idx: int,
        geometry: RotaryGeometry | None,
        passes: Passes[Pass],
    ) -> None:
        super().__init__()
        self.codec, self.settings, self.layer_idx, self.geometry, self.passes = codec, settings, layer_idx, geometry, passes
        self.coded = 0
        self.record_past = False
        # What the layer held before each pass whose tokens may be taken back: all tensors but the codes, which only grow.
        self.past: deque[dict[str, Any]] = deque(maxlen=_RECORDED)

    @property
    def kept(self) -> int:
        return self.seen

    @property
    def coder(self) -> LayerCoder:
        """What encodes and decodes, shared by all caches with this codec."""
        assert self.codec is not None
        return self.codec.coder(self.layer_idx, self.dtype, self.device)

    @property
    def bases(self) -> Bases:
        """What the codes stand for."""
        return Bases(self.coder.keys.map, self.coder.values.map)

    @property
    def placement(self) -> Placement:
        """Which tokens lie where."""
        first, newest = (0 if held is None else held.shape[2] for held in (self.sink_keys, self.recent_keys))
        limits = self.settings.sinks, self.settings.recent, self.warmup
        return Placement(*limits, self.seen, first, self.coded, newest, self.columns, self.positions)

    @property
    def warmup(self) -> int:
        """How many tokens behind the sinks a row has before any becomes codes."""
        return 0

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
        """Takes the new tokens and gives their queries' attention, (batch, tokens, heads, head_dim).

        Args:
            query: (batch, heads, tokens, head_dim), as the model rotated them.
            keys: (batch, kv_heads, tokens, head_dim), as the model rotated them; and `values`.
            call: What else the model said.
        """
        call.check("SubspaceCache")
        if call.bias is not None:
            raise UnsupportedError("SubspaceCache does not support attention with a position bias. Use another cache with this model.")
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise UnsupportedError("SubspaceCache: codes are integers, which have no gradients. Call the model under torch.no_grad().")
        self._leave_inference_mode()
        tokens = keys.shape[2]
        real_before = self.seen if self.columns is None else (self.columns >= 0).sum(1, keepdim=True)
        running = self.passes.enter(call, self.seen, tokens, keys.device, real_before)
        block, outputs = self.passes.block_length(tokens, begun=bool(self.seen), recording=self.record_past), []
        if block:
            span = slice(0, block)
            outputs.append(self._attend_block(query[:, :, span], keys[:, :, span], values[:, :, span], call, running.part(0, block)))
        for index in range(block, tokens):
            span = slice(index, index + 1)
            outputs.append(self._step(query[:, :, span], keys[:, :, span], values[:, :, span], call, running.part(index, index + 1)))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _leave_inference_mode(self) -> None:
        """Copies what was made under `torch.inference_mode`, where that is over: it can neither be written to nor be part of a graph."""
        if not torch.is_inference_mode_enabled():
            for name, tensor in self.owned_tensors().items():
                if tensor.is_inference():
                    setattr(self, name, tensor.clone())

    def adopt(
        self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, padding: torch.Tensor | None, queries: Any = None
    ) -> None:
        self._take(keys, values, self.passes.of_prompt(positions, padding, keys.shape[2], keys.device))

    def _take(self, keys: torch.Tensor, values: torch.Tensor, running: Pass) -> None:
        """Puts new tokens where they belong, and codes those that are no longer exact."""
        if self.record_past:
            self.past.append({name: getattr(self, name) for name in (*self.row_tensors, *self.counters) if name != "codes"})
        self._put(self._intake(keys, running), keys, values)

    def _put(self, intake: Intake, keys: torch.Tensor, values: torch.Tensor) -> None:
        after, leaving = intake.after, intake.leaving
        self.sink_keys, held_keys = intake.exact(self.sink_keys, self.recent_keys, keys.detach())
        self.sink_values, held_values = intake.exact(self.sink_values, self.recent_values, values.detach())
        if leaving:
            new = self._encode(held_keys, held_values, intake)
            held = None if self.codes is None else self.codes[..., None]
            self.codes = append(held, new[..., None], self.coded, _RESERVE)[..., 0]
            if intake.slots is not None:
                self.codes.scatter_(2, intake.slots[:, None].expand_as(new), new)
        # Copies, so that the rest of a prompt is not kept alive. Behind a step that rest is one token.
        copied = leaving > 1 or not intake.before.newest
        recent = (held[:, :, leaving:] for held in (held_keys, held_values))
        self.recent_keys, self.recent_values = (each.clone() if copied else each for each in recent)
        self.seen, self.coded, self.columns, self.positions = after.seen, after.coded, after.columns, after.positions

    def _encode(self, keys: torch.Tensor, values: torch.Tensor, intake: Intake) -> torch.Tensor:
        """The codes of the tokens that are no longer exact, (batch, bytes, leaving).

        Args:
            keys: As the model rotated them, (batch, kv_heads, tokens, d), those that stay exact behind them.
        """
        leaving = intake.leaving
        return self.coder.encode(self._unrotated(keys[:, :, :leaving], intake.positions(leaving, keys.device)), values[:, :, :leaving])

    def _intake(self, keys: torch.Tensor, running: Pass) -> Intake:
        """Where the tokens of a pass go; the same in all layers."""
        placement = self.placement

        def find() -> Intake:
            positions = None if running.start == placement.seen else running.positions()
            return placement.place(running.tokens, running.valid, positions, keys.shape[0], keys.device)

        # The second number tells layers apart whose tokens differ: of a pass that failed on the way.
        intake: Intake = running.shared(("intake", placement.seen, placement.coded), find)
        return intake

    def _unrotated(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys as the codec sees them."""
        if self.geometry is None:
            return keys
        return self.geometry.unrotate(keys if keys.dtype == torch.float64 else keys.float(), positions)

    def _step(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: Pass) -> torch.Tensor:
        self._take(keys, values, running)
        placement = self.placement
        shown_exact, shown_codes = self._shown(placement, running, keys)
        parts = []
        if placement.first + placement.newest:
            exact_keys, exact_values = self._exact()
            parts.append(exact_attention(query, exact_keys, exact_values, call.scaling, shown_exact, call.softcap, check=False))
        if self.coded:
            assert self.codes is not None
            bases = self.bases
            rows = packed_rows(bases.keys.counts)
            part = code_attention(
                query,
                self.codes[:, :rows, : self.coded],
                self.codes[:, rows:, : self.coded],
                bases.keys,
                bases.values,
                call.scaling,
                valid=shown_codes,
                rotation=self._rotation(placement, keys.device),
                key_basis_of=bases.key_basis_of,
                value_basis_of=bases.value_basis_of,
                softcap=call.softcap,
                backend=self.settings.backend,
                check=False,
            )
            parts.append(part)
        output, _ = merge_attention(parts)
        return output

    def _exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the exact tokens, sinks first."""
        assert self.sink_keys is not None
        assert self.sink_values is not None
        assert self.recent_keys is not None
        assert self.recent_values is not None
        return torch.cat([self.sink_keys, self.recent_keys], 2), torch.cat([self.sink_values, self.recent_values], 2)

    def _rotation(self, placement: Placement, device: torch.device) -> KeyRotation | None:
        geometry = self.geometry
        if geometry is None:
            return None
        positions, start = None, placement.first
        if placement.columns is not None or placement.positions is not None:
            positions, start = placement.code_positions(0, placement.coded, device), 0
        return KeyRotation(geometry.inv_freq, geometry.layout, positions, start, geometry.attention_scaling)

    def _shown(self, placement: Placement, running: Pass, keys: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which exact tokens and which codes the new queries may see; the same in all layers."""
        allowed = running.allowed
        if allowed is not None and allowed.shape[1] != 1:
            raise UnsupportedError("attention_mask: SubspaceCache can't follow a mask that differs by head. Give one for all heads.")
        if allowed is not None:
            allowed = allowed[..., : placement.seen]
        key = ("shown", placement.seen, placement.coded)
        shown: tuple[torch.Tensor | None, torch.Tensor | None] = running.shared(
            key, lambda: placement.shown(allowed, keys.shape[0], keys.device)
        )
        return shown

    def _attend_block(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: Pass) -> torch.Tensor:
        """Attention of several new tokens, which are exact to each other, and takes them."""
        if not self.seen and running.whole:
            output, _ = previous_attention(call.module, query, keys, values, call.mask, **call.options)
        else:
            output = self._attend_mixed(query, keys, values, call, running)
        self._take(keys, values, running)
        return output

    def _attend_mixed(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: Pass) -> torch.Tensor:
        """Attention of several new tokens to themselves and to what is held, which is decoded for them."""
        placement, given, slots = self.placement, running.allowed, None
        all_keys, all_values = [keys], [values]
        if self.seen:
            shown_exact, shown_codes = self._shown(placement, running, keys)
            decoded_keys, decoded_values = self.decoded()
            exact_keys, exact_values = self._exact()
            all_keys, all_values = [exact_keys, decoded_keys, keys], [exact_values, decoded_values, values]
            if shown_exact is not None and shown_codes is not None:
                slots = torch.cat([shown_exact, shown_codes], 2)
            if given is not None and slots is not None:
                new = given[..., self.seen :].expand(slots.shape[0], -1, -1, -1)
                given, slots = torch.cat([slots[:, None], new], -1), None
        kept = sum(each.shape[2] for each in all_keys) - keys.shape[2]
        visible = Visibility(slots, kept, running.valid, given)
        output, _ = block_attention(query, torch.cat(all_keys, 2), torch.cat(all_values, 2), call.scaling, visible, softcap=call.softcap)
        assert output is not None
        return output

    def decoded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, rotated, and values of all tokens with codes, (batch, kv_heads, tokens, head_dim)."""
        if self.codes is None or not self.coded:
            assert self.recent_keys is not None
            assert self.recent_values is not None
            return self.recent_keys[:, :, :0], self.recent_values[:, :, :0]
        codes, bases = self.codes[:, :, : self.coded], self.bases
        rows = packed_rows(bases.keys.counts)
        keys = decode_codes(codes[:, :rows], bases.keys, bases.key_basis_of)
        values = decode_codes(codes[:, rows:], bases.values, bases.value_basis_of)
        if self.geometry is not None:
            keys = self.geometry.rotate(keys, self.placement.code_positions(0, self.coded, keys.device))
        return keys, values

    def activate_past_recording(self) -> None:
        """From now on the last 256 tokens can be taken back with `crop`, up to the last crop; several at once count as so many steps."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last tokens back, as if they had never come.

        Args:
            tokens_to_remove: Minus the number of tokens, as in transformers. 0 only makes final what came.
        """
        tokens = -int(tokens_to_remove)
        if not 0 <= tokens <= self.seen:
            raise ConfigError.of("tokens_to_remove", f"a number from -{self.seen} to 0", -tokens, "crop(-n) removes the last n tokens.")
        moment = next((each for each in self.past if each["seen"] == self.seen - tokens), None)
        if tokens and moment is not None:
            for name, held in moment.items():
                setattr(self, name, held)
        elif tokens:
            self._cut(self.seen - tokens)
        self.past.clear()

    def _cut(self, left: int) -> None:
        """Forgets tokens that were not recorded, where all that a shorter row is made of is still there."""
        placement = self.placement
        if placement.columns is not None or (placement.coded and self.settings.recent):
            raise UnsupportedError(
                f"crop: {self.seen - left} tokens are to be taken back, and what came before them is no longer as it was then. Call "
                "activate_past_recording() before the tokens that may be taken back, or build the cache anew from the shorter text."
            )
        first = min(left, placement.first)
        self.coded = min(placement.coded, left - first)
        newest = left - first - self.coded
        for name, count in (("sink_keys", first), ("sink_values", first), ("recent_keys", newest), ("recent_values", newest)):
            setattr(self, name, getattr(self, name)[:, :, :count])
        self.seen = left
        self.positions = None if self.positions is None else self.positions[:, :left]

    def reset(self) -> None:
        super().reset()
        self.record_past = False
        self.past.clear()

    def export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, values = super().export_state()
        if "codes" in tensors:
            tensors["codes"] = tensors["codes"][:, :, : self.coded]
        return tensors, values

    def import_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        super().import_state(tensors, values)
        if self.sink_keys is not None:
            self.lazy_initialization(self.sink_keys, self.sink_keys)

    def _map_rows(self, function: Any) -> None:
        super()._map_rows(function)
        # Rows of the past are those of the present: what was recorded for others says nothing about them.
        self.past.clear()
