"""The code of the documents runs as it stands, from the first block of a page to the last, beside the models and texts that it names."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_kvcaches import SegmentPolicy, SegmentStore
from hf_kvcaches.core.fingerprint import ModelFingerprint
from tests import testbed
from tests.documents.blocks import ROOT, blocks, documents, missing_outputs, run
from tests.helpers.stores import redis_location, shared_server

__all__ = ["redis_location", "shared_server"]
# Models as documents name them -> folders of the testbed. `from_pretrained` prefers a folder of that name to the hub.
MODELS = {"Qwen/Qwen3-0.6B": "base", "Qwen/Qwen3-0.6B-tuned": "tuned", "HuggingFaceTB/SmolLM2-135M-Instruct": "base"}
CHAT_TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }}:{{ turn.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
# Pages that calibrate or fit, and take seconds.
SLOW = {"docs/subspace.md", "docs/translation.md"}
# Pages whose code needs several processes: tests/parallel runs it.
ELSEWHERE = {"docs/parallel.md"}
NAMES = [path.relative_to(ROOT).as_posix() for path in documents() if any(blocks(path, "python"))]
WITH_CODE = [name for name in NAMES if name not in ELSEWHERE]


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


def add_policy(folder: Path, model: Path) -> None:
    """A policy as `hf-kvcaches calibrate segments --out segment-policy` leaves it."""
    policy = SegmentPolicy(bound=0.05)
    object.__setattr__(policy, "fingerprint", ModelFingerprint.of(LlamaForCausalLM.from_pretrained(model).eval()))
    policy.save_pretrained(folder / "segment-policy")


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the models and texts that the documents name."""
    for name, source in MODELS.items():
        add_model(tmp_path / name, testbed.FOLDER / source)
    book = testbed.held_out()
    (tmp_path / "document.txt").write_text(book[-1800:], encoding="utf-8")
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text(book[number * 900 : (number + 1) * 900], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    gradients = torch.is_grad_enabled()
    yield tmp_path
    torch.set_grad_enabled(gradients)


def equip(names: dict[str, Any]) -> None:
    assert names["pool"].free_pages == names["pool"].pages, "the cache that held pages was reset"
    assert names["cache"].report().seen == names["inputs"]["input_ids"].shape[1], "the drafts were taken back"


def subspace(names: dict[str, Any]) -> None:
    assert names["cache"].report().seen > names["inputs"]["input_ids"].shape[1]
    assert Path("kv-codec").is_dir()


def segments(names: dict[str, Any]) -> None:
    report = names["report"]
    assert 0.4 < report.flops_saved < 0.9, "most of the second prompt was in the first"
    assert report.reused_tokens > 3 * report.computed_tokens
    assert any(Path("segments").iterdir())
    with SegmentStore(os.environ["REDIS_URL"]) as shared:
        assert shared.report().segments > 0
    assert (names["store"].report().segments, names["small"].report().segments > 0) == (0, True)


def warmstart(names: dict[str, Any]) -> None:
    report = names["report"]
    assert report.strategy == "align"
    assert report.reused_tokens > report.computed_tokens
    assert len(names["library"]) == 2
    assert Path("my-library").is_dir()


def translation(names: dict[str, Any]) -> None:
    assert names["cache"].report().translated == names["input_ids"].shape[1] - 1
    assert names["translator"].settings.recompute_layers <= 1


OUTCOMES: dict[str, Callable[[dict[str, Any]], None]] = {
    "docs/equip.md": equip,
    "docs/subspace.md": subspace,
    "docs/segments.md": segments,
    "docs/warmstart.md": warmstart,
    "docs/translation.md": translation,
}


@pytest.mark.parametrize("document", [pytest.param(name, marks=[pytest.mark.full] if name in SLOW else []) for name in WITH_CODE])
def test_the_blocks_of_a_document_run_one_after_the_other(
    document: str,
    reader: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if any("REDIS_URL" in block.code for block in blocks(ROOT / document, "python")):
        monkeypatch.setenv("REDIS_URL", request.getfixturevalue("redis_location"))
    if "segment-policy" in (ROOT / document).read_text(encoding="utf-8"):
        add_policy(reader, reader / "Qwen" / "Qwen3-0.6B")
    names = run(ROOT / document)
    assert missing_outputs(ROOT / document, capsys.readouterr().out) == []
    OUTCOMES.get(document, lambda names: None)(names)
