"""`SegmentReuseCache` inside `generate`: bit-equal where it says exact, and elsewhere what one token after the other gives."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DynamicCache, GPTNeoXConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from hf_kvcaches import ModelFingerprint, SegmentPolicy, SegmentReuseCache, SegmentStore
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError
from tests import tiny
from tests.helpers.prompts import left_padded
from tests.segments.reference import Source, as_planned, reused_positions, step_by_step

MODELS = {
    "llama": tiny.llama,
    "mha": lambda: tiny.llama(num_key_value_heads=4),
    "mqa": lambda: tiny.llama(num_key_value_heads=1),
    "yarn": lambda: tiny.llama(
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    ),
    "llama3": lambda: tiny.build(
        LlamaConfig(
            **{**tiny._SHAPE, "num_hidden_layers": 2},
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        )
    ),
    "partial": lambda: tiny.build(
        GPTNeoXConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, initializer_range=0.3
        )
    ),
    "gemma2": tiny.gemma2,
    "sliding": lambda: tiny.build(
        Qwen2Config(**tiny._SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=2),
    ),
}
ONE = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
A, B, C, D = (tiny.ids(1, length, seed=seed) for length, seed in ((29, 1), (47, 2), (31, 3), (17, 5)))


assert len({int(part[0, 0]) for part in (A, B, C, D)}) == 4  # or prompts would share a token more


def joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, dim=1)


def first_logits(model, ids, cache, **inputs):
    return model.generate(ids, past_key_values=cache, **ONE, **inputs).logits[0]


def plain(model, ids, **inputs):
    return first_logits(model, ids, DynamicCache(config=model.config), **inputs)


def stored(model, *prompts, **options):
    """A store that has seen these prompts."""
    store = SegmentStore("memory", **{"quantization": None, **options})
    for prompt in prompts:
        first_logits(model, prompt, SegmentReuseCache(model, store, mode="exact"))
    return store


@pytest.mark.parametrize("name", list(MODELS))
def test_a_prompt_that_begins_like_an_earlier_one_is_bit_equal_up_to_there(name):
    model = MODELS[name]()
    store = stored(model, joined(A, B, C))
    cache, prompt = SegmentReuseCache(model, store, mode="exact"), joined(A, B, D)
    assert torch.allclose(first_logits(model, prompt, cache), plain(model, prompt), atol=1e-4)
    source = Source(model, joined(A, B, C))
    for layer, (keys, values) in zip(cache.layers, source.layers, strict=True):
        assert torch.equal(layer.keys[:, :, :76], keys[:, :, :76])
        assert torch.equal(layer.values[:, :, :76], values[:, :, :76])
    report = cache.report()
    assert (report.reused_tokens, report.repaired_tokens, report.computed_tokens) == (76, 0, 16)
    assert report.tiers == {"exact": 76, "computed": 16}
    assert 0.7 < report.flops_saved < 0.85


@pytest.mark.parametrize("repair", [0.0, 0.3])
@pytest.mark.parametrize("name", list(MODELS))
def test_moved_segments_give_what_one_token_after_the_other_gives(name, repair):
    model = MODELS[name]()
    earlier, prompt = joined(A, B, C), joined(D, C[:, :7], B, A, D[:, ::2])
    cache = SegmentReuseCache(model, stored(model, earlier), mode="approximate", repair=repair)
    got = first_logits(model, prompt, cache)
    positions = reused_positions(cache)
    assert len(positions) >= (29 + 47) * (1 - repair) - 3
    expected, reference = as_planned(model, prompt, cache.plans[0], Source(model, earlier))
    assert torch.allclose(got, expected, atol=1e-4)
    assert not torch.allclose(got, plain(model, prompt), atol=1e-4)
    for mine, theirs in zip(cache.layers, reference.layers, strict=True):
        held = theirs.keys.shape[2]
        assert torch.allclose(mine.keys[:, :, -held:], theirs.keys, atol=1e-4)
    assert {"repaired", "computed"} == set(cache.report().tiers)


@pytest.mark.parametrize("repair_depth", [0.5, 1.0])
def test_rows_with_padding_are_matched_by_themselves(repair_depth):
    policy = SegmentPolicy(repair_depth=repair_depth)
    model, earlier = tiny.llama(), joined(A, B, C)
    prompts = [joined(D, B, D[:, :5]), joined(A, B, D), joined(tiny.ids(1, 40, seed=9), C, D), D, earlier]
    ids, mask = left_padded(prompts)
    cache = SegmentReuseCache(model, stored(model, earlier), mode="approximate", policy=policy)
    got = first_logits(model, ids, cache, attention_mask=mask)
    for row, prompt in enumerate(prompts):
        alone = SegmentReuseCache(model, stored(model, earlier), mode="approximate", policy=policy)
        assert torch.allclose(got[row : row + 1], first_logits(model, prompt, alone), atol=1e-4)
        mine = [(s.start, s.stop, s.tier) for s in cache.report().spans if s.row == row]
        assert mine == [(s.start, s.stop, s.tier) for s in alone.report().spans]
    exact = SegmentReuseCache(model, stored(model, earlier), mode="exact")
    assert torch.allclose(first_logits(model, ids, exact, attention_mask=mask), plain(model, ids, attention_mask=mask), atol=1e-4)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_tokens_repaired_in_the_lower_layers_are_reused_in_the_others(share):
    model, earlier, prompt = tiny.llama(), joined(A, B, C), joined(D, B, D[:, :9], A, D)
    saved = {}
    for depth in (share, 1.0):
        policy = SegmentPolicy(repair=0.3, repair_depth=depth)
        cache = SegmentReuseCache(model, stored(model, earlier), mode="approximate", policy=policy)
        logits = first_logits(model, prompt, cache)
        saved[depth] = cache.report().flops_saved
        spans = [span for row in cache.plans for span in row.spans if span.sources]
        places = [(place, tokens) for span in spans for tokens in span.sources for place in span.computed.tolist()]
        where = {place: place - tokens.start + tokens.position for place, tokens in places if tokens.start <= place < tokens.stop}
        repaired = {place: (int(4 * share), position) for place, position in where.items()} if depth < 1 else None
        assert len(where) == cache.report().repaired_tokens == 9 + 15
        expected, _ = as_planned(model, prompt, cache.plans[0], Source(model, earlier), repaired)
        assert torch.allclose(logits, expected, atol=1e-4)
    spared = (1 - share) * len(where) / prompt.shape[1]
    assert saved[share] - saved[1.0] == pytest.approx(spared, rel=0.1)


def test_what_was_reused_is_found_again_as_the_start_of_the_next_step():
    """An agent's next prompt goes on from the last one: all of that is reused, also what was spliced there."""
    model = tiny.llama()
    store = stored(model, joined(A, B, C))
    first, second = joined(D, B, D[:, :9]), joined(D, B, D[:, :9], tiny.ids(1, 20, seed=30))
    one, two = (SegmentReuseCache(model, store, mode="approximate", repair=0.0) for _ in range(2))
    first_logits(model, first, one)
    spliced = step_by_step(model, second, reused_positions(one), Source(model, joined(A, B, C)))[0]
    assert torch.allclose(first_logits(model, second, two), spliced, atol=1e-4)
    assert two.report().reused_tokens == first.shape[1]
    assert set(two.report().tiers) == {"exact", "repaired", "computed"}
    strict = SegmentReuseCache(model, store, mode="exact")
    assert torch.allclose(first_logits(model, second, strict), plain(model, second), atol=1e-4)
    assert strict.report().reused_tokens == 17


