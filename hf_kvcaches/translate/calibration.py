"""Fitting a translator: both models read the same texts, their states are summed up, maps are solved for, layers are routed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.calibrating import Tokenized, add_up, sequences
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import require_identity
from hf_kvcaches.core.metric import Sizes, output_metric
from hf_kvcaches.core.model_parts import tokenizer_part
from hf_kvcaches.core.moments import Moments
from hf_kvcaches.core.verify import evaluating
from hf_kvcaches.core.watching import Attended
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, KVCacheError, UnsupportedError, is_number, require_choice, whole_number
from hf_kvcaches.translate.head import CODE_DTYPES
from hf_kvcaches.translate.maps import Maps
from hf_kvcaches.translate.metric import QueryMoments, attention_metric, blend, gradient_rows, loss_gradients
from hf_kvcaches.translate.moments import BlockMoments
from hf_kvcaches.translate.paper.routing import Route
from hf_kvcaches.translate.solving import Solver
from hf_kvcaches.translate.states import PromptTokens, ReadingCache, State, read_states, require_plain_layers
from hf_kvcaches.translate.translator import Method, Metric, TranslatorSettings

_BITS = {"int4": 4, "int8": 8, "float16": 16, "float32": 32}
# One text in so many is kept apart to try layers on, and no more than so many texts.
_APART, _MOST_APART = 8, 8


@dataclass(frozen=True)
class Wanted:
    """What the caller asks for; described in `CacheTranslator.fit`. Checked when made."""

    method: Method
    payload: float
    dtype: str | None
    group: int | None
    patch_layers: Literal["auto"] | Sequence[int] | None
    recompute_layers: int
    metric: Metric
    heads: Literal["joint", "each"]
    ranks: tuple[int, int] | None
    aligner: Literal["ridge", "mlp"]
    score: Any
    ridge: float | None

    def __post_init__(self) -> None:
        choices = {"method": Method, "metric": Metric, "heads": Literal["joint", "each"], "aligner": Literal["ridge", "mlp"]}
        for name, allowed in choices.items():
            require_choice(name, getattr(self, name), get_args(allowed))
        require_choice("dtype", self.dtype, (*CODE_DTYPES, None))
        if not is_number(self.payload) or not 0 <= self.payload <= 1:
            raise ConfigError.of("payload", "a share of 0 to 1", self.payload)
        if self.group is not None:
            object.__setattr__(self, "group", whole_number("group", self.group, 1, "a number of tokens, or None for all"))
        recomputed = whole_number("recompute_layers", self.recompute_layers, 0, "a number of layers")
        object.__setattr__(self, "recompute_layers", recomputed)
        if self.ridge is not None and (not isinstance(self.ridge, float) or not 0 < self.ridge < 1):
            raise ConfigError.of("ridge", "a small share above 0, as 1e-8, or None", self.ridge)
        paper = self.method == "paper"
        if not paper and (self.heads != "joint" or self.ranks is not None):
            raise ConfigError("heads, ranks: only method='paper' has them. Leave them out.")
        if self.ranks is not None:
            expected = "two numbers of codes above 0, of keys and of values"
            if not isinstance(self.ranks, tuple | list) or len(self.ranks) != 2:
                raise ConfigError.of("ranks", expected, self.ranks)
            object.__setattr__(self, "ranks", tuple(whole_number("ranks", rank, 1, expected) for rank in self.ranks))
        if self.method == "cross_layer" and self.patch_layers not in ("auto", None, ()):
            raise ConfigError("patch_layers: with method='cross_layer' all layers come of one code. Leave it out.")

    @property
    def code_dtype(self) -> str:
        """Of codes."""
        return self.dtype or ("float16" if self.method == "paper" else "int4")

    def ridge_for(self, moments: BlockMoments) -> float:
        """The regularisation of a fit."""
        if self.ridge is not None:
            return self.ridge
        # Where there are hardly more tokens than columns to regress on, the weakest directions are chance.
        columns = moments.places["producer"].stop - moments.places["one"].start
        return max(1e-8, 1e-4 * min(1.0, columns / max(moments.count, 1)) ** 3)

    def directions(self, width: int) -> int:
        """How many codes stand for so many keys and values."""
        return int(self.payload * width * 8 / min(8, _BITS[self.code_dtype]))


class Sums:
    """What is kept of all texts: moments of each layer that is sent, or of all together."""

    def __init__(self, pair: Pair, wanted: Wanted, sent: Sequence[int]) -> None:
        self.wanted, self.sent, self.pair = wanted, tuple(sent), pair
        self.moments: dict[int, BlockMoments] = {}
        self.queries: dict[int, QueryMoments] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        # Of the gradients at keys and values.
        self.losses: dict[int, Moments] = {}
        self.shapes: dict[str, tuple[int, int, int]] = {}

    def add(self, producer: dict[int, State], consumer: dict[int, State]) -> None:
        """Counts a text in.

        Args:
            consumer: Likewise, with what enters the lowest layer that is not run.
        """
        known = consumer[self.wanted.recompute_layers].hidden
        assert known is not None
        for role, states in (("producer", producer), ("consumer", consumer)):
            shapes = {(state.keys.shape[1], state.values.shape[1], state.heads) for state in states.values()}
            if len(shapes) > 1:
                raise UnsupportedError(f"{role}: its layers keep keys and values of different shapes, {sorted(shapes)}.")
            self.shapes[role] = shapes.pop()
        if self.wanted.method == "cross_layer":
            self._add(-1, known, [producer[layer] for layer in self.sent], [consumer[layer] for layer in self.sent])
            return
        for layer in self.sent:
            self._add(layer, known, [producer[layer]], [consumer[layer]])

    def _add(self, key: int, known: torch.Tensor, producer: Sequence[State], consumer: Sequence[State]) -> None:
        x, y = (torch.cat([state.pair.to(known.device) for state in states], dim=1) for states in (producer, consumer))
        if key not in self.moments:
            widths = {"one": 1, "side": known.shape[1], "producer": x.shape[1], "consumer": y.shape[1]}
            self.moments[key] = BlockMoments(widths, known.device)
        self.moments[key].add(one=known.new_ones(len(known), 1), side=known, producer=x, consumer=y)

    def look(self, attended: Attended) -> None:
        """Counts a layer's queries in; see `ReadingCache`."""
        layer, module, query, keys, values, options = attended
        if layer not in self.sent:
            return
        if layer not in self.queries:
            output = output_metric(module, query.shape[1], values)
            if output is None:
                raise UnsupportedError(f"metric: found no output projection in {type(module).__name__}. Use metric='plain'.")
            sizes = Sizes.of(query, keys, values, options, True)
            self.outputs[layer] = output
            self.queries[layer] = QueryMoments(sizes, self.pair.rotation.layers[layer], keys.device)
        self.queries[layer].add(query)

    def add_gradients(self, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]], positions: torch.Tensor) -> None:
        """Adds what a loss asks of a text's keys and values.

        Args:
            positions: (1, tokens).
        """
        for layer in self.sent:
            rows = gradient_rows(self.pair.rotation.layers[layer], *gradients[layer], positions)
            self.losses.setdefault(layer, Moments((), rows.shape[1], rows.device)).add(rows)

    def metric(self, layer: int, spread: torch.Tensor) -> torch.Tensor:
        """What errors of a layer cost."""
        if self.wanted.metric == "plain":
            return torch.eye(len(spread), dtype=torch.float64) / max(float(spread.trace()), 1e-300)
        keys = self.shapes["consumer"][0]
        made = attention_metric(self.queries[layer].logit_moment(), self.outputs[layer], spread[keys:, keys:])
        if self.wanted.metric == "attention":
            return made / max(float((made * spread.cpu()).sum()), 1e-300)
        return blend(self.losses[layer].mean.cpu(), made)


