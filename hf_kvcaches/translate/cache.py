"""`TranslatedCache`: a prompt that another model has read needs no prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.prompt import PrefillCall, Stage
from hf_kvcaches.core.refusal import Refusal
from hf_kvcaches.core.report import CacheReport
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_instance
from hf_kvcaches.reuse.layer import SplicingCache
from hf_kvcaches.translate.codes import ArrivingCodes, CodesHead, SemanticCodes
from hf_kvcaches.translate.fill import CodedPrompt, fill, match_prompts
from hf_kvcaches.translate.states import PromptTokens
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


class _Filled(NamedTuple):
    """What was filled in since the cache was empty: tokens, bytes of messages, and bytes of the coded keys and values in bfloat16."""

    translated: int = 0
    payload_bytes: int = 0
    plain_bytes: int = 0


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

    def __init__(
        self, consumer: Any, translator: CacheTranslator | None, codes: Codes | None = None, *, decode_with: KVCache | None = None
    ) -> None:
        if translator is not None or codes is not None:
            hint = "Pass CacheTranslator.from_pretrained(...)."
            require_instance("translator", translator, CacheTranslator, {"consumer": consumer, "codes": codes}, hint)
        if translator is not None:
            translator.check_consumer(consumer)
        self.translator, self._first_codes, self._filled = translator, codes, _Filled()
        self.codes: Codes | None = None
        super().__init__(consumer, decode_with=decode_with)
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
        self._filled, self.codes = _Filled(), None
        self._first_codes = codes or self._first_codes
        if self._first_codes is not None:
            self.add(self._first_codes)

    def settings(self) -> dict[str, Any]:
        return {"translated": self._filled.translated}

    @classmethod
    def rebuild(cls, model: Any, settings: dict[str, Any]) -> Self:
        cache = cls(model, None)  # a file holds tokens without their codes
        cache._filled = _Filled(int(settings["translated"]))
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
        prompt = self._match(codes.head, text, seen + call.most)
        translator.check_consumer(self.model, self.provenance.identity)
        fill(self, translator, codes, prompt, text.first(prompt.slots).to(compat.input_device(self.model)))
        self._count(codes, prompt)
        self.codes, self.reason = None, ""
        self.take(prompt.slots)
        return prompt.slots - seen

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

    def _match(self, head: CodesHead, text: PromptTokens, most: int) -> CodedPrompt:
        """Return which codes the rows of a batch are rebuilt from."""
        assert self.translator is not None
        prompt = match_prompts(head, text, most, self.seen, self.translator.settings.exact_tokens)
        if prompt is None:
            coded, lengths = (", ".join(map(str, counts)) for counts in ([each.tokens for each in head.prompts], map(len, text.rows())))
            raise ConfigError(
                f"codes: they are of another prompt (rows of {coded} tokens) than the one that came (rows of {lengths}). Encode this "
                f"prompt, with the same tokens and chat template, and first=cache.seen ({self.seen}) or less, or use another cache for it. "
                "Neither the prompt nor its first chunk may be shorter than what was coded."
            )
        if prompt.slots <= max(self.seen, *prompt.padding):
            raise ConfigError(
                "codes: left padding makes one row start at or after the slot where another row's codes end. Encode the whole batch, or "
                "use one cache for each row."
            )
        return prompt

    def _count(self, codes: Codes, prompt: CodedPrompt) -> None:
        numbers = sum(tensor.shape[1] * tensor.shape[3] for layer in self.layers for tensor in layer.owned_tensors().values())
        covered = sum(coded.tokens - (coded.first if prompt.seen else 0) for coded in codes.head.prompts)
        new = sum(prompt.slots - max(prompt.seen, padding) for padding in prompt.padding)
        tokens, payload, plain = self._filled
        self._filled = _Filled(tokens + new, payload + codes.nbytes, plain + 2 * numbers * covered)

    def report(self) -> TranslatedReport:
        translated, payload, plain = self._filled
        fields = self._report_fields() | {"translated": translated}
        if self.translator is None or not plain:
            return TranslatedReport(**fields)
        layers = self.translator.settings.recompute_layers
        return TranslatedReport(**fields, payload_bytes=payload, payload_share=payload / plain, run_layers=layers)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo |= {id(shared): shared for shared in (self.rotation, self.codes, self._first_codes)}
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        if self.codes is not None:
            raise UnsupportedError("pickle: the cache is still to be filled from its codes. Send these, or call cache.prefill first.")
        return {**super().__getstate__(), "translator": None, "_first_codes": None, "_filled": _Filled(self._filled.translated)}
