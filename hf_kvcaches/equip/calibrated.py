"""What is measured once for a model: `HeadBudgets`, `KeepProbe`, and `QueryStatistics` for `ExpectedAttentionPolicy`."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.codec.moments import Moments
from hf_kvcaches.core.files import Artifact
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.rope import rotation_of
from hf_kvcaches.equip.budgets import Candidates, compared, protected, slots_for
from hf_kvcaches.equip.corpus import SINKS, LayerArtifact, Watcher, attention_inputs, attention_modules, each_text, reconstruction_scores
from hf_kvcaches.equip.policies.base import Policy
from hf_kvcaches.equip.policies.future import KVZipPolicy, future_attention
from hf_kvcaches.equip.policies.tokens import UNSCORED, Tokens
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_choice, require_instance
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.evaluate.observer import Attended
from hf_kvcaches.reuse.partial import run_module

# By KVzip's scores: the share of the tokens that stays.
_RATIO = 0.25
# By ablation: the tokens that a head keeps beside sinks, those that are predicted, and what a quarter of the heads and the others get.
_RECENT, _ANSWER, _MOST, _LEAST = 64, 32, 2.5, 0.5
# Of a probe, relative to the mean variance of a hidden state's dimensions.
_RIDGE = 0.3


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
        cls, model: nn.Module, tokenizer: Any, texts: Iterable[str | Sequence[int]], *, by: str = "kvzip", progress: bool = True
    ) -> HeadBudgets:
        """Measure the heads of a model on texts.

        Args:
            model: A transformers model that `EquipCache` supports, also inside a PEFT wrapper. It is left unchanged.
            tokenizer: Its tokenizer; None if all texts are token ids.
            texts: Strings, or lists of token ids, like those that the model will read; six of some 600 tokens are enough.
            by: "kvzip": the mean share that a head gets where all heads and layers share slots for a quarter of the tokens by KVzip's
                scores. "ablation", as in DuoAttention (arXiv 2410.10819), but without training: one head at a time forgets all but 4
                sinks and 64 recent tokens; the quarter of the heads whose loss changes the predictions of a text's last 32 tokens most
                gets five times as much as the others. Texts should end in what depends on tokens far before.
            progress: Whether to show a bar.
        """
        require_choice("by", by, ("kvzip", "ablation"))
        measure, least = (_shares, int(2 * (SINKS + 1) / _RATIO)) if by == "kvzip" else (_costs, SINKS + _RECENT + _ANSWER + 1)
        sums = dict[int, torch.Tensor]()

        def add(base: Any, ids: torch.Tensor) -> None:
            for index, numbers in measure(base, ids).items():
                sums[index] = sums.get(index, 0) + numbers * len(ids)

        made = each_text(add, model, tokenizer, texts, least, progress)
        means = torch.cat([*sums.values()])
        if by == "ablation":
            best = means.topk(math.ceil(len(means) / 4)).indices
            means = torch.full_like(means, _LEAST).index_fill(0, best, _MOST)
        shares = dict(zip(sums, (means / means.mean()).split([len(own) for own in sums.values()]), strict=True))
        return cls({index: shares[index] for index in sorted(shares)}, **made)

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


def _shares(model: Any, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """The share of unprotected slots that each head gets, by layer index, (kv_heads,), with the mean 1."""
    budget, positions = slots_for(_RATIO, len(ids)), torch.arange(len(ids))[None, None]
    recent = KVZipPolicy().recent(budget, SINKS)
    scores = reconstruction_scores(model, ids)
    worths = [protected(score[None].cpu(), positions, len(ids), SINKS, recent) for score in scores.values()]
    kept = compared([Candidates(worth, budget, budget) for worth in worths])
    free = [(stays.sum(-1)[0] - SINKS - recent) / (budget - SINKS - recent) for stays, _ in kept]
    return dict(zip(scores, free, strict=True))


def _costs(model: Any, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """How far the last tokens' predictions diverge when one head has forgotten the middle, by layer index, (kv_heads,)."""
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
            with module.register_forward_pre_hook(hook, with_kwargs=True):
                costs[index][head] = divergence(expected, _predictions(model, copy.deepcopy(context), ids[-_ANSWER:])).mean()
    return costs