def test_a_chat_goes_on_in_one_cache_and_is_known_to_others():
    model, store = tiny.llama(), SegmentStore("memory", quantization=None)
    cache = SegmentReuseCache(model, store, mode="exact")
    text = model.generate(joined(A, B), past_key_values=cache, max_new_tokens=6, do_sample=False)
    turn = joined(text, C)
    got = model.generate(turn, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(got, model.generate(turn, max_new_tokens=5, do_sample=False))
    other = SegmentReuseCache(model, store, mode="exact")
    assert torch.equal(model.generate(turn, past_key_values=other, max_new_tokens=5, do_sample=False), got)
    assert other.report().reused_tokens == turn.shape[1] - 1


def test_prefill_by_hand_fills_the_cache_up_to_the_last_token():
    model, store = tiny.llama(), SegmentStore("memory", quantization=None)
    for _ in range(2):
        cache = SegmentReuseCache(model, store, mode="auto")
        assert cache.prefill(joined(A, B)) == 75
        with torch.no_grad():
            logits = model(B[:, -1:], past_key_values=cache).logits[:, -1]
        assert torch.allclose(logits, plain(model, joined(A, B)), atol=1e-4)
    assert cache.report().reused_tokens == 74
    with pytest.raises(ConfigError, match="input_ids"):
        cache.prefill(torch.zeros(3, dtype=torch.long))


def test_one_token_is_enough_to_store_a_prompt_and_a_cache_that_lives_on_is_waited_for():
    model, store = tiny.llama(), SegmentStore("memory", quantization=None)
    alive = SegmentReuseCache(model, store, mode="auto")
    first_logits(model, joined(A, B), alive)
    cache = SegmentReuseCache(model, store, mode="auto")
    first_logits(model, joined(A, C), cache)
    assert cache.report().reused_tokens == 29


def test_tokens_written_over_a_prompt_do_not_reach_the_store():
    model, store = tiny.llama(), SegmentStore("memory", quantization=None)
    cache = SegmentReuseCache(model, store, mode="auto")
    first_logits(model, joined(A, B), cache)
    cache.crop(-60)
    with torch.no_grad():
        model(C, past_key_values=cache)
    other = SegmentReuseCache(model, store, mode="auto")
    assert torch.allclose(first_logits(model, joined(A, B, D), other), plain(model, joined(A, B, D)), atol=1e-4)
    assert other.report().reused_tokens == 76


def test_what_the_cache_was_not_told_of_is_never_stored_nor_matched():
    model, store = tiny.llama(), SegmentStore("memory", quantization=None)
    cache = SegmentReuseCache(model, store, mode="auto")
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(A), past_key_values=cache)
    assert torch.allclose(first_logits(model, joined(A, B), cache), plain(model, joined(A, B)), atol=1e-4)
    assert store.report().segments == 0
    positions = SegmentReuseCache(model, store, mode="auto")
    with torch.no_grad():
        model(input_ids=A, position_ids=torch.arange(29)[None] + 5, past_key_values=positions, logits_to_keep=1)
        model(input_ids=B, past_key_values=positions, logits_to_keep=1)
    assert store.report().segments == 0


