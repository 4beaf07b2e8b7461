"""`per_call`: each call of `generate` decodes with a cache of its own, and gives the text of a new cache passed by hand."""

import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache as remembered
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
    PreTrainedModel,
    StopStringCriteria,
    TextGenerationPipeline,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import hf_kvcaches
from hf_kvcaches import (
    AdaptiveSubspace,
    ConfigError,
    EquipCache,
    GrowingCache,
    KVCache,
    SegmentReuseCache,
    SegmentStore,
    SubspaceCache,
    UnsupportedError,
    compat,
    per_call,
)
from hf_kvcaches.core.cache import PerCall
from tests import testbed, tiny
from tests.helpers.prompts import mask_of

EQUIP = {"policy": "streaming", "budget": 12, "recent": 2}
LENGTH = 24
PROMPT = tiny.ids(1, LENGTH)


@remembered
def model_of(family: str) -> PreTrainedModel:
    model = {"llama": tiny.llama, "gemma2": tiny.gemma2}[family]()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return model_of(request.param)


KINDS: dict[str, tuple[type[KVCache], dict[str, Any]]] = {
    "growing": (GrowingCache, {}),
    "equip": (EquipCache, EQUIP),
    "subspace": (SubspaceCache, {"adaptive": AdaptiveSubspace(rank=4, warmup=16), "sinks": 1, "recent": 2}),
    "segments": (SegmentReuseCache, {}),
    "segments, equip": (SegmentReuseCache, {"decode_with": EQUIP}),
}


def recipe(name: str) -> PerCall:
    kind, options = KINDS[name]
    store = [SegmentStore("memory")] if kind is SegmentReuseCache else []
    return per_call(kind, *store, **({"decode_with": per_call(EquipCache, **EQUIP)} if "decode_with" in options else options))


def by_hand(name: str, model: PreTrainedModel, store: SegmentStore) -> KVCache:
    """What a user would write for each call, with a store that the calls share."""
    kind, options = KINDS[name]
    stores = [store] if kind is SegmentReuseCache else []
    return kind(model, *stores, **({"decode_with": EquipCache(model, **EQUIP)} if "decode_with" in options else options))


def padded() -> dict[str, Any]:
    return {"inputs": tiny.ids(3, LENGTH), "attention_mask": mask_of(LENGTH, 9, 0, 3)}


MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "greedy": dict,
    "chunked prefill": lambda: {"prefill_chunk_size": 7},
    "padded batch": padded,
    "sampling": lambda: {"do_sample": True},
    "several samples of a prompt": lambda: {"do_sample": True, "num_return_sequences": 3},
    "beams": lambda: {"num_beams": 3},
    "beams of a padded batch": lambda: {"num_beams": 2, "num_return_sequences": 2, **padded()},
    "sampled beams": lambda: {"num_beams": 3, "do_sample": True},
    "assistant": lambda: {"assistant_model": tiny.llama(seed=1, num_hidden_layers=1)},
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 3, "inputs": PROMPT[:, :8].repeat(1, 3)},
}


def generate(model: PreTrainedModel, **options: Any) -> Any:
    """What `generate` gives, or its error as a string."""
    torch.manual_seed(0)
    arguments = {"inputs": PROMPT, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | options
    if "attention_mask" not in arguments:
        arguments["attention_mask"] = torch.ones_like(arguments["inputs"])
    try:
        return model.generate(**arguments)
    except NotImplementedError as error:
        return repr(error)


@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name in KINDS for mode in MODES if name != "subspace" or mode in ("greedy", "beams")]
)
def test_every_mode_gives_the_text_of_a_new_cache_passed_by_hand(name, mode):
    model, store, caches, options = model_of("llama"), SegmentStore("memory"), recipe(name), MODES[mode]()
    for _ in range(2):  # the second call finds in the store what the first one left there
        expected = generate(model, past_key_values=by_hand(name, model, store), **options)
        got = generate(model, custom_generate=caches, **options)
        if isinstance(expected, str):
            assert got == expected
            assert name != "growing", "any mode works with some cache"
        else:
            assert torch.equal(got, expected)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "prompt lookup"])
def test_a_streamer_gets_every_token(model, options):
    streamer = Recorder()
    text = generate(model, custom_generate=recipe("growing"), streamer=streamer, **options)
    assert streamer.tokens == text[0].tolist()
    assert streamer.ended


