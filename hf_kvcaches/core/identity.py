"""The identity of what computes keys and values, and under which identity the tokens of a cache were computed.

An identity is a state in which the model was seen. To compare the model with it takes less than a millisecond and reads no weights; its
fingerprint is read when it is first needed, once per process and again when something moved, while the model still is in that state. What
takes part in a forward and is in no fingerprint (hooks, replaced forwards, autocast, dropout, foreign attention) is a reason to share
nothing.

A silent write (through `.data`, NumPy or a fused optimizer) moves no pointer and no version counter. So each look compares one in 64 of the
tensors with a copy: all elements of a tensor of up to 16 KiB, and 32 runs of 512 bytes of a larger one. A write of a whole tensor, or of
any element of a small one, is found within 64 looks; a write of few elements of a large tensor may never be found. On CUDA the outcome is
read at a later look, so that none waits for the device. Not looked at are weights that accelerate has offloaded.
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.fingerprint import FOR_TRAINING, ModelFingerprint, changes_with_length, counted, supplied, why_unreadable
from hf_kvcaches.core.parallel import is_tensor_parallel
from hf_kvcaches.errors import FingerprintMismatch

# Looks within which every tensor is compared, and what of a large one: runs of so many bytes.
LOOKS = 64
_RUNS, _RUN_BYTES = 32, 512
# States of a model that are remembered, so that a server that switches between adapters finds each again.
_STATES = 8
# Whose hooks and wrappers compute what the model says: they place tensors, require gradients, or collect outputs; and PEFT's own two.
_LIBRARIES = frozenset(("transformers", "torch", "hf_kvcaches"))
_HARMLESS = ("make_inputs_require_grad", "make_inputs_require_grads")
_ADVICE = "Remove it, or give the function an attribute only_observes = True if it changes nothing."
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Identity:
    """What computes keys and values in this process.

    Args:
        state: The state of the model, without its tokenizer; None where there is a reason.
        reason: What takes part in the pass and is in no fingerprint, as a sentence; "" where there is nothing.
    """

    state: _State | None = None
    reason: str = ""

    @property
    def fingerprint(self) -> ModelFingerprint:
        """The fingerprint of the model in that state; `FingerprintMismatch` where it was not read in time, or where there is a reason."""
        if self.state is None:
            raise FingerprintMismatch(self.reason)
        return self.state.read()

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
        return model is not None and (is_tensor_parallel(model) or self.matches(Identity(_state_of(model))))


def identity_of(model: PreTrainedModel, looks: int = 1) -> Identity:
    """Return the identity under which a model (without a PEFT wrapper) would compute now.

    Args:
        looks: How many 64ths of the tensors to search for silent writes; `LOOKS` compares all, and waits for a GPU.
    """
    state = _state_of(model, looks)
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


def fingerprint_of(model: nn.Module) -> ModelFingerprint:
    """Return the fingerprint of a model, also in a wrapper, as it is now, whatever hooks it has; read once, and again when it moved."""
    return _state_of(compat.base_model(model)).read()


@dataclass
class Provenance:
    """Under which identities the tokens of a cache were computed.

    Decode steps, and the passes of assisted decoding that check a few drafted tokens, are taken to be by the model of the pass before.

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
        if not self._spans or self._spans[-1][1] != identity:
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
            return Identity(reason="No pass has filled the cache, or only compiled ones, before which the model is not read.")
        last = self._spans[-1][1]
        if foreign := next((identity for _, identity in self._spans if identity.reason), None):
            return foreign
        if all(identity.matches(last) for _, identity in self._spans):
            return last
        changed = f"The model has changed behind the first {self._spans[1][0]} tokens (weights, settings or adapters)"
        return Identity(reason=f"{changed}, and what follows depends on both.")

    def crop(self, length: int) -> None:
        """Forget all tokens but the first ones."""
        self._spans = [(start, identity) for start, identity in self._spans if start < length]
        self.until = min(self.until, length)


