"""The interface of a codec whose codes are stored in place of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch


class TokenCoder(Protocol):
    """Encode and decode the tokens of one layer."""

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the codes of (batch, kv_heads, tokens, head_dim) keys and values: (batch, bytes, tokens), uint8."""

    def decode(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of codes."""


@runtime_checkable
class TokenCodec(Protocol):
    """Codes of each token's keys and values, in all layers of a model."""

    @property
    def digest(self) -> str:
        """The hash of everything that decoding depends on."""

    @property
    def unrotated(self) -> bool:
        """Whether keys are coded before their rotation."""

    @property
    def exact_tokens(self) -> int:
        """How many of a text's first tokens are kept exact beside their codes, because they are outliers."""

    @property
    def layer_bytes(self) -> Sequence[int | None]:
        """Bytes of a token's codes in each layer; None where a layer is not coded."""

    @property
    def bytes_ratio(self) -> float:
        """Bytes of codes as a share of exact keys and values in 16 bits."""

    def coder(self, layer_idx: int, dtype: torch.dtype, device: torch.device) -> TokenCoder:
        """Return the coder of a layer; `dtype` is that of decoded keys and values."""
