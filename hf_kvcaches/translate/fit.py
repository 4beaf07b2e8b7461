"""Fitting a translator: both models read the same texts, maps are solved for, layers to run are chosen on held-out texts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean
from time import perf_counter
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from hf_kvcaches import compat
from hf_kvcaches.codec.plan import Sample, StepQuantizer
from hf_kvcaches.codec.plan import fit as fit_step
from hf_kvcaches.errors import ConfigError, is_number, require_choice, whole_number
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.evaluate.texts import add_up, sequences
from hf_kvcaches.kernels.rebuild import Decoder
from hf_kvcaches.stores.catalog import bytes_of_size
from hf_kvcaches.translate.pair import SHORTEST, ErrorCosts, Pair, States, split_of
from hf_kvcaches.translate.regression import LEAST_RIDGE, Group, Key, Products, Regression, pairs_of, passes_of, regress
from hf_kvcaches.translate.states import CodeEncoder, CodeWeights, LayerDecoder, Maps

Metric = Literal["loss", "plain"]
# Of expected and of actual logits, (positions, vocabulary) each; greater is better.
Score = Callable[[Tensor, Tensor], float]
# Defaults: at most 4 layers and 2,048 numbers a token share a code; moments and transforms take the square.
_MOST_SHARING, _WIDEST_CODE = 4, 2048
# Beyond the first payload, integers of the directions that vary most would have more than 16 bits; with the second, none are rounded.
_LARGEST_CODED, EXACT = 0.5, 2.0
# Directions that take fewer bits are worth less than these bits, and each costs time in every token.
_LEAST_BITS, _TINY = 0.2, 1e-30
# Numbers of the sample that codes are chosen on, and its tokens at the least and at the most.
_SAMPLED, _LEAST_SAMPLE, _MOST_SAMPLE = 1 << 22, 256, 4096
# Every eighth text of so many tokens is held out to choose layers on, up to eight texts.
_HELD_OUT, _LEAST_HELD_OUT = 8, 16


@dataclass(frozen=True)
class TranslatorConfig:
    """Options of `CacheTranslator.fit` that have good defaults.

    Args:
        layers_per_code: How many consecutive layers share a code. More layers lose less at the same bytes, but rebuilding takes more time,
            and fitting more memory. None: up to 4, as long as their keys and values together have at most 2,048 numbers a token.
        metric: What errors cost: by gradients of the predictions after a text (`"loss"`), or all of a layer the same (`"plain"`).
        layer_map: The producer's layer that predicts each layer of the consumer. None: the one nearest in depth.
        prefill_share: The share of the consumer's layers that `recompute_layers="auto"` may run.
        exact_tokens: How many first tokens of a prompt the consumer runs itself. They are unlike all others, which attend to them.
        ridge: Regularisation, as a share of the mean variance. None: less the more tokens there are.
        memory: What the sums over texts may take, in bytes or such as `"8GiB"`. Where they take more, layers are fitted in groups, and both
            models read the texts once for each group.
    """

    layers_per_code: int | None = None
    metric: Metric = "loss"
    layer_map: Sequence[int] | None = None
    prefill_share: float = 0.25
    exact_tokens: int = 4
    ridge: float | None = None
    memory: int | str = "8GiB"

    def __post_init__(self) -> None:
        require_choice("metric", self.metric, get_args(Metric))
        if self.layers_per_code is not None:
            whole_number("layers_per_code", self.layers_per_code, 1)
        whole_number("exact_tokens", self.exact_tokens, 0)
        if self.layer_map is not None:
            expected = "a layer of the producer for each of the consumer's"
            object.__setattr__(self, "layer_map", tuple(whole_number("layer_map", layer, 0, expected) for layer in self.layer_map))
        if not is_number(self.prefill_share) or not 0 <= self.prefill_share <= 1:
            raise ConfigError.of("prefill_share", "a share of 0 to 1", self.prefill_share)
        if self.ridge is not None and (not isinstance(self.ridge, float) or not 0 < self.ridge < 1):
            raise ConfigError.of("ridge", "a small share above 0, as 1e-8, or None", self.ridge)
        memory = bytes_of_size("memory", self.memory)
        if memory is None:
            raise ConfigError.of("memory", "a number of bytes, or such as '8GiB'", self.memory)
        object.__setattr__(self, "memory", memory)

    def layers_of_width(self, width: int) -> int:
        """Return `layers_per_code`, or its default for layers with `width` key and value numbers a token."""
        return self.layers_per_code or max(1, min(_MOST_SHARING, _WIDEST_CODE // width))

    def run_layers(self, recompute_layers: Any, layers: int) -> list[int]:
        """Return the numbers of layers, of so many, that the consumer may run: with "auto" 0, 1, 2, 4 and so on."""
        if recompute_layers == "auto":
            most = min(layers - 1, int(self.prefill_share * layers))
            return [0, *(1 << power for power in range(most.bit_length()))]
        expected = f"'auto', or fewer than the {layers} layers there are"
        return [whole_number("recompute_layers", recompute_layers, 0, expected, most=layers - 1)]


@dataclass(frozen=True)
class TranslatorSettings:
    """How a translator was fitted: the options in use, how much it read, and KL divergences on held-out texts."""

    payload: float
    recompute_layers: int
    exact_tokens: int
    metric: Metric
    layers_per_code: int
    layer_map: tuple[int, ...]
    texts: int = 0
    tokens: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)


class Fitting:
    """One fit: the texts that are read, those that are held out, and, once it has read them, regressions for any payload."""

    def __init__(
        self, pair: Pair, texts: Iterable[Any], config: TranslatorConfig, payload: float, run: Any, longest: int, progress: bool
    ) -> None:
        if not is_number(payload) or not (0 <= payload <= _LARGEST_CODED or payload == EXACT):
            expected = f"a share of the bytes of bfloat16 keys and values, 0 to {_LARGEST_CODED}, or {EXACT:g} for coefficients in float32"
            raise ConfigError.of("payload", expected, payload)
        whole_number("max_length", longest, 8, "at least 8 tokens")
        self.pair, self.config, self.lowest, self.progress = pair, config, config.run_layers(run, pair.layers), progress
        self.dtype = torch.float64 if payload == EXACT else torch.float32  # of products
        self.began = perf_counter()
        self.texts = [ids[:longest] for ids in sequences(texts, pair.tokenizer, pair.consumer) if len(ids) >= 2]
        self.fitted, self.held_out, self.measured = self.texts, list[Tensor](), dict[str, float]()
        if len(self.lowest) > 1:
            long = [number for number, ids in enumerate(self.texts) if len(ids) >= _LEAST_HELD_OUT]
            held_out = long[_HELD_OUT - 1 :: _HELD_OUT][:_HELD_OUT]
            self.fitted = [ids for number, ids in enumerate(self.texts) if number not in held_out]
            self.held_out = [self.texts[number] for number in held_out]
            if not held_out:
                warnings.warn(f"'auto' needs 8 texts of {_LEAST_HELD_OUT} tokens or more to choose on: no layers are run.", stacklevel=3)
                self.lowest = [0]
        if config.metric == "loss" and max(map(len, self.fitted), default=0) < SHORTEST:
            raise ConfigError.of("texts", f"one of {SHORTEST} tokens at least", self.texts, "Or pass TranslatorConfig(metric='plain').")
        if len(self.fitted) < compat.process()[1]:
            expected = f"at least {compat.process()[1]} texts of 2 or more tokens besides the held-out ones, one for each process"
            raise ConfigError.of("texts", expected, len(self.fitted))

    def read(self) -> None:
        """Read the texts, and solve for all regressions."""
        pair, config = self.pair, self.config
        producer, consumer = pair.states(torch.zeros(2, dtype=torch.long), self.lowest)
        self.shapes = {layer: state.shape for layer, state in consumer.items()}
        self.widths = {key: block.shape[1] for key, block in self._blocks(producer, consumer).items()}
        self.shared = config.layers_of_width(max(state.states.shape[1] for state in consumer.values()))
        sent = range(min(self.lowest) + 1, pair.layers)
        groups = [Group.of(sent[start : start + self.shared], pair.sources) for start in range(0, len(sent), self.shared)]
        self.costs = None if config.metric == "plain" else ErrorCosts(self.shapes)
        plain, device, texts = self.costs is None, compat.input_device(pair.consumer), len(self.fitted)
        sample = max(_LEAST_SAMPLE, min(_MOST_SAMPLE, _SAMPLED // sum(state.states.shape[1] for state in producer.values())))
        # Tokens that codes are chosen on: as many of each text, in rows of its own, so that those of processes can be added up.
        sampled = [("producer input", layer) for layer in self.lowest] + [key for group in groups for key in group.keys[0]]
        self.samples = {key: torch.zeros(texts, -(-sample // texts), self.widths[key], device=device) for key in sampled}
        self.codes: dict[int, list[tuple[Group, Regression]]] = {lowest: [] for lowest in self.lowest}
        weights: dict[int, Tensor] = {}
        for number, some in enumerate(passes_of(groups, self.widths, self.lowest, plain, sample, int(config.memory))):
            products = Products(pairs_of(some, self.lowest, plain), self.dtype, device)
            self._read_texts(products, weights, first=number == 0)
            for lowest in self.lowest:
                self._solve(products, some, lowest)

    def _blocks(self, producer: States, consumer: States) -> dict[Key, Tensor]:
        """Return what products are taken of, (tokens, width) each."""
        blocks = {("producer", layer): state.states for layer, state in producer.items()}
        blocks |= {("consumer", layer): state.states for layer, state in consumer.items()}
        blocks |= {("consumer input", layer): consumer[layer].hidden for layer in self.lowest}
        return blocks | {("producer input", layer): producer[self.pair.sources[layer]].hidden for layer in self.lowest}

    def _read_texts(self, products: Products, weights: dict[int, Tensor], first: bool) -> None:
        """Add all texts to products, and what is read of them first to weights; each process reads its share, and gets the sums of all."""
        (process, processes), exact_tokens = compat.process(), self.config.exact_tokens
        hidden, costs = not self.progress or process > 0, self.costs if first else None
        for number, ids in enumerate(tqdm(self.fitted, unit=" texts", desc="Reading texts", disable=hidden)):
            mine = number % processes == process
            if number and not mine:  # all begin with the first text, whose means are what products are taken of
                continue
            producer, consumer = self.pair.states(ids, self.lowest)
            if costs is not None and mine and len(ids) >= SHORTEST:
                weights[number] = costs.add(self.pair, ids, consumer, exact_tokens, number)
            exact = min(exact_tokens, len(ids) - 2)
            blocks = {key: block[exact:] for key, block in self._blocks(producer, consumer).items()}
            products.add(blocks, weights.get(number, torch.ones(len(ids)))[exact:] * mine)
            if first and mine:
                for key, sample in self.samples.items():
                    chosen = torch.linspace(0, len(ids) - exact - 1, sample.shape[1]).long().to(blocks[key].device)
                    sample[number] = blocks[key][chosen].to(sample)
        products.finish(processes)
        if first and processes > 1:
            add_up([*self.samples.values(), *chain.from_iterable([] if costs is None else costs.sides.values())])

    def _solve(self, products: Products, groups: Sequence[Group], lowest: int) -> None:
        """Solve for the maps of some groups of layers above the lowest."""
        least = LEAST_RIDGE[products.dtype]
        for group in tqdm(groups, unit=" groups of layers", desc="Solving", disable=not self.progress):
            used = Group.of((layer for layer in group.layers if layer > lowest), self.pair.sources)
            if not used.layers:
                continue
            if self.costs is None:
                # The variance of a layer costs 1.
                spreads = [products.covariance([key], [key]) for key in used.keys[1]]
                roots = [torch.eye(len(spread)).to(spread)[None] * spread.trace().clamp_min(1e-300).rsqrt() for spread in spreads]
            else:
                roots = [root for layer in used.layers for root in self.costs.roots(layer)]
            # Where there are hardly more tokens than regressors, the weakest directions are chance.
            regressors = sum(self.widths[key] for key in used.keys[0])
            ridge = self.config.ridge or max(least, 1e-4 * min(1.0, regressors / float(products.tokens)) ** 3)
            self.codes[lowest].append((used, regress(products, lowest, used, roots, (self.config.ridge or least, ridge))))

    def choose(self, payload: float, score: Score | None) -> int:
        """Return the number of layers to run with which predictions after held-out texts are best."""
        if len(self.lowest) == 1:
            return self.lowest[0]
        pair, scores, maps = self.pair, dict[int, float](), {lowest: self.maps(lowest, payload) for lowest in self.lowest}
        read = [(ids, *pair.states(ids[: split_of(len(ids))], maps)) for ids in self.held_out]
        expected = [pair.predictions(ids, own) for ids, _, own in read]
        for lowest, own in maps.items():
            found = [pair.predictions(ids, self._translated(own, lowest, *states)) for ids, *states in read]
            kl = fmean(float(divergence(one, other).mean()) for one, other in zip(expected, found, strict=True))
            self.measured[f"{lowest} layers run"] = scores[lowest] = kl
            if score is not None:
                scores[lowest] = -fmean(float(score(one, other)) for one, other in zip(expected, found, strict=True))
        if not all(map(math.isfinite, scores.values())):
            raise ConfigError.of("score", "a finite number for each text", scores)
        return min(scores, key=lambda lowest: scores[lowest])

    def _translated(self, maps: Maps, lowest: int, producer: States, consumer: States) -> States:
        """Return the consumer's states of a text as they are rebuilt from the producer's."""
        states, known = {layer: state.states for layer, state in producer.items()}, consumer[lowest].hidden
        hidden, translated, exact = producer[maps.side_layer].hidden, dict(consumer), self.config.exact_tokens
        sent = maps.pack({code: maps.coefficients(code, states, hidden) for code in range(len(maps.encoders))})
        coefficients = maps.decode({code: record.to(known.device) for code, record in sent.items()}, len(known))
        for layer, code, _, weights in maps.decoders:
            side, decode, bias = maps.placed(weights, known.device)
            rebuilt = known.float() @ side + bias
            if code is not None:
                rebuilt += coefficients[code] @ decode
            true = consumer[layer].states[:exact].to(rebuilt)
            translated[layer] = consumer[layer]._replace(states=torch.cat([true, rebuilt[exact:]]))
        return translated

    def settings(self, lowest: int, payload: float) -> TranslatorSettings:
        """Return how the maps of a payload were fitted, where the consumer runs its lowest layers."""
        config, tokens = self.config, sum(map(len, self.texts))
        options = float(payload), lowest, config.exact_tokens, config.metric, self.shared, self.pair.sources
        return TranslatorSettings(*options, len(self.texts), tokens, {"in all": round(perf_counter() - self.began, 3)}, self.measured)

    def maps(self, lowest: int, payload: float) -> Maps:
        """Return the maps for a payload, where the consumer runs its lowest layers: codes of a budget of bits, all together."""
        codes = sorted(self.codes[lowest], key=lambda code: max(code[0].sources))
        quantizer, sizes = self._quantizer(codes, lowest, payload) if codes and 0 < payload < EXACT else (None, [])
        step, encoders, decoders = 1.0 if quantizer is None else quantizer.step, list[CodeEncoder](), list[LayerDecoder]()
        for number, (group, regression) in enumerate(codes):
            kept, coding = torch.arange(len(regression.strengths) if payload == EXACT else 0), None
            if quantizer is not None:  # weights are in the order in which their directions are coded
                plan = quantizer.plans[number]
                kept, coding = plan.integers, (replace(plan, order=torch.arange(len(plan.order))), sizes[number][plan.order] / step)
            kept, code = kept.to(regression.decode.device), len(encoders) if len(kept) else None
            if code is not None:
                weights = CodeWeights(*((part[..., kept] / step).cpu().contiguous() for part in regression.encode))
                encoders.append(CodeEncoder(group.name, group.sources, weights, coding))
            side, decode, bias = regression.decoder(kept)
            widths = [self.widths["consumer", layer] for layer in group.layers]
            parts = zip(*(part.cpu().split(widths, dim=-1) for part in (side, decode * step, bias)), strict=True)
            for layer, (known, sent, shift) in zip(group.layers, parts, strict=True):
                decoder = Decoder(known.contiguous(), None if code is None else sent.contiguous(), shift.contiguous())
                decoders.append(LayerDecoder(layer, code, self.shapes[layer], decoder))
        decoders.sort(key=lambda decoder: decoder.layer)
        tables, bits = (None, None) if quantizer is None else (quantizer.tables, quantizer.bits)
        return Maps(tuple(encoders), tuple(decoders), self.pair.sources[lowest], tables, bits)

    def _quantizer(self, codes: Sequence[tuple[Group, Regression]], lowest: int, payload: float) -> tuple[StepQuantizer, list[Tensor]]:
        """Return the quantizer with which codes have the payload, and the deviations of each code's coefficients."""
        samples, sizes, width = [], [], sum(width for (kind, _), width in self.widths.items() if kind == "consumer")
        for group, regression in codes:
            states = torch.cat([self.samples[key] for key in group.keys[0]], dim=2)
            numbers = regression.coefficients(states, self.samples["producer input", lowest]).flatten(0, 1).cpu()
            size = numbers.square().mean(0).sqrt().clamp_min(_TINY)
            order = size.argsort(descending=True, stable=True)
            samples.append(Sample(order, size[order], (numbers / size)[:, order].T.contiguous()))
            sizes.append(size)
        quantizer = fit_step(samples, 16.0 * payload * width, _LEAST_BITS)
        return quantizer, sizes
