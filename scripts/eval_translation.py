"""What a consumer says behind caches that were translated from another model's, against its own prefill of the same prefix.

    python scripts/eval_translation.py [--pairs base:tuned ...] [--texts 24] [--csv FOLDER] [--quick]

For each pair of the testbed's models (producer:consumer) translators are fitted to prefixes of the first halves of the held-out texts, and
measured on the second halves. **prose**, **verse**: 32 tokens behind a piece of a book. **documents**: a context with facts, behind which
all questions are asked with their true answers; divergences are of the first 32 tokens, recall is of all answers.

All sides hold all tokens of the prefix but the last, which the consumer runs. `raw K/V` and `int4 K/V` are the producer's keys and values
as they are. `zero bytes` makes all of the token ids. `full rank, float32` is the limit of linear maps. Shares are of the keys and values
of all layers in bfloat16.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import torch
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.results import Row, environment, rows_where, show, write_csv
from tqdm import tqdm

from hf_kvcaches import compat
from hf_kvcaches.cli.prompts import encode as ids_of
from hf_kvcaches.core.growing import GrowingCache
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.kernels.quantization import dequantize, quantize
from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.config import EXACT, TranslatorConfig
from hf_kvcaches.translate.paper.scd import SemanticCacheDistillation
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
    right: int  # answers that are right
    right_alone: int
    asked: int


class Half:
    """Half of a held-out text."""

    def __init__(self, tokenizer: Any, domain: str, *, second: bool, longest: int = TOKENS[1]) -> None:
        text = held_out(domain)
        text = text[len(text) // 2 :] if second else text[: len(text) // 2]
        self.tokenizer, self.filler, self.longest = tokenizer, Filler(text), longest
        self.ids = ids_of(tokenizer, text)

    def piece(self, rng: random.Random, more: int = 0) -> list[int]:
        """Consecutive tokens, a random number of them."""
        length = rng.randint(TOKENS[0], self.longest) + more
        start = rng.randrange(len(self.ids) - length)
        return self.ids[start : start + length]

    def document(self, rng: random.Random) -> Document:
        """A document with paragraphs of this half."""
        count = lambda text: len(ids_of(self.tokenizer, text))  # noqa: E731
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


def next_tokens(model: Any, text: Text, cache: Any = None) -> torch.Tensor:
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
    guesses = {"right": found.argmax(-1).tolist(), "right_alone": alone.argmax(-1).tolist()}
    hits = {
        name: sum(guess[start:stop] == text.continuation[start:stop] for start, stop in text.answers) for name, guess in guesses.items()
    }
    return {
        "kls": tuple(divergence(alone[:asked], found[:asked]).tolist()),
        **hits,
        "asked": len(text.answers),
    }


States = Sequence[tuple[torch.Tensor, torch.Tensor]]  # rotated keys and values of all layers, (1, kv_heads, tokens, head_dim)


@dataclass(frozen=True)
class Side:
    """One way to fill the consumer's cache, by its name in tables.

    `oracle` is its own prefill. `raw` and `int4` are the producer's keys and values. `fitted` is a translator from `CacheTranslator.fit`,
    `paper` a `SemanticCacheDistillation`.
    """

    name: str
    kind: Literal["oracle", "raw", "int4", "fitted", "paper"]
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)


def _fitted(name: str, payload: float = 0.025, recompute_layers: int | Literal["auto"] = 0, **config: Any) -> Side:
    return Side(name, "fitted", {"payload": payload, "recompute_layers": recompute_layers, "config": TranslatorConfig(**config)})


SIDES = (
    Side("own prefill", "oracle"),
    Side("raw K/V", "raw"),
    Side("int4 K/V", "int4"),
    # A quarter of the bytes: 32 codes of keys and 32 of values in 16 bits, in each layer.
    Side("paper's Reuse 0.25", "paper", {"ranks": (32, 32, 64), "patched": ()}),
    _fitted("zero bytes", 0.0),
    _fitted("joint 0.0125", 0.0125),
    Side("joint 0.025 (default)", "fitted"),
    _fitted("joint 0.05", 0.05),
    _fitted("joint, 1 layer a code", layers_per_code=1),
    _fitted("joint, 1 layer run", recompute_layers=1),
    _fitted("full rank, float32", EXACT),
)
GROUP = 64  # of the int4 baseline, along tokens


def read(model: Any, ids: torch.Tensor) -> States:
    """Keys and values that a model without a PEFT wrapper makes of token ids, (1, tokens)."""
    cache = GrowingCache(model.config)
    model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers]


def as_sent(states: States, *, int4: bool) -> tuple[States, int]:
    """Keys and values as they arrive, and their bytes: quantized in groups of 64 tokens of a channel, else in bfloat16."""
    size = 0

    def sent(part: torch.Tensor) -> torch.Tensor:
        nonlocal size
        found, tensors = part.bfloat16(), [part.bfloat16()]
        if int4:
            tensors = quantize(found.mT, 4, GROUP)
            found = dequantize(*tensors, part.shape[-2], GROUP, torch.float32).mT
        size += sum(tensor.nbytes for tensor in tensors)
        return found.to(part.dtype)

    return [(sent(keys), sent(values)) for keys, values in states], size


class Bench:
    """Two models without PEFT wrappers, translators between them, and answers of the consumer behind what the producer has read."""

    def __init__(self, producer: Any, consumer: Any, tokenizer: Any, texts: Sequence[Sequence[int]]) -> None:
        self.models, self.tokenizer, self.texts = (producer, consumer), tokenizer, texts
        self.producer, self.consumer = compat.base_model(producer), compat.base_model(consumer)
        self.fitted: dict[str, Any] = {}  # translators and the paper's, by side

    def prepare(self, side: Side) -> float | str:
        """Fit what a side needs; the seconds of a translator."""
        if side.kind == "paper":
            self.fitted[side.name] = SemanticCacheDistillation.fit(*self.models, self.texts, **side.options)
        if side.kind != "fitted":
            return ""
        self.fitted[side.name] = CacheTranslator.fit(*self.models, self.tokenizer, self.texts, progress=False, **side.options)
        return round(sum((self.fitted[side.name].settings.seconds or {}).values()), 2)

    def ask(self, text: Text, sides: Sequence[Side]) -> Iterator[tuple[Side, Answer]]:
        """Answers of each side; those with translators are fitted before."""
        ids = torch.tensor([text.prompt[:-1]], device=compat.input_device(self.consumer))
        theirs, own = read(self.producer, ids), read(self.consumer, ids)
        alone = next_tokens(self.consumer, text)
        sizes = {"tokens": len(text.prompt) - 1, "plain": sum(2 * part.numel() for layer in own for part in layer)}
        for side in sides:
            logits, size = alone, 0
            if side.kind != "oracle":
                cache, size = self._held(side, text, theirs)
                logits = next_tokens(self.consumer, text, cache)
            yield side, Answer(**sizes, bytes=size, **judged(text, alone, logits))

    def _held(self, side: Side, text: Text, theirs: States) -> tuple[Any, int]:
        """A cache of the prompt but for its last token, and the bytes that were sent."""
        if side.kind == "fitted":
            translator, ids = self.fitted[side.name], torch.tensor([text.prompt], device=compat.input_device(self.consumer))
            codes = translator.encode(self.producer, ids)
            cache = TranslatedCache(self.consumer, translator, codes)
            cache.prefill(ids)
            # Without codes nothing has to be sent: the consumer has the prompt anyway.
            return cache, codes.nbytes if translator.maps.encoders else 0
        if side.kind == "paper":
            codes = self.fitted[side.name].encode(self.producer, text.prompt[:-1])
            return self.fitted[side.name].decode(self.consumer, codes), sum(part.nbytes for parts in codes.values() for part in parts)
        arrived, size = as_sent(theirs, int4=side.kind == "int4")
        cache = GrowingCache(self.consumer.config)
        for layer, states in zip(cache.layers, arrived, strict=True):
            layer.update(*states)
        return cache, size


PAIRS = ("base:tuned", "tuned:base", "base:lora")
SHOWN = {"bytes": "{bytes:,}", "share": "{share:.4f}", **{name: f"{{{name}:.4f}}" for name in WORKLOADS}, "recall": "{recall:.1f}%"}


def summary(answers: Sequence[Answer]) -> Row:
    """The numbers of a side on a workload."""
    total = lambda name: sum(getattr(answer, name) for answer in answers)  # noqa: E731
    row = {"texts": len(answers), "tokens": total("tokens"), "bytes": total("bytes"), "share": round(total("bytes") / total("plain"), 5)}
    row |= {"kl": round(fmean(kl for answer in answers for kl in answer.kls), 6), "recall": "", "recall_alone": ""}
    if asked := total("asked"):
        row |= {"recall": round(100 * total("right") / asked, 2), "recall_alone": round(100 * total("right_alone") / asked, 2)}
    return row | {"questions": asked}


def measure(args: argparse.Namespace, pair: str, device: torch.device) -> list[Row]:
    """A row for each side and workload of a pair."""
    (producer, tokenizer), (consumer, _) = (load(name, device) for name in pair.split(":"))
    bench = Bench(producer, consumer, tokenizer, calibration_texts(tokenizer, args.calibration, args.longest))
    name = pair.replace(":", " -> ")
    seconds = {side.name: bench.prepare(side) for side in tqdm(SIDES, unit=" fits", desc=name)}
    answers: dict[tuple[str, str], list[Answer]] = {(side.name, workload): [] for side in SIDES for workload in WORKLOADS}
    with torch.no_grad():
        for text in tqdm(evaluation_texts(tokenizer, args.texts, args.seed, args.longest), unit=" texts", desc=name):
            for side, answer in bench.ask(text, SIDES):
                answers[side.name, text.workload].append(answer)
    return [
        {"pair": name, "side": side, "workload": workload, **summary(found), "fit_seconds": seconds[side]}
        for (side, workload), found in answers.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """A line for each side of a pair: its divergences by workload, and bytes and recall of documents."""
    lines = []
    for row in rows_where(rows, workload="documents"):
        lines.append(row | {each["workload"]: each["kl"] for each in rows_where(rows, side=row["side"])})
    return show(lines, {rows[0]["pair"]: "{side}", **SHOWN})


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "seed", "device", "csv", "quick")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS), help="producer:consumer, of the testbed")
    parser.add_argument("--texts", type=int, default=24, help="of each workload")
    parser.add_argument("--calibration", type=int, default=64, help="prefixes that translators are fitted to")
    parser.add_argument("--longest", type=int, default=TOKENS[1], help="prefix, in tokens")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(texts=1, calibration=8, longest=300)
    check_counts(args, ["texts", "calibration"])
    if not TOKENS[0] <= args.longest <= TOKENS[1]:
        parser.error(f"--longest: expected {TOKENS[0]} to {TOKENS[1]}, got {args.longest}")
    return args


def main() -> None:
    args = parse()
    device, rows = begin(args), []
    for pair in dict.fromkeys(args.pairs):
        rows += (found := measure(args, pair, device))
        print(f"{table(found)}\n")
    if args.csv:
        settings = {"seed": args.seed, "calibration": args.calibration, "longest": args.longest}
        write_csv(args.csv / "translation-quality.csv", rows, {**environment(device), **settings})


if __name__ == "__main__":
    run_script(main)
