"""How the rows run models, and how near is equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from tests.conformance import models
from tests.conformance.entries import Entry

# On logits, absolute, for all entries. What is lossy rounds or chooses, and the last bit, which a batch and a single row do not share,
# can tip that; a row mixed up, a token too many or a wrong position shows as tenths and more.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.15}
LOSSY_TOLERANCES = {torch.float32: 2e-2, torch.bfloat16: 0.3}


def tokens(length: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    """Text, (rows, length), without the padding token.

    Args:
        length: Tokens in each row.
        seed: Another seed is another text.
        rows: How many.
    """
    drawn = torch.randint(1, models.VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    return drawn.to(models.DEVICE)


def left_padded(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of several lengths as one batch, and its mask.

    Args:
        rows: (1, length) each.
    """
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    lengths = torch.tensor([row.shape[1] for row in rows], device=ids.device)
    mask = (torch.arange(width, device=ids.device) >= width - lengths[:, None]).long()
    return ids, mask


def close(entry: Entry, dtype: torch.dtype, actual: torch.Tensor, expected: torch.Tensor, what: str = "logits") -> None:
    """Asserts equality within the dtype's tolerance.

    Args:
        entry: The cache under test.
        dtype: Of the model.
        actual: From the cache under test.
        expected: The reference; of the same shape.
        what: For the message.
    """
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} and not {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    worst = float((actual.float() - expected.float()).abs().max())
    allowed = (TOLERANCES if entry.lossless else LOSSY_TOLERANCES)[dtype]
    assert worst <= allowed, f"{what}: off by {worst:.2e}, allowed are {allowed:.0e}"


def reference(entry: Entry, model: PreTrainedModel) -> tuple[PreTrainedModel, Any]:
    """The model and the fresh cache that an entry is measured against: transformers' own, or the lossy cache in plain use.

    Args:
        entry: The entry.
        model: The model under test.
    """
    if not entry.lossless:
        return model, entry.make(model)
    twin = models.twin_of(model)
    return twin, DynamicCache(config=twin.config)


@torch.no_grad()
def feed(
    model: Any, cache: Any, ids: torch.Tensor, spans: Sequence[int] | None = None, mask: torch.Tensor | None = None, keep: int = 1
) -> torch.Tensor:
    """Feeds tokens, span by span, as `generate` would, and returns the logits behind each span, (rows, spans, vocabulary).

    Args:
        model: The model, or a wrapper of it.
        cache: What the tokens follow.
        ids: (rows, tokens).
        spans: Lengths that sum to `tokens`; None for one each.
        mask: 1 where a token is real, (rows, tokens in the cache + new ones).
        keep: For how many tokens at each span's end; 0 for all.
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
    """Feeds a prompt and then single tokens without `position_ids`; the logits behind each, (rows, 1 + tokens, vocabulary).

    Args:
        model: The model.
        cache: An empty cache.
        ids: The prompt, (rows, tokens).
        more: What follows, (rows, tokens).
        mask: 1 where a token of the prompt is real; None to pass none.
    """
    found = []
    for part in (ids, *more.split(1, dim=1)):
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, cache.get_seq_length() + part.shape[1] - mask.shape[1]), value=1)
        found.append(model(input_ids=part, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1).logits)
    return torch.cat(found, 1)


def generate(model: Any, ids: torch.Tensor, cache: Any, *, new: int = 8, mask: torch.Tensor | None = None, **options: Any) -> Any:
    """`model.generate` with a fixed seed and everything returned.

    Args:
        model: The model, or a wrapper of it.
        ids: (rows, tokens).
        cache: The cache to use.
        new: How many tokens to generate.
        mask: 1 where a token is real; None for all.
        **options: For `generate`.
    """
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
    """The logits that a single text must have: one row, no padding, a fresh reference cache. (spans, vocabulary).

    Args:
        entry: The entry.
        model: The model under test.
        text: (tokens,) or (1, tokens).
        spans: How the text was cut into forward passes.
    """
    plain, cache = reference(entry, model)
    return feed(plain, cache, text.reshape(1, -1), spans)[0]
