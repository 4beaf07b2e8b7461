"""`KeepProbe`: what a token will be worth, read from its hidden state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from hf_kvcaches.codec.moments import Moments
from hf_kvcaches.equip.calibrated.corpus import SINKS, Corpus, LayerArtifact, asked_before, attention_modules, reconstruction_scores
from hf_kvcaches.equip.policies.base import Policy
from hf_kvcaches.equip.policies.future import future_attention
from hf_kvcaches.equip.policies.tokens import UNSCORED, Tokens
from hf_kvcaches.errors import ConfigError, UnsupportedError, is_number, require_instance
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.reuse.partial import run_module

_LEAST = 1e-6


class LayerProbe(NamedTuple):
    """A linear map from hidden states to the logarithms of scores."""

    weights: torch.Tensor  # (kv_heads, hidden)
    bias: torch.Tensor  # (kv_heads,)


@dataclass(frozen=True, eq=False, repr=False)
class KeepProbe(LayerArtifact):
    """Predicts from a token's hidden state how much it would get in a second reading, for each layer and KV head.

    KVzip (arXiv 2505.23416) reads a context twice to score it, and its successor KVzap (arXiv 2601.07891) learns these scores from hidden
    states. Here it is ridge regression from what a layer's attention is called with to the logarithm of KVzip's score: one pass, no second
    reading, and a token is scored when it comes. `EquipCache(model, probe)` prunes by it.

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
    def calibrate(
        cls,
        model: nn.Module,
        tokenizer: Any,
        texts: Iterable[str | Sequence[int]],
        *,
        ridge: float = 0.3,
        chunk: int = 512,
        progress: bool = True,
    ) -> KeepProbe:
        """Fit the probe of each layer on texts, each of which is read some two and a half times.

        Args:
            model: A transformers model that `EquipCache` supports, also inside a PEFT wrapper. It is left unchanged.
            tokenizer: Its tokenizer; None if all texts are token ids.
            texts: Strings, or lists of token ids, like those that the model will read; six of some 600 tokens are enough.
            ridge: Relative to the mean variance of a hidden state's dimensions.
            chunk: Tokens that are read again at a time, and share one softmax, as for `KVZipPolicy`.
            progress: Whether to show a bar.
        """
        if not is_number(ridge) or ridge <= 0:
            raise ConfigError.of("ridge", "a number above 0", ridge)
        corpus, sums, heads = Corpus(model, tokenizer, texts, SINKS + 1, progress), dict[int, Moments](), dict[int, int]()
        with evaluating(corpus.base), torch.no_grad():
            for ids in corpus:
                states = _attention_inputs(corpus.base, ids)
                for index, scores in reconstruction_scores(corpus.base, ids, chunk).items():
                    state, target = states[index][SINKS:].double(), scores[:, SINKS:].clamp(min=_LEAST).log().double().mT
                    rows = torch.cat([torch.ones_like(state[:, :1]), state, target.to(state.device)], 1)
                    sums.setdefault(index, Moments((), rows.shape[1], rows.device)).add(rows)
                    heads[index] = len(scores)
        layers = {index: _solve(sums[index].mean.cpu(), heads[index], ridge) for index in sorted(sums)}
        return cls(layers, corpus.tokens, corpus.fingerprint())

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
    """Keeps the tokens that a `KeepProbe` or future attention finds worth keeping: the maximum of both.

    The probe knows the token and not its context; future attention knows the context, and costs a few products. Together they lose less
    than either. While decoding the probe alone scores each new token.

    Args:
        probe: Of the model.
        future: Whether future attention has a part.
    """

    name = "keep-probe"
    interval = None
    reads_inputs = True
    reads_queries = True
    comparable = True
    head_budgets = "global"
    asks_all_heads = True
    probe: KeepProbe
    future: bool = True

    def __post_init__(self) -> None:
        require_instance("probe", self.probe, KeepProbe, {}, "Use KeepProbe.calibrate or from_pretrained.")
        object.__setattr__(self, "reads_queries", self.future)

    def score(self, tokens: Tokens) -> torch.Tensor:
        scores = torch.full(tokens.keys.shape[:3], -torch.inf, device=tokens.keys.device)
        if tokens.module is not None and tokens.inputs is not None:
            hidden = tokens.inputs["hidden_states"]
            new = self.probe.predict(int(getattr(tokens.module, "layer_idx", -1)), hidden, tokens.heads)
            scores[..., -hidden.shape[1] :] = tokens.of_these_heads(new)
        elif tokens.scores is None:
            raise UnsupportedError("policy: a probe reads the inputs of the model's attention, and no model runs now. Use 'keydiff'.")
        earlier = future_attention(tokens) if self.future and tokens.queries is not None else tokens.scores
        if earlier is not None:
            scores = torch.maximum(scores, torch.where(earlier < UNSCORED, earlier, -torch.inf))
        return scores.masked_fill(scores == -torch.inf, torch.inf)

    def score_new(self, inputs: dict[str, Any], module: nn.Module | None) -> torch.Tensor | None:
        return self.probe.predict(int(getattr(module, "layer_idx", -1)), inputs["hidden_states"])

    def settings(self) -> dict[str, Any]:
        return {"policy": f"{self.name} of {self.probe.fingerprint}"}


def _attention_inputs(model: Any, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """What the attention of each layer is called with for a text, by layer index, (tokens, hidden)."""
    states: dict[int, torch.Tensor] = {}

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[module.layer_idx] = (args[0] if args else kwargs["hidden_states"])[0].detach()

    with asked_before(attention_modules(model).values(), before):
        run_module(model.base_model, None, ids[None])
    return states


def _solve(moments: torch.Tensor, heads: int, ridge: float) -> LayerProbe:
    """The fit to the mean of the outer products of [1, hidden state, targets]."""
    mean = moments[0, 1:]
    centered = moments[1:, 1:] - mean[:, None] * mean
    inputs, outputs = centered[:-heads, :-heads], centered[:-heads, -heads:]
    inputs.diagonal().add_(ridge * inputs.diagonal().mean())
    weights = torch.linalg.solve(inputs, outputs).mT
    return LayerProbe(weights.float(), (mean[-heads:] - weights @ mean[:-heads]).float())
