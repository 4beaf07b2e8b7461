"""One pass of a model over texts, with a cache that holds nothing and measures what goes by."""

from __future__ import annotations

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
from hf_kvcaches.core.answerable import require_answering
from hf_kvcaches.core.attention import LayerView, previous_attention
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.calibrating import Tokenized, add_up, process_device, sequences
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.layers import KVLayer, PassingLayer
from hf_kvcaches.core.metric import Sizes, loss_of_drawn
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.verify import evaluating
from hf_kvcaches.errors import ConfigError, KVCacheError, UnsupportedError, whole_number
from hf_kvcaches.subspace.bases import BasesSettings, SubspaceBases
from hf_kvcaches.subspace.fitting import Choices, fit
from hf_kvcaches.subspace.measuring import LayerMeter, Pick, Sampler

# A block's number and its token ids.
_Block = tuple[int, torch.Tensor]


@dataclass(frozen=True)
class Reading:
    """How texts are read; described in `SubspaceBases.calibrate`. Checked when made."""

    block: int = 512
    batch_size: int = 1
    max_tokens: int | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        for name, least in (("block", 2), ("batch_size", 1), ("max_tokens", 2)):
            value = getattr(self, name)
            if value is None and name == "max_tokens":
                continue
            object.__setattr__(self, name, whole_number(name, value, least))


