"""The examples of docs/segments.md run as they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pytest
from transformers import LlamaConfig

import hf_kvcaches
from hf_kvcaches import SegmentPolicy, SegmentStore
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.splicing.packing import payload_bytes
from tests import testbed

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "segments.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
SERVER = "redis://localhost:6379/0"


@pytest.fixture(scope="module")
def quickstart() -> Iterator[dict[str, Any]]:
    """What the examples take from the README: the model, its tokenizer and a prompt of about 300 tokens."""
    model, tokenizer = testbed.load("base")
    yield {"model": model, "tokenizer": tokenizer, "inputs": tokenizer(testbed.held_out()[-900:], return_tensors="pt")}
    hf_kvcaches.disable(model)


def calibrated(model: Any, folder: Path) -> None:
    """A policy as calibration leaves it."""
    policy = SegmentPolicy(bound=0.05)
    object.__setattr__(policy, "fingerprint", ModelFingerprint.of(model))
    policy.save_pretrained(folder)


def test_the_examples_run_one_after_the_other(quickstart, tmp_path, monkeypatch, redis_location, capsys):
    (tmp_path / "tests").symlink_to(DOCS.parent / "tests")  # files that the examples write stay out of the checkout
    monkeypatch.chdir(tmp_path)
    calibrated(quickstart["model"], tmp_path / "segment-policy")
    names = {**quickstart, "__name__": __name__}
    assert sum(SERVER in example for example in EXAMPLES) == 1
    for example in EXAMPLES:
        exec(example.replace(SERVER, redis_location), names)
    assert len(EXAMPLES) == 11
    report = names["report"]
    assert 0.4 < report.flops_saved < 0.9, "most of the second prompt stood in the first"
    assert report.reused_tokens > 3 * report.computed_tokens
    assert any((tmp_path / "segments").iterdir())
    with SegmentStore(redis_location) as shared:
        assert shared.report().segments > 0
    assert (names["store"].report().segments, names["deep"].report().segments > 0) == (0, True)
    assert "{'exact'" in capsys.readouterr().out


def test_a_policy_has_the_defaults_that_the_guide_names():
    table = GUIDE.partition("| Option |")[2].partition("## ")[0]
    named: dict[str, str] = {}
    for left, right in re.findall(r"^\| (`[^|]*`) \| (.*?) \|", table, flags=re.MULTILINE):
        names = re.findall(r"\w+", left)
        named |= zip(names, right.split(", ") if len(names) > 1 else [right], strict=True)
    policy = SegmentPolicy()
    assert {name: value.strip('`"') for name, value in named.items()} == {name: str(getattr(policy, name)) for name in named}
    assert set(named) == {field.name for field in fields(policy)} - {"bound", "measured"}


def test_the_bytes_of_the_papers_example_are_those_of_the_formulas():
    config = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    told = re.search(r"`depth=12`: ([\d,]+) and ([\d,]+) bytes", GUIDE)
    assert told is not None
    assert [int(number.replace(",", "")) for number in told.groups()] == [
        payload_bytes(config, "int8", depth=depth) for depth in (None, 12)
    ]


def test_the_guide_links_to_files_that_are_there_and_its_picture_can_be_read():
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", GUIDE):
        assert (DOCS / target).exists(), target
    minidom.parse(str(DOCS / "images" / "segments-splice.svg"))
