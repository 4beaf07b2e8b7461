"""Texts to translate prefixes of, and what a consumer says behind them against its own prefill."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _translation_sides import RAW, Side, States, Workshop, as_sent, filled, held, plain_bytes, read

from hf_kvcaches import compat
from hf_kvcaches.core.calibrating import divergence
from hf_kvcaches.core.growing import GrowingCache
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.translator import CacheTranslator
from tests.testbed import held_out
from tests.testbed.documents import Document, Filler, fit_document
from tests.testbed.recall import encode

DOMAINS = ("prose", "verse")
WORKLOADS = (*DOMAINS, "documents")
# Seeds that translators are calibrated on begin here; those that they are measured on begin at `--seed`.
CALIBRATION_SEED = 10**6
# Tokens behind a prefix that divergences are taken of; of prefixes; facts in a document.
ASKED = 32
TOKENS, FACTS = (200, 900), (4, 8)


@dataclass(frozen=True)
class Text:
    """A prefix, and what truly follows."""

    workload: str  # its name
    prompt: list[int]  # token ids; all but the last are translated
    continuation: list[int]  # token ids, fed in as they are
    answers: tuple[tuple[int, int], ...] = ()  # spans of the continuation that a question asks for


@dataclass(frozen=True)
class Answer:
    """What became of one text."""

    tokens: int  # that were translated
    bytes: int  # as they are sent
    plain: int  # bytes of the consumer's keys and values of these tokens in bfloat16
    kls: tuple[float, ...]  # in nats, at each place
    variations: tuple[float, ...]  # total variation at each place
    agreed: int  # places with the same likeliest token as behind its own prefill
    losses: tuple[float, ...]  # of the true next tokens
    losses_alone: tuple[float, ...]
    right: int  # answers that are right
    right_alone: int
    asked: int


class Half:
    """Half of a held-out text."""

    def __init__(self, tokenizer: Any, domain: str, *, second: bool, longest: int = TOKENS[1]) -> None:
        text = held_out(domain)
        text = text[len(text) // 2 :] if second else text[: len(text) // 2]
        self.tokenizer, self.filler, self.longest = tokenizer, Filler(text), longest
        self.ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def piece(self, rng: random.Random, more: int = 0) -> list[int]:
        """Consecutive tokens, a random number of them."""
        length = rng.randint(TOKENS[0], self.longest) + more
        start = rng.randrange(len(self.ids) - length)
        return self.ids[start : start + length]

    def document(self, rng: random.Random) -> Document:
        """A document with paragraphs of this half."""
        count = lambda text: len(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
        return fit_document(rng, self.filler, count, rng.randint(TOKENS[0], self.longest), facts=rng.randint(*FACTS))


def calibration_texts(tokenizer: Any, count: int, longest: int = TOKENS[1], seed: int = CALIBRATION_SEED) -> list[list[int]]:
    """As many documents over prose, documents over verse, prose and verse, of the first halves."""
    halves = [Half(tokenizer, domain, second=False, longest=longest) for domain in DOMAINS]
    found = []
    for number in range(count):
        half, rng = halves[number % 2], random.Random(seed + number)
        found.append(encode(tokenizer, half.document(rng)).ids if number % 4 < 2 else half.piece(rng))
    return found


def evaluation_texts(tokenizer: Any, count: int, seed: int, longest: int = TOKENS[1]) -> list[Text]:
    """So many of each workload, of the second halves; documents over prose and verse in turn."""
    halves = {domain: Half(tokenizer, domain, second=True, longest=longest) for domain in DOMAINS}
    found = []
    for workload in WORKLOADS:
        for number in range(count):
            rng = random.Random(f"{workload} {seed + number}")
            if workload == "documents":
                found.append(_quiz(tokenizer, halves[DOMAINS[number % 2]].document(rng)))
            else:
                ids = halves[workload].piece(rng, more=ASKED)
                found.append(Text(workload, ids[:-ASKED], ids[-ASKED:]))
    return found


def _quiz(tokenizer: Any, document: Document) -> Text:
    """A document's context, and behind it all questions with their answers."""
    encoded = encode(tokenizer, document)
    begin = encoded.kinds.index("question")
    answers = tuple((start - begin, stop - begin) for start, stop, _ in encoded.answers)
    return Text("documents", encoded.ids[:begin], encoded.ids[begin:], answers)


