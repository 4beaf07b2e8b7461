"""Fitting a translator: both models read the same texts, maps are solved for, layers to run are chosen on held-out texts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from statistics import fmean
from time import perf_counter
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from hf_kvcaches import compat
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import require_identity
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.evaluate.texts import add_up, sequences
from hf_kvcaches.kernels.arguments import Decoder
from hf_kvcaches.translate.coding import Coding
from hf_kvcaches.translate.config import EXACT, FitOptions, Metric, TranslatorSettings
from hf_kvcaches.translate.maps import CodeEncoder, LayerDecoder, Maps
from hf_kvcaches.translate.pair import Pair, States
from hf_kvcaches.translate.plan import FitPlan, Group, Widths
from hf_kvcaches.translate.reading import SHORTEST, ErrorCosts, split_of, why_no_gradients
from hf_kvcaches.translate.regression import LEAST_RIDGE, Columns, Key, Known, Products, Regression, regress
from hf_kvcaches.translate.states import cache_of

# Every eighth text of so many tokens is held out to choose layers on, up to eight texts.
_HELD_OUT, _LEAST_HELD_OUT = 8, 16


class _Code(NamedTuple):
    """Layers that share a code, their regression, and what of the producer's it is on."""

    group: Group
    regression: Regression
    producer: Columns


@torch.no_grad()
def fit(
    producer: Any, consumer: Any, tokenizer: Any, texts: Iterable[str | Sequence[int]], options: FitOptions
) -> tuple[Maps, TranslatorSettings, ModelFingerprint, ModelFingerprint]:
    """Return the fields of a `CacheTranslator`; see its `fit`."""
    layer_map = options.config.layer_map
    pair = Pair(producer, consumer, tokenizer, None if layer_map == "fit" else layer_map)
    with evaluating(pair.producer), evaluating(pair.consumer):
        models = (("producer", pair.producer), ("consumer", pair.consumer))
        theirs, own = (require_identity(model, f"{role}: the translator").fingerprint for role, model in models)
        fitting = Fitting(pair, options, [ids[: options.max_length] for ids in sequences(texts, pair.tokenizer, pair.consumer)])
        fitting.read()
        lowest = fitting.choose()
        return fitting.maps(lowest, options.payload), fitting.settings(lowest, options.payload), theirs, own


