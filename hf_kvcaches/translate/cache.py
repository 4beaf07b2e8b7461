"""`TranslatedCache`: a prompt that another model has read is not prefilled again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.prompt import PrefillCall, Stage
from hf_kvcaches.core.refusal import Refusal
from hf_kvcaches.core.report import CacheReport
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_instance
from hf_kvcaches.reuse.cache import SplicingCache
from hf_kvcaches.translate.codes import ArrivingCodes, CodesHead, SemanticCodes
from hf_kvcaches.translate.filling import CodedPrompt, Filling, match_rows
from hf_kvcaches.translate.states import PromptTokens
from hf_kvcaches.translate.translator import CacheTranslator


@dataclass(frozen=True)
class TranslatedReport(CacheReport):
    """What a `TranslatedCache` holds, and which of it was rebuilt.

    Args:
        translated: Tokens whose keys and values were rebuilt, in all rows; 0 where the model ran the prompt.
        payload_bytes: Of the messages. 0, like the fields below, in a cache that was unpickled or loaded: codes are not stored.
        payload_share: Their share of the coded tokens' keys and values of all layers in bfloat16.
        run_layers: How many layers the model ran on these tokens; keys and values of one more are exact.
        patched: Layers that computed keys and values from a translated input.
    """

    translated: int = 0
    payload_bytes: int = 0
    payload_share: float = 0.0
    run_layers: int = 0
    patched: tuple[int, ...] = ()


class TranslatedCache(SplicingCache):
    """Rebuilds the consumer's keys and values from codes of another model's; `generate` runs the prompt's last token only.

    Paper: Semantic Cache Distillation: Efficient State Transfer via Reuse and Selective Patching (SCD).

    **Departs from the paper**: see docs/translation.md. One code of keys and values, in the metric of what errors cost, beside the
    token's embedding as side information.

    **Refuses**: codes of other prompts, other models or other adapters; models whose keys change with the length of the text.

    **Memory per token**: as `GrowingCache`, and the codes.

    The cache is filled when the prompt comes, by `generate` or `prefill`: only then can it be compared with the coded one. A prompt that
    goes on behind the coded one is run from there. One that is shorter than the coded one is refused, and so is a pass that codes can't
    serve (with gradients, under `torch.compile`, with the logits of the whole prompt, on embeddings). The next turn of a chat can come
    as codes, too: `add` takes them.

    Args:
        consumer: The model that the translator was fitted for.
        translator: The one that made the codes.
        codes: In memory, or still arriving.
        decode_with: A new cache of the consumer that holds the tokens once the prompt is answered; None to keep them all here.
    """

    translator: CacheTranslator | None = None
    # Rebuilt tokens, the numbers that the keys and values of one have in all layers, and the messages that they came in.
    _translated = 0
    _token_numbers = 0
    _used = 0

    def __init__(
        self, consumer: Any, translator: CacheTranslator, codes: SemanticCodes | ArrivingCodes, *, decode_with: KVCache | None = None
    ) -> None:
        hint = "Pass CacheTranslator.from_pretrained(...)."
        require_instance("translator", translator, CacheTranslator, {"consumer": consumer, "codes": codes}, hint)
        translator.check_consumer(consumer)
        self.translator = translator
        self.messages: list[SemanticCodes | ArrivingCodes] = []
        super().__init__(consumer, decode_with=decode_with)
        self.add(codes)

    @property
    def codes(self) -> SemanticCodes | ArrivingCodes | None:
        """The codes that the next prompt is rebuilt from."""
        return self.messages[self._used] if self._used < len(self.messages) else None

    def add(self, codes: SemanticCodes | ArrivingCodes) -> None:
        """Take the codes of the next turn of a chat.

        Args:
            codes: Of the whole text, with codes of the tokens behind this cache's at least: `translator.encode(..., first=cache.seen)`.
        """
        if not isinstance(codes, SemanticCodes | ArrivingCodes):
            hint = "Pass SemanticCodes.from_bytes(data)." if isinstance(codes, bytes) else "Pass what translator.encode gave."
            raise ConfigError.of("codes", "SemanticCodes or ArrivingCodes", type(codes).__name__, hint)
        if self.translator is None or self.stage is Stage.HANDED_OVER or self.codes is not None:
            raise UnsupportedError(
                "add: expected a cache that has used its codes, keeps its tokens and knows its translator. Feed it the prompt that was "
                "coded before, leave out decode_with, and make a new one in place of one that was loaded."
            )
        self.translator.check_codes(codes.head)
        self.messages.append(codes)

    def settings(self) -> dict[str, Any]:
        return {"translated": self._translated}

    @classmethod
    def rebuild(cls, model: Any, settings: dict[str, Any]) -> Self:
        # A file holds tokens without their codes.
        cache = cls.__new__(cls)
        SplicingCache.__init__(cache, model)
        cache.messages, cache._translated = [], int(settings["translated"])
        return cache

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        if self.codes is None:
            raise UnsupportedError("prefill: the cache has used its codes, or has none. reset() it, add() the next ones, or run the model.")
        return super().prefill(input_ids, attention_mask)

    def read_prompt(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        # With the last token the model takes all others from the codes; without it, it would run the last of these.
        self.read(input_ids, attention_mask)
        self.crop(-1)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.codes is not None and self.stage is not Stage.FILLING:
            unserved = "Pass the input_ids of the whole prompt, with logits_to_keep=1 as generate does."
            raise UnsupportedError(
                "TranslatedCache: the cache is still to be filled from its codes, and this call of the model can't be served by them. "
                f"{self.reason or unserved} Or call cache.prefill(input_ids) first and go on behind it."
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def take_prefill(self, call: PrefillCall) -> int:
        codes = self.codes
        if codes is None:
            return 0
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            self.reason = "Gradients are enabled, or the pass is compiled. Call the model under torch.no_grad(), and not compiled."
            return 0  # `update` raises with this reason
        assert self.translator is not None
        seen, tokens = self.seen, self._whole_text(call)
        prompt = self._match(codes.head, tokens, seen + call.most)
        self.translator.check_consumer(self.model, self.provenance.identity)
        slots = prompt.slots
        filled = PromptTokens.of(tokens.ids[:, :slots], tokens.real[:, :slots]).to(compat.input_device(self.model))
        Filling(self, self.translator, codes.head, prompt, filled).run(codes)
        self._translated += sum(slots - max(seen, padding) for padding in prompt.padding)
        self._token_numbers = sum(tensor.shape[1] * tensor.shape[3] for layer in self.layers for tensor in layer.owned_tensors().values())
        self._used, self.reason = self._used + 1, ""
        self.take(slots)
        return slots - seen

    def _whole_text(self, call: PrefillCall) -> PromptTokens:
        """The tokens in the cache and those of a call."""
        length = self.seen + call.input_ids.shape[1]
        padding = self.log.padding(length)
        if isinstance(padding, Refusal):
            raise UnsupportedError(
                f"codes: they can't be compared with this prompt. {padding} Pad rows on the left, with attention_mask, and pass "
                "position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0), as generate does, here and with the tokens that follow."
            )
        return PromptTokens.of(self.log.ids.cpu(), torch.arange(length)[None] >= torch.tensor(padding)[:, None])

    def _match(self, head: CodesHead, tokens: PromptTokens, most: int) -> CodedPrompt:
        """Return which codes the rows of a batch are rebuilt from."""
        prompt = match_rows(head, tokens, most, self.seen)
        if prompt is None:
            coded, lengths = (", ".join(map(str, counts)) for counts in ([row.tokens for row in head.rows], map(len, tokens.rows())))
            raise ConfigError(
                f"codes: they are of another prompt (rows of {coded} tokens) than the one that came (rows of {lengths}). Encode this "
                f"prompt, with the same tokens and chat template, and first=cache.seen ({self.seen}) or less, or use another cache for it. "
                "A prompt is fed whole: not shorter than it was coded, nor in chunks that are shorter."
            )
        if prompt.slots <= max(self.seen, *prompt.padding):
            raise ConfigError(
                "codes: left padding makes one row start at or behind the slot where another row's codes end. Encode the whole batch, or "
                "use one cache for each row."
            )
        return prompt

    def report(self) -> TranslatedReport:
        fields = self._report_fields()
        if self.translator is None or not self._translated:
            return TranslatedReport(**fields, translated=self._translated)
        heads = [message.head for message in self.messages[: self._used]]
        sent = sum(head.nbytes for head in heads)
        return TranslatedReport(
            **fields,
            translated=self._translated,
            payload_bytes=sent,
            payload_share=sent / (2 * self._token_numbers * sum(head.tokens for head in heads)),
            run_layers=self.translator.settings.recompute_layers,
            patched=self.translator.patched_layers,
        )

    def reset(self) -> None:
        super().reset()
        self._translated = self._used = 0
        del self.messages[1:]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo |= {id(shared): shared for shared in (self.translator, self.rotation, *self.messages)}
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        if self.codes is not None:
            raise UnsupportedError(
                "pickle: the cache is still to be filled from its codes. Send these instead, or call cache.prefill first."
            )
        # Another process goes on with the tokens.
        return {**super().__getstate__(), "translator": None, "messages": [], "_used": 0}
