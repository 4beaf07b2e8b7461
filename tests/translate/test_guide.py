"""The examples of docs/translation.md run as they stand."""

from __future__ import annotations

import inspect
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_kvcaches
from hf_kvcaches import CacheTranslator, TranslatorConfig
from tests import testbed

GUIDE = (Path(__file__).parents[2] / "docs" / "translation.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def pair() -> Iterator[dict[str, Any]]:
    """What the examples take for granted: two models with their tokenizer, texts, a prompt, and a connection."""
    (producer, tokenizer), (consumer, _) = testbed.load("base"), testbed.load("tuned")
    book = testbed.held_out()
    texts = [book[start : start + 900] for start in range(0, 7200, 900)]
    ends = socket.socketpair()
    prompt = tokenizer(book[-900:], return_tensors="pt")["input_ids"]
    names = {"producer": producer, "consumer": consumer, "tokenizer": tokenizer, "texts": texts, "input_ids": prompt}
    yield {**names, "producers_end": ends[0], "consumers_end": ends[1]}
    for model in (producer, consumer):
        hf_kvcaches.disable(model)
    for end in ends:
        end.close()


@pytest.mark.full
def test_the_examples_run_one_after_the_other(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # files that the examples write stay out of the checkout
    names = {**pair, "__name__": __name__}
    for example in EXAMPLES:
        exec(example, names)
        assert "cache" not in names or names["cache"].report().translated == pair["input_ids"].shape[1] - 1
    assert len(EXAMPLES) == 3
    assert isinstance(names["output"], torch.Tensor)
    assert names["translator"].settings.recompute_layers <= 1


def test_the_guide_has_every_option_with_its_default():
    of_fit = inspect.signature(CacheTranslator.fit).parameters
    assert len(of_fit) == 11
    for parameters in (of_fit, inspect.signature(TranslatorConfig).parameters):
        for name in list(parameters)[4 if parameters is of_fit else 0 :]:
            if name not in ("config", "prefill_share"):
                assert re.search(rf"^\|.*`{name}`", GUIDE, flags=re.MULTILINE), name
    assert f"| `payload` | {of_fit['payload'].default} |" in GUIDE
    assert f"| `layers_per_code` | {TranslatorConfig().layers_per_code} |" in GUIDE
    assert f"`config.prefill_share` ({TranslatorConfig().prefill_share})" in GUIDE
