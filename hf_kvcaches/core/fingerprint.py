"""The fingerprint of a model: what stored keys and values, or what was calibrated, belong to."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core import model_state
from hf_kvcaches.core.model_parts import Entry, ModelParts, description_of, digest_of_tokenizer, facts_of, hash_of, sample_of
from hf_kvcaches.core.parallel import shard_of
from hf_kvcaches.errors import ArtifactError, FingerprintMismatch, UnsupportedError, require_instance
from hf_kvcaches.kernels.checksum import head_of

_FORMAT_VERSION = 4
_PARTS = ("weights", "adapters", "settings")
_SHARD = "heads of this process"
# By how much a cast changes a number at most, as a share of it.
_ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
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
        size = f"{self.facts.get('parameters', 0):,} parameters in {self.facts.get('dtypes', 'unknown dtypes')}"
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
        parts = (self.weights, other.weights), (self.adapters, other.adapters)
        weights, adapters = (
            {name: theirs[name] if self._is_cast(name, own, theirs, other) else own[name] for name in own} for own, theirs in parts
        )
        return replace(self, weights=weights, adapters=adapters)

    def _is_cast(self, name: str, own: Mapping[str, Any], theirs: Mapping[str, Any], other: ModelFingerprint) -> bool:
        if name not in self.samples or name not in other.samples:
            return False
        (dtype, head), (their_dtype, their_head) = (text.rpartition("]")[0].split(" ", 1) for text in (own[name], theirs[name]))
        if head != their_head or dtype == their_dtype:
            return False
        here, there = torch.tensor(self.samples[name]), torch.tensor(other.samples[name])
        if {dtype, their_dtype} == {"float16", "bfloat16"}:
            return torch.allclose(here, there, rtol=_ROUNDING["float16"] + _ROUNDING["bfloat16"], atol=2.0**-25)
        coarser = getattr(torch, max(dtype, their_dtype, key=lambda kind: _ROUNDING[kind]))
        return torch.equal(here.to(coarser), there.to(coarser))

    def to_dict(self) -> dict[str, Any]:
        """The fingerprint as JSON values, for `from_dict`."""
        parts = {name: getattr(self, name) for name in (*_PARTS, "tokenizer", "facts", "samples", "digest")}
        return {"format_version": _FORMAT_VERSION, **json.loads(json.dumps(parts))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelFingerprint:
        """Read what `to_dict` wrote; anything else is an `ArtifactError`."""
        hint = "Make it anew with ModelFingerprint.of(model, tokenizer)."
        version = data.get("format_version") if isinstance(data, Mapping) else None
        if version != _FORMAT_VERSION:
            newer = isinstance(version, int) and version > _FORMAT_VERSION
            advice = "Upgrade hf-kvcaches." if newer else f"Others describe weights otherwise and can't be compared. {hint}"
            raise ArtifactError(f"fingerprint: expected format version {_FORMAT_VERSION}, got {version!r}. {advice}")
        fields = {name: data.get(name) for name in (*_PARTS, "tokenizer", "facts", "samples")}
        whole = all(isinstance(fields[name], dict) for name in (*_PARTS, "facts", "samples"))
        if not whole or not all(isinstance(fields["adapters"].get(key), list) for key in ("active", "merged")):  # type: ignore[union-attr]
            raise ArtifactError(f"fingerprint: expected weights, adapters and settings, got keys {sorted(map(str, data))}. {hint}")
        try:
            samples = {str(name): [float(number) for number in numbers] for name, numbers in fields["samples"].items()}  # type: ignore[union-attr]
        except (TypeError, ValueError) as error:
            raise ArtifactError(f"fingerprint: expected samples of tensors, got {str(error)[:200]}. {hint}") from error
        fingerprint = cls(**fields | {"samples": samples})  # type: ignore[arg-type]
        if data.get("digest") != fingerprint.digest:
            raise ArtifactError(f"fingerprint: its digest does not follow from its content, so it is damaged. {hint}")
        return fingerprint


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
    before = _supplied.pop(root, None)
    model_state.forget(root)
    if fingerprint is None:
        return
    require_instance("fingerprint", fingerprint, ModelFingerprint, {"model": model}, "Make it with ModelFingerprint.of(model).")
    _supplied[root] = fingerprint
    try:
        require_readable(root)
    except UnsupportedError:
        _supplied.pop(root)
        if before is not None:
            _supplied[root] = before
        raise


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


def require_readable(root: PreTrainedModel) -> None:
    """Raise `UnsupportedError` unless all weights are here, or a given fingerprint describes them; reads none."""
    parts, supplied = ModelParts.of(root), _supplied.get(root)
    missing = [entry for entry in (*parts.weights(), *parts.adapter_weights()) if entry.is_unreadable]
    for entry in missing:
        _supplied_text(entry, supplied)
    merged = parts.adapters()["merged"]
    if missing and supplied is not None and supplied.adapters["merged"] != merged:
        raise UnsupportedError(
            f"model: expected the merged adapters {supplied.adapters['merged']} of the fingerprint given with set_fingerprint, got {merged}, "
            "which change weights that can't be read. Give the fingerprint of the model as it is now."
        )


def _read(model: nn.Module, tokenizer: Any = None, gather: bool = False) -> ModelFingerprint:
    root = compat.base_model(model)
    parts, supplied = ModelParts.of(root), None if gather else _supplied.get(root)
    if not gather:
        require_readable(root)
    texts: dict[int, tuple[Any, str]] = {}  # with the value, whose id no other may get meanwhile
    samples: dict[str, list[float]] = {}

    def read(entry: Entry) -> str:
        if entry.is_unreadable and not gather:
            samples[entry.name] = [] if supplied is None else supplied.samples.get(entry.name, [])
            return _supplied_text(entry, supplied)
        value = entry.value.full_tensor() if gather and hasattr(entry.value, "full_tensor") else _fetched(entry)
        samples[entry.name] = sample_of(value)
        # Tied weights are read once.
        return texts[id(value)][1] if id(value) in texts else description_of(entry.name, value)

    weights = {}
    for entry in parts.weights():
        weights[entry.name] = read(entry)
        if entry.fetch is None and not gather:
            texts[id(entry.value)] = entry.value, weights[entry.name]
    adapters = parts.adapters() | {entry.name: read(entry) for entry in parts.adapter_weights()}
    settings, shard = parts.settings(), None if gather else shard_of(root)
    if shard is not None:
        settings[_SHARD] = f"span {shard.rank + 1} of {shard.size}"
    words = None if tokenizer is None else digest_of_tokenizer(tokenizer)
    samples = {name: numbers for name, numbers in samples.items() if numbers}
    return ModelFingerprint(weights, adapters, json.loads(json.dumps(settings)), words, facts_of(parts), samples)


def _fetched(entry: Entry) -> Any:
    try:
        return entry.value if entry.fetch is None else entry.fetch()
    except (KeyError, OSError) as error:
        raise UnsupportedError(
            f"{entry.name}: expected the offloaded weights where accelerate left them, got {error}. Load the model again."
        ) from error


def _supplied_text(entry: Entry, supplied: ModelFingerprint | None) -> str:
    """The description of a tensor that can't be read, from the fingerprint that the caller gave."""
    if supplied is None:
        got = "one on the meta device" if entry.value.is_meta else "one shard of a distributed one"
        raise UnsupportedError(
            f"{entry.name}: expected a tensor with all of its data, got {got}. Take ModelFingerprint.of(model) where the weights are whole, "
            "or ModelFingerprint.gathered(model) in all processes together, and give it to set_fingerprint(model, fingerprint) here."
        )
    text = str(supplied.weights.get(entry.name, supplied.adapters.get(entry.name, "no such tensor")))
    if not text.startswith(head_of(entry.value)):
        raise UnsupportedError(
            f"{entry.name}: expected the fingerprint given with set_fingerprint to be of this model, which has {head_of(entry.value)}here; it "
            f"has {text[:60]}. Take it of the same model in the same precision."
        )
    return text


def _reason(part: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    fields = [name for name in {**here, **there} if (name in here) != (name in there) or here.get(name) != there.get(name)]
    if part == "weights":
        name = fields[0]
        return f"weights differ: {len(fields)} of {len(here)} tensors, first {name}: {here.get(name, 'none')} here, {there.get(name, 'none')} there"
    words = [f"{name} {_short(here.get(name))} here, {_short(there.get(name))} there" for name in fields[:_SHOWN]]
    more = f" and {len(fields) - _SHOWN} more" if len(fields) > _SHOWN else ""
    return f"{part} differ: {', '.join(words)}{more}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
