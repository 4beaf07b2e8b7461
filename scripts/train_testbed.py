"""Trains the small models that the tests and the demo run on: a base model, a tuned one and a LoRA adapter.

    python scripts/train_testbed.py --books FOLDER --out tests/testbed --state .testbed tokenizer base tuned lora report

Each stage resumes from the state folder. The books are plain-text files; those named in `VERSE` train the tuned model and
the adapter, the others the base model, and the last twentieth of every book is held out.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.testbed import documents as docs  # noqa: E402
from tests.testbed import recall  # noqa: E402
from tests.testbed.circuits import plant_recall_heads  # noqa: E402

VERSE = ("milton", "shakespeare", "whitman")
VOCABULARY = 2048
# (row length, facts a document): a level is left when the loss on the answers falls below ADVANCE
LEVELS = ((128, 4), (256, 7), (512, 11), (1024, 16))
ADVANCE = 0.6


@dataclass(frozen=True)
class Stage:
    """One training run. `budget` is in tokens, so the run is the same on every machine."""

    name: str
    seed: int
    budget: int
    learning_rate: float
    first_level: int
    adapter: bool = False


STAGES = {
    "base": Stage("base", seed=1, budget=12_000_000, learning_rate=2e-3, first_level=0),
    "tuned": Stage("tuned", seed=2, budget=3_000_000, learning_rate=1e-3, first_level=3),
    "lora": Stage("lora", seed=3, budget=1_200_000, learning_rate=2e-3, first_level=3, adapter=True),
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
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    rng = random.Random(0)
    filler = docs.Filler("")
    words = [f" {word}" for word in (*docs.NAMES, *docs.VALUES, *docs.ATTRIBUTES)]
    scaffold = [docs.make_document(rng, filler, facts=12, filler_words=0, tools=3, rules=2).text() for _ in range(300)]
    tokenizer.train_from_iterator([*(train for train, _ in books.values()), *scaffold, *(word * 3000 for word in words)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
                                   model_max_length=1024, model_input_names=["input_ids", "attention_mask"])
    for word in words:
        if len(fast.encode(word)) != 1:
            raise SystemExit(f"{word!r} is not one token")
    fast.save_pretrained(out)


def fresh_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
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
        return (
            torch.cat([ids, prose]),
            torch.cat([language, torch.ones(prose.shape)]),
            torch.cat([answer, torch.zeros(prose.shape, dtype=torch.bool)]),
        )


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
    if stage.name == "base":
        return fresh_model(tokenizer, stage.seed)
    model = LlamaForCausalLM.from_pretrained(out / "base", dtype=torch.float32)
    if not stage.adapter:
        return model
    from peft import LoraConfig, get_peft_model

    set_seed(stage.seed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))


def train(stage: Stage, books: dict[str, tuple[str, str]], out: Path, state: Path, device: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "base")
    model = start_model(stage, tokenizer, out).to(device)
    data = Batches(tokenizer, books["prose" if stage.name == "base" else "verse"][0])
    steps = stage.budget // data.size
    made = optimizers(model, stage)
    checkpoint = state / f"{stage.name}.pt"
    rng, step, level, smooth, log = random.Random(stage.seed), 0, stage.first_level, 5.0, []
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, values in zip(made, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        rng.setstate(saved["rng"])
        step, level, smooth, log = saved["step"], saved["level"], saved["smooth"], saved["log"]
    model.train()
    kept = time.monotonic()
    for step in tqdm(range(step, steps), initial=step, total=steps, desc=stage.name, mininterval=10):
        factor = min(1.0, (step + 1) / 60) * min(1.0, 0.02 + (steps - step) / (0.4 * steps))
        for optimizer in made:
            for group in optimizer.param_groups:
                group["lr"] = stage.learning_rate * factor
        # A quarter of the steps stays on an earlier level, so that short contexts are not unlearned.
        now = rng.randrange(level + 1) if rng.random() < 0.25 else level
        language, answer, right = losses(model, *(t.to(device) for t in data.batch(rng, LEVELS[now])))
        (language + answer).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if now == level:
            smooth += 0.05 * (answer.item() - smooth)
        if step % 10 == 0:
            log.append({"step": step, "tokens": step * data.size, "level": level, "row": LEVELS[now][0], "lr": round(stage.learning_rate * factor, 6),
                        "language_loss": round(language.item(), 4), "answer_loss": round(answer.item(), 4), "answer_tokens_right": round(right, 4)})
            (state / f"{stage.name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
        if smooth < ADVANCE and level + 1 < len(LEVELS):
            level, smooth = level + 1, 2.0
        if time.monotonic() - kept > 120 or step == steps - 1:
            kept = time.monotonic()
            part = checkpoint.with_suffix(".part")
            torch.save({"model": model.state_dict(), "optimizers": [o.state_dict() for o in made], "rng": rng.getstate(), "step": step + 1,
                        "level": level, "smooth": smooth, "log": log}, part)
            part.replace(checkpoint)
    save(stage, model, tokenizer, out, log)


def save(stage: Stage, model, tokenizer: PreTrainedTokenizerFast, out: Path, log: list[dict[str, float]]) -> None:
    """Half-precision weights (the config says float32, so that loading gives float32), and the log of the run."""
    folder = out / stage.name
    model.eval()
    if stage.adapter:
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
    else:
        model.half().save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config["dtype"] = "float32"
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tokenizer.save_pretrained(folder)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=["tokenizer", *STAGES, "report"])
    parser.add_argument("--books", type=Path, required=True, help="folder of plain-text books")
    parser.add_argument("--out", type=Path, default=Path("tests/testbed"))
    parser.add_argument("--state", type=Path, default=Path(".testbed"), help="checkpoints of unfinished runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.state.mkdir(parents=True, exist_ok=True)
    books = read_books(args.books)
    for stage in args.stages:
        if stage == "tokenizer":
            shutil.rmtree(args.out / "base", ignore_errors=True)
            train_tokenizer(books, args.out / "base")
            for domain, (_, held) in books.items():
                (args.out / f"{domain}.txt").write_text(held, encoding="utf-8")
        elif stage == "report":
            table = report(books, args.out, args.device)
            (args.out / "report.json").write_text(json.dumps(table, indent=2) + "\n")
            print(json.dumps(table, indent=2))
        else:
            train(STAGES[stage], books, args.out, args.state, args.device)


if __name__ == "__main__":
    main()
