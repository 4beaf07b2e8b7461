"""Options of `AdaptiveSubspace` that make no sense are refused by name."""

from typing import Any

import pytest

from hf_kvcaches import AdaptiveSubspace, SubspaceCache
from hf_kvcaches.errors import ConfigError
from tests import tiny


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "bytes_ratio, rank, energy"),
        ({"rank": 3, "bytes_ratio": 0.5}, "bytes_ratio, rank, energy"),
        ({"rank": 0}, "rank"),
        ({"rank": (3, 4, 5)}, "rank"),
        ({"rank": (3, True)}, "rank"),
        ({"bytes_ratio": 0.0}, "bytes_ratio"),
        ({"bytes_ratio": 1.5}, "bytes_ratio"),
        ({"energy": True}, "energy"),
        ({"rank": 3, "sketch": "svd"}, "sketch"),
        ({"rank": 3, "sketch_size": 8}, "sketch_size"),
        ({"rank": 3, "sketch": "fd", "sketch_size": 0}, "sketch_size"),
        ({"rank": 9, "sketch": "fd", "sketch_size": 8}, "sketch_size"),
        ({"energy": 0.9, "sketch": "fd"}, "sketch_size"),
        ({"rank": 3, "chunk": 40}, "chunk"),
        ({"rank": 3, "chunk": 0}, "chunk"),
        ({"rank": 3, "warmup": 10}, "warmup"),
        ({"rank": 3, "warmup": None}, "warmup"),
        ({"rank": 3, "tau_k": -0.1}, "tau_k"),
        ({"rank": 3, "tau_v": 1.1}, "tau_v"),
        ({"rank": 3, "rotation": "before"}, "rotation"),
        ({"rank": 3, "gamma": 1}, "gamma"),
        ({"rank": 3, "decay": float("nan")}, "decay"),
        ({"rank": 3, "decay": None}, "decay"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        AdaptiveSubspace(**options)


def test_a_rank_above_the_head_size_and_settings_as_a_dict_are_refused() -> None:
    model = tiny.llama()
    with pytest.raises(ConfigError, match=r"^rank: .*1 to 8 for keys"):
        SubspaceCache(model, adaptive=AdaptiveSubspace(rank=(3, 9)))
    with pytest.raises(ConfigError, match="adaptive: "):
        SubspaceCache(model, adaptive={"rank": 3})
