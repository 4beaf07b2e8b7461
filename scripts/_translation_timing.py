"""Prompts answered by a consumer itself, from codes, and from raw keys and values: how long each takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from shared.models import Pair
from shared.results import Row
from shared.timing import in_turns, ratios, seconds_of, spread, synchronize
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.kernels.arguments import Decoder
from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.codes import SemanticCodes
from hf_kvcaches.translate.config import EXACT, TranslatorSettings
from hf_kvcaches.translate.maps import CodeEncoder, LayerDecoder, Maps
from hf_kvcaches.translate.translator import CacheTranslator

OWN, CODES, BYTES, ONE = "consumer's prefill", "codes in hand", "codes as bytes", "codes, first layer run"
RAW = "raw keys and values"
# Of logits: how far codes that are the keys and values themselves may change them, and the way through bytes.
LOSSLESS, EQUAL = 1e-4, 1e-5


class Answer(NamedTuple):
    """One request."""

    seconds: float  # until the first token, from what was sent on, the making of the cache included
    producing: float  # seconds of the producer, until it had what is sent
    nbytes: int  # of what is sent
    tokens: int  # of the prompt


class Side:
    """A way to the first token: `OWN`, `RAW`, or with a translator (`codec`) any other; `BYTES` reads codes from bytes."""

    def __init__(self, name: str, producer: PreTrainedModel, pair: Pair, codec: CacheTranslator | None = None) -> None:
        self.name, self.producer, self.pair, self.codec = name, producer, pair, codec
        self.model: Any = pair.plain if codec is None else pair.switched

    def produce(self, ids: torch.Tensor) -> Any:
        """What is sent of a prompt, (1, tokens)."""
        if self.name == OWN:
            return None
        if self.codec is None:
            return raw_states(self.producer, ids)
        codes = self.codec.encode(self.producer, ids)
        return codes.to_bytes() if self.name == BYTES else codes

    def cache(self, payload: Any) -> Any:
        """A cache that knows what was sent."""
        if self.codec is not None:
            codes = SemanticCodes.from_bytes(payload) if isinstance(payload, bytes) else payload
            return TranslatedCache(self.pair.switched, self.codec, codes)
        cache = DynamicCache(config=self.pair.plain.config)
        for layer, states in enumerate(payload or ()):
            cache.update(*(part.to(self.pair.device, self.model.dtype) for part in states), layer)
        return cache

    def answer(self, ids: torch.Tensor, payload: Any) -> float:
        """Seconds until the first token."""
        generate = lambda: self.model.generate(ids, past_key_values=self.cache(payload), max_new_tokens=1, do_sample=False)  # noqa: E731
        return seconds_of(generate, ids.device)

    @torch.no_grad()
    def logits(self, ids: torch.Tensor, payload: Any) -> torch.Tensor:
        """Of the first new token, in float64."""
        cache = self.cache(payload)
        out: torch.Tensor = self.model(input_ids=ids[:, cache.get_seq_length() :], past_key_values=cache, logits_to_keep=1).logits
        return out[0, -1].double()


@torch.no_grad()
def raw_states(producer: PreTrainedModel, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A producer's keys and values of all tokens but the last, as they would be sent: bfloat16, in CPU memory as codes are."""
    cache = DynamicCache(config=producer.config)
    producer.base_model(input_ids=ids[:, :-1], past_key_values=cache)
    return [(layer.keys.to("cpu", torch.bfloat16), layer.values.to("cpu", torch.bfloat16)) for layer in cache.layers]


def bytes_of(payload: Any) -> int:
    """How many are sent."""
    if payload is None or isinstance(payload, bytes):
        return len(payload or b"")
    return payload.nbytes if isinstance(payload, SemanticCodes) else sum(part.nbytes for states in payload for part in states)


Answers = dict[str, list[Answer]]


def ask_in_turns(sides: Sequence[Side], prompts: Sequence[torch.Tensor]) -> Answers:
    """All prompts: first what is sent of them, by all sides, then the answers to them, by all sides."""

    def produce(side: Side, ids: torch.Tensor) -> tuple[Any, float]:
        synchronize(ids.device)
        begin = time.perf_counter()
        payload = side.produce(ids)
        synchronize(ids.device)
        return payload, time.perf_counter() - begin

    def answer(side: Side, number: int) -> Answer:
        payload, producing = sent[side.name][number]
        seconds = side.answer(prompts[number], payload)
        return Answer(seconds, producing, bytes_of(payload), prompts[number].shape[1])

    sent = in_turns({side.name: lambda number, side=side: produce(side, prompts[number]) for side in sides}, len(prompts))
    return in_turns({side.name: lambda number, side=side: answer(side, number) for side in sides}, len(prompts))


