"""Continuous batching on a model for which caches were made and used: it reads the attention's name and gives the model another one."""

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from tests import tiny
from tests.helpers.caches import SMALL

TEXTS = [tiny.ids(20).tolist(), tiny.ids(13, seed=1).tolist()]


def batch(model: PreTrainedModel) -> list[list[int]]:
    """What continuous batching generates."""
    generation = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    paging = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, use_cuda_graph=False)
    outputs = model.generate_batch(TEXTS, generation_config=generation, continuous_batching_config=paging)
    assert all(output.error is None for output in outputs.values())
    return [output.generated_tokens for _, output in sorted(outputs.items())]


@torch.no_grad()
def test_continuous_batching_works_after_caches_of_every_kind_were_used() -> None:
    untouched, model = tiny.llama(), tiny.llama()
    attributes = set(vars(model))
    for make in SMALL.values():
        model.generate(torch.tensor([TEXTS[0]]), past_key_values=make(model), max_new_tokens=3, pad_token_id=0)
    assert type(model.config._attn_implementation) is str
    assert set(vars(model)) == attributes
    assert batch(model) == batch(untouched)
