"""What files of these tests ask for by name."""

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from tests import tiny


@pytest.fixture
def no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama()
