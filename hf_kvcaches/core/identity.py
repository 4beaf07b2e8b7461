"""The identity of what computes keys and values: a state in which the model was seen, of which the fingerprint is read when it is needed.

A silent write (through `.data`, NumPy or a fused optimizer) moves no pointer and no version counter. So each look at the model compares
one in 64 of the tensors with a copy: all of a tensor of up to 16 KiB, 32 runs of 512 bytes of a larger one.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvcaches import compat
from hf_kvcaches.core.fingerprint import FOR_TRAINING, ModelFingerprint, settings_of, supplied, why_unreadable
from hf_kvcaches.core.parallel import is_tensor_parallel
from hf_kvcaches.core.view import previous_implementation
from hf_kvcaches.errors import FingerprintMismatch
from hf_kvcaches.kernels.checksum import is_readable, name_of, sample

LOOKS = 64  # each look compares a 64th of the tensors; so many at once compare all
_STATES = 8  # of a model that are remembered, so that a server that switches between adapters finds each again
# Whose hooks and wrappers compute what the model says: they place tensors, require gradients, or collect outputs; and two of PEFT's.
_LIBRARIES = frozenset(("transformers", "torch", "hf_kvcaches"))
_HARMLESS = ("make_inputs_require_grad", "make_inputs_require_grads")
_ADVICE = "Remove it, or give the function an attribute only_observes = True if it changes nothing."


class Identity:
    """What computes keys and values in this process: the state in which the model was seen, and its fingerprint once it was read."""

    def __init__(self, reason: str = "", known: ModelFingerprint | None = None, state: _State | None = None) -> None:
        self.reason = reason  # what takes part in the pass and is in no fingerprint, as a sentence; "" where there is nothing
        self._known, self.state = known, state

    @property
    def fingerprint(self) -> ModelFingerprint:
        """The fingerprint; `FingerprintMismatch` where it was not read in time, or where there is a reason."""
        with _lock:
            if self._known is None and self.state is not None and self.state.holds(LOOKS):
                self._known = ModelFingerprint.of(cast("PreTrainedModel", self.state.model()))
        if self._known is None:
            raise FingerprintMismatch(self.reason or "The model has changed since, and its weights, settings and adapters were not read.")
        return self._known

    @property
    def digest(self) -> str:
        """Of the fingerprint, or "" where there is a reason."""
        return "" if self.reason else self.fingerprint.digest

    def known_digest(self) -> str:
        """The digest, or "" where it was not read in time."""
        try:
            return self.digest
        except FingerprintMismatch:
            return ""

    def matches(self, other: Identity) -> bool:
        """Whether two identities compute the same; reads weights where something has moved in between."""
        return not self.reason and (self is other or self.known_digest() == other.known_digest() != "")

    def is_current(self) -> bool:
        """Whether the model, if it is still there, computes the same; for a thread that stores what a pass computed."""
        model = None if self.state is None else self.state.model()
        # While its passes run, a tensor-parallel model has other weights in the place of its own.
        return model is not None and (is_tensor_parallel(model) or self.matches(_without_hooks(model)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Identity:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self.known_digest()  # reads the weights while the model is at hand
        return Identity, (self.reason, self._known)


@dataclass
class Provenance:
    """Under which identities the tokens of a cache were computed; decode steps by the model of the pass before."""

    until: int = 0  # up to where tokens belong to passes whose identity was taken
    spans: list[tuple[int, Identity]] = field(default_factory=list)  # from where on, and under which

    def begin_pass(self, model: PreTrainedModel, seen: int, tokens: int) -> None:
        """Take the model's identity before a pass of some tokens."""
        self.crop(seen)
        identity = identity_of(model)
        if not self.spans or self.spans[-1][1] is not identity:
            self.spans.append((seen, identity))
        self.until = seen + tokens

    @property
    def identity(self) -> Identity:
        """Of all tokens, or the reason why they have none."""
        if not self.spans:
            return Identity("No pass has filled the cache, or only compiled ones, before which the model is not read.")
        identities = [identity for _, identity in self.spans]
        if unseen := next((identity for identity in identities if identity.reason), None):
            return unseen
        if all(identity.matches(identities[-1]) for identity in identities):
            return identities[-1]
        changed = f"The model has changed behind the first {self.spans[1][0]} tokens (weights, settings or adapters)"
        return Identity(f"{changed}, and what follows depends on both.")

    def replace(self, start: int, stop: int, tokens: int, by: Provenance) -> None:
        """Have tokens that other passes computed in the place of a span; what follows moves."""
        behind = [(start + tokens + max(0, place - stop), identity) for place, identity in self.spans if place >= start]
        between = [(start, identity) for _, identity in by.spans]
        self.spans = [*(span for span in self.spans if span[0] < start), *between, *behind]

    def crop(self, length: int) -> None:
        """Forget all tokens but the first ones."""
        self.spans = [(start, identity) for start, identity in self.spans if start < length]
        self.until = min(self.until, length)


