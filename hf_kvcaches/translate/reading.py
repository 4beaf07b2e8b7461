"""What a translator is fitted to: second moments of both models' states, a sample of tokens, and the cost of errors.

The cost of errors of a layer is a symmetric matrix over its [keys, values], by which regression weighs them; see `codec/metric.py`.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from hf_kvcaches import compat
from hf_kvcaches.codec.forward import ending_of
from hf_kvcaches.codec.metric import before_rotation, gradient_of_drawn, output_metric
from hf_kvcaches.codec.moments import Moments, second_moment
from hf_kvcaches.core.rope import RotaryGeometry, Rotation
from hf_kvcaches.errors import KVCacheError, UnsupportedError
from hf_kvcaches.evaluate.observer import Attended
from hf_kvcaches.evaluate.texts import add_up
from hf_kvcaches.translate.config import TranslatorConfig
from hf_kvcaches.translate.pair import Pair
from hf_kvcaches.translate.regression import BlockMoments
from hf_kvcaches.translate.states import PromptTokens, ReadingCache

# Tokens that quantizers are calibrated on.
_SAMPLE = 4096
# Key positions at which logit errors are measured, as shares of the text. Averaging over all distances weighs near and far keys alike, and
# loses facts that are asked for at the end.
_KEY_POSITIONS = (0.0, 0.25, 0.5, 0.75)


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the time inside to the seconds of a stage."""
    start = perf_counter()
    yield
    seconds[stage] = round(seconds.get(stage, 0.0) + perf_counter() - start, 3)


class TextSums:
    """Sums over texts that both models read.

    Args:
        lowest: How many layers the consumer runs. What the next layer's attention is given is the side information.
        seconds: Of each stage; reading adds its time.

    Attributes:
        moments: By the layers that share a code; "producer_side" is what the producer has in place of the side information.
        samples: Sampled rows of the blocks "producer", by the same layers, and of "producer_side".
        producer_shapes: KV heads of each layer, and the dimensions of a key and a value.
        shapes: The same of the consumer.
    """

    def __init__(self, pair: Pair, config: TranslatorConfig, lowest: int, seconds: dict[str, float]) -> None:
        self.pair, self.config, self.lowest, self.seconds = pair, config, lowest, seconds
        self.sent = range(lowest + 1, pair.layers)
        self.texts = 0
        self.moments: defaultdict[tuple[int, ...], BlockMoments] = defaultdict(BlockMoments)
        self.samples: dict[tuple[int, ...] | str, torch.Tensor] = {}
        self.producer_shapes: dict[int, tuple[int, int, int]] = {}
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self._queries: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._losses: dict[int, Moments] = {}

    @property
    def widths(self) -> dict[int, int]:
        """The size of a token's key and value in each of the consumer's layers."""
        return {layer: heads * (key_dim + value_dim) for layer, (heads, key_dim, value_dim) in self.shapes.items()}

    @property
    def layers_per_code(self) -> int:
        """How many consecutive layers share a code; where the config leaves it open, the widest layer decides."""
        return self.config.layers_of_width(max(self.widths.values()))

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The layers that are sent, by shared code."""
        return [tuple(self.sent[start : start + self.layers_per_code]) for start in range(0, len(self.sent), self.layers_per_code)]

    def columns(self, layers: tuple[int, ...]) -> dict[int, slice]:
        """Return the columns of each layer among the keys and values of a group."""
        stops = accumulate(self.widths[layer] for layer in layers)
        return {layer: slice(stop - self.widths[layer], stop) for layer, stop in zip(layers, stops, strict=True)}

    def read(self, texts: Sequence[torch.Tensor], progress: bool) -> None:
        """Read all texts, each process its share, and add up the sums of all processes."""
        process, processes = compat.process()
        self.texts = len(texts)
        for number, ids in enumerate(tqdm(texts, unit=" texts", desc="Reading texts", disable=not progress or process > 0)):
            if number % processes == process:
                self._add(number, ids)
        if processes > 1:
            sums = [*(moments.sums for moments in self.moments.values()), *self._losses.values()]
            add_up(part for each in sums for part in (each.total, each.count))
            add_up([*self._queries.values(), *self.samples.values()])

    def _add(self, number: int, ids: torch.Tensor) -> None:
        with timed(self.seconds, "gradients"):
            weights = self._add_gradients(ids, seed=number) if self.config.metric == "loss" else {}
        with timed(self.seconds, "prefill"):
            on_queries = None if self.config.metric == "plain" else self._add_queries
            producer, consumer = self.pair.states(ids, [self.lowest], on_queries)
            self.producer_shapes, self.shapes = ({layer: state.shape for layer, state in states.items()} for states in (producer, consumer))
            side, producer_side = (states.of("input") for states in (consumer[self.lowest], producer[self.pair.sources[self.lowest]]))
            self._add_sample("producer_side", number, producer_side)
            for layers in self.groups:
                x = torch.cat([producer[layer].pair.to(side.device) for layer in self.pair.sources_of(layers)], dim=1)
                y = torch.cat([consumer[layer].pair.to(side.device) for layer in layers], dim=1)
                group_weights = torch.stack([weights[layer] for layer in layers]).mean(0) if weights else None
                self.moments[layers].add(group_weights, side=side, producer_side=producer_side, producer=x, consumer=y)
                self._add_sample(layers, number, x)

    def _add_sample(self, key: tuple[int, ...] | str, number: int, rows: torch.Tensor) -> None:
        """Sample some tokens of a text, in rows of its own so that the samples of processes can be added up."""
        size = -(-_SAMPLE // self.texts)
        if key not in self.samples:
            self.samples[key] = rows.new_zeros(self.texts * size, rows.shape[1], dtype=torch.float32)
        self.samples[key][number * size : (number + 1) * size] = rows[torch.linspace(0, len(rows) - 1, size).long()]

    def _add_queries(self, attended: Attended) -> None:
        layer, query = attended.layer_idx, attended.query
        if layer not in self.sent:
            return
        if layer not in self._queries:
            output = output_metric(attended.module, query.shape[1], attended.values)
            if output is None:
                raise UnsupportedError(f"metric: found no output projection in {type(attended.module).__name__}. Use metric='plain'.")
            self._outputs[layer] = output
        self._queries[layer] = self._queries.get(layer, 0) + logit_moment(self.pair.rotation.layers[layer], query, attended.scaling)

    def _add_gradients(self, ids: torch.Tensor, seed: int) -> dict[int, torch.Tensor]:
        """Add the gradients of the consumer's loss at a text's keys and values; return the weights of its tokens in each layer."""
        tokens = PromptTokens.of(ids).to(compat.input_device(self.pair.consumer))
        try:
            gradients = loss_gradients(self.pair.consumer, self.pair.rotation, tokens, seed)
        except (KVCacheError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, AttributeError) as error:
            name = type(self.pair.consumer).__name__
            warnings.warn(f"metric='loss' needs gradients, which {name} has not: {error}. Using 'attention'.", stacklevel=5)
            self.config = replace(self.config, metric="attention")
            return {}
        weights = {}
        for layer in self.sent:
            rows = gradients[layer]
            if layer not in self._losses:
                self._losses[layer] = Moments((), rows.shape[1], rows.device)
            self._losses[layer].add(rows)
            # Half of each token's weight is its gradient energy, which is large for facts that later tokens ask for.
            energies = rows.double().square().sum(1)
            weights[layer] = (0.5 + 0.5 * energies / energies.mean().clamp_min(1e-300)).cpu()
        return weights

    def ridge(self, moments: BlockMoments) -> float:
        """Return the regularisation of a fit."""
        if self.config.ridge is not None:
            return self.config.ridge
        # Where there are hardly more tokens than regressors, the weakest directions are chance.
        return max(1e-8, 1e-4 * min(1.0, moments.columns["producer"].stop / int(moments.sums.count)) ** 3)

    def metric(self, layer: int, covariance: torch.Tensor) -> torch.Tensor:
        """Return the cost of errors of a layer's keys and values, given their covariance."""
        if self.config.metric == "plain":
            return torch.eye(len(covariance), dtype=torch.float64) / max(float(covariance.trace()), 1e-300)
        heads, key_dim, _ = self.shapes[layer]
        keys = heads * key_dim
        attention = attention_metric(self._queries[layer] / self.texts, self._outputs[layer], covariance[keys:, keys:])
        if self.config.metric == "attention":
            return attention / max(float((attention * covariance.cpu()).sum()), 1e-300)
        # Keys and values that the gradients of these texts never touch would cost nothing, so both metrics have the same trace in the sum.
        loss = self._losses[layer].mean.cpu()
        return loss + attention * (float(loss.trace()) / max(float(attention.trace()), 1e-300))


