"""Filling a consumer's cache from codes: the lowest layers are run, the others rebuilt as their parts come in."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from hf_kvcaches import compat
from hf_kvcaches.core.growing import capacity_for
from hf_kvcaches.core.layer_pass import StoppingPass
from hf_kvcaches.core.partial import PassEnded, with_layers
from hf_kvcaches.core.prefill import run_module
from hf_kvcaches.core.quantize import Quantized
from hf_kvcaches.kernels.rebuild import Codes, Decoder, RowSpan, rebuild, write_states
from hf_kvcaches.translate.codes import Part
from hf_kvcaches.translate.head import CodesHead
from hf_kvcaches.translate.maps import LayerDecoder
from hf_kvcaches.translate.states import PromptTokens, feed_attention, with_told_attention

if TYPE_CHECKING:
    from hf_kvcaches.translate.cache import TranslatedCache


class Places(NamedTuple):
    """Where the tokens of codes stand in a batch.

    Args:
        rows: Rows of the batch that are rebuilt, in the order of the codes.
        coded: For each of them, the number of its row in the codes. Texts of several lengths may begin with the same one.
        copies: For each other row, the one of `rows` that gets the same tokens in the same slots.
        padding: Slots at the start of each row of the batch that hold no token.
    """

    rows: tuple[int, ...]
    coded: tuple[int, ...]
    copies: dict[int, int]
    padding: tuple[int, ...]


def place(head: CodesHead, tokens: PromptTokens) -> tuple[Places, int] | None:
    """Finds each row of a batch among those that were coded, and how many slots can be filled; None where a row is not among them."""
    padding = (~tokens.real).sum(-1).tolist()
    found: list[tuple[int, int]] = []
    for ids in tokens.rows():
        text = ids.numpy()
        begun = [(coded.begins(text), number) for number, coded in enumerate(head.rows)]
        best = max(((min(count, len(text) - 1), -number) for count, number in begun if count is not None), default=None)
        if best is None:
            return None
        found.append((-best[1], best[0]))
    slots = min(pad + count for pad, (_, count) in zip(padding, found, strict=True))
    first: dict[tuple[int, int], int] = {}
    copies = {}
    for row, (pad, (number, _)) in enumerate(zip(padding, found, strict=True)):
        twin = first.setdefault((number, pad), row)
        if twin != row:
            copies[row] = twin
    ordered = sorted((number, row) for (number, _), row in first.items())
    return Places(tuple(row for _, row in ordered), tuple(number for number, _ in ordered), copies, tuple(padding)), slots


class Filling:
    """One filling of a cache.

    Args:
        tokens: The prompts' tokens that are to be in the cache.
    """

    def __init__(self, cache: TranslatedCache, tokens: PromptTokens, places: Places) -> None:
        assert cache.translator is not None
        self.cache, self.tokens, self.places = cache, tokens, places
        self.model, self.translator = cache.model, cache.translator
        self.decoder = compat.decoder_layers(self.model)[2]
        self.side = torch.empty(0)
        self.rows: torch.Tensor | None = None
        self._given: dict[str, Any] = {}
        self._tables: dict[Any, dict[str, Any]] = {}
        self._index: torch.Tensor | None = None

    def fill(self, head: CodesHead, parts: Iterable[Part]) -> None:
        """Runs the lowest layers, and rebuilds the others.

        Args:
            parts: In the head's order; each may have to be waited for.
        """
        self._index = self._codes_of(head)
        # Patched layers are called as the lowest was called with the whole prompt.
        if self.translator.settings.of_tokens_alone and not self.translator.patched_layers:
            self._run_distinct()
        else:
            self.side = self._wanted(self._run_lowest(self.tokens))
        by_part: dict[str | None, list[LayerDecoder]] = {}
        for decoder in self.translator.maps.decoders:
            by_part.setdefault(decoder.part, []).append(decoder)
        for decoder in by_part.pop(None, []):
            self._rebuild(decoder, None)
        for part in parts:
            for decoder in by_part.pop(part.name, []):
                self._rebuild(decoder, part)
        assert not by_part, f"no codes came for {sorted(map(str, by_part))}"
        for layer in self.cache.layers:
            layer.seen = self.tokens.ids.shape[1]

    def _codes_of(self, head: CodesHead) -> torch.Tensor | None:
        """Which tokens of the codes are wanted; None for all, in their order."""
        tokens = [row.tokens for row in head.rows]
        counts = [self.tokens.ids.shape[1] - self.places.padding[row] for row in self.places.rows]
        if list(self.places.coded) == list(range(len(tokens))) and counts == tokens:
            return None
        starts = [sum(tokens[:number]) for number in self.places.coded]
        return torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])

    def _run_distinct(self) -> None:
        """Runs each different token once, where that is all that layer 0 has to know, and puts its keys and values in their places."""
        layer = self.cache.layers[0]

        distinct, self.rows = self._wanted(self.tokens.ids).unique(return_inverse=True)
        self.side = self._run_lowest(PromptTokens.alone(distinct))[0]
        keys, values = (part[0, :, : len(distinct)].clone() for part in (layer.key_buffer, layer.value_buffer))
        batch = len(self.tokens.ids)
        self._open(layer, self.decoder[0], *(part.expand(batch, -1, -1, -1) for part in (keys, values)))
        turning = self._turning(0, keys.device)
        scaled = self.cache.rotation.layers[0].attention_scaling
        if scaled != 1 and turning:
            # At position 0 keys have been scaled already, if not turned.
            turning = turning | {"cos": turning["cos"] / scaled, "sin": turning["sin"] / scaled}
        write_states(keys, values, self.rows.to(keys.device), layer.key_buffer, layer.value_buffer, self._spans(), **turning)
        self._copy_rows(layer)

    def _run_lowest(self, tokens: PromptTokens) -> torch.Tensor:
        """Runs the layers that the consumer has for itself, up to the next one's keys and values; what its attention is given."""
        lowest = self.translator.settings.recompute_layers

        def keep(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given.append(args[0] if args else kwargs["hidden_states"])
            self._given = {} if args else kwargs
            return args, kwargs

        given: list[torch.Tensor] = []
        told = with_told_attention(self.decoder[lowest], keep)
        twin = with_layers(self.model, [*self.decoder[:lowest], told, *self.decoder[lowest + 1 :]])
        with suppress(PassEnded):
            run_module(twin, StoppingPass(self.cache, lowest), tokens.ids, tokens.positions, tokens.mask)
        return given[0]

    def _wanted(self, states: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, ...) of the wanted rows without padding, (tokens, ...)."""
        if len(states) == 1 and not self.places.padding[0]:
            return states[0]
        return torch.cat([states[row, self.places.padding[row] :] for row in self.places.rows])

    def _rebuild(self, decoder: LayerDecoder, part: Part | None) -> None:
        layer, module = self.cache.layers[decoder.layer], self.decoder[decoder.layer]
        if decoder.kind == "patch":
            self._regenerate(decoder, part)
        else:
            # All layers are of one shape: the translator was not fitted otherwise.
            self._open(layer, module, self.cache.layers[0].key_buffer, self.cache.layers[0].value_buffer)
            device = layer.key_buffer.device
            weights = self.cache.weights_of(decoder, device)
            sided = weights.side is not None
            rebuild(
                self.side.to(device) if sided else None,
                self._codes(part, device),
                weights,
                layer.key_buffer,
                layer.value_buffer,
                self._spans(),
                rows=self.rows.to(device) if sided and self.rows is not None else None,
                check=False,
                **self._turning(decoder.layer, device),
            )
        self._copy_rows(layer)

    def _spans(self) -> list[RowSpan]:
        """Where the wanted tokens go."""
        return [RowSpan(row, self.places.padding[row], self.tokens.ids.shape[1] - self.places.padding[row]) for row in self.places.rows]

    def _copy_rows(self, layer: Any) -> None:
        """Gives a layer the rows that are the same as others."""
        for row, twin in self.places.copies.items():
            for buffer in (layer.key_buffer, layer.value_buffer):
                buffer[row] = buffer[twin]

    def _codes(self, part: Part | None, device: torch.device) -> Codes | None:
        """A part's codes as the kernel wants them."""
        if part is None or not part.codes:
            return None
        only = next(iter(part.codes.values()))
        if len(part.codes) == 1 and self._index is None:
            if isinstance(only, Quantized):
                only = only.to(device)
                return Codes(only.data, only.scale, only.zero, only.group)
            return Codes(only.to(device))
        return Codes(self._plain(part, device))

    def _plain(self, part: Part, device: torch.device) -> torch.Tensor:
        """A part's codes side by side, (tokens, rank)."""
        codes = part.joined()
        return (codes if self._index is None else codes[self._index]).to(device)

    def _open(self, layer: Any, module: nn.Module, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Makes room in a layer for keys and values of the kind of these, (batch, heads, any, dim)."""
        device, slots = compat.layer_device(module), capacity_for(self.tokens.ids.shape[1] + 1)
        layer.lazy_initialization(keys.new_empty(0, device=device), values.new_empty(0, device=device))
        for name, like in (("key_buffer", keys), ("value_buffer", values)):
            buffer = like.new_empty(*like.shape[:2], slots, like.shape[3], device=device)
            # What no token is written to must be numbers all the same.
            buffer[:, :, : max(self.places.padding)] = 0
            buffer[:, :, self.tokens.ids.shape[1] :] = 0
            setattr(layer, name, buffer)

    def _turning(self, layer_idx: int, device: torch.device) -> dict[str, Any]:
        """How the kernel is to turn a layer's keys of the wanted tokens; layers that turn alike share it."""
        geometry = self.cache.rotation.layers[layer_idx]
        if geometry.kind != "rope":
            return {}
        if (id(geometry), device) not in self._tables:
            length = self.tokens.ids.shape[1]
            longest = length - min(self.places.padding[row] for row in self.places.rows)
            made = geometry.cos_sin(torch.arange(longest), device=device)
            cos, sin = (
                torch.cat([table[: length - self.places.padding[row]] for row in self.places.rows]) * geometry.attention_scaling
                for table in made
            )
            self._tables[id(geometry), device] = {"cos": cos, "sin": sin, "layout": geometry.layout}
        return self._tables[id(geometry), device]

    def _regenerate(self, decoder: LayerDecoder, part: Part | None) -> None:
        """Gives a layer's attention the input that codes stand for, and lets it make keys and values as ever."""
        codes = None if part is None else self._plain(part, self.side.device)
        made = decoder.apply(self.side, codes)
        batch, length = self.tokens.ids.shape
        hidden = made.new_zeros(batch, length, made.shape[1])
        start = 0
        for row in self.places.rows:
            count = length - self.places.padding[row]
            hidden[row, self.places.padding[row] :] = made[start : start + count]
            start += count

        stopping = StoppingPass(self.cache, decoder.layer, decoder.layer)
        if not self._like_lowest(decoder.layer):
            feed_attention(self.model, decoder.layer, hidden, self.tokens, stopping)
            return
        attention = compat.attention_module(self.decoder[decoder.layer])
        given = {name: stopping if isinstance(value, StoppingPass) else value for name, value in self._given.items()}
        with suppress(PassEnded):
            attention(**given | {"hidden_states": hidden.to(self._given["hidden_states"])})

    def _like_lowest(self, layer: int) -> bool:
        """Whether a layer's attention is called with what the lowest one was called with, so that no pass has to come to it."""
        lowest = self.translator.settings.recompute_layers
        kinds = [type(compat.attention_module(self.decoder[each])) for each in (lowest, layer)]
        rotation, devices = self.cache.rotation.layers, {compat.layer_device(self.decoder[each]) for each in (lowest, layer)}
        plan = [kind for kind, _ in compat.layer_plan(self.cache.config)]
        same = kinds[0] is kinds[1] and rotation[lowest] is rotation[layer] and plan[lowest] == plan[layer]
        return "hidden_states" in self._given and same and len(devices) == 1


def on_device(weights: Decoder, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A decoder's weights where and as they are used.

    Args:
        weights: As they are stored, float32.
        dtype: Of the cache. A CPU multiplies in float32 anyway, and would convert at each call.
    """
    kind = torch.float32 if device.type == "cpu" else dtype
    return Decoder(*(None if part is None else part.to(device, kind) for part in weights))
