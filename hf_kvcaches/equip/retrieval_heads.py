"""`RetrievalHeads`: what each head of a model loses when it sees only sinks and recent tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn
from tqdm import tqdm

from hf_kvcaches import compat
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.hub import Artifact
from hf_kvcaches.errors import ConfigError, is_number, whole_number
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.evaluate.texts import Tokenized, sequences

if TYPE_CHECKING:
    from hf_kvcaches.equip.cache import EquipCache

_SINKS = 4


@dataclass(frozen=True, eq=False, repr=False)
class RetrievalHeads(Artifact):
    """Which KV heads of a model need all tokens, for `EquipCache(head_budgets=...)`; the others do with few.

    DuoAttention (Efficient Long-Context LLM Inference with Retrieval and Streaming Heads, arXiv 2410.10819) trains a gate for each head.

    **Departs from the paper**: nothing is trained. One head at a time forgets all but sinks and recent tokens, and its cost is the
    divergence of the predictions that follow.

    Args:
        costs: By layer index, (kv_heads,), in nats; layers without full attention have none.
        tokens: How many tokens they were measured on.
        share: Of all heads with full attention, the share that keeps all tokens: those with the highest costs.
        fingerprint: The model that they are for.
    """

    artifact_type: ClassVar[str] = "retrieval-heads"
    format_version: ClassVar[int] = 1

    costs: Mapping[int, torch.Tensor]
    tokens: int
    share: float = 0.5
    fingerprint: ModelFingerprint | None = None

    @classmethod
    def calibrate(
        cls,
        model: nn.Module,
        tokenizer: Any,
        texts: Iterable[str | Sequence[int]],
        *,
        share: float = 0.5,
        answer: int = 32,
        recent: int = 64,
        progress: bool = True,
    ) -> RetrievalHeads:
        """Measures the heads of a model on texts: for each head, the end of each text is predicted once.

        Args:
            model: A transformers model that `EquipCache` supports, also inside a PEFT wrapper. It is left unchanged.
            tokenizer: Its tokenizer; None if all texts are token ids.
            texts: Strings, or lists of token ids, whose ends depend on tokens far before: documents with a question and its answer.
            share: As for the class; `at` changes it later.
            answer: The last tokens of each text, which are predicted.
            recent: Tokens before these that a head keeps beside 4 sinks. Texts that are not longer are left out.
            progress: Whether to show a bar.
        """
        base, encoder, tokens = compat.base_model(model), Tokenized(tokenizer), 0
        answer, recent = whole_number("answer", answer, 1), whole_number("recent", recent, 0)
        costs: dict[int, torch.Tensor] = {}
        with evaluating(base), torch.no_grad():
            long = (ids for ids in sequences(texts, encoder, base) if len(ids) > _SINKS + recent + answer)
            for ids in tqdm(long, unit=" texts", desc="Calibrating", disable=not progress):
                for index, cost in _costs(base, ids[None].to(compat.input_device(base)), answer, recent).items():
                    costs[index] = costs.get(index, 0) + cost * len(ids)
                tokens += len(ids)
        if not tokens:
            raise ConfigError.of("texts", f"a text of more than {_SINKS + recent + answer} tokens", "none")
        fingerprint = ModelFingerprint.of(model, tokenizer if encoder.used else None)
        return cls({index: cost / tokens for index, cost in costs.items()}, tokens, fingerprint=fingerprint).at(share)

    def at(self, share: float) -> RetrievalHeads:
        """The same costs with another share of heads that keep all tokens.

        Args:
            share: From 0 to 1.
        """
        if not is_number(share) or not 0 <= share <= 1:
            raise ConfigError.of("share", "a number from 0 to 1", share)
        return replace(self, share=float(share))

    def whole(self) -> dict[int, list[bool]]:
        """Which heads of each layer keep all tokens."""
        ranked = sorted(((float(cost), -index, -head) for index, row in self.costs.items() for head, cost in enumerate(row)), reverse=True)
        chosen = {(-index, -head) for _, index, head in ranked[: round(self.share * len(ranked))]}
        return {index: [(index, head) in chosen for head in range(len(row))] for index, row in self.costs.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {str(index): cost for index, cost in self.costs.items()}

    def metadata(self) -> dict[str, Any]:
        return {"layers": list(self.costs), "tokens": self.tokens, "share": self.share}

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Self:
        return cls({index: tensors[str(index)] for index in metadata["layers"]}, metadata["tokens"], metadata["share"])

    def describe_calibration(self) -> str:
        heads = sum(len(cost) for cost in self.costs.values())
        return f"{self.tokens:,} tokens, {heads} heads in {len(self.costs)} layers, of which {self.share:.0%} keep all tokens."

    def __repr__(self) -> str:
        return f"RetrievalHeads({self.tokens:,} tokens, share {self.share}, model {self.fingerprint})"


def _costs(model: Any, ids: torch.Tensor, answer: int, recent: int) -> dict[int, torch.Tensor]:
    """The divergence of the last tokens' predictions when one head has forgotten the middle, by layer, (kv_heads,)."""
    from hf_kvcaches.equip.cache import EquipCache
    from hf_kvcaches.equip.editing import drop
    from hf_kvcaches.equip.layer import EquipLayer

    context = ids.shape[1] - answer
    cache = EquipCache(model, "streaming", ids.shape[1], sinks=_SINKS, recent=1, positions="original")
    _predictions(model, cache, ids[:, :context])
    expected = _predictions(model, copy.deepcopy(cache), ids[:, context:])
    costs = {}
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, EquipLayer):
            continue
        held = layer.positions[0, 0]
        middle = (held >= _SINKS) & (held < context - recent)
        heads = layer.store.shape[1]
        costs[index] = torch.zeros(heads)
        for head in range(heads):
            forgetful: Any = copy.deepcopy(cache)
            gone = torch.zeros(1, heads, len(middle), dtype=torch.bool, device=middle.device)
            gone[:, head] = middle
            drop(forgetful.layers[index], gone)
            costs[index][head] = divergence(expected, _predictions(model, forgetful, ids[:, context:])).mean()
    return costs


def _predictions(model: Any, cache: EquipCache, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, **compat.cache_kwargs(model, cache)).logits
    return logits