def rows_of(answers: Answers, **labels: Any) -> Iterator[Row]:
    """Two rows for each side: until the first token, with ratios within a prompt, and until the producer had what is sent."""
    base = [answer.seconds for answer in answers[OWN]]
    for name, own in answers.items():
        row = {**labels, "side": name, "tokens": round(statistics.mean(answer.tokens for answer in own)), "count": len(own)}
        sent = round(statistics.mean(answer.nbytes for answer in own))
        row |= {"value": sent, "unit": "bytes"} if sent else {}
        seconds = [answer.seconds for answer in own]
        yield {**row, "measure": "first token", **spread("time", seconds, 1e3), **ratios(base, seconds)}
        if sent:
            yield {**row, "measure": "producer", **spread("time", [answer.producing for answer in own], 1e3)}


def unchanged(pair: Pair) -> Side:
    """A side whose codes are the consumer's keys and values: all that is not fitted is on its way."""
    config: Any = pair.plain.config
    heads, dim = config.num_key_value_heads, config.head_dim
    same, hidden = torch.eye(2 * heads * dim), torch.zeros(config.hidden_size, 2 * heads * dim)
    encoders, decoders = [], []
    for layer in range(1, config.num_hidden_layers):
        encoders.append(CodeEncoder(f"layer.{layer}", (layer,), same, hidden, hidden[0]))
        decoders.append(LayerDecoder(layer, layer - 1, (heads, dim, dim), Decoder(hidden, same, hidden[0])))
    settings = TranslatorSettings(EXACT, 0, 4, "plain", 1, tuple(range(config.num_hidden_layers)))
    model = ModelFingerprint.of(pair.switched)
    maps = Maps(tuple(encoders), tuple(decoders), 0, None)
    return Side("unchanged", pair.switched, pair, CacheTranslator(maps, settings, model, model))


def prove(sides: Sequence[Side], prompts: Sequence[torch.Tensor], what: str, *, trained: bool) -> tuple[str, list[Row]]:
    """Compare the first token's distribution with that of the consumer's prefill; return a sentence, and rows with the divergences.

    Only codes between `trained` models must be better than raw keys and values.
    """
    lossless, worst = unchanged(sides[0].pair), 0.0
    kls, same = {side.name: list[float]() for side in sides}, {side.name: 0 for side in sides}
    for ids in prompts:
        logits = {side.name: side.logits(ids, side.produce(ids)) for side in sides}
        base = logits[OWN]
        worst = max(worst, float((lossless.logits(ids, lossless.produce(ids)) - base).abs().max()))
        if (apart := float((logits[CODES] - logits[BYTES]).abs().max())) > EQUAL:
            raise SystemExit(f"{what}: codes as bytes give other logits than codes in hand, by {apart:.2g}: nothing timed")
        for name, ours in logits.items():
            kls[name].append(float((base.softmax(-1) * (base.log_softmax(-1) - ours.log_softmax(-1))).sum()))
            same[name] += bool(base.argmax() == ours.argmax())
    if not worst <= LOSSLESS:
        raise SystemExit(f"{what}: codes that are its own keys and values change a model's logits by {worst:.2g}: nothing timed")
    means = {name: statistics.fmean(values) for name, values in kls.items()}
    if trained and not means[CODES] < means[RAW]:
        raise SystemExit(f"{what}: codes diverge by {means[CODES]:.2g} nats, raw keys and values by {means[RAW]:.2g}: nothing timed")
    del means[OWN]
    rows = [{"side": name, "measure": "KL", "count": len(prompts), "value": round(kl, 6), "unit": "nats"} for name, kl in means.items()]
    listed = ", ".join(f"{name} {kl:.2g} ({same[name]}/{len(prompts)})" for name, kl in means.items())
    text = f"{what}: a model's own keys and values as codes change nothing, to {worst:.1e}"
    return f"{text}; mean KL of the first token in nats (same token): {listed}", rows
