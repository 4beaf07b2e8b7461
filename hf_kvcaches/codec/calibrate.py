"""One pass of a model over texts, whose keys and values are measured, and with the metric "loss" the gradients there.

Draw a token at each position from the model's distribution there, and take the loss of these tokens. Its gradient g at some vector of a
layer has the mean 0, and to second order an error d there changes the predictions by the divergence `E (g . d)^2 / 2`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.codec.meter import MeterCache
from hf_kvcaches.codec.moments import LayerSums
from hf_kvcaches.codec.settings import Reading
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.view import require_answering
from hf_kvcaches.errors import ConfigError, KVCacheError, UnsupportedError
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.evaluate.texts import Block, Tokenized, add_up, batches_of, blocks_of, process_device, sequences

_HALF = {torch.bfloat16, torch.float16}
# Logits that exist at a time: 64 MiB in float32, 64 positions of a vocabulary of 262,144 tokens.
_LOGITS = 1 << 24


class Measurements(NamedTuple):
    """What was measured."""

    reading: Reading  # with the metric that was used
    sums: dict[int, LayerSums]  # by the index of the layer; and `geometries`
    geometries: dict[int, RotaryGeometry | None]
    layers: int  # of the model
    blocks: int
    tokens: int
    used_tokenizer: bool


def measure(model: nn.Module, tokenizer: Any, texts: Iterable[str | Sequence[int]], reading: Reading) -> Measurements:
    """Read texts; see `KVCodec.calibrate`."""
    base, config = compat.split_model(model)
    assert base is not None
    require_answering(base, "KVCodec.calibrate")
    if getattr(config, "add_cross_attention", False):
        raise UnsupportedError(f"calibrate: {type(base).__name__} has cross-attention, whose keys and values are of another kind.")
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and limit >= 2:
        reading = replace(reading, block=min(reading.block, limit))
    used_tokenizer = Tokenized(tokenizer)
    blocks = enumerate(blocks_of(sequences(texts, used_tokenizer, base), reading.block, reading.max_tokens))
    # Nobody else sees the copy, if it is one, and it is freed with the end of this function.
    base = _in_float32(base)
    with evaluating(base), _frozen(base), torch.no_grad():
        ending = ending_of(base) if reading.metric == "loss" else None
        if ending is not None and (why := _no_gradients(base, reading, ending)) is not None:
            warnings.warn(f"metric='loss' needs gradients, and {type(base).__name__} has none: {why}. Using 'plain'.", stacklevel=3)
            reading, ending = replace(reading, metric="plain"), None
        cache = MeterCache(base, reading)
        counts = _read(base, cache, blocks, isinstance(texts, Sequence), ending)
        _join_processes(base, cache)
    return Measurements(reading, cache.sums, cache.geometries, len(cache.layers), *counts, used_tokenizer.used)


def _read(base: PreTrainedModel, cache: MeterCache, blocks: Iterable[Block], listed: bool, ending: Ending | None) -> tuple[int, int]:
    """Feed this process' share of the blocks in; return how many blocks and tokens all processes read."""
    process, processes = compat.process()
    reading, total, totals = cache.reading, cache.reading.max_tokens, [0, 0]
    if listed:
        # Token ids are small, and a bar should know its end.
        blocks = list(blocks)
        total = sum(len(ids) for _, ids in blocks)
    with tqdm(total=total, unit=" tokens", desc="Calibrating", disable=not reading.progress or process > 0) as bar:

        def counted() -> Iterator[Block]:
            for number, ids in blocks:
                totals[0], totals[1] = totals[0] + 1, totals[1] + len(ids)
                if number % processes == process:
                    yield number, ids
                bar.update(len(ids))

        for numbers, ids in batches_of(counted(), reading.block, reading.batch_size):
            read_batch(base, cache, numbers, ids, ending)
            if missing := cache.geometries.keys() - cache.sums.keys():
                raise UnsupportedError(f"calibrate: layer {min(missing)} did not ask the cache's attention, so it can't be measured.")
    if totals[0] == 0:
        hint = "Pass strings or token ids; one token has nothing to attend to."
        raise ConfigError(f"texts: expected a text of at least 2 tokens, got none. {hint}")
    return totals[0], totals[1]


def read_batch(base: PreTrainedModel, cache: MeterCache, numbers: Sequence[int], ids: torch.Tensor, ending: Ending | None) -> None:
    """Feed a batch of numbered blocks in; with the model's ending, for the metric "loss"."""
    cache.reset()
    cache.draws = torch.stack([torch.rand(ids.shape[1], generator=torch.Generator().manual_seed(number)) for number in numbers])
    if ending is not None:
        # Activations wait for the backward pass in CPU memory, so that it fits wherever the forward pass does.
        saved = _activations_on_cpu(base) if base.device.type == "cuda" else contextlib.nullcontext()
        # In the caller's inference mode there would be no gradients, nor with tensors that come from there.
        with torch.inference_mode(False), torch.enable_grad():
            with saved:
                states = ending.run(ids.clone().to(base.device), cache)
            cache.follow(states, gradient_of_drawn(states, ending.head, numbers))
        return
    options: dict[str, Any] = compat.cache_kwargs(base, cache)
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        options["logits_to_keep"] = 1
    base(input_ids=ids.to(base.device), **options)


