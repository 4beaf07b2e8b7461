"""What modules and configurations hold besides tensors, as values that are equal in every process."""

from __future__ import annotations

import functools
import hashlib
import math
import re
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_kvcaches.core.checksum import digest_of

# What every module has.
INTERNAL = frozenset(vars(nn.Module()))
# What says nothing about the forward, and what a forward writes. Replaced forwards are looked for elsewhere.
BOOKKEEPING = frozenset(
    """
    forward to cuda config generation_config
    gradient_checkpointing loss_type all_tied_weights_keys kernel_config hf_device_map hf_quantizer peft_config
    peft_type quantization_method is_quantized is_loaded_in_8bit is_loaded_in_4bit device_mesh warnings_issued max_seq_len_cached
    rope_deltas
    name_or_path model_tags active_adapter base_model_torch_dtype aux_loss_coef router_aux_loss_coef z_loss_coefficient
    """.split()
)
# Has an effect in training mode alone, which is looked for elsewhere.
FOR_TRAINING = re.compile(r"drop|jitter|noise")


def attributes(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes with an effect on what it computes, tensors and modules apart, by name.

    Args:
        module: Any.
    """
    own = {name: value for name, value in vars(module).items() if name not in INTERNAL and name not in BOOKKEEPING}
    return {
        name: value
        for name, value in sorted(own.items())
        if not FOR_TRAINING.search(name)
        # Of private attributes only numbers count, like a scale that is kept beside its tensor.
        and (name[0] != "_" or type(value) in (int, float))
        and not isinstance(value, nn.Module | torch.device | PreTrainedConfig)
        # The probability of a dropout module.
        and not (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
    }


def plain(value: Any, leave_out: frozenset[str] = frozenset()) -> Any:
    """A value as JSON. What can't be looked into counts as its type alone.

    Args:
        value: Of any kind.
        leave_out: Keys that have no effect, in dicts at any depth.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, leave_out) for key, item in value.items() if _counts(key, leave_out)}
    if isinstance(value, list | tuple):
        return [plain(item, leave_out) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item, leave_out) for item in value), key=str)
    if isinstance(value, Tensor):
        return digest_of(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if callable(value):
        return _function(value)
    if hasattr(value, "to_dict"):
        return plain(value.to_dict(), leave_out)
    return type_name(type(value))


def _counts(key: Any, leave_out: frozenset[str]) -> bool:
    # Dropout, under whichever of its many names, is for training.
    return not (str(key).startswith("_") or key in leave_out or "dropout" in str(key))


def type_name(kind: type) -> str:
    """A class by its full name; what FSDP puts in its place is the same."""
    kind = next((base for base in kind.__mro__ if not base.__module__.startswith("torch.distributed.fsdp")), kind)
    return f"{kind.__module__}.{kind.__qualname__}"


def _function(value: Any) -> Any:
    """A function's name where the name leads to it, else its code and what it closes over."""
    if isinstance(value, functools.partial):
        return ["partial", _function(value.func), plain(value.args), plain(value.keywords)]
    function = getattr(value, "__func__", value)
    name, home = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if name is None:
        return type_name(type(value))
    found: Any = sys.modules.get(home or "")
    for step in name.split("."):
        found = getattr(found, step, None)
    code = getattr(function, "__code__", None)
    if found is function or not isinstance(code, types.CodeType):
        return f"{home}.{name}"
    cells = [plain(cell.cell_contents) for cell in function.__closure__ or ()]
    return [f"{home}.{name}", _code(code), plain(function.__defaults__), cells]


def _code(code: types.CodeType) -> str:
    constants = [_code(item) if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts]
    return hashlib.sha256(repr((code.co_code.hex(), code.co_names, constants)).encode()).hexdigest()[:32]
