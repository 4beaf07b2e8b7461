"""What two processes with half of the heads each make of prompts that share text, with stores and files of their own, or refuse."""

import copy
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

from hf_kvcaches import (
    EquipCache,
    FingerprintMismatch,
    GrowingCache,
    HeadBudgets,
    KeepProbe,
    KVCache,
    KVCodec,
    ModelFingerprint,
    Policy,
    QueryStatistics,
    SegmentPolicy,
    SegmentReuseCache,
    SegmentStore,
    SubspaceCache,
    TranslatedCache,
    WarmStartCache,
    WarmStartLibrary,
    set_fingerprint,
)
from hf_kvcaches.equip.policies import PressPolicy
from hf_kvcaches.warmstart.paper.cache import SummaryLibrary
from tests import testbed, tiny
from tests.parallel.holders import attempted

NEW = 6
Told = tuple[torch.Tensor, list[int]]
Scenario = Callable[[PreTrainedModel, Path, dict[str, Any]], Told]


def prompts() -> list[torch.Tensor]:
    """One, one with the same beginning, and one with the first's end behind another text."""
    first, second = tiny.ids(1, 400, seed=1), tiny.ids(1, 80, seed=2)
    return [first, torch.cat([first[:, :300], second], 1), torch.cat([second, first[:, 100:], second[:, :20]], 1)]


def text_of(model: PreTrainedModel, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
    return model.generate(ids, past_key_values=cache, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)[:, -NEW:]


Holder = Callable[[PreTrainedModel, dict[str, Any]], KVCache]


def read_in_turn(model: PreTrainedModel, texts: Sequence[torch.Tensor], store: SegmentStore | None, cache: Callable[[], KVCache]) -> Told:
    """Each text by a new cache, and how many of its tokens were reused."""
    found, reused = [], []
    for ids in texts:
        found.append(text_of(model, ids, own := cache()))
        reused.append(own.report().reused_tokens)
        if store is not None:
            store.flush()
    return torch.cat(found), reused


def segments(holder: Holder | None = None, disk: bool = False, **options: Any) -> Scenario:
    stored = {name: options.pop(name) for name in ("quantization", "cuts") if name in options}

    def scenario(model: PreTrainedModel, folder: Path, made: dict[str, Any]) -> Told:
        store = SegmentStore(f"disk:{folder}/segments" if disk else "memory", **stored)
        decode_with = (lambda: None) if holder is None else lambda: holder(model, made)
        return read_in_turn(model, prompts(), store, lambda: SegmentReuseCache(model, store, decode_with=decode_with(), **options))

    return scenario


def warm_start(holder: Holder | None = None, **options: Any) -> Scenario:
    def scenario(model: PreTrainedModel, folder: Path, made: dict[str, Any]) -> Told:
        entries = library(model)
        entries.add(prompts()[0][0].tolist())
        decode_with = (lambda: None) if holder is None else lambda: holder(model, made)
        return read_in_turn(model, prompts(), None, lambda: WarmStartCache(model, entries, decode_with=decode_with(), **options))

    return scenario


def saved(holder: Holder) -> Scenario:
    """Each process saves its heads, loads them and goes on; the file of another process is refused."""

    def scenario(model: PreTrainedModel, folder: Path, made: dict[str, Any]) -> Told:
        cache, ids = holder(model, made), tiny.ids(1, 40)
        text = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
        sharded_model = (model.tp_size or 1) > 1
        rank = torch.distributed.get_rank() if sharded_model else 0
        cache.save(folder / f"{rank}.safetensors")
        if sharded_model:
            torch.distributed.barrier()
            with pytest.raises(FingerprintMismatch, match="heads of this process"):
                type(cache).load(folder / f"{1 - rank}.safetensors", model)
        loaded = type(cache).load(folder / f"{rank}.safetensors", model)
        return text_of(model, text, loaded), []

    return scenario


def compressed(model: PreTrainedModel, folder: Path, made: dict[str, Any]) -> Told:
    """A context that is read once more before it is pruned."""
    cache, ids = EquipCache(model, "kvzip", 24, sinks=2), tiny.ids(2, 60)
    with torch.no_grad():
        model(ids[:, :50], past_key_values=cache)
        cache.compress(model, input_ids=ids[:, :50])
    return text_of(model, ids, cache), []


def taken_over(model: PreTrainedModel, folder: Path, made: dict[str, Any]) -> Told:
    """A prompt in a cache that keeps all tokens, which another one prunes."""
    ids, full = tiny.ids(2, 60), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=full)
    return text_of(model, ids, EquipCache.from_cache(full, model, "keydiff", 24, sinks=2)), []


@torch.no_grad()
def evicted(model: PreTrainedModel, folder: Path, made: dict[str, Any]) -> Told:
    """Tokens are evicted that the heads of one process all have, and some of the other process do not; then there is room for a block."""
    cache, ids = EquipCache(model, "h2o", 64, sinks=2, recent=4, head_budgets="layer"), tiny.ids(1, 80)
    for part in ids.split([60, *[1] * 20], 1):
        model(part, past_key_values=cache)
    texts = []
    for first in range(4, 60, 7):
        fork = copy.deepcopy(cache)
        fork.evict(range(first, first + 4))
        texts += [model(part, past_key_values=fork).logits.argmax(-1) for part in (ids[:, :3], ids[:, :9])]
    return torch.cat(texts, 1), []


