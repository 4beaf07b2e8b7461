"""What tensor parallelism does not serve, and what says so."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from hf_kvcaches import (
    EquipCache,
    GrowingCache,
    HeadBudgets,
    KeepProbe,
    KVCodec,
    ModelFingerprint,
    Policy,
    QueryStatistics,
    SegmentReuseCache,
    SegmentStore,
    TranslatedCache,
    WarmStartLibrary,
    set_fingerprint,
)
from hf_kvcaches.equip.policies import PressPolicy
from hf_kvcaches.warmstart.paper.cache import SummaryLibrary
from tests import testbed, tiny
from tests.parallel.sources import lengths, text_of

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
    return WarmStartLibrary(model, tokenizer, **{"encoder": lengths, **options})


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
    "an encoder that runs the model": lambda model, _: library(model, encoder="model"),
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
