"""Prompts with padding at their start, and what is generated behind them."""

from collections.abc import Sequence
from typing import Any

import torch

from tests import tiny


def left_padded(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of several lengths, (1, length) each, as one batch, and its mask."""
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    return ids, mask_of(width, *(width - row.shape[1] for row in rows)).to(ids.device)


def mask_of(tokens: int, *padding: int) -> torch.Tensor:
    """1 where a token is real, (rows, tokens), with so much padding at the start of each row."""
    return (torch.arange(tokens) >= torch.tensor(padding)[:, None]).long()


def padded_ids(tokens: int, *padding: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Arguments of a model: random ids, and the mask."""
    return {"input_ids": tiny.ids(len(padding), tokens, seed=seed), "attention_mask": mask_of(tokens, *padding)}


def greedy(model: Any, ids: torch.Tensor, cache: Any, new: int = 4, mask: torch.Tensor | None = None, **options: Any) -> Any:
    """What `model.generate` gives for just so many new tokens, with logits."""
    wanted = {"min_new_tokens": new, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new, **wanted | options)
