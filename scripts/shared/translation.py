"""`eval.py translation`: what a consumer says after caches that were translated from another model's, against its own prefill."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache

from hf_kvcaches import CacheTranslator, TranslatedCache, compat
from hf_kvcaches.cli.prompts import encode, needle_prompts
from hf_kvcaches.cli.tables import Row
from hf_kvcaches.evaluate.measures import divergence, losses
from shared import testbed
from shared.cli import load

DOMAINS = ("prose", "verse")
WORKLOADS = (*DOMAINS, "documents")
CALIBRATION_SEED = 10**6  # and more, of calibration texts
ASKED, SHORTEST = 32, 200  # tokens after a prefix that divergences are taken of; tokens of a prefix
# Parts of the held-out texts for calibration and evaluation. Fine-tunes of other models than the testbed's have read the first half.
TESTBED_PARTS, OTHER_PARTS = ((0.0, 0.5), (0.5, 1.0)), ((0.5, 0.8), (0.8, 1.0))
SHOWN = "pair side workload share kl loss recall recall_alone"


@dataclass(frozen=True)
class Text:
    """A prefix, and what truly follows."""

    workload: str
    prompt: list[int]  # token ids; all but the last are translated
    continuation: list[int]  # token ids, fed in as they are
    answers: tuple[tuple[int, int], ...] = ()  # spans of the continuation that a question asks for


@dataclass(frozen=True)
class Side:
    """One way to fill the consumer's cache."""

    name: str
    payload: float | None  # of a translator; None for the producer's keys and values in bfloat16, -1 for the consumer's own prefill
    layers: int = 0  # that the consumer runs


OWN, RAW = Side("own prefill", -1), Side("raw K/V", None)
SIDES = (
    *(OWN, RAW, Side("zero bytes", 0.0), Side("joint 0.0125", 0.0125), Side("joint 0.025 (default)", 0.025), Side("joint 0.05", 0.05)),
    Side("joint, 1 layer run", 0.025, 1),
)


def ids_of(tokenizer: Any, domain: str, part: tuple[float, float]) -> list[int]:
    """A part of a held-out text."""
    text = testbed.held_out(domain)
    return encode(tokenizer, text[slice(*(int(share * len(text)) for share in part))])


def piece(ids: list[int], rng: random.Random, longest: int, more: int = 0) -> list[int]:
    """Consecutive tokens, a random number of them."""
    length = rng.randint(SHORTEST, longest) + more
    start = rng.randrange(len(ids) - length)
    return ids[start : start + length]


