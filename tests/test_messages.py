"""What a user is told who got an argument wrong: short, with the name that was meant, and the argument that was swapped."""

import numpy as np
import pytest
import torch
from transformers import BertConfig, BloomConfig, CpmAntConfig, T5Config, T5ForConditionalGeneration

from hf_kvcaches import (
    AdaptiveSubspace,
    ArtifactError,
    ConfigError,
    EquipCache,
    GrowingCache,
    KVCodec,
    SegmentReuseCache,
    SegmentStore,
    SubspaceCache,
    UnsupportedError,
    WarmStartCache,
    WarmStartLibrary,
)
from hf_kvcaches.errors import whole_number
from tests import tiny
from tests.warmstart.warm import words


@pytest.fixture(scope="module")
def model():
    return tiny.llama()


@pytest.fixture(scope="module")
def store():
    return SegmentStore("memory")


@pytest.mark.parametrize(
    ("make", "meant"),
    [
        (lambda model, store: EquipCache(model, "stremaing"), "'streaming'"),
        (lambda model, store: EquipCache(model, "H2O"), "'h2o'"),
        (lambda model, store: EquipCache(model, positions="orignal"), "'original'"),
        (lambda model, store: EquipCache(model, storage="int_8"), "'int8'"),
        (lambda model, store: EquipCache(model, backend="tritn"), "'triton'"),
        (lambda model, store: SubspaceCache(model, adaptive=AdaptiveSubspace(rank=4), backend="pytorch"), "'torch'"),
        (lambda model, store: AdaptiveSubspace(rank=4, rotation="awere"), "'aware'"),
        (lambda model, store: KVCodec.calibrate(model, None, [[3, 4]], metric="plane"), "'plain'"),
        (lambda model, store: SegmentStore("memory", quantization="int_8"), "'int8'"),
        (lambda model, store: SegmentReuseCache(model, store, mode="exakt"), "'exact'"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_one_that_was_meant(model, store, make, meant):
    with pytest.raises(ConfigError, match=rf"Did you mean {meant}\?"):
        make(model, store)


def test_a_name_like_no_other_is_answered_with_all():
    with pytest.raises(ConfigError, match=r"one of 'aware', 'post', got 'zzz'\.$"):
        AdaptiveSubspace(rank=4, rotation="zzz")


def test_swapped_arguments_are_named_and_not_printed(model, store):
    library = WarmStartLibrary(model, words())
    for make in (
        lambda: SegmentReuseCache(model, words(), store),
        lambda: WarmStartCache(library, model),
        lambda: EquipCache("streaming", model),
        lambda: SubspaceCache(AdaptiveSubspace(rank=4), adaptive=model),
    ):
        with pytest.raises(ConfigError, match="swapped") as error:
            make()
        assert len(str(error.value)) < 300
        assert "\n" not in str(error.value)


def test_a_tokenizers_name_is_no_tokenizer(model, store):
    for make in (
        lambda: SegmentReuseCache(model, store, "gpt2"),
        lambda: WarmStartLibrary(model, "gpt2"),
        lambda: KVCodec.calibrate(model, "gpt2", ["a text"]),
    ):
        with pytest.raises(ConfigError, match=r"AutoTokenizer.from_pretrained\('gpt2'\)"):
            make()


def test_numpys_integers_are_integers(model):
    two, eight, prompt = np.int64(2), np.int32(8), tiny.ids(1, 12)

    def answer(cache):
        return model.generate(prompt, past_key_values=cache, max_new_tokens=4, do_sample=False)

    plain = EquipCache(model, "streaming", budget=8, sinks=2, recent=2)
    cache = EquipCache(model, "streaming", budget=eight, sinks=two, recent=two)
    assert torch.equal(answer(cache), answer(plain))
    assert cache.settings() == plain.settings()
    assert answer(EquipCache(model, "streaming", budget=[eight] * 4, sinks=two, page_size=two)).shape == (1, 16)
    made = AdaptiveSubspace(rank=(two, eight), chunk=np.int64(16), warmup=np.int64(16))
    assert made == AdaptiveSubspace(rank=(2, 8), chunk=16, warmup=16)
    assert answer(SubspaceCache(model, adaptive=made, sinks=two, recent=eight)).shape == (1, 16)
    assert SegmentStore("memory", max_bytes=np.int64(1000)).max_bytes == 1000
    assert type(whole_number("n", np.int64(3), 1)) is int
    for wrong in (True, np.bool_(True), 2.0, np.float64(2), "2", None):
        with pytest.raises(ConfigError, match="an integer of at least 1"):
            whole_number("n", wrong, 1)


def test_a_long_value_is_cut(model):
    with pytest.raises(ConfigError) as error:
        EquipCache(model, budget="x" * 5000)
    assert len(str(error.value)) < 250


def test_articles_fit_their_nouns(model, tmp_path):
    cache = EquipCache(model, budget=16)
    with torch.no_grad():
        model(tiny.ids(1, 5), past_key_values=cache)
    cache.save(tmp_path / "cache")
    with pytest.raises(ArtifactError, match="holds an EquipCache, not a GrowingCache"):
        GrowingCache.load(tmp_path / "cache", model)


def test_an_encoder_decoder_is_sent_to_what_works(store):
    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    t5 = T5ForConditionalGeneration(config).eval()
    for make in (
        lambda: EquipCache(t5),
        lambda: SubspaceCache(t5, adaptive=AdaptiveSubspace(rank=4)),
        lambda: KVCodec.calibrate(t5, None, [[3, 4, 5]]),
        lambda: SegmentReuseCache(t5, store),
    ):
        with pytest.raises(UnsupportedError, match=r"encoder-decoder.* Use GrowingCache, or leave past_key_values out"):
            make()
    prompt = tiny.ids(1, 9)
    got = t5.generate(prompt, past_key_values=GrowingCache(t5), max_new_tokens=8, do_sample=False)
    assert torch.equal(got, t5.generate(prompt, max_new_tokens=8, do_sample=False))


def test_a_refusal_does_not_recommend_what_is_refused_too(store):
    config = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    bert = tiny.build(BertConfig(**config, intermediate_size=64, is_decoder=True))
    cpmant = tiny.build(CpmAntConfig(**config, dim_head=8, dim_ff=64, prompt_types=4, prompt_length=4, segment_types=4))
    for model in (bert, cpmant):
        for mode in ("exact", "approximate", "auto"):
            with pytest.raises(UnsupportedError, match=r"Use (Growing|Dynamic)Cache"):
                SegmentReuseCache(model, store, mode=mode)
        prompt = tiny.ids(1, 9)
        got = model.generate(prompt, past_key_values=GrowingCache(model), max_new_tokens=4, do_sample=False)
        assert torch.equal(got, model.generate(prompt, max_new_tokens=4, do_sample=False))
    with pytest.raises(UnsupportedError, match=r"Use (Growing|Dynamic)Cache"):
        WarmStartLibrary(bert, words())
    bloom = tiny.build(BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4))
    for rotation in ("aware", "post"):
        with pytest.raises(UnsupportedError, match=r"KVCodec.calibrate needs a cache that answers .* Use DynamicCache"):
            KVCodec.calibrate(bloom, None, [[3, 4, 5]], rotation=rotation)