def test_the_drafts_of_an_assistant_are_used():
    model, assistant, passes = tiny.llama(), tiny.llama(), []
    assistant.generation_config.assistant_confidence_threshold = 0.0
    model.register_forward_pre_hook(lambda _, args, kwargs: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    generate(model, custom_generate=recipe("growing"), assistant_model=assistant, eos_token_id=None, min_new_tokens=8)
    assert len(passes) <= 4


@pytest.fixture(scope="module")
def pipe() -> TextGenerationPipeline:
    model, tokenizer = testbed.load("base")
    return pipeline("text-generation", model=model, tokenizer=tokenizer)


TEXTS = ["The ship left the harbour at dawn.", "It was late", "Nobody in the village had seen the old man since the winter, and"]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", ["growing", "equip", "segments, equip"])
def test_a_pipeline_answers_each_prompt_of_a_list_as_if_it_were_the_only_one(pipe, name, batch_size):
    options, store = {"max_new_tokens": 8, "do_sample": False}, SegmentStore("memory")
    expected = []
    for texts in [TEXTS] if batch_size == 3 else [[text] for text in TEXTS]:
        expected += pipe(texts, batch_size=len(texts), past_key_values=by_hand(name, pipe.model, store), **options)
    assert pipe(TEXTS, batch_size=batch_size, custom_generate=recipe(name), **options) == expected


def test_the_cache_of_a_call_is_in_its_output_and_freed_without():
    model, made, caches = tiny.llama(), recipe("equip"), []
    assert generate(model, custom_generate=made, return_dict_in_generate=True).past_key_values.report().seen >= LENGTH
    gc.collect()
    assert not model._forward_pre_hooks
    model.register_forward_pre_hook(lambda _, args, kwargs: caches.append(weakref.ref(compat.cache_of(kwargs))), with_kwargs=True)
    generate(model, custom_generate=made)
    assert caches
    assert not any(cache() for cache in caches)


def test_prompts_are_taken_from_the_store_that_calls_share(model):
    caches = recipe("segments")
    for expected in (0, LENGTH - 1):
        output = generate(model, custom_generate=caches, return_dict_in_generate=True)
        assert output.past_key_values.report().reused_tokens == expected
        caches.args[0].flush()


def test_threads_share_it(model):
    caches = recipe("segments, equip")
    prompts = [tiny.ids(1, 20 + index, seed=index) for index in range(6)]

    def answer(prompt: torch.Tensor) -> torch.Tensor:
        return generate(model, inputs=prompt, custom_generate=caches)

    expected = [generate(model, inputs=prompt, past_key_values=recipe("segments, equip").new_cache(model)) for prompt in prompts]
    with ThreadPoolExecutor(3) as threads:
        assert all(map(torch.equal, threads.map(answer, prompts * 2), expected * 2))


def test_an_encoder_decoder_gets_it_for_its_decoder():
    shape = dict.fromkeys(["encoder_layers", "decoder_layers"], 2) | dict.fromkeys(
        ["encoder_attention_heads", "decoder_attention_heads"], 4
    )
    config = BartConfig(vocab_size=96, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, init_std=0.3, forced_eos_token_id=None, **shape)
    torch.manual_seed(0)
    model = BartForConditionalGeneration(config).eval()
    for beams in (1, 3):
        output = generate(model, custom_generate=recipe("growing"), num_beams=beams, return_dict_in_generate=True)
        assert isinstance(output.past_key_values, EncoderDecoderCache)
        assert isinstance(output.past_key_values.self_attention_cache, GrowingCache)
        assert torch.equal(output.sequences, generate(model, num_beams=beams))


def test_adapters_generate_with_it_and_learned_prompts_are_seen():
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(tiny.llama(), lora)
    assert torch.equal(generate(adapted, custom_generate=recipe("growing")), generate(adapted))
    prompted = get_peft_model(tiny.llama(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    assert torch.equal(generate(prompted, custom_generate=recipe("growing")), generate(prompted))
    prefixed = get_peft_model(tiny.llama(), PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    for model in (prompted, prefixed):
        with pytest.raises(UnsupportedError, match="learned prompt"):
            model.generate(input_ids=PROMPT, custom_generate=recipe("segments"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"past_key_values": DynamicCache()}, ConfigError, r"past_key_values: .*per_call\(GrowingCache, \.\.\.\).*'DynamicCache'.*Leave"),
        ({"cache_implementation": "static"}, ConfigError, r"cache_implementation: .*'static'.*model\.generation_config"),
        ({"use_cache": False}, ConfigError, r"use_cache: .*False.*Leave one of them out"),
        ({"assistant_model": tiny.llama(vocab_size=64)}, UnsupportedError, "assistant_model: .*vocabulary.*past_key_values"),
        ({"penalty_alpha": 0.5, "top_k": 4}, UnsupportedError, "contrastive_search needs 'transformers-community/contrastive-search'"),
    ],
    ids=["past_key_values", "cache_implementation", "use_cache", "assistant", "contrastive search"],
)
def test_what_does_not_go_with_it_is_refused_with_what_to_do(options, error, message):
    with pytest.raises(error, match=message):
        model_of("llama").generate(PROMPT, custom_generate=recipe("growing"), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: per_call(GrowingCache(model)), r"got GrowingCache\(.*Pass the class.*per_call\(GrowingCache"),
        (lambda model: per_call(DynamicCache), "a class of this package's caches"),
        (lambda model: per_call(EquipCache, model, budget=3), r"'LlamaForCausalLM'\. Leave it out: per_call\(EquipCache, \.\.\.\)"),
        (lambda model: per_call(EquipCache, bugdet=3), r"\(policy, budget, .*'bugdet'"),
        (lambda model: generate(model, custom_generate=per_call(SegmentReuseCache)), "store: expected a SegmentStore"),
        (
            lambda model: per_call(SegmentReuseCache, SegmentStore("memory"), decode_with=EquipCache(model)),
            r"'EquipCache'\. Pass per_call\(EquipCache, \.\.\.\) in its place",
        ),
        (lambda model: model.generate(PROMPT, past_key_values=per_call(GrowingCache)), r"past_key_values: .*as custom_generate"),
        (lambda model: per_call(GrowingCache)(model, PROMPT), "called by generate"),
    ],
    ids=["instance", "foreign class", "model", "misspelt", "missing", "cache as option", "as past_key_values", "called by hand"],
)
def test_a_wrong_use_is_refused_with_what_to_do(make, message):
    with pytest.raises(ConfigError, match=message):
        make(model_of("llama"))


