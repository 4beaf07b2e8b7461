"""The testbed's models, texts and documents, read from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from shared import TESTBED

NAMES = ("base", "tuned", "deep", "lora")


def load(name: str = "base") -> tuple[Any, Any]:
    """A model in float32 and its tokenizer; `lora` is the base model inside PEFT with its adapter active."""
    model: Any = LlamaForCausalLM.from_pretrained(TESTBED / ("base" if name == "lora" else name), dtype=torch.float32)
    if name == "lora":
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, TESTBED / name)
    return model.eval(), AutoTokenizer.from_pretrained(TESTBED / "base", padding_side="left")


def held_out(domain: str = "prose") -> str:
    """Text that no model of the testbed was trained on: `prose` or `verse`."""
    return (TESTBED / f"{domain}.txt").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Page:
    """A paragraph of a book, a note that states a fact, and a question that ends where its answer begins."""

    paragraph: str
    note: str
    question: str
    answer: str

    @property
    def text(self) -> str:
        return f"{self.paragraph}\n{self.note}\n" if self.paragraph else f"{self.note}\n"


@dataclass(frozen=True)
class Document:
    """An agent's prompt: instructions, pages with facts, and the order in which the facts are asked for."""

    head: str
    pages: tuple[Page, ...]
    closing: str
    asked: tuple[int, ...]
    tokens: int

    @property
    def context(self) -> str:
        """All that comes before the first question."""
        return self.head + "".join(page.text for page in self.pages) + self.closing

    @property
    def questions(self) -> list[Page]:
        return [self.pages[index] for index in self.asked]

    @property
    def text(self) -> str:
        return self.context + "".join(f"{page.question}{page.answer}.\n" for page in self.questions)


def documents(split: str) -> list[Document]:
    """The documents for `calibration`, of the first halves of the held-out texts, or for `evaluation`, of the second halves."""
    lines = (TESTBED / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["split"] == split]
    return [
        Document(row["head"], tuple(Page(*page) for page in row["pages"]), row["closing"], tuple(row["asked"]), row["tokens"])
        for row in rows
    ]