def lost(model: PreTrainedModel, folder: Path, made: dict[str, Any]) -> Told:
    """One process has lost what it stored: nobody reuses it, and nobody waits."""
    first, second, _ = prompts()
    store = SegmentStore("memory")
    text, _ = read_in_turn(model, [first], store, lambda: SegmentReuseCache(model, store))
    after = SegmentStore("memory") if (model.tp_size or 1) > 1 and torch.distributed.get_rank() == 1 else store
    texts, reused = read_in_turn(model, [second, second], after, lambda: SegmentReuseCache(model, after))
    return torch.cat([text, texts]), reused


SCENARIOS: dict[str, Scenario] = {
    "segments, exact": segments(),
    "segments, approximate": segments(mode="approximate"),
    "segments, auto": segments(mode="auto"),
    "segments on a disk": segments(disk=True, mode="approximate"),
    "segments, int8": segments(quantization="int8"),
    "segments, repaired in lower layers": segments(mode="approximate", policy=SegmentPolicy(repair_depth=0.5)),
    "segments, decoded by tova": segments(lambda model, _: EquipCache(model, "tova", 64, recent=4), mode="approximate"),
    "segments, decoded by a codec": segments(lambda model, made: SubspaceCache(model, made["codec"], recent=4)),
    "segments, lost by one process": lost,
    "warm start": warm_start(),
    "warm start, exact": warm_start(strategy="exact"),
    "warm start, decoded by snapkv": warm_start(lambda model, _: EquipCache(model, "snapkv", 96)),
    "kvzip": compressed,
    "from_cache": taken_over,
    "evicted tokens": evicted,
    "saved slots": saved(lambda model, _: EquipCache(model, "tova", 24, sinks=2, recent=4)),
    "saved codes": saved(lambda model, made: SubspaceCache(model, made["codec"], sinks=2, recent=4)),
}


def outcomes(folder: Path, model: PreTrainedModel, whole: PreTrainedModel, made: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """For each scenario what this process gives, and what the whole model gives, or what failed."""
    return {name: attempted(_outcome, folder / name.replace(" ", "-"), model, whole, SCENARIOS[name], made) for name in names}


def _outcome(folder: Path, model: PreTrainedModel, whole: PreTrainedModel, scenario: Scenario, made: dict[str, Any]) -> tuple[Told, Told]:
    alone = folder / f"alone-{torch.distributed.get_rank()}"
    alone.mkdir(parents=True)
    return scenario(model, folder, made), scenario(whole, alone, made)


IDS = tiny.ids(1, 24)


class MeanOfHeads(Policy):
    """Mixes heads, and does not ask for those of other processes."""

    mixes_heads = True

    def score(self, tokens: Any) -> torch.Tensor:
        return tokens.keys.norm(dim=-1).mean(1, keepdim=True)


class Press:
    """A press of kvpress, which may look at anything."""

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> torch.Tensor:
        return keys.norm(dim=-1)


def library(model: PreTrainedModel, **options: Any) -> WarmStartLibrary:
    tokenizer = AutoTokenizer.from_pretrained(testbed.FOLDER / "base")
    return WarmStartLibrary(model, tokenizer, **options)


def of_config(model: PreTrainedModel, made: dict[str, Any]) -> None:
    text_of(model, IDS, EquipCache(model.config, "keydiff", 8, sinks=2, recent=2, head_budgets="layer", positions="original"))


def as_codes(model: PreTrainedModel, made: dict[str, Any]) -> None:
    cache = GrowingCache(model)
    text_of(model, IDS, cache)
    cache.save(Path("not-written"), codec=made["codec"])


def without_fingerprint(model: PreTrainedModel, made: dict[str, Any]) -> None:
    fingerprint = ModelFingerprint.of(model).of_all_heads
    set_fingerprint(model, None)
    try:
        library(model)
    finally:
        set_fingerprint(model, fingerprint)


REFUSED: dict[str, Callable[[PreTrainedModel, dict[str, Any]], Any]] = {
    "a policy that mixes heads": lambda model, _: EquipCache(model, MeanOfHeads(), 16),
    "a press": lambda model, _: EquipCache(model, PressPolicy(Press()), 16),
    "a cache of a config": of_config,
    "a pickled cache": lambda model, _: pickle.dumps(EquipCache(model, "h2o", 16)),
    "exact tokens saved as codes": as_codes,
    "a store of codes": lambda model, made: SegmentReuseCache(model, SegmentStore("memory", quantization=made["codec"])),
    "a library of codes": lambda model, made: library(model, quantization=made["codec"]),
    "summaries": lambda model, _: SummaryLibrary(model, AutoTokenizer.from_pretrained(testbed.FOLDER / "base")),
    "a store without a fingerprint": without_fingerprint,
    "a translated cache": lambda model, made: TranslatedCache(model, made["translator"], None),
    "calibration of a codec": lambda model, _: KVCodec.calibrate(model, None, [IDS[0].tolist()], progress=False),
    "calibration of heads": lambda model, _: HeadBudgets.calibrate(model, None, [tiny.ids(64).tolist()], progress=False),
    "calibration of a probe": lambda model, _: KeepProbe.calibrate(model, None, [IDS[0].tolist()], progress=False),
    "calibration of statistics": lambda model, _: QueryStatistics.calibrate(model, None, [IDS[0].tolist()], progress=False),
}


def refusals(model: PreTrainedModel, made: dict[str, Any]) -> dict[str, str]:
    """The error of each, with its type; "" where there is none."""
    found = {}
    for name, attempt in REFUSED.items():
        try:
            attempt(model, made)
            found[name] = ""
        except Exception as error:  # told by the test
            found[name] = f"{type(error).__name__}: {error}"
    return found
