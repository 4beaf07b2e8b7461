"""Maps of slots: what they do, and how they are stored."""

from __future__ import annotations

import pytest
import torch

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.warmstart.paper.cache import SummaryLibrary
from hf_kvcaches.warmstart.paper.maps import Adapters, TrainedAdapters
from tests import tiny
from tests.warmstart.warm import words


def scaled(by: float) -> Adapters:
    config = tiny.llama().config
    maps = (by * torch.eye(config.head_dim).repeat(config.num_key_value_heads, 1, 1),) * config.num_hidden_layers
    return Adapters(maps, maps)


def test_stored_adapters_come_back() -> None:
    trained = TrainedAdapters(scaled(1.0), 8, "paper", 1)
    stored = trained.tensors()
    restored = TrainedAdapters.restore(stored, trained.metadata())
    assert all(torch.equal(each, stored[name]) for name, each in restored.tensors().items())
    del stored["values.0"]
    with pytest.raises(ArtifactError, match="fit no model"):
        TrainedAdapters.restore(stored, trained.metadata())


def test_summaries_are_mapped_relative_to_the_end_of_their_prompt() -> None:
    model, ids = tiny.llama(), tiny.ids(1, 60, seed=1)[0].tolist()
    both = (None, TrainedAdapters(scaled(2.0), 16, "paper", 1))
    plain, mapped = (SummaryLibrary(model, words(), 16, adapters=own).summarised(ids) for own in both)
    for before, after in zip(plain.layers, mapped.layers, strict=True):
        torch.testing.assert_close(after.keys, 2 * before.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(after.values, 2 * before.values)


def test_adapters_of_other_summaries_are_refused() -> None:
    with pytest.raises(ConfigError, match="adapters: expected those for slots, layout and tail"):
        SummaryLibrary(tiny.llama(), words(), 16, adapters=TrainedAdapters(scaled(1.0), 8, "paper", 1))