def _predictions(model: Any, cache: DynamicCache, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids[None], **compat.cache_kwargs(model, cache)).logits
    return logits


class LayerProbe(NamedTuple):
    weights: torch.Tensor  # (kv_heads, hidden)
    bias: torch.Tensor  # (kv_heads,)


@dataclass(frozen=True, eq=False, repr=False)
class KeepProbe(LayerArtifact):
    """Predicts from a token's hidden state how much it would get in a second reading, for each layer and KV head.

    KVzip (arXiv 2505.23416) reads a context twice to score it, and KVzap (arXiv 2601.07891) learns these scores from hidden states. Here it
    is ridge regression from what a layer's attention is called with to the logarithm of KVzip's score: a token is scored when it comes.
    `EquipCache(model, probe)` prunes by it.

    **Departs from the paper**: linear, calibrated on a few texts in minutes; combined with future attention in `ProbePolicy`.

    Args:
        layers: By layer index; layers without full attention have none.
        tokens: How many tokens it was calibrated on.
        fingerprint: The model that it is for.
    """

    artifact_type: ClassVar[str] = "keep-probe"
    entry: ClassVar[Any] = LayerProbe

    _on_device: dict[tuple[int, torch.device], LayerProbe] = field(default_factory=dict, init=False)

    @classmethod
    def calibrate(cls, model: nn.Module, tokenizer: Any, texts: Iterable[str | Sequence[int]], *, progress: bool = True) -> KeepProbe:
        """Fit the probe of each layer on texts, each of which is read some two and a half times.

        Args:
            model: A transformers model that `EquipCache` supports, also inside a PEFT wrapper. It is left unchanged.
            tokenizer: Its tokenizer; None if all texts are token ids.
            texts: Strings, or lists of token ids, like those that the model will read; six of some 600 tokens are enough.
            progress: Whether to show a bar.
        """
        sums, heads = dict[int, Moments](), dict[int, int]()

        def add(base: Any, ids: torch.Tensor) -> None:
            states = attention_inputs(base, ids)
            for index, scores in reconstruction_scores(base, ids).items():
                state, target = states[index][SINKS:].double(), scores[:, SINKS:].clamp(min=1e-6).log().double().mT
                rows = torch.cat([torch.ones_like(state[:, :1]), state, target.to(state.device)], 1)
                sums.setdefault(index, Moments((), rows.shape[1], rows.device)).add(rows)
                heads[index] = len(scores)

        made = each_text(add, model, tokenizer, texts, SINKS + 1, progress)
        return cls({index: _solve(sums[index].mean.cpu(), heads[index]) for index in sorted(sums)}, **made)

    def as_policy(self) -> ProbePolicy:
        return ProbePolicy(self)

    def predict(self, layer_idx: int, hidden: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """Scores from (batch, tokens, hidden), (batch, kv_heads, tokens).

        Args:
            layer_idx: Whose attention is called with these.
            heads: How many KV heads the layer has; None where that is not known.
        """
        place = (layer_idx, hidden.device)
        if place not in self._on_device:
            layer = self.layers.get(layer_idx)
            if layer is None or layer.weights.shape != (heads or len(layer.weights), hidden.shape[-1]):
                raise ConfigError.of("policy", "a KeepProbe of this model", self, "Calibrate it with this model.")
            self._on_device[place] = LayerProbe(*(part.to(hidden.device, torch.float32) for part in layer))
        return functional.linear(hidden.detach().float(), *self._on_device[place]).exp().mT


@dataclass(frozen=True)
class ProbePolicy(Policy):
    """Keeps the tokens that a `KeepProbe`, which knows not the context, or future attention finds worth keeping: the maximum of both.

    While decoding the probe alone scores each new token.
    """

    name = "keep-probe"
    interval = None
    reads_inputs = True
    reads_queries = True
    comparable = True
    head_budgets = "global"
    asks_all_heads = True
    probe: KeepProbe

    def __post_init__(self) -> None:
        require_instance("probe", self.probe, KeepProbe, {}, "Use KeepProbe.calibrate or from_pretrained.")

    def score(self, tokens: Tokens) -> torch.Tensor:
        scores = torch.full(tokens.keys.shape[:3], -torch.inf, device=tokens.keys.device)
        if tokens.module is not None and tokens.inputs is not None:
            hidden = tokens.inputs["hidden_states"]
            new = self.probe.predict(int(getattr(tokens.module, "layer_idx", -1)), hidden, tokens.heads)
            scores[..., -hidden.shape[1] :] = tokens.of_these_heads(new)
        elif tokens.scores is None:
            raise UnsupportedError("policy: a probe reads the inputs of the model's attention, and no model runs now. Use 'keydiff'.")
        earlier = tokens.scores if tokens.queries is None else future_attention(tokens)
        if earlier is not None:
            scores = torch.maximum(scores, torch.where(earlier < UNSCORED, earlier, -torch.inf))
        return scores.masked_fill(scores == -torch.inf, torch.inf)

    def score_new(self, inputs: dict[str, Any], module: nn.Module | None) -> torch.Tensor | None:
        return self.probe.predict(int(getattr(module, "layer_idx", -1)), inputs["hidden_states"])

    def settings(self) -> dict[str, Any]:
        return {"policy": f"{self.name} of {self.probe.fingerprint}"}


def _solve(moments: torch.Tensor, heads: int) -> LayerProbe:
    """The fit to the mean outer product of [1, hidden state, targets]."""
    mean = moments[0, 1:]
    centered = moments[1:, 1:] - mean[:, None] * mean
    inputs, outputs = centered[:-heads, :-heads], centered[:-heads, -heads:]
    inputs.diagonal().add_(_RIDGE * inputs.diagonal().mean())
    weights = torch.linalg.solve(inputs, outputs).mT
    return LayerProbe(weights.float(), (mean[-heads:] - weights @ mean[:-heads]).float())


class LayerQueries(NamedTuple):
    mean: torch.Tensor  # (heads, head_dim)
    covariance: torch.Tensor  # (heads, head_dim, head_dim)
    scaling: torch.Tensor  # (), what attention multiplies scores with


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
    def calibrate(cls, model: nn.Module, tokenizer: Any, texts: Iterable[str | Sequence[int]], *, progress: bool = True) -> QueryStatistics:
        """Measure the queries of a model on texts, in forward passes over at most 512 tokens, without the queries of the first 4.

        Args:
            model: A transformers model that `EquipCache` supports, also inside a PEFT wrapper. It is left unchanged.
            tokenizer: Its tokenizer; None if all texts are token ids.
            texts: Strings, or lists of token ids, like those that the model will read.
            progress: Whether to show a bar.
        """
        sums, scaling = dict[int, Moments](), dict[int, float]()
        rotation = rotation_of(compat.decoder_config(compat.base_model(model).config))

        def add(attended: Attended) -> None:
            queries, index = attended.query[:1], attended.layer_idx
            geometry = rotation.layers[index].at(queries.shape[2] - 1)
            if geometry.kind == "rope" and geometry.refusal is None:
                queries = geometry.unrotate(queries, torch.arange(queries.shape[2], device=queries.device))
            rows = functional.pad(queries[0, :, SINKS:].double(), (1, 0), value=1.0)  # (heads, tokens, 1 + head_dim)
            sums.setdefault(index, Moments(rows.shape[:1], rows.shape[-1], rows.device)).add(rows)
            scaling[index] = attended.scaling

        def watch(base: Any, ids: torch.Tensor) -> None:
            run_module(base.base_model, Watcher(base, add), ids[None])

        made, layers = each_text(watch, model, tokenizer, texts, SINKS + 1, progress, 512), {}
        for index in sorted(sums):
            mean, second = sums[index].mean.cpu()[:, :, 1:].split([1, sums[index].total.shape[-1] - 1], 1)
            layers[index] = LayerQueries(mean[:, 0].float(), (second - mean.mT * mean).float(), torch.tensor(scaling[index]))
        return cls(layers, **made)
