"""Small trained models, the documents that they can answer questions about, and texts that they have not seen.

`base`, `tuned`, `deep` and `lora` are folders to load from; `prose.txt` and `verse.txt` are the held-out ends of public-domain books.
docs/testbed.md says how they came about and what they can do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

FOLDER = Path(__file__).parent


def load(name: str = "base") -> tuple[PreTrainedModel, Any]:
    """A model in float32 and its tokenizer.

    Args:
        name: `base`, `tuned`, `deep`, or `lora` for the base model inside PEFT with its adapter active.
    """
    model = LlamaForCausalLM.from_pretrained(FOLDER / ("base" if name == "lora" else name), dtype=torch.float32)
    if name == "lora":
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, FOLDER / name)
    return model.eval(), AutoTokenizer.from_pretrained(FOLDER / "base", padding_side="left")


def held_out(domain: str = "prose") -> str:
    """Text that no model here was trained on.

    Args:
        domain: `prose` or `verse`.
    """
    return (FOLDER / f"{domain}.txt").read_text(encoding="utf-8")
