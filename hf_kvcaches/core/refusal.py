"""One type for why something can't be done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Why something can't be done. What can be done has none: functions return None, or what was asked for, in its place.

    Args:
        reason: A sentence, or the end of one.
    """

    reason: str

    def __str__(self) -> str:
        return self.reason