def identity_of(model: PreTrainedModel, looks: int = 1, *, evaluates: bool = False) -> Identity:
    """Return the identity under which a model (without a PEFT wrapper) would compute now, after so many `looks` for silent writes.

    With `evaluates`, as if the model were in evaluation mode.
    """
    identity: Any = _without_hooks(model, looks)
    reason = _unseen(model, [reference() for reference in identity.state.modules], evaluates)
    return Identity(reason) if reason else identity


def require_identity(model: PreTrainedModel, what: str) -> Identity:
    """Return the identity of a model in which everything that computes can be seen, which `what` needs, the subject of the message."""
    identity = identity_of(model, LOOKS)
    if identity.reason:
        raise FingerprintMismatch(f"{what} would be bound to a model that no fingerprint describes. {identity.reason}")
    return identity


def fingerprint_of(model: nn.Module) -> ModelFingerprint:
    """Return the fingerprint of a model as it is now, hooks left out: `ModelFingerprint.of`, remembered as long as it holds."""
    return _without_hooks(compat.base_model(model)).fingerprint


_known: weakref.WeakKeyDictionary[PreTrainedModel, list[Any]] = weakref.WeakKeyDictionary()  # identities, each with a state
_lock = threading.RLock()


def _without_hooks(model: PreTrainedModel, looks: int = 1) -> Identity:
    with _lock:
        known = _known.get(model, [])
        current = next((each for each in known if each.state.holds(looks)), None) or Identity(why_unreadable(model), state=_State(model))
        _known[model] = [current, *(each for each in known if each is not current and not each.state.lost)][:_STATES]
        return current


