"""CurDKV: large keys with large values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from hf_kvcaches.equip.policies.base import PeriodicPolicy, count
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class CURPolicy(PeriodicPolicy, built_in=True):
    """Keeps the tokens with larger keys and values than their neighbours.

    CurDKV (Value-Guided KV Compression for LLMs via Approximated CUR Decomposition, arXiv 2509.15038): squared norms approximate the
    leverage of rows in a CUR decomposition of keys and of values, and a token scores the product of its shares.

    **Departs from the paper**: shares are those of a window of kept neighbours, as in kvpress, without a random projection.

    Args:
        window: Neighbours, from the row's first token on, among which norms are compared.
    """

    name = "cur"
    directions = False
    window: int = count(16)

    def score(self, tokens: Tokens) -> torch.Tensor:
        order = tokens.in_order()
        empty = (tokens.positions < 0).expand(order.shape)
        shares = self._shares(tokens.keys, order, empty) * self._shares(tokens.values, order, empty)
        return torch.empty_like(shares).scatter_(-1, order, shares)

    def _shares(self, states: torch.Tensor, order: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
        """Each token's share of its window's squared norms, in order of position."""
        squares = states.detach().float().square().sum(-1).masked_fill(empty, 0.0).gather(-1, order)
        windows = functional.pad(squares, (0, -squares.shape[-1] % self.window)).unflatten(-1, (-1, self.window))
        return (windows / windows.sum(-1, keepdim=True).clamp(min=torch.finfo(windows.dtype).tiny)).flatten(-2)[..., : squares.shape[-1]]
