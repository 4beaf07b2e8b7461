"""The identity of what computes keys and values, and under which identity the tokens of a cache were computed.

An identity is a state in which the model was seen (`core.model_state`): to take it costs less than a millisecond and reads no weights. Its
fingerprint is read when it is first needed, once per process and again when something moved, while the model still is in that state.

What takes part in a forward and is in no fingerprint (hooks, replaced forwards, autocast, dropout, foreign attention) is a reason to share
nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.fingerprint import ModelFingerprint, fingerprint_of_state, why_unreadable
from hf_kvcaches.core.model_state import FOR_TRAINING, LOOKS, ModelState, state_of
from hf_kvcaches.core.parallel import is_tensor_parallel
from hf_kvcaches.errors import FingerprintMismatch

# Whose hooks and wrappers compute what the model says: they place tensors, require gradients, or collect outputs.
_LIBRARIES = frozenset(("transformers", "torch", "hf_kvcaches"))
# A function of PEFT's and of transformers' that is in the way of gradients alone.
_HARMLESS = ("make_inputs_require_grad", "make_inputs_require_grads")
_ADVICE = "Remove it, or give the function an attribute only_observes = True if it changes nothing."


@dataclass(frozen=True)
class Identity:
    """What computes keys and values in this process.

    Args:
        state: The state of the model, without its tokenizer; None where there is a reason.
        reason: What takes part in the pass and is in no fingerprint, as a sentence; "" where there is nothing.
    """

    state: ModelState | None = None
    reason: str = ""

    @property
    def fingerprint(self) -> ModelFingerprint:
        """The fingerprint of the model in that state; `FingerprintMismatch` where it was not read in time, or where there is a reason."""
        if self.state is None:
            raise FingerprintMismatch(self.reason)
        return fingerprint_of_state(self.state)

    @property
    def digest(self) -> str:
        """Of the fingerprint, or "" where there is a reason."""
        return "" if self.state is None else self.fingerprint.digest

    def known_digest(self) -> str:
        """The digest, or "" where it was not read in time."""
        try:
            return self.digest
        except FingerprintMismatch:
            return ""

    def matches(self, other: Identity) -> bool:
        """Whether two identities compute the same; reads weights where something has moved in between."""
        if self.reason or other.reason:
            return False
        return self.state is other.state or self.known_digest() == other.known_digest() != ""

    def is_current(self) -> bool:
        """Whether the model still computes the same, for a thread that stores what a pass computed; False where the model is gone."""
        model = None if self.state is None else self.state.model()
        # While its passes run, a tensor-parallel model has other weights in the place of its own.
        return model is not None and (is_tensor_parallel(model) or self.matches(Identity(state_of(model))))


def identity_of(model: PreTrainedModel, looks: int = 1) -> Identity:
    """Return the identity under which a model (without a PEFT wrapper) would compute now.

    Args:
        looks: How many 64ths of the tensors to search for silent writes.
    """
    state = state_of(model, looks)
    if state.unreadable is None:
        state.unreadable = why_unreadable(model)
    reason = _unseen(model, state.modules()) or state.unreadable
    return Identity(reason=reason) if reason else Identity(state)


def require_identity(model: PreTrainedModel, what: str) -> Identity:
    """Return the identity of a model in which everything that computes can be seen; `what` needs it, as the subject of the message."""
    identity = identity_of(model, LOOKS)
    if identity.reason:
        raise FingerprintMismatch(f"{what} would be bound to a model that no fingerprint describes. {identity.reason}")
    return identity


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
        """Of a cache that was read from a file, and that the model of this identity has filled."""
        return cls(tokens, [(0, identity)])

    def begin_pass(self, model: PreTrainedModel, seen: int, tokens: int) -> None:
        """Take the model's identity before a pass of some tokens."""
        self.crop(seen)
        identity = identity_of(model)
        start = self._turns.pop()[0] if self._turns and self._turns[-1][1] == identity else seen
        self._turns.append((start, identity))
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
        last = self._turns[-1][1]
        if foreign := next((identity for _, identity in self._turns if identity.reason), None):
            return foreign
        if all(identity.matches(last) for _, identity in self._turns):
            return last
        changed = f"The model has changed behind the first {self._turns[1][0]} tokens (weights, settings or adapters)"
        return Identity(reason=f"{changed}, and what follows depends on both.")

    def crop(self, length: int) -> None:
        """Forget all tokens but the first ones."""
        self._turns = [(start, identity) for start, identity in self._turns if start < length]
        self.until = min(self.until, length)


