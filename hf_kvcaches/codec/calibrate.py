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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.codec.fixed import FixedForm, FixedLayer
from hf_kvcaches.codec.joint import JointBasis, PackedForm
from hf_kvcaches.codec.meter import MeterCache, Reading
from hf_kvcaches.codec.moments import LayerStatistics, LayerSums, Metric
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.view import require_answering
from hf_kvcaches.errors import ConfigError, KVCacheError, UnsupportedError
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.evaluate.texts import Block, Tokenized, add_up, batches_of, blocks_of, process_device, sequences
from hf_kvcaches.kernels.code_format import TILE

_HALF = {torch.bfloat16, torch.float16}
# Logits that exist at a time: 64 MiB in float32, 64 positions of a vocabulary of 262,144 tokens.
_LOGITS = 1 << 24


# Numbers of a basis that attention reads: with more, less is lost, and projecting the query takes longer than all else.
_LARGEST_BASIS = 512


@dataclass(frozen=True)
class CodecSettings:
    """How a codec was made."""

    rotation: Literal["aware", "post"]  # whether keys are coded before ("aware") or after ("post") the model rotates them
    metric: Metric  # by which errors count
    recent: int  # how many of the newest tokens are expected to be exact
    bytes_ratio: float  # the share of the bytes of exact keys and values in 16 bits that was asked for
    block: int  # tokens of the longest sequence that was read
    blocks: int  # sequences that were read
    tokens: int  # and their tokens


def calibrated(
    model: nn.Module, tokenizer: Any, texts: Iterable[str | Sequence[int]], ratio: float, reading: Reading
) -> tuple[FixedForm, FixedForm, PackedForm, CodecSettings, int, ModelFingerprint]:
    """What a `KVCodec` is made of; see its `calibrate`."""
    measured, used_tokenizer = measure(model, tokenizer, texts, reading)
    fingerprint, reading = ModelFingerprint.of(model, tokenizer if used_tokenizer else None), measured.reading
    bases, in_place, slots = dict[int, JointBasis](), dict[int, FixedLayer](), dict[int, FixedLayer]()
    with torch.no_grad():
        for index, sums in sorted(measured.sums.items()):
            statistics = LayerStatistics.of(sums, reading.metric)
            grouped = statistics.in_shape(sums.shape.in_groups(_LARGEST_BASIS))
            bases[index] = JointBasis.fit(statistics, len(measured.sums))
            in_place[index] = FixedLayer.fit(grouped.within_tiles(measured.geometries[index], TILE))
            slots[index] = FixedLayer.fit(statistics.in_shape(sums.shape._replace(group=1)))
        forms = FixedForm(in_place).at(ratio), FixedForm(slots).at(ratio), PackedForm.fit(bases, ratio)
    counts = measured.blocks, measured.tokens
    settings = CodecSettings(reading.rotation, reading.metric, reading.recent, ratio, reading.block, *counts)
    return *forms, settings, len(measured.layers), fingerprint


def measure(model: nn.Module, tokenizer: Any, texts: Iterable[str | Sequence[int]], reading: Reading) -> tuple[MeterCache, bool]:
    """Read texts; return what was measured, with the metric that was used, and whether the tokenizer was. See `KVCodec.calibrate`."""
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
            warnings.warn(f"metric='loss' needs gradients, and {type(base).__name__} has none: {why}. Using 'plain'.", stacklevel=4)
            reading, ending = replace(reading, metric="plain"), None
        cache = MeterCache(base, reading)
        _read(base, cache, list(blocks) if isinstance(texts, Sequence) else blocks, ending)
        _join_processes(base, cache)
    return cache, used_tokenizer.used


def _read(base: PreTrainedModel, cache: MeterCache, blocks: Iterable[Block], ending: Ending | None) -> None:
    """Feed this process' share of the blocks in."""
    (process, processes), reading = compat.process(), cache.reading
    # Token ids are small, and a bar should know its end.
    total = sum(len(ids) for _, ids in blocks) if isinstance(blocks, list) else reading.max_tokens
    with tqdm(total=total, unit=" tokens", desc="Calibrating", disable=not reading.progress or process > 0) as bar:

        def counted() -> Iterator[Block]:
            for number, ids in blocks:
                cache.blocks, cache.tokens = cache.blocks + 1, cache.tokens + len(ids)
                if number % processes == process:
                    yield number, ids
                bar.update(len(ids))

        for numbers, ids in batches_of(counted(), reading.block, reading.batch_size):
            read_batch(base, cache, numbers, ids, ending)
            if missing := cache.geometries.keys() - cache.sums.keys():
                raise UnsupportedError(f"calibrate: layer {min(missing)} did not ask the cache's attention, so it can't be measured.")
    if not cache.blocks:
        hint = "Pass strings or token ids; one token has nothing to attend to."
        raise ConfigError(f"texts: expected a text of at least 2 tokens, got none. {hint}")


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
    """Return a model's ending, tried on two tokens. Where logits are more than a projection, they stand for the states."""

    def run(module: nn.Module, output: str, ids: torch.Tensor, cache: Any) -> Any:
        return getattr(module(input_ids=ids, **compat.cache_kwargs(module, cache)), output)

    whole = Ending(partial(run, model, "logits"), lambda logits: logits)
    decoder, head = model.base_model, model.get_output_embeddings()
    if decoder is model or head is None:
        return whole
    apart = Ending(partial(run, decoder, "last_hidden_state"), head)
    ids = torch.tensor([[1, 2]], device=compat.input_device(model))  # 0 may be padding, whose logits are 0 however they are capped
    with contextlib.suppress(RuntimeError, TypeError, ValueError, AttributeError), torch.no_grad():
        logits, found = whole.run(ids, None), head(apart.run(ids, None))
        tolerance = 16 * torch.finfo(logits.dtype).eps * float(logits.abs().max())
        # In bfloat16 this tolerance is an eighth of the largest logit. Rounding errors cancel in a fitted scale; caps and scales don't.
        scale = float((found.double() * logits).sum() / found.double().square().sum())
        if abs(scale - 1) < 1e-3 and found.shape == logits.shape and torch.allclose(found.to(logits.dtype), logits, rtol=0, atol=tolerance):
            return apart
    return whole


def gradient_of_drawn(states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], seeds: Sequence[int]) -> torch.Tensor:
    """The gradient, at last hidden states, of the loss of a token drawn at each position; each row has a seed, whatever batch it is in."""
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
    """A float32 copy of a half-precision model on a CPU, which is many times slower in half precision; else the model itself."""
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
