"""Chats whose template is rendered anew in each turn, with one cache, as everyone keeps a chat."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DynamicCache

from hf_kvcaches import ConfigError, EquipCache, GrowingCache, SegmentReuseCache, SegmentStore
from hf_kvcaches.compat import cache_kwargs
from tests import testbed
from tests.documents.reader import CHAT_TEMPLATE

# Like those of models that reason: what an earlier answer says in brackets is left out.
REWRITING = CHAT_TEMPLATE.replace("turn.content }}", "(turn.content if loop.last else turn.content[:3]) }}")
TURNS = ("The ship left the harbour at dawn, and nobody saw it", "Who was on it?", "and then the captain")
CACHES = {
    "growing": GrowingCache,
    "segments": lambda model: SegmentReuseCache(model, SegmentStore("memory")),
    "equip": lambda model: EquipCache(model, "streaming", budget=400),
}


def chat(cache_of: Any, template: str, restart: Any = None) -> list[str]:
    """The answers of three turns.

    Args:
        cache_of: Gives the cache of each turn.
        restart: What to do with a cache that refuses a prompt.
    """
    model, tokenizer = testbed.load()
    messages: list[dict[str, str]] = []
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        inputs = tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        cache, options = cache_of(model), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        try:
            output = model.generate(**inputs, **cache_kwargs(model, cache), **options)
        except ConfigError:
            if restart is None:
                raise
            restart(cache)
            output = model.generate(**inputs, **cache_kwargs(model, cache), **options)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    return [turn["content"] for turn in messages[1::2]]


def kept(make: Any) -> Any:
    """Gives the same cache in each turn."""
    caches: list[Any] = []

    def cache_of(model: Any) -> Any:
        caches[:] = caches or [make(model)]
        return caches[0]

    return cache_of


def anew(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


@pytest.mark.parametrize("name", CACHES)
def test_a_template_that_appends_gives_the_answers_of_a_dynamic_cache(name: str) -> None:
    expected = chat(anew, CHAT_TEMPLATE)
    assert chat(kept(anew), CHAT_TEMPLATE) == expected
    seen: list[int] = []

    def counted(model: Any) -> Any:
        cache = same(model)
        seen.append(cache.get_seq_length())
        return cache

    same = kept(CACHES[name])
    assert chat(counted, CHAT_TEMPLATE) == expected
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("name", CACHES)
def test_a_template_that_changes_earlier_messages_is_refused_and_a_reset_goes_on(name: str) -> None:
    with pytest.raises(ConfigError, match="expected a prompt that begins with"):
        chat(kept(CACHES[name]), REWRITING)
    assert chat(kept(CACHES[name]), REWRITING, restart=lambda cache: cache.reset()) == chat(anew, REWRITING)


def test_a_template_with_a_default_system_prompt_gives_the_answers_of_a_dynamic_cache() -> None:
    template = (
        "{% if messages[0].role != 'system' %}<s>system\nBe brief.</s>\n{% endif %}"
        "{% for turn in messages %}<s>{{ turn.role }}\n{{ turn.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    assert chat(kept(GrowingCache), template) == chat(anew, template)
