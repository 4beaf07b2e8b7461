"""`TranslatedCache`: a prompt that another model has read need not be read again."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.growing import GrowingLayer
from hf_kvcaches.core.prefill import PrefillCall
from hf_kvcaches.core.report import CacheReport
from hf_kvcaches.core.source import SourceCache
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_instance
from hf_kvcaches.kernels.rebuild import Decoder
from hf_kvcaches.translate.arriving import ArrivingCodes
from hf_kvcaches.translate.codes import Part, SemanticCodes
from hf_kvcaches.translate.filling import Filling, on_device, place
from hf_kvcaches.translate.maps import LayerDecoder
from hf_kvcaches.translate.states import PromptTokens
from hf_kvcaches.translate.translator import CacheTranslator

# What is made of a translator for a device, for all caches. Not in the translator, which is saved and copied.
_weights: weakref.WeakKeyDictionary[Any, dict[Any, Decoder]] = weakref.WeakKeyDictionary()


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


class TranslatedCache(SourceCache):
    """Starts from what another model has read: codes of its keys and values become the consumer's own, and `generate` runs the last token.

    Paper: Semantic Cache Distillation: Efficient State Transfer via Reuse and Selective Patching (SCD).

    **Departs from the paper**: see docs/translation.md. One code for keys and values, measured where errors cost, with what the consumer
    knows of each token for nothing.

    **Refuses**: codes of other prompts, other models or other adapters; models whose keys change with the length of the text.

    **Memory per token**: as `GrowingCache`. Codes are let go once they are used.

    The cache is filled when the prompt comes, by `generate` or `prefill`: only then can it be compared with the one that was coded. A
    prompt that goes on behind the coded one is run from there; one that has too little of it is run by the model, with a warning. A pass
    that codes can't serve (with gradients, under `torch.compile`, with the logits of the whole prompt, on embeddings) is refused while the
    cache is empty.

    Args:
        consumer: The model that the translator was fitted for.
        translator: That made the codes.
        codes: In memory, or still arriving.
        decode_with: A new cache of the consumer that holds the tokens once the prompt is answered; None to keep them all here.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA, and a cache without codes.
    """

    def __init__(
        self,
        consumer: Any,
        translator: CacheTranslator | None,
        codes: SemanticCodes | ArrivingCodes | None,
        *,
        decode_with: KVCache | None = None,
        offloading: bool = False,
    ) -> None:
        if translator is not None:
            hint = "Pass CacheTranslator.from_pretrained(...)."
            require_instance("translator", translator, CacheTranslator, {"consumer": consumer, "codes": codes}, hint)
        if codes is not None and not isinstance(codes, SemanticCodes | ArrivingCodes):
            hint = "Pass SemanticCodes.from_bytes(data)." if isinstance(codes, bytes) else "Pass what translator.encode gave."
            raise ConfigError.of("codes", "SemanticCodes or ArrivingCodes", type(codes).__name__, hint)
        if (translator is None) != (codes is None):
            raise ConfigError("translator, codes: expected both, got one of them. Only the translator that made codes can read them.")
        if offloading and codes is not None:
            raise UnsupportedError("offloading: codes are written into all layers at once. Leave it out.")
        if translator is not None and codes is not None:
            translator.check_consumer(consumer)
            translator.check_codes(codes.head)
        self.translator, self.codes = translator, codes
        self._translated = 0
        # How many numbers a token's keys and values are, in all layers.
        self._token_numbers = 0
        # Whether the codes are of no use for the prompt that came.
        self._unserved = False
        # Parts of codes that are still arriving: each comes once, and copies of this cache want it too.
        self._arrived: list[Part] = []
        super().__init__(consumer, decode_with=decode_with, offloading=offloading)

    def make_layer(self, layer_idx: int) -> GrowingLayer:
        return GrowingLayer()

    def settings(self) -> dict[str, Any]:
        return {"translated": self._translated}

    @classmethod
    def rebuild(cls, model: Any, settings: dict[str, Any], shared: dict[str, torch.Tensor]) -> Self:
        cache = cls(model, None, None)
        cache._translated = int(settings["translated"])
        return cache

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Does by hand what `generate` does with a prompt: fills the cache with all tokens but the last, or as many as were coded.

        Args:
            input_ids: The whole prompt, (batch, tokens).
            attention_mask: 1 where a token is real, or None.

        Returns:
            How many tokens the cache has now. Go on with the others, or with `generate(input_ids, ...)`.
        """
        if self.holder is not None:
            raise UnsupportedError("prefill: with decode_with, the pass that answers the prompt hands it over. Use generate.")
        if self.codes is None or self.seen:
            raise UnsupportedError("prefill: the cache has tokens already, or no codes. reset() it, or make one with codes.")
        tokens = PromptTokens.of(input_ids, attention_mask)
        try:
            self.filling = True
            with torch.no_grad():
                taken = self._take(tokens, tokens.ids.shape[1] - 1)
            self.filling = False
        except BaseException:
            self.abandon_prefill(0)
            raise
        return taken

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if (
            self.codes is not None
            and not (self.filling or self._unserved)
            and self.source_layers[layer_idx].seen == 0
            and not self.handed_over
        ):
            raise UnsupportedError(
                "TranslatedCache: the cache is still to be filled from its codes, and this call of the model can't be served by them. Pass "
                "input_ids, under torch.no_grad() and not compiled, with logits_to_keep=1 as generate does; or call "
                "cache.prefill(input_ids) first and go on behind it."
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> None:
        super().observe(input_ids, attention_mask, position_ids)
        if input_ids.shape[1] == 1 and not self.seen and self.codes is not None:
            self._leave_to_model("a prompt of one token has nothing before it")

    def take_prefill(self, call: PrefillCall) -> int:
        if self.codes is None or self.seen or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return 0  # where codes are left out, `update` says so
        tokens = PromptTokens.of(call.input_ids, call.attention_mask)
        self._require_positions(tokens, call.position_ids)
        return self._take(tokens, call.most)

    def abandon_prefill(self, seen: int) -> None:
        # What came so far is of no use, and half a prompt must not be taken for one.
        self.reset()

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

    def _take(self, tokens: PromptTokens, most: int) -> int:
        """Fills the cache with a prompt as far as it was coded."""
        assert self.codes is not None
        assert self.translator is not None
        placed = place(self.codes.head, tokens)
        if placed is None:
            coded = ", ".join(str(row.tokens) for row in self.codes.head.rows)
            raise ConfigError(
                f"codes: they are of another prompt (rows of {coded} tokens) than the one that came. Encode this prompt, with the same "
                "tokens and chat template, or use another cache for it."
            )
        places, slots = placed[0], min(placed[1], most)
        if slots <= max(places.padding):
            self._leave_to_model("a row of the prompt begins behind what all rows have of the codes, or is a short piece of what was coded")
            return 0
        self.identity_of_pass(tokens.ids.shape[1])
        self.translator.check_consumer(self.model, self.confirmed_identity())
        filled = PromptTokens.of(tokens.ids[:, :slots], tokens.real[:, :slots])
        Filling(self, filled.to(compat.input_device(self.model)), places).fill(self.codes.head, self._parts())
        self._translated = sum(slots - pad for pad in places.padding)
        self._token_numbers = sum(tensor.shape[1] * tensor.shape[3] for layer in self.layers for tensor in layer.owned_tensors().values())
        return slots

    def _leave_to_model(self, why: str) -> None:
        warnings.warn(f"TranslatedCache: the model runs the prompt itself, because {why}.", RuntimeWarning, stacklevel=2)
        self._unserved = True

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

    def weights_of(self, decoder: LayerDecoder, device: torch.device) -> Decoder:
        """A decoder's weights on a layer's device.

        Args:
            decoder: Of the translator.
            device: Of the layer.
        """
        kept, key = _weights.setdefault(self.translator, {}), (decoder.layer, device, self.model.dtype)
        if key not in kept:
            kept[key] = on_device(decoder.weights, device, self.model.dtype)
        return kept[key]

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
        self._unserved = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo |= {id(each): each for each in (self.translator, self.codes, self.rotation, self._arrived)}
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        # Elsewhere the cache goes on with what it has.
        return {**super().__getstate__(), "translator": None, "codes": None, "_arrived": []}
