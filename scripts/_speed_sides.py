"""The rows of the speed table: how each cache is made, the prompts that it is timed on, and the models and artifacts that it needs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from _reuse_cells import BIT_EQUAL, aligned, begun_alike, changed_words, segments
from shared.models import Shape, random_ids
from transformers import DynamicCache

from hf_kvcaches import AdaptiveSubspace, CacheTranslator, EquipCache, GrowingCache, KVCacheError, KVCodec, SubspaceCache, TranslatedCache
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.hub import Artifact
from hf_kvcaches.kernels.arguments import Decoder
from hf_kvcaches.translate.coding import Coding
from hf_kvcaches.translate.config import TranslatorConfig, TranslatorSettings
from hf_kvcaches.translate.maps import CodeEncoder, LayerDecoder, Maps

A = TypeVar("A", bound=Artifact)
PAYLOAD = 0.025  # the default


@dataclass(frozen=True)
class Size(Shape):
    """The model, and how long to measure."""

    calibration: int = 1024  # tokens
    rounds: int = 5
    steps: int = 4  # of a round

    def labels(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("hidden", "layers", "heads", "kv_heads", "head_dim")}


QUICK = Size(64, 2, 4, 2, 16, 96, 256, calibration=512, rounds=2, steps=2)


class Bench:
    """The model of one precision, and what caches need beside it. Artifacts are kept in a folder for the next run."""

    def __init__(self, size: Size, dtype: str, device: torch.device, folder: Path | None) -> None:
        self.size, self.dtype, self.device, self.folder = size, dtype, device, folder
        self.pair = size.random(device, dtype)

    def prompt(self, batch: int, context: int) -> torch.Tensor:
        return random_ids(self.size.vocabulary, batch, context, seed=5).to(self.device)

    def full_cache(self) -> DynamicCache:
        return DynamicCache(config=self.pair.plain.config)

    @cached_property
    def codec(self) -> KVCodec:
        """Calibrated on random tokens, with the default bytes."""
        ids = random_ids(self.size.vocabulary, self.size.calibration, seed=2).tolist()
        return self._kept("codec", KVCodec, lambda: KVCodec.calibrate(self.pair.switched, None, [ids], metric="plain", progress=False))

    @cached_property
    def translator(self) -> CacheTranslator:
        """Random maps of the sizes and bytes that `CacheTranslator.fit` has by default."""
        return self._kept("translator", CacheTranslator, lambda: random_translator(self.producer(), self.pair.switched))

    def producer(self) -> Any:
        """Another model: a little noise away from the one that answers. It is made anew each time, as it takes memory."""
        model: Any = copy.deepcopy(self.pair.plain)
        random = torch.Generator(self.device).manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=random, device=self.device).to(weight)
        return model

    def _kept(self, name: str, kind: type[A], make: Callable[[], A]) -> A:
        if self.folder is None:
            return make()
        folder = self.folder / f"{name}-{self.device.type}-{self.dtype}-{self.size.layers}x{self.size.hidden}"
        with suppress(KVCacheError, OSError):  # none yet, or of another version
            loaded = kind.from_pretrained(folder)
            if loaded.fingerprint == ModelFingerprint.of(self.pair.switched):
                return loaded
        made = make()
        made.save_pretrained(folder)
        return made


def shared_layers(width: int, layers: int) -> list[tuple[int, ...]]:
    """The layers of each code, by default, for so many numbers of keys and values."""
    group = TranslatorConfig().layers_of_width(width)
    return [tuple(range(start, min(start + group, layers))) for start in range(1, layers, group)]


@lru_cache
def random_coding(width: int, layers: int) -> tuple[Coding, float, list[torch.Tensor]]:
    """The default bytes, for coefficients that fall off as those of trained models do; with its step and its directions."""
    random = torch.Generator().manual_seed(6)
    samples = [torch.randn(256, width * len(used), generator=random) * spectrum(width * len(used)) for used in shared_layers(width, layers)]
    return Coding.fit(samples, 16.0 * PAYLOAD * layers * width)


def spectrum(width: int) -> torch.Tensor:
    """The deviations of coefficients, (width,)."""
    return (1 + torch.arange(width) / (width / 64)) ** -1.0


def random_translator(producer: Any, consumer: Any) -> CacheTranslator:
    """A translator that nothing was fitted to, for times: random weights have nothing to fit to."""
    config, settings = consumer.config, TranslatorConfig(metric="plain")
    heads, dim, layers = config.num_key_value_heads, config.head_dim, config.num_hidden_layers
    width, random = 2 * heads * dim, torch.Generator().manual_seed(7)
    matrix = lambda rows, columns: torch.randn(rows, columns, generator=random) / rows**0.5  # noqa: E731
    (coding, step, chosen), encoders, decoders = random_coding(width, layers), [], []
    for code, used in enumerate(shared_layers(width, layers)):
        directions = chosen[code]
        states = matrix(width * len(used), len(directions)) * spectrum(width * len(used))[directions] / step
        encoders.append(
            CodeEncoder(f"layers.{used[0]}", used, states, torch.zeros(config.hidden_size, len(directions)), torch.zeros(len(directions)))
        )
        for layer in used:
            weights = Decoder(matrix(config.hidden_size, width), matrix(len(directions), width), torch.zeros(width))
            decoders.append(LayerDecoder(layer, code, (heads, dim, dim), weights))
    models = ModelFingerprint.of(producer), ModelFingerprint.of(consumer)
    group = settings.layers_of_width(width)
    own = TranslatorSettings(PAYLOAD, 0, settings.exact_tokens, "plain", group, tuple(range(layers)))
    return CacheTranslator(Maps(tuple(encoders), tuple(decoders), 0, coding), own, *models)


@dataclass(frozen=True)
class Source:
    """What a cache takes prompts from: opened in front of the first prompt, closed before decode steps are timed."""

    prompts: Sequence[torch.Tensor]
    cache: Callable[[], Any]
    exact: bool = True  # whether a prompt has the logits of DynamicCache
    warm_up: bool = True  # whether the first prompt takes longer, for what is loaded at the first use
    reuses: Callable[[Any], bool] = lambda cache: True  # whether a cache took what it was meant to take
    close: Callable[[], object] = lambda: None


Open = Callable[[Bench, torch.Tensor, int], Source]


def prefix(bench: Bench, first: torch.Tensor, runs: int) -> Source:
    """Nine tenths of each prompt are in a store."""
    way = segments(bench.pair, "memory", BIT_EQUAL, "exact")
    cache = way.cache()
    bench.pair.switched(input_ids=first[:, : first.shape[1] * 9 // 10], past_key_values=cache, use_cache=True, logits_to_keep=1)
    del cache
    way.settle()
    prompts = begun_alike(first, runs, bench.size.vocabulary)
    return Source(prompts, way.cache, reuses=lambda cache: cache.report().flops_saved > 0.5, close=way.close)


def similar(bench: Bench, first: torch.Tensor, runs: int) -> Source:
    """A library has a prompt with ten other words; one row."""
    way, prompts = aligned(bench.pair, "memory", BIT_EQUAL, first), changed_words(first, runs, bench.size.vocabulary)
    return Source(prompts, way.cache, exact=False, reuses=lambda cache: cache.report().strategy == "align", close=way.close)


def coded(bench: Bench, first: torch.Tensor, runs: int) -> Source:
    """Another model has read the prompt, and its codes are at hand."""
    codes = bench.translator.encode(bench.producer(), first)
    make = lambda: TranslatedCache(bench.pair.switched, bench.translator, codes)  # noqa: E731
    return Source([first] * runs, make, exact=False, reuses=lambda cache: cache.report().translated > 0)


def fresh(make: Callable[..., Any], *names: str, **options: Any) -> Open:
    """Prompts of which nothing is known: the cache starts empty.

    Args:
        *names: Of artifacts of the bench, which are calibrated or loaded before times are taken.
    """

    def opened(bench: Bench, first: torch.Tensor, runs: int) -> Source:
        artifacts = [getattr(bench, name) for name in names]
        return Source([first] * runs, lambda: make(bench.pair.switched, *artifacts, **options), warm_up=False)

    return opened


@dataclass(frozen=True)
class Side:
    """A row: the cache's class, its arguments as a user types them, and its source."""

    cache: str
    setting: str
    source: Open
    single: bool = False  # whether it is for one row alone

    def __str__(self) -> str:
        return f"{self.cache}({self.setting})"


def pruned(policy: str, more: str = "", **options: Any) -> Side:
    """A quarter of the tokens."""
    return Side("EquipCache", f"policy={policy!r}, budget=0.25{more}", fresh(EquipCache, policy=policy, budget=0.25, **options))


SIDES = (
    Side("GrowingCache", "", fresh(GrowingCache)),
    pruned("streaming"),
    Side("SubspaceCache", "codec", fresh(SubspaceCache, "codec")),
    Side("SegmentReuseCache", "store", prefix),
    Side("WarmStartCache", "library, strategy='align'", similar, single=True),
    Side("TranslatedCache", "translator, codes", coded),
    pruned("future"),
    pruned("snapkv"),
    pruned("compactor"),
    Side("SubspaceCache", "adaptive=AdaptiveSubspace(bytes_ratio=0.25)", fresh(SubspaceCache, adaptive=AdaptiveSubspace(bytes_ratio=0.25))),
    pruned("keydiff", ", page_size=16", page_size=16),
)
