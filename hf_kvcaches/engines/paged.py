"""Keys and values of tokens in an engine's blocks, wherever in a block the engine's attention keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_kvcaches.engines.chunks import States
from hf_kvcaches.errors import UnsupportedError

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values, (tokens, heads, dim) each, into a cache's slots, (tokens,)."""


class BlockLayout:
    """Where the numbers of keys and values lie in a block: found by writing some and looking.

    Backends of attention lay out blocks each in their own way, and some in an order that the shape of the cache does not show. All have an
    operation that writes keys and values into slots, and that is what is asked.

    Args:
        cache: Of a layer, (blocks, ...). The first block, which holds no tokens, is written to and restored.
        write: The backend's operation.
        heads: Of keys and values.
        dims: Of a key and of a value.
        block: Tokens of a block as the scheduler counts them, which a backend may divide into several.
    """

    def __init__(self, cache: torch.Tensor, write: Write, heads: int, dims: tuple[int, int], block: int) -> None:
        size, before, device = cache[0].numel(), cache[0].clone(), cache.device
        tokens = size // (heads * sum(dims))
        self._heads, self._dims, self._tokens, self._parts = heads, dims, tokens, block // tokens
        numbers = torch.arange(heads * tokens * sum(dims), device=device).split([heads * tokens * dim for dim in dims])
        order, slots = torch.zeros(size, dtype=torch.long, device=device), torch.arange(tokens, device=device)
        # Each number is told by its bits, which every dtype can hold.
        for bit in range(size.bit_length()):
            keys, values = ((side >> bit & 1).to(cache.dtype).view(heads, tokens, -1).transpose(0, 1).contiguous() for side in numbers)
            write(keys, values, cache, slots)
            order |= (cache[0].flatten() == 1).long() << bit
        cache[0] = before
        if block % tokens or not torch.equal(order.sort().values, torch.arange(size, device=device)):
            raise UnsupportedError(
                f"vLLM: blocks of {tuple(cache.shape[1:])} {cache.dtype} hold other things than plain keys and values of {heads} heads. "
                "Use a backend of attention and a kv_cache_dtype that keep them as they are."
            )
        self._stored, self._plain = order, order.argsort()

    def read(self, cache: torch.Tensor, blocks: Sequence[int]) -> States:
        """Return a copy of keys and values in blocks, (heads, tokens, dim) each."""
        rows = cache[self._rows(blocks, cache)].flatten(1).index_select(1, self._plain)
        sides = rows.split([self._heads * self._tokens * dim for dim in self._dims], 1)
        keys, values = (side.view(len(rows), self._heads, self._tokens, -1).transpose(0, 1).flatten(1, 2) for side in sides)
        return keys, values

    def write(self, cache: torch.Tensor, blocks: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Write keys and values, (heads, tokens, dim) each, into blocks, which they fill."""
        sides = [side.to(cache.dtype).unflatten(1, (-1, self._tokens)).transpose(0, 1).flatten(1) for side in states]
        cache[self._rows(blocks, cache)] = torch.cat(sides, 1).index_select(1, self._stored).view(-1, *cache.shape[1:])

    def _rows(self, blocks: Sequence[int], cache: torch.Tensor) -> torch.Tensor:
        return torch.tensor([block * self._parts + part for block in blocks for part in range(self._parts)], device=cache.device)
