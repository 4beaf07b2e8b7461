"""What a pass through a model is computed by, and under which identity the tokens of a cache were computed.

Where state is shared, every weight is read (`ModelFingerprint`). Caches that share nothing take a quick look, in milliseconds: at what
modules have besides tensors (settings of adapters among it) and at some elements of every tensor. It notices a change of a whole weight,
of a setting or of an adapter, and mostly not one of single elements. The first prompt of a cache takes the quick look too: the identity
of the last reading is presumed, and confirmed by a reading before anything stored is used, or what the pass computed is stored.

What takes part in a forward and is in no fingerprint (hooks, replaced forwards, autocast, dropout, foreign attention) is a reason to share
nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.model_parts import CHANGING_ROPE, FOR_TRAINING, counts
from hf_kvcaches.core.parallel import is_tensor_parallel
from hf_kvcaches.errors import FingerprintMismatch, UnsupportedError

# What a quick look sees: equal for a model that has not changed in between. It means nothing to another process.
Glance = tuple[Any, ...]
_SAMPLES = 64
_VALUES = (bool, int, float, str, type(None))
# Whose hooks and wrappers compute what the model says: they place tensors, require gradients, or collect outputs.
_LIBRARIES = frozenset(("transformers", "torch", "hf_kvcaches"))
# A function of PEFT's and of transformers' that is in the way of gradients alone.
_HARMLESS = ("make_inputs_require_grad", "make_inputs_require_grads")
# The last reading of each model, with the quick look that was taken before it.
_last_readings: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Glance, Identity]] = weakref.WeakKeyDictionary()
_ADVICE = "Remove it, or give the function an attribute only_observes = True if it changes nothing."


@dataclass(frozen=True)
class Identity:
    """What computes keys and values: a fingerprint, what a quick look saw, or the reason why neither tells.

    Args:
        fingerprint: Of the model, without its tokenizer.
        reason: What takes part in the pass and is in no fingerprint, as a sentence; "" where there is nothing.
        glance: What was seen of the model, where nobody read its weights.
        presumed: Whether the weights were read before an earlier pass, and a quick look has seen no change since.
    """

    fingerprint: ModelFingerprint | None = None
    reason: str = ""
    glance: Glance | None = None
    presumed: bool = field(default=False, compare=False)

    @property
    def digest(self) -> str:
        """Of the fingerprint, or "" where there is none."""
        return "" if self.fingerprint is None else self.fingerprint.digest


def identity_of(model: PreTrainedModel, any_precision: bool = False) -> Identity:
    """The identity under which a model (without a PEFT wrapper) would compute now, of all of its weights to the bit."""
    reason = _unseen(model)
    return Identity(reason=reason) if reason else _read(model, any_precision)


def _read(model: PreTrainedModel, any_precision: bool = False) -> Identity:
    glance = _glance_at(model)
    try:
        identity = Identity(ModelFingerprint.of(model, any_precision=any_precision))
    except UnsupportedError as error:
        return Identity(reason=str(error))
    _last_readings[model] = (glance, identity)
    return identity


def presumed_identity(model: PreTrainedModel) -> Identity:
    """The identity that the last reading found, where a quick look sees no change since; else that of a new reading."""
    reason, reading = _unseen(model), _last_readings.get(model)
    # While its passes run, a tensor-parallel model has other weights in the place of its own: no thread may confirm what was presumed.
    if reason or reading is None or is_tensor_parallel(model) or reading[0] != _glance_at(model):
        return Identity(reason=reason) if reason else identity_of(model)
    return replace(reading[1], presumed=True)


def confirmation(model: PreTrainedModel, identity: Identity) -> Callable[[], bool]:
    """What tells later whether a pass was by this identity: weights were read before the pass, or are read then and were the same before.

    Any thread may ask: hooks and autocast were looked for before the pass, and are not looked for again. The model is not kept alive.
    """
    reference = weakref.ref(model)

    def is_confirmed() -> bool:
        there = reference()
        return not identity.presumed or (there is not None and _read(there) == identity)

    return is_confirmed


def glanced_identity(model: PreTrainedModel) -> Identity:
    """The identity under which a model would compute now, as far as a quick look tells: enough for what stays with its owner."""
    reason = _unseen(model)
    return Identity(reason=reason) if reason else Identity(glance=_glance_at(model))


def require_identity(model: PreTrainedModel, what: str, any_precision: bool = False) -> ModelFingerprint:
    """The fingerprint of a model in which everything that computes can be seen; `what` needs it, as the subject of the message."""
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
        """Of a cache that was read from a file, and that the model of this identity has filled."""
        return cls(tokens, [(0, identity)])

    def begin_pass(self, model: PreTrainedModel, seen: int, tokens: int, shared: bool) -> None:
        """Takes the model's identity before a pass of some tokens; of all weights if others may be given what the pass computes."""
        self.crop(seen)
        read = glanced_identity if not shared else identity_of if self._turns else presumed_identity
        identity = read(model)
        start = self._turns.pop()[0] if self._turns and self._turns[-1][1] == identity else seen
        self._turns.append((start, identity))
        self.until = seen + tokens

    def confirm(self, model: PreTrainedModel) -> None:
        """Reads all weights, while the first pass has not run, where its identity is presumed."""
        if self.identity.presumed:
            self._turns = [(0, identity_of(model))]

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
        """Forgets all tokens but the first ones."""
        self._turns = [(start, identity) for start, identity in self._turns if start < length]
        self.until = min(self.until, length)


