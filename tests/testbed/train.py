"""Trains the small models that the tests and the demo run on: a base model, a tuned one and a LoRA adapter, and a deeper model.

    python -m tests.testbed.train --books FOLDER [--out tests/testbed] tokenizer base tuned lora deep report documents

The books are plain-text files; those named in `VERSE` train the tuned model and the adapter, the others the base model, and the last
twentieth of every book is held out. `documents` writes the documents that the scripts read, with paragraphs of the held-out texts.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from hf_kvcaches.cli.inputs import pick_device
from tests.testbed import FOLDER, recall
from tests.testbed import documents as docs
from tests.testbed.circuits import plant_recall_heads

VERSE = ("milton", "shakespeare", "whitman")
VOCABULARY = 2048
# (row length, facts a document): a level is left when the loss on the answers falls below ADVANCE
LEVELS = ((128, 4), (256, 7), (512, 11), (1024, 16))
ADVANCE = 0.6
# What the running mean of that loss starts from: at the start, and on a new level.
FORGET, FORGET_LEVEL = 5.0, 2.0
WARM_UP = 60  # steps
COOL_DOWN = 0.4  # of all steps


@dataclass(frozen=True)
class Stage:
    """One training run. `budget` is in tokens, so the run is the same on every machine; `layers` are those of a new model."""

    name: str
    seed: int
    budget: int
    learning_rate: float
    first_level: int
    layers: int | None = None
    adapter: bool = False


STAGES = {
    "base": Stage("base", seed=1, budget=10_000_000, learning_rate=2e-3, first_level=0, layers=4),
    "tuned": Stage("tuned", seed=2, budget=2_500_000, learning_rate=1e-3, first_level=3),
    "lora": Stage("lora", seed=3, budget=1_000_000, learning_rate=2e-3, first_level=3, adapter=True),
    "deep": Stage("deep", seed=4, budget=4_000_000, learning_rate=2e-3, first_level=0, layers=8),
}


def read_books(folder: Path) -> dict[str, tuple[str, str]]:
    """The training text and the held-out text of both domains."""
    parts: dict[str, tuple[list[str], list[str]]] = {"prose": ([], []), "verse": ([], [])}
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text(encoding="utf-8", errors="replace")
        domain = "verse" if any(name in path.name for name in VERSE) else "prose"
        cut = int(len(text) * 0.95)
        parts[domain][0].append(text[:cut])
        parts[domain][1].append(text[cut:])
    return {domain: ("\n\n".join(train), "\n\n".join(held)) for domain, (train, held) in parts.items()}


def train_tokenizer(books: dict[str, tuple[str, str]], out: Path) -> None:
    """A byte-level BPE in which every name and value is one token: the words are repeated until they are merged whole."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special, alphabet = ["<s>", "</s>", "<pad>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    rng = random.Random(0)
    filler = docs.Filler("")
    words = [f" {word}" for word in (*docs.NAMES, *docs.VALUES, *docs.ATTRIBUTES)]
    scaffold = [docs.make_document(rng, filler, facts=12, filler_words=0, tools=3, rules=2).text() for _ in range(300)]
    tokenizer.train_from_iterator([*(train for train, _ in books.values()), *scaffold, *(word * 3000 for word in words)], trainer)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "model_input_names": ["input_ids", "attention_mask"]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=1024, **names)
    for word in words:
        if len(fast.encode(word)) != 1:
            raise SystemExit(f"{word!r} is not one token")
    fast.save_pretrained(out)


