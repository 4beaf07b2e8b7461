"""recommend tells the bytes of caches from a config alone, and they are those that caches have."""

import re

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DynamicCache,
    FalconConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
    RoFormerConfig,
)

from hf_kvcaches import EquipCache, GrowingCache, KVCodec, SubspaceCache
from hf_kvcaches.cli.recommend import choices, family_of, nearest, speed_table
from hf_kvcaches.cli.sizes import model_size
from hf_kvcaches.cli.tables import write_csv
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.evaluate.measures import cache_bytes
from tests import testbed, tiny
from tests.cli.running import BASE, run, succeed
from tests.scripts.running import rows_of

TOKENS, BUDGET = 300, 100
NEEDS_WEIGHTS = RoFormerConfig(
    vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, is_decoder=True
)


def measured(model, cache, batch=2):
    """Bytes of one row of a cache behind a prompt."""
    with torch.no_grad():
        model(tiny.ids(batch, TOKENS), past_key_values=cache, logits_to_keep=1)
    return cache_bytes(cache) / batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_those_that_caches_hold(dtype):
    model = testbed.load()[0].to(dtype)
    size = model_size(model.config, dtype)
    assert size.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())
    codec = KVCodec.calibrate(model, None, [tiny.ids(400).tolist()], 0.25, metric="plain", progress=False)
    assert size.full(TOKENS) == measured(model, DynamicCache(config=model.config))
    assert size.growing(TOKENS) == measured(model, GrowingCache(model))
    expected = {
        "slots": (size.slots(TOKENS, BUDGET), EquipCache(model, budget=BUDGET)),
        "int8": (size.int8_slots(TOKENS, BUDGET), EquipCache(model, budget=BUDGET, storage="int8")),
        "codes": (size.codes(TOKENS, codec.bytes_ratio), SubspaceCache(model, codec)),
    }
    for name, (told, cache) in expected.items():
        assert told == pytest.approx(measured(model, cache), rel=0.05), name


