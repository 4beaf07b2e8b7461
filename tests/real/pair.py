"""SmolLM2 and a fine-tune of it on verse (`scripts/tune_smollm2.py`), translators between them, and what is measured of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_kvcaches import CacheTranslator, TranslatedCache, TranslatorConfig
from hf_kvcaches.cli.prompts import needle_prompts
from hf_kvcaches.core.identity import require_identity
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.translate.fit import Fitting
from hf_kvcaches.translate.pair import Pair
from tests import testbed

MODELS = Path(__file__).resolve().parents[2] / ".models"
PRODUCER, CONSUMER = "smollm2", "smollm2-verse"
TEXT_TOKENS, PROMPT_TOKENS, FOLLOWING = 512, 300, 24
# Of the verse, the first half is trained on, and of both kinds of text the last fifth is measured on.
TRAINED, CALIBRATED = 0.5, 0.8


class RealPair:
    """Both models in float32, and one reading of calibration texts for translators of all settings.

    Args:
        tokens: That both models read for calibration.
        lowest: The numbers of layers that the consumer may run.
    """

    def __init__(self, tokens: int = 16384, lowest: Sequence[int] = (0, 1)) -> None:
        load = lambda name: AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()  # noqa: E731
        self.producer, self.consumer = load(PRODUCER), load(CONSUMER)
        self.tokenizer = AutoTokenizer.from_pretrained(MODELS / PRODUCER)
        self.tokens, self.lowest = tokens, lowest
        kinds = ("verse", "prose")
        self.ids = {kind: torch.tensor(self.tokenizer(testbed.held_out(kind), verbose=False)["input_ids"]) for kind in kinds}

    def calibration_texts(self) -> list[torch.Tensor]:
        """Stretches of both kinds, as many of each."""
        count = max(1, self.tokens // TEXT_TOKENS // 2)
        parts = [_part(self.ids["verse"], TRAINED, CALIBRATED), _part(self.ids["prose"], 0, CALIBRATED)]
        return [text for part in parts for text in _stretches(part, count, TEXT_TOKENS)]

    def prompts(self, count: int) -> list[torch.Tensor]:
        """Stretches of both kinds that nothing was fitted to, as many of each, with the tokens that follow."""
        return [text for ids in self.ids.values() for text in _stretches(_part(ids, CALIBRATED, 1), count, PROMPT_TOKENS + FOLLOWING)]

    @cached_property
    def fitting(self) -> Fitting:
        """What was read, and all regressions."""
        with torch.no_grad():
            pair = Pair(self.producer, self.consumer, None)
            fitting = Fitting(pair, self.calibration_texts(), TranslatorConfig(), 0.0, 0, TEXT_TOKENS, progress=False)
            fitting.lowest = list(self.lowest)
            fitting.read()
        return fitting

    def translator(self, payload: float, lowest: int = 0) -> CacheTranslator:
        """The translator of a payload, where the consumer runs its lowest layers."""
        models = (require_identity(model, "a translator").fingerprint for model in (self.producer, self.consumer))
        with torch.no_grad():
            return CacheTranslator(self.fitting.maps(lowest, payload), self.fitting.settings(lowest, payload), *models)

    def translated(self, translator: CacheTranslator) -> Callable[[torch.Tensor], Any]:
        """What makes a cache of all tokens of a prompt, (1, tokens), but the last from codes."""

        def make(ids: torch.Tensor) -> TranslatedCache:
            cache = TranslatedCache(self.consumer, translator, translator.encode(self.producer, ids))
            cache.prefill(ids)
            return cache

        return make

    def read_by(self, model: Any) -> Callable[[torch.Tensor], DynamicCache]:
        """What makes a cache of all tokens of a prompt but the last with a model's own keys and values."""

        @torch.no_grad()
        def make(ids: torch.Tensor) -> DynamicCache:
            cache = DynamicCache(config=model.config)
            model.base_model(input_ids=ids[:, :-1], past_key_values=cache)
            return cache

        return make

    @torch.no_grad()
    def logits(self, ids: torch.Tensor, prompt: int, make: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        """The consumer's logits of the tokens behind a prompt of so many, (tokens, vocabulary)."""
        cache = make(ids[None, :prompt])
        return self.consumer(input_ids=ids[None, prompt - 1 : -1], past_key_values=cache).logits[0]

    def measure(self, prompts: Sequence[torch.Tensor], make: Callable[[torch.Tensor], Any]) -> dict[str, float]:
        """The mean divergence of the tokens that follow, and what their loss grows by, in nats."""
        kls, losses = [], []
        for ids in prompts:
            found, own = self.logits(ids, PROMPT_TOKENS, make), self._own(ids)
            kls.append(float(divergence(own, found).mean()))
            losses.append(float(_loss(found, ids) - _loss(own, ids)))
        return {"kl": fmean(kls), "loss": fmean(losses)}

    def needles(self, make: Callable[[torch.Tensor], Any], count: int = 8) -> int:
        """How many answers are right of those to questions behind a context."""
        right = 0
        for prompt in needle_prompts(self.tokenizer, count, "digits", tokens=300, prose=testbed.held_out()):
            question, answer = prompt.asked[0]
            context = [*prompt.context, *question]
            ids = torch.tensor([*context, *answer])
            logits = self.logits(ids, len(context), make)
            right += logits.argmax(-1).tolist() == answer
        return right

    def _own(self, ids: torch.Tensor) -> torch.Tensor:
        held: dict[int, torch.Tensor] = self.__dict__.setdefault("_held", {})
        key = hash(tuple(ids.tolist()))
        if key not in held:
            held[key] = self.logits(ids, PROMPT_TOKENS, self.read_by(self.consumer))
        return held[key]


def _part(ids: torch.Tensor, start: float, stop: float) -> torch.Tensor:
    return ids[int(start * len(ids)) : int(stop * len(ids))]


def _stretches(ids: torch.Tensor, count: int, length: int) -> Iterator[torch.Tensor]:
    step = (len(ids) - length) // max(1, count - 1) if count > 1 else 0
    return (ids[number * step : number * step + length] for number in range(count))


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, ids[PROMPT_TOKENS:])