class Pair:
    """Two models that read the same texts."""

    def __init__(self, producer: Any, consumer: Any, tokenizer: Any) -> None:
        self.producer, self.consumer = compat.base_model(producer), compat.base_model(consumer)
        for role, model in (("producer", producer), ("consumer", consumer)):
            if compat.has_learned_prompt(model):
                raise UnsupportedError(f"{role}: a learned prompt stands before every text, and is in no fingerprint.")
        self.rotation = require_plain_layers(compat.decoder_config(self.consumer.config))
        require_plain_layers(compat.decoder_config(self.producer.config))
        counts = [len(compat.decoder_layers(model)[2]) for model in (self.producer, self.consumer)]
        if counts[0] != counts[1]:
            raise UnsupportedError(
                f"producer, consumer: expected as many layers in both, got {counts[0]} and {counts[1]}. Each is translated to its like."
            )
        self.layers = counts[0]
        self.tokenizer = Tokenized(_one_tokenizer(tokenizer))
        sizes = [model.get_input_embeddings().weight.shape[0] for model in (self.producer, self.consumer)]
        if sizes[0] != sizes[1] and self.tokenizer.tokenizer is None:
            raise ConfigError.of(
                "tokenizer",
                "the models' tokenizer, as their embeddings have different sizes",
                sizes,
                "Other tokens can't be translated.",
            )
        if self.tokenizer.tokenizer is not None and len(self.tokenizer.tokenizer) > min(sizes):
            raise FingerprintMismatch(
                f"tokenizer: has {len(self.tokenizer.tokenizer)} tokens, and the models' embeddings {sizes[0]} (producer) and {sizes[1]} "
                "(consumer). Models that read other tokens can't share a prompt: take a pair with one tokenizer."
            )

    def fingerprints(self) -> tuple[ModelFingerprint, ModelFingerprint]:
        """Of the producer and the consumer."""
        producer = require_identity(self.producer, "producer: the translator", any_precision=True)
        return producer, require_identity(self.consumer, "consumer: the translator", any_precision=True)

    def states(
        self, ids: torch.Tensor, lowest: int, hidden: Sequence[int] = (), queries: Callable[[Attended], None] | None = None
    ) -> tuple[dict[int, State], dict[int, State]]:
        """What both models make of a text, by layer.

        Args:
            ids: (tokens,).
        """
        found: list[dict[int, State]] = []
        for model, extra in ((self.producer, ()), (self.consumer, (lowest,))):
            states: dict[int, State] = {}
            tokens = PromptTokens.of(ids).to(compat.input_device(model))
            asked = queries if model is self.consumer and extra else None
            read_states(model, tokens, states.__setitem__, hidden=(*hidden, *extra), queries=asked)
            found.append(states)
        return found[0], found[1]


