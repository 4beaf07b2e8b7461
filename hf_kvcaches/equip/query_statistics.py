"""`QueryStatistics`: mean and covariance of a model's queries, for `ExpectedAttentionPolicy`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import nn
from tqdm import tqdm

from hf_kvcaches import compat
from hf_kvcaches.codec.moments import Moments
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.hub import Artifact
from hf_kvcaches.equip.policies.base import Policy
from hf_kvcaches.equip.tokens import Tokens
from hf_kvcaches.errors import ConfigError, whole_number
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.evaluate.texts import Tokenized, sequences
from hf_kvcaches.reuse.partial import run_module

_SINKS = 4


class LayerQueries(NamedTuple):
    """The queries of one layer before their rotation, and what attention multiplies scores with."""

    mean: torch.Tensor  # (heads, head_dim)
    covariance: torch.Tensor  # (heads, head_dim, head_dim)
    scaling: torch.Tensor  # ()


@dataclass(frozen=True, eq=False, repr=False)
class QueryStatistics(Artifact):
    """Mean and covariance of a model's queries before their rotation, for each layer and query head.

    Args:
        layers: By layer index; layers without full attention have none.
        tokens: How many tokens they were measured on.
        fingerprint: The model that they are for.
    """

    artifact_type: ClassVar[str] = "query-statistics"
    format_version: ClassVar[int] = 1

    layers: Mapping[int, LayerQueries]
    tokens: int
    fingerprint: ModelFingerprint | None = None

    @classmethod
    def calibrate(
        cls, model: nn.Module, tokenizer: Any, texts: Iterable[str | Sequence[int]], *, block: int = 512, progress: bool = True
    ) -> QueryStatistics:
        """Measures the queries of a model on texts, in one forward pass over each.

        Args:
            model: A transformers model that `EquipCache` supports, also inside a PEFT wrapper. It is left unchanged.
            tokenizer: Its tokenizer; None if all texts are token ids.
            texts: Strings, or lists of token ids, like those that the model will read.
            block: Texts are cut into sequences of at most so many tokens. The queries of the first 4 tokens of each are left out.
            progress: Whether to show a bar.
        """
        from hf_kvcaches.equip.cache import EquipCache

        base, encoder, moments, tokens = compat.base_model(model), Tokenized(tokenizer), _QueryMoments(), 0
        block = whole_number("block", block, _SINKS + 1)
        cache = EquipCache(base, moments, block, sinks=_SINKS, recent=1, positions="original")
        with evaluating(base), torch.no_grad():
            parts = (part for text in sequences(texts, encoder, base) for part in text.split(block) if len(part) > _SINKS)
            for ids in tqdm(parts, unit=" sequences", desc="Calibrating", disable=not progress):
                cache.reset()
                run_module(base.base_model, cache, ids[None].to(compat.input_device(base)))
                tokens += len(ids)
        if not tokens:
            raise ConfigError.of("texts", f"a text of more than {_SINKS} tokens", "none")
        fingerprint = ModelFingerprint.of(model, tokenizer if encoder.used else None)
        return cls({index: moments.layer(index) for index in sorted(moments.sums)}, tokens, fingerprint)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{index}.{name}": tensor for index, layer in self.layers.items() for name, tensor in layer._asdict().items()}

    def metadata(self) -> dict[str, Any]:
        return {"layers": list(self.layers), "tokens": self.tokens}

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Self:
        layers = {index: LayerQueries(*(tensors[f"{index}.{name}"] for name in LayerQueries._fields)) for index in metadata["layers"]}
        return cls(layers, metadata["tokens"])

    def describe_calibration(self) -> str:
        return f"{self.tokens:,} tokens, {len(self.layers)} layers."

    def __repr__(self) -> str:
        return f"QueryStatistics({self.tokens:,} tokens, model {self.fingerprint})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # never changed, and shared by copies of a cache


class _QueryMoments(Policy):
    """Sums moments of [1, query] over the queries of each block, and scores nothing."""

    sees_block = mixes_heads = True

    def __init__(self) -> None:
        self.sums: dict[int, tuple[Moments, float]] = {}

    def score(self, tokens: Tokens) -> torch.Tensor:
        queries = tokens.unrotated_queries()[0, :, tokens.counted_queries()[0]].double()
        rows = torch.cat([torch.ones_like(queries[..., :1]), queries], -1)  # (heads, tokens, 1 + head_dim)
        sums = Moments(rows.shape[:1], rows.shape[-1], rows.device), tokens.scaling
        self.sums.setdefault(int(getattr(tokens.module, "layer_idx", -1)), sums)[0].add(rows)
        return torch.zeros(tokens.positions.shape, device=rows.device)

    def layer(self, index: int) -> LayerQueries:
        moments, scaling = self.sums[index]
        mean, second = moments.mean.cpu()[:, :, 1:].split([1, moments.total.shape[-1] - 1], 1)
        return LayerQueries(mean[:, 0].float(), (second - mean.mT * mean).float(), torch.tensor(scaling))
