"""`KVCache`: the thin list of layers that all caches of this package are; and `per_call`, a new one for each call of `generate`."""

from __future__ import annotations

import copy
import inspect
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from hf_kvcaches import compat
from hf_kvcaches.core import view
from hf_kvcaches.core.call import AnsweringLayer
from hf_kvcaches.core.decoder import Attachment, attention_configs
from hf_kvcaches.core.identity import Provenance
from hf_kvcaches.core.layers import KVLayer, row_picker
from hf_kvcaches.core.report import CacheReport, foreign_kept, foreign_kind, foreign_tensors, measured_bytes, summarise
from hf_kvcaches.core.save import SavedCache
from hf_kvcaches.core.token_log import PREPARED, TokenLog
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.version import warn_of_untested_version


class KVCache(compat.MarkedCache, SavedCache, Cache, ABC):
    """The base of every cache here: one layer object per model layer, and what all caches can do.

    A subclass writes `make_layer`, and names in `settings` what its constructor needs to be called again.

    Args:
        model: A transformers model, or a config: with a config the attention is switched for models that share this very object, and
            other models need `hf_kvcaches.enable`.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    needs_attention: ClassVar[bool] = False
    """Whether the layers answer queries themselves, and are of no use with a model that computes attention its own way."""
    own_layer_types: ClassVar[tuple[str, ...]] = ("full_attention",)
    """The types of the model's layers that the method applies to; others are transformers' own."""
    takes_latents: ClassVar[bool] = False  # whether layers also answer where the model expands what they return (latent attention)
    hooks_forward: ClassVar[bool] = False  # whether a hook on the model's forward tells the cache of each pass, and logs its tokens

    def __init__(self, model: Any, *, offloading: bool = False) -> None:
        warn_of_untested_version()
        base, self.config = compat.split_model(model)
        self._model = None if base is None else weakref.ref(base)
        self.provenance = Provenance()  # of the tokens
        self.log = TokenLog()  # of what `generate` has fed in; of all passes where `hooks_forward`
        self.thread: int | None = None  # in which `generate` fills it, or did last
        self.begins = False  # whether a `generate` has begun and not yet prepared its first pass
        self.learned_prompt = compat.has_learned_prompt(model)
        if offloading and not torch.cuda.is_available():
            raise UnsupportedError("offloading: needs a CUDA device to move layers to and from. Leave it out.")
        if base is not None and self.needs_attention:
            view.require_answering(base, type(self).__name__, latents=self.takes_latents)
        # In which configs the attention modules look up their implementation; the cache holds on to them and not to the model.
        self._attention_configs = (None if base is None else attention_configs(base)) or (self.config,)
        layers = [
            self.make_layer(index) if kind in self.own_layer_types else layer
            for index, (kind, layer) in enumerate(compat.layer_plan(self.config))
        ]
        super().__init__(layers=layers, **({"offloading": True} if offloading else {}))
        # Layers of linear attention are not told of tokens.
        self._lowest = next((index for index, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)), 0)

    def generate_begins(self) -> None:
        if (model := self.living_model) is not None:
            self.begins = True
            PREPARED.add(model, self)

    @abstractmethod
    def make_layer(self, layer_idx: int) -> KVLayer:
        """The layer object for the model's layer of an index, of a type in `own_layer_types`."""

    @property
    def living_model(self) -> PreTrainedModel | None:
        """The model that the cache was built with, while it lives."""
        return None if self._model is None else self._model()

    @property
    def model(self) -> PreTrainedModel:
        """The model that the cache was built with."""
        model = None if self._model is None else self._model()  # not `living_model`: this is asked often
        if model is None:
            why = "it was built with a config, unpickled, or outlived its model"
            raise ConfigError(f"{type(self).__name__} has no model: {why}. Build it with the model.")
        return model

    @property
    def seen(self) -> int:
        """The number of tokens that the model has fed in."""
        return int(self.get_seq_length())

    @property
    def broken(self) -> bool:
        """Whether a source is filling or handing over, or failed at it and was not undone."""
        return False

    @property
    def why_inexact(self) -> str:
        """Why the keys and values of its tokens may differ from those of a plain prefill, as a sentence; "" where they don't."""
        return ""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if layer_idx >= len(self.layers):
            built = f"The cache was built for {len(self.layers)} layers and the model has a layer {layer_idx}."
            raise ConfigError(f"{built} Build it with this model or its config.")
        if torch.compiler.is_compiling():
            if self.needs_attention and not self.is_compileable:
                return _update_uncompiled(self, key_states, value_states, layer_idx, *args, **kwargs)
        elif layer_idx == self._lowest:
            self.begin_pass(key_states.shape[-2])
        states: tuple[Any, Any]
        if self.offloading:
            states = super().update(key_states, value_states, layer_idx, *args)
            offload = super().offload
            if isinstance(states[0], view.LayerView):
                states[0].afterwards = lambda *answered: offload(layer_idx, self.only_non_sliding)
            elif isinstance(self.layers[layer_idx], AnsweringLayer):
                offload(layer_idx, self.only_non_sliding)
        else:
            states = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        if type(states[0]) is not Tensor and isinstance(states[0], view.LayerView):
            view.answer_next(states[0], self._attention_configs, self._model is not None)
        return states

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        # transformers calls it at the end of `update`, and layers that answer queries have yet to do so.
        if not isinstance(self.layers[layer_idx], AnsweringLayer):
            super().offload(layer_idx, only_non_sliding)

    @contextmanager
    def at_hand(self, layer: Any) -> Iterator[None]:
        """Within it a layer that is offloaded until its pass is on its device, for what is asked of it between passes."""
        if not (self.offloading and isinstance(layer, AnsweringLayer) and layer.is_initialized):
            yield
            return
        torch.cuda.default_stream(layer.device).wait_stream(self.prefetch_stream)
        layer.prefetch()
        try:
            yield
        finally:
            if layer is not next(other for other in self.layers if isinstance(other, AnsweringLayer)):  # the next pass begins with it
                layer.offload()

    def answer_next(self, answering: view.LayerView) -> None:
        view.answer_next(answering, self._attention_configs, self._model is not None)

    def begin_pass(self, tokens: int) -> None:
        """Take the model's identity before a pass that adds some tokens. Decode steps are by the model of the pass before."""
        until = self.provenance.until  # up to there a source's hook has taken it
        taken = (tokens == 1 and until) or (seen := self.seen) + tokens <= until
        if not taken and not torch.compiler.is_compiling() and (model := self.living_model) is not None:
            self.provenance.begin_pass(model, seen, tokens)

    def reset(self) -> None:
        """Forget all tokens; settings, and what does not belong to a sequence, stay."""
        for index, (_, empty) in enumerate(compat.layer_plan(self.config)):
            if isinstance(layer := self.layers[index], KVLayer):
                layer.reset()
                layer.record_past = False
            else:
                self.layers[index] = empty  # their own reset keeps zeros in transformers 5.17
        self.provenance = Provenance()
        self.log.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.pick_rows(lambda layer: layer.reorder_cache(beam_idx), row_picker(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.pick_rows(lambda layer: layer.batch_repeat_interleave(repeats), lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor | Sequence[int] | slice) -> None:
        self.pick_rows(lambda layer: layer.batch_select_indices(indices), row_picker(indices))

    def pick_rows(self, of_layer: Callable[[Any], None], pick: Callable[[Tensor], Tensor]) -> None:
        """Pick rows of each layer, and then of what the cache itself keeps of a batch."""
        for layer in self._own_layers_first():
            of_layer(layer)
        self.log.map_rows(pick)

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self._own_layers_first():
            with self.at_hand(layer):
                layer.crop(int(tokens_to_remove))  # of a tensor, windows of transformers 5.17 would make their length
        self.provenance.crop(self.seen)
        self.log.crop(self.seen)

    def activate_past_recording(self) -> None:
        for layer in self._own_layers_first():
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def _own_layers_first(self) -> list[Any]:
        """All layers; when one of a hybrid model refuses, transformers' layers have not been changed yet."""
        return sorted(self.layers, key=lambda layer: not isinstance(layer, KVLayer))

    def report(self) -> CacheReport:
        """What the cache holds, measured."""
        return CacheReport(**self._report_fields())

    def _report_fields(self) -> dict[str, Any]:
        kept = tuple(layer.kept if isinstance(layer, KVLayer) else foreign_kept(layer) for layer in self.layers)
        others = {index: foreign_kind(layer) for index, layer in enumerate(self.layers) if not isinstance(layer, KVLayer)}
        size = measured_bytes(self.owned_tensors().values())
        return {"cache": type(self).__name__, "seen": self.seen, "kept": kept, "bytes": size, "others": others}

    def owned_tensors(self) -> dict[str, Tensor]:
        """Every tensor that the cache keeps alive, by name."""
        return {
            f"layers.{index}.{name}": tensor
            for index, layer in enumerate(self.layers)
            for name, tensor in (layer.owned_tensors() if isinstance(layer, KVLayer) else foreign_tensors(layer)).items()
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo |= {id(self): copied, id(self.config): self.config, id(self._attention_configs): self._attention_configs}
        for name, value in vars(self).items():
            setattr(copied, name, copy.deepcopy(value, memo))
        if (model := self.living_model) is not None:
            Attachment.add_copy(model, self, copied)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # A weak reference can't be pickled, and the model must not travel with each cache: it is found again in the same process.
        name = None
        if (model := self.living_model) is not None:
            name = _names.setdefault(model, uuid.uuid4().hex)  # that no other model has, in this process or another
            _named[name] = model
        return {**vars(self), "_model": name, "_attention_configs": (self.config,)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._model = None
        if (model := _named.get(state["_model"])) is not None:
            self._model = weakref.ref(model)
            self.config, self._attention_configs = compat.decoder_config(model.config), attention_configs(model)

    def __repr__(self) -> str:
        report = self.report()
        layers = f"{len(report.own_kept)} of {len(self.layers)}" if report.others else f"{len(self.layers)}"
        return f"{report.cache}({layers} layers, seen={report.seen}, kept={summarise(report.own_kept)}, {report.bytes / 2**20:.2f} MiB)"


# Traced, a cache that answers queries would be compiled anew at nearly every step.
_update_uncompiled = torch.compiler.disable(KVCache.update, reason="the cache's is_compileable is False")
_names: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()
_named: weakref.WeakValueDictionary[str, PreTrainedModel] = weakref.WeakValueDictionary()


class PerCall(compat.MarkedCache):
    """What `per_call` returns: a recipe of a cache, and the `custom_generate` that decodes with a new one. Threads may share it."""

    def __init__(self, cache_class: type[KVCache], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.cache_class, self.args, self.options = cache_class, args, options

    def new_cache(self, model: Any) -> KVCache:
        """Return a cache as each call of `generate` gets one."""

        def fresh(value: Any) -> Any:
            return value.new_cache(model) if isinstance(value, PerCall) else value

        return self.cache_class(model, *map(fresh, self.args), **{name: fresh(value) for name, value in self.options.items()})

    def __call__(self, model: PreTrainedModel, input_ids: Tensor, /, **arguments: Any) -> Any:
        """Decode as `generate`, which prepared the arguments, would with a new cache passed as `past_key_values`."""
        default = compat.cache_of(arguments)
        implementation = getattr(arguments.get("generation_config"), "cache_implementation", None)
        beside = f"beside custom_generate=per_call({self.cache_class.__name__}, ...), which makes a new cache for each call"
        if compat.is_callers_cache(default):
            hint = "Leave one of them out: custom_generate to go on with your cache, past_key_values for a new one."
            raise ConfigError.of("past_key_values", f"none {beside}", type(default).__name__, hint)
        if implementation is not None:
            hint = "Leave it out; where it is the model's default, set model.generation_config.cache_implementation = None."
            raise ConfigError.of("cache_implementation", f"none {beside}", implementation, hint)
        if not arguments.get("use_cache", True):
            raise ConfigError.of("use_cache", f"True {beside}", False, "Leave one of them out.")
        # PEFT's wrapper with a learned prompt prepares the model's inputs meanwhile.
        owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
        cache = self.new_cache(owner if compat.has_learned_prompt(owner) else model)
        method, unshared = compat.begin_decoding(model, cache)
        both = EncoderDecoderCache(cache, default.cross_attention_cache) if isinstance(default, EncoderDecoderCache) else cache
        return method(input_ids, **unshared | arguments | {compat.GENERATE_CACHE: both})

    def generate_begins(self) -> None:
        raise ConfigError.of("past_key_values", "a cache", self, "Pass what per_call returns as custom_generate.")

    def __repr__(self) -> str:
        options = (f"{name}={value!r}" for name, value in self.options.items())
        return f"per_call({', '.join((self.cache_class.__name__, *map(repr, self.args), *options))})"


def per_call(cache_class: type[KVCache], /, *args: Any, **options: Any) -> PerCall:
    """A new cache for each call of `generate`: pass what this returns as `custom_generate`.

    `model.generate(**inputs, custom_generate=per_call(EquipCache, budget=512))` gives the text that
    `model.generate(**inputs, past_key_values=EquipCache(model, budget=512))` gives. A pipeline takes it, too, with a list of prompts. With
    `return_dict_in_generate=True` the cache is in the output, as `past_key_values`; else it is freed when the call ends.

    Args:
        cache_class: `EquipCache`, `SegmentReuseCache` or another.
        *args: What its constructor takes behind the model. Stores, libraries, codecs and policies are shared by all calls.
        **options: Its keyword arguments. What is a `per_call(...)` itself, as `decode_with` may be, is made anew for each call.
    """
    if not (isinstance(cache_class, type) and issubclass(cache_class, KVCache)):
        example = type(cache_class).__name__ if isinstance(cache_class, KVCache) else "EquipCache"
        hint = f"Pass the class and its options: per_call({example}, ...)."
        raise ConfigError.of("cache_class", "a class of this package's caches", cache_class, hint)
    kind = cache_class.__name__
    signature = inspect.signature(cache_class)
    try:
        named = signature.bind(None, *args, **options).arguments
    except TypeError as error:
        expected = f"what {kind} takes behind the model ({', '.join([*signature.parameters][1:])})"
        raise ConfigError(f"options: expected {expected}: {error}.") from None
    for name, value in named.items():
        given = type(value).__name__
        if isinstance(value, PreTrainedModel):
            raise ConfigError.of(name, "no model, which comes from generate", given, f"Leave it out: per_call({kind}, ...).")
        if isinstance(value, Cache):
            raise ConfigError.of(name, "no cache, which would serve a single call", given, f"Pass per_call({given}, ...) in its place.")
    return PerCall(cache_class, args, options)