def logit_moment(geometry: RotaryGeometry, query: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the mean squared logit error per error of an unrotated key, (heads, key_dim, key_dim), from one text's rotated queries."""
    moments = []
    for share in _KEY_POSITIONS:
        position = int(share * query.shape[2])
        # A query meets a key at `position` rotated back by that position.
        rows = before_rotation(geometry, query[:, :, position:], position)[0]
        moments.append(second_moment(rows) / rows.shape[1])
    return torch.stack(moments).mean(0) * scaling**2


def attention_metric(queries: torch.Tensor, output: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """Return the cost of errors in the output of attention, given `logit_moment`, `output_metric` and the values' covariance.

    An error of a value costs W'W, and one of a key the squared error of the logit times the mean of |W (v - mean)|^2. Heads count alike:
    weighing them by their attention weights loses facts that only a later question asks for.
    """
    size = output.shape[-1]
    blocks = torch.stack([covariance[start : start + size, start : start + size] for start in range(0, len(covariance), size)])
    group = len(queries) // len(blocks)
    deviations = (output * blocks.to(output).repeat_interleave(group, 0)).sum((1, 2))
    keys, values = ((part.unflatten(0, (-1, group)).sum(1)) for part in (deviations[:, None, None] * queries, output))
    return torch.block_diag(*keys, *values).cpu()


def loss_gradients(model: Any, rotation: Rotation, tokens: PromptTokens, seed: int) -> list[torch.Tensor]:
    """Return the gradients of the loss of tokens drawn from the model's own predictions, (tokens, width) for each layer.

    They are at one layer's [keys without rotation, values] with those of the other layers fixed, as each layer is translated alone.
    """
    cache, leaves = ReadingCache(model), list[tuple[torch.Tensor, torch.Tensor]]()

    def on_layer(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Detached, so that a layer's gradients don't pass through the layers below.
        leaves.append((keys.detach().requires_grad_(), values.detach().requires_grad_()))
        return leaves[-1]

    cache.on_layer = on_layer
    with torch.inference_mode(False), torch.enable_grad():
        ending = ending_of(model)
        states = ending.run(tokens.ids.clone(), cache)
        gradients = torch.autograd.grad(states, [part for pair in leaves for part in pair], gradient_of_drawn(states, ending.head, [seed]))
    rows = []
    for geometry, keys, values in zip(rotation.layers, gradients[::2], gradients[1::2], strict=True):
        pair = before_rotation(geometry, keys, tokens.positions), values
        rows.append(torch.cat([part[0].transpose(0, 1).flatten(1) for part in pair], dim=1))
    return rows
