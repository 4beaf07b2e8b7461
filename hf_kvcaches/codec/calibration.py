"""One pass of a model over texts, with a cache that holds nothing and measures keys and values."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.codec.forward import Ending, activations_on_cpu, ending_of, in_float32
from hf_kvcaches.codec.measures import LayerMeter, Pick, Sampler
from hf_kvcaches.codec.metric import Metric, Sizes, gradient_of_drawn
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.rope import undoable_rotation
from hf_kvcaches.core.view import require_answering
from hf_kvcaches.errors import ConfigError, KVCacheError, UnsupportedError, require_choice, whole_number
from hf_kvcaches.evaluate.observer import Attended, WatchingCache
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.evaluate.texts import Tokenized, add_up, process_device, sequences

# A block's number and its token ids.
_Block = tuple[int, torch.Tensor]


@dataclass(frozen=True)
class Reading:
    """How texts are read and measured; described in `KVCodec.calibrate`. Checked when made."""

    rotation: Literal["aware", "post"] = "aware"
    metric: Metric = "loss"
    block: int = 512
    batch_size: int = 1
    max_tokens: int | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        require_choice("rotation", self.rotation, ("aware", "post"))
        require_choice("metric", self.metric, ("loss", "attention", "plain"))
        for name, least in (("block", 2), ("batch_size", 1), ("max_tokens", 2)):
            value = getattr(self, name)
            if value is None and name == "max_tokens":
                continue
            object.__setattr__(self, name, whole_number(name, value, least))


@dataclass(frozen=True)
class Measurements:
    """What was measured.

    Args:
        reading: How; the metric is the one that was used.
        meters: By the index of the layer.
        layers: How many layers the model has.
    """

    reading: Reading
    meters: dict[int, LayerMeter]
    layers: int
    blocks: int
    tokens: int
    used_tokenizer: bool


class MeterCache(WatchingCache):
    """Measures the full-attention layers of a model."""

    def __init__(self, model: PreTrainedModel, reading: Reading) -> None:
        self.reading = reading
        self.meters: dict[int, LayerMeter] = {}
        self.picks: list[Pick] = []
        # In the pass at hand, if gradients are asked for.
        self.attended: list[Attended] = []
        super().__init__(model)
        if not self.meters:
            raise UnsupportedError(f"calibrate: {type(model).__name__} has no layers with full attention, and only those are coded.")

    def make_layer(self, layer_idx: int) -> KVLayer:
        geometry = None
        if self.reading.rotation == "aware":
            geometry = undoable_rotation(self.config, layer_idx, "rotation='aware'", "rotation='post' works.")
        self.meters[layer_idx] = LayerMeter(geometry, self.reading.metric, self.reading.block)
        return super().make_layer(layer_idx)

    def watch(self, attended: Attended) -> None:
        layer_idx, module, query, keys, values, options = attended
        with torch.no_grad():
            self.meters[layer_idx].observe(module, query.detach(), keys.detach(), values.detach(), options, self.picks)
        if torch.is_grad_enabled():
            self.attended.append(attended)
            for states in (keys, values):
                if not states.requires_grad:
                    # Below the first layer nothing may ask for gradients: parameters can be frozen or quantised.
                    states.requires_grad_()

    def follow(self, outputs: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Measures the gradients of a loss at keys and values.

        Args:
            outputs: What the pass at hand ended in.
            gradient: Of the loss at the outputs; None where the output is the loss.
        """
        inputs = [states for each in self.attended for states in (each.keys, each.values)]
        gradients = iter(torch.autograd.grad(outputs, inputs, gradient))
        with torch.no_grad():
            for each in self.attended:
                self.meters[each.layer_idx].observe_gradients(next(gradients), next(gradients))


def measure(model: nn.Module, tokenizer: Any, texts: Iterable[str | Sequence[int]], reading: Reading) -> Measurements:
    """Reads texts; see `KVCodec.calibrate`."""
    base, config = compat.split_model(model)
    assert base is not None
    require_answering(base, "KVCodec.calibrate")
    if getattr(config, "add_cross_attention", False):
        raise UnsupportedError(f"calibrate: {type(base).__name__} has cross-attention, whose keys and values are of another kind.")
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and limit >= 2:
        reading = replace(reading, block=min(reading.block, limit))
    used_tokenizer = Tokenized(tokenizer)
    blocks = enumerate(_blocks(sequences(texts, used_tokenizer, base), reading.block, reading.max_tokens))
    # Nobody else sees the copy, if it is one, and it is freed with the end of this function.
    base = in_float32(base)
    with evaluating(base), torch.no_grad():
        ending = ending_of(base) if reading.metric == "loss" else None
        if ending is not None and (why := _no_gradients(base, reading, ending)) is not None:
            warnings.warn(f"metric='loss' needs gradients, and {type(base).__name__} has none: {why}. Using 'attention'.", stacklevel=3)
            reading = replace(reading, metric="attention")
        cache, sampler = MeterCache(base, reading), Sampler()
        count, tokens = _read(base, cache, sampler, blocks, isinstance(texts, Sequence), ending)
        _join_processes(cache, sampler)
    return Measurements(reading, cache.meters, len(cache.layers), count, tokens, used_tokenizer.used)