class _MeterView(LayerView):
    """Keys and values of one forward pass, which attends as ever and is measured on the way."""

    def __init__(self, cache: MeterCache, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.cache, self.layer_idx, self.keys, self.values = cache, layer_idx, keys, values
        self.outputs: list[torch.Tensor] = []

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        traced = torch.is_grad_enabled()
        # Layers that share another's keys come back with the same view.
        if not self.outputs:
            with torch.no_grad():
                meter, keys, values = self.cache.meters[self.layer_idx], self.keys.detach(), self.values.detach()
                meter.observe(module, query.detach(), keys, values, kwargs, self.cache.picks)
            if traced:
                self.cache.views.append(self)
            if traced and not self.keys.requires_grad:
                # Below the first layer nothing may ask for gradients: parameters can be frozen or quantised.
                self.keys.requires_grad_()
        output, weights = previous_attention(module, query, self.keys, self.values, mask, **kwargs)
        self.outputs.append(output)
        return output, weights

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(f"This model reads {name!r} from the keys or values of its cache, so its attention can't be measured.")


class _MeterLayer(PassingLayer):
    """Holds nothing, and hands out the view that measures."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen += key_states.shape[-2]
        view = _MeterView(self.cache, self.layer_idx, key_states, value_states)
        return view, view


class MeterCache(KVCache):
    """Lets a model attend as ever to the sequence at hand, and measures its full-attention layers."""

    needs_attention = True

    def __init__(self, model: PreTrainedModel, choices: Choices, block: int) -> None:
        self.choices, self.block = choices, block
        self.meters: dict[int, LayerMeter] = {}
        self.picks: list[Pick] = []
        # Of the pass at hand, if gradients are asked for.
        self.views: list[_MeterView] = []
        super().__init__(model)
        if not self.meters:
            raise UnsupportedError(f"calibrate: {type(model).__name__} has no layers with full attention, and only those have bases.")

    def make_layer(self, layer_idx: int) -> KVLayer:
        geometry = _geometry(self.config, layer_idx) if self.choices.rotation == "aware" else None
        self.meters[layer_idx] = LayerMeter(geometry, self.choices.metric == "attention", self.block)
        return _MeterLayer(self, layer_idx)

    def follow(self, loss: torch.Tensor) -> None:
        """Measures what a loss, which the pass at hand ended in, asks of keys and of attention's outputs."""
        traced = [each for view in self.views for each in (view.keys, *view.outputs)]
        gradients = iter(torch.autograd.grad(loss, traced))
        with torch.no_grad():
            for view in self.views:
                meter = self.meters[view.layer_idx]
                meter.pull_keys(view.keys.detach(), next(gradients))
                for output in view.outputs:
                    meter.pull_outputs(output.detach(), next(gradients))


def _geometry(config: Any, layer_idx: int) -> RotaryGeometry | None:
    """How a layer rotates its keys; None if it does not."""
    geometry = RotaryGeometry.from_config(config, layer_idx=layer_idx)
    if geometry.kind in ("learned", "none", "alibi"):
        return None
    if geometry.kind != "rope" or geometry.refusal is not None:
        why = geometry.refusal or f"the config does not say how keys carry positions (kind {geometry.kind!r})"
        raise UnsupportedError(f"rotation='aware': {why}. rotation='post' works.")
    return geometry


def calibrate(model: nn.Module, tokenizer: Any, texts: Iterable[str | Sequence[int]], choices: Choices, reading: Reading) -> SubspaceBases:
    """See `SubspaceBases.calibrate`."""
    base, config = compat.split_model(model)
    assert base is not None
    require_answering(base, "SubspaceBases.calibrate")
    if getattr(config, "add_cross_attention", False):
        raise UnsupportedError(f"calibrate: {type(base).__name__} has cross-attention, whose keys and values are of another kind.")
    limit = getattr(config, "max_position_embeddings", None)
    block = min(reading.block, limit) if isinstance(limit, int) and limit >= 2 else reading.block
    used_tokenizer = Tokenized(tokenizer)
    if choices.metric == "loss" and (why := _no_gradients(base, choices)) is not None:
        warnings.warn(f"metric='loss' needs gradients, and {type(base).__name__} has none: {why}. Using 'attention'.", stacklevel=3)
        choices = replace(choices, metric="attention")
    blocks: Iterable[_Block] = enumerate(_blocks(sequences(texts, used_tokenizer, base), block, reading.max_tokens))
    with evaluating(base), torch.no_grad():
        cache = MeterCache(base, choices, block)
        sampler = Sampler()
        count, tokens = _read(base, cache, sampler, blocks, reading, isinstance(texts, Sequence))
        _join_processes(cache, sampler)
        layers = dict(zip(cache.meters, fit(list(cache.meters.values()), choices), strict=True))
    sizes = {index: meter.sizes for index, meter in cache.meters.items() if meter.sizes is not None}
    settings = BasesSettings(
        rule=choices.rule,
        rotation=choices.rotation,
        metric=choices.metric,
        gamma=choices.gamma,
        share=choices.share,
        multiple_of=choices.multiple_of,
        percentile=choices.percentile,
        head_dim=next(iter(sizes.values())).key_dim,
        block=block,
        blocks=count,
        tokens=tokens,
        unprojected=tuple(index for index, each in sizes.items() if not each.projected and choices.metric == "attention"),
    )
    fingerprint = ModelFingerprint.of(model, tokenizer if used_tokenizer.used else None, any_precision=True)
    return SubspaceBases(tuple(layers.get(index) for index in range(len(cache.layers))), settings, fingerprint)


def _read(
    base: PreTrainedModel, cache: MeterCache, sampler: Sampler, blocks: Iterable[_Block], reading: Reading, listed: bool
) -> tuple[int, int]:
    """Feeds this process' share of the blocks in; returns how many blocks and tokens all processes read."""
    own, processes = compat.process()
    total = reading.max_tokens
    if listed:
        # Token ids are small, and a bar should know its end.
        blocks = list(blocks)
        total = sum(len(ids) for _, ids in blocks)
    totals = [0, 0]
    with tqdm(total=total, unit=" tokens", desc="Calibrating", disable=not reading.progress or own > 0) as bar:

        def counted() -> Iterator[_Block]:
            for number, ids in blocks:
                totals[0], totals[1] = totals[0] + 1, totals[1] + len(ids)
                if number % processes == own:
                    yield number, ids
                bar.update(len(ids))

        for numbers, ids in _batches(counted(), cache.block, reading.batch_size):
            cache.picks = sampler.pick(numbers, ids.shape[1])
            _pass(base, cache, numbers, ids)
            for meter in cache.meters.values():
                meter.forget(sampler)
            if numbers[0] == own:
                # The first one: what can't work should not take an hour to say so.
                cache.choices.check_sizes(_measured(cache))
    if totals[0] == 0:
        raise ConfigError.of("texts", "at least 2 tokens", "none", "Sequences of one token have nothing to attend to.")
    return totals[0], totals[1]


def _pass(base: PreTrainedModel, cache: MeterCache, numbers: Sequence[int], ids: torch.Tensor) -> None:
    """Feeds a batch in."""
    cache.reset()
    cache.views = []
    options: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
    if cache.choices.metric == "loss":
        # In the caller's inference mode there would be no gradients, nor with tensors that come from there.
        with torch.inference_mode(False), torch.enable_grad():
            logits = base(input_ids=ids.clone().to(base.device), **options).logits
            cache.follow(loss_of_drawn(logits, numbers))
    else:
        if "logits_to_keep" in inspect.signature(base.forward).parameters:
            options["logits_to_keep"] = 1
        base(input_ids=ids.to(base.device), **options)
    cache.views = []


def _no_gradients(base: PreTrainedModel, choices: Choices) -> str | None:
    """Why a loss can't be followed back to the keys of all layers, tried on two tokens; None if it can."""
    with evaluating(base):
        cache = MeterCache(base, choices, 2)
        try:
            _pass(base, cache, [0], torch.zeros(1, 2, dtype=torch.long))
        except KVCacheError:
            raise
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            return str(error).partition("\n")[0]
    finite = all(bool(each.isfinite().all()) for meter in cache.meters.values() if meter.sizes is not None for each in meter.sums())
    return None if finite else "they are not finite"


def _measured(cache: MeterCache) -> list[Sizes]:
    """The sizes of all layers."""
    missing = [index for index, meter in cache.meters.items() if meter.sizes is None]
    if missing:
        raise UnsupportedError(f"calibrate: the layers {missing} did not ask the cache's attention, so they can't be measured.")
    return [meter.sizes for meter in cache.meters.values() if meter.sizes is not None]


def _blocks(sequences: Iterable[torch.Tensor], block: int, max_tokens: int | None) -> Iterator[torch.Tensor]:
    """Texts cut into sequences; what is left of one token is left out."""
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
    """Adds up what all processes measured, so that each has everything."""
    own, processes = compat.process()
    if processes > 1:
        from accelerate.utils import broadcast_object_list, gather_object

        meters = list(cache.meters.values())
        # The first process always has a block; one without any learns from it what a layer looks like.
        if not all(gather_object([all(meter.sizes is not None for meter in meters)])):
            outputs = [None if meter.attention is None else meter.attention.output.cpu() for meter in meters]
            known = [[(meter.sizes, output) for meter, output in zip(meters, outputs, strict=True)]] if own == 0 else [None]
            for meter, (sizes, output) in zip(meters, broadcast_object_list(known)[0] or (), strict=True):
                if meter.sizes is None:
                    meter.open(sizes, process_device(), output)
        add_up(part for meter in meters for part in meter.sums())
        for kept in gather_object([sampler.kept]):
            sampler.kept |= kept
        sampler.trim()
        for meter in cache.meters.values():
            meter.forget(sampler)
            for sample in gather_object([{block: tokens.to("cpu") for block, tokens in meter.sample.items()}]):
                meter.sample |= {block: tokens.to(meter.value_weight.device) for block, tokens in sample.items()}
    for meter in cache.meters.values():
        # Summed in one order, whoever read which block.
        meter.sample = dict(sorted(meter.sample.items()))
