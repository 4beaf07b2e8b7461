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
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.codec.forward import Ending, activations_on_cpu, ending_of, frozen, in_float32
from hf_kvcaches.codec.joint import Shape
from hf_kvcaches.codec.metric import Metric, before_rotation, gradient_of_drawn
from hf_kvcaches.codec.moments import Moments
from hf_kvcaches.codec.sides import EXACT
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.call import Call
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.rope import RotaryGeometry, undoable_rotation
from hf_kvcaches.core.view import LayerView, previous_attention, require_answering
from hf_kvcaches.errors import ConfigError, KVCacheError, UnsupportedError, require_choice, whole_number
from hf_kvcaches.evaluate.observer import PassingLayer
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.evaluate.texts import Block, Tokenized, add_up, batches_of, blocks_of, process_device, sequences
from hf_kvcaches.kernels.blocks import Visibility, block_attention

SAMPLE = 4096
"""Tokens of a layer that are kept as they are."""


@dataclass(frozen=True)
class Reading:
    """How texts are read and measured; described in `KVCodec.calibrate`. Checked when made."""

    rotation: Literal["aware", "post"] = "aware"
    metric: Metric = "loss"
    recent: int = 0
    block: int = 512
    batch_size: int = 1
    max_tokens: int | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        require_choice("rotation", self.rotation, ("aware", "post"))
        require_choice("metric", self.metric, ("loss", "plain"))
        for name, least in (("recent", 0), ("block", 2), ("batch_size", 1), ("max_tokens", 2)):
            if (value := getattr(self, name)) is not None or name != "max_tokens":
                object.__setattr__(self, name, whole_number(name, value, least))


@dataclass(frozen=True)
class Measurements:
    """What was measured.

    Args:
        reading: How; the metric is the one that was used.
        sums: By the index of the layer.
        layers: How many layers the model has.
    """

    reading: Reading
    sums: dict[int, LayerSums]
    layers: int
    blocks: int
    tokens: int
    used_tokenizer: bool


class LayerSums:
    """Sums over the tokens of one layer, but for the first of each sequence; and some of the tokens as they are.

    Attributes:
        states: Of a group's keys and values, (groups, size, size).
        total: Theirs, (groups, size), float64.
        keys: Of the loss's gradients at keys, (heads, key_dim, key_dim); and `values`.
        sample: (tokens, groups, size), those with the smallest of the random numbers in `draws`, (tokens,).
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, groups = shape, shape.heads // shape.group
        self.states = Moments((groups,), shape.size, device)
        self.total = torch.zeros(groups, shape.size, dtype=torch.float64, device=device)
        self.keys, self.values = (Moments((shape.heads,), dim, device) for dim in shape[1:])
        self.sample, self.draws = torch.empty(0, groups, shape.size, device=device), torch.empty(0)

    def observe(self, keys: torch.Tensor, values: torch.Tensor, draws: torch.Tensor) -> None:
        """Add whole sequences.

        Args:
            keys: (batch, heads, tokens, dim), as the codec sees them; and `values`.
            draws: A random number for each token, (batch, tokens).
        """
        first = min(EXACT, keys.shape[2] - 1)
        joined = self.shape.join(keys[:, :, first:].float(), values[:, :, first:].float())
        self.states.add(joined)
        self.total += joined.sum((0, 2), dtype=torch.float64)
        self.keep(joined.transpose(1, 2).flatten(0, 1), draws[:, first:].flatten())

    def observe_gradients(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add the loss's gradients at keys and values of whole sequences."""
        first = min(EXACT, keys.shape[2] - 1)
        self.keys.add(keys[:, :, first:])
        self.values.add(values[:, :, first:])

    def keep(self, tokens: torch.Tensor, draws: torch.Tensor) -> None:
        """Add to the sample; which tokens it holds in the end depends on no order."""
        draws = torch.cat([self.draws, draws])
        kept = draws.argsort()[:SAMPLE]
        self.sample, self.draws = torch.cat([self.sample, tokens])[kept.to(tokens.device)], draws[kept]

    def sums(self) -> list[torch.Tensor]:
        """Everything that adds up over processes, to be changed in place."""
        return [self.total, *(part for each in (self.states, self.keys, self.values) for part in (each.total, each.count))]

    @property
    def mean(self) -> torch.Tensor:
        """(groups, size), float64."""
        return self.total / self.states.count.clamp_min(1)

    @property
    def covariance(self) -> torch.Tensor:
        """(groups, size, size), float64."""
        return self.states.mean - self.mean[:, :, None] * self.mean[:, None]


