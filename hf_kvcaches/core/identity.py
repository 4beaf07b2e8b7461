"""The identity of what computes keys and values.

An identity is a state in which the model was seen. A silent write (through `.data`, NumPy or a fused optimizer) moves no pointer and no
version counter. So each look at the model compares one in 64 of the tensors with a copy: all of a tensor of up to 16 KiB, 32 runs of 512
bytes of a larger one. A write of a whole tensor, or of any element of a small one, is found within 64 looks; a write of few elements of a
large tensor may never be found. On CUDA the outcome is read at a later look, so that none waits for the device.
"""

from __future__ import annotations

import functools
import threading
import weakref
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.fingerprint import FOR_TRAINING, ModelFingerprint, counted, name_of, plain, supplied, why_unreadable
from hf_kvcaches.core.parallel import is_tensor_parallel
from hf_kvcaches.errors import FingerprintMismatch

# Looks within which every tensor is compared, and what of a large one: runs of so many bytes.
LOOKS = 64
_RUNS, _RUN_BYTES = 32, 512
# States of a model that are remembered, so that a server that switches between adapters finds each again.
_STATES = 8
# Whose hooks and wrappers compute what the model says: they place tensors, require gradients, or collect outputs; and two of PEFT's.
_LIBRARIES = frozenset(("transformers", "torch", "hf_kvcaches"))
_HARMLESS = ("make_inputs_require_grad", "make_inputs_require_grads")
_ADVICE = "Remove it, or give the function an attribute only_observes = True if it changes nothing."


class Identity:
    """What computes keys and values in this process.

    Args:
        reason: What takes part in the pass and is in no fingerprint, as a sentence; "" where there is nothing.
        known: The fingerprint, without a tokenizer; None where it was not read.
    """

    def __init__(self, reason: str = "", known: ModelFingerprint | None = None) -> None:
        self.reason, self.known = reason, known

    @property
    def fingerprint(self) -> ModelFingerprint:
        """The fingerprint; `FingerprintMismatch` where it was not read in time, or where there is a reason."""
        if self.known is None:
            raise FingerprintMismatch(self.reason or "The model has changed since, and its weights, settings and adapters were not read.")
        return self.known

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
        if self.reason or other.reason:
            return False
        return self is other or self.known_digest() == other.known_digest() != ""

    def is_current(self) -> bool:
        """Whether the model still computes the same, for a thread that stores what a pass computed; False where the model is gone."""
        return False


def identity_of(model: PreTrainedModel, looks: int = 1) -> Identity:
    """Return the identity under which a model (without a PEFT wrapper) would compute now.

    Args:
        looks: How many 64ths of the tensors to search for silent writes; `LOOKS` compares all, and waits for a GPU.
    """
    state = _state_of(model, looks)
    reason = _unseen(model, [module for reference in state.modules if (module := reference()) is not None])
    return Identity(reason) if reason else state


def require_identity(model: PreTrainedModel, what: str) -> Identity:
    """Return the identity of a model in which everything that computes can be seen; `what` needs it, as the subject of the message."""
    identity = identity_of(model, LOOKS)
    if identity.reason:
        raise FingerprintMismatch(f"{what} would be bound to a model that no fingerprint describes. {identity.reason}")
    return identity


def fingerprint_of(model: nn.Module) -> ModelFingerprint:
    """Return the fingerprint of a model as it is now, hooks left out: `ModelFingerprint.of`, which is remembered as long as it holds."""
    return _state_of(compat.base_model(model)).fingerprint


