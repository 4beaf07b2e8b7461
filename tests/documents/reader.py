"""A reader's working folder: the models and texts that the documents name, as files of the testbed."""

import json
from pathlib import Path

from transformers import LlamaForCausalLM

from hf_kvcaches import SegmentPolicy
from hf_kvcaches.core.fingerprint import ModelFingerprint
from tests import testbed

# Models as documents name them -> folders of the testbed. `from_pretrained` prefers a folder of that name to the hub.
MODELS = {"Qwen/Qwen3-0.6B": "base", "Qwen/Qwen3-0.6B-tuned": "tuned", "HuggingFaceTB/SmolLM2-135M-Instruct": "base"}
CHAT_TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }}:{{ turn.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
CALIBRATION_TEXTS, CHARACTERS = 8, 900


def furnish(folder: Path) -> None:
    """Put the models and texts that the documents name into a folder."""
    for name, source in MODELS.items():
        add_model(folder / name, testbed.FOLDER / source)
    book = testbed.held_out()
    (folder / "document.txt").write_text(book[-1800:], encoding="utf-8")
    (folder / "texts").mkdir()
    for number in range(CALIBRATION_TEXTS):
        text = book[number * CHARACTERS : (number + 1) * CHARACTERS]
        (folder / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")


def add_policy(folder: Path, model: Path) -> None:
    """A policy as `hf-kvcaches calibrate segments --out segment-policy` leaves it."""
    policy = SegmentPolicy(bound=0.05)
    object.__setattr__(policy, "fingerprint", ModelFingerprint.of(LlamaForCausalLM.from_pretrained(model).eval()))
    policy.save_pretrained(folder / "segment-policy")


def add_model(folder: Path, source: Path) -> None:
    """A model with the tokenizer of `base` and a chat template, as links to the testbed's files."""
    folder.mkdir(parents=True)
    for file in (*(testbed.FOLDER / "base").glob("tokenizer*.json"), *source.glob("*config.json"), source / "model.safetensors"):
        link = folder / file.name
        if not link.is_symlink():
            link.symlink_to(file)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"padding_side": "left"}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
