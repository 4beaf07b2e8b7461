"""`TranslatedCache`: a prompt that another model has read needs no prefill.

The way of a prompt: find it among the coded ones, run the lowest layers and the first tokens, rebuild all else as its codes arrive.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.report import CacheReport
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.source import PrefillCall, Stage
from hf_kvcaches.errors import ConfigError, Refusal, UnsupportedError, require_instance
from hf_kvcaches.kernels.rebuild import product_type, rebuild
from hf_kvcaches.reuse.layer import SplicingCache
from hf_kvcaches.reuse.partial import PassEnded, StoppingPass, run_module, with_layers
from hf_kvcaches.translate.codes import ArrivingCodes, CodedPrompt, SemanticCodes, match_prompts
from hf_kvcaches.translate.states import Maps, PromptTokens, with_watched_input
from hf_kvcaches.translate.translator import CacheTranslator

Codes = SemanticCodes | ArrivingCodes


@dataclass(frozen=True)
class TranslatedReport(CacheReport):
    """What a `TranslatedCache` holds, and which of it was rebuilt.

    Args:
        translated: Tokens of all rows that were filled in from codes, with the first tokens of prompts; 0 where the model ran the prompt.
        payload_bytes: Bytes of the messages; 0, like the fields below, in a cache that was unpickled or loaded.
        payload_share: The same as a share of the prompts' keys and values of all layers in bfloat16.
        run_layers: How many layers the model ran on these tokens; keys and values of one more are exact.
    """

    translated: int = 0
    payload_bytes: int = 0
    payload_share: float = 0.0
    run_layers: int = 0


class TranslatedCache(SplicingCache):
    """Rebuilds the consumer's keys and values from codes of another model's; `generate` runs only the last token of the prompt.

    Paper: Semantic Cache Distillation: Efficient State Transfer via Reuse and Selective Patching (SCD).

    **Departs from the paper**: several layers share one code of keys and values, in the metric of what errors cost. The token's embedding
    is side information, and codes are entropy coded. See docs/translation.md.

    **Refuses**: codes of other prompts, other models or other adapters; models whose keys change with the length of the text.

    **Memory per token**: as `GrowingCache`.

    The cache is filled when `generate` or `prefill` passes the prompt, which is compared with the coded one. The model runs what follows
    the coded prompt. A shorter prompt is refused, and so is a pass that codes can't serve (with gradients, under `torch.compile`, with the
    logits of the whole prompt, on embeddings). Without codes the model runs prompts itself.

    Args:
        consumer: The model that the translator was fitted for.
        translator: The one that made the codes.
        codes: In memory, or still arriving; None to `add` them later.
        decode_with: A new cache of the consumer that holds the tokens once the prompt is answered; None to keep them all here.

    Attributes:
        codes: What the next prompt is rebuilt from, or None.
    """

    translator: CacheTranslator | None = None  # a cache that was loaded or unpickled has none
    codes: Codes | None = None
    _first_codes: Codes | None = None
    # Since the cache was empty: tokens, bytes of messages, and bytes of the coded keys and values in bfloat16.
    _filled: tuple[int, int, int] = (0, 0, 0)

    def __init__(
        self, consumer: Any, translator: CacheTranslator | None = None, codes: Codes | None = None, *, decode_with: KVCache | None = None
    ) -> None:
        hint = "Pass CacheTranslator.from_pretrained(...)."
        require_instance("translator", translator, CacheTranslator, {"consumer": consumer, "codes": codes}, hint)
        assert translator is not None
        translator.check_consumer(consumer)
        super().__init__(consumer, decode_with=decode_with)
        self.translator, self._first_codes = translator, codes
        if codes is not None:
            self.add(codes)

    def add(self, codes: Codes) -> None:
        """Take the codes of the next prompt or turn, in place of unused ones.

        Args:
            codes: Of the whole text, from the tokens that this cache lacks on: `translator.encode(..., first=cache.seen)`.
        """
        if not isinstance(codes, Codes):
            hint = "Pass SemanticCodes.from_bytes(data)." if isinstance(codes, bytes) else "Pass what translator.encode gave."
            raise ConfigError.of("codes", "SemanticCodes or ArrivingCodes", type(codes).__name__, hint)
        if self.translator is None or self.stage is Stage.HANDED_OVER:
            raise UnsupportedError("add: expected a cache that keeps its tokens, and was not loaded from a file. Make a new cache.")
        self.translator.check_codes(codes.head)
        self.codes = codes

    def reset(self, codes: Codes | None = None) -> None:
        """Forget all tokens, and take the codes of another prompt, or again those that the cache was made with."""
        super().reset()
        self._filled, self.codes = (0, 0, 0), None
        self._first_codes = self._first_codes if codes is None else codes
        if self._first_codes is not None:
            self.add(self._first_codes)

    def settings(self) -> dict[str, Any]:
        return {"translated": self._filled[0]}

    @classmethod
    def rebuild(cls, model: Any, settings: dict[str, Any]) -> Self:
        cache = cls.__new__(cls)
        SplicingCache.__init__(cache, model)
        cache._filled = int(settings["translated"]), 0, 0
        return cache

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        if self.codes is None:
            raise UnsupportedError("prefill: the cache has used its codes, or has none. add() some, or run the model.")
        return super().prefill(input_ids, attention_mask)

    def read_prompt(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        # With the last token the model takes all others from the codes; without it, it would run the last of these.
        self.read(input_ids, attention_mask)
        self.crop(-1)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.codes is not None and self.stage is not Stage.FILLING:
            unserved = "Pass the input_ids of the whole prompt, with logits_to_keep=1 as generate does."
            raise UnsupportedError(
                "TranslatedCache: the cache is still to be filled from its codes, which this call of the model can't use. "
                f"{self.reason or unserved} Or call cache.prefill(input_ids) first, and pass the tokens that follow."
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def take_prefill(self, call: PrefillCall) -> int:
        codes, translator = self.codes, self.translator
        if codes is None or translator is None:
            return 0
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            self.reason = "Gradients are enabled, or the pass is compiled. Call the model under torch.no_grad(), and not compiled."
            return 0  # `update` raises with this reason
        seen, text = self.seen, self._whole_text(call)
        prompt = match_prompts(codes.head, text.rows(), text.padding, seen + call.most, seen, translator.exact_tokens)
        translator.check_consumer(self.model, self.provenance.identity)
        fill(self, translator, codes, prompt, text._replace(ids=text.ids[:, : prompt.slots].to(compat.input_device(self.model))))
        numbers = sum(tensor.shape[1] * tensor.shape[3] for layer in self.layers for tensor in layer.owned_tensors().values())
        covered = sum(coded.tokens - (coded.first if seen else 0) for coded in codes.head.prompts)
        new = sum(prompt.slots - max(seen, before) for before in text.padding)
        self._filled = self._filled[0] + new, self._filled[1] + codes.nbytes, self._filled[2] + 2 * numbers * covered
        self.codes, self.reason = None, ""
        self.take(prompt.slots)
        return prompt.slots - seen

    def _whole_text(self, call: PrefillCall) -> PromptTokens:
        """The tokens in the cache and those of a call."""
        padding = self.log.padding(self.seen + call.input_ids.shape[1])
        if isinstance(padding, Refusal):
            raise UnsupportedError(
                f"codes: they can't be compared with this prompt. {padding} Pad rows on the left, with attention_mask, and pass "
                "position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0), as generate does, here and with the tokens that follow."
            )
        return PromptTokens(self.log.ids.cpu(), tuple(padding), tuple(padding))

    def report(self) -> TranslatedReport:
        translated, payload, plain = self._filled
        fields = self._report_fields() | {"translated": translated}
        if self.translator is None or not plain:
            return TranslatedReport(**fields)
        layers = self.translator.settings.recompute_layers
        return TranslatedReport(**fields, payload_bytes=payload, payload_share=payload / plain, run_layers=layers)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo |= {id(shared): shared for shared in (self.codes, self._first_codes)}
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        if self.codes is not None:
            raise UnsupportedError("pickle: the cache is still to be filled from its codes. Send these, or call cache.prefill first.")
        return {**super().__getstate__(), "translator": None, "_first_codes": None, "_filled": (self._filled[0], 0, 0)}


def fill(cache: SplicingCache, translator: CacheTranslator, codes: Codes, prompt: CodedPrompt, tokens: PromptTokens) -> None:
    """Write the keys and values of all layers up to the last of the tokens; none counts as seen in layers that are rebuilt."""
    maps, lowest, dtype, seen = translator.maps, translator.settings.recompute_layers, cache.model.dtype, cache.seen
    side = _run_lowest(cache, lowest, prompt, tokens)
    modules, like = decoder_layers(cache.model)[2], cache.layers[0].key_buffer
    for number, _, (heads, *dims), _ in maps.decoders:
        device = compat.layer_device(modules[number])
        empty = [like.new_empty(1, heads, 0, dim, device=device) for dim in dims]
        cache.layers[number].open(len(tokens.ids), prompt.slots, *empty, max(tokens.padding))
    if prompt.run:
        _run_first(cache, maps, seen, prompt, tokens)
    if len(side):
        rows, index = _distinct(side, prompt.of_spans(tokens.ids)) if lowest == 0 and not side.is_cuda else (side, None)
        positions = prompt.of_spans(tokens.inputs()[1])

        @functools.cache
        def shared(geometry: RotaryGeometry, device: torch.device) -> tuple[torch.Tensor, dict[str, Any]]:
            """What the layers of a device have in common that rotate keys alike."""
            options = {"side_rows": None if index is None else index.to(device)}
            if geometry.kind != "rope":
                return rows.to(device), options
            cos, sin = (table * geometry.attention_scaling for table in geometry.cos_sin(positions.to(device)))
            return rows.to(device), options | {"cos": cos, "sin": sin, "layout": geometry.layout}

        for code, coefficients in _coefficients(maps, codes, prompt, side.device):
            for decoder in (decoder for decoder in maps.decoders if decoder.code == code):
                layer = cache.layers[decoder.layer]
                device = layer.key_buffer.device
                # Rounding of products is far below that of entropy-coded coefficients, but not of exact ones.
                precision = torch.promote_types(dtype, torch.float32) if maps.tables is None else product_type(dtype, device)
                known, options = shared(cache.rotation.layers[decoder.layer], device)
                sent, weights = None if coefficients is None else coefficients.to(device), maps.placed(decoder.weights, device, precision)
                rebuild(known, sent, weights, layer.key_buffer, layer.value_buffer, prompt.spans, precision, **options)
    for row, source in prompt.copies.items():
        for layer in (cache.layers[decoder.layer] for decoder in maps.decoders):
            for buffer in layer.buffers:
                buffer[row, :, seen : prompt.slots] = buffer[source, :, seen : prompt.slots]


def _run_lowest(cache: SplicingCache, lowest: int, prompt: CodedPrompt, tokens: PromptTokens) -> torch.Tensor:
    """Run the lowest layers up to the next one's keys and values; return that layer's attention input, (rebuilt tokens, hidden)."""
    layers, inputs, seen = list(decoder_layers(cache.model)[2]), list[torch.Tensor](), cache.seen
    layers[lowest] = with_watched_input(layers[lowest], inputs.append)
    with suppress(PassEnded):
        run_module(with_layers(cache.model, layers), StoppingPass(cache, lowest), *tokens.inputs(seen))
    return prompt.of_spans(inputs[0], seen)


def _run_first(cache: SplicingCache, maps: Maps, seen: int, prompt: CodedPrompt, tokens: PromptTokens) -> None:
    """Run the first tokens of each row that begins here through all layers."""
    positions, exact = torch.arange(prompt.run, device=tokens.ids.device), DynamicCache()
    columns = (torch.tensor(tokens.padding, device=positions.device)[:, None] + positions).clamp_max(prompt.slots - 1)
    run_module(cache.model.base_model, exact, tokens.ids.gather(1, columns), positions)
    for row, before in enumerate(tokens.padding):
        count = min(prompt.run, prompt.slots - before)
        for number in [decoder.layer for decoder in maps.decoders] if before >= seen else ():
            layer, found = cache.layers[number], exact.layers[number]
            layer.key_buffer[row, :, before : before + count] = found.keys[row, :, :count]
            layer.value_buffer[row, :, before : before + count] = found.values[row, :, :count]


def _coefficients(maps: Maps, codes: Codes, prompt: CodedPrompt, device: torch.device) -> Iterator[tuple[int | None, torch.Tensor | None]]:
    """Yield the coefficients of each code as it arrives, decoded together where all are there; first None, for layers without codes."""
    yield None, None
    indices, numbered = prompt.indices.to(device), enumerate(part.codes.to(device) for part in codes)
    for records in [dict(numbered)] if isinstance(codes, SemanticCodes) else ({code: record} for code, record in numbered):
        for code, coefficients in maps.decode(records, codes.head.tokens).items():
            yield code, coefficients[indices]


def _distinct(side: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what is known of each different token, so that it is multiplied only once, and the row of each token in it.

    Where embeddings have positions it differs between tokens of one id, and is returned as it is.
    """
    index = ids.unique(return_inverse=True)[1].to(side.device)
    rows = side.new_empty(int(index.max()) + 1, side.shape[1]).index_copy_(0, index, side)
    return (rows, index) if torch.equal(rows[index], side) else (side, None)
