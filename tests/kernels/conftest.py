"""Fixtures of the kernels' tests."""

import pytest
import torch


@pytest.fixture
def unwritten_memory_is_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and scratch that a kernel forgets to write are seen."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