def calibration_texts(tokenizer: Any, count: int, longest: int, *, of_testbed: bool) -> list[list[int]]:
    """Pieces of prose and verse; for the testbed's models half of the texts are documents."""
    parts = [ids_of(tokenizer, domain, (TESTBED_PARTS if of_testbed else OTHER_PARTS)[0]) for domain in DOMAINS]
    documents, texts = testbed.documents("calibration"), []
    for number in range(count):
        is_document = of_testbed and number % 4 < 2
        if is_document:
            fitting = [document for document in documents if document.tokens <= longest]
            texts.append(encode(tokenizer, fitting[(number // 4 * 2 + number % 2) % len(fitting)].text))
        else:
            texts.append(piece(parts[number % 2], random.Random(CALIBRATION_SEED + number), longest))
    return texts


def evaluation_texts(tokenizer: Any, count: int, seed: int, longest: int, *, of_testbed: bool) -> list[Text]:
    """So many of each workload, of parts that nothing was fitted to; contexts with a needle where a model can't answer the documents."""
    texts = []
    for domain in DOMAINS:
        part = ids_of(tokenizer, domain, (TESTBED_PARTS if of_testbed else OTHER_PARTS)[1])
        for number in range(count):
            ids = piece(part, random.Random(f"{domain} {seed + number}"), longest, ASKED)
            texts.append(Text(domain, ids[:-ASKED], ids[-ASKED:]))
    if of_testbed:
        documents = [document for document in testbed.documents("evaluation") if document.tokens <= longest]
        return texts + [quiz(tokenizer, documents[(seed + number) % len(documents)]) for number in range(count)]
    for needle in needle_prompts(tokenizer, count, "digits", tokens=300, seed=seed, prose=testbed.held_out()):
        question, answer = needle.asked[0]
        asked = len(question)
        texts.append(Text("documents", needle.context, [*question, *answer], ((asked, asked + len(answer)),)))
    return texts


def quiz(tokenizer: Any, document: testbed.Document) -> Text:
    """A document's context, and after it all questions with their answers."""
    continuation: list[int] = []
    answers = []
    for page in document.questions:
        continuation += encode(tokenizer, page.question)
        answers.append((len(continuation), len(continuation) + len(encode(tokenizer, page.answer))))
        continuation += [*encode(tokenizer, page.answer), *encode(tokenizer, ".\n")]
    return Text("documents", encode(tokenizer, document.context), continuation, tuple(answers))


def logits_of(model: Any, text: Text, cache: Any) -> torch.Tensor:
    """Logits of the continuation's tokens, (tokens, vocabulary); the cache holds the first tokens of the prompt, or none."""
    ids = [*text.prompt, *text.continuation[:-1]][int(cache.get_seq_length()) :]
    logits: torch.Tensor = model(input_ids=torch.tensor([ids], device=compat.input_device(model)), past_key_values=cache).logits
    return logits[0, -len(text.continuation) :].float().cpu()


def judged(text: Text, alone: torch.Tensor, logits: torch.Tensor) -> Row:
    """Divergences in nats, by how much the loss grows, and right answers, of the consumer alone and of a side."""
    asked, guesses = min(ASKED, len(text.continuation)), [alone.argmax(-1).tolist(), logits.argmax(-1).tolist()]
    hits = [sum(guess[start:stop] == text.continuation[start:stop] for start, stop in text.answers) for guess in guesses]
    targets = torch.tensor(text.continuation[:asked])
    loss = (losses(logits[:asked], targets) - losses(alone[:asked], targets)).mean()
    kls = divergence(alone[:asked], logits[:asked]).tolist()
    return {"kls": kls, "loss": float(loss), "right_alone": hits[0], "right": hits[1], "asked": len(text.answers)}


class Pair:
    """Two models, translators between them, and answers of the consumer after what the producer has read."""

    def __init__(self, producer: Any, consumer: Any, tokenizer: Any, texts: Sequence[Sequence[int]]) -> None:
        self.models, self.tokenizer, self.texts = (producer, consumer), tokenizer, texts
        self.producer, self.consumer = compat.base_model(producer), compat.base_model(consumer)
        self.fitted: dict[Side, CacheTranslator] = {}

    def fit(self, side: Side) -> float | str:
        """Fit what a side needs; the seconds of a translator."""
        if side in (OWN, RAW):
            return ""
        options = {"payload": side.payload, "recompute_layers": side.layers, "progress": False}
        self.fitted[side] = CacheTranslator.fit(*self.models, self.tokenizer, self.texts, **options)
        return round(sum((self.fitted[side].settings.seconds or {}).values()), 2)

    def ask(self, text: Text, sides: Sequence[Side]) -> Iterator[tuple[Side, Row]]:
        """What becomes of a text on each side; translators are fitted before."""
        alone = logits_of(self.consumer, text, DynamicCache(config=self.consumer.config))
        theirs = self._read(text)
        plain = sum(2 * states.numel() for layer in theirs.layers for states in (layer.keys, layer.values))
        for side in sides:
            cache, size = self._cache(side, text, theirs)
            logits = alone if side is OWN else logits_of(self.consumer, text, cache)
            yield side, {"tokens": len(text.prompt) - 1, "bytes": size, "plain": plain, **judged(text, alone, logits)}

    def _read(self, text: Text) -> DynamicCache:
        """The producer's keys and values of a prompt but for its last token."""
        cache = DynamicCache(config=self.producer.config)
        self.producer(torch.tensor([text.prompt[:-1]], device=compat.input_device(self.producer)), past_key_values=cache, logits_to_keep=1)
        return cache

    def _cache(self, side: Side, text: Text, theirs: DynamicCache) -> tuple[Any, int]:
        """A cache of the prompt but for its last token, and the bytes that were sent."""
        if side in (OWN, RAW):
            raw, size = DynamicCache(config=self.consumer.config), 0
            for index, layer in enumerate(theirs.layers if side is RAW else ()):
                states = [part.bfloat16() for part in (layer.keys, layer.values)]
                size += sum(part.nbytes for part in states)
                raw.update(*(part.to(layer.keys.dtype) for part in states), index)
            return raw, size
        translator, ids = self.fitted[side], torch.tensor([text.prompt], device=compat.input_device(self.consumer))
        cache = TranslatedCache(self.consumer, translator, codes := translator.encode(self.producer, ids))
        cache.prefill(ids)
        # Without codes nothing has to be sent: the consumer has the prompt anyway.
        return cache, codes.nbytes if side.payload else 0


def summary(answers: Sequence[Row]) -> Row:
    """The numbers of a side on a workload."""
    total = lambda name: sum(answer[name] for answer in answers)  # noqa: E731
    row = {"texts": len(answers), "tokens": total("tokens"), "bytes": total("bytes"), "share": round(total("bytes") / total("plain"), 5)}
    row |= {"kl": round(fmean(kl for answer in answers for kl in answer["kls"]), 6), "recall": "", "recall_alone": ""}
    if asked := total("asked"):
        row |= {"recall": round(100 * total("right") / asked, 2), "recall_alone": round(100 * total("right_alone") / asked, 2)}
    return row | {"questions": asked}


def measure(args: argparse.Namespace, pair: str, device: torch.device) -> list[Row]:
    """A row for each side and workload of a pair, producer:consumer."""
    names, of_testbed = pair.split(":"), all(name in testbed.NAMES for name in pair.split(":"))
    (producer, tokenizer), (consumer, _) = (load(name, device, "float32") for name in names)
    texts = calibration_texts(tokenizer, args.calibration, args.longest, of_testbed=of_testbed)
    bench, sides = Pair(producer, consumer, tokenizer, texts), (OWN, RAW, *map(side_of, args.payloads)) if args.payloads else SIDES
    label = " -> ".join(Path(name).name for name in names)
    seconds = {side: bench.fit(side) for side in tqdm(sides, unit=" fits", desc=label)}
    answers: dict[tuple[Side, str], list[Row]] = {(side, workload): [] for side in sides for workload in WORKLOADS}
    with torch.no_grad():
        asked = evaluation_texts(tokenizer, args.texts, args.seed, args.longest, of_testbed=of_testbed)
        for text in tqdm(asked, unit=" texts", desc=label):
            for side, answer in bench.ask(text, sides):
                answers[side, text.workload].append(answer)
    return [
        {"pair": label, "side": side.name, "workload": workload, **summary(rows), "fit_seconds": seconds[side]}
        | {"loss": round(fmean(row["loss"] for row in rows), 4)}
        for (side, workload), rows in answers.items()
    ]


def side_of(text: str) -> Side:
    """A translator as a user types it: PAYLOAD, or PAYLOAD:LAYERS with the layers that the consumer runs."""
    payload, _, layers = text.partition(":")
    return Side(f"payload {text}", float(payload), int(layers or 0))
