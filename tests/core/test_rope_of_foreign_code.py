"""Configs that a model's own code brings along: what they don't say is not guessed."""

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig

from hf_kvcaches import AdaptiveSubspace, EquipCache, SubspaceCache, UnsupportedError
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.splicing.rotation import rotation_of


class RemoteConfig(PreTrainedConfig):
    """As a model's own code brings along."""

    model_type = "remote"

    def __init__(self, **kwargs):
        known = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_dim", "rope_parameters"):
            setattr(self, name, getattr(known, name))
        super().__init__(**kwargs)


class InheritingConfig(LlamaConfig):
    """A model's own code that says of itself that it is like Llama."""


def test_keys_of_other_models_code_are_not_rotated_by_guess():
    geometry = RotaryGeometry.from_config(RemoteConfig(), layer_idx=0)
    with pytest.raises(UnsupportedError, match="RemoteConfig is not transformers' own"):
        geometry.shift(torch.zeros(1, 2, 3, 8), 1)
    with pytest.raises(UnsupportedError, match=r"RemoteConfig.*Pass positions='original'"):
        EquipCache(RemoteConfig())
    assert EquipCache(RemoteConfig(), positions="original").seen == 0
    with pytest.raises(UnsupportedError, match=r"RemoteConfig.*rotation='post'"):
        SubspaceCache(RemoteConfig(), adaptive=AdaptiveSubspace(rank=4))
    assert SubspaceCache(RemoteConfig(), adaptive=AdaptiveSubspace(rank=4, rotation="post")).seen == 0
    assert RotaryGeometry.from_config(InheritingConfig()).layout == "half"


def test_common_beginnings_can_still_be_reused():
    rotation = rotation_of(RemoteConfig())
    assert not rotation.refused
    assert not rotation.turns
    assert "RemoteConfig" in rotation.why