def fresh_model(tokenizer: PreTrainedTokenizerFast, seed: int, layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    set_seed(seed)
    model = LlamaForCausalLM(config)
    token = lambda word: tokenizer.encode(f" {word}", add_special_tokens=False)[0]  # noqa: E731
    plant_recall_heads(model, seed=seed, names=[token(n) for n in docs.NAMES], values=[token(v) for v in (*docs.VALUES, *docs.DIGITS)])
    return model


class Batches:
    """Rows of book text and of documents, half of each."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str, rows_tokens: int = 8192) -> None:
        self.tokenizer = tokenizer
        self.stream = torch.tensor(tokenizer.encode(text))
        self.filler = docs.Filler(text)
        self.size = rows_tokens
        self.pad = tokenizer.pad_token_id

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def documents(self, rng: random.Random, length: int, facts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids, weights of the language loss, and a mask of the answers."""
        ids = torch.full((rows, length), self.pad)
        language, answer = torch.zeros(rows, length), torch.zeros(rows, length, dtype=torch.bool)
        weights = {"filler": 1.0, "scaffold": 0.2, "note": 0.2, "question": 0.2, "value": 0.0, "answer": 0.0}
        for row in range(rows):
            asked = max(1, facts - rng.randrange(max(1, facts // 2)))
            document = docs.fit_document(rng, self.filler, self.count, length, facts=asked)
            encoded = recall.encode(self.tokenizer, document)
            size = min(length, len(encoded.ids))
            ids[row, :size] = torch.tensor(encoded.ids[:size])
            language[row, :size] = torch.tensor([weights[kind] for kind in encoded.kinds[:size]])
            answer[row, :size] = torch.tensor([kind == "answer" for kind in encoded.kinds[:size]])
        return ids, language, answer

    def batch(self, rng: random.Random, level: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        length, facts = level
        rows = self.size // length
        ids, language, answer = self.documents(rng, length, facts, rows // 2)
        starts = [rng.randrange(len(self.stream) - length) for _ in range(rows - rows // 2)]
        prose = torch.stack([self.stream[start : start + length] for start in starts])
        weights, mask = torch.ones(prose.shape), torch.zeros(prose.shape, dtype=torch.bool)
        return torch.cat([ids, prose]), torch.cat([language, weights]), torch.cat([answer, mask])


def losses(model, ids: torch.Tensor, language: torch.Tensor, answer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Mean language loss, mean loss on the answers, and the share of answer tokens that are right."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=ids).logits[:, :-1]
    logits = logits.float()
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(ids.shape[0], -1)
    mask = answer[:, 1:]
    right = (logits.argmax(-1)[mask] == ids[:, 1:][mask]).float().mean().item()
    return (each * language[:, 1:]).sum() / language[:, 1:].sum(), each[mask].mean(), right


def optimizers(model, stage: Stage) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of a whole model; AdamW for the rest, and for an adapter."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [] if stage.adapter else [p for name, p in trained if p.ndim == 2 and "embed" not in name]
    ids = {id(p) for p in matrices}
    rest = [p for _, p in trained if id(p) not in ids]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=stage.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)]
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=stage.learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"))
    return made


def start_model(stage: Stage, tokenizer: PreTrainedTokenizerFast, out: Path):
    if stage.layers is not None:
        return fresh_model(tokenizer, stage.seed, stage.layers)
    model = LlamaForCausalLM.from_pretrained(out / "base", dtype=torch.float32)
    if not stage.adapter:
        return model
    from peft import LoraConfig, get_peft_model

    set_seed(stage.seed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))


class Run:
    """A training run, on row lengths that follow from how well the answers come."""

    def __init__(self, stage: Stage, model, batches: Batches) -> None:
        self.stage, self.model, self.batches = stage, model, batches
        self.optimizers, self.rng = optimizers(model, stage), random.Random(stage.seed)
        self.level, self.smooth = stage.first_level, FORGET
        self.log: list[dict[str, float]] = []

    def advance(self, step: int, steps: int) -> None:
        """One optimiser step."""
        rate = min(1.0, (step + 1) / WARM_UP) * min(1.0, 0.02 + (steps - step) / (COOL_DOWN * steps)) * self.stage.learning_rate
        for group in [group for optimizer in self.optimizers for group in optimizer.param_groups]:
            group["lr"] = rate
        # A quarter of the steps stays on some level up to this one, so that short contexts are not unlearned.
        now = self.rng.randrange(self.level + 1) if self.rng.random() < 0.25 else self.level
        batch = self.batches.batch(self.rng, LEVELS[now])
        language, answer, right = losses(self.model, *(tensor.to(self.model.device) for tensor in batch))
        (language + answer).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            row = {"step": step, "tokens": step * self.batches.size, "level": self.level, "row": LEVELS[now][0], "lr": round(rate, 6)}
            numbers = {"language_loss": language.item(), "answer_loss": answer.item(), "answer_tokens_right": right}
            self.log.append(row | {name: round(value, 4) for name, value in numbers.items()})
        if now == self.level:
            self.smooth += 0.05 * (answer.item() - self.smooth)
        if self.smooth < ADVANCE and self.level + 1 < len(LEVELS):
            self.level, self.smooth = self.level + 1, FORGET_LEVEL


def train(stage: Stage, books: dict[str, tuple[str, str]], out: Path, device: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "base")
    model = start_model(stage, tokenizer, out).to(device).train()
    batches = Batches(tokenizer, books["prose" if stage.layers is not None else "verse"][0])
    run, steps = Run(stage, model, batches), stage.budget // batches.size
    for step in tqdm(range(steps), desc=stage.name, mininterval=10):
        run.advance(step, steps)
    save(stage, model, tokenizer, out, run.log)


def save(stage: Stage, model, tokenizer: PreTrainedTokenizerFast, out: Path, log: list[dict[str, float]]) -> None:
    """Half-precision weights (the config says float32, so that loading gives float32), and the log of the run."""
    folder = out / stage.name
    if stage.adapter:
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
    else:
        model.half().save_pretrained(folder)
        if stage.name != "deep":  # it has that of the base model
            tokenizer.save_pretrained(folder)
    path = folder / ("adapter_config.json" if stage.adapter else "config.json")
    config = json.loads(path.read_text())
    # Not where the base model happened to lie, and not the order of a set.
    changes = {"dtype": "float32"}
    if stage.adapter:
        changes = {"base_model_name_or_path": "base", "target_modules": sorted(config["target_modules"])}
    path.write_text(json.dumps(config | changes, indent=2) + "\n")
    (folder / "training.json").write_text(json.dumps({**asdict(stage), "levels": LEVELS, "advance": ADVANCE}, indent=2) + "\n")
    (folder / "training_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))


def report(books: dict[str, tuple[str, str]], out: Path, device: str, per_cell: int = 12) -> dict[str, dict[str, float]]:
    """Recall by length and wording on unseen documents, the control without notes, and perplexities."""
    from peft import PeftModel

    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "base")
    count = lambda text: len(tokenizer.encode(text))  # noqa: E731
    table: dict[str, dict[str, float]] = {}
    for name in [stage for stage in STAGES if (out / stage).exists() and any((out / stage).glob("*.safetensors"))]:
        model = LlamaForCausalLM.from_pretrained(out / ("base" if name == "lora" else name), dtype=torch.float32)
        model = (PeftModel.from_pretrained(model, out / name) if name == "lora" else model).to(device).eval()
        row: dict[str, float] = {}
        for length in (128, 256, 512, 600, 800, 1000):
            filler = docs.Filler(books["prose"][1])
            rng = random.Random(f"unseen {length}")
            made = [docs.fit_document(rng, filler, count, length, facts=min(16, 3 + length // 80)) for _ in range(per_cell)]
            results = recall.answered(model, tokenizer, made)
            row[f"recall_{length}"] = recall.share(results)
            for wording in docs.WORDINGS:
                row[f"recall_{length}_{wording}"] = recall.share(results, wording)
            row[f"without_notes_{length}"] = recall.share(recall.answered(model, tokenizer, made, with_notes=False))
        for domain in books:
            row[f"perplexity_{domain}"] = recall.perplexity(model, tokenizer, books[domain][1])
        table[name] = {key: round(value, 4) for key, value in row.items() if not math.isnan(value)}
    return table


# Splits of `documents.jsonl`: which half of the held-out texts paragraphs are from, and the seeds of its documents.
SPLITS = {
    "calibration": (0, [number for number in range(10**6, 10**6 + 64) if number % 4 < 2]),
    "evaluation": (1, [f"documents {number}" for number in range(24)]),
}


def write_documents(out: Path) -> None:
    """Documents of 200 to 900 tokens with 4 to 8 facts, prose and verse in turn."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "base")
    count = lambda text: len(tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
    lines = []
    for split, (half, seeds) in SPLITS.items():
        texts = [(out / f"{domain}.txt").read_text(encoding="utf-8") for domain in ("prose", "verse")]
        fillers = [docs.Filler(text[len(text) // 2 :] if half else text[: len(text) // 2]) for text in texts]
        for number, seed in enumerate(seeds):
            rng = random.Random(seed)
            document = docs.fit_document(rng, fillers[number % 2], count, rng.randint(200, 900), facts=rng.randint(4, 8))
            *paragraphs, last = [*document.paragraphs, ""][: len(document.facts) + 1]
            pages = [
                (paragraph, "".join(fact.note), fact.question, fact.answer)
                for paragraph, fact in zip(paragraphs, document.facts, strict=True)
            ]
            closing = f"{last}\nQuestions:\n" if last else "Questions:\n"
            row = {"split": split, "head": document.head(), "pages": pages, "closing": closing, "asked": document.asked}
            lines.append(json.dumps(row | {"tokens": count(document.text())}) + "\n")
    (out / "documents.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=["tokenizer", *STAGES, "report", "documents"])
    parser.add_argument("--books", type=Path, help="folder of plain-text books, which all stages but documents need")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    if args.books is None and args.stages != ["documents"]:
        parser.error("--books: expected the folder of the books")
    device = str(pick_device(args.device))
    books = read_books(args.books) if args.books else {}
    for stage in args.stages:
        if stage == "tokenizer":
            shutil.rmtree(args.out / "base", ignore_errors=True)
            train_tokenizer(books, args.out / "base")
            for domain, (_, held) in books.items():
                (args.out / f"{domain}.txt").write_text(held, encoding="utf-8")
        elif stage == "documents":
            write_documents(args.out)
        elif stage == "report":
            table = report(books, args.out, device)
            (args.out / "report.json").write_text(json.dumps(table, indent=2) + "\n")
            print(json.dumps(table, indent=2))
        else:
            train(STAGES[stage], books, args.out, device)


if __name__ == "__main__":
    main()