def test_models_that_cannot_move_keys_reuse_only_starts():
    model = tiny.gpt2()
    store = stored(model, joined(A, B, C))
    cache = SegmentReuseCache(model, store, mode="auto")
    assert torch.allclose(first_logits(model, joined(A, B, D), cache), plain(model, joined(A, B, D)), atol=1e-4)
    assert cache.report().tiers == {"exact": 76, "computed": 16}
    moved = SegmentReuseCache(model, store, mode="auto")
    assert torch.allclose(first_logits(model, joined(D, B, A), moved), plain(model, joined(D, B, A)), atol=1e-4)
    assert moved.report().reused_tokens == 0
    with pytest.raises(UnsupportedError, match="can't be moved"):
        SegmentReuseCache(model, store, mode="approximate")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"mode": "fast"}, "mode"), ({"policy": 0.3}, "policy"), ({"repair": 1.5}, "repair"), ({"repair": True}, "repair")],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        SegmentReuseCache(tiny.llama(), SegmentStore("memory"), **arguments)


def test_keys_that_change_with_the_length_are_refused():
    model = tiny.llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(UnsupportedError, match="model"):
        SegmentReuseCache(model, SegmentStore("memory"), mode="auto")


def test_a_policy_of_another_model_is_refused():
    model, other = tiny.llama(), tiny.llama(seed=1)
    policy = SegmentPolicy()
    object.__setattr__(policy, "fingerprint", ModelFingerprint.of(other))
    with pytest.raises(FingerprintMismatch, match="policy"):
        SegmentReuseCache(model, SegmentStore("memory"), policy=policy)
    assert SegmentReuseCache(other, SegmentStore("memory"), policy=policy, repair=0.3).policy.repair == 0.3


@pytest.mark.parametrize("prompt", [joined(A, B), joined(C, B, D)], ids=["nothing stored", "pieces stored"])
@pytest.mark.parametrize("mode", ["exact", "auto", "approximate"])
def test_with_all_that_is_stored_run_again_the_cache_holds_what_a_full_one_does(mode, prompt):
    model, store = tiny.llama(), SegmentStore("memory", quantization=None)
    first_logits(model, joined(A, B), SegmentReuseCache(model, store, mode="auto"))
    store.flush()
    if prompt.shape[1] == 76:
        store.clear()
    cache, reference = SegmentReuseCache(model, store, mode=mode, repair=1.0), DynamicCache(config=model.config)
    first_logits(model, prompt, cache)
    model(prompt, past_key_values=reference)
    for layer, expected in zip(cache.layers, reference.layers, strict=True):
        assert torch.allclose(layer.keys, expected.keys, atol=1e-4)
        assert torch.allclose(layer.values, expected.values, atol=1e-4)
    longer = {"max_new_tokens": 8, "do_sample": False}
    more = joined(prompt, tiny.ids(1, 6, seed=9))
    assert torch.equal(model.generate(more, past_key_values=cache, **longer), model.generate(more, **longer))