def _one_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer of both models, where a pair agrees."""
    if not isinstance(tokenizer, tuple | list):
        return tokenizer
    if len(tokenizer) != 2:
        raise ConfigError.of("tokenizer", "one tokenizer, or the producer's and the consumer's", f"{len(tokenizer)} of them")
    first, second = (tokenizer_part(each) for each in tokenizer)
    # A template says how texts are made, not which tokens a text becomes.
    different = [name for name in {**first, **second} if name != "chat template" and first.get(name) != second.get(name)]
    if different:
        raise FingerprintMismatch(
            f"tokenizer: the producer's and the consumer's differ in {', '.join(different)}, so one text would be other tokens to each. "
            "Take a pair with one tokenizer."
        )
    return tokenizer[1]


class Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time inside to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 3)


@torch.no_grad()
def fit(
    producer: Any,
    consumer: Any,
    tokenizer: Any,
    texts: Iterable[str | Sequence[int]],
    wanted: Wanted,
    max_length: int,
    progress: bool,
) -> tuple[Maps, TranslatorSettings, Route, tuple[ModelFingerprint, ModelFingerprint]]:
    """See `CacheTranslator.fit`."""
    if wanted.method == "paper":
        wanted = replace(wanted, metric="plain")  # the only one that it has
    pair, clock = Pair(producer, consumer, tokenizer), Clock()
    sent = range(wanted.recompute_layers + 1, pair.layers)
    if wanted.recompute_layers >= pair.layers:
        raise ConfigError.of("recompute_layers", f"fewer than the {pair.layers} layers there are", wanted.recompute_layers)
    max_length = whole_number("max_length", max_length, 8, "at least 8 tokens")
    with evaluating(pair.producer), evaluating(pair.consumer):
        fingerprints = pair.fingerprints()
        prefixes = [ids[:max_length] for ids in sequences(texts, pair.tokenizer, pair.consumer) if len(ids) >= 2]
        routed = wanted.patch_layers is not None and wanted.method != "cross_layer" and len(sent) > 0
        apart = _kept_apart(prefixes) if routed else []
        kept = [ids for number, ids in enumerate(prefixes) if number not in set(apart)]
        if len(kept) < compat.process()[1]:
            expected = f"at least {compat.process()[1]} of at least 2 tokens, one for each process, beside those kept apart"
            raise ConfigError.of("texts", expected, len(kept))
        sums = Sums(pair, wanted, sent)
        if sent:
            wanted = _read(pair, sums, kept, wanted, clock, progress)
            join_processes(sums)
        with clock.stage("fit"):
            solver = Solver(sums, wanted)
            maps = solver.solve()
        route, measured = Route(()), dict[str, float]()
        if routed:
            from hf_kvcaches.translate.paper.patching import patch

            trial = [prefixes[number] for number in apart]
            maps, route, measured = patch(pair, solver, maps, wanted, kept, trial, clock, progress)
            if trial and not route.patched:
                # What was kept apart for a choice that left all as it was counts like the rest.
                wanted = _read(pair, sums, trial, wanted, clock, progress, shared=False)
                with clock.stage("fit"):
                    maps = Solver(sums, wanted).solve()
        for role, before, after in zip(("producer", "consumer"), fingerprints, pair.fingerprints(), strict=True):
            before.require_same(after, f"The first half of what the {role} made of the texts")
    settings = TranslatorSettings(
        method=wanted.method,
        payload=float(wanted.payload),
        dtype=wanted.code_dtype,
        group=wanted.group,
        recompute_layers=wanted.recompute_layers,
        metric=wanted.metric,
        ridge=wanted.ridge,
        layers=pair.layers,
        prefixes=len(prefixes),
        tokens=sum(map(len, prefixes)),
        seconds=clock.seconds,
        measured=measured,
    )
    return maps, settings, route, fingerprints


def _kept_apart(prefixes: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of the texts to try layers on: every eighth of those that are long enough to ask for something behind a beginning."""
    long = [number for number, ids in enumerate(prefixes) if len(ids) >= 16]
    return long[_APART - 1 :: _APART][:_MOST_APART]