def test_stop_strings_are_given_as_criteria(pipe):
    options = {"max_new_tokens": 20, "do_sample": False}
    inputs = pipe.tokenizer(TEXTS[0], return_tensors="pt")
    expected = pipe.model.generate(**inputs, stop_strings=["e"], tokenizer=pipe.tokenizer, **options)
    criteria = [StopStringCriteria(pipe.tokenizer, ["e"])]
    assert torch.equal(pipe.model.generate(**inputs, custom_generate=recipe("growing"), stopping_criteria=criteria, **options), expected)


def test_generate_may_have_been_replaced_by_a_wrapper(model, monkeypatch):
    expected, original = generate(model, custom_generate=recipe("equip")), GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate", lambda self, *args, **kwargs: original(self, *args, **kwargs))
    assert torch.equal(generate(model, custom_generate=recipe("equip")), expected)


def test_it_reads_like_the_call_that_made_it():
    assert repr(per_call(EquipCache, "streaming", budget=512)) == "per_call(EquipCache, 'streaming', budget=512)"
    nested = repr(per_call(SegmentReuseCache, SegmentStore("memory"), decode_with=recipe("equip")))
    assert nested.startswith("per_call(SegmentReuseCache, SegmentStore(")
    assert nested.endswith("decode_with=per_call(EquipCache, policy='streaming', budget=12, recent=2))")


def test_it_travels_with_what_it_was_given(model):
    copied = pickle.loads(pickle.dumps(recipe("equip")))
    assert repr(copied) == repr(recipe("equip"))
    assert torch.equal(generate(model, custom_generate=copied), generate(model, custom_generate=recipe("equip")))


# A class, or a cache, given where the other belongs

PUBLIC = [getattr(hf_kvcaches, name) for name in hf_kvcaches.__all__]
CLASSES = [each for each in PUBLIC if isinstance(each, type) and issubclass(each, KVCache) and each is not KVCache]
every_class = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
every_name = pytest.mark.parametrize("name", sorted({"past_key_values", compat.GENERATE_CACHE}))


@every_name
@every_class
def test_a_class_in_the_place_of_a_cache_is_refused(kind, name):
    with pytest.raises(ConfigError, match=rf"got the class {kind.__name__}\. Pass {kind.__name__}\(model, .*per_call"):
        generate(model_of("llama"), **{name: kind})


@every_name
def test_after_a_refused_class_new_caches_still_refuse_another_text(name):
    model = model_of("llama")
    with pytest.raises(ConfigError):
        generate(model, **{name: GrowingCache})
    cache = GrowingCache(model)
    generate(model, **{name: cache})
    with pytest.raises(ConfigError, match="another token"):
        generate(model, inputs=tiny.ids(1, 40, seed=5), **{name: cache})


@every_class
def test_a_class_as_custom_generate_is_refused(kind):
    with pytest.raises(ConfigError, match=rf"custom_generate: expected per_call\({kind.__name__}, \.\.\.\), got the class"):
        generate(model_of("llama"), custom_generate=kind)


def test_a_cache_as_custom_generate_is_refused_and_not_left_out():
    cache = GrowingCache(model_of("llama"))
    with pytest.raises(ConfigError, match=r"expected per_call\(GrowingCache, \.\.\.\), got a GrowingCache\. .*past_key_values"):
        generate(model_of("llama"), custom_generate=cache)
    assert not cache.seen