def next_tokens(model: Any, text: Text, cache: GrowingCache | None = None) -> torch.Tensor:
    """Logits at each place of the continuation, (places, vocabulary)."""
    ids = [*text.prompt, *text.continuation[:-1]]
    device = compat.input_device(model)
    start = 0 if cache is None else int(cache.get_seq_length())
    fed = torch.tensor([ids[start:]], device=device)
    logits: torch.Tensor = model(input_ids=fed, past_key_values=cache, use_cache=cache is not None).logits
    return logits[0, -len(text.continuation) :].float().cpu()


def judged(text: Text, alone: torch.Tensor, found: torch.Tensor) -> dict[str, Any]:
    """What the logits say, as fields of `Answer`."""
    asked = min(ASKED, len(text.continuation))
    true = torch.tensor(text.continuation[:asked])
    p, q = alone[:asked], found[:asked]
    loss = lambda logits: tuple(torch.nn.functional.cross_entropy(logits, true, reduction="none").tolist())  # noqa: E731
    guesses = {"right": found.argmax(-1).tolist(), "right_alone": alone.argmax(-1).tolist()}
    hits = {
        name: sum(guess[start:stop] == text.continuation[start:stop] for start, stop in text.answers) for name, guess in guesses.items()
    }
    return {
        "kls": tuple(divergence(p, q).tolist()),
        "variations": tuple(((p.softmax(-1) - q.softmax(-1)).abs().sum(-1) / 2).tolist()),
        "agreed": int((p.argmax(-1) == q.argmax(-1)).sum()),
        "losses": loss(q),
        "losses_alone": loss(p),
        **hits,
        "asked": len(text.answers),
    }


class Bench:
    """Asks a consumer behind prefixes that came from a producer."""

    def __init__(self, workshop: Workshop, made: Mapping[str, CacheTranslator]) -> None:
        self.workshop, self.made, self.pair = workshop, made, workshop.pair

    def ask(self, text: Text, sides: Sequence[Side]) -> Iterator[tuple[Side, Answer]]:
        """Answers of each side."""
        producer, consumer = self.pair.producer, self.pair.consumer
        ids = torch.tensor([text.prompt], device=compat.input_device(consumer))
        theirs, own = read(producer, ids[:, :-1]), read(consumer, ids[:, :-1])
        alone = next_tokens(consumer, text)
        translated: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        known = {"tokens": ids.shape[1] - 1, "plain": plain_bytes(own)}
        for side in sides:
            if side.kind == "oracle":
                found, size = alone, 0
            elif side.kind in ("solved", "fitted"):
                cache, size = self._translated(side, ids)
                # Seen now: the answer is written behind it.
                translated[side.name] = held(cache)
                found = next_tokens(consumer, text, cache)
            elif side.kind == "alone":
                assert side.layer is not None
                taken = translated.get(side.of)
                if taken is None:
                    raise ConfigError.of("sides", f"{side.of!r} before {side.name!r}", [each.name for each in sides])
                mixed = [*own[: side.layer], taken[side.layer], *own[side.layer + 1 :]]
                found, size = next_tokens(consumer, text, filled(consumer, mixed)), 0
            else:
                states, size = self._sent(side, theirs, own)
                found = next_tokens(consumer, text, filled(consumer, states))
            yield side, Answer(**known, bytes=size, **judged(text, alone, found))

    def _translated(self, side: Side, ids: torch.Tensor) -> tuple[TranslatedCache, int]:
        translator = self.made[side.name]
        codes = translator.encode(self.pair.producer, ids)
        cache = TranslatedCache(self.pair.consumer, translator, codes)
        cache.prefill(ids)
        # Without codes nothing has to be sent: the consumer has the prompt anyway.
        return cache, codes.nbytes if translator.maps.encoders else 0

    def _sent(self, side: Side, theirs: States, own: States) -> tuple[States, int]:
        arrived, sizes = as_sent(theirs, int4=side.kind == "int4")
        if side.kind in (RAW.kind, "int4"):
            return arrived, sum(sizes)
        exact = set(self.workshop.selected)
        states = [mine if layer in exact else their for layer, (mine, their) in enumerate(zip(own, arrived, strict=True))]
        return states, sum(size for layer, size in enumerate(sizes) if layer not in exact)
