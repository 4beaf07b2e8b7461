"""A cache class, or a cache, given where the other belongs: refused with what to pass, and nothing is left behind on the class."""

import re

import pytest

import hf_kvcaches
from hf_kvcaches import ConfigError, EquipCache, GrowingCache, KVCache, per_call
from hf_kvcaches.compat import GENERATE_CACHE
from tests import tiny

PUBLIC = [getattr(hf_kvcaches, name) for name in hf_kvcaches.__all__]
CLASSES = [each for each in PUBLIC if isinstance(each, type) and issubclass(each, KVCache) and each is not KVCache]
PROMPT, OTHER = tiny.ids(1, 12), tiny.ids(1, 30, seed=5)


@pytest.fixture(scope="module")
def model():
    return tiny.llama()


def generate(model, **options):
    return model.generate(PROMPT, max_new_tokens=3, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("name", sorted({"past_key_values", GENERATE_CACHE}))
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_class_in_the_place_of_a_cache_is_refused(model, kind, name):
    with pytest.raises(ConfigError, match=rf"got the class {kind.__name__}\. Pass {kind.__name__}\(model, .*per_call"):
        generate(model, **{name: kind})


@pytest.mark.parametrize("name", sorted({"past_key_values", GENERATE_CACHE}))
def test_after_a_refused_class_new_caches_still_refuse_another_text(model, name):
    with pytest.raises(ConfigError):
        generate(model, **{name: GrowingCache})
    cache = GrowingCache(model)
    generate(model, **{name: cache})
    with pytest.raises(ConfigError, match="another token"):
        model.generate(OTHER, max_new_tokens=3, do_sample=False, pad_token_id=0, **{name: cache})


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_class_as_custom_generate_is_refused(model, kind):
    with pytest.raises(ConfigError, match=rf"custom_generate: expected per_call\({kind.__name__}, \.\.\.\), got the class"):
        generate(model, custom_generate=kind)


def test_a_cache_as_custom_generate_is_refused_and_not_left_out(model):
    cache = GrowingCache(model)
    with pytest.raises(
        ConfigError, match=r"custom_generate: expected per_call\(GrowingCache, \.\.\.\), got a GrowingCache\. .*past_key_values"
    ):
        generate(model, custom_generate=cache)
    assert not cache.seen


def test_per_call_of_a_cache_says_that_it_wants_the_class(model):
    with pytest.raises(ConfigError, match=re.escape("got an EquipCache. Pass the class and its options: per_call(EquipCache, ...)")):
        per_call(EquipCache(model))
    with pytest.raises(ConfigError, match="got <class 'int'>"):
        per_call(int)
