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
from hf_kvcaches.core.quantize import Quantized
from hf_kvcaches.kernels.rebuild import Codes, RowSpan, rebuild
from hf_kvcaches.translate.codes import Part
from hf_kvcaches.translate.head import CodesHead
from hf_kvcaches.translate.maps import LayerDecoder
from hf_kvcaches.translate.states import PromptTokens, feed_attention, with_told_attention

if TYPE_CHECKING:
    from hf_kvcaches.translate.cache import TranslatedCache


@dataclass(frozen=True)
class CodedPrompt:
    """Which codes the rows of a prompt take.

    Args:
        rows: Rows of the batch that are rebuilt, in the order of the codes.
        coded: For each of them, the number of its row in the codes. Texts of several lengths may begin with the same one.
        copies: For each other row, the one of `rows` that gets the same tokens in the same slots.
        padding: Slots at the start of each row of the batch that hold no token.
        slots: The first ones that can be filled in all rows, padding included.
    """

    rows: tuple[int, ...]
    coded: tuple[int, ...]
    copies: dict[int, int]
    padding: tuple[int, ...]
    slots: int

    @property
    def spans(self) -> list[RowSpan]:
        """Where the tokens of `rows` go."""
        return [RowSpan(row, self.padding[row], self.slots - self.padding[row]) for row in self.rows]

    def code_indices(self, head: CodesHead) -> torch.Tensor | None:
        """The tokens of the codes that are used; None for all in their order."""
        tokens, counts = [row.tokens for row in head.rows], [span.tokens for span in self.spans]
        if list(self.coded) == list(range(len(tokens))) and counts == tokens:
            return None
        starts = [sum(tokens[:number]) for number in self.coded]
        return torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])


def match_rows(head: CodesHead, tokens: PromptTokens, most: int) -> CodedPrompt | None:
    """Finds each row of a batch among those that were coded; None where a row is not among them.

    Args:
        most: Slots that may be filled.
    """
    padding = (~tokens.real).sum(-1).tolist()
    matches: list[tuple[int, int]] = []
    for row, ids in enumerate(tokens.rows()):
        known = [(coded.tokens, -number) for number, coded in enumerate(head.rows) if coded.begins(ids.numpy())]
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
    return CodedPrompt(tuple(row for _, row in ordered), tuple(number for number, _ in ordered), copies, tuple(padding), slots)


def fill(cache: TranslatedCache, head: CodesHead, prompt: CodedPrompt, tokens: PromptTokens, parts: Iterable[Part]) -> None:
    """Runs the lowest layers, and rebuilds the others.

    Args:
        tokens: The prompt's that are to be in the cache.
        parts: In the head's order; each may have to be waited for.
    """
    filling = _Filling(cache, head, prompt, tokens)
    by_part: dict[str | None, list[LayerDecoder]] = {}
    for decoder in filling.translator.maps.decoders:
        by_part.setdefault(decoder.part, []).append(decoder)
    for decoder in by_part.pop(None, []):
        filling.rebuild(decoder, None)
    for part in parts:
        for decoder in by_part.pop(part.name, []):
            filling.rebuild(decoder, part)
    assert not by_part, f"no codes came for {sorted(map(str, by_part))}"


