"""Shows what each cache does: text, divergence from the full cache, memory and time, on one prompt.

    python scripts/demo.py [--model FOLDER_OR_HUB_ID] [--prompt TEXT] [--max-new-tokens N] [--dtype float32] [--plot demo.png]

Without a prompt the model reads a generated document that hides facts between paragraphs of a book, and is asked for some
of them; then it reads the document's pages again in another order, with caches that reuse what it has read before; then a
fine-tuned model answers from what it has read. Times are those of one run each, to see the order of things.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from shared import TESTBED
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.plot import Panel, draw
from shared.results import show, table
from tqdm import tqdm
from transformers import BatchEncoding, Cache, DynamicCache
from transformers.generation import BaseStreamer

import hf_kvcaches as kv
from hf_kvcaches import MissingDependencyError, UnsupportedError, VerifyReport
from hf_kvcaches.cli.prompts import encode
from hf_kvcaches.compat import GENERATE_CACHE
from tests.testbed.documents import Document, Filler, fit_document

FULL_CACHE = "DynamicCache"
DTYPES = ("float32", "bfloat16", "float16")
CALIBRATION = 40_000  # characters of the book, from its end, which the document does not use


@cache
def codec(model: Any, tokenizer: Any) -> kv.KVCodec:
    """A codec for a model, in an eighth of the bytes of its keys and values in 16 bits."""
    text = (TESTBED / "prose.txt").read_text(encoding="utf-8")[-CALIBRATION:]
    facts = [make_document(tokenizer, 600, 2, 10**6 + number).text() for number in range(8)]
    return kv.KVCodec.calibrate(model, tokenizer, [*facts, text], bytes_ratio=0.125, max_tokens=8192, progress=False)


# Every cache of the package in the setting to show, beside the full cache.
CACHES: dict[str, Callable[[Any, Any], Cache]] = {
    "GrowingCache": lambda model, tokenizer: kv.GrowingCache(model),
    "EquipCache (half)": lambda model, tokenizer: kv.EquipCache(model, budget=0.5),
    "EquipCache (streaming, half)": lambda model, tokenizer: kv.EquipCache(model, "streaming", budget=0.5),
    "SubspaceCache (an eighth)": lambda model, tokenizer: kv.SubspaceCache(model, codec(model, tokenizer)),
    "SubspaceCache (adaptive, half)": lambda model, tokenizer: kv.SubspaceCache(model, adaptive=kv.AdaptiveSubspace(bytes_ratio=0.5)),
}


@dataclass(frozen=True)
class Prompts:
    """A row of text for each question, and the answers where they are known."""

    texts: list[str]
    questions: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """One cache on the prompts. `report` is None for the full cache itself, which is the first."""

    name: str
    texts: list[str]
    report: VerifyReport | None


def make_document(tokenizer: Any, room: int, facts: int, seed: int) -> Document:
    """A document of at most `room` tokens, and of at most 900."""
    filler = Filler((TESTBED / "prose.txt").read_text(encoding="utf-8"))
    tokens = min(900, room)
    count = lambda text: len(encode(tokenizer, text))  # noqa: E731
    return fit_document(random.Random(seed), filler, count, tokens, facts=max(facts, tokens // 80))


def make_prompts(document: Document, questions: int) -> Prompts:
    """A document and its first questions, each in a row of its own."""
    facts = [document.facts[index] for index in document.asked[:questions]]
    texts = [document.context() + fact.question for fact in facts]
    return Prompts(texts, [fact.question for fact in facts], [fact.value for fact in facts])


def pages_in_two_orders(document: Document, seed: int) -> list[str]:
    """The same pages behind the same instructions, as they come and shuffled, each time with a question about another page."""
    contents = enumerate(zip(document.paragraphs, document.facts, strict=False), 1)
    pages = [f"# Page {number}\n{paragraph}\n{''.join(fact.note)}\n" for number, (paragraph, fact) in contents]
    orders = zip((pages, random.Random(seed).sample(pages, len(pages))), document.asked, strict=False)
    return [f"{document.head()}{''.join(order)}Questions:\n{document.facts[asked].question}" for order, asked in orders]


class Clock(BaseStreamer):
    """Notes when the prompt and each new token come, and moves a bar by each token."""

    def __init__(self, progress: tqdm) -> None:
        self.progress, self.times = progress, list[float]()

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.progress.update(len(self.times) > 1)

    @property
    def seconds(self) -> float:
        """Until the first new token."""
        return self.times[1] - self.times[0]

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class Writer:
    """A model that writes on from prompts."""

    model: Any
    tokenizer: Any
    new_tokens: int
    progress: tqdm

    def expect(self, name: str, texts: int) -> None:
        """Begin a bar for so many texts."""
        self.progress.reset(texts * self.new_tokens)
        self.progress.set_description(name)

    def encode(self, texts: list[str]) -> BatchEncoding:
        return self.tokenizer(texts, return_tensors="pt", padding=len(texts) > 1, return_token_type_ids=False).to(self.model.device)

    def full_cache(self) -> Cache:
        return DynamicCache(config=self.model.config)

    def write(self, inputs: BatchEncoding, cache: Cache, clock: Clock | None = None) -> list[str]:
        clock = clock or Clock(self.progress)
        settings = {"max_new_tokens": self.new_tokens, "do_sample": False, "pad_token_id": self.tokenizer.pad_token_id}
        ids = self.model.generate(**inputs, **{GENERATE_CACHE: cache}, streamer=clock, **settings)
        self.progress.update(self.new_tokens - len(clock.times) + 1)  # of a text that ended early
        return self.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def timed(self, inputs: BatchEncoding, make: Callable[[], Any]) -> tuple[Any, list[str], float]:
        """The cache, the texts, and seconds to the first token, of a second run: the first one is for what is loaded at the first use."""
        for _ in range(2):
            clock, cache = Clock(self.progress), make()
            texts = self.write(inputs, cache, clock)
        return cache, texts, clock.seconds


def run(writer: Writer, inputs: BatchEncoding) -> tuple[list[Outcome], list[str]]:
    """The full cache and all others, and the reasons of those that refuse this model."""
    writer.expect(FULL_CACHE, 1 + 2 * len(CACHES))  # each cache writes, and is compared
    outcomes, refused = [Outcome(FULL_CACHE, writer.write(inputs, writer.full_cache()), None)], []
    for name, factory in CACHES.items():
        writer.progress.set_description(name)
        make = lambda factory=factory: factory(writer.model, writer.tokenizer)  # noqa: E731
        try:
            texts = writer.write(inputs, make())
            outcomes.append(Outcome(name, texts, kv.verify(writer.model, make, inputs, max_new_tokens=writer.new_tokens)))
            writer.progress.update(writer.new_tokens)
        except UnsupportedError as error:
            writer.progress.total -= 2 * writer.new_tokens
            refused.append(f"{name} refuses this model: {error}")
    return outcomes, refused


def show_outcomes(outcomes: list[Outcome]) -> str:
    """A line for each cache; none where all refuse."""
    reports = [outcome.report for outcome in outcomes if outcome.report]
    rows = []
    for outcome in outcomes if reports else []:
        report = outcome.report
        size, seconds = (report.bytes, report.seconds) if report else (reports[0].reference_bytes, reports[0].reference_seconds)
        row = {"name": outcome.name, "same": yes(outcome.texts == outcomes[0].texts), "kl": f"{report.mean_kl:.2e}" if report else "-"}
        rows.append(row | {"bytes": size, "prefill": seconds.prefill, "decode": seconds.decode})
    columns = {"cache": "{name}", "same text": "{same}", "mean KL to full": "{kl}", "KV bytes": "{bytes:,}"}
    return show(rows, columns | {"prefill s": "{prefill:.3f}", "decode s": "{decode:.3f}"})


def yes(flag: bool) -> str:
    return "yes" if flag else "no"


def show_texts(outcomes: list[Outcome], prompts: Prompts) -> str:
    lines = []
    for outcome in outcomes:
        lines.append(f"\n{outcome.name}")
        if not prompts.answers:
            lines += [f"  {text!r}" for text in outcome.texts]
        for question, text, answer in zip(prompts.questions, outcome.texts, prompts.answers, strict=False):
            said = text.split(".")[0].strip()
            lines.append(f"  {question} ... {said!r}, {'right' if said == answer else f'the notes say {answer!r}'}")
    return "\n".join(lines)


def show_reuse(writer: Writer, texts: list[str]) -> str:
    """What a cache takes of each text from those before it, and what that saves."""
    tiers = ("exact", "guarded", "repaired", "computed")
    writer.expect("SegmentReuseCache", 4 * len(texts))
    for _ in range(2):  # the first time for what is loaded at the first use
        store, rows = kv.SegmentStore("memory"), []
        for name, text in zip(("as they come", "in another order"), texts, strict=True):
            inputs, clocks = writer.encode([text]), (Clock(writer.progress), Clock(writer.progress))
            full = writer.write(inputs, writer.full_cache(), clocks[0])
            cache = kv.SegmentReuseCache(writer.model, store, writer.tokenizer, mode="approximate")
            same = writer.write(inputs, cache, clocks[1]) == full
            report = cache.report()
            del cache  # what it computed goes to the store
            store.flush()
            without, seconds = (f"{clock.seconds:.3f}" for clock in clocks)
            counts = [str((report.tiers or {}).get(tier, 0)) for tier in tiers]
            rows.append([name, *counts, str(report.repaired_tokens), f"{report.flops_saved:.0%}", yes(same), seconds, without])
    header = ["the same pages", *tiers, "run again", "FLOPs saved", "same text", "first token s", "without reuse s"]
    return f"\nSegmentReuseCache, tokens of two prompts by where they come from\n{table(header, rows)}"


def show_warm_start(writer: Writer, texts: list[str]) -> str:
    """What becomes of a text whose pages an earlier one had in another order."""
    writer.expect("WarmStartCache", 4)
    library, inputs = kv.WarmStartLibrary(writer.model, writer.tokenizer), writer.encode(texts[1:])
    library.add(texts[:1])
    _, full, seconds = writer.timed(inputs, writer.full_cache)
    rows = [["no warm start", "", str(inputs["input_ids"].shape[1]), f"{seconds:.3f}", "yes"]]
    cache, written, seconds = writer.timed(inputs, lambda: kv.WarmStartCache(writer.model, library))
    report = cache.report()
    rows.append(["warm start", report.strategies[0], str(report.computed_tokens), f"{seconds:.3f}", yes(written == full)])
    header = ["the second prompt", "served by", "tokens run", "first token s", "same text"]
    return f"\nWarmStartCache, a prompt that resembles an earlier one\n{table(header, rows)}"


def show_translation(writer: Writer, prompts: Prompts, seed: int) -> str:
    """What a fine-tuned model writes behind what this one has read, as codes of an eighth of the width."""
    model, tokenizer = writer.model, writer.tokenizer
    tuned = Writer(load(str(TESTBED / "tuned"), model.device)[0].to(model.dtype), tokenizer, writer.new_tokens, writer.progress)
    writer.expect("TranslatedCache", 4)
    books = [(TESTBED / f"{name}.txt").read_text(encoding="utf-8")[-CALIBRATION:] for name in ("prose", "verse")]
    texts = [book[start : start + 2000] for book in books for start in range(0, CALIBRATION, 4000)]
    texts += [make_document(tokenizer, 500, 2, seed + number).text() for number in range(1, 21)]
    translator = kv.CacheTranslator.fit(model, tuned.model, tokenizer, texts, progress=False)
    inputs = writer.encode(prompts.texts[:1])
    codes, length = translator.encode(model, inputs["input_ids"]), inputs["input_ids"].shape[1]
    _, full, alone = tuned.timed(inputs, tuned.full_cache)
    cache, written, seconds = tuned.timed(inputs, lambda: kv.TranslatedCache(tuned.model, translator, codes))
    report, answers = cache.report(), [texts[0].strip().split("\n")[0] for texts in (full, written)]
    sent = [str(length - report.translated), f"{report.payload_share:.1%}"]
    rows = [
        ["its own prefill", str(length), "", f"{alone:.3f}", "yes", answers[0]],
        ["codes of this model", *sent, f"{seconds:.3f}", yes(written == full), answers[1]],
    ]
    header = ["the tuned model starts from", "tokens run", "bytes of bf16 K/V", "first token s", "same text", "answer"]
    return f"\nTranslatedCache, base -> tuned; the answer is {prompts.answers[0]!r}\n{table(header, rows)}"


def save_plot(path: Path, outcomes: list[Outcome]) -> None:
    """Memory, time and divergence of each cache."""
    reports = {outcome.name: outcome.report for outcome in outcomes if outcome.report}
    first = next(iter(reports.values()))
    sizes = {FULL_CACHE: first.reference_bytes, **{name: report.bytes for name, report in reports.items()}}
    seconds = {FULL_CACHE: first.reference_seconds, **{name: report.seconds for name, report in reports.items()}}
    times = [{"cache": name, "part": part, "s": getattr(spent, part)} for part in ("prefill", "decode") for name, spent in seconds.items()]
    kls = [{"cache": name, "step": step, "nats": kl} for name, report in reports.items() for step, kl in enumerate(report.kl)]
    memory = [{"cache": name, "MiB": size / 2**20} for name, size in sizes.items()]
    panels = [
        Panel("KV cache", memory, "allocated", "{cache}", "MiB", stacked=True),
        Panel(f"time of one run, {first.steps} new tokens", times, "{part}", "{cache}", "s", stacked=True),
        Panel("KL(full || cache)", kls, "{cache}", "step", "nats"),
    ]
    draw(path, "one prompt with every cache", panels)


def main() -> None:
    parser = arguments(__doc__, "model", "seed", "device")
    parser.add_argument("--prompt", help="a text to go on from, instead of the document")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--questions", type=int, default=3, help="how many of the document's questions to ask")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: float32 on a CPU, else as stored")
    parser.add_argument("--plot", type=Path, default=Path("demo.png"), help="a picture; default: demo.png in the current folder")
    args = parser.parse_args()
    check_counts(args, ["max_new_tokens", "questions"])
    plot, args.plot = args.plot, None  # without matplotlib there is no picture, and everything else
    model, tokenizer = load(args.model, begin(args))
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    if args.dtype or model.device.type == "cpu":
        model = model.to(getattr(torch, args.dtype or "float32"))  # calibration in bfloat16 takes twenty times as long on a CPU
    writer = Writer(model, tokenizer, args.max_new_tokens, tqdm(unit="token"))
    room = (getattr(model.config, "max_position_embeddings", None) or 1024) - args.max_new_tokens
    prompts = Prompts([args.prompt])
    if args.prompt is None:
        prompts = make_prompts(make_document(tokenizer, room, args.questions, args.seed), args.questions)
    inputs = writer.encode(prompts.texts)
    rows, tokens = inputs["input_ids"].shape
    print(f"{args.model}: {rows} rows of up to {tokens} tokens, {args.max_new_tokens} new tokens each, {model.dtype}, on {model.device}")
    outcomes, refused = run(writer, inputs)
    print("\n".join([show_outcomes(outcomes), *refused, show_texts(outcomes, prompts)]))
    if args.prompt is None:
        try:
            pages = pages_in_two_orders(make_document(tokenizer, room, 2, args.seed), args.seed)
            print(show_reuse(writer, pages), show_warm_start(writer, pages), sep="\n")
        except (UnsupportedError, MissingDependencyError) as error:
            print(f"\nNothing of earlier prompts is reused: {error}")
        if Path(args.model) == TESTBED / "base":
            print(show_translation(writer, prompts, args.seed))
    writer.progress.close()
    try:
        if len(outcomes) > 1:
            save_plot(plot, outcomes)
            print(f"\nThe plot is in {plot}")
    except MissingDependencyError as error:
        print(f"\nNo plot: {error}")


if __name__ == "__main__":
    run_script(main)
