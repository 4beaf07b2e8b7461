"""One pass of a model over texts, whose keys and values are measured."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.codec.forward import Ending, activations_on_cpu, ending_of, frozen, gradient_of_drawn, in_float32
from hf_kvcaches.codec.meter import LayerSums, MeterCache, Reading
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.view import require_answering
from hf_kvcaches.errors import ConfigError, KVCacheError, UnsupportedError
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.evaluate.texts import Block, Tokenized, add_up, batches_of, blocks_of, process_device, sequences


@dataclass(frozen=True)
class Measurements:
    """What was measured.

    Args:
        reading: How; the metric is the one that was used.
        sums: By the index of the layer.
        geometries: How each of these layers rotates keys; None where it does not, or keys are taken as they are.
        layers: How many layers the model has.
    """

    reading: Reading
    sums: dict[int, LayerSums]
    geometries: dict[int, RotaryGeometry | None]
    layers: int
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
    base = in_float32(base)
    with evaluating(base), frozen(base), torch.no_grad():
        ending = ending_of(base) if reading.metric == "loss" else None
        if ending is not None and (why := _no_gradients(base, reading, ending)) is not None:
            warnings.warn(f"metric='loss' needs gradients, and {type(base).__name__} has none: {why}. Using 'plain'.", stacklevel=3)
            reading, ending = replace(reading, metric="plain"), None
        cache = MeterCache(base, reading)
        count, tokens = _read(base, cache, blocks, isinstance(texts, Sequence), ending)
        _join_processes(base, cache)
    return Measurements(reading, cache.sums, cache.geometries, len(cache.layers), count, tokens, used_tokenizer.used)


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
            _pass(base, cache, numbers, ids, ending)
            for index in cache.geometries:
                if index not in cache.sums:
                    raise UnsupportedError(f"calibrate: layer {index} did not ask the cache's attention, so it can't be measured.")
    if totals[0] == 0:
        raise ConfigError(
            "texts: expected a text of at least 2 tokens, got none. Pass strings or token ids; one token has nothing to attend to."
        )
    return totals[0], totals[1]


def _pass(base: PreTrainedModel, cache: MeterCache, numbers: Sequence[int], ids: torch.Tensor, ending: Ending | None) -> None:
    """Feed a batch in; with the model's ending, for the metric "loss"."""
    cache.reset()
    cache.draws = torch.stack([torch.rand(ids.shape[1], generator=torch.Generator().manual_seed(number)) for number in numbers])
    if ending is not None:
        # Activations wait for the backward pass in CPU memory, so that it fits wherever the forward pass does.
        saved = activations_on_cpu(base) if base.device.type == "cuda" else contextlib.nullcontext()
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
        _pass(base, cache, [0], torch.zeros(1, 2, dtype=torch.long), ending)
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
        _pass(base, cache, [0], torch.zeros(1, 2, dtype=torch.long), None)
        cache.sums = {index: LayerSums(sums.shape, process_device()) for index, sums in cache.sums.items()}
    add_up(part for sums in cache.sums.values() for part in sums.sums())
    for sums in cache.sums.values():
        shares = gather_object([(sums.sample.cpu(), sums.draws)])
        sums.sample, sums.draws = sums.sample[:0], sums.draws[:0]
        for sample, draws in shares:
            sums.keep(sample.to(sums.sample.device), draws)
