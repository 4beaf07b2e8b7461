"""Trains adapters for the summaries of a `SummaryLibrary`: maps of slots' keys and values, learned on the paper's L_C.

    python scripts/train_compressor.py --out FOLDER [--model FOLDER_OR_HUB_ID] [--texts FILE.jsonl] [--slots 64] [--layout salient]

L_C is the mean squared distance of a head's output over slots from that over the whole prompt. Printed are L_C on the texts that were
learned from and on others, and on the others how much the next token diverges behind slots from what it is behind the prompt (KL, in nats):
without adapters, with the closed form for values (ridge), and trained from each seed. The adapters with the least divergence are written.

A line of the file is one text, as JSON: a string, a list of token ids, or an object with one of these under "prompt". Without a file,
pieces of the testbed's books and generated documents are taken. Every fifth text is not learned from.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from _adapter_training import fit_values, identity_adapters, loss_of, sample_of, train_adapters
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.results import show
from shared.texts import encode, read_prompts
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import TrainedAdapters
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.rope import rotation_of
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.warmstart.paper.adapters import Adapters
from hf_kvcaches.warmstart.paper.cache import SummaryCache, SummaryLibrary, read_attention
from hf_kvcaches.warmstart.paper.compressor import SlotCompressor

# Every so many texts one is not learned from.
HELD_OUT = 5
NO_ADAPTERS, RIDGE = "no adapters", "ridge"


def default_texts(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Pieces of books and generated documents in turns, of half of the length to all of it; none has words of another's pieces."""
    from tests import testbed
    from tests.testbed.documents import Filler, fit_document

    rng, texts = random.Random(0), []
    words = (testbed.held_out("prose") + "\n" + testbed.held_out("verse")).split()
    for number in range(count):
        own = words[number * (len(words) // count) :][: len(words) // count]
        size, text = rng.randint(length // 2, length), " ".join(own)
        if number % 2:
            document = fit_document(rng, Filler(text), lambda text: len(encode(tokenizer, text)), size, facts=4)
            # What comes next is the answer to the last question.
            text = document.text().removesuffix(f"{document.facts[document.asked[-1]].answer}.\n")
        texts.append(tokenizer(text, verbose=False)["input_ids"][:size])
    return texts


class Bench:
    """Texts read by a model: samples to learn from and to judge by."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, texts: Sequence[list[int]], slots: int, layout: Any, tail: int) -> None:
        self.model, self.tokenizer, self.slots, self.layout, self.tail = model, tokenizer, slots, layout, tail
        rotation = rotation_of(model.config.get_text_config())
        if rotation.why:
            raise UnsupportedError(f"model: {rotation.why}. There are no summaries of its prompts.")
        compressor = SlotCompressor(slots, layout)
        samples = []
        for ids in tqdm(texts, desc="reading", unit="text"):
            read = read_attention(model, torch.tensor([ids], device=model.device))
            keys, values, queries = zip(*((each.keys[0], each.values[0], each.query[0, :, -1]) for each in read), strict=True)
            samples.append(sample_of(compressor, keys, values, queries, rotation.layers, tail, [each.scaling for each in read]))
        self.learned = [sample for number, sample in enumerate(samples) if number % HELD_OUT]
        self.others = samples[::HELD_OUT]
        self.asked = list(texts[::HELD_OUT])
        self._cold = [self._logits(ids, DynamicCache(config=model.config)) for ids in self.asked]

    @torch.no_grad()
    def _logits(self, ids: Sequence[int], cache: Any) -> torch.Tensor:
        prompt = torch.tensor([list(ids)], device=self.model.device)
        return self.model(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits[0, -1].double().log_softmax(-1)

    def kls(self, adapters: Adapters | None) -> list[float]:
        """The divergence of the next token of each text that was not learned from."""
        library = SummaryLibrary(self.model, self.tokenizer, self.slots, layout=self.layout, tail=self.tail, adapters=adapters)
        found = []
        for ids, cold in zip(self.asked, self._cold, strict=True):
            library.add([ids])
            cache = SummaryCache(self.model, library)
            ours = self._logits(ids, cache)
            if not cache.served:
                raise SystemExit(f"a text was not served from its summary: {cache.reason}")
            found.append(float((cold.exp() * (cold - ours)).sum()))
        return found

    def measure(self, name: str, adapters: Adapters | None) -> dict[str, Any]:
        """A row of the table."""
        kls = self.kls(adapters)
        maps = adapters if adapters is not None else identity_adapters(self.learned[0])
        errors = {"L_C": loss_of(maps, self.learned), "L_C held out": loss_of(maps, self.others)}
        return {"adapters": name, **errors, "KL held out": fmean(kls), "median": median(kls), "greatest": max(kls)}


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "model", "device")
    parser.add_argument("--out", type=Path, required=True, help="the folder that the adapters are written to")
    parser.add_argument("--texts", type=Path, help="one text a line, as JSON")
    parser.add_argument("--count", type=int, default=100, help="how many texts to take, or to read at most")
    parser.add_argument("--length", type=int, default=600, help="the most tokens of a text")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--layout", choices=("salient", "paper"), default="salient")
    parser.add_argument("--tail", type=int, default=1, help="tokens that are run behind the slots")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight", type=float, default=1e-4, help="of the pull towards the identity")
    parser.add_argument("--gamma", type=float, default=1.0, help="of that pull in the closed form")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    check_counts(args, ["count", "length", "slots", "tail", "steps", "batch"])
    if len(set(args.seeds)) < len(args.seeds):
        raise ConfigError.of("--seeds", "numbers that are all different", args.seeds)
    return args


def texts_of(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """What is learned from, and what is not: at most `--length` tokens of each text, and no text that its slots hold whole."""
    found = default_texts(tokenizer, args.count, args.length) if args.texts is None else read_prompts(args.texts, tokenizer)[: args.count]
    texts = [ids[: args.length] for ids in found if min(len(ids), args.length) > args.slots + args.tail]
    if len(texts) < 2:
        hint = "Shorter ones are kept as they are, and there is nothing to learn."
        raise ConfigError.of("--texts", f"two or more texts of more than {args.slots + args.tail} tokens", len(texts), hint)
    return texts


def main() -> None:
    args = parse()
    model, tokenizer = load(args.model, begin(args))
    texts = texts_of(args, tokenizer)
    bench = Bench(model, tokenizer, texts, args.slots, args.layout, args.tail)
    made = {RIDGE: fit_values(bench.learned, args.gamma)}
    options = {"steps": args.steps, "lr": args.lr, "weight": args.weight, "batch": args.batch, "progress": True}
    made |= {f"seed {seed}": train_adapters(bench.learned, seed=seed, **options) for seed in args.seeds}
    rows = [bench.measure(NO_ADAPTERS, None), *(bench.measure(name, adapters) for name, adapters in made.items())]
    learned, others = len(bench.learned), len(bench.others)
    columns = {name: f"{{{name}}}" if name == "adapters" else f"{{{name}:.4g}}" for name in rows[0]}
    print(f"{args.slots} slots, layout {args.layout}; {learned} texts learned from, {others} others; {args.steps} steps\n")
    print(f"{show(rows, columns)}\n")
    trained = [row["KL held out"] for row in rows[2:]]
    print(f"KL of {len(trained)} seeds: mean {fmean(trained):.4g}, from {min(trained):.4g} to {max(trained):.4g}")
    best = min(rows[1:], key=lambda row: row["KL held out"])
    artifact = TrainedAdapters(made[best["adapters"]], args.slots, args.layout, args.tail, tuple(rows))
    object.__setattr__(artifact, "fingerprint", ModelFingerprint.of(model, tokenizer))
    artifact.save_pretrained(args.out)
    print(f"Written to {args.out}: {best['adapters']}.")
    if rows[0]["KL held out"] <= best["KL held out"]:
        print("They do not help: without adapters the divergence is no greater. Use none.")


if __name__ == "__main__":
    run_script(main)
