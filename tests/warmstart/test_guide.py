"""The examples of docs/warmstart.md run as they stand."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_kvcaches
from hf_kvcaches import WarmStartGate, WarmStartLibrary
from tests import testbed

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "warmstart.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def quickstart() -> Iterator[dict[str, Any]]:
    """What the examples take from the README: the model, its tokenizer and a prompt."""
    model, tokenizer = testbed.load("base")
    yield {"model": model, "tokenizer": tokenizer, "inputs": tokenizer(testbed.held_out()[-900:], return_tensors="pt")}
    hf_kvcaches.disable(model)


def test_the_examples_run_one_after_the_other(quickstart, tmp_path, monkeypatch):
    (tmp_path / "tests").symlink_to(DOCS.parent / "tests")  # files that the examples write stay out of the checkout
    monkeypatch.chdir(tmp_path)
    names = {**quickstart, "__name__": __name__}
    for example in EXAMPLES:
        exec(example, names)
        if "page =" in example:
            report = names["report"]
            assert report.strategy == "align"
            assert report.swapped
            assert report.reused_tokens > report.computed_tokens
    assert len(EXAMPLES) == 6
    assert len(names["library"]) == 3
    assert (tmp_path / "my-library").is_dir()


def test_the_gate_has_the_defaults_that_the_guide_names():
    rows = dict(re.findall(r"^\| `(reusable|tau|lengths|lexical|content)` \| ([^|]+?) \|", GUIDE, flags=re.MULTILINE))
    gate = WarmStartGate()
    assert rows.pop("lengths") == f"{gate.lengths[0]} to {gate.lengths[1]}"
    assert rows == {name: str(getattr(gate, name)) for name in ("reusable", "tau", "lexical", "content")}


def test_the_library_has_the_defaults_that_the_guide_names():
    defaults = {name: p.default for name, p in inspect.signature(WarmStartLibrary).parameters.items()}
    rows = re.findall(r"^\| `(slots|encoder|full|quantization|location|max_bytes)` \| `?\"?([^|`\"]+?)\"?`? \|", GUIDE, flags=re.MULTILINE)
    assert {name: value for name, value in rows if name != "encoder"} == {
        name: str(defaults[name]) for name in ("slots", "full", "quantization", "location", "max_bytes")
    }
    assert dict(rows)["encoder"] == "model"


def test_the_guide_links_to_files_that_are_there():
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", GUIDE):
        assert target.startswith("http") or (DOCS / target).exists(), target
