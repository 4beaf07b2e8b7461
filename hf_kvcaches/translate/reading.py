"""What is kept of the texts that a translator is fitted to: moments, what errors cost, and a sample of tokens."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from time import perf_counter

import torch
from tqdm import tqdm

from hf_kvcaches import compat
from hf_kvcaches.core.calibrating import add_up
from hf_kvcaches.core.metric import Sizes, output_metric
from hf_kvcaches.core.moments import Moments
from hf_kvcaches.core.watching import Attended
from hf_kvcaches.errors import KVCacheError, UnsupportedError
from hf_kvcaches.translate.config import TranslatorConfig
from hf_kvcaches.translate.metric import QueryMoments, attention_metric, blend, gradient_rows, loss_gradients
from hf_kvcaches.translate.moments import BlockMoments
from hf_kvcaches.translate.pair import Pair, States
from hf_kvcaches.translate.states import PromptTokens, ReadingCache

# Tokens that quantizers are calibrated on.
_SAMPLE = 4096


class Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time inside to a stage."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + perf_counter() - start, 3)


class TextSums:
    """Sums over texts that both models read.

    Args:
        lowest: Each number of layers that the consumer may run.
        texts: How many will be read.

    Attributes:
        moments: For each of these numbers, and each group of layers that then share a code.
        samples: Tokens of the producer: the keys and values of a layer, ("states", layer), and its attention's input, ("input", layer).
        shapes: Of each layer of the consumer: KV heads, and the dimensions of a key and a value.
    """

    def __init__(self, pair: Pair, config: TranslatorConfig, lowest: Collection[int], texts: int) -> None:
        self.pair, self.config, self.lowest = pair, config, tuple(lowest)
        self.per_text = -(-_SAMPLE // max(1, texts))
        self.texts, self.tokens = texts, 0
        self.moments: dict[tuple[int, tuple[int, ...]], BlockMoments] = {}
        self.samples: dict[tuple[str, int], torch.Tensor] = {}
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.heads: dict[int, int] = {}
        self._queries: dict[int, QueryMoments] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._losses: dict[int, Moments] = {}

    def sent(self, lowest: int) -> range:
        """The layers that are rebuilt where the consumer runs so many."""
        return range(lowest + 1, self.pair.layers)

    def groups(self, lowest: int) -> list[tuple[int, ...]]:
        """These layers, as they share codes."""
        sent, size = self.sent(lowest), self.layers_per_code
        return [tuple(sent[start : start + size]) for start in range(0, len(sent), size)]

    def columns(self, layers: tuple[int, ...]) -> dict[int, slice]:
        """Where the keys and values of each layer are among those of a group."""
        widths = [self.widths[layer] for layer in layers]
        return {layer: slice(stop - width, stop) for layer, width, stop in zip(layers, widths, accumulate(widths), strict=True)}

    @property
    def widths(self) -> dict[int, int]:
        """How many numbers a token's keys and values have, by layer of the consumer."""
        return {layer: heads * (key_dim + value_dim) for layer, (heads, key_dim, value_dim) in self.shapes.items()}

    @property
    def layers_per_code(self) -> int:
        """How many consecutive layers share a code; the widest layer decides where the options leave it open."""
        return self.config.layers_of_width(max(self.widths.values()))

    @property
    def numbers(self) -> int:
        """Of a token's keys and values, in all layers of the consumer."""
        return sum(self.widths.values())

    def read(self, prefixes: Sequence[torch.Tensor], clock: Clock, progress: bool, first: int = 0, shared: bool = True) -> None:
        """Feeds texts in; where they are shared, this process' share.

        Args:
            first: The number of the first one.
        """
        own, processes = compat.process() if shared else (0, 1)
        for number, ids in enumerate(
            tqdm(prefixes, unit=" texts", desc="TextSums", disable=not progress or compat.process()[0] > 0), first
        ):
            if number % processes == own:
                self._add(number, ids, clock)

    def _add(self, number: int, ids: torch.Tensor, clock: Clock) -> None:
        weights: dict[int, torch.Tensor] = {}
        if self.config.metric == "loss":
            with clock.stage("gradients"):
                weights = self._add_gradients(ids, number)
        with clock.stage("prefill"):
            queries = None if self.config.metric == "plain" else self._look
            producer, consumer = self.pair.states(ids, self.lowest, queries)
            self.shapes = {layer: state.shape for layer, state in consumer.items()}
            self.heads = {layer: state.heads for layer, state in producer.items()}
            for lowest in self.lowest:
                self._add_moments(lowest, producer, consumer, weights)
            self._add_sample(number, producer)

    def _add_moments(self, lowest: int, producer: States, consumer: States, weights: dict[int, torch.Tensor]) -> None:
        sources = self.pair.sources
        side, own = consumer[lowest].of("input"), producer[sources[lowest]].of("input")
        for layers in self.groups(lowest):
            used = dict.fromkeys(sources[layer] for layer in layers)
            x = torch.cat([producer[layer].pair.to(side.device) for layer in used], dim=1)
            y = torch.cat([consumer[layer].pair.to(side.device) for layer in layers], dim=1)
            if (lowest, layers) not in self.moments:
                widths = {"one": 1, "side": side.shape[1], "own": own.shape[1], "producer": x.shape[1], "consumer": y.shape[1]}
                self.moments[lowest, layers] = BlockMoments(widths, side.device)
            counts = torch.stack([weights[layer].to(side.device) for layer in layers]).mean(0) if weights else None
            self.moments[lowest, layers].add(counts, one=side.new_ones(len(side), 1), side=side, own=own, producer=x, consumer=y)

    def _add_sample(self, number: int, producer: States) -> None:
        """Takes some tokens of a text. Each text has places of its own, so that processes can add them up."""
        if number >= self.texts:
            return
        for layer, state in producer.items():
            for kind, rows in (("states", state.pair), ("input", state.hidden)):
                if rows is None:
                    continue
                if (kind, layer) not in self.samples:
                    self.samples[kind, layer] = rows.new_zeros(self.texts * self.per_text, rows.shape[1], dtype=torch.float32)
                places = torch.linspace(0, len(rows) - 1, self.per_text, device=rows.device).long()
                self.samples[kind, layer][number * self.per_text : (number + 1) * self.per_text] = rows[places].float()

    def _look(self, attended: Attended) -> None:
        """Counts a layer's queries in; see `ReadingCache`."""
        layer, module, query, keys, values, options = attended
        if layer <= min(self.lowest):
            return
        if layer not in self._queries:
            output = output_metric(module, query.shape[1], values)
            if output is None:
                raise UnsupportedError(f"metric: found no output projection in {type(module).__name__}. Use metric='plain'.")
            self._outputs[layer] = output
            sizes = Sizes.of(query, keys, values, options, True)
            self._queries[layer] = QueryMoments(sizes, self.pair.rotation.layers[layer], keys.device)
        self._queries[layer].add(query)

    def _add_gradients(self, ids: torch.Tensor, seed: int) -> dict[int, torch.Tensor]:
        """Counts in what the consumer's loss asks of a text's keys and values.

        Returns:
            How much the tokens count in each layer, half of it by the size of their gradients: facts that are asked for later do.
        """
        cache = ReadingCache(self.pair.consumer)
        cache.leaves = []
        tokens = PromptTokens.of(ids).to(compat.input_device(self.pair.consumer))
        try:
            gradients = loss_gradients(self.pair.consumer, tokens.ids, cache.leaves, cache, seed)
        except KVCacheError:
            raise
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            name = type(self.pair.consumer).__name__
            warnings.warn(f"metric='loss' needs gradients, which {name} has not: {error}. Using 'attention'.", stacklevel=5)
            self.config = replace(self.config, metric="attention")
            return {}
        weights = {}
        for layer in self.sent(min(self.lowest)):
            rows = gradient_rows(self.pair.rotation.layers[layer], *gradients[layer], tokens.positions)
            self._losses.setdefault(layer, Moments((), rows.shape[1], rows.device)).add(rows)
            energies = rows.double().square().sum(1)
            weights[layer] = 0.5 + 0.5 * energies / energies.mean().clamp_min(1e-300)
        return weights

    def join_processes(self) -> None:
        """Adds up what all processes read, so that each has everything."""
        if compat.process()[1] == 1:
            return
        sums = [*(blocks.sums for blocks in self.moments.values()), *self._losses.values()]
        add_up(part for each in sums for part in (each.total, each.count))
        add_up(part for queries in self._queries.values() for part in (queries.total, queries.count))
        add_up(self.samples.values())

    def ridge(self, moments: BlockMoments) -> float:
        """The regularisation of a fit."""
        if self.config.ridge is not None:
            return self.config.ridge
        # Where there are hardly more tokens than columns to regress on, the weakest directions are chance.
        columns = moments.places["producer"].stop - moments.places["one"].start
        return max(1e-8, 1e-4 * min(1.0, columns / max(moments.count, 1)) ** 3)

    def metric(self, layer: int, spread: torch.Tensor) -> torch.Tensor:
        """What errors of a layer cost.

        Args:
            spread: The covariance of its keys and values.
        """
        if self.config.metric == "plain":
            return torch.eye(len(spread), dtype=torch.float64) / max(float(spread.trace()), 1e-300)
        heads, key_dim, _ = self.shapes[layer]
        keys = heads * key_dim
        made = attention_metric(self._queries[layer].logit_moment(), self._outputs[layer], spread[keys:, keys:])
        if self.config.metric == "attention":
            return made / max(float((made * spread.cpu()).sum()), 1e-300)
        return blend(self._losses[layer].mean.cpu(), made)
