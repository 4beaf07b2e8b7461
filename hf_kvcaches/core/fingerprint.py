"""The fingerprint of a model: what stored keys and values, or what was calibrated, belong to."""

from __future__ import annotations

import functools
import math
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import PurePath
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.parallel import shard_of
from hf_kvcaches.errors import ArtifactError, ConfigError, FingerprintMismatch, UnsupportedError, require_instance, require_tokenizer
from hf_kvcaches.kernels.checksum import describe, hash_of, is_readable, name_of, plain

_FORMAT_VERSION = 5
_SHARD = "heads of this process"  # a setting
_ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # what a cast changes, as a share
# What PEFT's wrappers call the module that they wrap, and by which attributes they choose adapters.
_WRAPPED = frozenset(("base_layer", "original_module", "token_adapter"))
_CHOICE = ("_active_adapter", "_disable_adapters", "merged_adapters")
FOR_TRAINING = re.compile(r"drop|jitter|noise")  # has an effect in training mode alone
_WITHOUT_EFFECT = frozenset(vars(nn.Module())) | compat.WITHOUT_EFFECT
# Of models whose weights can't be read where they run, as callers gave them.
supplied: weakref.WeakKeyDictionary[nn.Module, ModelFingerprint] = weakref.WeakKeyDictionary()
_tokenizers: weakref.WeakKeyDictionary[Any, tuple[list[str], str]] = weakref.WeakKeyDictionary()  # what decides the digest, and the digest


