"""Shows what each cache does: text, divergence from the full cache, memory and time, on one prompt.

    python scripts/demo.py [--model FOLDER_OR_HUB_ID] [--prompt TEXT] [--max-new-tokens N] [--dtype float32]

Without a prompt the model reads a document that hides facts between paragraphs of a book, and is asked for some of them; then it reads the
document's pages again in another order, with caches that reuse what they have read before; then a fine-tuned model answers from what it has
read. Times are those of one run each, to see the order of things.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from shared import TESTBED, testbed
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.results import tabulated
from tqdm import tqdm
from transformers import BatchEncoding, Cache, DynamicCache

import hf_kvcaches as kv
from hf_kvcaches import MissingDependencyError, UnsupportedError
from hf_kvcaches.cli.prompts import encode
from hf_kvcaches.cli.tables import table
from hf_kvcaches.compat import GENERATE_CACHE

FULL_CACHE, NO_YES = "DynamicCache", ("no", "yes")
CALIBRATION = 40_000  # characters of the book, from its end


@cache
def codec(model: Any, tokenizer: Any) -> kv.KVCodec:
    """A codec for a model, in an eighth of the bytes of its keys and values in 16 bits."""
    texts = [*(document.text for document in testbed.documents("calibration")[:8]), testbed.held_out()[-CALIBRATION:]]
    return kv.KVCodec.calibrate(model, tokenizer, texts, bytes_ratio=0.125, max_tokens=8192, progress=False)


# Every cache of the package in the setting to show, beside the full cache.
CACHES: dict[str, Callable[[Any, Any], Cache]] = {
    "GrowingCache": lambda model, tokenizer: kv.GrowingCache(model),
    "EquipCache (half)": lambda model, tokenizer: kv.EquipCache(model, budget=0.5),
    "EquipCache (streaming, half)": lambda model, tokenizer: kv.EquipCache(model, "streaming", budget=0.5),
    "SubspaceCache (an eighth)": lambda model, tokenizer: kv.SubspaceCache(model, codec(model, tokenizer)),
    "SubspaceCache (adaptive, half)": lambda model, tokenizer: kv.SubspaceCache(model, adaptive=kv.AdaptiveSubspace(bytes_ratio=0.5)),
}


@dataclass(frozen=True)
class Writer:
    """A model that writes on from prompts."""

    model: Any
    tokenizer: Any
    new_tokens: int

    def encode(self, texts: Sequence[str]) -> BatchEncoding:
        options = {"return_tensors": "pt", "padding": len(texts) > 1, "return_token_type_ids": False}
        return self.tokenizer(list(texts), **options).to(self.model.device)

    def full_cache(self) -> Cache:
        return DynamicCache(config=self.model.config)

    def write(self, inputs: BatchEncoding, past: Cache) -> tuple[list[str], float]:
        """The new texts, and seconds to the first token."""
        times = [time.perf_counter()]
        clock = lambda ids, logits: times.append(time.perf_counter()) or logits  # noqa: E731
        options = {"max_new_tokens": self.new_tokens, "do_sample": False, "pad_token_id": self.tokenizer.pad_token_id}
        ids = self.model.generate(**inputs, **{GENERATE_CACHE: past}, logits_processor=[clock], **options)
        return self.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True), times[1] - times[0]

    def write_again(self, inputs: BatchEncoding, make: Callable[[], Any]) -> tuple[Any, list[str], float]:
        """The cache, texts and seconds of a second run: the first one is for what is loaded at the first use."""
        self.write(inputs, make())
        past = make()
        return past, *self.write(inputs, past)


def show_caches(writer: Writer, inputs: BatchEncoding, questions: Sequence[testbed.Page]) -> None:
    """Print what each cache writes and costs, and the reasons of those that refuse this model."""
    full, _ = writer.write(inputs, writer.full_cache())
    texts, reports, refused = {FULL_CACHE: full}, {}, []
    for name, factory in tqdm(CACHES.items(), unit="cache", leave=False):
        make = lambda factory=factory: factory(writer.model, writer.tokenizer)  # noqa: E731
        try:
            texts[name], _ = writer.write(inputs, make())
            reports[name] = kv.verify(writer.model, make, inputs, max_new_tokens=writer.new_tokens)
        except UnsupportedError as error:
            refused.append(f"{name} refuses this model: {error}")
    rows = []
    for name, report in reports.items():
        if not rows:
            full_cache = {"bytes": report.reference_bytes, **vars(report.reference_seconds)}
            rows.append({"cache": FULL_CACHE, "same_text": "yes", "kl": "-", **full_cache})
        same = {"same_text": NO_YES[texts[name] == full], "kl": f"{report.mean_kl:.2e}"}
        rows.append({"cache": name, **same, "bytes": report.bytes, **vars(report.seconds)})
    print(tabulated(rows, "cache same_text kl bytes prefill decode"), *refused, sep="\n")
    for name, written in texts.items():
        print(f"\n{name}")
        for text, page in zip_longest(written, questions):
            if page is None:
                print(f"  {text!r}")
                continue
            said, answer = text.split(".")[0].strip(), page.answer.strip()
            print(f"  {page.question} ... {said!r}, {'right' if said == answer else f'the notes say {answer!r}'}")


def pages_in_two_orders(document: testbed.Document, seed: int) -> list[str]:
    """The same pages after the same instructions, as they come and shuffled, each time with a question about another page."""
    pages = [f"# Page {number}\n{page.text}" for number, page in enumerate(document.pages, 1)]
    orders = zip((pages, random.Random(seed).sample(pages, len(pages))), document.questions, strict=False)
    return [f"{document.head}{''.join(order)}Questions:\n{page.question}" for order, page in orders]


def show_reuse(writer: Writer, texts: list[str]) -> None:
    """Print what a cache takes of each text from those before it, and what that saves."""
    tiers = ("exact", "guarded", "repaired", "computed")
    for _ in range(2):  # the first time for what is loaded at the first use
        store, rows = kv.SegmentStore("memory"), []
        for name, text in zip(("as they come", "in another order"), texts, strict=True):
            inputs = writer.encode([text])
            full, without = writer.write(inputs, writer.full_cache())
            past = kv.SegmentReuseCache(writer.model, store, writer.tokenizer, mode="approximate")
            written, seconds = writer.write(inputs, past)
            report = past.report()
            del past  # what it computed goes to the store
            store.flush()
            counts = [str((report.tiers or {}).get(tier, 0)) for tier in tiers]
            rows.append([name, *counts, f"{report.flops_saved:.0%}", NO_YES[written == full], f"{seconds:.3f}", f"{without:.3f}"])
    header = ["the same pages", *tiers, "FLOPs saved", "same text", "first token s", "without reuse s"]
    print(f"\nSegmentReuseCache, tokens of two prompts by where they come from\n{table(header, rows)}")


def show_warm_start(writer: Writer, texts: list[str]) -> None:
    """Print what becomes of a text whose pages an earlier one had in another order."""
    library, inputs = kv.WarmStartLibrary(writer.model, writer.tokenizer), writer.encode(texts[1:])
    library.add(texts[:1])
    _, full, alone = writer.write_again(inputs, writer.full_cache)
    past, written, seconds = writer.write_again(inputs, lambda: kv.WarmStartCache(writer.model, library))
    report = past.report()
    rows = [["no warm start", "", str(inputs["input_ids"].shape[1]), f"{alone:.3f}", "yes"]]
    rows.append(["warm start", report.strategies[0], str(report.computed_tokens), f"{seconds:.3f}", NO_YES[written == full]])
    header = ["the second prompt", "served by", "tokens computed", "first token s", "same text"]
    print(f"\nWarmStartCache, a prompt that resembles an earlier one\n{table(header, rows)}")


def show_translation(writer: Writer, prompt: str, answer: str) -> None:
    """Print what a fine-tuned model writes after what this one has read, as codes of a fortieth of the bytes."""
    model, tokenizer = writer.model, writer.tokenizer
    tuned = Writer(load("tuned", model.device)[0].to(model.dtype), tokenizer, writer.new_tokens)
    books = [testbed.held_out(domain)[-CALIBRATION:] for domain in ("prose", "verse")]
    texts = [book[start : start + 2000] for book in books for start in range(0, CALIBRATION, 4000)]
    texts += [document.text for document in testbed.documents("calibration")[:20]]
    translator = kv.CacheTranslator.fit(model, tuned.model, tokenizer, texts, progress=False)
    inputs = writer.encode([prompt])
    codes, length = translator.encode(model, inputs["input_ids"]), inputs["input_ids"].shape[1]
    _, full, alone = tuned.write_again(inputs, tuned.full_cache)
    past, written, seconds = tuned.write_again(inputs, lambda: kv.TranslatedCache(tuned.model, translator, codes))
    report, said = past.report(), [texts[0].strip().split("\n")[0] for texts in (full, written)]
    codes_row = [str(length - report.translated), f"{report.payload_share:.1%}", f"{seconds:.3f}", NO_YES[written == full], said[1]]
    rows = [["its own prefill", str(length), "", f"{alone:.3f}", "yes", said[0]], ["codes of this model", *codes_row]]
    header = ["the tuned model starts from", "tokens computed", "bytes of bf16 K/V", "first token s", "same text", "answer"]
    print(f"\nTranslatedCache, base -> tuned; the answer is {answer.strip()!r}\n{table(header, rows)}")


def main() -> None:
    parser = arguments(__doc__, "model", "seed", "device")
    parser.add_argument("--prompt", help="a text to go on from, instead of the document")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--questions", type=int, default=3, help="how many of the document's questions to ask")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU, else as stored")
    args = parser.parse_args()
    check_counts(args, ["max_new_tokens", "questions"])
    model, tokenizer = load(args.model, begin(args))
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    if args.dtype or model.device.type == "cpu":
        model = model.to(getattr(torch, args.dtype or "float32"))  # calibration in bfloat16 takes twenty times as long on a CPU
    writer = Writer(model, tokenizer, args.max_new_tokens)
    room = (getattr(model.config, "max_position_embeddings", None) or 1024) - args.max_new_tokens
    document = max((d for d in testbed.documents("evaluation") if len(encode(tokenizer, d.text)) < room), key=lambda d: d.tokens)
    questions = [] if args.prompt else document.questions[: args.questions]
    inputs = writer.encode([args.prompt] if args.prompt else [document.context + page.question for page in questions])
    rows, tokens = inputs["input_ids"].shape
    print(f"{args.model}: {rows} rows of up to {tokens} tokens, {args.max_new_tokens} new tokens each, {model.dtype}, on {model.device}")
    show_caches(writer, inputs, questions)
    if questions:
        try:
            pages = pages_in_two_orders(document, args.seed)
            show_reuse(writer, pages)
            show_warm_start(writer, pages)
        except (UnsupportedError, MissingDependencyError) as error:
            print(f"\nNothing of earlier prompts is reused: {error}")
        if Path(args.model) == TESTBED / "base":
            show_translation(writer, document.context + questions[0].question, questions[0].answer)


if __name__ == "__main__":
    run_script(main)
