"""Filling a consumer's cache from codes: the lowest layers run, the others are rebuilt as their parts arrive."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.layer_pass import StoppingPass
from hf_kvcaches.core.partial import PassEnded, with_layers
from hf_kvcaches.core.prefill import run_module
from hf_kvcaches.kernels.rebuild import RowSpan, rebuild
from hf_kvcaches.translate.codes import Part
from hf_kvcaches.translate.head import CodesHead
from hf_kvcaches.translate.maps import LayerDecoder
from hf_kvcaches.translate.states import PromptTokens, feed_attention, with_told_attention

if TYPE_CHECKING:
    from hf_kvcaches.translate.cache import TranslatedCache
    from hf_kvcaches.translate.translator import CacheTranslator


@dataclass(frozen=True)
class CodedPrompt:
    """Which codes the rows of a prompt take.

    Args:
        rows: Rows of the batch that are rebuilt, in the order of the codes.
        coded: For each of them, the number of its row in the codes. Texts of several lengths may begin with the same one.
        copies: For each other row, the one of `rows` that gets the same tokens in the same slots.
        padding: Slots at the start of each row of the batch that hold no token.
        slots: The first ones that are filled in all rows afterwards, padding included.
        seen: Those that were filled before.
    """

    rows: tuple[int, ...]
    coded: tuple[int, ...]
    copies: dict[int, int]
    padding: tuple[int, ...]
    slots: int
    seen: int = 0

    @property
    def spans(self) -> list[RowSpan]:
        """Where the tokens of `rows` go."""
        return [RowSpan(row, first, self.slots - first) for row in self.rows for first in (max(self.seen, self.padding[row]),)]

    def code_indices(self, head: CodesHead) -> torch.Tensor | None:
        """The tokens of the codes that are used; None for all in their order."""
        counts = [row.coded for row in head.rows]
        used = []
        for number, span in zip(self.coded, self.spans, strict=True):
            start = sum(counts[:number]) + span.first - self.padding[span.row] - head.rows[number].first
            used.append(torch.arange(start, start + span.tokens))
        index = torch.cat(used)
        return None if torch.equal(index, torch.arange(head.tokens)) else index


def match_rows(head: CodesHead, tokens: PromptTokens, most: int, seen: int = 0) -> CodedPrompt | None:
    """Finds each row of a batch among those that were coded; None where a row is not among them.

    Args:
        tokens: All of them, also those in the cache.
        most: Slots that may be filled.
        seen: Slots that are filled already.
    """
    padding = (~tokens.real).sum(-1).tolist()
    matches: list[tuple[int, int]] = []
    for row, ids in enumerate(tokens.rows()):
        held = max(0, seen - padding[row])
        known = [(coded.tokens, -number) for number, coded in enumerate(head.rows) if coded.first <= held and coded.begins(ids.numpy())]
        if not known:
            return None
        count, number = max(known)
        matches.append((-number, padding[row] + count))
    slots = min(most, *(end for _, end in matches))
    first: dict[tuple[int, int], int] = {}
    copies = {}
    for row, (number, _) in enumerate(matches):
        twin = first.setdefault((number, padding[row]), row)
        if twin != row:
            copies[row] = twin
    ordered = sorted((number, row) for (number, _), row in first.items())
    return CodedPrompt(tuple(row for _, row in ordered), tuple(number for number, _ in ordered), copies, tuple(padding), slots, seen)


def fill(
    cache: TranslatedCache, translator: CacheTranslator, head: CodesHead, prompt: CodedPrompt, tokens: PromptTokens, parts: Iterable[Part]
) -> None:
    """Runs the lowest layers, and rebuilds the others.

    Args:
        tokens: The prompt's that are to be in the cache, also those that are.
        parts: In the head's order; each may have to be waited for.
    """
    filling = _Filling(cache, translator, head, prompt, tokens)
    (_, unsent), *sent = translator.maps.parts()
    for decoder in unsent:
        filling.rebuild(decoder, None)
    for part, (name, decoders) in zip(parts, sent, strict=True):
        assert part.name == name
        coefficients = filling.coefficients(part)
        for decoder in decoders:
            filling.rebuild(decoder, coefficients)


class _Filling:
    """One filling of a cache: what its layers have in common."""

    def __init__(
        self, cache: TranslatedCache, translator: CacheTranslator, head: CodesHead, prompt: CodedPrompt, tokens: PromptTokens
    ) -> None:
        self.cache, self.prompt, self.tokens, self.translator = cache, prompt, tokens, translator
        self.layers = compat.decoder_layers(cache.model)[2]
        self._quantizers = {encoder.part: encoder.quantizer for encoder in translator.maps.encoders}
        self._code_indices = prompt.code_indices(head)
        self._tables: dict[Any, dict[str, Any]] = {}
        self._side = self._known_of_tokens()
        self._known = self._distinct()

    def _known_of_tokens(self) -> torch.Tensor:
        """Runs the layers that the consumer has for itself, up to the next one's keys and values.

        Returns:
            What that layer's attention is given for each rebuilt token, (tokens, hidden).
        """
        lowest, given, seen = self.translator.settings.recompute_layers, list[torch.Tensor](), self.prompt.seen

        def keep(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given.append(args[0] if args else kwargs["hidden_states"])
            return args, kwargs

        attention = with_told_attention(self.layers[lowest], keep)
        twin = with_layers(self.cache.model, [*self.layers[:lowest], attention, *self.layers[lowest + 1 :]])
        new = self.tokens.ids[:, seen:], self.tokens.positions[:, seen:]
        with suppress(PassEnded):
            run_module(twin, StoppingPass(self.cache, lowest), *new, self.tokens.mask)
        return torch.cat([given[0][span.row, span.first - seen :] for span in self.prompt.spans])

    def _distinct(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is known, and which row each token has: where no layer runs, tokens with one id share a row and are multiplied once."""
        if self.translator.settings.recompute_layers:
            return self._side, None
        _, rows = torch.cat([self.tokens.ids[span.row, span.first :] for span in self.prompt.spans]).unique(return_inverse=True)
        rows = rows.to(self._side.device)
        distinct = self._side.new_empty(int(rows.max()) + 1, self._side.shape[1]).index_copy_(0, rows, self._side)
        # Models that add positions to embeddings know more of a token than its id.
        return (distinct, rows) if torch.equal(distinct[rows], self._side) else (self._side, None)

    def coefficients(self, part: Part) -> torch.Tensor:
        """Of the rebuilt tokens, (tokens, rank)."""
        codes = part.codes if self._code_indices is None else part.codes[:, self._code_indices]
        return self._quantizers[part.name].decode(codes.to(self._side.device))

    def rebuild(self, decoder: LayerDecoder, coefficients: torch.Tensor | None) -> None:
        """Writes the keys and values of a layer."""
        layer, device = self.cache.layers[decoder.layer], compat.layer_device(self.layers[decoder.layer])
        if decoder.kind == "input":
            self._regenerate(decoder, coefficients)
        else:
            heads, *dims = decoder.shape
            like = self.cache.layers[0].key_buffer
            layer.open(len(self.tokens.ids), self.prompt.slots, *(like.new_empty(1, heads, 0, dim, device=device) for dim in dims))
            side, side_rows = (None if part is None else part.to(device) for part in self._known)
            weights = self.translator.weights_on(decoder, device, self.cache.model.dtype)
            rebuild(
                None if weights.side is None else side,
                None if coefficients is None or weights.codes is None else coefficients.to(device),
                weights,
                layer.key_buffer,
                layer.value_buffer,
                self.prompt.spans,
                check=False,
                side_rows=side_rows,
                **self._rotation(decoder.layer, device),
            )
        for row, twin in self.prompt.copies.items():
            for buffer in (layer.key_buffer, layer.value_buffer):
                buffer[row, :, self.prompt.seen :] = buffer[twin, :, self.prompt.seen :]

    def _rotation(self, layer_idx: int, device: torch.device) -> dict[str, Any]:
        """The kernel's tables for a layer's keys; layers with one geometry share them."""
        geometry = self.cache.rotation.layers[layer_idx]
        if geometry.kind != "rope":
            return {}
        if (id(geometry), device) not in self._tables:
            positions = torch.cat([self.tokens.positions[span.row, span.first :] for span in self.prompt.spans]).to(device)
            cos, sin = (table * geometry.attention_scaling for table in geometry.cos_sin(positions, device=device))
            self._tables[id(geometry), device] = {"cos": cos, "sin": sin, "layout": geometry.layout}
        return self._tables[id(geometry), device]

    def _regenerate(self, decoder: LayerDecoder, coefficients: torch.Tensor | None) -> None:
        """Gives a patched layer's attention its translated input, and lets it make keys and values."""
        inputs, seen = decoder.apply(self._side, coefficients), self.prompt.seen
        new = PromptTokens(self.tokens.ids[:, seen:], self.tokens.mask, self.tokens.real, self.tokens.positions[:, seen:])
        hidden = inputs.new_zeros(*new.ids.shape, inputs.shape[1])
        for span, rows in zip(self.prompt.spans, inputs.split([span.tokens for span in self.prompt.spans]), strict=True):
            hidden[span.row, span.first - seen :] = rows
        feed_attention(self.cache.model, decoder.layer, hidden, new, StoppingPass(self.cache, decoder.layer, decoder.layer))
