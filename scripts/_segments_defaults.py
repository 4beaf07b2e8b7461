"""Texts of the model alone, and of a `SegmentReuseCache` as it is without a mode and a policy, token by token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from _segments_quality import Workload
from shared.bars import bar

from hf_kvcaches import SegmentReuseCache, SegmentStore
from hf_kvcaches.compat import input_device

PROMPTS, TOKENS = 48, 64


class Texts(NamedTuple):
    """Greedy texts of several prompts."""

    prompts: int
    equal: int  # as many texts have the tokens that the model alone generates
    reusing: int  # prompts of which tokens were reused
    reused: float  # share of the tokens of all prompts


def default_texts(model: Any, tokenizer: Any, workload: Workload, prompts: int = PROMPTS, tokens: int = TOKENS) -> Texts:
    """Generates behind the first prompts of a workload, with one store for all of them."""
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    asked = [request.prompt for requests in workload.series for request in requests][:prompts]
    equal, reused = 0, []
    with SegmentStore() as store:
        for prompt in asked:
            ids = torch.tensor([prompt], device=input_device(model))
            cache = SegmentReuseCache(model, store, tokenizer)
            found = model.generate(ids, past_key_values=cache, **options)
            reused.append(cache.report().reused_tokens)
            del cache  # stores the prompt
            equal += torch.equal(found, model.generate(ids, **options))
    return Texts(len(asked), equal, sum(map(bool, reused)), sum(reused) / sum(map(len, asked)))


def verdict(texts: Texts) -> str:
    """The bar."""
    numbers = f"{texts.equal}, {texts.reusing} of them with reuse, {texts.reused:.1%} of their tokens"
    claim = f"default mode: {texts.prompts} of {texts.prompts} texts of {TOKENS} tokens are those of the model alone"
    return bar(claim, texts.equal == texts.prompts and texts.reusing > 0, numbers)
