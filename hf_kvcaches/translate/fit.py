"""Fitting a translator: both models read the same texts, maps are solved for, layers to run are chosen on held-out texts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from hf_kvcaches import compat
from hf_kvcaches.codec.plan import Sample, StepQuantizer
from hf_kvcaches.codec.plan import fit as fit_step
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import require_identity
from hf_kvcaches.errors import ConfigError, is_number, whole_number
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.evaluate.texts import add_up, sequences
from hf_kvcaches.kernels.rebuild import Decoder
from hf_kvcaches.translate.config import TranslatorConfig, TranslatorSettings
from hf_kvcaches.translate.maps import CodeEncoder, CodeWeights, LayerDecoder, Maps
from hf_kvcaches.translate.pair import SHORTEST, ErrorCosts, Pair, States, split_of
from hf_kvcaches.translate.regression import LEAST_RIDGE, Group, Key, Products, Regression, pairs_of, passes_of, regress

# Of expected and of actual logits, (positions, vocabulary) each; greater is better.
Score = Callable[[torch.Tensor, torch.Tensor], float]
Code = tuple[Group, Regression]
# Beyond the first payload, integers of the directions that vary most would have more than 16 bits; with the second, none are rounded.
_LARGEST_CODED, EXACT = 0.5, 2.0
# Directions that take fewer bits are worth less than these bits, and each costs time in every token.
_LEAST_BITS, _TINY = 0.2, 1e-30
# Numbers of the sample that codes are chosen on, and its tokens at the least and at the most.
_SAMPLED, _LEAST_SAMPLE, _MOST_SAMPLE = 1 << 22, 256, 4096
# Every eighth text of so many tokens is held out to choose layers on, up to eight texts.
_HELD_OUT, _LEAST_HELD_OUT = 8, 16


@torch.no_grad()
def fit(
    pair: Pair, texts: Iterable[Any], config: TranslatorConfig, payload: float, run: Any, score: Score | None, longest: int, progress: bool
) -> tuple[Maps, TranslatorSettings, ModelFingerprint, ModelFingerprint]:
    """Return what a `CacheTranslator` is made of; see its `fit`."""
    if not is_number(payload) or not (0 <= payload <= _LARGEST_CODED or payload == EXACT):
        expected = f"a share of the bytes of bfloat16 keys and values, 0 to {_LARGEST_CODED}, or {EXACT:g} for coefficients in float32"
        raise ConfigError.of("payload", expected, payload)
    whole_number("max_length", longest, 8, "at least 8 tokens")
    lowest = config.run_layers(run, pair.layers)
    with evaluating(pair.producer), evaluating(pair.consumer):
        models = (("producer", pair.producer), ("consumer", pair.consumer))
        theirs, own = (require_identity(model, f"{role}: the translator").fingerprint for role, model in models)
        read = [ids[:longest] for ids in sequences(texts, pair.tokenizer, pair.consumer)]
        fitting = Fitting(pair, read, config, lowest, payload == EXACT, progress)
        fitting.read()
        best = fitting.choose(payload, score)
        return fitting.maps(best, payload), fitting.settings(best, payload), theirs, own


class Fitting:
    """One fit: the texts that are read, those that are held out, and, once it has read them, regressions for any payload.

    `lowest` are the numbers of layers that the consumer may run; products are taken in float64 where it is to be exact.
    """

    def __init__(
        self, pair: Pair, texts: Sequence[torch.Tensor], config: TranslatorConfig, lowest: Sequence[int], exact: bool, progress: bool
    ) -> None:
        self.pair, self.config, self.lowest, self.progress = pair, config, list(lowest), progress
        self.dtype, self._began = torch.float64 if exact else torch.float32, perf_counter()
        self.texts, self.seconds, self.measured = [ids for ids in texts if len(ids) >= 2], dict[str, float](), dict[str, float]()
        long = [number for number, ids in enumerate(self.texts) if len(self.lowest) > 1 and len(ids) >= _LEAST_HELD_OUT]
        held_out = long[_HELD_OUT - 1 :: _HELD_OUT][:_HELD_OUT]
        if len(self.lowest) > 1 and not held_out:
            warnings.warn(f"'auto' needs 8 texts of {_LEAST_HELD_OUT} tokens or more to choose on: no layers are run.", stacklevel=5)
            self.lowest = [0]
        self.fitted = [ids for number, ids in enumerate(self.texts) if number not in held_out]
        self.held_out = [self.texts[number] for number in held_out]
        if config.metric == "loss" and max(map(len, self.fitted), default=0) < SHORTEST:
            raise ConfigError.of("texts", f"one of {SHORTEST} tokens at least", self.texts, "Or pass TranslatorConfig(metric='plain').")
        if len(self.fitted) < compat.process()[1]:
            expected = f"at least {compat.process()[1]} texts of 2 or more tokens besides the held-out ones, one for each process"
            raise ConfigError.of("texts", expected, len(self.fitted))

    def read(self) -> None:
        """Read the texts, and solve for all regressions."""
        pair, config = self.pair, self.config
        if config.layer_map == "fit":
            pair.fit_sources(self.fitted)
            self._lap("layers")
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
        self.codes: dict[int, list[Code]] = {lowest: [] for lowest in self.lowest}
        weights: dict[int, torch.Tensor] = {}
        for number, some in enumerate(passes_of(groups, self.widths, self.lowest, plain, sample, int(config.memory))):
            products = Products(pairs_of(some, self.lowest, plain), self.dtype, device)
            self._read_texts(products, weights, first=number == 0)
            for lowest in self.lowest:
                self._solve(products, some, lowest)
            self._lap("solving")

    def _lap(self, stage: str) -> None:
        """Add the time since the stage before to the seconds of a stage."""
        before, self._began = self._began, perf_counter()
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + self._began - before, 3)

    def _blocks(self, producer: States, consumer: States) -> dict[Key, torch.Tensor]:
        """Return what products are taken of, (tokens, width) each."""
        blocks = {("producer", layer): state.states for layer, state in producer.items()}
        blocks |= {("consumer", layer): state.states for layer, state in consumer.items()}
        blocks |= {("consumer input", layer): consumer[layer].hidden for layer in self.lowest}
        return blocks | {("producer input", layer): producer[self.pair.sources[layer]].hidden for layer in self.lowest}

    def _read_texts(self, products: Products, weights: dict[int, torch.Tensor], first: bool) -> None:
        """Add all texts to products, and what is read of them first to weights; each process reads its share, and gets the sums of all."""
        (process, processes), exact_tokens = compat.process(), self.config.exact_tokens
        hidden, costs = not self.progress or process > 0, self.costs if first else None
        for number, ids in enumerate(tqdm(self.fitted, unit=" texts", desc="Reading texts", disable=hidden)):
            mine = number % processes == process
            if number and not mine:  # all begin with the first text, whose means are what products are taken of
                continue
            producer, consumer = self.pair.states(ids, self.lowest)
            self._lap("reading")
            if costs is not None and mine and len(ids) >= SHORTEST:
                weights[number] = costs.add(self.pair, ids, consumer, exact_tokens, number)
                self._lap("gradients")
            exact = min(exact_tokens, len(ids) - 2)
            blocks = {key: block[exact:] for key, block in self._blocks(producer, consumer).items()}
            products.add(blocks, weights.get(number, torch.ones(len(ids)))[exact:] * mine)
            if first and mine:
                for key, sample in self.samples.items():
                    chosen = torch.linspace(0, len(ids) - exact - 1, sample.shape[1]).long().to(blocks[key].device)
                    sample[number] = blocks[key][chosen].to(sample)
            self._lap("products")
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
        self._lap("choice")
        if not all(map(math.isfinite, scores.values())):
            raise ConfigError.of("score", "a finite number for each text", scores)
        return min(scores, key=lambda lowest: scores[lowest])

    def _translated(self, maps: Maps, lowest: int, producer: States, consumer: States) -> States:
        """Return the consumer's states of a text as they are rebuilt from the producer's."""
        states, known = {layer: state.states for layer, state in producer.items()}, consumer[lowest].hidden
        coefficients: dict[int | None, torch.Tensor] = {}
        for code in range(len(maps.encoders)):
            sent = maps.pack({code: maps.coefficients(code, states, producer[maps.side_layer].hidden)})
            coefficients[code] = maps.decode(sent, len(known))[code].to(known.device)
        found, exact = dict(consumer), self.config.exact_tokens
        for decoder in maps.decoders:
            side, decode, bias = maps.placed(decoder.weights, known.device)
            rebuilt = known.float() @ side + bias
            if decode is not None:
                rebuilt += coefficients[decoder.code] @ decode
            true = consumer[decoder.layer]
            found[decoder.layer] = true._replace(states=torch.cat([true.states[:exact].to(rebuilt), rebuilt[exact:]]))
        return found

    def settings(self, lowest: int, payload: float) -> TranslatorSettings:
        """Return how the maps of a payload were fitted, where the consumer runs its lowest layers."""
        of_texts = len(self.texts), sum(map(len, self.texts)), self.seconds, self.measured
        own = self.config.exact_tokens, self.config.metric, self.shared, self.pair.sources
        return TranslatorSettings(float(payload), lowest, *own, *of_texts)

    def maps(self, lowest: int, payload: float) -> Maps:
        """Return the maps for a payload, where the consumer runs its lowest layers: codes of a budget of bits, all together."""
        codes, tables, bits, step = sorted(self.codes[lowest], key=lambda code: max(code[0].sources)), None, None, 1.0
        # Of each code: the directions that are sent, and how.
        chosen: list[tuple[Any, ...]] = [(torch.arange(len(own.strengths) if payload == EXACT else 0), None, None) for _, own in codes]
        if codes and 0 < payload < EXACT:
            quantizer, sizes = self._quantizer(codes, lowest, payload)
            tables, bits, step = quantizer.tables, quantizer.bits, quantizer.step
            orders = [replace(plan, order=torch.arange(len(plan.order))) for plan in quantizer.plans]
            deviations = [size[plan.order] / step for size, plan in zip(sizes, quantizer.plans, strict=True)]
            self._lap("coding")
            chosen = [*zip([plan.integers for plan in quantizer.plans], orders, deviations, strict=True)]
        encoders, decoders = list[CodeEncoder](), list[LayerDecoder]()
        for (group, regression), (directions, *coding) in zip(codes, chosen, strict=True):
            kept, number = directions.to(regression.decode.device), len(encoders) if len(directions) else None
            if number is not None:
                maps = regression.encode, regression.encode_side, regression.shift
                weights = CodeWeights(*((part[..., kept] / step).cpu().contiguous() for part in maps))
                encoders.append(CodeEncoder(group.name, group.sources, weights, *coding))
            side, decode, bias = regression.decoder(kept)
            widths = [self.widths["consumer", layer] for layer in group.layers]
            parts = zip(*(part.cpu().split(widths, dim=-1) for part in (side, decode * step, bias)), strict=True)
            for layer, (known, sent, shift) in zip(group.layers, parts, strict=True):
                decoder = Decoder(known.contiguous(), None if number is None else sent.contiguous(), shift.contiguous())
                decoders.append(LayerDecoder(layer, number, self.shapes[layer], decoder))
        decoders.sort(key=lambda decoder: decoder.layer)
        return Maps(tuple(encoders), tuple(decoders), self.pair.sources[lowest], tables, bits)

    def _quantizer(self, codes: Sequence[Code], lowest: int, payload: float) -> tuple[StepQuantizer, list[torch.Tensor]]:
        """Return the quantizer with which codes have the payload, and the deviations of each code's coefficients."""
        samples, sizes, width = [], [], sum(width for (kind, _), width in self.widths.items() if kind == "consumer")
        for group, regression in codes:
            states = torch.cat([self.samples[key] for key in group.keys[0]], dim=2)
            numbers = regression.coefficients(states, self.samples["producer input", lowest]).flatten(0, 1).cpu()
            size = numbers.square().mean(0).sqrt().clamp_min(_TINY)
            order = size.argsort(descending=True, stable=True)
            samples.append(Sample(order, size[order], (numbers / size)[:, order].T.contiguous()))
            sizes.append(size)
        return fit_step(samples, 16.0 * payload * width, _LEAST_BITS), sizes
