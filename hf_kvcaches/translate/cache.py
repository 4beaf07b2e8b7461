"""`TranslatedCache`: a prompt that another model has read need not be read again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.prefill import PrefillCall
from hf_kvcaches.core.report import CacheReport
from hf_kvcaches.core.splicing.cache import SplicingCache
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_instance
from hf_kvcaches.translate.arriving import ArrivingCodes
from hf_kvcaches.translate.codes import Part, SemanticCodes
from hf_kvcaches.translate.filling import fill, match_rows
from hf_kvcaches.translate.states import PromptTokens
from hf_kvcaches.translate.translator import CacheTranslator

_UNSERVED = "Pass the input_ids of the whole prompt, with logits_to_keep=1 as generate does."


@dataclass(frozen=True)
class TranslatedReport(CacheReport):
    """What a `TranslatedCache` holds, and where it comes from.

    Args:
        translated: Tokens of the prompt whose keys and values were rebuilt, in all rows; 0 where the model ran the prompt.
        payload_bytes: Of the codes as they are sent. 0, as all that follows, once the cache was pickled or saved: codes stay behind.
        payload_share: Of what the rebuilt tokens' keys and values of all layers would take in bfloat16.
        run_layers: How many layers the model ran on these tokens; keys and values of one more are exact.
        patched: Layers that made their keys and values of a translated input.
    """

    translated: int = 0
    payload_bytes: int = 0
    payload_share: float = 0.0
    run_layers: int = 0
    patched: tuple[int, ...] = ()


class TranslatedCache(SplicingCache):
    """Starts from what another model has read: codes of its keys and values become the consumer's own, and `generate` runs the last token.

    Paper: Semantic Cache Distillation: Efficient State Transfer via Reuse and Selective Patching (SCD).

    **Departs from the paper**: see docs/translation.md. One code for keys and values, measured where errors cost, with what the consumer
    knows of each token for nothing.

    **Refuses**: codes of other prompts, other models or other adapters; models whose keys change with the length of the text.

    **Memory per token**: as `GrowingCache`. Codes are let go once they are used.

    The cache is filled when the prompt comes, by `generate` or `prefill`: only then can it be compared with the one that was coded. A
    prompt that goes on behind the coded one is run from there. One that is shorter than the coded one is refused, and so is a pass that
    codes can't serve while the cache is empty (with gradients, under `torch.compile`, with the logits of the whole prompt, on embeddings).

    Args:
        consumer: The model that the translator was fitted for.
        translator: That made the codes.
        codes: In memory, or still arriving.
        decode_with: A new cache of the consumer that holds the tokens once the prompt is answered; None to keep them all here.
    """

    translator: CacheTranslator | None = None
    codes: SemanticCodes | ArrivingCodes | None = None
    # Tokens that were rebuilt, and how many numbers the keys and values of one are in all layers.
    _translated = 0
    _token_numbers = 0

    def __init__(
        self, consumer: Any, translator: CacheTranslator, codes: SemanticCodes | ArrivingCodes, *, decode_with: KVCache | None = None
    ) -> None:
        hint = "Pass CacheTranslator.from_pretrained(...)."
        require_instance("translator", translator, CacheTranslator, {"consumer": consumer, "codes": codes}, hint)
        if not isinstance(codes, SemanticCodes | ArrivingCodes):
            hint = "Pass SemanticCodes.from_bytes(data)." if isinstance(codes, bytes) else "Pass what translator.encode gave."
            raise ConfigError.of("codes", "SemanticCodes or ArrivingCodes", type(codes).__name__, hint)
        translator.check_consumer(consumer)
        translator.check_codes(codes.head)
        self.translator, self.codes = translator, codes
        # Parts of codes that are still arriving: each comes once, and copies of this cache want it too.
        self._arrived: list[Part] = []
        super().__init__(consumer, decode_with=decode_with)

    def settings(self) -> dict[str, Any]:
        return {"translated": self._translated}

    @classmethod
    def rebuild(cls, model: Any, settings: dict[str, Any]) -> Self:
        # Codes stay behind: what comes out of a file goes on with the tokens that it has.
        cache = cls.__new__(cls)
        SplicingCache.__init__(cache, model)
        cache._arrived, cache._translated = [], int(settings["translated"])
        return cache

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        if self.codes is None or self.seen:
            raise UnsupportedError("prefill: the cache has tokens already, or no codes. reset() it, or make one with codes.")
        return super().prefill(input_ids, attention_mask)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.codes is not None and not self.filling and self.source_layers[layer_idx].seen == 0 and not self.handed_over:
            raise UnsupportedError(
                "TranslatedCache: the cache is still to be filled from its codes, and this call of the model can't be served by them. "
                f"{self.reason or _UNSERVED} Or call cache.prefill(input_ids) first and go on behind it."
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def take_prefill(self, call: PrefillCall) -> int:
        if self.codes is None or self.seen:
            return 0
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            self.reason = "Gradients are enabled, or the pass is compiled. Call the model under torch.no_grad(), and not compiled."
            return 0  # and `update` says so
        tokens = PromptTokens.of(call.input_ids, call.attention_mask)
        self._require_positions(tokens, call.position_ids)
        assert self.translator is not None
        prompt = match_rows(self.codes.head, tokens, call.most)
        if prompt is None:
            coded = ", ".join(str(row.tokens) for row in self.codes.head.rows)
            lengths = ", ".join(str(len(ids)) for ids in tokens.rows())
            raise ConfigError(
                f"codes: they are of another prompt (rows of {coded} tokens) than the one that came (rows of {lengths}). Encode this "
                "prompt, with the same tokens and chat template, or use another cache for it. A prompt is fed whole: not shorter than it "
                "was coded, nor in chunks that are shorter."
            )
        if prompt.slots <= max(prompt.padding):
            raise ConfigError(
                "codes: a row of the prompt begins behind the last token that all rows have of the codes. Encode the whole batch, or give "
                "rows of such different lengths a cache each."
            )
        self.identity_of_pass(tokens.ids.shape[1])
        self.translator.check_consumer(self.model, self.confirmed_identity())
        slots = prompt.slots
        filled = PromptTokens.of(tokens.ids[:, :slots], tokens.real[:, :slots]).to(compat.input_device(self.model))
        fill(self, self.codes.head, prompt, filled, self._parts())
        self._translated = sum(slots - pad for pad in prompt.padding)
        self._token_numbers = sum(tensor.shape[1] * tensor.shape[3] for layer in self.layers for tensor in layer.owned_tensors().values())
        self.take(slots)
        return slots

    def _require_positions(self, tokens: PromptTokens, position_ids: torch.Tensor | None) -> None:
        """Refuses a prompt whose tokens the model numbers otherwise than those that were coded."""
        slots = torch.arange(tokens.ids.shape[1], device=tokens.ids.device)
        given = slots if position_ids is None else position_ids.to(slots.device)
        same = given.ndim <= 2 and bool(((given == tokens.positions) | ~tokens.real).all())
        if self.rotation.positions_matter and not same:
            raise UnsupportedError(
                "position_ids: codes are of tokens that are counted without padding, and the model would count otherwise. Pass "
                "position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0), as generate does, here and with the tokens that follow."
            )

    def _parts(self) -> Iterator[Part]:
        """All parts; those that came are kept, so that the cache can be filled again, also where a filling was broken off."""
        codes = self.codes
        assert codes is not None
        yield from tuple(self._arrived)
        if isinstance(codes, SemanticCodes):
            yield from codes
            return
        if len(self._arrived) < len(codes.head.parts):
            for part in codes:
                self._arrived.append(part)
                yield part
        self.codes, self._arrived = SemanticCodes(codes.head, self._arrived), []

    def report(self) -> TranslatedReport:
        fields = self._report_fields()
        if self.codes is None or self.translator is None or not self._translated:
            return TranslatedReport(**fields, translated=self._translated)
        head = self.codes.head
        return TranslatedReport(
            **fields,
            translated=self._translated,
            payload_bytes=head.nbytes,
            payload_share=head.nbytes / (2 * self._token_numbers * head.tokens),
            run_layers=self.translator.settings.recompute_layers,
            patched=self.translator.patched_layers,
        )

    def reset(self) -> None:
        super().reset()
        self._translated = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo |= {id(each): each for each in (self.translator, self.codes, self.rotation, self._arrived)}
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        # Elsewhere the cache goes on with what it has.
        return {**super().__getstate__(), "translator": None, "codes": None, "_arrived": []}
