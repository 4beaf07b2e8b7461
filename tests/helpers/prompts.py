"""Prompts with padding at their start."""

from collections.abc import Sequence

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