def _read(
    pair: Pair, sums: Sums, prefixes: Sequence[torch.Tensor], wanted: Wanted, clock: Clock, progress: bool, shared: bool = True
) -> Wanted:
    """Feeds texts in, where they are shared this process' share; returns what is asked for, with a metric that can be had."""
    own, processes = compat.process() if shared else (0, 1)
    queries = None if wanted.metric == "plain" else sums.look
    for number, ids in enumerate(tqdm(prefixes, unit=" texts", desc="Reading", disable=not progress or compat.process()[0] > 0)):
        if number % processes != own:
            continue
        with clock.stage("prefill"):
            sums.add(*pair.states(ids, wanted.recompute_layers, queries=queries))
        if wanted.metric == "loss":
            with clock.stage("gradients"):
                try:
                    add_gradients(pair.consumer, sums, ids, number)
                except KVCacheError:
                    raise
                except (RuntimeError, NotImplementedError, AttributeError) as error:
                    warnings.warn(
                        f"metric='loss' needs gradients, which {type(pair.consumer).__name__} has not: {error}. Using 'attention'.",
                        stacklevel=4,
                    )
                    wanted = replace(wanted, metric="attention")
                    sums.wanted = wanted
    return wanted


def add_gradients(model: PreTrainedModel, sums: Sums, ids: torch.Tensor, seed: int) -> None:
    """Counts in what the consumer's loss asks of a text's keys and values.

    Args:
        ids: Of the text, (tokens,).
    """
    cache = ReadingCache(model)
    cache.leaves = []
    tokens = PromptTokens.of(ids).to(compat.input_device(model))
    sums.add_gradients(loss_gradients(model, tokens.ids, cache.leaves, cache, seed), tokens.positions)


def join_processes(sums: Sums) -> None:
    """Adds up what all processes read, so that each has everything."""
    if compat.process()[1] == 1:
        return
    moments = [*(blocks.sums for blocks in sums.moments.values()), *sums.losses.values()]
    add_up(part for each in moments for part in (each.total, each.count))
    add_up(part for queries in sums.queries.values() for part in (queries.total, queries.count))
