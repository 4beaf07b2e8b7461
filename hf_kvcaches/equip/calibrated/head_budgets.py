"""`HeadBudgets`: how many of a model's slots each of its heads gets."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.hub import Artifact
from hf_kvcaches.equip.budgets import Candidates, compared, protected, slots_for
from hf_kvcaches.equip.calibrated.corpus import SINKS, Corpus, asked_before, attention_modules, reconstruction_scores
from hf_kvcaches.equip.policies.kvzip import KVZipPolicy
from hf_kvcaches.errors import ConfigError, is_number, require_choice
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.evaluate.runner import evaluating

# By ablation: the tokens that a head keeps beside sinks, those that are predicted, and what a quarter of the heads and the others get.
_RECENT, _ANSWER, _MOST, _LEAST = 64, 32, 2.5, 0.5


@dataclass(frozen=True, eq=False, repr=False)
class HeadBudgets(Artifact):
    """The share of slots that each KV head of a model gets, for `EquipCache(head_budgets=...)`.

    Few heads recall, and these are the same whatever the text is. So budgets can be measured once, and serve any score that does not
    compare between heads; shapes do not depend on the text.

    Args:
        shares: By layer index, (kv_heads,), with the mean 1 over all heads; layers without full attention have none.
        tokens: How many tokens they were measured on.
        fingerprint: The model that they are for.
    """

    artifact_type: ClassVar[str] = "head-budgets"
    format_version: ClassVar[int] = 1

    shares: Mapping[int, torch.Tensor]
    tokens: int = 0
    fingerprint: ModelFingerprint | None = None

    @classmethod
    def calibrate(
        cls,
        model: nn.Module,
        tokenizer: Any,
        texts: Iterable[str | Sequence[int]],
        *,
        by: str = "kvzip",
        ratio: float = 0.25,
        progress: bool = True,
    ) -> HeadBudgets:
        """Measure the heads of a model on texts.

        Args:
            model: A transformers model that `EquipCache` supports, also inside a PEFT wrapper. It is left unchanged.
            tokenizer: Its tokenizer; None if all texts are token ids.
            texts: Strings, or lists of token ids, like those that the model will read; six of some 600 tokens are enough.
            by: "kvzip": the mean share that a head gets where KVzip's scores of all heads and layers share one budget. "ablation", as in
                DuoAttention (arXiv 2410.10819), but without training: one head at a time forgets all but 4 sinks and 64 recent tokens;
                the quarter of the heads whose loss changes the predictions of a text's last 32 tokens most gets five times as much as
                the others. Texts should end in what depends on tokens far before.
            ratio: For "kvzip", the share of the tokens that stays.
            progress: Whether to show a bar.
        """
        require_choice("by", by, ("kvzip", "ablation"))
        if not is_number(ratio) or not 0 < ratio < 1:
            raise ConfigError.of("ratio", "a number between 0 and 1", ratio)
        least = math.ceil(2 * (SINKS + 1) / ratio) if by == "kvzip" else SINKS + _RECENT + _ANSWER + 1
        corpus, sums = Corpus(model, tokenizer, texts, least, progress), dict[int, torch.Tensor]()
        with evaluating(corpus.base), torch.no_grad():
            for ids in corpus:
                measured = _shares(corpus.base, ids, ratio) if by == "kvzip" else _costs(corpus.base, ids)
                for index, numbers in measured.items():
                    sums[index] = sums.get(index, 0) + numbers.cpu() * len(ids)
        means = torch.cat([sums[index] for index in sorted(sums)])
        if by == "ablation":
            best = means.topk(math.ceil(len(means) / 4)).indices
            means = torch.full_like(means, _LEAST).index_fill(0, best, _MOST)
        parts = (means / means.mean()).split([len(sums[index]) for index in sorted(sums)])
        return cls(dict(zip(sorted(sums), parts, strict=True)), corpus.tokens, corpus.fingerprint())

    def as_settings(self) -> dict[str, list[float]]:
        """The shares as plain values for JSON."""
        return {str(index): shares.tolist() for index, shares in self.shares.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {str(index): shares for index, shares in self.shares.items()}

    def metadata(self) -> dict[str, Any]:
        return {"layers": list(self.shares), "tokens": self.tokens}

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Self:
        return cls({index: tensors[str(index)] for index in metadata["layers"]}, metadata["tokens"])

    def describe_calibration(self) -> str:
        heads = torch.cat(list(self.shares.values()))
        return f"{self.tokens:,} tokens, {len(heads)} heads in {len(self.shares)} layers, shares of {heads.min():.2f} to {heads.max():.2f}."

    def __repr__(self) -> str:
        return f"HeadBudgets({self.tokens:,} tokens, model {self.fingerprint})"


def _shares(model: Any, ids: torch.Tensor, ratio: float) -> dict[int, torch.Tensor]:
    """Of the slots that are not protected, the share that each head gets, by layer index, (kv_heads,), with the mean 1."""
    budget, positions = slots_for(float(ratio), len(ids)), torch.arange(len(ids))[None, None]
    recent = KVZipPolicy().recent(budget, SINKS)
    scores = reconstruction_scores(model, ids)
    worths = [protected(score[None].cpu(), positions, len(ids), SINKS, recent) for score in scores.values()]
    kept = compared([Candidates(worth, budget, budget) for worth in worths])
    free = [(stays.sum(-1)[0] - SINKS - recent) / (budget - SINKS - recent) for stays, _ in kept]
    return dict(zip(scores, free, strict=True))


def _costs(model: Any, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """The divergence of the last tokens' predictions when one head has forgotten the middle, by layer index, (kv_heads,)."""
    context, heads = DynamicCache(config=model.config), compat.decoder_config(model.config).num_attention_heads
    _predictions(model, context, ids[:-_ANSWER])
    expected = _predictions(model, copy.deepcopy(context), ids[-_ANSWER:])
    column, least = torch.arange(len(ids), device=ids.device), torch.finfo(model.dtype).min
    causal = torch.zeros(heads, _ANSWER, len(ids), dtype=model.dtype, device=ids.device)
    causal.masked_fill_(column > column[-_ANSWER:, None], least)
    middle, costs = (column >= SINKS) & (column < len(ids) - _ANSWER - _RECENT), {}
    for index, module in attention_modules(model).items():
        costs[index] = torch.zeros(context.layers[index].keys.shape[1])
        for head, queries in enumerate(torch.arange(heads).chunk(len(costs[index]))):
            mask = causal.clone()
            mask[queries] = mask[queries].masked_fill(middle, least)
            hook = lambda _, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask[None]})  # noqa: E731
            with asked_before([module], hook):
                costs[index][head] = divergence(expected, _predictions(model, copy.deepcopy(context), ids[-_ANSWER:])).mean()
    return costs


def _predictions(model: Any, cache: DynamicCache, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids[None], **compat.cache_kwargs(model, cache)).logits
    return logits
