"""Which dimensions of keys form a pair, and configs that a model's own code brings along: what they don't say is not guessed."""

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig
from transformers.models.llama import modeling_llama

from hf_kvcaches import AdaptiveSubspace, EquipCache, SubspaceCache, UnsupportedError
from hf_kvcaches.core.rope import RotaryGeometry, rotation_of


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
    assert "RemoteConfig" in rotation.why


INTERLEAVED = """codegen cohere cohere2 ernie4_5 ernie4_5_moe glm glm4 glm4v_text glm_ocr_text gptj helium llama4_text moonshine
    deepseek_v4""".split()


@pytest.mark.parametrize("model_type", INTERLEAVED)
def test_families_that_pair_neighbouring_dimensions_are_known(model_type):
    assert RotaryGeometry.from_config(AutoConfig.for_model(model_type), layer_idx=0).layout == "interleaved"


def rotate_thirds(q, k, cos, sin):
    return q, k.roll(3, -1) * sin


def fails(q, k, cos, sin):
    raise RuntimeError("other arguments")


@pytest.mark.parametrize("function", [rotate_thirds, fails, None])
def test_keys_are_not_rotated_where_the_rotary_function_is_not_understood(function, monkeypatch):
    if function is None:
        monkeypatch.delattr(modeling_llama, "apply_rotary_pos_emb")
    else:
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", function)
    geometry = RotaryGeometry.from_config(LlamaConfig(hidden_size=32, num_attention_heads=4))
    assert geometry.kind == "unknown"
    with pytest.raises(UnsupportedError, match="rotary function of llama was not understood"):
        geometry.shift(torch.zeros(1, 2, 3, 8), 1)
    rotation = rotation_of(LlamaConfig(hidden_size=32, num_attention_heads=4))
    assert not rotation.refused
    assert "not understood" in rotation.why
