"""The examples of docs/subspace.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import hf_kvcaches
from tests import testbed

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "subspace.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def quickstart():
    """What the examples take from the README: the model, its tokenizer and a prompt of about 300 tokens."""
    model, tokenizer = testbed.load("base")
    yield {"model": model, "tokenizer": tokenizer, "inputs": tokenizer(testbed.held_out()[:900], return_tensors="pt")}
    hf_kvcaches.disable(model)


@pytest.mark.full
def test_the_examples_run_one_after_the_other(quickstart, tmp_path, monkeypatch):
    (tmp_path / "tests").symlink_to(DOCS.parent / "tests")  # files that the examples write stay out of the checkout
    monkeypatch.chdir(tmp_path)
    names = {**quickstart, "__name__": __name__}
    with torch.no_grad():
        for example in EXAMPLES:
            exec(example, names)
    assert len(EXAMPLES) == 7
    assert names["cache"].report().seen > quickstart["inputs"]["input_ids"].shape[1]
    assert (tmp_path / "kv-codec").is_dir()


def test_the_guide_links_to_files_that_are_there():
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", GUIDE):
        assert (DOCS / target).exists(), target
