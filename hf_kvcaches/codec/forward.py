"""How calibration runs a model: in which precision, up to which states, and the gradient of a loss there.

Draw a token at each position from the model's distribution there, and take the loss of these tokens. Its gradient g at some vector of a
layer has the mean 0, and to second order an error d there changes the predictions by the divergence `E (g . d)^2 / 2`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches import compat

_HALF = (torch.bfloat16, torch.float16)
# Logits that exist at a time: 64 MiB in float32, 64 positions of a vocabulary of 262,144 tokens.
_LOGITS = 1 << 24


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

    def states_of(ids: torch.Tensor, cache: Any) -> torch.Tensor:
        states: torch.Tensor = decoder(input_ids=ids, **compat.cache_kwargs(decoder, cache)).last_hidden_state
        return states

    decoder, projection, head = model.base_model, model.get_output_embeddings(), None
    if decoder is not model and projection is not None:
        ids = torch.zeros(1, 2, dtype=torch.long, device=compat.input_device(model))
        try:
            with torch.no_grad():
                head = _head(model, projection, logits_of(ids, None), states_of(ids, None))
        except (RuntimeError, TypeError, ValueError, AttributeError):
            head = None
    return Ending(logits_of, lambda logits: logits) if head is None else Ending(states_of, head)


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


def gradient_of_drawn(states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], seeds: Sequence[int]) -> torch.Tensor:
    """Return the gradient, at a model's last hidden states, of the loss of tokens that the model itself would continue with.

    A token is drawn at each position; the loss is the sum over all. Logits exist for a few positions at a time.

    Args:
        states: (batch, tokens, hidden).
        head: From hidden states to logits, (batch, tokens, vocabulary); differentiable.
        seeds: One for each row, so that batches and processes don't matter.
    """
    batch, tokens, _ = states.shape
    draws = torch.stack([torch.rand(tokens, 1, generator=torch.Generator().manual_seed(seed)) for seed in seeds]).to(states.device)
    gradient = torch.empty_like(states)
    start, step = 0, 1
    while start < tokens:
        chunk = slice(start, start + step)
        part = states[:, chunk].detach().requires_grad_()
        logits = head(part)
        shares = logits.detach().float().softmax(-1)
        sums = shares.cumsum(-1)
        # Rounding leaves the whole a little off 1.
        drawn = torch.searchsorted(sums, draws[:, chunk] * sums[..., -1:]).clamp_max(logits.shape[-1] - 1)
        at_logits = shares.scatter_add_(-1, drawn, torch.full_like(draws[:, chunk], -1.0)).to(logits.dtype)
        (gradient[:, chunk],) = torch.autograd.grad(logits, part, at_logits)
        start, step = start + step, max(1, _LOGITS // (batch * logits.shape[-1]))
    return gradient


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
