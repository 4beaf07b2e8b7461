"""The examples of docs/equip.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import hf_kvcaches
from tests import testbed

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "equip.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def quickstart():
    """What the examples take from the README: the model, its tokenizer and a prompt of about 300 tokens."""
    model, tokenizer = testbed.load("base")
    text = (Path(testbed.__file__).parent / "prose.txt").read_text(encoding="utf-8")[:900]
    yield {"model": model, "tokenizer": tokenizer, "inputs": tokenizer(text, return_tensors="pt", return_token_type_ids=False)}
    hf_kvcaches.disable(model)


def test_the_examples_run_one_after_the_other(quickstart):
    names = {**quickstart, "__name__": __name__}
    with torch.no_grad():
        for example in EXAMPLES:
            exec(example, names)
    assert names["pool"].free_pages == names["pool"].pages, "the cache that held pages was reset"
    assert names["cache"].report().seen == names["inputs"]["input_ids"].shape[1], "the drafts were taken back"


def test_the_guide_links_to_files_that_are_there():
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", GUIDE):
        assert (DOCS / target).exists(), target