@torch.no_grad()
def loop(model, cache, ids, mask=None):
    """A user's own loop, which leaves the numbering of tokens to the model; the logits behind the prompt and two more tokens."""
    found = []
    for part in (ids, *tiny.ids(len(ids), 2, seed=7).split(1, dim=1)):
        inputs = {"input_ids": part, "past_key_values": cache, "logits_to_keep": 1}
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, cache.get_seq_length() + part.shape[1] - mask.shape[1]), value=1)
            inputs["attention_mask"] = mask
        found.append(model(**inputs).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("seen", [[], [joined(A, B)], [joined(A, B, C), joined(A, B)]], ids=["empty", "the prompt", "longer"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "partial"])
def test_a_loop_without_positions_gets_what_a_full_cache_gives(name, seen):
    model, prompts = MODELS[name](), [joined(A, B), joined(A, B)[:, -60:]]
    store = stored(model, *seen) if seen else SegmentStore("memory", quantization=None)
    ids = torch.cat([prompts[0], torch.nn.functional.pad(prompts[1], (16, 0))])
    mask = torch.cat([torch.ones(1, 76), torch.nn.functional.pad(torch.ones(1, 60), (16, 0))]).long()
    for inputs in ((ids, mask), (ids, None), (prompts[0], torch.ones_like(prompts[0])), (prompts[0], None)):
        for _ in range(2):  # what the first one stored must not mislead the second
            got = loop(model, SegmentReuseCache(model, store, mode="exact"), *inputs)
            assert torch.allclose(got, loop(model, DynamicCache(config=model.config), *inputs), atol=1e-4)
    # Nor those that number their tokens.
    got = first_logits(model, ids, SegmentReuseCache(model, store, mode="exact"), attention_mask=mask)
    assert torch.allclose(got, plain(model, ids, attention_mask=mask), atol=1e-4)


@pytest.mark.parametrize("mode", ["exact", "auto", "approximate"])
def test_a_saved_cache_goes_on_with_its_policy_and_mode(mode, tmp_path):
    model = tiny.llama()
    policy = SegmentPolicy(guard=9, similarity=0.5, repair_depth=0.5, measured=({"repair": 0.7, "kl": 0.1},))
    object.__setattr__(policy, "fingerprint", ModelFingerprint.of(model))
    cache = SegmentReuseCache(model, SegmentStore("memory"), mode=mode, policy=policy, repair=0.4)
    first_logits(model, joined(A, B), cache)
    cache.save(tmp_path / "cache.safetensors")
    loaded = SegmentReuseCache.load(tmp_path / "cache.safetensors", model)
    assert (loaded.mode, loaded.policy, loaded.policy.fingerprint) == (mode, cache.policy, policy.fingerprint)
    more = joined(A, B, C)
    assert torch.equal(first_logits(model, more, loaded), first_logits(model, more, cache))


def word_tokenizer(prefix: str) -> PreTrainedTokenizerFast:
    words = {f"{prefix}{number}": number for number in range(tiny.VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token=f"{prefix}0")), unk_token=f"{prefix}0")


def test_segments_that_were_stored_with_another_tokenizer_are_not_reused():
    model, store, prompt = tiny.llama(), SegmentStore("memory", quantization=None), joined(A, B)
    for tokenizer, reused in (("a", False), ("b", False), ("a", True)):
        cache = SegmentReuseCache(model, store, word_tokenizer(tokenizer), mode="exact")
        assert (first_logits(model, prompt, cache) - plain(model, prompt)).abs().max() < 1e-4
        assert bool(cache.report().reused_tokens) == reused, tokenizer
        del cache
        store.flush()


def test_a_prefix_of_less_than_a_fiftieth_of_a_prompt_is_computed_and_says_why():
    model = tiny.llama()
    store = SegmentStore("memory")
    first = tiny.ids(1, 260, seed=6)
    first_logits(model, first, SegmentReuseCache(model, store))
    for shared, reused in ((4, 0), (5, 5)):
        cache = SegmentReuseCache(model, store, mode="exact")
        ids = joined(first[:, :shared], (first[:, shared : shared + 1] + 1) % 90, tiny.ids(1, 254 - shared, seed=7))
        plain = first_logits(model, ids, DynamicCache())
        assert (first_logits(model, ids, cache) - plain).abs().max() < 1e-4
        report = cache.report()
        assert report.reused_tokens == reused
        assert ("too few" in report.spans[-1].reason) == (not reused)