class _State:
    """A state in which a model was seen; holds no reference to the model, its modules or its tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Callable[[], PreTrainedModel | None] = weakref.ref(model)
        self.lost = False  # a silent write was found
        self.fingerprint: ModelFingerprint | None = None  # read when it is first needed
        self.unreadable: str | None = None  # why it can't be read; None where nobody has asked
        self._supplied = supplied.get(model)
        modules = compat.modules_of(model)
        owners = [*modules, *{id(config): config for module in modules for config in _configs_of(module)}.values()]
        self._links = _links(modules)
        self._modules, self._owners, self._kinds = [*map(weakref.ref, modules)], [*map(weakref.ref, owners)], [*map(type, owners)]
        self._names, self._sizes = [*map(counted, owners)], [len(vars(owner)) for owner in owners]
        # Where attributes are: those of numbers and strings alone, of which a copy is kept, and all others.
        places = [(index, name) for index, names in enumerate(self._names) for name in names]
        self._plain = [(index, name) for index, name in places if _is_plain(vars(owners[index])[name])]
        self._others = [*set(places).difference(self._plain)]
        self._values = copy.deepcopy([vars(owners[index])[name] for index, name in self._plain])
        self._kinds_of_others = [_kind_of(vars(owners[index])[name]) for index, name in self._others]
        tensors = {id(tensor): tensor for module in modules for tensor in _tensors_of(module)}.values()
        self._tensors = [*map(weakref.ref, tensors)]
        self._pointers, self._versions = [*map(Tensor.data_ptr, tensors)], [*map(compat.version_of, tensors)]
        self._samples = [(weakref.ref(tensor), _sample(tensor).clone()) for tensor in tensors if tensor.numel() and not tensor.is_quantized]
        self._turn = 0
        self._pending: list[tuple[Tensor, torch.cuda.Event]] = []

    def holds(self, looks: int = 1) -> bool:
        """Look at the model: whether it is in this state, as far as pointers, counters, attributes and a part of the samples tell."""
        if self.lost or not self._is_unmoved():
            return False
        self.lost = self._was_written(looks)
        return not self.lost

    def read(self) -> ModelFingerprint:
        """Return the fingerprint of the model in this state."""
        with _lock:
            model = self.model()
            if self.fingerprint is None and (model is None or not self.holds(LOOKS)):
                raise FingerprintMismatch("The model has changed, and what it was before was not read: weights, settings or adapters.")
            self.fingerprint = self.fingerprint or ModelFingerprint.of(model)
            return self.fingerprint

    def modules(self) -> list[nn.Module]:
        """The modules of the model, which is in this state now."""
        return [module for reference in self._modules if (module := reference()) is not None]

    def _is_unmoved(self) -> bool:
        """Compare lists of everything, which is several times faster than to compare module by module."""
        owners = [reference() for reference in self._owners]
        if [*map(type, owners)] != self._kinds or _links(owners[: len(self._modules)]) != self._links:
            return False
        if (model := self.model()) is None or supplied.get(model) is not self._supplied:
            return False
        attributes = [*map(vars, owners)]
        if (sizes := [*map(len, attributes)]) != self._sizes:
            if any(size != before and counted(owners[i]) != self._names[i] for i, (size, before) in enumerate(zip(sizes, self._sizes))):
                return False
            self._sizes = sizes
        try:
            if [attributes[index][name] for index, name in self._plain] != self._values:
                return False
            if [_kind_of(attributes[index][name]) for index, name in self._others] != self._kinds_of_others:
                return False
            tensors: list[Any] = [reference() for reference in self._tensors]
            return [*map(Tensor.data_ptr, tensors)] == self._pointers and [*map(compat.version_of, tensors)] == self._versions
        except (KeyError, RuntimeError, TypeError, ValueError):  # an attribute or a tensor is gone, or is of another kind
            return False

    @torch.no_grad()
    def _was_written(self, looks: int) -> bool:
        """Whether sampled elements have changed, by what is compared now on a CPU, and was compared before on a GPU."""
        flags: dict[torch.device, list[Tensor]] = {}
        share = max(1, min(LOOKS, len(self._samples)))
        turns, self._turn = range(self._turn, self._turn + min(looks, share)), self._turn + min(looks, share)
        for reference, before in (sample for turn in turns for sample in self._samples[turn % share :: share]):
            now = _sample(reference())
            if now.device.type == "cuda":
                flags.setdefault(now.device, []).append((now != before).any())
            elif not torch.equal(now, before):
                return True
        for device, changed in flags.items():
            with torch.cuda.device(device):
                outcome = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(torch.stack(changed).any(), non_blocking=True)
                self._pending.append((outcome, torch.cuda.Event()))
                self._pending[-1][1].record()
        ready = []
        while self._pending and (looks >= LOOKS or self._pending[0][1].query()):
            outcome, event = self._pending.pop(0)
            event.synchronize()
            ready.append(bool(outcome))
        return any(ready)

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _left_behind, (self.fingerprint,)


def _left_behind(fingerprint: ModelFingerprint | None) -> _State:
    """The state of a model in another process."""
    state = _State.__new__(_State)
    state.model, state.lost, state.fingerprint = lambda: None, True, fingerprint
    return state


_states: weakref.WeakKeyDictionary[PreTrainedModel, list[_State]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def _state_of(model: PreTrainedModel, looks: int = 1) -> _State:
    with _lock:
        states = _states.get(model, [])
        state = next((state for state in states if state.holds(looks)), None) or _State(model)
        _states[model] = [state, *(other for other in states if other is not state and not other.lost)][:_STATES]
        return state


def _configs_of(module: nn.Module) -> Iterator[PreTrainedConfig]:
    waiting = [vars(module).get("config")]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig):
            yield config
            waiting += [vars(config).get(name) for name in config.sub_configs]


def _links(modules: list[Any]) -> list[int]:
    """The ids of all children, parameters, buffers and configurations."""
    links: list[int] = []
    for module in modules:
        children, parameters, buffers, config = compat.members_of(module)
        links.append(id(config))
        links += map(id, children.values())
        links += map(id, parameters.values())
        if buffers:
            links += [id(value) for name, value in buffers.items() if not changes_with_length(module, name)]
    return links


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """The tensors with data that the parameters and buffers of a module consist of."""
    _, parameters, buffers, _ = compat.members_of(module)
    waiting = [*parameters.values(), *(value for name, value in buffers.items() if not changes_with_length(module, name))]
    while waiting:
        value = waiting.pop()
        if hasattr(value, "__tensor_flatten__"):
            waiting += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
        elif isinstance(value, Tensor) and not value.is_meta and value.layout == torch.strided:
            yield value


def _is_plain(value: Any) -> bool:
    """Whether a value consists of numbers and strings."""
    inner = [*value, *value.values()] if type(value) is dict else value if type(value) in (list, tuple) else None
    return type(value) in _PLAIN if inner is None else all(map(_is_plain, inner))


def _kind_of(value: Any) -> Any:
    return id(value) if callable(value) else type(value)


def _sample(tensor: Any) -> Tensor:
    """A view of a part of a tensor as integers, since NaN is not equal to itself."""
    flat = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    flat = (flat if flat.is_contiguous() else flat.select(-1, 0)).flatten()
    flat = flat.view(_WORDS[flat.element_size()])
    run = _RUN_BYTES // flat.element_size()
    return flat if len(flat) <= _RUNS * run else flat.unfold(0, run, (len(flat) - run) // (_RUNS - 1) | 1)


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
    if hook:
        return f"A hook on {name} ({hook}) may change what it computes, perhaps by an adapter for each row. {_ADVICE}"
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
