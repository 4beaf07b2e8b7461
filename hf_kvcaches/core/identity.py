"""What a pass through a model is computed by, and under which identity the tokens of a cache were computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedModel

from hf_kvcaches.core._unseen import unseen
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.glance import Glance, glance_at
from hf_kvcaches.errors import FingerprintMismatch, UnsupportedError


@dataclass(frozen=True)
class Identity:
    """What computes keys and values: a fingerprint, what a quick look saw, or the reason why neither tells.

    Args:
        fingerprint: Of the model, without its tokenizer.
        reason: What takes part in the pass and is in no fingerprint, as a sentence; "" where there is nothing.
        glance: What was seen of the model, where nobody read its weights.
    """

    fingerprint: ModelFingerprint | None = None
    reason: str = ""
    glance: Glance | None = None

    @property
    def digest(self) -> str:
        """Of the fingerprint, or "" where there is none."""
        return "" if self.fingerprint is None else self.fingerprint.digest


def identity_of(model: PreTrainedModel, any_precision: bool = False) -> Identity:
    """The identity under which a model would compute now. Reads all weights; a change of a single element gives another one.

    Args:
        model: Without a PEFT wrapper.
        any_precision: As of `ModelFingerprint.of`.
    """
    reason = unseen(model)
    if reason:
        return Identity(reason=reason)
    try:
        return Identity(ModelFingerprint.of(model, any_precision=any_precision))
    except UnsupportedError as error:
        return Identity(reason=str(error))


def glanced_identity(model: PreTrainedModel) -> Identity:
    """The identity under which a model would compute now, as far as a quick look tells: enough for what stays with its owner.

    Args:
        model: Without a PEFT wrapper.
    """
    reason = unseen(model)
    return Identity(reason=reason) if reason else Identity(glance=glance_at(model))


def require_identity(model: PreTrainedModel, what: str, any_precision: bool = False) -> ModelFingerprint:
    """The fingerprint of a model in which everything that computes can be seen.

    Args:
        model: Without a PEFT wrapper.
        what: What needs it, as the subject of the message.
        any_precision: As of `ModelFingerprint.of`.
    """
    identity = identity_of(model, any_precision)
    if identity.fingerprint is None:
        raise FingerprintMismatch(f"{what} would be bound to a model that no fingerprint describes. {identity.reason}")
    return identity.fingerprint


@dataclass
class Provenance:
    """Under which identities the tokens of a cache were computed.

    Decode steps, and the passes of assisted decoding that check a few drafted tokens, are taken to be by the model of the pass before.

    Args:
        until: Up to where tokens belong to passes whose identity was taken.
    """

    until: int = 0
    _turns: list[tuple[int, Identity]] = field(default_factory=list)

    @classmethod
    def of(cls, identity: Identity, tokens: int) -> Provenance:
        """Of a cache that was read from a file.

        Args:
            identity: Of the model, which is the one that filled it.
            tokens: How many it has.
        """
        return cls(tokens, [(0, identity)])

    def begin_pass(self, model: PreTrainedModel, seen: int, tokens: int, shared: bool) -> None:
        """Takes the model's identity before a pass.

        Args:
            model: That runs it.
            seen: How many tokens the cache has before.
            tokens: How many the pass will add.
            shared: Whether others may be given what the pass computes, so that every weight is read.
        """
        self.crop(seen)
        identity = identity_of(model) if shared else glanced_identity(model)
        if not self._turns or self._turns[-1][1] != identity:
            self._turns.append((seen, identity))
        self.until = seen + tokens

    @property
    def taken(self) -> bool:
        """Whether there was a pass whose identity was taken."""
        return bool(self._turns)

    @property
    def identity(self) -> Identity:
        """Of all tokens, or the reason why they have none."""
        if not self._turns:
            return Identity(reason="No pass has filled the cache, or only compiled ones, before which the model is not read.")
        reason = next((identity.reason for _, identity in self._turns if identity.reason), "")
        if not reason and len(self._turns) > 1:
            reason = (
                f"The model has changed behind the first {self._turns[1][0]} tokens (weights, settings or adapters), and what follows "
                "depends on both."
            )
        return Identity(reason=reason) if reason else self._turns[0][1]

    def crop(self, length: int) -> None:
        """Forgets the last tokens.

        Args:
            length: How many stay.
        """
        self._turns = [(start, identity) for start, identity in self._turns if start < length]
        self.until = min(self.until, length)
