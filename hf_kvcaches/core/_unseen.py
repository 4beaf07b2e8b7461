"""What takes part in a model's forward and is in no fingerprint: hooks, replaced forwards, autocast, dropout, foreign attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvcaches import compat
from hf_kvcaches.core._plain import FOR_TRAINING

# Whose hooks and wrappers compute what the model says: they place tensors, require gradients, or collect outputs.
_LIBRARIES = frozenset(("transformers", "torch", "hf_kvcaches"))
# Accelerate's hooks that move weights and inputs, and do nothing else.
_MOVING = frozenset(("AlignDevicesHook", "CpuOffload", "UserCpuOffloadHook", "SequentialHook"))
# A function of PEFT's and of transformers' that is in the way of gradients alone.
_HARMLESS = ("make_inputs_require_grad", "make_inputs_require_grads")
_ADVICE = "Remove it, or give the function an attribute only_observes = True if it changes nothing."


def unseen(model: PreTrainedModel) -> str:
    """Why no fingerprint describes what the model would compute now, as a sentence; "" where one does.

    Args:
        model: Without a PEFT wrapper.
    """
    if any(torch.is_autocast_enabled(device) for device in {"cpu", model.device.type} - {"meta"}):
        return "torch.autocast is on, which computes in other types than the weights have. Load the model in that type."
    if compat.is_tensor_parallel(model):
        return "Under tensor parallelism each process has only some of the heads, so one can't use what another stores."
    if hooks := _foreign(torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks):
        return f"A hook on all modules ({hooks}) may change what they compute. {_ADVICE}"
    if attention := _foreign_attention(model):
        return f"Attention is computed by {attention}, which transformers knows by its name alone. Use one of its own implementations."
    return next((reason for name, module in model.named_modules() if (reason := _unseen_in(name or "the model", module))), "")


def _unseen_in(name: str, module: nn.Module) -> str:
    if hook := _foreign(module._forward_pre_hooks, module._forward_hooks):
        if hook.startswith("peft."):
            return (
                f"PEFT chooses adapters row by row ({hook} on {name}): adapter_names, or an activated LoRA. Activate one with set_adapter."
            )
        return f"A hook on {name} ({hook}) may change what it computes. {_ADVICE}"
    if (forward := _replaced_forward(module)) is not None:
        return f"The forward of {name} is replaced by {forward}. Put the original back."
    if module.training and (attribute := _for_training(module)):
        return f"{name} is in training mode and has {attribute}. Call model.eval()."
    return ""


def _foreign_attention(model: PreTrainedModel) -> str:
    name = model.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get(getattr(name, "previous", name))
    return "" if function is None else _foreign_name(function)


def _foreign(*hooks: dict[int, Any]) -> str:
    """The name of the first hook that is the caller's own."""
    return next((name for group in hooks for hook in group.values() if (name := _foreign_name(hook))), "")


def _foreign_name(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    # Wrappers carry the name of what they wrap, but not its globals.
    home = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or type(hook).__module__
    name = getattr(function, "__qualname__", type(hook).__qualname__)
    if getattr(function, "only_observes", False):
        return ""
    return "" if home.partition(".")[0] in _LIBRARIES or name.rpartition(".")[2] in _HARMLESS else f"{home}.{name}"


def _replaced_forward(module: nn.Module) -> str | None:
    """What a module calls in the place of the forward that its class was written with, by name; None where it calls that."""
    own = vars(module)
    if "forward" in own and not _is_of_class(own["forward"], module):
        if not _moves_tensors(own):
            return _name_of(own["forward"])
        if not _is_of_class(own["_old_forward"], module):
            return _name_of(own["_old_forward"])
    kind = next((base for base in type(module).__mro__ if "forward" in vars(base)), nn.Module)
    return _patched_class(kind)


def _is_of_class(forward: Any, module: nn.Module) -> bool:
    """Whether a function is the class's forward, perhaps compiled."""
    forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    return getattr(forward, "__func__", None) is getattr(type(module).forward, "__func__", type(module).forward)


def _moves_tensors(own: dict[str, Any]) -> bool:
    """Whether accelerate has wrapped the forward to move weights and inputs."""
    hook, wrapper = own.get("_hf_hook"), own["forward"]
    inner = getattr(wrapper, "func", None)
    if "_old_forward" not in own or getattr(inner, "__module__", None) != "accelerate.hooks":
        return False
    return all(
        type(part).__name__ in _MOVING and type(part).__module__ == "accelerate.hooks" for part in (hook, *getattr(hook, "hooks", ()))
    )


def _patched_class(kind: type[nn.Module]) -> str | None:
    forward = vars(kind)["forward"]
    home = getattr(forward, "__globals__", {}).get("__name__")
    if home is None or kind is nn.Module or getattr(forward, "only_observes", False):
        return None
    same_package = home.partition(".")[0] in {kind.__module__.partition(".")[0], *_LIBRARIES, "accelerate"}
    # FSDP puts a class of its own, with the same forward, in the place of a module's.
    same_name = (forward.__module__, forward.__qualname__) in {(base.__module__, f"{base.__qualname__}.forward") for base in kind.__mro__}
    return None if same_package and same_name else _name_of(forward)


def _name_of(function: Any) -> str:
    function = getattr(function, "__func__", function)
    home = getattr(function, "__globals__", {}).get("__name__", getattr(function, "__module__", "?"))
    return f"{home}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _for_training(module: nn.Module) -> str:
    """What a module does in training mode alone, by name."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "batch statistics"
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return f"p={module.p}" if module.p > 0 else ""
    own = {**vars(module), **(vars(module.config) if isinstance(module, PreTrainedModel) else {})}
    return next(
        (f"{name}={value}" for name, value in own.items() if FOR_TRAINING.search(name) and isinstance(value, int | float) and value > 0), ""
    )
