"""How launchers cut their work."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels import launch
from hf_kvcaches.kernels.launch import choose, padded, split_tokens


@pytest.mark.parametrize("count", [1, 15, 16, 17, 63, 64, 65, 1000])
@pytest.mark.parametrize("wanted", [None, 1, 2, 5, 100])
@pytest.mark.parametrize("block", [16, 64])
def test_programs_have_whole_blocks_and_none_is_idle(count: int, wanted: int | None, block: int) -> None:
    chunk, programs = split_tokens(count, block, 3, wanted, torch.device("cpu"))
    assert chunk % block == 0
    assert (programs - 1) * chunk < count <= programs * chunk
    assert programs <= (wanted or 1)
    assert wanted is None or chunk == block or (chunk - block) * wanted < count  # No program has a block more than it takes.


def test_blocks_are_powers_of_two_from_sixteen_on() -> None:
    assert [padded(dim) for dim in (0, 1, 15, 16, 17, 60, 64, 65, 256)] == [16, 16, 16, 16, 32, 64, 64, 128, 256]


def test_a_gpu_without_triton_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "has_triton", lambda: False)
    launch._warn_slow.cache_clear()
    tensor: Any = SimpleNamespace(is_cuda=True, dtype=torch.float32, requires_grad=False)
    with pytest.warns(UserWarning, match="Triton is not installed"):
        assert choose("auto", tensor) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose("auto", tensor) == "torch"


def test_triton_is_refused_where_it_cannot_run() -> None:
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match="'torch' for tensors that are not on a CUDA device"):
        choose("triton", torch.zeros(1))
    for tensor in (torch.zeros(1, dtype=torch.float64), torch.zeros(1, requires_grad=True)):
        with pytest.raises(UnsupportedError, match="no gradients and no float64"):
            choose("triton", tensor)