def _glance_at(model: PreTrainedModel) -> Glance:
    modules = compat.modules_of(model)
    values = tuple(
        (name, _value(value))
        for module in modules
        for name, value in vars(module).items()
        # An attribute that is not there is as good as one that says no.
        if value is not None and value is not False and counts(name)
    )
    tensors: list[Tensor] = [parameter for module in modules for parameter in module.parameters(recurse=False)]
    for module in modules:
        # But for frequencies that the forward changes with the length of the text.
        changing = getattr(module, "rope_type", None) in CHANGING_ROPE
        tensors += [tensor for name, tensor in module.named_buffers(recurse=False) if not (changing and name == "inv_freq")]
    return tuple(map(id, modules)), values, _value(tuple(map(str, vars(model.config).values()))), _samples(tensors)


def _value(value: Any) -> Any:
    if type(value) in _VALUES:
        return value
    if type(value) in (tuple, list):
        return tuple(map(_value, value))
    if isinstance(value, dict):  # PEFT's scaling, say, by adapter
        return tuple((key, _value(item)) for key, item in value.items())
    return id(value) if callable(value) else type(value)


def _samples(tensors: list[Tensor]) -> tuple[bytes, ...]:
    """Some elements of every tensor, brought from each device in one go."""
    samples: defaultdict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        wrapper = type(tensor) not in (Tensor, nn.Parameter)
        if wrapper or tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
            continue
        flat = tensor.detach().flatten() if tensor.is_contiguous() else tensor.detach()[..., :1].flatten()
        # An odd step, for one that divides the row length would read the same column in every row.
        samples[tensor.dtype, tensor.device].append(flat[:: (flat.numel() // _SAMPLES) | 1])
    return tuple(torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes() for parts in samples.values())


def _unseen(model: PreTrainedModel) -> str:
    """Why no fingerprint describes what the model would compute now, as a sentence; "" where one does."""
    if any(torch.is_autocast_enabled(device) for device in {"cpu", model.device.type} - {"meta"}):
        return "torch.autocast is on, which computes in other types than the weights have. Load the model in that type."
    if hook := _foreign_hook(None):
        return f"A hook on all modules ({hook}) may change what they compute. {_ADVICE}"
    attention = compat.attention_in_use(model.config)
    if attention is not None and (name := _foreign_name(attention)):
        return f"Attention is computed by {name}, which transformers knows by its name alone. Use one of its own implementations."
    return next((reason for name, module in model.named_modules() if (reason := _unseen_in(name or "the model", module))), "")


def _unseen_in(name: str, module: nn.Module) -> str:
    if hook := _foreign_hook(module):
        if hook.startswith("peft."):
            return (
                f"PEFT chooses adapters row by row ({hook} on {name}): adapter_names, or an activated LoRA. Activate one with set_adapter."
            )
        return f"A hook on {name} ({hook}) may change what it computes. {_ADVICE}"
    forward = compat.replaced_forward(module)
    if forward is None:
        forward = _patched_forward(type(module))
    if forward is not None:
        return f"The forward of {name} is replaced by {_name_of(forward)}. Put the original back."
    if module.training and (attribute := _for_training(module)):
        return f"{name} is in training mode and has {attribute}. Call model.eval()."
    return ""


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
    if compat.uses_batch_statistics(module):
        return "batch statistics"
    if compat.is_dropout(module):
        return f"p={module.p}" if float(getattr(module, "p")) > 0 else ""  # noqa: B009 - nn.Module types it as a tensor
    values = {**vars(module), **(vars(module.config) if isinstance(module, PreTrainedModel) else {})}
    rates = ((name, value) for name, value in values.items() if FOR_TRAINING.search(name) and isinstance(value, int | float))
    return next((f"{name}={value}" for name, value in rates if value > 0), "")
