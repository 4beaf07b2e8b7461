"""The examples of docs/equip.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import hf_kvcaches
from hf_kvcaches import EquipCache
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


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_run(quickstart, number):
    names = {**quickstart, "__name__": __name__}
    with torch.no_grad():
        exec(EXAMPLES[number], names)
    for cache in (value for value in names.values() if isinstance(value, EquipCache)):
        assert cache.report().kept  # the constructor's arguments made a cache that reports


def test_the_guide_links_to_files_that_are_there():
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", GUIDE):
        assert (DOCS / target).exists(), target