def _unseen(model: PreTrainedModel, modules: list[nn.Module]) -> str:
    """Why no fingerprint describes what the model would compute now, as a sentence; "" where one does."""
    if any(torch.is_autocast_enabled(device) for device in {"cpu", model.device.type} - {"meta"}):
        return "torch.autocast is on, which computes in other types than the weights have. Load the model in that type."
    if hook := _foreign_hook(None):
        return f"A hook on all modules ({hook}) may change what they compute. {_ADVICE}"
    attention = compat.attention_in_use(model.config)
    if attention is not None and (name := _foreign_name(attention)):
        return f"Attention is computed by {name}, which transformers knows by its name alone. Use one of its own implementations."
    for kind in {*map(type, modules)}:
        if (forward := _patched_forward(kind)) is not None:
            return f"The forward of {kind.__name__} is replaced by {_name_of(forward)}. Put the original back."
    return next((reason for module in compat.unusual(modules) if (reason := _unseen_in(model, module))), "")


def _unseen_in(model: PreTrainedModel, module: nn.Module) -> str:
    """The same of a module that has hooks or a forward of its own, or is in training mode."""
    hook, forward = _foreign_hook(module), compat.replaced_forward(module)
    rate = _for_training(module) if module.training else ""
    if not (hook or forward is not None or rate):
        return ""
    name = next(name for name, other in model.named_modules() if other is module) or "the model"
    if hook.startswith("peft."):
        return f"PEFT chooses adapters row by row ({hook} on {name}): adapter_names, or an activated LoRA. Activate one with set_adapter."
    if hook:
        return f"A hook on {name} ({hook}) may change what it computes. {_ADVICE}"
    if forward is not None:
        return f"The forward of {name} is replaced by {_name_of(forward)}. Put the original back."
    return f"{name} is in training mode and has {rate}. Call model.eval()."


def _foreign_hook(module: nn.Module | None) -> str:
    """The name of the first hook of a module, or of all modules, that is the caller's own."""
    return next((name for hook in compat.forward_hooks(module) if (name := _foreign_name(hook))), "")


def _foreign_name(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    name = _name_of(hook)
    known = name.partition(".")[0] in _LIBRARIES or name.rpartition(".")[2] in _HARMLESS
    return "" if known or getattr(hook, "only_observes", False) else name


def _patched_forward(kind: type[nn.Module]) -> Any:
    """The forward of a class, where it is not the one that the class was written with."""
    kind = next((base for base in kind.__mro__ if "forward" in vars(base)), nn.Module)
    forward = vars(kind)["forward"]
    home = getattr(forward, "__globals__", {}).get("__name__")
    if home is None or kind is nn.Module or getattr(forward, "only_observes", False):
        return None
    same_package = home.partition(".")[0] in {kind.__module__.partition(".")[0], *_LIBRARIES, "accelerate"}
    # FSDP puts a class of its own, with the same forward, in the place of a module's.
    same_name = (forward.__module__, forward.__qualname__) in {(base.__module__, f"{base.__qualname__}.forward") for base in kind.__mro__}
    return None if same_package and same_name else forward


def _name_of(function: Any) -> str:
    function = getattr(function, "__func__", function)
    # Wrappers carry the name of what they wrap, but not its globals.
    home = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or type(function).__module__
    return f"{home}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _for_training(module: nn.Module) -> str:
    """What a module does in training mode alone, by name."""
    attributes = vars(module) | (vars(module.config) if isinstance(module, PreTrainedModel) else {})
    if attributes.get("track_running_stats"):
        return "batch statistics"
    dropout = "Dropout" in type(module).__name__
    rates = {name: value for name, value in attributes.items() if FOR_TRAINING.search(name) or (dropout and name == "p")}
    return next((f"{name}={value}" for name, value in rates.items() if isinstance(value, int | float) and value > 0), "")
