"""What a model's own mask says about the tokens of a pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_kvcaches.errors import ConfigError, UnsupportedError


@dataclass(frozen=True)
class TokenMask:
    """A mask, read.

    Args:
        valid: True where a new token is real, (batch, tokens), or None where all are.
        real_before: How many of the tokens before are real in each row, (batch, 1), or None where the mask does not tell.
        allowed: True where a query may look, (batch or 1, heads or 1, tokens, seen + tokens), if the mask says more than which tokens are
            padding and that nobody looks ahead; else None.
        shown: True for tokens that are not hidden as padding, (batch, seen + tokens or tokens), or None.
        ahead: Whether tokens look at later ones, which is possible for a first block as a whole.
    """

    valid: torch.Tensor | None = None
    real_before: torch.Tensor | None = None
    allowed: torch.Tensor | None = None
    shown: torch.Tensor | None = None
    ahead: bool = False

    @classmethod
    def read(cls, mask: Any, seen: int, tokens: int, causal: bool = True) -> TokenMask:
        """Reads a mask as any implementation of attention gets it.

        Args:
            mask: None, (batch, tokens seen) as for flash attention, (batch, heads or 1, tokens, tokens seen) as for sdpa and eager, or flex
                attention's block mask. The last dimension may be that of the new tokens alone.
            causal: Whether tokens look at no later ones where there is no mask.
        """
        if mask is None:
            return cls(ahead=not causal and tokens > 1).checked(seen)
        allowed = _as_booleans(mask, seen + tokens, tokens)
        if allowed.ndim == 2:
            return cls._of_padding(allowed, seen, tokens)
        if allowed.ndim != 4 or allowed.shape[2] != tokens or allowed.shape[3] not in (tokens, seen + tokens):
            raise UnsupportedError(
                f"attention_mask: this cache can't follow a mask of shape {tuple(allowed.shape)} for {tokens} tokens behind {seen} others. "
                "Pass a padding mask, (batch, tokens)."
            )
        newest = allowed[:, 0, -1]
        first = seen + tokens - allowed.shape[3]
        columns = torch.arange(first, seen + tokens, device=allowed.device)
        before = columns <= torch.arange(seen, seen + tokens, device=allowed.device)[:, None]
        if bool((allowed == (before & newest[:, None])[:, None]).all()):
            return cls._of_padding(newest, seen, tokens)
        if first:
            allowed = torch.nn.functional.pad(allowed, (first, 0), value=True)
        return cls(allowed=allowed, ahead=bool((allowed[..., -tokens:] & ~before[:, -tokens:]).any())).checked(seen)

    @classmethod
    def _of_padding(cls, real: torch.Tensor, seen: int, tokens: int) -> TokenMask:
        """What a padding mask says.

        Args:
            real: True where a token is real, (batch, tokens seen before + new ones, or new ones alone).
        """
        valid = real[:, -tokens:]
        before = real[:, :-tokens].sum(-1, keepdim=True) if real.shape[1] == seen + tokens else None
        return cls(None if bool(valid.all()) else valid, before, shown=real)

    def known(self, real_before: torch.Tensor | int, seen: int, tokens: int) -> TokenMask:
        """What it says to a cache that knows how many tokens are real.

        A mask that hides other tokens than were padding when they came is obeyed entry by entry.

        Args:
            real_before: Of the tokens before, (batch, 1), or a number for all rows.
        """
        if self.real_before is None:
            return self if isinstance(real_before, int) else replace(self, real_before=real_before)
        if self.shown is None or bool((self.real_before == real_before).all()):
            return self
        places = torch.arange(seen + tokens, device=self.shown.device)
        allowed = (places <= places[seen:, None]) & self.shown[:, None, None]
        counted = real_before if isinstance(real_before, torch.Tensor) else torch.full_like(self.real_before, real_before)
        return replace(self, allowed=allowed, real_before=counted)

    def part(self, start: int, stop: int, seen: int) -> TokenMask:
        """What it says about some of the new tokens."""
        self.require_causal()
        valid, before = None if self.valid is None else self.valid[:, start:stop], self.real_before
        if before is not None:
            before = before + (start if self.valid is None else self.valid[:, :start].sum(-1, keepdim=True))
        allowed = None if self.allowed is None else self.allowed[:, :, start:stop, : seen + stop]
        return TokenMask(None if valid is None or bool(valid.all()) else valid, before, allowed)

    def checked(self, seen: int) -> TokenMask:
        """Itself, if tokens look at later ones in a first block alone."""
        if seen:
            self.require_causal()
        return self

    def require_causal(self) -> None:
        """Refuses what can't be done with tokens that look at later ones."""
        if self.ahead:
            raise UnsupportedError(
                "attention_mask: the model lets tokens look at later ones (a prefix that is read in both directions, for example), which "
                "this cache can follow in a whole first prompt only. Use another cache, or leave chunks and drafts out."
            )


def padding_of(attention_mask: torch.Tensor, tokens: int) -> torch.Tensor | None:
    """How many slots at the start of each row hold no token, (batch,), or None for none.

    Args:
        attention_mask: 1 where a token is real, (batch, tokens).
    """
    real = attention_mask.bool()
    if real.ndim != 2 or real.shape[1] != tokens:
        raise ConfigError.of("attention_mask", f"(batch, {tokens}), the tokens that past has seen", tuple(attention_mask.shape))
    padding = tokens - real.sum(-1)
    if not bool((real == (torch.arange(tokens, device=real.device) >= padding[:, None])).all()):
        raise ConfigError.of("attention_mask", "padding at the start of rows only", "padding elsewhere", "Pad on the left.")
    return padding if bool(padding.any()) else None


def _as_booleans(mask: Any, columns: int, tokens: int) -> torch.Tensor:
    """True where attention may look."""
    if not isinstance(mask, torch.Tensor):
        return _evaluated(mask, columns, tokens)
    if mask.dtype == torch.bool or mask.ndim == 2:
        return mask.bool()
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if not bool((hidden | (mask == 0)).all()):
        raise UnsupportedError(
            "attention_mask: the model adds a bias to its scores through the mask (ALiBi, for example), and this cache keeps tokens in "
            "other places than the mask has them. Use a cache that keeps every token (GrowingCache)."
        )
    return ~hidden


def _evaluated(mask: Any, columns: int, tokens: int) -> torch.Tensor:
    """A block mask of flex attention, entry by entry."""
    if not hasattr(mask, "mask_mod"):
        raise UnsupportedError(f"attention_mask: this cache can't read a mask of the type {type(mask).__name__}. Use attention 'sdpa'.")
    device = mask.kv_num_blocks.device
    rows = torch.arange(mask.shape[0], device=device)[:, None, None]
    queries, keys = torch.arange(tokens, device=device)[:, None], torch.arange(columns, device=device)
    allowed: torch.Tensor = mask.mask_mod(rows, torch.zeros_like(rows), queries, keys)
    return allowed.expand(mask.shape[0], tokens, columns)[:, None]
