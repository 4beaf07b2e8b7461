"""`QueryStatistics`: mean and covariance of a model's queries, for `ExpectedAttentionPolicy`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from hf_kvcaches.codec.moments import Moments
from hf_kvcaches.core.rope import rotation_of
from hf_kvcaches.equip.calibrated.corpus import SINKS, Corpus, LayerArtifact
from hf_kvcaches.errors import whole_number
from hf_kvcaches.evaluate.observer import Attended, WatchingCache
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.reuse.partial import run_module


class LayerQueries(NamedTuple):
    """The queries of one layer before their rotation, and what attention multiplies scores with."""

    mean: torch.Tensor  # (heads, head_dim)
    covariance: torch.Tensor  # (heads, head_dim, head_dim)
    scaling: torch.Tensor  # ()


@dataclass(frozen=True, eq=False, repr=False)
class QueryStatistics(LayerArtifact):
    """Mean and covariance of a model's queries before their rotation, for each layer and query head.

    Args:
        layers: By layer index; layers without full attention have none.
        tokens: How many tokens they were measured on.
        fingerprint: The model that they are for.
    """

    artifact_type: ClassVar[str] = "query-statistics"
    entry: ClassVar[Any] = LayerQueries

    @classmethod
    def calibrate(
        cls, model: nn.Module, tokenizer: Any, texts: Iterable[str | Sequence[int]], *, block: int = 512, progress: bool = True
    ) -> QueryStatistics:
        """Measure the queries of a model on texts, in one forward pass over each.

        Args:
            model: A transformers model that `EquipCache` supports, also inside a PEFT wrapper. It is left unchanged.
            tokenizer: Its tokenizer; None if all texts are token ids.
            texts: Strings, or lists of token ids, like those that the model will read.
            block: Texts are cut into sequences of at most so many tokens. The queries of the first 4 tokens of each are left out.
            progress: Whether to show a bar.
        """
        block = whole_number("block", block, SINKS + 1)
        corpus = Corpus(model, tokenizer, texts, SINKS + 1, progress, block)
        cache = _QueryMoments(corpus.base)
        with evaluating(corpus.base), torch.no_grad():
            for ids in corpus:
                cache.reset()
                run_module(corpus.base.base_model, cache, ids[None])
        return cls({index: cache.layer(index) for index in sorted(cache.sums)}, corpus.tokens, corpus.fingerprint())


class _QueryMoments(WatchingCache):
    """Sums moments of [1, query] over the queries of each pass."""

    def __init__(self, model: Any) -> None:
        self.sums: dict[int, tuple[Moments, float]] = {}
        super().__init__(model)

    def watch(self, attended: Attended) -> None:
        queries, geometry = attended.query[:1], rotation_of(self.config).layers[attended.layer_idx].at(attended.query.shape[2] - 1)
        if geometry.kind == "rope" and geometry.refusal is None:
            queries = geometry.unrotate(queries, torch.arange(queries.shape[2], device=queries.device))
        rows = torch.nn.functional.pad(queries[0, :, SINKS:].double(), (1, 0), value=1.0)  # (heads, tokens, 1 + head_dim)
        sums = Moments(rows.shape[:1], rows.shape[-1], rows.device), attended.scaling
        self.sums.setdefault(attended.layer_idx, sums)[0].add(rows)

    def layer(self, index: int) -> LayerQueries:
        moments, scaling = self.sums[index]
        mean, second = moments.mean.cpu()[:, :, 1:].split([1, moments.total.shape[-1] - 1], 1)
        return LayerQueries(mean[:, 0].float(), (second - mean.mT * mean).float(), torch.tensor(scaling))
