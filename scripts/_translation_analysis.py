"""What is measured of translation beside requests: how fast a layer is rebuilt, how far errors carry, and where states lie."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from _common import synchronize
from _equip_sides import spread
from _segments_sides import Row
from torch import Tensor, nn
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.core.quantize import quantize
from hf_kvcaches.kernels.rebuild import Codes, Decoder, Span, rebuild, rebuild_reference
from hf_kvcaches.translate.stability import LayerTrace


@dataclass(frozen=True)
class Kernel:
    """A layer to rebuild."""

    side: int  # what is known of a token beside its code
    rank: int  # of the code
    width: int  # of keys and values together
    tokens: int = 900  # how many
    head_dim: int = 64  # of keys and of values

    def __str__(self) -> str:
        return f"d {self.side}, rank {self.rank}, C {self.width}"


def kernel_rows(kernel: Kernel, rounds: int, device: torch.device) -> list[Row]:
    """`rebuild` against the two matrix products alone, which decode nothing, turn nothing and write no cache."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    heads, half = kernel.width // (2 * kernel.head_dim), kernel.head_dim // 2
    make = lambda *shape: torch.randn(*shape, device=device)  # noqa: E731
    side = make(kernel.tokens, kernel.side).to(dtype)
    packed = quantize(make(kernel.tokens, kernel.rank).half().cpu(), bits=4, group=256, axis=0).to(device)
    decoder = Decoder(*(make(rows, kernel.width).div(rows**0.5).to(dtype) for rows in (kernel.side, kernel.rank)), None)
    angles = make(kernel.tokens, half)
    out = [torch.zeros(1, heads, kernel.tokens + 64, kernel.head_dim, dtype=dtype, device=device) for _ in range(2)]
    codes = Codes(packed.data, packed.scale, packed.zero, packed.group)
    tables = {"cos": angles.cos(), "sin": angles.sin()}

    def ours() -> None:
        rebuild(side, codes, decoder, out[0], out[1], [Span(0, 0, kernel.tokens)], **tables, check=False)

    _prove_kernel(kernel, side, packed, decoder, tables)
    plain, product = packed.dequantize(dtype), torch.empty(kernel.tokens, kernel.width, dtype=dtype, device=device)
    assert decoder.side is not None
    assert decoder.codes is not None
    sides, codes_weights = decoder.side, decoder.codes

    def bare() -> None:
        torch.mm(side, sides, out=product).addmm_(plain, codes_weights)

    works: dict[str, Callable[[], None]] = {"bare products": bare, "rebuild": ours}
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 3):
        for name in list(works) if turn % 2 else reversed(works):
            synchronize(device)
            begin = time.perf_counter()
            works[name]()
            synchronize(device)
            times[name].append(time.perf_counter() - begin)
    rows: list[Row] = []
    operations = 2 * kernel.tokens * (kernel.side + kernel.rank) * kernel.width
    for name, own in times.items():
        ratios = [base / mine for base, mine in zip(times["bare products"][3:], own[3:], strict=True)]
        row = {"section": "kernel", "workload": str(kernel), "side": name, "measure": "layer", "length": kernel.side, "count": rounds}
        row |= {"tokens": kernel.tokens, **spread("time", own[3:], 1e3), **spread("ratio", ratios)}
        rows.append({**row, "value": round(operations / statistics.median(own[3:]) / 1e9, 2), "unit": "Gflop/s"})
    return rows


def _prove_kernel(kernel: Kernel, side: torch.Tensor, packed: Any, decoder: Decoder, tables: dict[str, torch.Tensor]) -> None:
    """Some tokens, by the back-end that is timed and by the reference."""
    some, heads = 16, kernel.width // (2 * kernel.head_dim)
    codes = Codes(packed.dequantize(side.dtype)[:some])
    found = []
    for work in (rebuild, rebuild_reference):
        out = [torch.zeros(1, heads, some, kernel.head_dim, dtype=side.dtype, device=side.device) for _ in range(2)]
        work(side[:some], codes, decoder, out[0], out[1], [Span(0, 0, some)], **{name: part[:some] for name, part in tables.items()})
        found.append(torch.cat(out))
    apart = float((found[0].float() - found[1].float()).abs().max())
    if not apart <= (1e-4 if side.dtype == torch.float32 else 0.1):
        raise SystemExit(f"{kernel}: rebuilt keys and values differ from the reference by {apart:.2g}: nothing timed")


@dataclass
class Seen:
    """What a model's layers had while it read tokens, by layer."""

    inputs: dict[int, Tensor] = field(default_factory=dict)  # of attention, normalised, (tokens, hidden)
    hidden: dict[int, Tensor] = field(default_factory=dict)  # of the layer, (tokens, hidden); the last one is what leaves the last layer
    middle: dict[int, Tensor] = field(default_factory=dict)  # of the second norm, (tokens, hidden)
    projected: dict[int, Tensor] = field(default_factory=dict)  # what the first projection gave: queries are in it, (tokens, width)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))  # (tokens, vocabulary)


