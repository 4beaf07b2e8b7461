"""The holders that tensor parallelism serves, and what two processes with half of the heads each make of a text."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_kvcaches import AdaptiveSubspace, EquipCache, ExpectedAttentionPolicy, GrowingCache, SnapKVPolicy, SubspaceCache
from tests import tiny
from tests.helpers.prompts import greedy

PROMPT, NEW, BUDGET = 44, 10, 24
Make = Callable[[PreTrainedModel, dict[str, Any]], Cache]


def whole_model() -> PreTrainedModel:
    """Two query heads to a KV head, two KV heads to a process, the vocabulary of the testbed's tokenizer, and room for long prompts."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "head_dim": 16}
    return tiny.llama(vocab_size=2048, max_position_embeddings=1024, **shape)


def equip(policy: Any, budget: Any = BUDGET, **options: Any) -> Make:
    return lambda model, _: EquipCache(model, policy, budget, **{"sinks": 2, **options})


def adaptive(**options: Any) -> Make:
    settings = AdaptiveSubspace(warmup=16, chunk=16, **options)
    return lambda model, _: SubspaceCache(model, adaptive=settings, sinks=2, recent=4)


HOLDERS: dict[str, Make] = {
    "dynamic": lambda model, _: DynamicCache(config=model.config),
    "growing": lambda model, _: GrowingCache(model),
    **{name: equip(name, recent=4) for name in ("streaming", "h2o", "tova", "keydiff", "compactor", "future")},
    "snapkv": equip(SnapKVPolicy(window=8), recent=8),
    "snapkv, equal heads": equip(SnapKVPolicy(window=8), recent=8, head_budgets=None),
    "expected_attention": equip("expected_attention", recent=4),
    "statistics": lambda model, made: EquipCache(
        model, ExpectedAttentionPolicy(statistics=made["statistics"], interval=4), BUDGET, sinks=2, recent=4
    ),
    "probe": lambda model, made: EquipCache(model, made["probe"], BUDGET, sinks=2, recent=4),
    "refit": equip("future", recent=4, refit=True),
    "fraction": equip("tova", 0.5, recent=4),
    "layer": equip("h2o", head_budgets="layer", recent=4),
    "layer of snapkv": equip(SnapKVPolicy(window=8), head_budgets="layer", recent=8),
    "head budgets": lambda model, made: EquipCache(model, "keydiff", BUDGET, sinks=2, recent=4, head_budgets=made["heads"]),
    "head budgets of h2o": lambda model, made: EquipCache(model, "h2o", BUDGET, sinks=2, recent=4, head_budgets=made["heads"]),
    "pages": equip("h2o", recent=4, page_size=8),
    "pages of tova": equip("tova", recent=4, page_size=8),
    "original positions": equip("tova", recent=4, positions="original"),
    "int8": equip("h2o", recent=4, storage="int8"),
    "coded slots": lambda model, made: EquipCache(model, "tova", BUDGET, sinks=2, recent=4, codec=made["codec"]),
    "coded pages": lambda model, made: EquipCache(model, "h2o", BUDGET, sinks=2, recent=4, codec=made["codec"], page_size=8),
    "codec": lambda model, made: SubspaceCache(model, made["codec"], sinks=2, recent=4),
    "rank": adaptive(rank=(3, 4)),
    "bytes_ratio": adaptive(bytes_ratio=0.3),
    "energy": adaptive(energy=0.8),
    "frequent directions": adaptive(bytes_ratio=0.3, sketch="fd", sketch_size=16),
}


def differences(model: PreTrainedModel, whole: PreTrainedModel, made: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """For each holder whether this process gives the text of the whole model, and how far logits are apart, or what failed."""
    return {name: attempted(_difference, model, whole, HOLDERS[name], made) for name in names}


def attempted(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or what it raises as a text: the other process may be in the same state, and goes on."""
    try:
        return function(*arguments)
    except Exception as error:  # told by the test
        return "".join(traceback.format_exception(error))


def _difference(model: PreTrainedModel, whole: PreTrainedModel, make: Make, made: dict[str, Any]) -> tuple[bool, float]:
    texts, logits = zip(*(generated(each, make(each, made)) for each in (model, whole)), strict=True)
    return torch.equal(*texts), float((logits[0] - logits[1]).abs().max())


def generated(model: PreTrainedModel, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    """The text behind two prompts, one of them padded, and the logits of each token."""
    ids, mask = tiny.ids(2, PROMPT), torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :5] = 0
    made = greedy(model, ids, cache, NEW, mask)
    return made.sequences, torch.stack(made.logits)
