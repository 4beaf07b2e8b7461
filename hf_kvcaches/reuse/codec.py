"""The interface of a codec whose packed form is stored in place of keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class TokenCodec(Protocol):
    """Packs the tokens of all layers of a model."""

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
    def packed_ratio(self) -> float:
        """Bytes of the packed form as a share of exact keys and values in 16 bits."""

    def pack(self, keys: Mapping[int, torch.Tensor], values: Mapping[int, torch.Tensor], left_out: int = 0) -> dict[int, torch.Tensor]:
        """Return the record of each layer, (bytes,) uint8, of (kv_heads, tokens, head_dim) keys and values.

        Args:
            left_out: First tokens that are kept elsewhere.
        """

    def unpack(
        self, spans: Sequence[tuple[int, torch.Tensor, int, int | None]], dtype: torch.dtype = torch.float32
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values of spans: a layer, its record, the first token and the one behind the last."""
