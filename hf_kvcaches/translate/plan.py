"""Which layers share a code, and in how many passes over the texts their sums fit the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from hf_kvcaches.errors import ConfigError

# Numbers of the sample that codes are chosen on, and its tokens at the least and at the most.
_SAMPLED, _LEAST_SAMPLE, _MOST_SAMPLE = 1 << 22, 256, 4096


class Group(NamedTuple):
    """The consumer's layers that share a code, and the producer's that they are translated from, each once."""

    layers: tuple[int, ...]
    sources: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"layer.{self.layers[0]}" if len(self.layers) == 1 else f"layers.{self.layers[0]}-{self.layers[-1]}"


class Widths(NamedTuple):
    """Numbers of a token, by layer in keys and values, and in an attention input."""

    producer: Mapping[int, int]
    consumer: Mapping[int, int]
    producer_input: int
    consumer_input: int


class FitPlan(NamedTuple):
    """How the layers of a pair are fitted.

    Args:
        passes: The groups of layers whose sums are kept together; both models read the texts once for each pass.
        bytes: What the largest pass takes, with what is kept of the others.
        sample: Tokens that are sampled.
    """

    passes: list[list[Group]]
    bytes: int
    sample: int

    @classmethod
    def of(
        cls, widths: Widths, sources: Sequence[int], lowest: Sequence[int], shared: int, memory: int | None, plain: bool = False
    ) -> Self:
        """Plan a fit.

        Args:
            sources: The producer's layer of each of the consumer's.
            lowest: The numbers of layers that the consumer may run.
            shared: How many consecutive layers share a code.
            memory: Bytes that sums may take; None for any number.
            plain: Whether the consumer's own products are needed.
        """
        sent, (theirs, own) = range(min(lowest) + 1, len(widths.consumer)), widths[2:]
        parts = [tuple(sent[start : start + shared]) for start in range(0, len(sent), shared)]
        groups = [Group(part, tuple(dict.fromkeys(sources[layer] for layer in part))) for part in parts]
        sample = max(_LEAST_SAMPLE, min(_MOST_SAMPLE, _SAMPLED // max(1, sum(widths.producer.values()))))
        known, kept, sizes = 8 * len(lowest) * (theirs**2 + own**2 + theirs * own), 4 * sample * len(lowest) * theirs, list[int]()
        for group in groups:
            x, y = (sum(map(of.__getitem__, layers)) for of, layers in ((widths.producer, group.sources), (widths.consumer, group.layers)))
            sides = sum(group.layers[-1] > layer for layer in lowest)
            sizes.append(8 * (x * x + x * y + y * y * plain + sides * (theirs + own) * (x + y)))
            # Maps are kept in float32, and so is the sample.
            kept += 4 * (sides * (min(x, y) * (x + y + theirs + own) + own * y) + sample * x)
        room = float("inf") if memory is None else memory - kept - known
        if sizes and max(sizes) > room:
            least = f"{known + kept + max(sizes):,} bytes or more for these models"
            raise ConfigError.of("memory", least, memory, "Or give layers_per_code=1.")
        passes, taken = list[list[Group]](), list[int]()
        for group, size in zip(groups, sizes, strict=True):
            if not passes or taken[-1] + size > room:
                passes.append([])
                taken.append(0)
            passes[-1].append(group)
            taken[-1] += size
        return cls(passes, known + kept + max(taken, default=0), sample)
