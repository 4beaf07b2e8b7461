"""What is remembered of a model between requests, and whether it still is as it was.

A state remembers modules, their plain attributes and configurations, and the storage pointers and version counters of every parameter and
buffer. It holds no reference to the model, its modules or its tensors.

A silent write (through `.data`, NumPy or a fused optimizer) moves no pointer and no counter. So each look compares one in 64 of the
tensors with a copy: all elements of a tensor of up to 16 KiB, and 32 runs of 512 bytes, spread evenly, of a larger one. A write of a whole
tensor, or of any element of a small one, is found within 64 looks; a write of few elements of a large tensor may never be found. On CUDA
the outcome of a comparison is read at a later look, so that none waits for the device. Weights that accelerate has offloaded, and
frequencies that a forward changes with the length of the text, are not looked at.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvcaches import compat

# Looks within which every tensor is compared, and how much of a tensor: whole, or runs of so many bytes.
LOOKS = 64
_RUNS, _RUN_BYTES = 32, 512
# States of a model that are remembered, so that a server that switches between adapters finds each again.
_STATES = 8
# RoPE types whose frequencies follow the length of what was read last.
_CHANGING_ROPE = ("dynamic", "longrope")
# Has an effect in training mode alone.
FOR_TRAINING = re.compile(r"drop|jitter|noise")
# Attributes of modules and keys of configurations that say nothing about what a model computes, or that a forward writes.
_WITHOUT_EFFECT = frozenset(vars(nn.Module())) | frozenset(
    """
    transformers_version architectures output_hidden_states output_attentions return_dict id2label label2id problem_type use_cache
    initializer_range bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tie_word_embeddings dtype torch_dtype
    attn_implementation experts_implementation gradient_checkpointing pretraining_tp chunk_size_feed_forward task_specific_params
    name_or_path auto_map embd_pdrop attn_pdrop resid_pdrop layerdrop forward to cuda config generation_config loss_type
    all_tied_weights_keys kernel_config hf_device_map hf_quantizer peft_config peft_type quantization_method is_quantized
    is_loaded_in_8bit is_loaded_in_4bit device_mesh warnings_issued max_seq_len_cached rope_deltas model_tags active_adapter
    base_model_torch_dtype aux_loss_coef router_aux_loss_coef z_loss_coefficient _tp_size _fsdp_size prepare_inputs_for_generation
    """.split()
)
# Private attributes of PEFT's by which adapters are chosen.
_ADAPTERS_IN_USE = ("_active_adapter", "_disable_adapters")
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ModelState:
    """A state in which a model was seen."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Callable[[], PreTrainedModel | None] = weakref.ref(model)
        self.lost = False
        self.fingerprint: Any = None  # read when it is first needed
        self.unreadable: str | None = None  # why it can't be read; None where nobody has asked
        modules = compat.modules_of(model)
        owners: list[Any] = [*modules, *{id(config): config for module in modules for config in _configs_of(module)}.values()]
        tensors = {id(tensor): tensor for module in modules for tensor in _tensors_of(module)}.values()
        self._modules = [*map(weakref.ref, modules)]
        self._links = _links(modules)
        self._owners = [*map(weakref.ref, owners)]
        self._kinds, self._sizes = [*map(type, owners)], [len(vars(owner)) for owner in owners]
        self._names = [tuple(counted(owner)) for owner in owners]
        values = (tuple(_frozen(vars(owner)[name]) for name in names) for owner, names in zip(owners, self._names, strict=True))
        self._values = [(index, _reader(self._names[index]), value) for index, value in enumerate(values) if value]
        self._tensors = [*map(weakref.ref, tensors)]
        self._pointers, self._versions = [*map(Tensor.data_ptr, tensors)], [*map(compat.version_of, tensors)]
        sampled = [tensor for tensor in tensors if tensor.numel() and not tensor.is_quantized]
        self._samples = [(weakref.ref(tensor), _sample(tensor).clone()) for tensor in sampled]
        self._turn = 0
        self._pending: list[tuple[Tensor, torch.cuda.Event]] = []

    def holds(self, looks: int = 1) -> bool:
        """Look at the model: whether it is in this state, as far as pointers, counters, attributes and a part of the samples tell.

        Args:
            looks: How many 64ths of the tensors to compare.
        """
        if self.lost or not self._is_unmoved():
            return False
        self.lost = self._was_written(looks)
        return not self.lost

    def modules(self) -> list[nn.Module]:
        """The modules of the model, which is in this state now."""
        return [module for reference in self._modules if (module := reference()) is not None]

    def _is_unmoved(self) -> bool:
        """Compare lists of everything, which is several times faster than to compare module by module."""
        owners = [reference() for reference in self._owners]
        tensors = [tensor for reference in self._tensors if (tensor := reference()) is not None]
        if [*map(type, owners)] != self._kinds or _links(owners[: len(self._modules)]) != self._links:
            return False
        attributes = [*map(vars, owners)]
        sizes = [*map(len, attributes)]
        if sizes != self._sizes and any(tuple(counted(owner)) != names for owner, names in zip(owners, self._names, strict=True)):
            return False
        self._sizes = sizes
        try:
            for index, read, before in self._values:
                now = read(attributes[index])
                if now != before and tuple(map(_frozen, now)) != before:
                    return False
        except (KeyError, RuntimeError, TypeError, ValueError):  # an attribute is gone, or a tensor now
            return False
        return [*map(Tensor.data_ptr, tensors)] == self._pointers and [*map(compat.version_of, tensors)] == self._versions

    @torch.no_grad()
    def _was_written(self, looks: int) -> bool:
        """Whether sampled elements have changed, by what is compared now on a CPU, and was compared before on a GPU."""
        flags: dict[torch.device, list[Tensor]] = {}
        share = max(1, min(LOOKS, len(self._samples)))
        for _ in range(min(looks, share)):
            for reference, before in self._samples[self._turn % share :: share]:
                if (tensor := reference()) is None:
                    return True
                now = _sample(tensor)
                if now.device.type != "cuda":
                    if not torch.equal(now, before):
                        return True
                else:
                    flags.setdefault(now.device, []).append((now != before).any())
            self._turn += 1
        for device, changed in flags.items():
            with torch.cuda.device(device):
                outcome = torch.empty(len(changed), dtype=torch.bool, pin_memory=True)
                outcome.copy_(torch.stack(changed), non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self._pending.append((outcome, event))
        written = False
        while self._pending and not written and (looks >= LOOKS or self._pending[0][1].query()):
            outcome, event = self._pending.pop(0)
            event.synchronize()
            written = bool(outcome.any())
        return written

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _left_behind, (self.fingerprint,)


def _left_behind(fingerprint: Any) -> ModelState:
    """The state of a model in another process."""
    state = ModelState.__new__(ModelState)
    state.model, state.lost, state.fingerprint = lambda: None, True, fingerprint
    return state


_states: weakref.WeakKeyDictionary[PreTrainedModel, list[ModelState]] = weakref.WeakKeyDictionary()
lock = threading.RLock()


def state_of(model: PreTrainedModel, looks: int = 1) -> ModelState:
    """Return the state in which a model (without wrappers) is now; what was read of it once is known to the state.

    Args:
        looks: How many 64ths of the tensors to compare; `LOOKS` compares all, and waits for a GPU.
    """
    with lock:
        states = _states.get(model, [])
        state = next((state for state in states if state.holds(looks)), None) or ModelState(model)
        _states[model] = [state, *(other for other in states if other is not state and not other.lost)][:_STATES]
        return state


def forget(model: nn.Module) -> None:
    """Forget all states of a model."""
    with lock:
        _states.pop(model, None)


def changes_with_length(module: nn.Module, name: str) -> bool:
    """Whether a buffer holds rotary frequencies that the forward changes with the length of the text."""
    kind = vars(module).get("rope_type")
    if isinstance(kind, dict):
        kind = kind.get(name.removesuffix("inv_freq").rstrip("_"))
    return kind in _CHANGING_ROPE and name.endswith("inv_freq") and not name.endswith("original_inv_freq")


def counted(owner: Any) -> list[str]:
    """The names of a module's or a configuration's attributes that may have an effect on what a model computes."""
    return [name for name, value in vars(owner).items() if is_counted(name) and (name[0] != "_" or _counts_though_private(name, value))]


@functools.cache
def is_counted(name: str) -> bool:
    """Whether an attribute, or a key of a configuration, of that name may have an effect on what a model computes."""
    return name not in _WITHOUT_EFFECT and not FOR_TRAINING.search(name)


def _counts_though_private(name: str, value: Any) -> bool:
    return type(value) in (int, float) or name in _ADAPTERS_IN_USE


@functools.cache
def _reader(names: tuple[str, ...]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    read = itemgetter(*names)
    return read if len(names) > 1 else lambda attributes: (read(attributes),)


def _configs_of(module: nn.Module) -> Iterator[PreTrainedConfig]:
    waiting = [vars(module).get("config")]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig):
            yield config
            waiting += [vars(config).get(name) for name in config.sub_configs]


def _links(modules: list[Any]) -> list[int]:
    """The ids of all children, parameters, buffers and configurations; offloaded weights change places in each pass and are left out."""
    links: list[int] = []
    for module in modules:
        children, parameters, buffers, config = compat.members_of(module)
        links.append(id(config))
        links += map(id, children.values())
        links += map(id, parameters.values())
        if buffers:
            links += [id(item) for name, item in buffers.items() if not changes_with_length(module, name)]
    return links


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    _, parameters, buffers, _ = compat.members_of(module)
    for value in (*parameters.values(), *(item for name, item in buffers.items() if not changes_with_length(module, name))):
        yield from _inner_tensors(value)


def _inner_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors with data that a parameter or buffer consists of."""
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _inner_tensors(getattr(value, name))
    elif isinstance(value, Tensor) and not value.is_meta and value.layout == torch.strided:
        yield value


def _frozen(value: Any) -> Any:
    """A copy that is equal as long as numbers, strings and functions are the same, and keeps no object alive."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (tuple, list):
        return kind(map(_frozen, value))
    if isinstance(value, dict):
        return {key if type(key) in _PLAIN else id(key): _frozen(item) for key, item in value.items()}
    return id(value) if callable(value) else kind


def _sample(tensor: Tensor) -> Tensor:
    """A view of a part of a tensor as integers, since NaN is not equal to itself."""
    flat = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    flat = (flat if flat.is_contiguous() else flat.select(-1, 0)).flatten()
    flat = flat.view(_WORDS[flat.element_size()])
    run = _RUN_BYTES // flat.element_size()
    return flat if len(flat) <= _RUNS * run else flat.unfold(0, run, (len(flat) - run) // (_RUNS - 1) | 1)
