"""The fingerprint of a model: what stored keys and values, or what was calibrated, belong to."""

from __future__ import annotations

import functools
import json
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core import model_state
from hf_kvcaches.core.model_parts import digest_of_tokenizer, hash_of, parts_of
from hf_kvcaches.core.parallel import shard_of
from hf_kvcaches.errors import ArtifactError, FingerprintMismatch, UnsupportedError, require_instance
from hf_kvcaches.kernels.checksum import describe, digest_of, head_of

_FORMAT_VERSION = 4
_PARTS = ("weights", "adapters", "settings")
_FIELDS = (*_PARTS, "tokenizer", "facts", "samples")
_SHARD = "heads of this process"
# By how much a cast changes a number at most, as a share of it.
_ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Elements of each tensor by which a cast is told from other weights.
_SAMPLES = 4
# Differing fields of one part that are spelled out.
_SHOWN = 3
# Of models whose weights can't be read where they are, by the caller.
_supplied: weakref.WeakKeyDictionary[nn.Module, ModelFingerprint] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class ModelFingerprint:
    """The identity of what produced a KV cache. Make it with `ModelFingerprint.of(model, tokenizer)`.

    Two are equal if all but `facts` and `samples` is. `differs_from` and `require_same` compare tokenizers only where both have one.

    Args:
        weights: Dtype, shape and checksum of each parameter and buffer, by its name before any adapter was added.
        adapters: The PEFT adapters that take part in the forward: names in order, weights, settings, and the names of merged ones.
        settings: The configuration, and the classes and plain attributes (numbers, strings, functions) of all modules.
        tokenizer: The digest of vocabulary, special tokens and chat template; None where it was made without a tokenizer.
        facts: For people: name, class, size.
        samples: A few elements of each tensor, by which `require_model` knows the model in another precision.
    """

    weights: Mapping[str, str]
    adapters: Mapping[str, Any]
    settings: Mapping[str, Any]
    tokenizer: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)
    samples: Mapping[str, list[float]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any = None) -> ModelFingerprint:
        """Read all of a model's weights: about 0.3 s of processor time per GB on a CPU.

        Args:
            model: A transformers model, also one with PEFT adapters, compiled, quantized, or offloaded by accelerate.
            tokenizer: Its tokenizer or processor. Give it where the stored state depends on texts and not only on token ids.
        """
        return _read(model, tokenizer)

    @classmethod
    def gathered(cls, model: nn.Module, tokenizer: Any = None) -> ModelFingerprint:
        """Return the fingerprint of the whole model, of one whose weights are sharded over processes, for `set_fingerprint`.

        All processes call it, and gather one tensor at a time.
        """
        return _read(model, tokenizer, gather=True)

    @functools.cached_property
    def digest(self) -> str:
        """One SHA-256 over all parts, in hex."""
        return hash_of([self.weights, self.adapters, self.settings, self.tokenizer])

    @property
    def of_all_heads(self) -> ModelFingerprint:
        """The same without the part of the heads that a process has under tensor parallelism."""
        return replace(self, settings={name: value for name, value in self.settings.items() if name != _SHARD})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelFingerprint) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return self.digest[:12]

    def describe(self) -> str:
        """The model in one line, for people."""
        used = [*self.adapters["active"], *(f"{name} (merged)" for name in self.adapters["merged"])]
        model = " ".join(str(self.facts[key]) for key in ("class", "name") if self.facts.get(key))
        size = f"{self.facts.get('parameters', 0):,} parameters in {self.facts.get('dtype')}"
        return f"{self!s}: {model}; {size}; {'adapters ' + ', '.join(used) if used else 'no adapters'}"

    def differs_from(self, other: ModelFingerprint) -> list[str]:
        """Return the reasons why state of the other model can't be used with this one; empty if it can."""
        parts = ((name, getattr(self, name), getattr(other, name)) for name in _PARTS)
        reasons = [_reason(name, here, there) for name, here, there in parts if here != there]
        same_words = None in (self.tokenizer, other.tokenizer) or self.tokenizer == other.tokenizer
        return reasons if same_words else [*reasons, "tokenizer differs: vocabulary, special tokens or chat template"]

    def require_same(self, other: ModelFingerprint, what: str) -> None:
        """Raise `FingerprintMismatch` unless state of the other model can be used with this one.

        Args:
            other: The fingerprint that is stored with the state.
            what: The stored thing, as the subject of the message.
        """
        if reasons := self.differs_from(other):
            raise FingerprintMismatch(
                f"{what} was made for another model: {'; '.join(reasons)} (here: the model at hand, {self}; there: what it was made for, "
                f"{other}). Load the model that it was made for, with the same adapters active, or make it anew for this one."
            )

    def require_model(self, model: nn.Module, what: str, tokenizer: Any = None) -> None:
        """Raise `FingerprintMismatch` unless a model is the one of this fingerprint, perhaps in another precision.

        Args:
            model: With the adapters that are active now. Its weights are read once per process, and again when they moved.
            what: What is bound to the model, as the subject of the message.
            tokenizer: Compared where this fingerprint has one.
        """
        here = fingerprint_of_state(model_state.state_of(compat.base_model(model)))
        here = here if tokenizer is None else replace(here, tokenizer=digest_of_tokenizer(tokenizer))
        if _SHARD not in self.settings:  # what was made for the whole model is good for a part of its heads
            here = here.of_all_heads
        here.require_same(self._cast_like(here), what)

    def _cast_like(self, other: ModelFingerprint) -> ModelFingerprint:
        """This fingerprint, with the descriptions of those of the other's tensors that are the same but for a cast."""
        cast = {name for name in self.samples if self._is_cast(name, other)}
        weights, adapters = (
            {name: there[name] if name in cast else value for name, value in here.items()}
            for here, there in ((self.weights, other.weights), (self.adapters, other.adapters))
        )
        return replace(self, weights=weights, adapters=adapters)

    def _is_cast(self, name: str, other: ModelFingerprint) -> bool:
        """Whether the numbers that both know of a tensor are the same in the coarser of two types."""
        texts = [str(made.weights.get(name) or made.adapters.get(name)) for made in (self, other)]
        (here, shape), (there, other_shape) = (text.rpartition("]")[0].partition(" ")[::2] for text in texts)
        if name not in other.samples or shape != other_shape or here == there:
            return False
        numbers, others = torch.tensor(self.samples[name]), torch.tensor(other.samples[name])
        if {here, there} == {"float16", "bfloat16"}:  # both may be casts of what was finer
            return torch.allclose(numbers, others, rtol=_ROUNDING["float16"] + _ROUNDING["bfloat16"], atol=2.0**-25)
        coarser = getattr(torch, max(here, there, key=lambda dtype: _ROUNDING[dtype]))
        return torch.equal(numbers.to(coarser), others.to(coarser))

    def to_dict(self) -> dict[str, Any]:
        """The fingerprint as JSON values, for `from_dict`."""
        content = {name: getattr(self, name) for name in (*_FIELDS, "digest")}
        return {"format_version": _FORMAT_VERSION, **json.loads(json.dumps(content))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelFingerprint:
        """Read what `to_dict` wrote; anything else is an `ArtifactError`."""
        hint = "Make it anew with ModelFingerprint.of(model, tokenizer)."
        version = data.get("format_version") if isinstance(data, Mapping) else None
        if version != _FORMAT_VERSION:
            newer = isinstance(version, int) and version > _FORMAT_VERSION
            advice = "Upgrade hf-kvcaches." if newer else f"Others describe weights otherwise and can't be compared. {hint}"
            raise ArtifactError(f"fingerprint: expected format version {_FORMAT_VERSION}, got {version!r}. {advice}")
        try:
            read = cls(**{name: data[name] for name in _FIELDS})
            samples = {name: [float(number) for number in numbers] for name, numbers in read.samples.items()}
            whole = data["digest"] == read.digest and all(type(read.adapters[key]) is list for key in ("active", "merged"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"fingerprint: expected what to_dict returned, got {type(error).__name__}: {error}. {hint}") from error
        if not whole or not all(isinstance(getattr(read, name), dict) for name in (*_PARTS, "facts")):
            raise ArtifactError(f"fingerprint: its digest does not follow from its content, so it is damaged. {hint}")
        return replace(read, samples=samples)


def set_fingerprint(model: nn.Module, fingerprint: ModelFingerprint | None) -> None:
    """Say which weights a model has that can't be read where it runs: shards of distributed tensors, or weights on the meta device.

    Every cache and artifact that asks for the model's identity takes from it what can't be read; all else is read as ever. Make it with
    `ModelFingerprint.of` where the weights are whole, or with `gathered`, and bring it along as JSON (`to_dict`, `from_dict`). The weights
    must be those, and stay so: nobody can tell. Forgotten with the model.

    Args:
        model: The model, also inside a wrapper.
        fingerprint: Of the same model in the same precision; None takes back what was given.
    """
    root = compat.base_model(model)
    if fingerprint is not None:
        require_instance("fingerprint", fingerprint, ModelFingerprint, {"model": model}, "Make it with ModelFingerprint.of(model).")
        _Reading(fingerprint, dry=True).of(root)  # or a refusal
    model_state.forget(root)
    _supplied.pop(root, None)
    if fingerprint is not None:
        _supplied[root] = fingerprint


def fingerprint_of_state(state: model_state.ModelState) -> ModelFingerprint:
    """Return the fingerprint of the model in a state: read once, while the model still is in that state."""
    with model_state.lock:
        if state.fingerprint is None:
            model = state.model()
            if model is None or not state.holds(model_state.LOOKS):
                raise FingerprintMismatch(
                    "The model has changed since, and what it was before was not read: its weights, settings or adapters."
                )
            state.fingerprint = _read(model)
        return state.fingerprint


def why_unreadable(root: PreTrainedModel) -> str:
    """Why the weights of a model are not here, and no given fingerprint describes them; "" where nothing is missing. Reads none."""
    try:
        _Reading(_supplied.get(root), dry=True).of(root)
    except UnsupportedError as error:
        return str(error)
    return ""


@dataclass(eq=False)
class _Reading:
    """Describes the entries of a model's state dict.

    Args:
        supplied: The fingerprint that the caller gave, for what can't be read.
        gather: Whether all processes gather sharded tensors.
        dry: Whether to look at what can be read, and read nothing.
    """

    supplied: ModelFingerprint | None
    gather: bool = False
    dry: bool = False
    samples: dict[str, list[float]] = field(default_factory=dict)
    missing: bool = False
    # Tied weights are read once. With the value, whose id no other may get meanwhile.
    _known: dict[int, tuple[Any, str, list[float]]] = field(default_factory=dict)

    def of(self, root: PreTrainedModel) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        weights, adapters, settings = parts_of(root, self._text)
        if self.missing and self.supplied is not None and self.supplied.adapters["merged"] != adapters["merged"]:
            raise UnsupportedError(
                f"model: expected the merged adapters {self.supplied.adapters['merged']} of the fingerprint given with set_fingerprint, "
                f"got {adapters['merged']}, which change weights that can't be read. Give the fingerprint of the model as it is now."
            )
        return weights, adapters, settings

    def _text(self, name: str, value: Any, fetch: Callable[[], Any] | None) -> str:
        sharded = isinstance(value, Tensor) and hasattr(value, "full_tensor")
        if fetch is None and isinstance(value, Tensor) and (value.is_meta or sharded) and not (sharded and self.gather):
            self.missing = True
            return self._supplied_text(name, value)
        if self.dry:
            # What says at once that it can't be read.
            sparse = isinstance(value, Tensor) and value.layout != torch.strided
            return describe(value, name) if sparse or not isinstance(value, Tensor | tuple | list | Mapping) else ""
        if id(value) not in self._known:
            try:
                data = fetch() if fetch is not None else value.full_tensor() if sharded else value
            except (KeyError, OSError) as error:
                hint = "Load the model again."
                raise UnsupportedError(f"{name}: expected the offloaded weights where accelerate left them, got {error}. {hint}") from error
            self._known[id(value)] = value, _description(name, data), _sample(data)
        _, text, numbers = self._known[id(value)]
        if numbers:
            self.samples[name] = numbers
        return text

    def _supplied_text(self, name: str, value: Tensor) -> str:
        if self.supplied is None:
            got = "one on the meta device" if value.is_meta else "one shard of a distributed one"
            raise UnsupportedError(
                f"{name}: expected a tensor with all of its data, got {got}. Take ModelFingerprint.of(model) where the weights are whole, "
                "or ModelFingerprint.gathered(model) in all processes together, and give it to set_fingerprint(model, fingerprint) here."
            )
        text = str(self.supplied.weights.get(name, self.supplied.adapters.get(name, "no such tensor")))
        if not text.startswith(head_of(value)):
            raise UnsupportedError(
                f"{name}: expected the fingerprint given with set_fingerprint to be of this model, which has {head_of(value)}here; it has "
                f"{text[:60]}. Take it of the same model in the same precision."
            )
        if name in self.supplied.samples:
            self.samples[name] = self.supplied.samples[name]
        return text


def _read(model: nn.Module, tokenizer: Any = None, gather: bool = False) -> ModelFingerprint:
    root = compat.base_model(model)
    reading = _Reading(None if gather else _supplied.get(root), gather)
    weights, adapters, settings = reading.of(root)
    shard = None if gather else shard_of(root)
    if shard is not None:
        settings[_SHARD] = f"span {shard.rank + 1} of {shard.size}"
    path = str(getattr(root.config, "name_or_path", "") or "")
    # A local path says something about the machine and nothing about the model.
    name = os.path.basename(os.path.normpath(path)) if os.path.isdir(path) else path
    facts = {
        "name": name,
        "class": type(root).__name__,
        "parameters": root.num_parameters(),
        "dtype": str(root.dtype).removeprefix("torch."),
    }
    return ModelFingerprint(
        weights, adapters, settings, None if tokenizer is None else digest_of_tokenizer(tokenizer), facts, reading.samples
    )


def _description(name: str, value: Any) -> str:
    """A text that is equal for equal tensors; rotary frequencies are rounded to 0.07%, as devices compute powers differently."""
    if name.endswith("inv_freq") and isinstance(value, Tensor) and value.is_floating_point():
        return f"{head_of(value)}{digest_of((value.detach().cpu().double().log2() * 1024 + 0.23).round())}"
    return describe(value, name)


def _sample(value: Any) -> list[float]:
    """A few elements of a tensor of floating-point numbers; none of others."""
    if not isinstance(value, Tensor) or str(value.dtype).removeprefix("torch.") not in _ROUNDING:
        return []
    if value.layout != torch.strided or hasattr(value, "__tensor_flatten__"):
        return []
    flat = value.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLES) | 1][:_SAMPLES].tolist()


def _reason(part: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    fields = [name for name in {**here, **there} if (name in here) != (name in there) or here.get(name) != there.get(name)]
    if part == "weights":
        first = f"{fields[0]}: {here.get(fields[0], 'none')} here, {there.get(fields[0], 'none')} there"
        return f"weights differ: {len(fields)} of {len(here)} tensors, first {first}"
    words = [f"{name} {_short(here.get(name))} here, {_short(there.get(name))} there" for name in fields[:_SHOWN]]
    more = f" and {len(fields) - _SHOWN} more" if len(fields) > _SHOWN else ""
    return f"{part} differ: {', '.join(words)}{more}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