class _State(Identity):
    """The identity of a model as it was seen; holds no reference to the model, its modules or its tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(why_unreadable(model))
        self._model, self._supplied, self.lost = weakref.ref(model), supplied.get(model), False
        modules = compat.modules_of(model)
        configs = {id(config): config for each in modules if isinstance(config := vars(each).get("config"), PreTrainedConfig)}
        owners = [*modules, *configs.values()]
        self.modules, self._owners, self._kinds = [*map(weakref.ref, modules)], [*map(weakref.ref, owners)], [*map(type, owners)]
        self._names, self._sizes = [*map(counted, owners)], [len(vars(owner)) for owner in owners]
        places = [(index, name) for index, names in enumerate(self._names) for name in names]
        self._places = [(index, name) for index, name in places if not isinstance(vars(owners[index])[name], Tensor)]
        self._values = [plain(vars(owners[index])[name]) for index, name in self._places]
        members, tensors = [*chain.from_iterable(map(compat.members_of, modules))], dict[int, Tensor]()
        self._members = [*map(id, members)]
        for value in members:
            if hasattr(value, "__tensor_flatten__"):
                members += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
            elif isinstance(value, Tensor) and not value.is_meta and value.layout == torch.strided:
                tensors[id(value)] = value
        self._tensors = [*map(weakref.ref, tensors.values())]
        self._pointers, self._versions = [*map(Tensor.data_ptr, tensors.values())], [*map(compat.version_of, tensors.values())]
        self._samples = [(weakref.ref(each), _sample(each).clone()) for each in tensors.values() if each.numel() and not each.is_quantized]
        self._turn, self._outcomes = 0, list[tuple[Tensor, torch.cuda.Event]]()

    @property
    def fingerprint(self) -> ModelFingerprint:
        with _lock:
            model = self._model()
            if self.known is None and model is not None and self.holds(LOOKS):
                self.known = ModelFingerprint.of(model)
            return super().fingerprint

    def is_current(self) -> bool:
        model = self._model()
        # While its passes run, a tensor-parallel model has other weights in the place of its own.
        return model is not None and (is_tensor_parallel(model) or self.matches(_state_of(model)))

    def holds(self, looks: int = 1) -> bool:
        """Look at the model: whether it is in this state, as far as pointers, counters, attributes and a part of the samples tell."""
        if self.lost or not self._is_unmoved():
            return False
        self.lost = self._was_written(looks)
        return not self.lost

    def _is_unmoved(self) -> bool:
        """Compare lists of everything, which is several times faster than to compare module by module."""
        model = self._model()
        owners: list[Any] = [reference() for reference in self._owners]
        if [*map(type, owners)] != self._kinds or model is None or supplied.get(model) is not self._supplied:
            return False
        attributes = [*map(vars, owners)]
        grown = [index for index, (own, size) in enumerate(zip(attributes, self._sizes, strict=True)) if len(own) != size]
        if any(counted(owners[index]) != self._names[index] for index in grown):
            return False
        for index in grown:
            self._sizes[index] = len(attributes[index])
        try:
            tensors: list[Any] = [reference() for reference in self._tensors]
            values = [attributes[index][name] for index, name in self._places]
            return (
                [*map(id, chain.from_iterable(map(compat.members_of, owners[: len(self.modules)])))] == self._members
                and all(now == value or plain(now) == value for now, value in zip(values, self._values, strict=True))
                and [*map(Tensor.data_ptr, tensors)] == self._pointers
                and [*map(compat.version_of, tensors)] == self._versions
            )
        except (KeyError, RuntimeError, TypeError, ValueError):  # an attribute or a tensor is gone, or is of another kind
            return False

    @torch.no_grad()
    def _was_written(self, looks: int) -> bool:
        """Whether sampled elements have changed, by what is compared now on a CPU, and was compared before on a GPU."""
        changed: dict[torch.device, list[Tensor]] = {}
        share = max(1, min(LOOKS, len(self._samples)))
        turns, self._turn = range(self._turn, self._turn + min(looks, share)), self._turn + min(looks, share)
        for reference, before in (sample for turn in turns for sample in self._samples[turn % share :: share]):
            now = _sample(reference())
            if now.device.type == "cuda":
                changed.setdefault(now.device, []).append((now != before).any())
            elif not torch.equal(now, before):
                return True
        for device, flags in changed.items():
            with torch.cuda.device(device):
                outcome = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(torch.stack(flags).any(), non_blocking=True)
                self._outcomes.append((outcome, torch.cuda.current_stream().record_event()))
        if looks >= LOOKS:
            for _, event in self._outcomes:
                event.synchronize()
        known, self._outcomes = self._outcomes, [(outcome, event) for outcome, event in self._outcomes if not event.query()]
        return any(bool(outcome) for outcome, event in known if event.query())

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self.known_digest()  # reads the weights while the model is at hand
        return Identity, (self.reason, self.known)


_states: weakref.WeakKeyDictionary[PreTrainedModel, list[_State]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def _state_of(model: PreTrainedModel, looks: int = 1) -> _State:
    with _lock:
        states = _states.get(model, [])
        state = next((state for state in states if state.holds(looks)), None) or _State(model)
        _states[model] = [state, *(other for other in states if other is not state and not other.lost)][:_STATES]
        return state


def _sample(tensor: Any) -> Tensor:
    """A view of a part of a tensor as bytes, since NaN is not equal to itself."""
    dense = tensor.detach().resolve_conj()
    flat = (dense if dense.is_contiguous() else dense.select(-1, 0)).flatten().view(torch.uint8)
    return flat if len(flat) <= _RUNS * _RUN_BYTES else flat.unfold(0, _RUN_BYTES, (len(flat) - _RUN_BYTES) // (_RUNS - 1) | 1)


def _unseen(model: PreTrainedModel, modules: list[nn.Module]) -> str:
    """Why no fingerprint describes what the model would compute now, as a sentence; "" where one does."""
    if any(torch.is_autocast_enabled(device) for device in {"cpu", model.device.type} - {"meta"}):
        return "torch.autocast is on, which computes in other types than the weights have. Load the model in that type."
    if name := _foreign_name(*compat.forward_hooks(None)):
        return f"A hook on all modules ({name}) may change what they compute. {_ADVICE}"
    if name := _foreign_name(compat.attention_in_use(model.config)):
        return f"Attention is computed by {name}, which transformers knows by its name alone. Use one of its own implementations."
    if name := next(filter(None, map(_patched_forward, {*map(type, modules)})), ""):
        return f"The forward of a class is replaced by {name}. Put the original back."
    for module in compat.unusual(modules):
        name, forward = _foreign_name(*compat.forward_hooks(module)), compat.replaced_forward(module)
        reason = f"has a hook ({name}) that may change what it computes. {_ADVICE}" if name else ""
        reason = f"has a forward that is replaced by {name_of(forward)}. Put the original back." if forward is not None else reason
        if module.training and (rate := _for_training(module)):
            reason = f"is in training mode and has {rate}. Call model.eval()."
        if reason:
            return f"{next(name for name, other in model.named_modules() if other is module) or 'The model'} {reason}"
    return ""


def _foreign_name(*functions: Any) -> str:
    """The name of the first of some functions that is the caller's own; "" for none."""
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        name = name_of(function)
        known = function is None or name.partition(".")[0] in _LIBRARIES or name.rpartition(".")[2] in _HARMLESS
        if not known and not getattr(function, "only_observes", False):
            return name
    return ""


def _patched_forward(kind: type[nn.Module]) -> str:
    """The name of the forward of a class, where it is not the one that the class was written with; else ""."""
    owner, forward = next((base, vars(base)["forward"]) for base in kind.__mro__ if "forward" in vars(base))
    if owner is nn.Module or not hasattr(forward, "__globals__") or getattr(forward, "only_observes", False):
        return ""
    packages = {owner.__module__.partition(".")[0], *_LIBRARIES, "accelerate"}
    # FSDP puts a class of its own, with the same forward, in the place of a module's.
    same = forward.__qualname__ in {f"{base.__qualname__}.forward" for base in owner.__mro__}
    return "" if same and name_of(forward).partition(".")[0] in packages else name_of(forward)


def _for_training(module: nn.Module) -> str:
    """What a module does in training mode alone, by name."""
    attributes = vars(module) | (vars(module.config) if isinstance(module, PreTrainedModel) else {})
    rates = {name: value for name, value in attributes.items() if FOR_TRAINING.search(name) or name in ("p", "track_running_stats")}
    return next((f"{name}={value}" for name, value in rates.items() if isinstance(value, int | float) and value > 0), "")
