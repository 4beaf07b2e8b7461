"""Which adapters take part, and how, belongs to a model's identity."""

import peft
import pytest
import torch
from packaging.version import Version
from peft import PeftModel, get_peft_model
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_kvcaches.core.fingerprint import ModelFingerprint
from tests.core.fingerprint_helpers import changed, llama, lora, nudge, two_adapters


def test_the_order_of_active_adapters_counts():
    model = two_adapters()
    model.base_model.set_adapter(["law", "medical"])
    one = ModelFingerprint.of(model)
    model.base_model.set_adapter(["medical", "law"])
    other = ModelFingerprint.of(model)
    assert changed(one, other) == {"adapters"}
    assert "active ['law', 'medical'] here, ['medical', 'law'] there" in one.differs_from(other)[0]


@pytest.mark.parametrize("everywhere", [True, False])
def test_scaling_counts(everywhere):
    model = two_adapters()
    before = ModelFingerprint.of(model)
    layers = [m for m in model.modules() if hasattr(m, "scale_layer")]
    for layer in layers if everywhere else layers[2:3]:
        layer.scale_layer(0.5)
    reasons = ModelFingerprint.of(model).differs_from(before)
    assert len(reasons) == 1
    assert reasons[0].startswith("adapters differ")


def test_one_adapter_weight_counts_and_an_inactive_adapter_does_not():
    model = two_adapters()
    before = ModelFingerprint.of(model)
    attention = model.base_model.model.model.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.lora_A["medical"].weight.add_(1)
    assert ModelFingerprint.of(model) == before
    with torch.no_grad():
        attention.q_proj.lora_A["law"].weight[0, 0] += 1
    after = ModelFingerprint.of(model)
    assert changed(before, after) == {"adapters"}


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=["magnitude vector", "saved module"])
def test_all_that_an_adapter_brings_counts(changes):
    model = get_peft_model(llama(), lora(**changes))
    before = ModelFingerprint.of(model)
    assert before.weights == ModelFingerprint.of(llama()).weights
    name = next(n for n, _ in model.named_parameters() if "magnitude" in n or "modules_to_save" in n)
    nudge(name)(model)
    assert changed(before, ModelFingerprint.of(model)) == {"adapters"}


def test_a_merged_adapter_changes_the_base_and_is_named_and_unmerging_is_seen():
    model = two_adapters()
    # Small powers of two add and subtract without rounding, so that unmerging gives back the same bits.
    for name, value in model.named_parameters():
        value.data = torch.where(torch.rand_like(value) < 0.5, 0.25, -0.5) if "norm" not in name else value.data
    before = ModelFingerprint.of(model)
    model.merge_adapter()
    merged = ModelFingerprint.of(model)
    assert changed(before, merged) == {"weights", "adapters"}
    assert "law" in merged.describe()
    assert "merged" in merged.describe()
    model.unmerge_adapter()
    assert ModelFingerprint.of(model) == before
    model.merge_adapter()
    gone = ModelFingerprint.of(model.merge_and_unload())
    assert changed(merged, gone) == {"adapters"}


def test_adapters_added_by_transformers_itself_count():
    if Version(peft.__version__) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"this transformers adds adapters with PEFT {MIN_PEFT_VERSION} and newer only")
    model = llama()
    plain = ModelFingerprint.of(model)
    model.add_adapter(lora(), adapter_name="law")
    model.add_adapter(lora(), adapter_name="medical")
    model.set_adapter("law")
    law = ModelFingerprint.of(model)
    assert changed(plain, law) == {"adapters"}
    model.set_adapter("medical")
    assert changed(law, ModelFingerprint.of(model)) == {"adapters"}
    model.disable_adapters()
    assert ModelFingerprint.of(model) == plain


def test_one_saved_adapter_loaded_by_peft_and_by_transformers_is_one_model(tmp_path):
    two_adapters().save_pretrained(tmp_path, selected_adapters=["law"])
    by_peft = PeftModel.from_pretrained(llama(), tmp_path / "law", adapter_name="law")
    by_transformers = llama()
    by_transformers.load_adapter(str(tmp_path / "law"), adapter_name="law")
    assert ModelFingerprint.of(by_peft).differs_from(ModelFingerprint.of(by_transformers)) == []