@pytest.mark.parametrize("model", [tiny.gemma2(), tiny.build(NEEDS_WEIGHTS)], ids=["windows", "not without weights"])
def test_layers_with_windows_and_models_that_need_weights(model):
    model.config.use_cache = True
    size, cache = model_size(model.config, torch.float32), DynamicCache(config=model.config)
    with torch.no_grad():
        model(tiny.ids(1, 40), past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert size.full(40) - sum(layer.state for layer in size.layers) == held


def test_latents_are_counted_once():
    config = DeepseekV3Config(num_hidden_layers=2, kv_lora_rank=512, qk_rope_head_dim=64, n_routed_experts=8)
    assert model_size(config, torch.bfloat16).full(1000) == 2 * 1000 * (512 + 64) * 2


def test_states_of_linear_attention_do_not_grow():
    size = model_size(Qwen3NextConfig(num_hidden_layers=4, num_experts=8, num_experts_per_tok=2), torch.bfloat16)
    [attention] = [layer for layer in size.layers if layer.numbers]
    assert size.full(2000) - size.full(1000) == 1000 * attention.numbers * 2
    assert sum(layer.state for layer in size.layers) > 0
    assert size.slots(2000, 500) < size.full(1000)


def test_the_first_setting_that_fits_comes_with_its_code(capsys):
    options = ("recommend", "--model", BASE, "--context", "32k", "--batch", 8)
    done = succeed(capsys, *options, "--memory", "400MiB")
    assert "llama, 4 layers, float32; 8 x 32,768 tokens" in done.out
    lines = {line.split("  ")[0]: line.split() for line in done.out.splitlines()}
    assert lines["DynamicCache()"][1:7] == ["1.00", "100%", "1.01", "no", "same", "yes"]
    assert "The first that fits and works is SubspaceCache(codec of bytes_ratio=0.25)" in done.out
    eighth = "SubspaceCache(codec of bytes_ratio=0.125)"
    for memory, cache in (("16GiB", "GrowingCache()"), ("1100MiB", "DynamicCache()"), ("100MiB", eighth)):
        assert f"works is {cache}:" in run(capsys, *options, "--memory", memory).out
    nothing = run(capsys, *options, "--memory", "1MiB")
    assert nothing.code == 1
    assert "Nothing fits: shorten the context, make the batch smaller, or quantize the weights." in nothing.out
    without = run(capsys, *options)
    assert "fits  " not in without.out
    assert "works is GrowingCache():" in without.out


@pytest.mark.parametrize("index", range(12))
def test_the_code_of_every_setting_runs(index, tmp_path, monkeypatch):
    model, tokenizer = testbed.load()
    choice = choices(model_size(model.config, torch.float32), 512)[index]
    inputs = tokenizer(testbed.held_out()[:400], return_tensors="pt")
    names = {"model": model, "tokenizer": tokenizer, "inputs": inputs, "texts": [testbed.held_out()[:500]]}
    monkeypatch.chdir(tmp_path)
    exec(choice.code.replace("max_new_tokens=256", "max_new_tokens=2"), names)
    assert names["output"].shape[1] == inputs["input_ids"].shape[1] + 2


def test_caches_that_refuse_the_family_are_not_chosen_and_the_reason_is_told(capsys, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 1000, "num_attention_heads": 4}
    DeepseekV3Config(num_hidden_layers=2, n_routed_experts=8, **sizes).save_pretrained(tmp_path)
    done = run(capsys, "recommend", "--model", tmp_path, "--context", "64k", "--memory", "500MiB", "--dtype", "float32", "--batch", 3)
    assert "SubspaceCache with deepseek_v3: no (KVCodec.calibrate needs a cache that answers" in done.out
    assert "works is EquipCache(budget=32768)" in done.out
    lines = {line.split("  ")[0]: line.split("  ", 1)[1].split() for line in done.out.splitlines() if "  " in line}
    # No bytes and no speeds of what does not work.
    assert lines["EquipCache(budget=32768, storage='int8')"] == lines["SubspaceCache(codec of bytes_ratio=0.25)"] == ["no"]
    assert lines["EquipCache(budget=32768)"][-3:][0] in ("yes", "partly")


@pytest.mark.parametrize(
    ("quantization", "share"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 0.5),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.25),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 0.5),
        ({"quant_method": "mxfp4"}, 0.25),
    ],
)
def test_quantized_weights_count_as_what_they_are(quantization, share, capsys, tmp_path):
    config = tiny.llama(num_hidden_layers=8).config
    plain = model_size(config, torch.bfloat16)
    config.quantization_config = quantization
    size, ends = model_size(config, torch.bfloat16), 2 * 2 * tiny.VOCABULARY * 32
    assert size.weight_bytes == pytest.approx((plain.weight_bytes - ends) * share + ends, rel=0.02)
    assert size.full(100) == plain.full(100)
    config.save_pretrained(tmp_path)
    done = run(capsys, "recommend", "--model", tmp_path, "--memory", "1KiB", "--dtype", "bfloat16")
    assert "Nothing fits: shorten the context, or make the batch smaller." in done.out


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (Qwen3Config(), "qwen3"),
        (MistralConfig(sliding_window=4096), "mistral"),
        (MistralConfig(sliding_window=None), "mistral+full"),
        (FalconConfig(alibi=True), "falcon+alibi"),
        (PreTrainedConfig(), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_families_have_the_names_of_the_table(config, family):
    name, support = family_of(config)
    assert name == family
    assert (support is None) if not family else support["GrowingCache"] == "yes"


def row(cache, setting="", **changes):
    case = {"hardware": "Abacus", "device": "cpu", "dtype": "float32", "hidden": 1024, "layers": 28, "batch": 1, "context": 2048}
    numbers = {"prefill_s": 1, "decode_ms": 1, "prefill_ratio": 1, "decode_ratio": 2}
    return {name: str(value) for name, value in (case | numbers | {"cache": cache, "setting": setting} | changes).items()}


def test_the_nearest_row_is_of_the_same_cache_and_kind_of_setting():
    rows = [row("GrowingCache", context=2048), row("GrowingCache", context=8192), row("GrowingCache", device="cuda", context=32768)]
    rows += [row("EquipCache", "policy='streaming', budget=0.25"), row("EquipCache", "policy='keydiff', page_size=16")]
    case = {"device": "cpu", "dtype": "float32", "hidden": 1024, "layers": 28, "batch": 8, "context": 16384}
    assert nearest(rows, "GrowingCache", "", case) == rows[1]
    assert nearest(rows, "GrowingCache", "", case | {"device": "cuda"}) == rows[2]
    assert nearest(rows, "EquipCache", "policy='future'", case) == rows[3]
    assert nearest(rows, "EquipCache", "storage='int8'", case) is None
    assert nearest(rows, "SubspaceCache", "codec", case) is None


def test_a_speed_table_of_ones_own_is_read_and_another_file_is_refused(capsys, tmp_path):
    measured, path = row("GrowingCache", prefill_ratio=1.25, decode_ratio=3.5), tmp_path / "speed.csv"
    write_csv(path, [measured])
    done = run(capsys, "recommend", "--model", BASE, "--speed", path)
    assert re.search(r"GrowingCache\(\).* 1\.25x  3\.50x", done.out)
    assert "measured nearest (1024 x 28 layers, float32, 1 x 2048 tokens, Abacus)" in done.out
    for content, reason in (("a,b\n1,2\n", "the columns .* are missing"), (",".join(measured), "no rows")):
        path.write_text(content)
        with pytest.raises(ArtifactError, match=f"speed.csv: expected a file of hf-kvcaches bench --csv, .*{reason}"):
            speed_table(path)


def test_json_and_csv_have_the_rows_of_the_table(capsys, tmp_path):
    options = ("recommend", "--model", BASE, "--context", "2k", "--json")
    found = run(capsys, *options, "--memory", "1GiB", "--csv", tmp_path / "rows.csv").document
    assert (found["family"], found["layers"], found["full_attention_layers"], found["context"]) == ("llama", 4, 4, 2048)
    assert found["memory_bytes"] == 2**30
    rows = rows_of(tmp_path / "rows.csv")
    assert len(rows) == 12
    assert [(row["cache"], row["gib"]) for row in found["caches"]] == [(row["cache"], float(row["gib"])) for row in rows]
    assert {row["context"] for row in rows} == {"2048"}
    assert found["choice"]["cache"] == "GrowingCache()"
    assert "per_call(GrowingCache)" in found["choice"]["code"]
    nothing = run(capsys, *options, "--memory", "1MiB")
    assert (nothing.code, nothing.document["choice"]) == (1, None)