class _State:
    """A state in which a model was seen; keeps neither it, nor its modules or tensors alive."""

    @torch.inference_mode(False)
    def __init__(self, model: PreTrainedModel) -> None:
        modules = compat.modules_of(model)
        configs = {id(config): config for each in modules if isinstance(config := vars(each).get("config"), PreTrainedConfig)}
        members, tensors = compat.members_of(modules), dict[int, Tensor]()
        for member in members:
            if hasattr(member, "__tensor_flatten__"):
                members += [getattr(member, name) for name in member.__tensor_flatten__()[0]]
            elif isinstance(member, Tensor) and is_readable(member):
                tensors[id(member)] = member
        self.model, self._supplied, self.lost = weakref.ref(model), supplied.get(model), False
        self.modules: list[Any] = [*map(weakref.ref, modules)]
        self._tensors: list[Any] = [*map(weakref.ref, tensors.values())]
        self._places = self._look()
        self._settings = [(weakref.ref(owner), len(vars(owner)), settings_of(vars(owner))) for owner in (*modules, *configs.values())]
        sampled = [tensor for tensor in tensors.values() if tensor.numel() and not tensor.is_quantized]
        self._samples: list[Any] = [(weakref.ref(tensor), sample(tensor).clone()) for tensor in sampled]
        self._next = 0  # of these

    def holds(self, looks: int = 1) -> bool:
        """Whether the model is in this state, as far as pointers, counters, attributes and a part of the samples tell."""
        if self.lost or not self._is_unmoved():
            return False
        self.lost = self._was_written(looks)
        return not self.lost

    def _look(self) -> list[Any]:
        """Where all modules and tensors are, and how often these were written."""
        modules, tensors = ([reference() for reference in references] for references in (self.modules, self._tensors))
        members = map(id, compat.members_of(modules))
        return [*map(type, modules), *members, *map(Tensor.data_ptr, tensors), *compat.versions_of(tensors)]

    def _is_unmoved(self) -> bool:
        model = self.model()
        try:
            if model is None or supplied.get(model) is not self._supplied or self._look() != self._places:
                return False
            owners: Any = ((vars(reference()), size, settings) for reference, size, settings in self._settings)
            return all(
                (len(own) == size and settings.items() <= own.items()) or settings_of(own) == settings for own, size, settings in owners
            )
        except (AttributeError, RuntimeError, TypeError, ValueError):  # a module or a tensor is gone, or is of another kind
            return False

    @torch.no_grad()
    def _was_written(self, looks: int) -> bool:
        count = min(looks * -(-len(self._samples) // LOOKS), len(self._samples))
        looked_at = [self._samples[index % len(self._samples)] for index in range(self._next, self._next + count)]
        self._next += count
        changed = [(sample(reference()) != before).any().to(self._samples[0][1].device) for reference, before in looked_at]
        return bool(changed) and bool(torch.stack(changed).any())


def _unseen(model: PreTrainedModel, modules: list[nn.Module], evaluates: bool) -> str:
    """Why no fingerprint describes what the model would compute now, as a sentence; "" where one does."""
    if any(torch.is_autocast_enabled(device) for device in {"cpu", model.device.type} - {"meta"}):
        return "torch.autocast is on, which computes in other types than the weights have. Load the model in that type."
    if name := _foreign_name(*compat.forward_hooks(None)):
        return f"A hook on all modules ({name}) may change what they compute. {_ADVICE}"
    if name := _foreign_name(ALL_ATTENTION_FUNCTIONS.get(previous_implementation(model.config))):
        return f"Attention is computed by {name}, which transformers knows by its name alone. Use one of its own implementations."
    if name := _patched_forward({*map(type, modules)}):
        return f"The forward of a class is replaced by {name}. Put the original back."
    for module in compat.unusual(modules):
        name, forward = _foreign_name(*compat.forward_hooks(module)), compat.replaced_forward(module)
        reason = f"has a hook ({name}) that may change what it computes. {_ADVICE}" if name else ""
        reason = f"has a forward that is replaced by {name_of(forward)}. Put the original back." if forward is not None else reason
        if module.training and not evaluates and (rate := _for_training(module)):
            reason = f"is in training mode and has {rate}. Call model.eval()."
        if reason:
            return f"{next(name for name, other in model.named_modules() if other is module) or 'The model'} {reason}"
    return ""


def _foreign_name(*functions: Any) -> str:
    """The name of the first function that is the caller's own; "" for none."""
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        name = name_of(function)
        known = function is None or name.partition(".")[0] in _LIBRARIES or name.rpartition(".")[2] in _HARMLESS
        if not known and not getattr(function, "only_observes", False):
            return name
    return ""


def _patched_forward(kinds: Iterable[type[nn.Module]]) -> str:
    """The name of the forward of the first class whose forward is not the one that it was written with; else ""."""
    for kind in kinds:
        owner, forward = next((base, vars(base)["forward"]) for base in kind.__mro__ if "forward" in vars(base))
        if owner is nn.Module or not hasattr(forward, "__globals__") or getattr(forward, "only_observes", False):
            continue
        packages = {owner.__module__.partition(".")[0], *_LIBRARIES, "accelerate"}
        # FSDP puts a class of its own, with the same forward, in the place of a module's. Wrappers have the name of what they wrap.
        same = forward.__qualname__ in {f"{base.__qualname__}.forward" for base in owner.__mro__}
        if not same or str(forward.__globals__.get("__name__") or forward.__module__).partition(".")[0] not in packages:
            return name_of(forward)
    return ""


def _for_training(module: nn.Module) -> str:
    attributes = vars(module) | (vars(module.config) if isinstance(module, PreTrainedModel) else {})
    rates = {name: value for name, value in attributes.items() if FOR_TRAINING.search(name) or name in ("p", "track_running_stats")}
    return next((f"{name}={value}" for name, value in rates.items() if isinstance(value, int | float) and value > 0), "")
