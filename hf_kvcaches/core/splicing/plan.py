"""What becomes of a prompt: a frozen plan that a source makes and `SplicingCache.execute` carries out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hf_kvcaches.core.splicing.placing import Loaded

# Of tokens in their row, padding not counted, ascending.
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PlannedRow:
    """One row of a prompt.

    Args:
        padding: Slots at its start that hold no token.
        recompute: Tokens that run through all layers, without the row's last one, which is the model's.
    """

    padding: int
    stored: tuple[Loaded, ...]
    recompute: Indices


@dataclass(frozen=True, eq=False)
class PromptPlan:
    """A prompt of several rows.

    Args:
        total: Slots of the prompt, with those that the cache holds already.
    """

    rows: tuple[PlannedRow, ...]
    total: int

    @property
    def prefixes(self) -> list[int]:
        """Of each row the slots before the first token that runs."""
        return [row.padding + int(row.recompute[0]) if len(row.recompute) else self.total - 1 for row in self.rows]

    @property
    def reuses_a_prefix_only(self) -> bool:
        """Whether nothing is reused but the same first slots of all rows."""
        prefix, *others = set(self.prefixes)
        return not others and all(len(row.recompute) == self.total - 1 - prefix for row in self.rows)