class Fitting:
    """One fit: the texts that are read, those that are held out, and, once it has read them, regressions for any payload."""

    def __init__(self, pair: Pair, options: FitOptions, texts: Sequence[torch.Tensor]) -> None:
        self.pair, self.options, self.config = pair, options, options.config
        self.texts = [ids for ids in texts if len(ids) >= 2]
        self.lowest, self.seconds, self.measured = options.run_layers(pair.layers), dict[str, float](), dict[str, float]()
        long = [number for number, ids in enumerate(self.texts) if len(self.lowest) > 1 and len(ids) >= _LEAST_HELD_OUT]
        held_out = long[_HELD_OUT - 1 :: _HELD_OUT][:_HELD_OUT]
        if len(self.lowest) > 1 and not held_out:
            warnings.warn(f"'auto' needs 8 texts of {_LEAST_HELD_OUT} tokens or more to choose on: no layers are run.", stacklevel=5)
            self.lowest = [0]
        self.fitted = [ids for number, ids in enumerate(self.texts) if number not in held_out]
        self.held_out = [self.texts[number] for number in held_out]
        if len(self.fitted) < compat.process()[1]:
            expected = f"at least {compat.process()[1]} texts of 2 or more tokens besides the held-out ones, one for each process"
            raise ConfigError.of("texts", expected, len(self.fitted))

    def read(self) -> None:
        """Read the texts, and solve for all regressions."""
        pair, config = self.pair, self.config
        if config.layer_map == "fit":
            with timed(self.seconds, "layers"):
                pair.fit_sources(self.fitted)
        self.metric, states = self._usable_metric(), pair.states(torch.zeros(2, dtype=torch.long), [0])
        theirs, own = ({layer: state.states.shape[1] for layer, state in each.items()} for each in states)
        self.widths = Widths(theirs, own, states[0][pair.sources[0]].known.shape[1], states[1][0].known.shape[1])
        self.shapes = {layer: state.shape for layer, state in states[1].items()}
        self.shared = config.layers_of_width(max(self.widths.consumer.values()))
        plain = self.metric == "plain"
        plan = FitPlan.of(self.widths, pair.sources, self.lowest, self.shared, config.memory_bytes, plain)
        costs, dtype = None if plain else ErrorCosts(), torch.float64 if self.options.payload == EXACT else torch.float32
        self.codes: dict[int, list[_Code]] = {lowest: [] for lowest in self.lowest}
        self.samples: dict[Key, torch.Tensor] = {}
        weights: dict[int, torch.Tensor] = {}
        for number, groups in enumerate(plan.passes):
            products = Products(pairs_of(groups, self.lowest, plain), dtype, compat.input_device(pair.consumer))
            self._read_texts(products, groups, plan.sample, None if number else costs, weights)
            with timed(self.seconds, "solving"):
                for lowest in self.lowest:
                    self._solve(products, groups, lowest, costs)

    def _read_texts(
        self, products: Products, groups: Sequence[Group], sample: int, costs: ErrorCosts | None, weights: dict[int, torch.Tensor]
    ) -> None:
        """Add all texts to the products of some groups of layers; each process reads its share, and gets the sums of all.

        Args:
            sample: Tokens that are sampled.
            costs: What errors cost, to be added to; None where it is known or all cost the same.
            weights: Of the tokens of each text, added to with `costs`.
        """
        process, processes = compat.process()
        size, hidden = -(-sample // len(self.fitted)), not self.options.progress or process > 0
        for number, ids in enumerate(tqdm(self.fitted, unit=" texts", desc="Reading texts", disable=hidden)):
            if number % processes != process:
                continue
            with timed(self.seconds, "reading"):
                producer, consumer = self.pair.states(ids, self.lowest)
            if costs is not None and len(ids) >= SHORTEST:
                with timed(self.seconds, "gradients"):
                    weights[number] = costs.add(self.pair, ids, consumer, self.config.exact_tokens, number)
            with timed(self.seconds, "products"):
                exact = min(self.config.exact_tokens, len(ids) - 2)
                blocks = {name: block[exact:] for name, block in self._blocks(groups, producer, consumer)}
                products.add(blocks, weights.get(number, torch.ones(len(ids)))[exact:])
                self._add_sample(blocks, slice(number * size, (number + 1) * size))
        products.finish(processes)
        if processes > 1:
            add_up([*self.samples.values(), *chain.from_iterable([] if costs is None else costs.sides.values())])

    def _blocks(self, groups: Sequence[Group], producer: States, consumer: States) -> Iterator[tuple[Key, torch.Tensor]]:
        """Yield what products are taken of, (tokens, width) each."""
        for layer in self.lowest:
            yield ("consumer input", layer), consumer[layer].known
            yield ("producer input", layer), producer[self.pair.sources[layer]].known
        for group in groups:
            for role, states, layers in (("producer", producer, group.sources), ("consumer", consumer, group.layers)):
                device = states[layers[-1]].states.device
                yield (role, group.layers[0]), torch.cat([states[layer].states.to(device) for layer in layers], dim=1)

    def _add_sample(self, blocks: Mapping[Key, torch.Tensor], rows: slice) -> None:
        """Sample tokens of a text, in rows of its own so that the samples of processes can be added up."""
        for name, block in blocks.items():
            if name[0].startswith("producer"):
                if name not in self.samples:
                    size = (rows.stop - rows.start) * len(self.fitted)
                    self.samples[name] = torch.zeros(size, block.shape[1], device=compat.input_device(self.pair.consumer))
                chosen = torch.linspace(0, len(block) - 1, rows.stop - rows.start).long()
                self.samples[name][rows] = block[chosen.to(block.device)].to(self.samples[name])

    def choose(self) -> int:
        """Return the number of layers to run with which predictions after held-out texts are best."""
        if len(self.lowest) == 1:
            return self.lowest[0]
        scores, maps = {}, {lowest: self.maps(lowest, self.options.payload) for lowest in self.lowest}
        with timed(self.seconds, "choice"):
            read = [(ids, *self.pair.states(ids[: split_of(len(ids))], maps)) for ids in self.held_out]
            expected = [predictions(self.pair, ids, own) for ids, _, own in read]
            for lowest, own in maps.items():
                found = [predictions(self.pair, ids, self._translated(own, lowest, *states)) for ids, *states in read]
                kl = fmean(float(divergence(one, other).mean()) for one, other in zip(expected, found, strict=True))
                self.measured[f"{lowest} layers run"] = scores[lowest] = kl
                if self.options.score is not None:
                    scores[lowest] = -fmean(float(self.options.score(one, other)) for one, other in zip(expected, found, strict=True))
        if not all(map(math.isfinite, scores.values())):
            raise ConfigError.of("score", "a finite number for each text", scores)
        return min(scores, key=lambda lowest: scores[lowest])

    def settings(self, lowest: int, payload: float) -> TranslatorSettings:
        """Return how the maps of a payload were fitted, where the consumer runs its lowest layers."""
        of_texts = len(self.texts), sum(map(len, self.texts)), self.seconds, self.measured
        own = self.config.exact_tokens, self.metric, self.shared, self.pair.sources
        return TranslatorSettings(float(payload), lowest, *own, *of_texts)

    def maps(self, lowest: int, payload: float) -> Maps:
        """Return the maps for a payload, where the consumer runs its lowest layers: codes of a budget of bits, all together."""
        codes, exact = sorted(self.codes[lowest], key=lambda code: max(code.group.sources)), payload == EXACT
        coding, step, directions = None, 1.0, [torch.arange(len(code.regression.strengths) if exact else 0) for code in codes]
        if payload and not exact and codes:
            with timed(self.seconds, "coding"):
                known, coefficients = self.samples["producer input", lowest], []
                for code in codes:
                    name, columns = code.producer
                    coefficients.append(code.regression.coefficients(self.samples[name][:, columns], known).cpu())
                coding, step, directions = Coding.fit(coefficients, 16.0 * payload * sum(self.widths.consumer.values()))
        sent = [number for number, own in enumerate(directions) if len(own)]
        encoders, decoders = [], []
        for number, ((layers, sources), own, _) in enumerate(codes):
            kept = directions[number].to(own.decode.device)
            if number in sent:
                parts = ((part[..., kept] / step).cpu().contiguous() for part in (own.encode, own.encode_side, own.shift))
                encoders.append(CodeEncoder(codes[number].group.name, sources, *parts))
            side, decode, bias = own.decoder(kept)
            for layer in layers:
                columns = columns_of(layers, (layer,), self.widths.consumer)
                maps = [part[..., columns].cpu().contiguous() for part in (side, decode * step, bias)]
                place = sent.index(number) if number in sent else None
                weights = Decoder(maps[0], None if place is None else maps[1], maps[2])
                decoders.append(LayerDecoder(layer, place, self.shapes[layer], weights))
        decoders.sort(key=lambda decoder: decoder.layer)
        return Maps(tuple(encoders), tuple(decoders), self.pair.sources[lowest], None if coding is None else coding.only(sent))

    def _usable_metric(self) -> Metric:
        if self.config.metric == "plain":
            return "plain"
        short = "" if any(len(ids) >= SHORTEST for ids in self.fitted) else f"no text has {SHORTEST} tokens"
        if why := short or why_no_gradients(self.pair):
            name = type(self.pair.consumer).__name__
            warnings.warn(f"metric='loss' needs gradients of {name}, and there are none: {why}. Using 'plain'.", stacklevel=6)
            return "plain"
        return "loss"

    def _solve(self, products: Products, groups: Sequence[Group], lowest: int, costs: ErrorCosts | None) -> None:
        """Solve for the maps of some groups of layers above the lowest."""
        tokens, least = float(products.tokens), LEAST_RIDGE[products.dtype]
        known = Known(products, lowest, self.config.ridge or least)
        for group in tqdm(groups, unit=" groups of layers", desc="Solving", disable=not self.options.progress):
            layers = tuple(layer for layer in group.layers if layer > lowest)
            if not layers:
                continue
            used, names = Group(layers, self.pair.sources_of(layers)), [(role, group.layers[0]) for role in ("producer", "consumer")]
            x = names[0], columns_of(group.sources, used.sources, self.widths.producer)
            y = names[1], columns_of(group.layers, layers, self.widths.consumer)
            if costs is None:
                spread = products.covariance(names[1], names[1]).diagonal()[y[1]]
                roots = _plain_roots(spread, [self.widths.consumer[layer] for layer in layers])
            else:
                roots = [root for layer in layers for root in costs.roots(layer)]
            # Where there are hardly more tokens than regressors, the weakest directions are chance.
            ridge = self.config.ridge or max(least, 1e-4 * min(1.0, len(x[1]) / tokens) ** 3)
            self.codes[lowest].append(_Code(used, regress(known, x, y, roots, ridge), x))

    def _translated(self, maps: Maps, lowest: int, producer: States, consumer: States) -> States:
        """Return the consumer's states of a text as they are rebuilt from the producer's."""
        states, known = {layer: state.states for layer, state in producer.items()}, consumer[lowest].known.float()
        found, coefficients, exact = dict(consumer), dict[int, torch.Tensor](), self.config.exact_tokens
        for code, encoder in enumerate(maps.encoders):
            numbers = encoder.to(known.device).coefficients(states, producer[maps.side_layer].known)
            coefficients[code] = numbers if maps.coding is None else maps.coding.rounded(code, numbers)
        for decoder in maps.decoders:
            side, decode, bias = (torch.zeros(()) if part is None else part.to(known.device) for part in decoder.weights)
            rebuilt = known @ side + bias
            if decoder.code is not None:
                rebuilt = rebuilt + coefficients[decoder.code] @ decode
            true = consumer[decoder.layer]
            found[decoder.layer] = true._replace(states=torch.cat([true.states[:exact].to(rebuilt), rebuilt[exact:]]))
        return found


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the time inside to the seconds of a stage."""
    start = perf_counter()
    yield
    seconds[stage] = round(seconds.get(stage, 0.0) + perf_counter() - start, 3)


def pairs_of(groups: Sequence[Group], lowest: Sequence[int], plain: bool) -> list[tuple[Key, Key]]:
    """Return the pairs of blocks whose products are needed.

    Args:
        lowest: The numbers of layers that the consumer may run. The next layer's attention input is what is known of a token.
        plain: Whether all errors of a layer cost the same, which takes their variance.
    """
    pairs: list[tuple[Key, Key]] = []
    for layer in lowest:
        own, theirs = ("consumer input", layer), ("producer input", layer)
        pairs += [(own, own), (theirs, theirs), (own, theirs)]
        of_groups = [(kind, group.layers[0]) for group in groups if group.layers[-1] > layer for kind in ("producer", "consumer")]
        pairs += [(side, block) for block in of_groups for side in (own, theirs)]
    for group in groups:
        x, y = ("producer", group.layers[0]), ("consumer", group.layers[0])
        pairs += [(x, x), (x, y), *([(y, y)] if plain else [])]
    return pairs


def columns_of(layers: Sequence[int], chosen: Sequence[int], widths: Mapping[int, int]) -> torch.Tensor:
    """Return the columns of some layers in the concatenation of several."""
    starts, start = {}, 0
    for layer in layers:
        starts[layer], start = start, start + widths[layer]
    return torch.cat([torch.arange(starts[layer], starts[layer] + widths[layer]) for layer in chosen])


def _plain_roots(spread: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
    """Return roots of costs with which the variance of each layer costs 1.

    Args:
        spread: The variances of all columns.
    """
    units = [part.sum().clamp_min(1e-300).rsqrt() for part in spread.split(list(widths))]
    return [unit * torch.eye(width, dtype=spread.dtype, device=spread.device)[None] for width, unit in zip(widths, units, strict=True)]


def predictions(pair: Pair, ids: torch.Tensor, states: States) -> torch.Tensor:
    """Return the consumer's logits of a text's last tokens, (tokens, vocabulary), given the states of those before."""
    split, model = split_of(len(ids)), pair.consumer
    cache = cache_of(pair.rotation, states, model.dtype)
    asked = ids[None, split:].to(compat.input_device(model))
    logits: torch.Tensor = model(input_ids=asked, **compat.cache_kwargs(model, cache)).logits[0]
    return logits