@contextmanager
def watching(model: nn.Module, seen: Seen) -> Iterator[None]:
    """While open, a pass over one prompt leaves here what its layers had. Layers of other kinds than Llama's or GPT-2's lack some of it."""
    layers = compat.decoder_layers(model)[2]

    def before(kept: dict[int, Tensor], index: int) -> Callable[..., None]:
        def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept[index] = (args[0] if args else kwargs["hidden_states"])[0].detach().clone()

        return look

    def after(kept: dict[int, Tensor], index: int) -> Callable[..., None]:
        def look(_: nn.Module, args: Any, out: Any) -> None:
            kept[index] = (out[0] if isinstance(out, tuple) else out)[0].detach().clone()

        return look

    handles = []
    for index, layer in enumerate(layers):
        attention: Any = compat.attention_module(layer)
        norm = getattr(layer, "post_attention_layernorm", getattr(layer, "ln_2", None))
        inward = next((getattr(attention, name) for name in ("q_proj", "qkv_proj", "c_attn") if hasattr(attention, name)), None)
        handles.append(layer.register_forward_pre_hook(before(seen.hidden, index), with_kwargs=True))
        handles.append(attention.register_forward_pre_hook(before(seen.inputs, index), with_kwargs=True))
        handles += [] if norm is None else [norm.register_forward_pre_hook(before(seen.middle, index), with_kwargs=True)]
        handles += [] if inward is None else [inward.register_forward_hook(after(seen.projected, index))]
    handles.append(layers[-1].register_forward_hook(after(seen.hidden, len(layers))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def seen_by(model: Any, ids: Tensor, cache: Any) -> Seen:
    """What layers have while a model reads tokens behind a cache."""
    seen = Seen()
    with watching(model, seen):
        seen.logits = model(input_ids=ids, past_key_values=cache).logits[0]
    return seen


def traces_of(model: Any, ids: Tensor) -> list[LayerTrace]:
    """Each layer's trace of a prompt, for `layer_constants`."""
    cache = DynamicCache(config=model.config)
    seen, traces = seen_by(model, ids, cache), []
    for index, layer in enumerate(cache.layers):
        keys, values = (part[0].transpose(0, 1) for part in (layer.keys, layer.values))
        queries = seen.projected[index].unflatten(-1, (-1, keys.shape[-1]))[:, : model.config.num_attention_heads]
        traces.append(LayerTrace(seen.hidden[index], seen.middle[index], queries, keys, values))
    return traces


def relative(ours: Tensor, expected: Tensor) -> float:
    """The error's size by that of what is expected."""
    return float((ours - expected).double().norm() / expected.double().norm())


def cache_matrix(layer: Any, tokens: int) -> Tensor:
    """A layer's keys and values beside each other, keys as attention sees them, (tokens, width), float64."""
    return torch.cat([part[0, :, :tokens].transpose(0, 1).flatten(1) for part in (layer.keys, layer.values)], 1).double()


# t-SNE as it is usually run: how long and how much neighbours are pulled together first, and how steps keep their direction.
_EARLY, _EXAGGERATION, _MOMENTA = 150, 12.0, (0.5, 0.8)


def neighbours(points: Tensor, perplexity: float) -> Tensor:
    """For each point how likely it is to pick each other one, (n, n): a bell whose width gives that many neighbours."""
    squares = torch.cdist(points.double(), points.double()).square()
    squares.fill_diagonal_(torch.inf)
    least = squares.amin(1, keepdim=True)
    narrow = torch.full_like(least, -60.0)
    wide = torch.full_like(least, 60.0)
    for _ in range(80):
        middle = (narrow + wide) / 2
        chances = torch.softmax(-(squares - least) * middle.exp(), dim=1)
        entropy = -torch.xlogy(chances, chances).sum(1, keepdim=True)
        too_many = entropy > math.log(perplexity)
        narrow, wide = torch.where(too_many, middle, narrow), torch.where(too_many, wide, middle)
    return chances


def tsne(points: Tensor, perplexity: float = 30.0, steps: int = 500) -> Tensor:
    """Places in the plane where what is near stays near, (n, 2): exact t-SNE (van der Maaten and Hinton, 2008), from principal components."""
    count = len(points)
    wanted = neighbours(points, min(perplexity, (count - 1) / 3))
    wanted = ((wanted + wanted.T) / (2 * count)).clamp_min(1e-12)
    centred = points.double() - points.double().mean(0)
    places = centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:2].T
    places = places / places[:, :1].std().clamp_min(1e-300) * 1e-4
    speed, gains = torch.zeros_like(places), torch.ones_like(places)
    rate = max(count / _EXAGGERATION / 4, 50.0)
    for step in range(steps):
        close = 1 / (1 + torch.cdist(places, places).square())
        close.fill_diagonal_(0)
        pull = (wanted * (_EXAGGERATION if step < _EARLY else 1) - close / close.sum()) * close
        slope = 4 * (pull.sum(1, keepdim=True) * places - pull @ places)
        gains = torch.where(slope.sign() == speed.sign(), gains * 0.8, gains + 0.2).clamp_min(0.01)
        speed = _MOMENTA[step >= _EARLY] * speed - rate * gains * slope
        places = places + speed
        places = places - places.mean(0)
    return places