@dataclass(frozen=True)
class ModelFingerprint:
    """The identity of a model as it is stored. Make it with `ModelFingerprint.of(model, tokenizer)`.

    Two are equal if weights, adapters, settings and tokenizer are. `differs_from` compares tokenizers only where both have one.

    Args:
        weights: The digest of all parameters and buffers, by their names before any adapter was added.
        adapters: The PEFT adapters that take part in the forward: their names in order, those of merged ones, digests of all else.
        settings: The configuration, and the digest of the classes and plain attributes (numbers, strings, functions) of all modules.
        tokenizer: The digest of vocabulary, special tokens and chat template; None where it was made without a tokenizer.
        facts: Class, name, dtype.
        structure: The digest of the dtypes and shapes of all tensors.
        samples: A few numbers of each tensor, by which `require_model` knows the model in another dtype.
    """

    weights: str
    adapters: Mapping[str, Any]
    settings: Mapping[str, Any]
    tokenizer: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    structure: str = field(default="", repr=False, compare=False)
    samples: list[float] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any = None) -> ModelFingerprint:
        """Read all of a model's weights: about 0.3 s of processor time per GB on a CPU.

        Args:
            model: A transformers model, also one with PEFT adapters, compiled, quantized, or offloaded by accelerate.
            tokenizer: Its tokenizer or processor. Give it where the stored state depends on texts and not only on token ids.
        """
        return _read(compat.base_model(model), tokenizer)

    @classmethod
    def gathered(cls, model: nn.Module, tokenizer: Any = None) -> ModelFingerprint:
        """Return the fingerprint of the whole model, of one whose weights are sharded over processes, for `set_fingerprint`.

        All processes call it, and gather one tensor at a time.
        """
        return _read(compat.base_model(model), tokenizer, gather=True)

    @functools.cached_property
    def digest(self) -> str:
        """One SHA-256 over all parts, in hex."""
        return hash_of([self.weights, self.adapters, self.settings, self.tokenizer])

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return self.digest[:12]

    @property
    def of_all_heads(self) -> ModelFingerprint:
        """The same without the part of the heads that a process has under tensor parallelism."""
        return replace(self, settings={name: value for name, value in self.settings.items() if name != _SHARD})

    def describe(self) -> str:
        """The model in one line, for people."""
        adapters = [f"with {name}" for name in self.adapters["active"]] + [f"with {name} (merged)" for name in self.adapters["merged"]]
        return " ".join([f"{self}:", *self.facts.values(), *adapters])

    def differs_from(self, other: ModelFingerprint) -> list[str]:
        """Return the reasons why state of the other model can't be used with this one; empty if it can."""
        reasons = [] if self.weights == other.weights else ["weights differ"]
        for name, here, there in (("adapters", self.adapters, other.adapters), ("settings", self.settings, other.settings)):
            if different := [key for key in {**here, **there} if here.get(key) != there.get(key)]:
                shown = ", ".join(f"{key} {str(here.get(key))[:60]} here, {str(there.get(key))[:60]} there" for key in different[:3])
                reasons.append(f"{name} differ: {shown}{f' and {len(different) - 3} more' if different[3:] else ''}")
        if None not in (self.tokenizer, other.tokenizer) and self.tokenizer != other.tokenizer:
            reasons.append("tokenizer differs: vocabulary, special tokens or chat template")
        return reasons

    def require_same(self, other: ModelFingerprint, what: str) -> None:
        """Raise `FingerprintMismatch` unless state of the other model, bit by bit, can be used with this one.

        Args:
            what: The stored thing, as the subject of the message.
        """
        if reasons := self.differs_from(other):
            raise FingerprintMismatch(
                f"{what} was made for another model: {'; '.join(reasons)} (here: the model at hand, {self.describe()}; there: what it was "
                f"made for, {other.describe()}). Load the model that it was made for, with the same adapters active, or make it anew."
            )

    def require_model(self, model: nn.Module | ModelFingerprint, what: str, tokenizer: Any = None) -> None:
        """Raise `FingerprintMismatch` unless a model is the one of this fingerprint, perhaps in another dtype.

        Args:
            model: With the adapters that are active now, or its fingerprint.
            what: What is bound to the model, as the subject of the message.
            tokenizer: Compared where this fingerprint has one.
        """
        here = model if isinstance(model, ModelFingerprint) else ModelFingerprint.of(model)
        here = here if tokenizer is None else replace(here, tokenizer=digest_of_tokenizer(tokenizer))
        if _SHARD not in self.settings:  # what was made for the whole model is good for a part of its heads
            here = here.of_all_heads
        if self.structure != here.structure and 0 < len(self.samples) == len(here.samples):
            tolerance = _ROUNDING.get(self.facts["dtype"], 0.0) + _ROUNDING.get(here.facts["dtype"], 0.0) + 2.0**-16  # for inv_freq
            pairs = zip(self.samples, here.samples, strict=True)
            if all(math.isclose(*pair, rel_tol=tolerance, abs_tol=2.0**-25) for pair in pairs):  # a cast
                here = replace(here, weights=self.weights, adapters={**here.adapters, "weights": self.adapters["weights"]})
        here.require_same(self, what)

    def to_dict(self) -> dict[str, Any]:
        """The fingerprint as JSON values, for `from_dict`."""
        content = asdict(self)
        return {"format_version": _FORMAT_VERSION, **content, "checksum": hash_of(content)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelFingerprint:
        """Read what `to_dict` wrote; anything else is an `ArtifactError`."""
        advice = "Make it anew with ModelFingerprint.of(model, tokenizer)"
        version = data.get("format_version") if isinstance(data, Mapping) else None
        if version != _FORMAT_VERSION:
            expected = f"fingerprint: expected format version {_FORMAT_VERSION}, got {version!r}"
            raise ArtifactError(f"{expected}. Others describe weights otherwise. {advice}, or upgrade hf-kvcaches.")
        content: dict[str, Any] = {part.name: data.get(part.name) for part in fields(cls)}
        if data.get("checksum") != hash_of(content):
            raise ArtifactError(f"fingerprint: its checksum does not follow from its content, so it is damaged. {advice}.")
        return cls(**content)


def set_fingerprint(model: nn.Module, fingerprint: ModelFingerprint | None) -> None:
    """Say which weights a model has that can't be read where it runs: shards of distributed tensors, or weights on the meta device.

    Make it with `ModelFingerprint.of` where they are whole, or with `gathered`. The weights must be those, and stay so: nobody can tell.
    Where weights can be read they are read.

    Args:
        model: The model, also inside a wrapper.
        fingerprint: Of the same model in the same dtype; None takes back what was given.
    """
    root = compat.base_model(model)
    if fingerprint is None:
        supplied.pop(root, None)
        return
    require_instance("fingerprint", fingerprint, ModelFingerprint, {"model": model}, "Make it with ModelFingerprint.of(model).")
    if reason := _Parts(root).why_unreadable(fingerprint):
        raise UnsupportedError(reason)
    supplied[root] = fingerprint


def why_unreadable(root: PreTrainedModel) -> str:
    """Why neither a model nor its given fingerprint tells what its weights are, as a sentence; "" where one does."""
    return _Parts(root).why_unreadable(supplied.get(root))


class _Parts:
    """What a model computes with, by the names that modules had before any adapter was added; an adapter's begin with its quoted name."""

    def __init__(self, root: PreTrainedModel) -> None:
        self.settings: dict[str, Any] = {}
        # The name of each tensor, the tensor, and what fetches it from where accelerate keeps it.
        self.tensors: list[tuple[str, Any, Callable[[], Any] | None]] = []
        self.adapters: dict[str, list[str]] = {"active": [], "merged": []}
        self._add("", root)
        self.structure = hash_of([(name, str(getattr(each, "dtype", "")), [*getattr(each, "shape", ())]) for name, each, _ in self.tensors])
        hidden = (name for name, value, fetch in self.tensors if fetch is None and isinstance(value, Tensor) and not is_readable(value))
        self.hidden = next(hidden, "")  # the first that can't be read here

    def _add(self, path: str, part: Any) -> None:
        if isinstance(part, Tensor):
            self.tensors.append((path, part, None))
        elif isinstance(getattr(type(part), "disable_adapters", None), property):
            self._add_wrapper(path, part)
        else:
            self.settings[path] = [name_of(type(part)), settings_of(vars(part))]
            home = compat.offloaded_weights(part)
            others = {name: value for name, value in vars(part).items() if isinstance(value, Tensor) and _counts(name, value)}
            for name, value in (others | compat.state_of(part)).items():
                fetch = functools.partial(home.__getitem__, name) if home is not None and getattr(value, "is_meta", False) else None
                self.tensors.append((f"{path}.{name}".lstrip("."), value, fetch))
            for name, child in part.named_children():
                self._add(path if name == "_orig_mod" else f"{path}.{name}".lstrip("."), child)

    def _add_wrapper(self, path: str, wrapper: Any) -> None:
        """Add what PEFT wraps, and the active adapters unless some are merged into that."""
        children: dict[str, Any] = dict(wrapper.named_children())
        for name in sorted(children.keys() & _WRAPPED):
            self._add(path, children.pop(name))
        containers = {name: child for name, child in children.items() if hasattr(child, "keys")}
        known = {adapter for container in containers.values() for adapter in container}
        merged = [adapter for adapter in getattr(wrapper, "merged_adapters", ()) if adapter in known]
        active = [] if wrapper.disable_adapters or merged else [adapter for adapter in wrapper.active_adapters if adapter in known]
        for kind, names in (("active", active), ("merged", merged)):
            self.adapters[kind] += [name for name in names if name not in self.adapters[kind]]
        settings = {name: value for name, value in settings_of(vars(wrapper)).items() if name not in _CHOICE}
        for adapter in active:
            chosen = {name: value.get(adapter, value) if isinstance(value, dict) else value for name, value in settings.items()}
            self.settings[f"{adapter!r} {path}"] = [type(wrapper).__name__, active, chosen]
            for kind, container in containers.items():
                if adapter in container:
                    self._add(f"{adapter!r} {path}.{kind}", container[adapter])

    def why_unreadable(self, given: ModelFingerprint | None) -> str:
        """Why the tensors can't be read, and a given fingerprint is not of them by dtypes, shapes and adapters; "" where one is."""
        if not self.hidden or (given and given.structure == self.structure and self.adapters.items() <= given.adapters.items()):
            return ""
        return (
            f"{self.hidden}: expected a dense tensor with all of its data, got one on the meta device, or a shard. Take "
            "ModelFingerprint.of(model) where the weights are whole, or ModelFingerprint.gathered(model) in all processes, of the model as "
            "it is now and in the same dtype, and give it to set_fingerprint(model, fingerprint) here."
        )


def _read(root: PreTrainedModel, tokenizer: Any, gather: bool = False) -> ModelFingerprint:
    parts, given, shard = _Parts(root), None if gather else supplied.get(root), None if gather else shard_of(root)
    if not gather and (reason := parts.why_unreadable(given)):
        raise UnsupportedError(reason)
    if given is not None and parts.hidden:
        weights, adapter_weights, samples = given.weights, given.adapters["weights"], given.samples
    else:
        tied = {id(value): (name, value, fetch) for name, value, fetch in parts.tensors}  # is read once
        contents = {key: _content(*tensor) for key, tensor in tied.items()}
        weights, adapter_weights = _digests({name: contents[id(value)][0] for name, value, _ in parts.tensors})
        samples = [number for _, value, _ in parts.tensors for number in contents[id(value)][1]]
        samples = [] if math.nan in samples else samples
    modules, adapter_settings = _digests(parts.settings)
    settings = {f"config.{name}": value for name, value in plain(root.config.to_dict(), _counts).items()} | {"modules": modules}
    settings |= {} if shard is None else {_SHARD: f"span {shard.rank + 1} of {shard.size}"}
    # Of a path only the last part: the others say something about the machine.
    name, dtype = PurePath(str(getattr(root.config, "name_or_path", ""))).name, str(root.dtype).removeprefix("torch.")
    facts = {"class": type(root).__name__, "name": name, "dtype": dtype}
    adapters = {**parts.adapters, "settings": adapter_settings, "weights": adapter_weights}
    words = None if tokenizer is None else digest_of_tokenizer(tokenizer)
    return ModelFingerprint(weights, adapters, settings, words, facts, parts.structure, samples)


def _digests(parts: Mapping[str, Any]) -> tuple[str, str]:
    of_adapters = {name: part for name, part in parts.items() if name.startswith("'")}
    return hash_of({name: part for name, part in parts.items() if name not in of_adapters}), hash_of(of_adapters)


def _content(name: str, value: Any, fetch: Callable[[], Any] | None) -> tuple[str, list[float]]:
    """A text that is equal for equal tensors, and a few numbers of it, by which a cast is told; NaN where it can't be."""
    value = fetch() if fetch else value.full_tensor() if hasattr(value, "full_tensor") else value
    text = describe(value, name)
    if not isinstance(value, Tensor) or value.is_quantized or value.is_complex() or hasattr(value, "__tensor_flatten__"):
        return text, [math.nan]
    if name.endswith("inv_freq"):  # rounded to 0.07%, as devices compute powers differently
        text = f"{value.dtype} {describe((value.detach().cpu().double().log2() * 1024 + 0.23).round())}"
    flat = value.detach().reshape(-1)
    return text, flat[:: max(1, len(flat) // 4) | 1][:4].double().nan_to_num().tolist()


def settings_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Those attributes of a module or a configuration that may have an effect on what a model computes, as JSON."""
    counted = {name: value for name, value in attributes.items() if _counts(name, value)}
    return {name: plain(value) for name, value in counted.items() if not isinstance(value, PreTrainedConfig | Tensor)}


def _counts(name: str, value: Any) -> bool:
    """Whether an attribute, or an entry of a configuration, may have an effect; of private ones numbers may."""
    public = name[:1] != "_" or type(value) in (int, float) or name in _CHOICE
    effective = name not in _WITHOUT_EFFECT and not getattr(value, "only_observes", False)
    return public and effective and not FOR_TRAINING.search(name)


def tokenizer_parts(tokenizer: Any) -> dict[str, str]:
    """Return the digests of vocabulary, special tokens and chat template. How a text is cut is left out: all is stored by token id."""
    require_tokenizer(tokenizer)
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    if not hasattr(inner, "get_vocab"):
        hint = "Pass what AutoTokenizer.from_pretrained returned."
        raise ConfigError.of("tokenizer", "a transformers tokenizer or processor", tokenizer, hint)
    special = {key: str(value) for key, value in inner.special_tokens_map.items()}
    parts = {"vocabulary": sorted(inner.get_vocab().items()), "special tokens": special, "chat template": inner.chat_template}
    return {name: hash_of(part) for name, part in parts.items()}


def digest_of_tokenizer(tokenizer: Any) -> str:
    """Return the digest of a tokenizer or processor, computed anew when tokens, special tokens or the template have changed."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    state = [str(getattr(inner, name, None)) for name in ("vocab_size", "added_tokens_decoder", "special_tokens_map", "chat_template")]
    if inner not in _tokenizers or _tokenizers[inner][0] != state:
        _tokenizers[inner] = state, hash_of(tokenizer_parts(tokenizer))
    return _tokenizers[inner][1]
