"""One layer of a `SubspaceCache`: exact ends, coefficients between them, and the attention over both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from hf_kvcaches.core.attention import is_enabled, previous_attention
from hf_kvcaches.core.blocks import Visibility, block_attention, given_mask
from hf_kvcaches.core.calls import Call, NewTokens
from hf_kvcaches.core.passes import Pass, Passes
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels import coefficients as kernels
from hf_kvcaches.subspace.maps import LayerSource
from hf_kvcaches.subspace.store import Piece, Settings, SubspaceStore


class Held(NamedTuple):
    """Which columns are where, and which of them count.

    Args:
        sinks: Columns of the sinks, (batch or 1, sinks).
        recent: Columns that are exact besides, as they lie in their buffer if that is `whole`, else ascending, (columns,).
        whole: Whether these are all of the buffer.
        exact_real: True where a sink or recent column counts, (batch, columns), or None for all.
        middle_real: True where a column with coefficients counts, (batch, columns), or None for all.
    """

    sinks: torch.Tensor
    recent: torch.Tensor
    whole: bool
    exact_real: torch.Tensor | None
    middle_real: torch.Tensor | None


class SubspaceLayer(SubspaceStore):
    """Keeps a few tokens exactly, and of all others only their coefficients."""

    is_croppable = True
    no_tensors = "SubspaceCache has none to give. Use another cache with it."

    def __init__(
        self, settings: Settings, source: LayerSource, geometry: RotaryGeometry | None, passes: Passes[Pass], config: PreTrainedConfig
    ) -> None:
        super().__init__(settings, source, geometry)
        self.passes, self.config = passes, config

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Returns a view that takes the new tokens and attends to all.

        Args:
            key_states: (batch, kv_heads, tokens, head_dim), as the model rotated them.
            value_states: Like `key_states`.
            *args: Ignored.
            **kwargs: Ignored.
        """
        if not is_enabled(self.config):
            raise UnsupportedError(
                "SubspaceCache answers queries itself, and this model does not ask it. Build the cache with the model instead of its "
                "config, or call hf_kvcaches.enable(model) first."
            )
        self.check_new_tokens(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        view = NewTokens(self, key_states, value_states)
        return view, view

    def check_new_tokens(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows = self.rows
        if rows and (rows != key_states.shape[0] or self.dtype != key_states.dtype):
            raise ConfigError(
                f"The cache holds {rows} rows of {self.dtype}, and the model came with {key_states.shape[0]} rows of {key_states.dtype}. "
                "Use a new cache, or reset() this one; batch_repeat_interleave and batch_select_indices change its rows."
            )

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
        """Takes the new tokens and gives their queries' attention, (batch, tokens, heads, head_dim).

        Args:
            query: (batch, heads, tokens, head_dim), as the model rotated them.
            keys: (batch, kv_heads, tokens, head_dim), likewise.
            values: Like `keys`.
            call: What else the model said.
        """
        call.check("SubspaceCache")
        if call.bias is not None:
            raise UnsupportedError("SubspaceCache does not support attention with a position bias. Use another cache with this model.")
        tokens = keys.shape[2]
        running = self.passes.enter(call.mask, call.options.get("position_ids"), self.seen, tokens, keys.device)
        block, outputs = self.passes.block_length(tokens, begun=bool(self.seen), recording=self.recording), []
        if block:
            own, span = running.part(0, block), slice(0, block)
            outputs.append(self._attend_block(query[:, :, span], keys[:, :, span], values[:, :, span], call, own))
        for index in range(block, tokens):
            own, span = running.part(index, index + 1), slice(index, index + 1)
            outputs.append(self._step(query[:, :, span], keys[:, :, span], values[:, :, span], call, own))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _take(self, keys: torch.Tensor, values: torch.Tensor, running: Pass, final: bool) -> None:
        places = None if running.start == self.seen else running.positions()
        self.note(running.valid, places, keys.shape[0], keys.shape[2])
        self.store(keys, values, final)

    def _step(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: Pass) -> torch.Tensor:
        self._take(keys, values, running, final=False)
        held = self._held(running)
        real = self._counted(call, running, held)
        exact_keys, exact_values = self._exact(held, keys, values)
        split, parts = exact_keys.shape[2], []
        if split:
            exact_real = None if real is None else real[:, :, 0, :split]
            parts.append(kernels.exact_attention(query, exact_keys, exact_values, call.scaling, valid=exact_real, softcap=call.softcap))
        parts += self._attend_middle(query, call, None if real is None else real[:, :, 0, split:])
        output, _ = kernels.merge_attention(parts)
        return output

    def _attend_middle(self, query: torch.Tensor, call: Call, real: torch.Tensor | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Attention of one query a row over coefficients: parts to be merged, each of all heads."""
        batch, heads, _, dim = query.shape
        maps = self.maps
        kv_heads = sum(len(group.heads) for group in maps.groups)
        grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim)
        found: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for index, group in enumerate(maps.groups):
            own = grouped if len(maps.groups) == 1 else grouped[:, list(group.heads)]
            own = own.reshape(batch, -1, 1, dim)
            for place, piece in enumerate(self.pieces(index)):
                span = slice(piece.start, piece.start + piece.keys.shape[2])
                part = kernels.coefficient_attention(
                    own,
                    kernels.Coefficients(piece.keys, group.key_decode, piece.key_scale),
                    kernels.Coefficients(piece.values, group.value_decode, piece.value_scale),
                    call.scaling,
                    valid=None if real is None else real[..., span],
                    rotation=self._rotation(piece),
                    softcap=call.softcap,
                    backend=self.settings.backend,
                )
                if place == len(found):
                    found.append([])
                found[place].append(part)
        return [self._together(parts, batch, heads) for parts in found]

    def _together(self, parts: list[tuple[torch.Tensor, torch.Tensor]], batch: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs of all groups of heads as those of the layer."""
        if len(parts) == 1:
            return parts[0]
        output, mass = torch.cat([part[0] for part in parts], 2), torch.cat([part[1] for part in parts], 1)
        back = self.maps.back
        if back is not None:
            shared = heads // len(back)
            index = (back[:, None] * shared + torch.arange(shared, device=back.device)).flatten()
            output, mass = output.index_select(2, index), mass.index_select(1, index)
        return output, mass

    def _rotation(self, piece: Piece) -> kernels.Rotation | None:
        geometry = self.geometry
        if geometry is None:
            return None
        start, tokens = piece.start + self.settings.sinks, piece.keys.shape[2]
        places = None if self.places is None else self.places[:, start : start + tokens, 0]
        return kernels.Rotation(geometry.inv_freq, geometry.layout, places, start, geometry.attention_scaling)

    def _held(self, running: Pass) -> Held:
        """Where all columns are after the pass; the same for all layers."""
        key = ("held", self.settings.sinks, self.settings.recent, self.window, self.seen)
        held: Held = running.shared(key, self._find_held)
        return held

    def _find_held(self) -> Held:
        sinks, first = self.settings.sinks, max(0, self.seen - self.settings.recent)
        start = first if self.real is not None else min(max(first, sinks), self.seen)
        recent = torch.arange(start, self.seen, device=self.device)
        whole = 0 < self.window == len(recent)
        if whole:  # attention does not care for order
            recent = torch.empty_like(recent).index_copy_(0, recent % self.window, recent)
        if self.real is None:
            return Held(torch.arange(min(sinks, self.seen), device=self.device)[None], recent, whole, None, None)
        real = self.real[:, : self.seen, 0]
        ranks = real.cumsum(1)
        chosen = real[:, None] & (ranks[:, None] == torch.arange(1, sinks + 1, device=self.device)[:, None])
        inner = real & (ranks > sinks)
        exact = torch.cat([chosen.any(-1), inner[:, recent]], 1)
        return Held(chosen.int().argmax(-1), recent, whole, exact, inner[:, sinks : sinks + self.count(self.seen)])

    def _exact(self, held: Held, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the exact columns, sinks first; new ones are given for their shape."""
        found = []
        sides = ((self.sink_keys, self.recent_keys, keys), (self.sink_values, self.recent_values, values))
        for sinks, recent, new in sides:
            parts = [] if sinks is None else [sinks[:, :, : held.sinks.shape[1]]]
            if recent is not None and len(held.recent):
                parts.append(recent if held.whole else recent.index_select(2, held.recent % self.window))
            found.append(torch.cat(parts, 2) if len(parts) > 1 else parts[0] if parts else new[:, :, :0])
        return found[0], found[1]

    def _counted(self, call: Call, running: Pass, held: Held) -> torch.Tensor | None:
        """What each new query may see of what is held, (batch or 1, 1, queries or 1, exact, then with coefficients); None for all.

        Padding, and what a mask of the caller's own says.
        """
        real = None
        if held.exact_real is not None and held.middle_real is not None:
            real = torch.cat([held.exact_real, held.middle_real], 1)[:, None, None]
        allowed = given_mask(call.mask, running)
        if allowed is None:
            return real
        if allowed.shape[1] != 1:
            raise UnsupportedError("attention_mask: SubspaceCache can't follow a mask that differs by head. Give one for all heads.")
        rows = held.sinks.shape[0]
        middle = torch.arange(self.settings.sinks, self.settings.sinks + self.count(self.seen), device=self.device)
        columns = torch.cat([held.sinks, held.recent.expand(rows, -1), middle.expand(rows, -1)], 1)
        batch = max(rows, allowed.shape[0])
        index = columns[:, None, None].expand(batch, 1, allowed.shape[2], -1)
        allowed = allowed.expand(batch, -1, -1, -1).gather(-1, index)
        return allowed if real is None else real & allowed

    def _attend_block(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: Pass) -> torch.Tensor:
        """Attention of several new tokens, which are exact to each other, and takes them."""
        if not self.seen and running.whole:
            output, _ = previous_attention(call.module, query, keys, values, call.mask, **call.options)
        else:
            output = self._attend_mixed(query, keys, values, call, running)
        self._take(keys, values, running, final=True)
        return output

    def _attend_mixed(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: Pass) -> torch.Tensor:
        """Attention of several new tokens to themselves and to what is held, which is decoded for them."""
        held = self._find_held()
        exact_keys, exact_values = self._exact(held, keys, values)
        all_keys, all_values = [keys], [values]
        if self.seen:
            middle_keys, middle_values = self._decoded()
            all_keys, all_values = [exact_keys, middle_keys, keys], [exact_values, middle_values, values]
        kept = sum(each.shape[2] for each in all_keys) - keys.shape[2]
        real, allowed = self._counted(call, running, held), given_mask(call.mask, running)
        if allowed is not None:
            assert real is not None
            new = allowed[..., self.seen :].expand(real.shape[0], -1, -1, -1)
            visible = Visibility(None, kept, running.valid, torch.cat([real, new], -1))
        else:
            visible = Visibility(None if real is None else real[:, :, 0], kept, running.valid)
        output, _ = block_attention(query, torch.cat(all_keys, 2), torch.cat(all_values, 2), call.scaling, visible, softcap=call.softcap)
        assert output is not None
        return output

    def _decoded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all columns with coefficients, as far as these tell, (batch, kv_heads, columns, head_dim)."""
        count, start, maps = self.count(self.seen), self.settings.sinks, self.maps
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, group in enumerate(maps.groups):
            pieces = self.pieces(index)
            sides = (
                (group.key_decode, [(piece.keys, piece.key_scale) for piece in pieces]),
                (group.value_decode, [(piece.values, piece.value_scale) for piece in pieces]),
            )
            own = [
                torch.cat([_widened(data, scale, self.dtype) for data, scale in side] or [_none(self, decode)], 2)
                @ decode.to(self.dtype).mT
                for decode, side in sides
            ]
            found.append((own[0], own[1]))
        keys, values = (torch.cat(side, 1) for side in zip(*found, strict=True))
        if maps.back is not None:
            keys, values = keys.index_select(1, maps.back), values.index_select(1, maps.back)
        if self.geometry is not None and count:
            keys = self.geometry.rotate(keys, self._places_of(start, start + count))
        return keys, values


def _widened(data: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Coefficients as numbers of that type."""
    if scale is None:
        return data.to(dtype)
    return (data.unflatten(2, (-1, kernels.TILE)) * scale[..., None, None].float()).flatten(2, 3).to(dtype)


def _none(layer: SubspaceLayer, decode: torch.Tensor) -> torch.Tensor:
    return torch.empty(layer.rows, decode.shape[0], 0, decode.shape[2], dtype=layer.dtype, device=layer.device)
