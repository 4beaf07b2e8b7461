"""What is kept of tokens that came before."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.translate import token_table
from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.token_table import TokenTable
from tests import tiny
from tests.translate.pairs import fitted, last_layer, models

VOCABULARY = 30


def made_of(ids: torch.Tensor) -> list[torch.Tensor]:
    """Rows that tell tokens apart, of two tensors: 24 bytes a token."""
    return [ids[:, None] * torch.tensor([1.0, 10.0]), ids[:, None, None].double() * torch.ones(1, 2, 1, dtype=torch.float64)]


batches = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20, unique=True), min_size=1, max_size=8)


@given(asked=batches, places=st.sampled_from([0, 1, 5, 12, 30, 1000]))
def test_rows_are_those_of_their_tokens_and_only_unknown_ones_are_run(asked: list[list[int]], places: int) -> None:
    table, known = TokenTable(VOCABULARY, torch.device("cpu")), set[int]()
    with mock.patch.object(token_table, "MOST_BYTES", 24 * places):
        for ids in asked:
            run: list[int] = []

            def make(new: torch.Tensor, run: list[int] = run) -> list[torch.Tensor]:
                run.extend(new.tolist())
                return made_of(new)

            found = table.look(torch.tensor(ids), make)
            for part, expected in zip(found, made_of(torch.tensor(ids)), strict=True):
                assert torch.equal(part, expected)
            new = [token for token in ids if token not in known]
            assert run == new
            if len(new) <= places:
                known = (known if len(known) + len(new) <= places else set()) | set(new)


def test_threads_get_their_own_rows() -> None:
    table, wrong = TokenTable(500, torch.device("cpu")), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(100):
            ids = torch.randperm(500, generator=generator)[:40]
            if not torch.equal(table.look(ids, made_of)[0], made_of(ids)[0]):
                wrong.append(seed)

    with mock.patch.object(token_table, "MOST_BYTES", 24 * 200):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_what_was_rows_stays_what_it_was() -> None:
    table = TokenTable(VOCABULARY, torch.device("cpu"))
    ids = torch.tensor([3, 4])
    first = table.look(ids, made_of)
    second = table.look(ids, made_of)
    for found in (first, second):
        found[0].zero_()
    assert torch.equal(table.look(ids, made_of)[0], made_of(ids)[0])


def test_a_run_that_fails_leaves_nothing_behind() -> None:
    table = TokenTable(VOCABULARY, torch.device("cpu"))

    def fail(new: torch.Tensor) -> list[torch.Tensor]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        table.look(torch.tensor([1]), fail)
    assert torch.equal(table.look(torch.tensor([1]), made_of)[0], made_of(torch.tensor([1]))[0])


def test_a_prompt_of_known_tokens_takes_no_pass_below_and_is_filled_as_the_first_was() -> None:
    producer, consumer = models()
    translator = fitted()
    ids = tiny.ids(1, 40, seed=11)
    codes = translator.encode(producer, ids)
    caches = []
    for _ in range(2):
        cache = TranslatedCache(consumer, translator, codes)
        with last_layer(consumer) as seen:
            consumer.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
        assert seen == [1]
        caches.append(cache)
    embedded: list[int] = []
    hook = tiny.observing(lambda module, args: embedded.append(args[0].shape[1]))
    handle = consumer.get_input_embeddings().register_forward_pre_hook(hook)
    cache = TranslatedCache(consumer, translator, translator.encode(producer, ids.flip(1)))
    cache.prefill(ids.flip(1))
    handle.remove()
    assert embedded in ([], [1])  # the first prompt's last token was not coded
    for layer, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(layer.keys, other.keys)
        assert torch.equal(layer.values, other.values)


def test_a_cache_filled_of_known_tokens_is_saved_with_the_adapters_in_force(tmp_path) -> None:
    producer, consumer = models()
    ids = tiny.ids(1, 20, seed=12)
    codes = fitted().encode(producer, ids)
    for number in range(2):
        cache = TranslatedCache(consumer, fitted(), codes)
        cache.prefill(ids)
        cache.save(tmp_path / f"{number}.safetensors")
        back = TranslatedCache.load(tmp_path / f"{number}.safetensors", consumer)
        assert back.seen == 19
