"""Continuous batching on a model for which caches were made and used: it reads the attention's name and gives the model another one."""

from __future__ import annotations

import torch
from transformers import Cache, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from hf_kvcaches import (
    AdaptiveSubspace,
    EquipCache,
    GrowingCache,
    KVCodec,
    SegmentReuseCache,
    SegmentStore,
    SubspaceCache,
    WarmStartCache,
    WarmStartLibrary,
)
from tests import tiny
from tests.warmstart.warm import words

TEXTS = [tiny.ids(20).tolist(), tiny.ids(13, seed=1).tolist()]


def batch(model: PreTrainedModel) -> list[list[int]]:
    """What continuous batching generates."""
    generation = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    paging = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, use_cuda_graph=False)
    outputs = model.generate_batch(TEXTS, generation_config=generation, continuous_batching_config=paging)
    assert all(output.error is None for output in outputs.values())
    return [output.generated_tokens for _, output in sorted(outputs.items())]


def every_cache(model: PreTrainedModel) -> list[Cache]:
    codec = KVCodec.calibrate(model, None, TEXTS, progress=False)
    library = WarmStartLibrary(model, words())
    library.add(TEXTS[0])
    return [
        GrowingCache(model),
        EquipCache(model, "streaming", 16),
        EquipCache(model, "h2o", 16, page_size=8),
        SubspaceCache(model, codec),
        SubspaceCache(model, adaptive=AdaptiveSubspace(rank=4)),
        SegmentReuseCache(model, SegmentStore(), mode="auto"),
        WarmStartCache(model, library),
    ]


@torch.no_grad()
def test_continuous_batching_works_after_caches_of_every_kind_were_used() -> None:
    untouched, model = tiny.llama(), tiny.llama()
    attributes = set(vars(model))
    for held in every_cache(model):
        model.generate(torch.tensor([TEXTS[0]]), past_key_values=held, max_new_tokens=3, pad_token_id=0)
    del held
    assert type(model.config._attn_implementation) is str
    assert set(vars(model)) == attributes
    assert batch(model) == batch(untouched)