def _read(
    base: PreTrainedModel, cache: MeterCache, sampler: Sampler, blocks: Iterable[_Block], listed: bool, ending: Ending | None
) -> tuple[int, int]:
    """Feeds this process' share of the blocks in; returns how many blocks and tokens all processes read."""
    process, processes = compat.process()
    reading, total, totals = cache.reading, cache.reading.max_tokens, [0, 0]
    if listed:
        # Token ids are small, and a bar should know its end.
        blocks = list(blocks)
        total = sum(len(ids) for _, ids in blocks)
    with tqdm(total=total, unit=" tokens", desc="Calibrating", disable=not reading.progress or process > 0) as bar:

        def counted() -> Iterator[_Block]:
            for number, ids in blocks:
                totals[0], totals[1] = totals[0] + 1, totals[1] + len(ids)
                if number % processes == process:
                    yield number, ids
                bar.update(len(ids))

        for numbers, ids in _batches(counted(), reading.block, reading.batch_size):
            cache.picks = sampler.pick(numbers, ids.shape[1])
            _pass(base, cache, numbers, ids, ending)
            for index, meter in cache.meters.items():
                if meter.sizes is None:
                    raise UnsupportedError(f"calibrate: layer {index} did not ask the cache's attention, so it can't be measured.")
                meter.forget(sampler)
    if totals[0] == 0:
        raise ConfigError.of("texts", "at least 2 tokens", "none", "Sequences of one token have nothing to attend to.")
    return totals[0], totals[1]


def _pass(base: PreTrainedModel, cache: MeterCache, numbers: Sequence[int], ids: torch.Tensor, ending: Ending | None = None) -> None:
    """Feeds a batch in.

    Args:
        ending: The model's, for the metric "loss".
    """
    cache.reset()
    cache.attended = []
    if cache.reading.metric == "loss":
        assert ending is not None
        # Activations wait for the backward pass in CPU memory, so that it fits wherever the forward pass does.
        saved = activations_on_cpu(base) if base.device.type == "cuda" else contextlib.nullcontext()
        # In the caller's inference mode there would be no gradients, nor with tensors that come from there.
        with torch.inference_mode(False), torch.enable_grad():
            with saved:
                states = ending.run(ids.clone().to(base.device), cache)
            cache.follow(states, gradient_of_drawn(states, ending.head, numbers))
    else:
        options: dict[str, Any] = compat.cache_kwargs(base, cache)
        if "logits_to_keep" in inspect.signature(base.forward).parameters:
            options["logits_to_keep"] = 1
        base(input_ids=ids.to(base.device), **options)
    cache.attended = []


def _no_gradients(base: PreTrainedModel, reading: Reading, ending: Ending) -> str | None:
    """Why a loss can't be followed back to the keys of all layers, tried on two tokens; None if it can."""
    cache = MeterCache(base, reading)
    try:
        _pass(base, cache, [0], torch.zeros(1, 2, dtype=torch.long), ending)
    except KVCacheError:
        raise
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return str(error).partition("\n")[0]
    finite = all(bool(each.isfinite().all()) for meter in cache.meters.values() if meter.sizes is not None for each in meter.sums())
    return None if finite else "they are not finite"


def _blocks(sequences: Iterable[torch.Tensor], block: int, max_tokens: int | None) -> Iterator[torch.Tensor]:
    """Texts cut into sequences; a single token at the end is left out."""
    left = float("inf") if max_tokens is None else max_tokens
    for sequence in sequences:
        for piece in sequence.split(block):
            ids = piece[: int(min(left, len(piece)))]
            if len(ids) >= 2:
                left -= len(ids)
                yield ids
            if left < 2:
                return


def _batches(blocks: Iterable[_Block], block: int, batch_size: int) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Sequences of one length together, so that nothing is padded: whole blocks wait for others, short ones go alone."""
    waiting: list[_Block] = []
    for number, ids in blocks:
        if len(ids) < block:
            yield [number], ids[None]
            continue
        waiting.append((number, ids))
        if len(waiting) == batch_size:
            yield [each for each, _ in waiting], torch.stack([each for _, each in waiting])
            waiting = []
    if waiting:
        yield [each for each, _ in waiting], torch.stack([each for _, each in waiting])


def _join_processes(cache: MeterCache, sampler: Sampler) -> None:
    """Adds up the measurements of all processes, so that each has everything."""
    process, processes = compat.process()
    if processes == 1:
        return
    from accelerate.utils import broadcast_object_list, gather_object

    meters = list(cache.meters.values())
    # The first process always has a block; one without any learns from it what a layer looks like.
    if not all(gather_object([all(meter.sizes is not None for meter in meters)])):
        outputs: list[torch.Tensor | None] = [None if meter.attention is None else meter.attention.output.cpu() for meter in meters]
        shapes: list[list[tuple[Sizes | None, torch.Tensor | None]] | None] = [None]
        if process == 0:
            shapes = [[(meter.sizes, output) for meter, output in zip(meters, outputs, strict=True)]]
        for meter, (sizes, output) in zip(meters, broadcast_object_list(shapes)[0] or (), strict=True):
            if meter.sizes is None and sizes is not None:
                meter.open(sizes, process_device(), output)
    add_up(part for meter in meters for part in meter.sums())
    for kept in gather_object([sampler.kept]):
        sampler.kept |= kept
    sampler.trim()
    for meter in meters:
        meter.forget(sampler)
        for side in meter.sides:
            for sample in gather_object([{block: tokens.cpu() for block, tokens in side.sample.items()}]):
                side.sample |= {block: tokens.to(side.total.device) for block, tokens in sample.items()}
