"""Tells whether stored keys and values, or what was calibrated, belong to the model at hand."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from hf_kvcaches.core.checksum import Deferred, TensorSketch, is_sharded, why_unreadable
from hf_kvcaches.core.model_parts import (
    AS_CONFIGURED,
    ModelState,
    Part,
    digest_of_part,
    facts_of,
    parts_of,
    sketches_of,
    take_apart,
    tokenizer_part,
)
from hf_kvcaches.core.parallel import Gathering, shard_of
from hf_kvcaches.errors import ArtifactError, FingerprintMismatch, require_instance

_FORMAT_VERSION = 3
# In the geometry of a model of which a process has some heads only.
_SHARD = "heads of this process"
_COMPONENTS = ("weights", "adapters", "tokenizer", "rope", "attention", "geometry", "architecture", "precision")
# Differing fields of one component that are spelled out.
_SHOWN_FIELDS = 3
# Digests of two fingerprints that were found to be of one model in two precisions, so that weights are sketched once.
_one_model: set[tuple[str, str]] = set()
# Of models whose weights can't be read, by the caller.
_supplied: weakref.WeakKeyDictionary[nn.Module, ModelFingerprint] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ModelFingerprint:
    """The identity of what produced a KV cache. Make it with `ModelFingerprint.of(model, tokenizer)`.

    Each component is the SHA-256 digest of its entry in `details`, so that one changed value changes one component. `==` and `hash`
    compare all components. Whether state made with one model may be used with another is asked by `differs_from` and
    `require_same`, which compare the tokenizers only where both fingerprints have one.

    Args:
        weights: Name, dtype, shape and checksum of the base model's parameters and buffers. Tied tensors count as if they were copies.
            Adapters do not show here, unless they are merged.
        adapters: The PEFT adapters that take part in the forward: names, order, weights, settings, and the names of merged ones.
            Adapters that are loaded but not active, or disabled, do not count.
        tokenizer: Vocabulary, merges, normaliser and the other stages, added and special tokens, chat template. `None` if it was
            made without a tokenizer.
        rope: RoPE parameters of the configuration, and the frequencies and scales that the model really uses.
        attention: Windows, layer types, caps, scaling and causality, as configured and as the attention modules have them. Not the
            implementation (sdpa, eager, ...), which computes the same thing.
        geometry: Model type, layers, heads and their sizes.
        architecture: All other configuration values with an effect on what the model computes, and the classes and plain attributes
            (numbers, strings, functions) of all other modules.
        precision: The dtypes of the weights, and how they are quantised.
        details: Component -> field -> JSON value, from which the digests follow and from which `differs_from` explains. Not compared.
        facts: What a person wants to know: name, class, size. Not compared.
        sketches: Of each tensor, by which `require_model` knows the model in another precision. Not compared, and empty unless asked for.
    """

    weights: str
    adapters: str
    tokenizer: str | None
    rope: str
    attention: str
    geometry: str
    architecture: str
    precision: str
    details: Mapping[str, Part] = field(default_factory=dict, compare=False, repr=False)
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    sketches: Mapping[str, TensorSketch] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any = None, *, any_precision: bool = False) -> ModelFingerprint:
        """Reads all of the model's weights, each time: nothing announces every write. That takes about 0.1 s of processor time per GB.

        Hooks, replaced `forward`s and autocast can't be read; see `core.identity`. Adapters that were merged and unmerged again leave
        rounding errors in the base weights, which then are others, and so is the fingerprint.

        Args:
            model: A transformers model, also one with PEFT adapters, compiled, quantized, or offloaded by accelerate.
            tokenizer: Its tokenizer or processor. Give it where the stored state depends on texts and not only on token ids.
            any_precision: Whether to add what `require_model` needs to know the model in float32, bfloat16 and float16. Give it where what
                is stored is good for all of these. Weights are read twice then.
        """
        state = take_apart(model)
        supplied = _supplied.get(state.root)
        parts = parts_of(state, {} if supplied is None else supplied.details)
        if (shard := shard_of(state.root)) is not None:
            parts["geometry"][_SHARD] = f"span {shard.rank + 1} of {shard.size}"
        return cls._of_state(state, parts, tokenizer, _sketches(state) if any_precision else {})

    @classmethod
    def gathered(cls, model: nn.Module, tokenizer: Any = None, *, any_precision: bool = False) -> ModelFingerprint:
        """The fingerprint that the whole model has, of one whose weights are sharded over processes, for `set_fingerprint`.

        All processes call it, and gather one tensor at a time.

        Args:
            model: As for `of`, with weights that are DTensors.
            tokenizer: As for `of`; and `any_precision`.
        """
        state = take_apart(model)
        shards = Gathering(state.base)
        state.base = {name: Deferred(shards, name, value) if is_sharded(value) else value for name, value in state.base.items()}
        return cls._of_state(state, parts_of(state, {}), tokenizer, sketches_of(state) if any_precision else {})

    @classmethod
    def _of_state(cls, state: ModelState, parts: dict[str, Part], tokenizer: Any, sketches: Mapping[str, TensorSketch]) -> ModelFingerprint:
        if tokenizer is not None:
            parts["tokenizer"] = tokenizer_part(tokenizer)
        return cls._from_parts(parts, facts_of(state, parts), sketches)

    @property
    def of_all_heads(self) -> ModelFingerprint:
        """The same without the part of the heads that a process has under tensor parallelism."""
        if _SHARD not in self.details.get("geometry", {}):
            return self
        geometry = {name: value for name, value in self.details["geometry"].items() if name != _SHARD}
        return ModelFingerprint._from_parts({**self.details, "geometry": geometry}, self.facts, self.sketches)

    @classmethod
    def _from_parts(cls, parts: Mapping[str, Part], facts: Mapping[str, Any], sketches: Mapping[str, TensorSketch]) -> ModelFingerprint:
        digests: dict[str, Any] = {name: digest_of_part(parts[name]) if name in parts else None for name in _COMPONENTS}
        return cls(**digests, details=dict(parts), facts=dict(facts), sketches=dict(sketches))

    @property
    def digest(self) -> str:
        """One SHA-256 over all components, in hex."""
        return digest_of_part({name: getattr(self, name) for name in _COMPONENTS})

    def __str__(self) -> str:
        return self.digest[:12]

    def describe(self) -> str:
        """The model in one line, for people."""
        facts, adapters = self.facts, self.details.get("adapters", {})
        used = [*adapters.get("active", []), *(f"{name} (merged)" for name in adapters.get("merged", []))]
        count = facts.get("parameters")
        words = [
            " ".join(str(facts[key]) for key in ("class", "name") if facts.get(key)),
            f"{f'{count:,}' if isinstance(count, int) else 'unknown'} parameters in {facts.get('dtypes', 'unknown dtypes')}",
            f"adapters {', '.join(used)}" if used else "no adapters",
            "no tokenizer" if self.tokenizer is None else f"{self.details.get('tokenizer', {}).get('vocabulary size')} tokens",
        ]
        return f"{self!s}: " + "; ".join(words)

    def differs_from(self, other: ModelFingerprint) -> list[str]:
        """The reasons why state of the other model can't be used with this one; empty if it can.

        Args:
            other: In the reasons, `here` is this fingerprint and `there` the other.
        """
        names = [name for name in _COMPONENTS if getattr(self, name) != getattr(other, name)]
        if None in (self.tokenizer, other.tokenizer):
            names = [name for name in names if name != "tokenizer"]
        return [_reason(name, self.details.get(name, {}), other.details.get(name, {})) for name in names]

    def require_same(self, other: ModelFingerprint, what: str) -> None:
        """Raises `FingerprintMismatch` unless state of the other model can be used with this one.

        Args:
            other: The fingerprint that is stored with the state.
            what: The stored thing, as the subject of the message.
        """
        reasons = self.differs_from(other)
        if reasons:
            raise FingerprintMismatch(
                f"{what} was made for another model: {'; '.join(reasons)} (here: the model at hand, {self}; there: what it was made for, "
                f"{other}). Load the model that it was made for, with the same adapters active, or make it anew for this one."
            )

    def require_model(self, model: nn.Module, what: str, tokenizer: Any = None, here: ModelFingerprint | None = None) -> None:
        """Raises `FingerprintMismatch` unless a model is the one of this fingerprint, perhaps in another precision.

        In another precision it is only known where this fingerprint was made for any precision.

        Args:
            model: With the adapters that are active now.
            what: What is bound to the model, as the subject of the message.
            tokenizer: Compared where this fingerprint has one.
            here: The model's own, if at hand.
        """
        here = here or ModelFingerprint.of(model, tokenizer)
        if _SHARD not in self.details.get("geometry", {}):  # what was made for the whole model is good for a part of its heads
            here = here.of_all_heads
        if not self.sketches or not here.differs_from(self):
            here.require_same(self, what)
        elif (self.digest, here.digest) not in _one_model:
            here.require_same(self._cast_like(replace(here, sketches=_sketches(take_apart(model)))), what)
            _one_model.add((self.digest, here.digest))

    def _cast_like(self, other: ModelFingerprint) -> ModelFingerprint:
        """This fingerprint, with everything of the other's that is the same but for the types of numbers."""
        details, theirs = {name: dict(part) for name, part in self.details.items()}, other.details
        same = {name for name, sketch in self.sketches.items() if name in other.sketches and sketch.is_cast_of(other.sketches[name])}
        details["weights"] |= {name: theirs["weights"][name] for name in same & set(theirs["weights"]) & set(details["weights"])}
        details["precision"]["tensors by dtype"] = theirs["precision"].get("tensors by dtype")
        for adapter in self.details["adapters"]["active"]:
            weights = f"weights of {adapter!r}"
            here, there = ({name for name in made.sketches if name.startswith(f"{adapter!r} ")} for made in (self, other))
            if here == there and here <= same and weights in theirs["adapters"]:
                details["adapters"][weights] = theirs["adapters"][weights]
        for name, value in theirs["rope"].items():
            if str(value).startswith(AS_CONFIGURED) and str(details["rope"].get(name)).startswith(AS_CONFIGURED):
                details["rope"][name] = value
        return ModelFingerprint._from_parts(details, self.facts, {})

    def to_dict(self) -> dict[str, Any]:
        """The fingerprint as JSON values, for `from_dict`."""
        return {
            "format_version": _FORMAT_VERSION,
            "components": {name: getattr(self, name) for name in _COMPONENTS},
            "details": json.loads(json.dumps({name: dict(part) for name, part in self.details.items()})),
            "facts": json.loads(json.dumps(dict(self.facts))),
            "sketches": {name: str(sketch) for name, sketch in self.sketches.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelFingerprint:
        """Reads what `to_dict` wrote; anything else is an `ArtifactError`."""
        hint = "Make it anew with ModelFingerprint.of(model, tokenizer)."
        version = data.get("format_version") if isinstance(data, Mapping) else None
        if not isinstance(version, int):
            raise ArtifactError(f"fingerprint: expected a dict with a format_version, got {type(data).__name__}. {hint}")
        if version != _FORMAT_VERSION:
            older = "Older ones describe weights otherwise and can't be compared: make what it belongs to anew."
            advice = "Upgrade hf-kvcaches." if version > _FORMAT_VERSION else older
            raise ArtifactError(f"fingerprint: expected format version {_FORMAT_VERSION}, got {version}. {advice}")
        details, facts = data.get("details"), data.get("facts")
        if not _is_complete(details) or not isinstance(facts, Mapping) or details is None:
            raise ArtifactError(f"fingerprint: expected components, details and facts, got keys {sorted(map(str, data))}. {hint}")
        try:
            sketches = {name: TensorSketch.from_text(text) for name, text in data.get("sketches", {}).items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"fingerprint: expected sketches of tensors, got {str(error)[:200]}. {hint}") from error
        read = cls._from_parts(details, facts, sketches)
        if data.get("components") != {name: getattr(read, name) for name in _COMPONENTS}:
            raise ArtifactError(f"fingerprint: the digests do not follow from the details, so it is damaged. {hint}")
        return read


def set_fingerprint(model: nn.Module, fingerprint: ModelFingerprint | None) -> None:
    """Says which weights a model has that can't be read where it runs: shards of distributed tensors, or weights on the meta device.

    `ModelFingerprint.of(model)`, and with it every cache and artifact that asks for the model's identity, takes from it what can't be read;
    all else is read as ever. Make it with `ModelFingerprint.of` where the weights are whole, and bring it along as JSON (`to_dict`,
    `from_dict`). The weights must be those, and stay so: nobody can tell. Forgotten with the model.

    Args:
        model: The model, also inside a wrapper.
        fingerprint: Of the same model in the same precision; None takes back what was given.
    """
    state = take_apart(model)
    if fingerprint is None:
        _supplied.pop(state.root, None)
        return
    require_instance("fingerprint", fingerprint, ModelFingerprint, {"model": model}, "Make it with ModelFingerprint.of(model).")
    parts_of(state, fingerprint.details)  # or a refusal
    _supplied[state.root] = fingerprint


def _sketches(state: ModelState) -> dict[str, TensorSketch]:
    """Of all tensors, from the caller's fingerprint where they can't be read."""
    supplied = _supplied.get(state.root)
    known = {} if supplied is None else supplied.sketches
    return sketches_of(state) | {name: sketch for name, sketch in known.items() if why_unreadable(state.base.get(name))}


def _is_complete(details: Any) -> bool:
    if not isinstance(details, Mapping) or not set(_COMPONENTS) - {"tokenizer"} <= set(details) <= set(_COMPONENTS):
        return False
    # The only fields whose kind matters to what is read from them later.
    adapters = details["adapters"]
    listed = isinstance(adapters, Mapping) and all(isinstance(adapters.get(key), list) for key in ("active", "merged"))
    return listed and all(isinstance(part, Mapping) for part in details.values())


def _reason(component: str, here: Part, there: Part) -> str:
    fields = [name for name in {**here, **there} if here.get(name) != there.get(name) or (name in here) != (name in there)]
    if component == "weights":
        changed = [name for name in fields if name in here and name in there]
        words = [f"{len(changed)} of {len(here)} tensors, first {changed[0]}"] if changed else []
        for side, part in (("here", here), ("there", there)):
            only = [name for name in fields if name in part and name not in changed]
            words += [f"{len(only)} only {side}, first {only[0]}"] if only else []
        return f"weights differ: {', '.join(words)}"
    title = "adapters differ" if component == "adapters" else f"{component} differs"
    if component == "adapters" and "active" in fields:
        # Whose weights and scaling differ goes without saying where they are other adapters.
        title, fields = "active adapters differ", [name for name in fields if name in ("active", "merged")]
        if sorted(here["active"]) == sorted(there["active"]):
            return f"the order of active adapters differs: {here['active']} here, {there['active']} there"
    words = [f"{'' if name == 'active' else name + ' '}{_short(here.get(name))} here, {_short(there.get(name))} there" for name in fields]
    more = f" and {len(fields) - _SHOWN_FIELDS} more" if len(fields) > _SHOWN_FIELDS else ""
    return f"{title}: {', '.join(words[:_SHOWN_FIELDS])}{more}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
