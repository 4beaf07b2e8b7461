"""What the tests of calibration share: all keys, values and queries of a small model, held at once."""

from functools import cache
from itertools import accumulate
from typing import Any

import torch
from transformers import DynamicCache

from hf_kvcaches import KVCodec, RotaryGeometry
from hf_kvcaches.codec.calibrate import ending_of, read_batch
from hf_kvcaches.codec.meter import MeterCache, Reading
from hf_kvcaches.codec.moments import EXACT, LayerSums
from tests import tiny

IDS = tiny.ids(3, 40, seed=5)
TEXTS = IDS.tolist()


def calibrate(model: Any = None, texts: Any = TEXTS, **options: Any) -> KVCodec:
    """A codec of a few random tokens."""
    return KVCodec.calibrate(tiny.llama() if model is None else model, None, texts, **{"progress": False, "recent": 0, **options})


@torch.no_grad()
def held(model: Any, layer: int, ids: torch.Tensor = IDS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys before rotation, keys after it, and values of one Llama layer, (batch, heads, tokens, d)."""
    attention, seen = model.model.layers[layer].self_attn, {}
    hooks = [
        getattr(attention, name).register_forward_hook(lambda *a, name=name: seen.update({name: a[2]})) for name in ("q_proj", "k_proj")
    ]
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    size = model.config.head_dim or model.config.hidden_size // model.config.num_attention_heads
    query, key = (seen[name].unflatten(-1, (-1, size)).transpose(1, 2).double() for name in ("q_proj", "k_proj"))
    return query, key, cache.layers[layer].keys.double(), cache.layers[layer].values.double()


@torch.no_grad()
def measured(model: Any, ids: torch.Tensor = IDS, **reading: Any) -> MeterCache:
    """What one batch of whole sequences leaves behind, without gradients."""
    cache = MeterCache(model, Reading(**reading))
    cache.draws = torch.rand(ids.shape)
    model(input_ids=ids, past_key_values=cache)
    return cache


@torch.no_grad()
def gathered(model: Any, metric: str) -> MeterCache:
    """What calibration with all sequences leaves behind."""
    cache = MeterCache(model, Reading(metric=metric, recent=0))
    for number, row in enumerate(IDS):
        read_batch(model, cache, [number], row[None], ending_of(model) if metric == "loss" else None)
    return cache


def coded(states: torch.Tensor) -> torch.Tensor:
    """Those tokens that caches may code."""
    return states[:, :, EXACT:]


def moment(rows: torch.Tensor) -> torch.Tensor:
    """The second moment of each head, (heads, d, d)."""
    return torch.einsum("bhti,bhtj->hij", rows, rows) / (rows.shape[0] * rows.shape[2])


def rotated(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Queries or keys of positions from 0 on, as the model rotates them."""
    return RotaryGeometry.from_config(model.config).rotate(x, torch.arange(x.shape[-2]))


def same_energies(one: KVCodec, other: KVCodec) -> None:
    """Asserts that the directions of two codecs hold the same."""
    assert one.settings == other.settings
    for mine, theirs in zip(one.in_place.layers.values(), other.in_place.layers.values(), strict=True):
        mine, theirs = mine.distortions[..., 0], theirs.distortions[..., 0]
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-5 * float(theirs.max()))


def by_head(sums: LayerSums, moment: torch.Tensor) -> list[torch.Tensor]:
    """The blocks on the diagonal of a moment of a layer with one group, of keys and of values, (heads, d, d) each."""
    heads, sizes = sums.shape.heads, [size for size in sums.shape[1:3] for _ in range(sums.shape.heads)]
    assert moment.shape[0] == 1, "heads are in several groups"
    starts = [0, *accumulate(sizes[:-1])]
    blocks = [moment[0, start : start + size, start : start + size] for start, size in zip(starts, sizes, strict=True)]
    return [torch.stack(blocks[:heads]), torch.stack(blocks[heads:])]


@cache
def made(ratio: float = 0.125) -> KVCodec:
    return calibrate().at(ratio)


@cache
def states(tokens: int = 40) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Keys before rotation and values of the model's own, by layer; those of several texts one after the other."""
    found = {}
    for layer in range(4):
        _, keys, _, values = held(tiny.llama(), layer, tiny.ids(-(-tokens // 60), 60, seed=3))
        found[layer] = tuple(each.transpose(0, 1).flatten(1, 2)[:, :tokens].float() for each in (keys, values))
    return found


def packed(codec: KVCodec, own: dict[int, tuple[torch.Tensor, torch.Tensor]], left_out: int = 0) -> dict[int, torch.Tensor]:
    return codec.pack({layer: pair[0] for layer, pair in own.items()}, {layer: pair[1] for layer, pair in own.items()}, left_out)
