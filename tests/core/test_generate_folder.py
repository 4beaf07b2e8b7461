"""A folder that `generate` loads as `custom_generate`: it is whole, decodes with new caches, and takes what `generate` takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, dynamic_module_utils, pipeline

from hf_kvcaches import AdaptiveSubspace, ConfigError, EquipCache, GrowingCache, SubspaceCache, __version__, per_call
from tests import testbed, tiny

EQUIP = {"policy": "streaming", "budget": 12, "recent": 2}
PROMPT = tiny.ids(1, 24)
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "trust_remote_code": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A written folder, with a place of its own for the code that transformers loads."""
    modules = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", modules)
        path = tmp_path_factory.mktemp("repositories") / "streaming"
        per_call(EquipCache, "streaming", budget=12, recent=2).save_pretrained(path)
        yield path


@pytest.fixture(params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    model = {"llama": tiny.llama, "gemma2": tiny.gemma2}[request.param]()
    model.generation_config.eos_token_id = None
    return model


def generate(model: PreTrainedModel, prompt: torch.Tensor = PROMPT, **options: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **OPTIONS | options)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}],
    ids=["greedy", "beams", "samples", "prompt lookup"],
)
def test_generate_with_the_folder_gives_the_text_of_a_new_cache_in_every_call(model, folder, options):
    for prompt in (PROMPT, tiny.ids(1, 17, seed=1)):
        expected = generate(model, prompt, past_key_values=EquipCache(model, **EQUIP), **options)
        assert torch.equal(generate(model, prompt, custom_generate=str(folder), **options), expected)


def test_options_of_the_folder_are_arguments_of_generate(model, folder):
    output = generate(model, custom_generate=str(folder), budget=9, return_dict_in_generate=True)
    assert max(output.past_key_values.report().kept) == 9
    assert torch.equal(output.sequences, generate(model, past_key_values=EquipCache(model, **EQUIP | {"budget": 9})))


def test_a_model_saved_beside_it_generates_with_it(tmp_path, folder):
    path = tmp_path / "model"
    tiny.llama().save_pretrained(path)
    per_call(EquipCache, **EQUIP).save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    for arguments in ((PROMPT,), ()):
        output = model.generate(*arguments, **{} if arguments else {"input_ids": PROMPT}, **options)
        assert isinstance(output.past_key_values, EquipCache)


def test_stop_strings_work_and_pipelines_take_it(folder):
    model, tokenizer = testbed.load("base")
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 20, "do_sample": False, "stop_sequence": "e"}
    texts = ["The ship left the harbour at dawn.", "It was late"]
    got = pipe(texts, custom_generate=str(folder), trust_remote_code=True, **options)
    assert got == [pipe(text, past_key_values=EquipCache(model, **EQUIP), **options) for text in texts]


def test_another_cache_beside_it_and_code_that_is_not_trusted_are_refused(folder):
    with pytest.raises(ConfigError, match=r"past_key_values: .*'DynamicCache'.*type\(model\)\.generate"):
        generate(tiny.llama(), custom_generate=str(folder), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="trust_remote_code"):
        generate(tiny.llama(), custom_generate=str(folder), trust_remote_code=False)


def test_the_folder_has_code_requirements_and_a_card(folder):
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*")) == [
        "README.md",
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
    ]
    assert (folder / "custom_generate" / "requirements.txt").read_text() == f"hf-kvcaches>={__version__}\n"
    card = (folder / "README.md").read_text()
    assert "- custom_generate\n" in card
    assert "custom_generate='OWNER/streaming'" in card
    assert "| `budget` | `12` |" in card
    assert str(folder.parent) not in card


def test_a_cache_without_options_has_no_table(tmp_path):
    per_call(GrowingCache).save_pretrained(tmp_path / "growing")
    assert "| Option |" not in (tmp_path / "growing" / "README.md").read_text()


def test_a_card_of_a_persons_own_stays_and_text_around_the_generated_part_too(tmp_path):
    (tmp_path / "README.md").write_text("Mine.")
    per_call(EquipCache, budget=12).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "Mine."
    (tmp_path / "README.md").unlink()
    per_call(EquipCache, budget=12).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text() + "Mine.\n"
    (tmp_path / "README.md").write_text(card)
    per_call(EquipCache, budget=13).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == card.replace("`12`", "`13`")


class OwnCache(GrowingCache):
    """Not of the package."""


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        (per_call(SubspaceCache, adaptive=AdaptiveSubspace(rank=4)), r"adaptive: expected a JSON value"),
        (per_call(EquipCache, budget=float("inf")), "budget: expected a JSON value"),
        (per_call(OwnCache), r"cache_class: expected a cache of hf_kvcaches.*'OwnCache'"),
    ],
    ids=["object", "infinity", "own class"],
)
def test_what_can_not_be_written_down_is_refused_and_nothing_is_written(tmp_path, caches, message):
    with pytest.raises(ConfigError, match=message):
        caches.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
