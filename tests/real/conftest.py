"""The two real models, each loaded once in a process, and what is calibrated for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvcaches import KVCodec
from hf_kvcaches.cli.arguments import REAL_MODELS
from tests import testbed

MODELS = Path(__file__).resolve().parents[2] / ".models"
# Of the end of the prose, of whose beginning prompts and rows are made. Gemma's 262k logits take most of the time.
CALIBRATION_TOKENS = {"smollm2": 4096, "gemma3": 2048}


@dataclass(frozen=True)
class Real:
    """A model in float32, its tokenizer, and its name."""

    name: str
    model: Any
    tokenizer: Any

    @cached_property
    def codec(self) -> KVCodec:
        """As it is calibrated by default, on the testbed's prose; `at` gives it other bytes."""
        return self._calibrated(CALIBRATION_TOKENS[self.name])

    @cached_property
    def lossless_codec(self) -> KVCodec:
        """All directions in 24 bits: it does not matter how they were found."""
        return self._calibrated(1024, metric="plain", bytes_ratio=1.5)

    def _calibrated(self, tokens: int, **options: Any) -> KVCodec:
        ids = self.tokenizer(testbed.held_out(), add_special_tokens=False)["input_ids"][-tokens:]
        return KVCodec.calibrate(self.model, None, [ids], progress=False, **options)


@pytest.fixture(scope="session", params=REAL_MODELS)
def real(request: pytest.FixtureRequest) -> Real:
    folder = MODELS / request.param
    if not folder.is_dir():
        pytest.fail(f"{folder} is missing: `make models` makes it", pytrace=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Real(request.param, model, AutoTokenizer.from_pretrained(folder, padding_side="left"))
