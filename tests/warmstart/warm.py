"""Libraries of tiny models, and what a warm start has to give, computed one token after the other."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import cache as remembered
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from hf_kvcaches import WarmStartGate, WarmStartLibrary
from hf_kvcaches.core.decoder import decoder_layers
from tests import tiny
from tests.helpers import prompts

# Lets everything through, and what only asks for enough tokens.
OPEN = WarmStartGate(reusable=0.0)
SHUT = WarmStartGate(reusable=1.01)
ONE: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0}


@remembered
def words(vocabulary: int = tiny.VOCABULARY) -> PreTrainedTokenizerFast:
    """One word for each token, without a digit in it."""
    names = ("".join(letters) for letters in itertools.product("bcdfghjklm", repeat=3))
    made = Tokenizer(WordLevel({f"zu{name}": number for number, name in zip(range(vocabulary), names, strict=False)}, unk_token="zubbb"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="zubbb", pad_token="zubbb")


def library_of(model: Any, *rows: torch.Tensor, **options: Any) -> WarmStartLibrary:
    """A library with these prompts."""
    made = WarmStartLibrary(model, words(), **options)
    made.add([row[0] for row in rows])
    return made


def answer(model: Any, ids: torch.Tensor, cache: Any = None, new: int = 1, **inputs: Any) -> Any:
    """What `generate` gives, of which `answer(...).logits` is one tensor a token. Without a cache nothing is reused."""
    if "attention_mask" not in inputs:
        inputs["attention_mask"] = torch.ones_like(ids)
    used = DynamicCache(config=model.config) if cache is None else cache
    return model.generate(ids, past_key_values=used, max_new_tokens=new, min_new_tokens=new, **{**ONE, **inputs})


def logits_of(model: Any, ids: torch.Tensor, cache: Any = None, new: int = 1, **inputs: Any) -> torch.Tensor:
    """(rows, new, vocabulary)."""
    return torch.stack(answer(model, ids, cache, new, **inputs).logits, 1)


def forced(model: Any, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The logits behind each of these tokens, fed one by one, (rows, tokens, vocabulary)."""
    found = []
    with torch.no_grad():
        for place in range(ids.shape[1]):
            before = cache.get_seq_length()
            extra: dict[str, Any] = {}
            if mask is not None:
                seen = mask[:, : before + 1]
                extra = {"attention_mask": seen, "position_ids": (seen.cumsum(-1) - 1).clamp_min(0)[:, -1:]}
            found.append(model(input_ids=ids[:, place : place + 1], past_key_values=cache, logits_to_keep=1, **extra).logits)
    return torch.cat(found, 1)


@contextlib.contextmanager
def tokens_run(model: PreTrainedModel) -> Iterator[list[int]]:
    """How many tokens a row enter the model's lowest layer, pass by pass."""
    seen: list[int] = []
    first = decoder_layers(model)[2][0]
    handle = first.register_forward_pre_hook(tiny.observing(lambda module, args: seen.append(args[0].shape[1])))
    try:
        yield seen
    finally:
        handle.remove()


def left_padded(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return prompts.left_padded(rows)
