"""The fingerprint of a model: what stored keys and values, or what was calibrated, belong to."""

from __future__ import annotations

import functools
import json
import math
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.parallel import shard_of
from hf_kvcaches.core.tokenizer_digest import digest_of_tokenizer
from hf_kvcaches.errors import ArtifactError, FingerprintMismatch, UnsupportedError, require_instance
from hf_kvcaches.kernels.checksum import describe, digest_of, hash_of, is_readable

_FORMAT_VERSION = 5
_FIELDS = ("weights", "adapters", "settings", "tokenizer", "facts", "structure", "samples")
_SHARD = "heads of this process"
# By how much a cast changes a number at most, as a share of it.
_ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# What PEFT's wrappers call the module that they wrap, and by which attributes they choose adapters.
_WRAPPED = ("base_layer", "original_module", "token_adapter")
_CHOICE = ("_active_adapter", "_disable_adapters", "merged_adapters")
# Has an effect in training mode alone.
FOR_TRAINING = re.compile(r"drop|jitter|noise")
_WITHOUT_EFFECT = frozenset(vars(nn.Module())) | compat.WITHOUT_EFFECT
# Of models whose weights can't be read where they run, as callers gave them.
supplied: weakref.WeakKeyDictionary[nn.Module, ModelFingerprint] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class ModelFingerprint:
    """The identity of what produced a KV cache. Make it with `ModelFingerprint.of(model, tokenizer)`.

    Two are equal if weights, adapters, settings and tokenizer are. `differs_from` compares tokenizers only where both have one.

    Args:
        weights: The digest of all parameters and buffers, by their names before any adapter was added.
        adapters: The PEFT adapters that take part in the forward: their names in order, those of merged ones, digests of all else.
        settings: The configuration, and the digest of the classes and plain attributes (numbers, strings, functions) of all modules.
        tokenizer: The digest of vocabulary, special tokens and chat template; None where it was made without a tokenizer.
        facts: Class, name, dtype.
        structure: The digest of the dtypes and shapes of all tensors.
        samples: A few numbers of each tensor, by which `require_model` knows the model in another precision.
    """

    weights: str
    adapters: Mapping[str, Any]
    settings: Mapping[str, Any]
    tokenizer: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict, repr=False)
    structure: str = field(default="", repr=False)
    samples: list[float] = field(default_factory=list, repr=False)

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
        adapters = [f"with {name}" for name in self.adapters["active"]] + [f"with {name} (merged)" for name in self.adapters["merged"]]
        return " ".join([f"{self}:", *self.facts.values(), *adapters])

    def differs_from(self, other: ModelFingerprint) -> list[str]:
        """Return the reasons why state of the other model can't be used with this one; empty if it can."""
        reasons = [] if self.weights == other.weights else ["weights differ"]
        for name, here, there in (("adapters", self.adapters, other.adapters), ("settings", self.settings, other.settings)):
            fields = [key for key in {**here, **there} if here.get(key) != there.get(key)]
            shown = ", ".join(f"{key} {str(here.get(key))[:60]} here, {str(there.get(key))[:60]} there" for key in fields[:3])
            reasons += [f"{name} differ: {shown}{f' and {len(fields) - 3} more' if fields[3:] else ''}"] if fields else []
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
                f"{what} was made for another model: {'; '.join(reasons)} (here: the model at hand, {self.describe()}; there: what it was "
                f"made for, {other.describe()}). Load the model that it was made for, with the same adapters active, or make it anew."
            )

    def require_model(self, model: nn.Module | ModelFingerprint, what: str, tokenizer: Any = None) -> None:
        """Raise `FingerprintMismatch` unless a model is the one of this fingerprint, perhaps in another precision.

        Args:
            model: With the adapters that are active now. All of its weights are read; or its fingerprint, if there is one.
            what: What is bound to the model, as the subject of the message.
            tokenizer: Compared where this fingerprint has one.
        """
        here, expected = model if isinstance(model, ModelFingerprint) else ModelFingerprint.of(model), self
        here = here if tokenizer is None else replace(here, tokenizer=digest_of_tokenizer(tokenizer))
        if _SHARD not in self.settings:  # what was made for the whole model is good for a part of its heads
            here = here.of_all_heads
        if self._is_cast_of(here):
            expected = replace(self, weights=here.weights, adapters={**self.adapters, "weights": here.adapters["weights"]})
        here.require_same(expected, what)

    def _is_cast_of(self, other: ModelFingerprint) -> bool:
        """Whether models with the same settings differ in the dtypes of tensors alone, as far as a few numbers of each tell."""
        here, there = _ROUNDING.get(self.facts["dtype"]), _ROUNDING.get(other.facts["dtype"])
        if self.structure == other.structure or here is None or there is None or not len(self.samples) == len(other.samples) > 0:
            return False
        tolerance = here + there + 2.0**-16  # the last for what devices compute differently
        pairs = zip(self.samples, other.samples, strict=True)
        return all(math.isclose(one, another, rel_tol=tolerance, abs_tol=2.0**-25) for one, another in pairs)

    def to_dict(self) -> dict[str, Any]:
        """The fingerprint as JSON values, for `from_dict`."""
        content = {name: getattr(self, name) for name in _FIELDS}
        return {"format_version": _FORMAT_VERSION, **json.loads(json.dumps(content)), "checksum": hash_of(content)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelFingerprint:
        """Read what `to_dict` wrote; anything else is an `ArtifactError`."""
        advice = "Make it anew with ModelFingerprint.of(model, tokenizer)"
        version = data.get("format_version") if isinstance(data, Mapping) else None
        if version != _FORMAT_VERSION:
            expected = f"fingerprint: expected format version {_FORMAT_VERSION}, got {version!r}"
            raise ArtifactError(f"{expected}. Others describe weights otherwise. {advice}, or upgrade hf-kvcaches.")
        content: dict[str, Any] = {name: data.get(name) for name in _FIELDS}
        if data.get("checksum") != hash_of(content):
            raise ArtifactError(f"fingerprint: its checksum does not follow from its content, so it is damaged. {advice}.")
        return cls(**content)


def set_fingerprint(model: nn.Module, fingerprint: ModelFingerprint | None) -> None:
    """Say which weights a model has that can't be read where it runs: shards of distributed tensors, or weights on the meta device.

    All weights and adapters of such a model are taken from it; others are read as ever. Make it with `ModelFingerprint.of` where they are
    whole, or with `gathered`, and bring it along as JSON. The weights must be those, and stay so: nobody can tell.

    Args:
        model: The model, also inside a wrapper.
        fingerprint: Of the same model in the same precision; None takes back what was given.
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
    """Why neither a model nor its given fingerprint tells what its weights are, as a sentence; "" where one does. Reads none."""
    return _Parts(root).why_unreadable(supplied.get(root))


class _Parts:
    """What a model consists of, by the names that modules had before any adapter was added; what belongs to adapters has a quote in front.

    Of each tensor name, value, and what fetches it from where accelerate keeps it; `hidden` is the first that can't be read here, or "".
    """

    def __init__(self, root: PreTrainedModel) -> None:
        self.settings, self.tensors = dict[str, Any](), list[tuple[str, Any, Callable[[], Any] | None]]()
        self.adapters: dict[str, list[str]] = {"active": [], "merged": []}
        waiting: list[tuple[str, nn.Module]] = [("", root)]
        while waiting:
            path, module = waiting.pop()
            children = [*module.named_children()][::-1]
            if isinstance(getattr(type(module), "disable_adapters", None), property):  # a wrapper of PEFT's
                waiting += [(path, child) for name, child in children if name in _WRAPPED] + self._adapters_of(module, path)
                continue
            self.settings[path] = [name_of(type(module)), plain({name: vars(module)[name] for name in counted(module)})]
            home = compat.offloaded_weights(module)
            for name, value in compat.state_of(module).items():
                fetch = functools.partial(home.__getitem__, name) if home is not None and getattr(value, "is_meta", False) else None
                self.tensors.append((f"{path}.{name}".lstrip("."), value, fetch))
            waiting += [(path if name == "_orig_mod" else f"{path}.{name}".lstrip("."), child) for name, child in children]
        self.structure = hash_of([(name, str(getattr(each, "dtype", "")), [*getattr(each, "shape", ())]) for name, each, _ in self.tensors])
        self.adapters = {kind: [*dict.fromkeys(names)] for kind, names in self.adapters.items()}
        hidden = (name for name, value, fetch in self.tensors if fetch is None and isinstance(value, Tensor) and not is_readable(value))
        self.hidden = next(hidden, "")

    def _adapters_of(self, wrapper: Any, path: str) -> list[tuple[str, nn.Module]]:
        """Add the adapters in use of a PEFT wrapper, and return the modules of these."""
        containers: Any = [(kind, child) for kind, child in wrapper.named_children() if kind not in _WRAPPED and hasattr(child, "keys")]
        known = {adapter for _, container in containers for adapter in container}
        merged = [adapter for adapter in getattr(wrapper, "merged_adapters", ()) if adapter in known]
        # Once an adapter is merged the layer computes with its base alone.
        active = [] if wrapper.disable_adapters or merged else [adapter for adapter in wrapper.active_adapters if adapter in known]
        self.adapters["active"] += active
        self.adapters["merged"] += merged
        own = {name: vars(wrapper)[name] for name in counted(wrapper) if name not in _CHOICE}
        for adapter in active:
            chosen = {name: value.get(adapter, value) if isinstance(value, dict) else value for name, value in own.items()}
            self.settings[f"{adapter!r} {path}"] = [type(wrapper).__name__, active, plain(chosen)]
        if merged:
            self.settings[f"'' {path}"] = merged
        parts = [(f"{each!r} {path}.{kind}", child[each]) for kind, child in containers for each in active if each in child]
        self.tensors += [(name, part, None) for name, part in parts if isinstance(part, Tensor)]
        return [(name, part) for name, part in parts if isinstance(part, nn.Module)]

    def why_unreadable(self, given: ModelFingerprint | None) -> str:
        """Why these tensors can't be read, and a given fingerprint is not of them as far as dtypes, shapes and adapters tell; else ""."""
        if not self.hidden or (given and given.structure == self.structure and self.adapters.items() <= given.adapters.items()):
            return ""
        return (
            f"{self.hidden}: expected a dense tensor with all of its data, got one on the meta device, or a shard. Take "
            "ModelFingerprint.of(model) where the weights are whole, or ModelFingerprint.gathered(model) in all processes, of the model as "
            "it is now and in the same precision, and give it to set_fingerprint(model, fingerprint) here."
        )


def _read(root: PreTrainedModel, tokenizer: Any, gather: bool = False) -> ModelFingerprint:
    parts, given, shard = _Parts(root), None if gather else supplied.get(root), None if gather else shard_of(root)
    if not gather and (reason := parts.why_unreadable(given)):
        raise UnsupportedError(reason)
    modules, adapter_settings = _digests(parts.settings)
    if given is not None and parts.hidden:
        weights, adapter_weights, samples = given.weights, given.adapters["weights"], given.samples
    else:
        tied = {id(value): (name, value, fetch) for name, value, fetch in parts.tensors}  # is read once
        contents = {key: _content(*tensor) for key, tensor in tied.items()}
        weights, adapter_weights = _digests({name: contents[id(value)][0] for name, value, _ in parts.tensors})
        samples = [number for _, value, _ in parts.tensors for number in contents[id(value)][1]]
        samples = [] if math.nan in samples else samples
    settings = {f"config.{name}": value for name, value in plain(root.config.to_dict()).items()} | {"modules": modules}
    settings |= {} if shard is None else {_SHARD: f"span {shard.rank + 1} of {shard.size}"}
    # Of a path only the last part: the others say something about the machine.
    name, dtype = PurePath(str(getattr(root.config, "name_or_path", ""))).name, str(root.dtype).removeprefix("torch.")
    facts = {"class": type(root).__name__, "name": name, "dtype": dtype}
    adapters = {**parts.adapters, "settings": adapter_settings, "weights": adapter_weights}
    words = None if tokenizer is None else digest_of_tokenizer(tokenizer)
    return ModelFingerprint(weights, adapters, settings, words, facts, parts.structure, samples)


def _digests(parts: Mapping[str, Any]) -> tuple[str, str]:
    """The digests of what belongs to the model, and of what belongs to adapters."""
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


def counted(owner: Any) -> list[str]:
    """The names of a module's or a configuration's attributes that may have an effect on what a model computes."""
    own = [(name, value) for name, value in vars(owner).items() if _counts(name) and not isinstance(value, PreTrainedConfig)]
    return [name for name, value in own if name[0] != "_" or type(value) in (int, float) or name in _CHOICE]


@functools.cache
def _counts(name: str) -> bool:
    return name not in _WITHOUT_EFFECT and not FOR_TRAINING.search(name)


def plain(value: Any) -> Any:
    """A value as JSON, equal in every process. What can't be looked into counts as its type alone."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if str(key)[:1] != "_" and _counts(str(key))}
    if isinstance(value, list | tuple | set | frozenset):
        items = [plain(item) for item in value]
        return items if isinstance(value, list | tuple) else sorted(items, key=str)
    if isinstance(value, torch.dtype) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    if isinstance(value, Tensor) or hasattr(value, "to_dict"):
        return digest_of(value) if isinstance(value, Tensor) else plain(value.to_dict())
    return value if value is None or isinstance(value, bool | int | float | str) else name_of(value)


def name_of(value: Any) -> str:
    """The full name of a function or class, or of a value's class; of a class that FSDP puts in the place of another, that of the other."""
    value = getattr(value, "__func__", value)
    value = value if hasattr(value, "__qualname__") else type(value)
    value = next((base for base in getattr(value, "__mro__", ()) if not base.__module__.startswith("torch.distributed.fsdp")), value)
    # Wrappers carry the name of what they wrap, but not its globals.
    return f"{getattr(value, '__globals__', {}).get('__name__') or getattr(value, '__module__', '')}.{value.__qualname__}"
