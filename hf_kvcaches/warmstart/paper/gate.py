"""The paper's gate: when a prompt is started from the summary of its nearest neighbour."""

from __future__ import annotations

from typing import NamedTuple


class SummaryGate(NamedTuple):
    """The limits of "CP-KVP", section 2.5.

    Args:
        tau: The least cosine of the two prompts.
        lengths: The least and the greatest length of the earlier prompt, as a multiple of the new one's.
    """

    tau: float = 0.9
    lengths: tuple[float, float] = (0.5, 2.0)

    def refusal(self, similarity: float, earlier: int, tokens: int) -> str:
        """Why prompts of so many tokens are too different, as a sentence; "" if they are not."""
        if not similarity >= self.tau:  # or NaN
            return f"The similarity is {similarity:.3f}, below {self.tau:g}."
        least, most = self.lengths
        if not least * tokens <= earlier <= most * tokens:
            return f"The earlier prompt is {earlier / max(tokens, 1):.2f} times as long, outside {least:g} to {most:g}."
        return ""