class MeterCache(KVCache):
    """Measures the full-attention layers of a model, which attends as ever.

    Attributes:
        sums: By the index of the layer, once it has been asked.
        draws: For the tokens of the pass at hand, (batch, tokens).
        leaves: In a pass with gradients, zeros that are added to the keys and to the values of each layer, by its index.
    """

    needs_attention = True

    def __init__(self, model: PreTrainedModel, reading: Reading) -> None:
        self.reading = reading
        self.geometries: dict[int, RotaryGeometry | None] = {}
        self.sums: dict[int, LayerSums] = {}
        self.leaves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.draws = torch.empty(0)
        super().__init__(model)
        if not self.geometries:
            raise UnsupportedError(f"calibrate: {type(model).__name__} has no layers with full attention, and only those are coded.")

    def make_layer(self, layer_idx: int) -> KVLayer:
        aware = self.reading.rotation == "aware"
        self.geometries[layer_idx] = (
            undoable_rotation(self.config, layer_idx, "rotation='aware'", "rotation='post' works.") if aware else None
        )
        return _MeterLayer(self, layer_idx)

    @torch.no_grad()
    def observe(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Measure a batch of whole sequences; keys as the model rotated them, from position 0 on."""
        if layer_idx not in self.sums:
            self.sums[layer_idx] = LayerSums(Shape(keys.shape[1], keys.shape[3], values.shape[3]), keys.device)
        geometry, positions = self.geometries[layer_idx], torch.arange(keys.shape[2], device=keys.device)
        if geometry is not None:
            keys = geometry.unrotate(keys if keys.dtype == torch.float64 else keys.float(), positions)
        self.sums[layer_idx].observe(keys, values, self.draws)

    def follow(self, outputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """Measure the gradients of a loss at keys and values.

        Args:
            outputs: What the pass at hand ended in.
            gradient: Of the loss at these.
        """
        inputs = [leaf for leaves in self.leaves.values() for leaf in leaves]
        gradients = iter(torch.autograd.grad(outputs, inputs, gradient))
        with torch.no_grad():
            for layer_idx, (keys, _) in self.leaves.items():
                positions = torch.arange(keys.shape[2], device=keys.device)
                at_keys = before_rotation(self.geometries[layer_idx], next(gradients), positions)
                self.sums[layer_idx].observe_gradients(at_keys, next(gradients))
        self.leaves = {}


class _MeterLayer(PassingLayer):
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen += key_states.shape[-2]
        view = _MeterView(self.cache, self.layer_idx, key_states, value_states)
        return view, view


class _MeterView(LayerView):
    """Keys and values of one forward pass; the first attention call is measured, and not those of layers that share them."""

    def __init__(self, cache: MeterCache, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.cache, self.layer_idx, self.keys, self.values = cache, layer_idx, keys, values

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache, keys, values = self.cache, self.keys, self.values
        if not self.measured:
            self.measured = True
            cache.observe(self.layer_idx, keys.detach(), values.detach())
            if torch.is_grad_enabled():
                cache.leaves[self.layer_idx] = torch.zeros_like(keys, requires_grad=True), torch.zeros_like(values, requires_grad=True)
        if not torch.is_grad_enabled():
            return previous_attention(module, query, keys, values, mask, **kwargs)
        key_leaf, value_leaf = cache.leaves[self.layer_idx]
        if not cache.reading.recent:
            return previous_attention(module, query, keys + key_leaf, values + value_leaf, mask, **kwargs)
        call = Call(module, mask, kwargs)
        call.check("KVCodec.calibrate(recent=...)", sinks=True)
        # Of a short sequence the second half has queries that are far from something.
        recent = min(cache.reading.recent, keys.shape[2] // 2)
        return checkpoint(_attend_far, query, keys, values, key_leaf, value_leaf, call, recent, use_reentrant=False), None

    measured = False

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(f"This model reads {name!r} from the keys or values of its cache, so its attention can't be measured.")


def _attend_far(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_leaf: torch.Tensor,
    value_leaf: torch.Tensor,
    call: Call,
    recent: int,
) -> torch.Tensor:
    """Causal attention in which the leaves are part of keys and values that lie at least `recent` tokens back."""
    tokens = keys.shape[2]
    index = torch.arange(tokens, device=keys.device)
    far = index[:, None] - index >= recent
    visible = Visibility(None, tokens, None, torch.cat([far, ~far], 1)[None, None])
    all_keys, all_values = torch.cat([keys + key_leaf, keys], 2), torch.cat([values + value_leaf, values], 2)
    bias = None if call.bias is None else torch.cat([call.bias, call.bias], -1)
    output, _ = block_attention(
        query, all_keys, all_values, call.scaling, visible, softcap=call.softcap, bias=bias, sink_logits=call.sink_logits
    )
    assert output is not None
    return output


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
    return Measurements(reading, cache.sums, len(cache.layers), count, tokens, used_tokenizer.used)


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
        raise ConfigError.of("texts", "at least 2 tokens", "none", "Sequences of one token have nothing to attend to.")
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