class _Filling:
    """One filling of a cache: what its layers have in common."""

    def __init__(self, cache: TranslatedCache, head: CodesHead, prompt: CodedPrompt, tokens: PromptTokens) -> None:
        assert cache.translator is not None
        self.cache, self.prompt, self.tokens, self.translator = cache, prompt, tokens, cache.translator
        self.layers = compat.decoder_layers(cache.model)[2]
        self._code_indices = prompt.code_indices(head)
        self._tables: dict[Any, dict[str, Any]] = {}
        self._side = self._known_of_tokens()

    def _known_of_tokens(self) -> torch.Tensor:
        """Runs the layers that the consumer has for itself, up to the next one's keys and values.

        Returns:
            What that layer's attention is given for each rebuilt token, (tokens, hidden).
        """
        lowest, given = self.translator.settings.recompute_layers, list[torch.Tensor]()

        def keep(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given.append(args[0] if args else kwargs["hidden_states"])
            return args, kwargs

        attention = with_told_attention(self.layers[lowest], keep)
        twin = with_layers(self.cache.model, [*self.layers[:lowest], attention, *self.layers[lowest + 1 :]])
        with suppress(PassEnded):
            run_module(twin, StoppingPass(self.cache, lowest), self.tokens.ids, self.tokens.positions, self.tokens.mask)
        return torch.cat([given[0][span.row, span.first :] for span in self.prompt.spans])

    def rebuild(self, decoder: LayerDecoder, part: Part | None) -> None:
        """Writes the keys and values of a layer."""
        layer = self.cache.layers[decoder.layer]
        if decoder.kind == "patch":
            self._regenerate(decoder, part)
        else:
            device = compat.layer_device(self.layers[decoder.layer])
            # All layers are of one shape: the translator was not fitted otherwise.
            like = (buffer[:, :, :0].to(device) for buffer in self.cache.layers[0].owned_tensors().values())
            layer.open(len(self.tokens.ids), self.prompt.slots, *like)
            weights = self.translator.weights_on(decoder, device, self.cache.model.dtype)
            rebuild(
                None if weights.side is None else self._side.to(device),
                self._codes(part, device),
                weights,
                layer.key_buffer,
                layer.value_buffer,
                self.prompt.spans,
                check=False,
                **self._rotation(decoder.layer, device),
            )
        for row, twin in self.prompt.copies.items():
            for buffer in (layer.key_buffer, layer.value_buffer):
                buffer[row] = buffer[twin]

    def _codes(self, part: Part | None, device: torch.device) -> Codes | None:
        """A part's codes as the kernel wants them."""
        if part is None or not part.codes:
            return None
        code = next(iter(part.codes.values()))
        if len(part.codes) == 1 and self._code_indices is None:
            if isinstance(code, Quantized):
                code = code.to(device)
                return Codes(code.data, code.scale, code.zero, code.group)
            return Codes(code.to(device))
        return Codes(self._floats(part, device))

    def _floats(self, part: Part, device: torch.device) -> torch.Tensor:
        """A part's codes side by side, (tokens, rank)."""
        codes = part.joined()
        return (codes if self._code_indices is None else codes[self._code_indices]).to(device)

    def _rotation(self, layer_idx: int, device: torch.device) -> dict[str, Any]:
        """The kernel's tables for a layer's keys; layers with one geometry share them."""
        geometry = self.cache.rotation.layers[layer_idx]
        if geometry.kind != "rope":
            return {}
        if (id(geometry), device) not in self._tables:
            counts = [span.tokens for span in self.prompt.spans]
            cos, sin = (
                torch.cat([table[:count] for count in counts]) * geometry.attention_scaling
                for table in geometry.cos_sin(torch.arange(max(counts)), device=device)
            )
            self._tables[id(geometry), device] = {"cos": cos, "sin": sin, "layout": geometry.layout}
        return self._tables[id(geometry), device]

    def _regenerate(self, decoder: LayerDecoder, part: Part | None) -> None:
        """Gives a patched layer's attention its translated input, and lets it make keys and values."""
        codes = None if part is None else self._floats(part, self._side.device)
        inputs = decoder.apply(self._side, codes)
        hidden = inputs.new_zeros(*self.tokens.ids.shape, inputs.shape[1])
        for span, rows in zip(self.prompt.spans, inputs.split([span.tokens for span in self.prompt.spans]), strict=True):
            hidden[span.row, span.first :] = rows
        feed_attention(self.cache.model, decoder.layer, hidden, self.tokens, StoppingPass(self.cache, decoder.layer, decoder.layer))
