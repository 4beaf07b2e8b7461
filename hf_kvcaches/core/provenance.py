"""Which models computed the tokens of a cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedModel

from hf_kvcaches.core.identity import Identity, identity_of


@dataclass
class Provenance:
    """Under which identities the tokens of a cache were computed.

    Decode steps are taken to be by the model of the pass before.

    Args:
        until: Up to where tokens belong to passes whose identity was taken.
    """

    until: int = 0
    _spans: list[tuple[int, Identity]] = field(default_factory=list)

    @classmethod
    def of(cls, identity: Identity, tokens: int) -> Provenance:
        """Of a cache that was read from a file, and that the model of this identity has filled."""
        return cls(tokens, [(0, identity)])

    def begin_pass(self, model: PreTrainedModel, seen: int, tokens: int) -> None:
        """Take the model's identity before a pass of some tokens."""
        self.crop(seen)
        identity = identity_of(model)
        if not self._spans or self._spans[-1][1] is not identity:
            self._spans.append((seen, identity))
        self.until = seen + tokens

    @property
    def taken(self) -> bool:
        """Whether there was a pass whose identity was taken."""
        return bool(self._spans)

    @property
    def identity(self) -> Identity:
        """Of all tokens, or the reason why they have none."""
        if not self._spans:
            return Identity("No pass has filled the cache, or only compiled ones, before which the model is not read.")
        last = self._spans[-1][1]
        if foreign := next((identity for _, identity in self._spans if identity.reason), None):
            return foreign
        if all(identity.matches(last) for _, identity in self._spans):
            return last
        changed = f"The model has changed behind the first {self._spans[1][0]} tokens (weights, settings or adapters)"
        return Identity(f"{changed}, and what follows depends on both.")

    def replace(self, start: int, stop: int, tokens: int, by: Provenance) -> None:
        """Have tokens that other passes computed in the place of a span; what follows moves."""
        behind = [(start + tokens + max(0, place - stop), identity) for place, identity in self._spans if place >= start]
        between = [(start, identity) for _, identity in by._spans]
        self._spans = [*(span for span in self._spans if span[0] < start), *between, *behind]

    def crop(self, length: int) -> None:
        """Forget all tokens but the first ones."""
        self._spans = [(start, identity) for start, identity in self._spans if start < length]
        self.until = min(self.until, length)
