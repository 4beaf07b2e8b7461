"""Passes over tokens that do not follow each other: what stands between them is in the cache already."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hf_kvcaches import compat
from hf_kvcaches.core.attention import LayerView, MaskRecipe, previous_implementation
from hf_kvcaches.core.only_layers import LookedEnough

# Tokens that attention takes at a time on a CPU.
BLOCK = 64


class SparsePass:
    """Which tokens a pass runs, and what they may look at.

    A token has a *slot*, its column in the padded prompt and in the layers' buffers, and a *position*, its place in its row. Rows with
    fewer tokens to run than others are filled up with tokens that go to the slot behind the prompt, which nobody looks at.

    Args:
        slots: (batch, tokens), ascending in each row; `total` for those that only fill up.
        padding: (batch,), how many slots at the start of each row hold no token.
        total: How many slots the prompt has.
    """

    def __init__(self, slots: torch.Tensor, padding: torch.Tensor, total: int) -> None:
        self.slots, self.padding, self.total = slots, padding, total
        self._made: dict[tuple[int, str, torch.device], tuple[MaskRecipe, torch.Tensor]] = {}

    def newest(self) -> SparsePass:
        """The pass of the last column alone."""
        return SparsePass(self.slots[:, -1:], self.padding, self.total)

    @cached_property
    def blocks(self) -> list[tuple[int, int, int]]:
        """The tokens in blocks: (start, stop, how many slots they look at)."""
        last = self.slots.masked_fill(self.slots >= self.total, 0).amax(0)
        edges = range(0, len(last), BLOCK)
        # Those that only fill up look at the last slot.
        filled = (self.slots >= self.total).any(0)
        found = []
        for start in edges:
            stop = min(start + BLOCK, len(last))
            end = self.total if bool(filled[start:stop].any()) else int(last[start:stop].max()) + 1
            found.append((start, stop, end))
        return found

    @property
    def positions(self) -> torch.Tensor:
        """(batch, tokens)."""
        real = self.slots < self.total
        return torch.where(real, self.slots - self.padding[:, None], 0)

    def mask(self, recipe: MaskRecipe, implementation: str, query: torch.Tensor) -> torch.Tensor:
        """Which slots each token may look at, (batch, 1, tokens, total): numbers to add on a CPU and for eager attention, else booleans.

        Args:
            recipe: The model's, which knows of windows.
            implementation: Of the attention.
            query: For its device and type.
        """
        key = (id(recipe), implementation, query.device)
        if key not in self._made:
            slots, padding = self.slots.to(query.device), self.padding.to(query.device)
            rows = torch.arange(len(slots), device=query.device)[:, None, None, None]
            asking, asked = slots[:, None, :, None], torch.arange(self.total, device=query.device)
            visible = recipe.arguments["mask_function"](rows, torch.zeros_like(rows), asking, asked)
            visible = visible & (asked >= padding[:, None, None, None])
            # Tokens that only fill up look at the last slot, because a softmax over nothing is not a number.
            visible = visible | ((asking >= self.total) & (asked == self.total - 1))
            # PyTorch's attention would make numbers of it on a CPU anyway, again in every layer.
            if implementation == "eager" or query.device.type == "cpu":
                hidden = torch.finfo(query.dtype).min if implementation == "eager" else -torch.inf
                visible = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, hidden)
            # With the recipe, so that its number is not given to another one meanwhile.
            self._made[key] = (recipe, visible)
        return self._made[key][1]


class SparseKeys(LayerView):
    """What a layer hands to attention in a sparse pass, in place of keys and of values.

    Args:
        keys: (batch, kv_heads, total, head_dim).
        values: Like `keys`.
        running: The pass.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, running: SparsePass) -> None:
        self.keys, self.values, self.running = keys, values, running

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert isinstance(mask, MaskRecipe)
        implementation = previous_implementation(module.config)
        # Flash attention knows no masks like these.
        implementation = implementation if implementation in ("sdpa", "eager") else "sdpa"
        made = self.running.mask(mask, implementation, query)
        attention: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = compat.attention_function(implementation, module)
        plain = implementation == "sdpa" and kwargs.get("position_bias") is None and kwargs.get("softcap") is None
        # To ask for blocks would make a GPU wait.
        if plain and query.device.type == "cpu" and len(self.running.blocks) > 1:
            return self._in_blocks(query, made, kwargs.get("scaling"), kwargs.get("dropout", 0.0)), None
        return attention(module, query, self.keys, self.values, made, **kwargs)

    def _in_blocks(self, query: torch.Tensor, mask: torch.Tensor, scaling: float | None, dropout: float) -> torch.Tensor:
        """Attention that leaves out what stands behind a block of tokens, which is computed with a mask all the same.

        Straight from PyTorch: transformers' function would repeat all heads of keys and values for every block.
        """
        grouped = query.shape[1] > self.keys.shape[1]
        outputs = [
            nn.functional.scaled_dot_product_attention(
                query[:, :, start:stop],
                self.keys.narrow(2, 0, end),
                self.values.narrow(2, 0, end),
                mask[:, :, start:stop, :end],
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=grouped,
            )
            for start, stop, end in self.running.blocks
        ]
        return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a view of keys and values has no attribute {name!r}: it is for the attention function alone")


class Look(LayerView):
    """Takes what a layer computed for some tokens, its queries too, and ends the pass.

    Args:
        keys: (batch, kv_heads, tokens, head_dim), fresh and rotated.
    """

    def __init__(self, keys: torch.Tensor) -> None:
        self.fresh = keys
        self.query: torch.Tensor | None = None

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.query = query
        raise LookedEnough

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a view of keys and values has no attribute {name!r}: it is for the attention function alone")