def _no_gradients(base: PreTrainedModel, reading: Reading, ending: Ending) -> str | None:
    """Why a loss can't be followed back to the keys of all layers, tried on two tokens; None if it can."""
    cache = MeterCache(base, reading)
    try:
        read_batch(base, cache, [0], torch.zeros(1, 2, dtype=torch.long), ending)
    except KVCacheError:
        raise
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return str(error).partition("\n")[0]
    finite = all(bool(each.isfinite().all()) for sums in cache.sums.values() for each in sums.sums())
    return None if finite else "they are not finite"


def _join_processes(base: PreTrainedModel, cache: MeterCache) -> None:
    """Add up the measurements of all processes, so that each has everything."""
    if compat.process()[1] == 1:
        return
    from accelerate.utils import gather_object

    if not cache.sums:  # a process without a block learns from two tokens what a layer looks like
        read_batch(base, cache, [0], torch.zeros(1, 2, dtype=torch.long), None)
        cache.sums = {index: LayerSums(sums.shape, process_device()) for index, sums in cache.sums.items()}
    add_up(part for sums in cache.sums.values() for part in sums.sums())
    for sums in cache.sums.values():
        shares = gather_object([(sums.sample.cpu(), sums.draws)])
        sums.sample, sums.draws = sums.sample[:0], sums.draws[:0]
        for sample, draws in shares:
            sums.keep(sample.to(sums.sample.device), draws)


class Ending(NamedTuple):
    """The end of a model's forward pass, in two steps, so that logits need not exist for all positions at once."""

    run: Callable[[torch.Tensor, Any], torch.Tensor]  # from token ids and a cache to the last hidden states, (batch, tokens, hidden)
    head: Callable[[torch.Tensor], torch.Tensor]  # from those of any tokens to logits


def ending_of(model: PreTrainedModel) -> Ending:
    """Return a model's ending, tried on two tokens. Where the head is no projection, scaled or capped, the states are the logits."""

    def run(module: nn.Module, output: str) -> Callable[[torch.Tensor, Any], torch.Tensor]:
        return lambda ids, cache: getattr(module(input_ids=ids, **compat.cache_kwargs(module, cache)), output)

    def head(states: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = projection(states)
        return projected * scale if cap is None else cap * torch.tanh(projected / cap)

    whole, decoder, projection = Ending(run(model, "logits"), lambda logits: logits), model.base_model, model.get_output_embeddings()
    if decoder is model or projection is None:
        return whole
    cap, scale = getattr(compat.decoder_config(model.config), "final_logit_softcapping", None), 1.0
    apart = Ending(run(decoder, "last_hidden_state"), head)
    ids = torch.zeros(1, 2, dtype=torch.long, device=compat.input_device(model))
    with contextlib.suppress(RuntimeError, TypeError, ValueError, AttributeError), torch.no_grad():
        logits, states = whole.run(ids, None), apart.run(ids, None)
        if cap is None:
            raw = projection(states).double()
            factor = float((raw * logits).sum() / raw.square().sum())
            scale = 1.0 if abs(factor - 1) < 1e-3 else factor
        found, tolerance = head(states), 16 * torch.finfo(logits.dtype).eps * float(logits.abs().max())
        if found.shape == logits.shape and torch.allclose(found.to(logits.dtype), logits, rtol=0, atol=tolerance):
            return apart
    return whole


def gradient_of_drawn(states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], seeds: Sequence[int]) -> torch.Tensor:
    """Return the gradient, at a model's last hidden states, of the loss of tokens that the model itself would continue with.

    A token is drawn at each position, and the loss is the sum over all. Each row has a seed, so that batches and processes don't matter.
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


def _in_float32(model: PreTrainedModel) -> PreTrainedModel:
    """Return a float32 copy of a half-precision model on a CPU, which is many times slower in half precision; else the model itself."""
    tensors = [*model.parameters(), *model.buffers()]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    plain = all(tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, nn.Parameter) for tensor in tensors)
    if not plain or not dtypes & _HALF or dtypes - _HALF - {torch.float32}:
        return model
    with torch.inference_mode(False):  # tensors from the caller's inference mode would have no gradients
        return nn.Module.float(copy.deepcopy(model))  # transformers' own method refuses models that say that they are quantized


def _activations_on_cpu(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Keep activations in CPU memory until the backward pass needs them; the model's weights stay on its device."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in itertools.chain(model.parameters(), model.buffers())}

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        stays = tensor.untyped_storage().data_ptr() in weights
        return tensor.device, tensor if stays else tensor.to("cpu")

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0]))


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Without gradients of parameters, which nobody asks for."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
