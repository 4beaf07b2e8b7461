"""Fill a consumer's cache from codes: the lowest layers and the first tokens are run, the others rebuilt as their codes arrive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.kernels.arguments import RowSpan
from hf_kvcaches.kernels.rebuild import product_type, rebuild
from hf_kvcaches.reuse.layer import SplicingCache
from hf_kvcaches.reuse.partial import PassEnded, StoppingPass, run_module, with_layers
from hf_kvcaches.translate.codes import ArrivingCodes, CodesHead, SemanticCodes
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
        padding: Slots without a token at the start of each row.
        slots: Slots that are filled in all rows afterwards, with padding.
        seen: Slots that were filled before.
        run: How many of each row's first tokens have no codes, and are run.
    """

    spans: tuple[RowSpan, ...]
    starts: tuple[int, ...]
    copies: dict[int, int]
    padding: tuple[int, ...]
    slots: int
    seen: int
    run: int

    def code_indices(self, tokens: int) -> torch.Tensor | None:
        """Return which of the coded tokens are used; None for all, in their order."""
        ranges = [torch.arange(start, start + span.tokens) for start, span in zip(self.starts, self.spans, strict=True)]
        indices = torch.cat([torch.arange(0), *ranges])
        return None if torch.equal(indices, torch.arange(tokens)) else indices


def match_prompts(head: CodesHead, tokens: PromptTokens, most: int, seen: int = 0, run: int = 0) -> CodedPrompt | None:
    """Find each row of a batch among the coded prompts; None where a row is not among them.

    Args:
        tokens: All tokens, also those in the cache.
        most: Slots that may be filled.
        seen: Slots that are filled already.
        run: How many first tokens of a new prompt are run.
    """
    padding = (~tokens.real).sum(-1).tolist()
    rows: dict[tuple[int, int], list[int]] = {}  # by their prompt's number and their padding
    for row, (before, ids) in enumerate(zip(padding, tokens.rows(), strict=True)):
        held = seen - before if seen > before else run
        matches = [(prompt.tokens, -number) for number, prompt in enumerate(head.prompts) if prompt.first <= held and prompt.begins(ids)]
        if not matches:
            return None
        length, number = max(matches)
        most = min(most, before + length)
        rows.setdefault((-number, before), []).append(row)
    spans, starts, copies, missing = list[RowSpan](), list[int](), dict[int, int](), 0
    offsets = [0, *accumulate(prompt.coded for prompt in head.prompts)]
    for (number, before), (row, *others) in sorted(rows.items(), key=lambda item: (item[0][0], item[1][0])):
        coded = before + head.prompts[number].first  # the slot of the first token with codes
        missing = max(missing, coded - before if seen <= before else 0)
        first = max(seen, coded)
        spans.append(RowSpan(row, first, max(0, most - first)))
        starts.append(offsets[number] + first - coded)
        copies |= dict.fromkeys(others, row)
    return CodedPrompt(tuple(spans), tuple(starts), copies, tuple(padding), most, seen, missing)


def fill(
    cache: SplicingCache, translator: CacheTranslator, codes: SemanticCodes | ArrivingCodes, prompt: CodedPrompt, tokens: PromptTokens
) -> None:
    """Write the keys and values of all layers; no token counts as seen in layers that are rebuilt.

    Args:
        prompt: Which codes are used.
        tokens: Those in the cache afterwards, also those in it before.
    """
    maps, side, modules = translator.maps, _run_lowest(cache, translator, prompt, tokens), decoder_layers(cache.model)[2]
    devices, like = [compat.layer_device(module) for module in modules], cache.layers[0].key_buffer
    for decoder in maps.decoders:
        heads, *dims = decoder.shape
        empty = [like.new_empty(1, heads, 0, dim, device=devices[decoder.layer]) for dim in dims]
        cache.layers[decoder.layer].open(len(tokens.ids), prompt.slots, *empty, max(prompt.padding))
    if prompt.run:
        _run_first(cache, translator, prompt, tokens)
    if any(span.tokens for span in prompt.spans):
        rows, tables = _Side(side, prompt, tokens, distinct=not translator.settings.recompute_layers), _Rotations(cache, prompt, tokens)
        for code, coefficients in _coefficients(translator, codes, prompt, side.device):
            for decoder in (own for own in maps.decoders if own.code == code):
                layer, device = cache.layers[decoder.layer], devices[decoder.layer]
                # Rounding of products is far below that of entropy-coded coefficients, but not of exact ones.
                dtype = cache.model.dtype
                precision = torch.promote_types(dtype, torch.float32) if maps.coding is None else product_type(dtype, device)
                factors = None if coefficients is None else coefficients.to(device), translator.weights_on(decoder, device, precision)
                options = tables.of(decoder, device) | rows.index_on(device)
                rebuild(rows.on(device), *factors, layer.key_buffer, layer.value_buffer, prompt.spans, product=precision, **options)
    for row, source in prompt.copies.items():
        for layer in (cache.layers[decoder.layer] for decoder in maps.decoders):
            for buffer in (layer.key_buffer, layer.value_buffer):
                buffer[row, :, prompt.seen : prompt.slots] = buffer[source, :, prompt.seen : prompt.slots]


