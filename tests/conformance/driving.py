"""How the rows run models, and how near is equal."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from tests.conformance import models
from tests.conformance.entries import Entry
from tests.helpers.prompts import left_padded

__all__ = ["left_padded"]

# On logits, absolute, for all entries. What is lossy rounds or chooses, and the last bit, which a batch and a single row do not share,
# can tip that; a row mixed up, a token too many or a wrong position shows as tenths and more.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.15}
LOSSY_TOLERANCES = {torch.float32: 2e-2, torch.bfloat16: 0.3}


def tokens(length: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    """Text, (rows, length), without the padding token."""
    drawn = torch.randint(1, models.VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    return drawn.to(models.DEVICE)


def close(entry: Entry, dtype: torch.dtype, actual: torch.Tensor, expected: torch.Tensor, what: str = "logits") -> None:
    """Asserts equality within the dtype's tolerance."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} and not {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    worst = float((actual.float() - expected.float()).abs().max())
    allowed = (TOLERANCES if entry.lossless else LOSSY_TOLERANCES)[dtype]
    assert worst <= allowed, f"{what}: off by {worst:.2e}, allowed are {allowed:.0e}"


def reference(entry: Entry, model: PreTrainedModel) -> tuple[PreTrainedModel, Any]:
    """The model and the fresh cache that an entry is measured against: transformers' own, or the lossy cache in plain use."""
    if not entry.lossless:
        return model, entry.make(model)
    twin = models.twin_of(model)
    return twin, DynamicCache(config=twin.config)


@torch.no_grad()
def feed(
    model: Any, cache: Any, ids: torch.Tensor, spans: Sequence[int] | None = None, mask: torch.Tensor | None = None, keep: int = 1
) -> torch.Tensor:
    """Feeds tokens, span by span, as `generate` would, and returns the logits behind each span, (rows, spans, vocabulary).

    The mask is of the tokens in the cache and the new ones; `keep` logits are of each span's end, 0 for all.
    """
    logits, start, before = [], 0, cache.get_seq_length()
    for span in spans if spans is not None else [1] * ids.shape[1]:
        stop = start + span
        extra: dict[str, Any] = {}
        if mask is not None:
            seen = mask[:, : before + stop]
            extra = {"attention_mask": seen, "position_ids": (seen.cumsum(-1) - 1).clamp(min=0)[:, -span:]}
        output = model(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True, logits_to_keep=keep, **extra)
        logits.append(output.logits)
        start = stop
        assert cache.get_seq_length() == before + stop, f"saw {before + stop} tokens, says {cache.get_seq_length()}"
    assert start == ids.shape[1], "the spans don't cover the text"
    return torch.cat(logits, dim=1)


@torch.no_grad()
def loop(model: Any, cache: Any, ids: torch.Tensor, more: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Feeds a prompt and then single tokens without `position_ids`; the logits behind each, (rows, 1 + tokens, vocabulary)."""
    found = []
    for part in (ids, *more.split(1, dim=1)):
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, cache.get_seq_length() + part.shape[1] - mask.shape[1]), value=1)
        found.append(model(input_ids=part, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1).logits)
    return torch.cat(found, 1)


def generate(model: Any, ids: torch.Tensor, cache: Any, *, new: int = 8, mask: torch.Tensor | None = None, **options: Any) -> Any:
    """`model.generate` with a fixed seed and everything returned."""
    torch.manual_seed(11)
    settings: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        past_key_values=cache,
        max_new_tokens=new,
        **settings | options,
    )
    assert output.past_key_values is cache, "generate gave back another cache"
    return output


def replay(entry: Entry, model: PreTrainedModel, text: torch.Tensor, spans: Sequence[int]) -> torch.Tensor:
    """The logits that a single text must have: one row, no padding, a fresh reference cache. (spans, vocabulary)."""
    plain, cache = reference(entry, model)
    return feed(plain, cache, text.reshape(1, -1), spans)[0]


def rows_in(module: dict[str, Any]) -> tuple[Callable[..., None], ...]:
    """All functions of a file but those that begin with an underscore."""
    own = [value for value in module.values() if inspect.isfunction(value) and value.__module__ == module["__name__"]]
    return tuple(value for value in own if not value.__name__.startswith("_"))
