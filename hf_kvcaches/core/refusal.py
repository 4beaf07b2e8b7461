"""One type for why something can't be done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Why something can't be done, as a sentence or the end of one. Of what can be done functions return None, or what was asked for."""

    reason: str

    def __str__(self) -> str:
        return self.reason