def _run_lowest(cache: SplicingCache, translator: CacheTranslator, prompt: CodedPrompt, tokens: PromptTokens) -> torch.Tensor:
    """Run the lowest layers up to the next one's keys and values; return that layer's attention input, (rebuilt tokens, hidden)."""
    layers, lowest, inputs = decoder_layers(cache.model)[2], translator.settings.recompute_layers, list[torch.Tensor]()
    watched = with_watched_input(layers[lowest], inputs.append)
    twin = with_layers(cache.model, [*layers[:lowest], watched, *layers[lowest + 1 :]])
    with suppress(PassEnded):
        ids, positions = tokens.ids[:, prompt.seen :], tokens.positions[:, prompt.seen :]
        run_module(twin, StoppingPass(cache, lowest), ids, positions, tokens.mask)
    return torch.cat([inputs[0][span.row, span.first - prompt.seen :][: span.tokens] for span in prompt.spans])


def _run_first(cache: SplicingCache, translator: CacheTranslator, prompt: CodedPrompt, tokens: PromptTokens) -> None:
    """Run the first tokens of each row through all layers."""
    padding = torch.tensor(prompt.padding, device=tokens.ids.device)
    columns = (padding[:, None] + torch.arange(prompt.run, device=padding.device)).clamp_max(prompt.slots - 1)
    exact = DynamicCache()
    run_module(cache.model.base_model, exact, tokens.ids.gather(1, columns), torch.arange(prompt.run, device=padding.device))
    for decoder in translator.maps.decoders:
        layer, own = cache.layers[decoder.layer], exact.layers[decoder.layer]
        for row, before in enumerate(prompt.padding):
            if before >= prompt.seen:
                slots = slice(before, min(before + prompt.run, prompt.slots))
                for buffer, states in ((layer.key_buffer, own.keys), (layer.value_buffer, own.values)):
                    buffer[row, :, slots] = states[row, :, : slots.stop - slots.start]


def _coefficients(
    translator: CacheTranslator, codes: SemanticCodes | ArrivingCodes, prompt: CodedPrompt, device: torch.device
) -> Iterator[tuple[int | None, torch.Tensor | None]]:
    """Yield the coefficients of each code as it arrives, decoded together where all are there; first None, for layers without codes."""
    yield None, None
    maps, tokens = translator.maps, codes.head.tokens
    indices = prompt.code_indices(tokens)
    numbered = enumerate(part.codes.to(device) for part in codes)
    groups = [dict(numbered)] if isinstance(codes, SemanticCodes) else ({code: record} for code, record in numbered)
    for records in groups:
        for code, coefficients in maps.decode(records, tokens).items():
            yield code, coefficients if indices is None else coefficients[indices.to(device)]


class _Side:
    """The side information of rebuilt tokens, (tokens, hidden), on the devices where it is needed.

    Args:
        distinct: Whether tokens of one id have the same, which then is multiplied only once.
    """

    def __init__(self, side: torch.Tensor, prompt: CodedPrompt, tokens: PromptTokens, distinct: bool) -> None:
        self._rows, self._index = {side.device: side}, dict[torch.device, torch.Tensor]()
        if distinct and not side.is_cuda:  # the CUDA kernel would expand the rows again
            ids = torch.cat([tokens.ids[span.row, span.first :][: span.tokens] for span in prompt.spans])
            _, index = ids.unique(return_inverse=True)
            index = index.to(side.device)
            rows = side.new_empty(int(index.max()) + 1, side.shape[1]).index_copy_(0, index, side)
            if torch.equal(rows[index], side):  # embeddings with positions differ between tokens of one id
                self._rows, self._index = {side.device: rows}, {side.device: index}
        self._device = side.device

    def on(self, device: torch.device) -> torch.Tensor:
        return self._rows.setdefault(device, self._rows[self._device].to(device))

    def index_on(self, device: torch.device) -> dict[str, Any]:
        """Return which row each token has, as an argument of the kernel; nothing where each has its own."""
        return {"side_rows": self._index.setdefault(device, self._index[self._device].to(device))} if self._index else {}


class _Rotations:
    """The kernel's tables for the keys of rebuilt tokens; layers with one geometry share them."""

    def __init__(self, cache: SplicingCache, prompt: CodedPrompt, tokens: PromptTokens) -> None:
        self._cache, self._tables = cache, dict[Any, dict[str, Any]]()
        self._positions = torch.cat([tokens.positions[span.row, span.first :][: span.tokens] for span in prompt.spans])

    def of(self, decoder: LayerDecoder, device: torch.device) -> dict[str, Any]:
        """Return the tables of a layer; nothing where keys are not rotated."""
        geometry = self._cache.rotation.layers[decoder.layer]
        if geometry.kind != "rope":
            return {}
        if (id(geometry), device) not in self._tables:
            cos, sin = (table * geometry.attention_scaling for table in geometry.cos_sin(self._positions.to(device), device=device))
            self._tables[id(geometry), device] = {"cos": cos, "sin": sin, "layout": geometry.layout}
        return self._tables[id(geometry), device]
