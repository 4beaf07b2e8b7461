"""How calibration runs a model: in which precision, up to which states, and where activations wait for the backward pass."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches import compat

_HALF = (torch.bfloat16, torch.float16)


class Ending(NamedTuple):
    """The end of a model's forward pass, in two steps, so that logits need not exist for all positions at once.

    Args:
        run: From token ids and a cache to the last hidden states, (batch, tokens, hidden).
        head: From these to logits; works on any of the tokens.
    """

    run: Callable[[torch.Tensor, Any], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor]


def ending_of(model: PreTrainedModel) -> Ending:
    """Return a model's ending, tried on two tokens; where its head can't be run by itself, the states are the logits."""

    def logits_of(ids: torch.Tensor, cache: Any) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, **compat.cache_kwargs(model, cache)).logits
        return logits

    whole = Ending(logits_of, lambda logits: logits)
    decoder, projection = model.base_model, model.get_output_embeddings()
    if decoder is model or projection is None:
        return whole

    def states_of(ids: torch.Tensor, cache: Any) -> torch.Tensor:
        states: torch.Tensor = decoder(input_ids=ids, **compat.cache_kwargs(decoder, cache)).last_hidden_state
        return states

    try:
        with torch.no_grad():
            ids = torch.zeros(1, 2, dtype=torch.long, device=compat.input_device(model))
            head = _head(model, projection, logits_of(ids, None), states_of(ids, None))
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return whole
    return whole if head is None else Ending(states_of, head)


def _head(model: PreTrainedModel, projection: nn.Module, logits: torch.Tensor, states: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """Return what computes these logits from these states: the projection, scaled or with a soft cap; None where it is something else."""
    raw = projection(states)
    cap = getattr(compat.decoder_config(model.config), "final_logit_softcapping", None)
    scale = 1.0 if cap is not None else float((raw.double() * logits).sum() / raw.double().square().sum())
    scale = 1.0 if abs(scale - 1) < 1e-3 else scale

    def head(states: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = projection(states)
        return projected * scale if cap is None else cap * torch.tanh(projected / cap)

    found = head(states)
    tolerance = 16 * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    same = found.shape == logits.shape and torch.allclose(found.to(logits.dtype), logits, rtol=0, atol=tolerance)
    return head if same else None


def in_float32(model: PreTrainedModel) -> PreTrainedModel:
    """Return a float32 copy of a half-precision model on a CPU, which is many times slower in half precision; else the model itself."""
    tensors = list(itertools.chain(model.parameters(), model.buffers()))
    half = [tensor for tensor in tensors if tensor.dtype in _HALF]
    if not half or any(tensor.device.type != "cpu" or type(tensor) not in (torch.Tensor, nn.Parameter) for tensor in tensors):
        return model
    copies = {id(tensor): tensor.detach().float() for tensor in half}
    for tensor in half:
        if isinstance(tensor, nn.Parameter):
            copies[id(tensor)] = nn.Parameter(copies[id(tensor)], requires_grad=False)
    # Deep copies find the tensors in the memo, so each is copied once and tied ones stay tied.
    return copy.deepcopy(model, copies)


def activations_on_cpu(model: nn.Module) -> AbstractContextManager[None]:
    """Keep activations in CPU memory until the backward pass needs them; the model's weights stay on its device."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in itertools.chain(model.parameters(), model.buffers())}

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        stays = tensor.untyped_storage().data_ptr() in weights
        return tensor.device, tensor if stays else tensor.to("cpu")

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0]))


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Without gradients of parameters, which nobody asks for."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
