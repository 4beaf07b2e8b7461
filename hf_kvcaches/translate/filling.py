"""Fill a consumer's cache from codes: the lowest layers are run, the others rebuilt as their codes arrive."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.kernels.arguments import RowSpan
from hf_kvcaches.kernels.rebuild import rebuild
from hf_kvcaches.reuse.cache import SplicingCache
from hf_kvcaches.reuse.partial import PassEnded, StoppingPass, run_module, with_layers
from hf_kvcaches.translate.attention_input import fill_layer
from hf_kvcaches.translate.codes import CodesHead, Part
from hf_kvcaches.translate.maps import LayerDecoder
from hf_kvcaches.translate.states import PromptTokens, with_watched_input
from hf_kvcaches.translate.translator import CacheTranslator


@dataclass(frozen=True)
class CodedPrompt:
    """Which codes the rows of a batch are rebuilt from.

    Args:
        spans: Slots that are rebuilt, in the order of their codes.
        starts: The index of each span's first token in the codes.
        copies: For each other row, the rebuilt one that has the same tokens in the same slots.
        padding: Slots without a token at the start of each row of the batch.
        slots: Slots that are filled in all rows afterwards, padding included.
        seen: Slots that were filled before.
    """

    spans: tuple[RowSpan, ...]
    starts: tuple[int, ...]
    copies: dict[int, int]
    padding: tuple[int, ...]
    slots: int
    seen: int

    def code_indices(self, tokens: int) -> torch.Tensor | None:
        """Return the tokens of the codes that are used; None for all of so many, in their order."""
        indices = torch.cat([torch.arange(start, start + span.tokens) for start, span in zip(self.starts, self.spans, strict=True)])
        return None if torch.equal(indices, torch.arange(tokens)) else indices


def match_rows(head: CodesHead, tokens: PromptTokens, most: int, seen: int = 0) -> CodedPrompt | None:
    """Find each row of a batch among the coded ones; None where a row is not among them.

    Args:
        tokens: All tokens, also those in the cache.
        most: Slots that may be filled.
        seen: Slots that are filled already.
    """
    padding = (~tokens.real).sum(-1).tolist()
    numbers, slots = list[int](), most
    for before, ids in zip(padding, tokens.rows(), strict=True):
        matches = [(row.tokens, -number) for number, row in enumerate(head.rows) if row.first <= max(0, seen - before) and row.begins(ids)]
        if not matches:
            return None
        length, number = max(matches)
        numbers.append(-number)
        slots = min(slots, before + length)
    rebuilt: dict[tuple[int, int], int] = {}
    copies = {}
    for row, alike in enumerate(zip(numbers, padding, strict=True)):
        if (source := rebuilt.setdefault(alike, row)) != row:
            copies[row] = source
    spans, starts, offsets = [], [], [0, *accumulate(row.coded for row in head.rows)]
    for (number, before), row in sorted(rebuilt.items(), key=lambda item: (item[0][0], item[1])):
        first = max(seen, before)
        spans.append(RowSpan(row, first, slots - first))
        starts.append(offsets[number] + first - before - head.rows[number].first)
    return CodedPrompt(tuple(spans), tuple(starts), copies, tuple(padding), slots, seen)


class Filling:
    """One filling of a cache; `tokens` are those in the cache afterwards, also those in it before."""

    def __init__(
        self, cache: SplicingCache, translator: CacheTranslator, head: CodesHead, prompt: CodedPrompt, tokens: PromptTokens
    ) -> None:
        self.cache, self.translator, self.prompt, self.tokens = cache, translator, prompt, tokens
        self.layers = decoder_layers(cache.model)[2]
        self._code_indices = prompt.code_indices(head.tokens)
        self._tables: dict[Any, dict[str, Any]] = {}
        self._side = self._run_lowest()
        self._distinct_side, self._side_rows = self._distinct()

    def run(self, parts: Iterable[Part]) -> None:
        """Rebuild all layers above the lowest from parts in the head's order, as they arrive."""
        for decoder in self.translator.maps.decoders:
            if decoder.part is None:
                self._rebuild(decoder, None)
        for part, encoder in zip(parts, self.translator.maps.encoders, strict=True):
            codes = part.codes if self._code_indices is None else part.codes[:, self._code_indices]
            coefficients = encoder.quantizer.decode(codes.to(self._side.device))
            for decoder in self.translator.maps.decoders:
                if decoder.part == part.name:
                    self._rebuild(decoder, coefficients)

    def _run_lowest(self) -> torch.Tensor:
        """Run the lowest layers up to the next one's keys and values; return that layer's attention input, (rebuilt tokens, hidden)."""
        lowest, seen, inputs = self.translator.settings.recompute_layers, self.prompt.seen, list[torch.Tensor]()
        watched = with_watched_input(self.layers[lowest], inputs.append)
        twin = with_layers(self.cache.model, [*self.layers[:lowest], watched, *self.layers[lowest + 1 :]])
        with suppress(PassEnded):
            ids, positions = self.tokens.ids[:, seen:], self.tokens.positions[:, seen:]
            run_module(twin, StoppingPass(self.cache, lowest), ids, positions, self.tokens.mask)
        return torch.cat([inputs[0][span.row, span.first - seen :] for span in self.prompt.spans])

    def _distinct(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the side information without repetitions, and the row of each token in it.

        Where the consumer runs no layer, tokens with one id share a row, which is multiplied once.
        """
        if self.translator.settings.recompute_layers or self._side.is_cuda:  # the CUDA kernel expands the rows again
            return self._side, None
        _, rows = torch.cat([self.tokens.ids[span.row, span.first :] for span in self.prompt.spans]).unique(return_inverse=True)
        rows = rows.to(self._side.device)
        distinct = self._side.new_empty(int(rows.max()) + 1, self._side.shape[1]).index_copy_(0, rows, self._side)
        # Embeddings with positions differ between tokens of one id.
        return (distinct, rows) if torch.equal(distinct[rows], self._side) else (self._side, None)

    def _rebuild(self, decoder: LayerDecoder, coefficients: torch.Tensor | None) -> None:
        """Write the keys and values of a layer."""
        layer, device = self.cache.layers[decoder.layer], compat.layer_device(self.layers[decoder.layer])
        if decoder.kind == "input":
            fill_layer(self.cache, decoder.layer, decoder.apply(self._side, coefficients), self.prompt.spans, self.prompt.seen, self.tokens)
        else:
            heads, *dims = decoder.shape
            like = self.cache.layers[0].key_buffer
            layer.open(len(self.tokens.ids), self.prompt.slots, *(like.new_empty(1, heads, 0, dim, device=device) for dim in dims))
            weights = self.translator.weights_on(decoder, device, self.cache.model.dtype)
            side = None if weights.side is None else self._distinct_side.to(device)
            codes = None if coefficients is None or weights.codes is None else coefficients.to(device)
            tables = self._rotation(decoder.layer, device) | {"side_rows": None if self._side_rows is None else self._side_rows.to(device)}
            rebuild(side, codes, weights, layer.key_buffer, layer.value_buffer, self.prompt.spans, **tables)
        for row, source in self.prompt.copies.items():
            for buffer in (layer.key_buffer, layer.value_buffer):
                buffer[row, :, self.prompt.seen :] = buffer[source, :, self.prompt.seen :]

    def _rotation(self, layer: int, device: torch.device) -> dict[str, Any]:
        """Return the kernel's tables for a layer's keys; layers with one geometry share them."""
        geometry = self.cache.rotation.layers[layer]
        if geometry.kind != "rope":
            return {}
        if (id(geometry), device) not in self._tables:
            positions = torch.cat([self.tokens.positions[span.row, span.first :] for span in self.prompt.spans]).to(device)
            cos, sin = (table * geometry.attention_scaling for table in geometry.cos_sin(positions, device=device))
            self._tables[id(geometry), device] = {"cos": cos, "sin": sin, "layout": geometry.layout}
        return self._tables[id(geometry), device]
