"""The caches in the matrix. A new cache is one line in `ENTRIES`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hf_kvcaches import (
    AdaptiveSubspace,
    EquipCache,
    GrowingCache,
    KeyDiffPolicy,
    KVCache,
    KVCodec,
    Policy,
    SegmentReuseCache,
    SegmentStore,
    SnapKVPolicy,
    SubspaceCache,
    WarmStartCache,
    WarmStartLibrary,
    compat,
)
from hf_kvcaches.core.identity import identity_of
from hf_kvcaches.core.source import PrefillCall, Remaining
from hf_kvcaches.equip.policies.tokens import Tokens
from hf_kvcaches.translate.cache import TranslatedCache
from tests.translate.pairs import lossless
from tests.warmstart.warm import words

# Rows that stand or fall together, for caches that refuse the whole of it.
BEAMS = frozenset({"reorder_cache", "beam_search", "beam_sampling"})
ASSISTED = frozenset({"assisted_by_a_model", "assisted_sampling", "prompt_lookup"})
CROPPING = ASSISTED | {"crop"}
ROW_CHANGES = frozenset({"batch_select_indices", "batch_repeat_interleave", "repeated_prompt_cache"})


@dataclass(frozen=True)
class Entry:
    """A cache with one setting.

    Args:
        name: In the names of the tests.
        make: Builds the cache for a model (also a PEFT or compiled wrapper of one).
        lossless: Whether it must equal `DynamicCache`; otherwise it is held to what it must share with itself.
        every_family: Whether it is run with all families of models, or with Llamas only.
        fast: Whether its rows are in the fast tier.
        records: Whether it takes back only what it has recorded, and takes what it records one token at a time.
        without: Families that it can't be built for, and rows of a dtype ("forced_tokens@bfloat16"); tests of its own stand for these.
        refuses: Rows that must raise `UnsupportedError`, each for all models ("crop") or for one family ("crop@gemma2").
    """

    name: str
    make: Callable[[Any], KVCache]
    lossless: bool
    every_family: bool = True
    without: frozenset[str] = frozenset()
    refuses: frozenset[str] = frozenset()
    records: bool = False
    fast: bool = True

    def refuses_row(self, row: str, family: str) -> bool:
        """Whether a row must raise."""
        return row in self.refuses or f"{row}@{family}" in self.refuses


class RoundedKeyNorm(Policy):
    """Small keys. A word that comes again has a key of the same length but for rounding, which a batch and a single row do not share."""

    interval = 1

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.keys.float().norm(dim=-1).mul(-(2**10)).round() + tokens.positions / 2**10


SNAPKV = SnapKVPolicy(window=3, kernel_size=3)
# Budgets that every row outgrows; each head has as many.
EQUIP: dict[str, Any] = {
    "streaming": "streaming",
    "h2o": "h2o",
    "tova": "tova",
    "snapkv": SNAPKV,
    "keydiff": KeyDiffPolicy(interval=3),
    "own": RoundedKeyNorm(),
}
# One policy that needs nothing, one that scores by attention.
EVERYWHERE = ("streaming", "h2o")
# A file doesn't bring the code of a policy (here: of `RoundedKeyNorm`).
OWN_POLICY = frozenset({"saved_and_loaded", "device_map_and_saving"})
# A library stays where it is.
SAVING = frozenset({"saved_and_loaded", "device_map_and_saving"})
# Codes are integers, and pages are shared.
WITHOUT_GRADIENTS = frozenset({"gradients"})


# What is calibrated to a model, by its digest and settings: it takes a while, and every test makes caches.
_CALIBRATED: dict[tuple[Any, ...], Any] = {}


def calibrated(model: Any, calibrate: Callable[..., Any], **options: Any) -> Any:
    """What `calibrate` makes of a model, once for all models with the same weights."""
    key = (identity_of(compat.base_model(model)).digest, calibrate, *sorted(options.items()))
    if key not in _CALIBRATED:
        _CALIBRATED[key] = calibrate(model, **options)
    return _CALIBRATED[key]


def codec_of(model: Any, rotation: str = "aware") -> KVCodec:
    """A codec of the model's own random text, with all directions in as many bits as float32 has digits."""
    config = model.config.get_text_config(decoder=True)
    texts = [torch.randint(3, config.vocab_size, (48,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(4)]
    return KVCodec.calibrate(model, None, texts, 1.5, metric="plain", rotation=rotation, progress=False)


def subspace(model: Any, *, rotation: str = "aware", bytes_ratio: float | None = None, **options: Any) -> SubspaceCache:
    """A cache with such a codec, or with fewer bits."""
    codec = calibrated(model, codec_of, rotation=rotation)
    return SubspaceCache(model, codec if bytes_ratio is None else codec.at(bytes_ratio), **options)


def coded_equip(model: Any, **options: Any) -> EquipCache:
    """Slots as codes of a few bits."""
    return EquipCache(model, codec=calibrated(model, codec_of).at(0.25), **options)


def adaptive(model: Any, **options: Any) -> SubspaceCache:
    """A cache with bases of the text; all directions unless told otherwise."""
    config = model.config.get_text_config(decoder=True)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    follow = {"rank": size, "warmup": 16, "chunk": 16} | options.pop("follow", {})
    return SubspaceCache(model, adaptive=AdaptiveSubspace(**follow), **options)


# What one test has stored is there for the next one with the same model, so that prompts come again.
STORED = SegmentStore("memory", max_bytes="64MiB", quantization=None)


def empty_store(model: Any) -> SegmentReuseCache:
    """A cache with nothing to reuse."""
    return SegmentReuseCache(model, SegmentStore("memory"), mode="auto")


def exact_segments(model: Any, decode_with: KVCache | None = None) -> SegmentReuseCache:
    """A cache that reuses what is bit-equal."""
    return SegmentReuseCache(model, STORED, mode="exact", decode_with=decode_with)


def no_prompts(model: Any) -> WarmStartCache:
    """A cache with nothing to start from."""
    return WarmStartCache(model, WarmStartLibrary(model, words(), quantization=None))


class SeenBefore(WarmStartCache):
    """Every prompt has just been there."""

    def take_prefill(self, call: PrefillCall) -> int | Remaining:
        if self.library is not None and not self.seen and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            padding = self.log.padding(call.input_ids.shape[1])
            for pad, ids in zip(padding if isinstance(padding, list) else [], call.input_ids, strict=False):
                if len(ids) - pad > 1:
                    self.library.add(ids[pad:].tolist())
        return super().take_prefill(call)


def same_prompt(model: Any, decode_with: KVCache | None = None) -> SeenBefore:
    """A cache that takes all of a prompt but the last token from a library, bit for bit."""
    return SeenBefore(model, WarmStartLibrary(model, words(), quantization=None), decode_with=decode_with)


class ReadBefore(TranslatedCache):
    """Whatever prompt comes, another model with the same weights has just read it."""

    def take_prefill(self, call: PrefillCall) -> int:
        real = call.input_ids.shape[1] if call.attention_mask is None else int(call.attention_mask.sum(-1).min())
        coded = call.most - (call.input_ids.shape[1] - real)
        alone = self.translator is None or self.seen or torch.is_grad_enabled() or torch.compiler.is_compiling()
        self.codes = None  # of a prompt that failed
        if self.translator is not None and not alone and coded > 0:
            self.add(self.translator.encode(self.model, call.input_ids, call.attention_mask))
        return super().take_prefill(call)


def translated(model: Any, decode_with: KVCache | None = None) -> ReadBefore:
    """A cache whose every prompt comes as codes that lose nothing."""
    return ReadBefore(model, calibrated(model, lossless), decode_with=decode_with)


def composed(source: Callable[..., KVCache], holder: Callable[[Any], KVCache], model: Any) -> KVCache:
    """A source that hands its prompts to a holder."""
    return source(model, decode_with=holder(model))


HOLDERS: tuple[tuple[str, Callable[[Any], KVCache], bool], ...] = (
    ("growing", GrowingCache, True),
    ("equip", partial(EquipCache, policy=SNAPKV, budget=10, sinks=2, head_budgets=None), False),
    ("subspace", partial(subspace, sinks=1, recent=3), True),
)

# Models with no layer of full attention have nothing to calibrate.
# In bfloat16 a long text multiplies what arithmetic of another order rounds otherwise.
SUBSPACE = frozenset({"mistral_sliding", "forced_tokens@bfloat16"})
UNPADDED = frozenset({"padded_loop_without_positions"})  # codes are of tokens that are counted without their padding


def lossy(name: str, make: Callable[..., KVCache], **more: Any) -> Entry:
    """What is run on Llamas, and held to what it must share with itself."""
    return Entry(name, make, **{"lossless": False, "every_family": False, "records": True, **more})


def pruned(name: str, policy: Any, make: Callable[..., KVCache] = EquipCache, options: Any = None, **more: Any) -> Entry:
    """A budget that every row outgrows."""
    options = {"budget": 10, "sinks": 2, "head_budgets": None} | (options or {})
    return lossy(name, partial(make, policy=policy, **options), **more)


def coded(name: str, policy: Any, **more: Any) -> Entry:
    """One whose slots are integers or in shared pages."""
    return pruned(name, policy, refuses=WITHOUT_GRADIENTS, **more)


ENTRIES = [
    Entry("growing", GrowingCache, lossless=True),
    Entry("segments_empty", empty_store, lossless=True),
    Entry("segments_exact", exact_segments, lossless=True),
    Entry("warmstart_miss", no_prompts, lossless=True, refuses=SAVING),
    Entry("warmstart_identical", same_prompt, lossless=True, refuses=SAVING),
    Entry("translated", translated, lossless=True, refuses=UNPADDED),
    *(
        pruned(
            f"equip_{name}",
            policy,
            every_family=name in EVERYWHERE,
            refuses=OWN_POLICY if name == "own" else frozenset(),
            fast=name != "own",
        )
        for name, policy in EQUIP.items()
    ),
    pruned("global_future", "future", options={"head_budgets": "global"}, refuses=ASSISTED),
    pruned("global_snapkv", SNAPKV, options={"head_budgets": "global"}, refuses=ASSISTED, fast=False),
    pruned("layer_h2o", "h2o", options={"head_budgets": "layer"}, fast=False),
    # Pages are the same under all policies: one that slides, one that scores the prompt.
    coded("paged_streaming", "streaming", options={"page_size": 4}),
    coded("paged_snapkv", SNAPKV, options={"page_size": 4}),
    lossy("equip_int8", partial(EquipCache, policy="streaming", budget=10, sinks=2, storage="int8"), refuses=WITHOUT_GRADIENTS),
    *(coded(f"equip_coded_{name}", EQUIP[name], make=coded_equip, fast=name == "streaming") for name in ("streaming", "h2o", "snapkv")),
    coded("paged_coded", SNAPKV, make=coded_equip, options={"page_size": 4}),
    *(
        Entry(name, partial(subspace, **options), lossless=True, records=True, without=SUBSPACE, refuses=WITHOUT_GRADIENTS, fast=fast)
        for name, options, fast in (
            ("subspace_full", {"sinks": 1, "recent": 3}, True),
            ("subspace_full_post", {"rotation": "post", "sinks": 0, "recent": 2}, False),
        )
    ),
    lossy("subspace", partial(subspace, bytes_ratio=0.25, sinks=2, recent=4), refuses=WITHOUT_GRADIENTS),
    lossy("subspace_without_sinks", partial(subspace, bytes_ratio=0.25, sinks=0, recent=1), refuses=WITHOUT_GRADIENTS, fast=False),
    Entry(
        "subspace_adaptive_full",
        partial(adaptive, sinks=1, recent=3),
        lossless=True,
        without=SUBSPACE,
        refuses=WITHOUT_GRADIENTS | CROPPING,
    ),
    lossy(
        "subspace_adaptive",
        partial(adaptive, sinks=1, recent=2, follow={"rank": (3, 4), "rotation": "post", "sketch": "fd"}),
        records=False,
        refuses=WITHOUT_GRADIENTS | CROPPING,
    ),
    *(
        lossy(
            f"{source.__name__}_to_{name}",
            partial(composed, source, holder),
            lossless=lossless,
            without=SUBSPACE if name == "subspace" else frozenset(),
            refuses=ASSISTED.union(UNPADDED if source is translated else (), WITHOUT_GRADIENTS if name == "subspace" else ()),
            records=name != "growing",
            fast=(source, name) in ((exact_segments, "equip"), (same_prompt, "subspace"), (translated, "growing")),
        )
        for source in (exact_segments, same_prompt, translated)
        for name, holder, lossless in HOLDERS
    ),
]
