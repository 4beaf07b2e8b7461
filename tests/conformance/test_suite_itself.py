"""The suite must catch what it is there to catch: caches that are wrong in one way each, and refusals that are not what they say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import GrowingCache, KVCache, KVLayer
from hf_kvcaches.core.layers import GrowingLayer
from tests.conformance import model_rows, models, rows, state_rows
from tests.conformance.driving import TOLERANCES, feed, generate, tokens
from tests.conformance.entries import Entry, no_prompts, same_prompt
from tests.conformance.selection import ROWS, Row, run_row


def cache_of(layer: type[KVLayer]) -> type[KVCache]:
    """A cache class with these layers, to be found by pickle."""
    name = f"{layer.__name__}Cache"
    if name not in globals():
        globals()[name] = type(name, (KVCache,), {"make_layer": lambda self, index: layer(), "__module__": __name__})
    return globals()[name]


class ForgetsOldTokens(GrowingLayer):
    """Hands out zeros for all but the last tokens."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states)
        recent = torch.arange(keys.shape[-2], device=keys.device) >= self.seen - max(6, key_states.shape[-2])
        return keys * recent[:, None], values * recent[:, None]


class Rounds(GrowingLayer):
    """Lossy and otherwise sound: stores fewer digits."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().update(self._rounded(key_states), self._rounded(value_states))

    @staticmethod
    def _rounded(tensor: torch.Tensor) -> torch.Tensor:
        # Adding the difference as a constant lets gradients through.
        return tensor + ((tensor * 64).round() / 64 - tensor).detach()


class ReordersKeysOnly(GrowingLayer):
    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.key_buffer = self.key_buffer[beam_idx]


class RepeatsInTurn(GrowingLayer):
    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda tensor: tensor.repeat(repeats, 1, 1, 1))


class CropsOneTooFew(GrowingLayer):
    def crop(self, tokens_to_remove: int) -> None:
        super().crop(min(0, tokens_to_remove + 1))


class SharesItsForks(GrowingLayer):
    def __deepcopy__(self, memo: dict[int, Any]) -> SharesItsForks:
        fork = copy.copy(self)
        memo[id(self)] = fork
        return fork


class KeepsItsText(GrowingLayer):
    def reset(self) -> None: ...


class SavesKeysTwice(GrowingLayer):
    def export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, values = super().export_state()
        return dict.fromkeys(tensors, tensors["key_buffer"]), values


class DropsTheGraph(GrowingLayer):
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().update(key_states.detach(), value_states.detach())


MUTANTS: list[tuple[type[KVLayer], tuple[Row, ...]]] = [
    (ForgetsOldTokens, (*rows.GENERATING[:-1], state_rows.forced_tokens, state_rows.left_padded_steps, model_rows.gradients)),
    (Rounds, (rows.greedy, state_rows.left_padded_steps, state_rows.ready_mask, model_rows.peft_wrapped, model_rows.device_map)),
    (ReordersKeysOnly, (rows.beam_search, rows.beam_sampling, state_rows.reorder_cache)),
    (RepeatsInTurn, (state_rows.batch_repeat_interleave,)),
    (CropsOneTooFew, (state_rows.crop, rows.assisted_by_a_model, rows.assisted_sampling, rows.prompt_lookup)),
    (SharesItsForks, (state_rows.deepcopy_forks,)),
    (KeepsItsText, (state_rows.reset,)),
    (SavesKeysTwice, (state_rows.saved_and_loaded, model_rows.device_map_and_saving)),
    (DropsTheGraph, (model_rows.gradients,)),
]


@pytest.mark.parametrize(
    ("layer", "row"), [pytest.param(layer, row, id=f"{layer.__name__}-{row.__name__}") for layer, caught_by in MUTANTS for row in caught_by]
)
def test_a_cache_that_is_wrong_and_says_lossless_is_caught(layer: type[KVLayer], row: Row) -> None:
    entry = Entry("mutant", cache_of(layer), lossless=True)
    # A wrong state may also stop the model with a shape error, which fails the row as well.
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)):
        run_row(entry, row, "llama", torch.float32)


@pytest.mark.parametrize("row", [row for row in ROWS if row is not model_rows.compiled_forward], ids=lambda row: row.__name__)
def test_a_sound_lossy_cache_passes(row: Row) -> None:
    run_row(Entry("rounding", cache_of(Rounds), lossless=False), row, "llama", torch.float32)


@pytest.mark.parametrize("row", [rows.greedy, rows.beam_search, state_rows.crop, state_rows.reset], ids=lambda row: row.__name__)
def test_a_named_refusal_that_does_not_happen_fails(row: Row) -> None:
    entry = Entry("growing", GrowingCache, lossless=True, refuses=frozenset({f"{row.__name__}@llama"}))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        run_row(entry, row, "llama", torch.float32)
    run_row(entry, row, "llama_mha", torch.float32)


def test_drafts_are_partly_kept_and_partly_dropped() -> None:
    """Else the rows with assistants would show nothing."""
    assistant, twin, fed = models.assistant_for("llama", torch.float32), models.twin_of(models.tiny("llama")), []
    handle = twin.register_forward_pre_hook(lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    output = generate(twin, rows.PROMPTS[0], DynamicCache(config=twin.config), new=14, assistant_model=assistant)
    handle.remove()
    assert len(fed) < 14
    assert sum(fed) > output.sequences.shape[1] - 1


@pytest.mark.parametrize("family", models.FAMILIES)
def test_the_models_have_opinions(family: str) -> None:
    """No near ties within the tolerance, no text that repeats one token, and an answer that hangs on the first tokens' presence."""
    model = models.tiny(family)
    output = generate(model, rows.PROMPTS[0], DynamicCache(config=model.config), new=16)
    best = torch.stack(output.logits, 1)[0].topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 4 * TOLERANCES[torch.float32]
    assert len(set(output.sequences[0, -16:].tolist())) >= 6


def test_sliding_windows_slide() -> None:
    """In the models that have them, so that hybrid caches are tested past the window."""
    for family in ("mistral_sliding", "qwen2_mixed", "gemma2", "gemma3"):
        cache = DynamicCache(config=models.tiny(family).config)
        feed(models.tiny(family), cache, tokens(12), [12])
        assert any(layer.is_sliding and layer.keys.shape[-2] < 12 for layer in cache.layers)


def test_warm_starts_start_where_they_should() -> None:
    """From the same prompt, and from none."""
    model = models.tiny("llama")
    for make, strategy, computed in ((same_prompt, "exact", 1), (no_prompts, "cold", 13)):
        cache = make(model)
        generate(model, rows.PROMPTS[0], cache, new=1)
        assert (cache.report().strategies, cache.report().computed_tokens) == ((strategy,), computed)
