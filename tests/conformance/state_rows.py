"""The rows of the matrix that handle the cache itself: cut, copied, moved, stored, reordered. Tokens are given, never chosen."""

import contextlib
import copy
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import EquipCache
from hf_kvcaches.errors import UnsupportedError
from tests.conformance import models
from tests.conformance.driving import close, feed, reference, replay, rows_in, tokens
from tests.conformance.entries import Entry
from tests.helpers.prompts import left_padded

PROMPTS = tuple(tokens(length, seed=length) for length in (12, 8, 10))
WARM = [10, 1, 1]


def _warm(model: PreTrainedModel, cache: Any, text: torch.Tensor) -> torch.Tensor:
    """A prompt and two decoding steps."""
    return feed(model, cache, text, WARM)


def _expect(entry: Entry, model: PreTrainedModel, dtype: torch.dtype, cache: Any, text: torch.Tensor, more: torch.Tensor) -> None:
    """Asserts that a cache goes on, token by token, as one does that saw `text` and nothing else."""
    actual = feed(model, cache, more)[0]
    whole = torch.cat([text, more], dim=1)
    spans = [*WARM, *[1] * (whole.shape[1] - sum(WARM))]
    close(entry, dtype, actual, replay(entry, model, whole, spans)[-more.shape[1] :], "logits of what follows")


def forced_tokens(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """A longer text in spans of many lengths, past the end of every buffer and window; all logits, not only the last ones."""
    spans = [40, 1, 30, 1, 1, 35, 1, 2, 40]
    text = tokens(sum(spans), seed=2, rows=2)
    cache = entry.make(model)
    actual = feed(model, cache, text, spans, keep=0)
    assert torch.isfinite(actual).all()
    plain, other = reference(entry, model)
    close(entry, dtype, actual, feed(plain, other, text, spans, keep=0))


def left_padded_steps(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """In low precision what a lossy cache drops may hang on the last bit, and so differ between a batch and single rows."""
    ids, mask = left_padded(PROMPTS)
    more = tokens(6, seed=40, rows=3)
    full = torch.cat([mask, torch.ones_like(more)], dim=1)
    actual = feed(model, entry.make(model), torch.cat([ids, more], dim=1), [ids.shape[1], *[1] * 6], mask=full)
    assert torch.isfinite(actual).all()
    if entry.lossless or dtype is torch.float32:
        for row, prompt in enumerate(PROMPTS):
            text = torch.cat([prompt[0], more[row]])
            close(entry, dtype, actual[row], replay(entry, model, text, [prompt.shape[1], *[1] * 6]), f"logits of row {row} run alone")


def crop(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Tokens that are taken back were never there: drafts, one forward pass each as sliding layers want it, and the prompt's end."""
    text, cache, kept = tokens(12, seed=5), entry.make(model), [tokens(2, seed=7), tokens(1, seed=8)]
    _warm(model, cache, text)
    cache.activate_past_recording()
    for index, part in enumerate(kept):
        feed(model, cache, torch.cat([part, tokens(5, seed=60 + index)], dim=1), [part.shape[1] + 5])
        cache.crop(-5)
        text = torch.cat([text, part], dim=1)
        assert cache.get_seq_length() == text.shape[1]
        cache.crop(0)
        assert cache.get_seq_length() == text.shape[1]
    if entry.records and not all(cache.is_sliding):
        # What was pruned before the recording began is gone, and who asks for it loses nothing else. What still waits can go.
        with contextlib.suppress(UnsupportedError):
            cache.crop(-12)
            if not any(cache.is_sliding):
                feed(model, cache, text[:, -12:], [1] * 12)
        if not any(cache.is_sliding):  # up to some version these want a crop after each pass that they record
            _expect(entry, model, dtype, cache, text, tokens(4, seed=9))
        return
    if not any(cache.is_sliding):
        _expect(entry, model, dtype, cache, text, tokens(4, seed=9))
        cache.crop(-12)
        assert cache.get_seq_length() == 7
        text = text[:, :7]
    final = tokens(3, seed=10)
    expected = replay(entry, model, torch.cat([text, final], dim=1), [text.shape[1], 3])
    close(entry, dtype, feed(model, cache, final, [3])[0], expected[1:], "logits after the cuts")


def deepcopy_forks(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    text, cache = tokens(12, seed=5), entry.make(model)
    _warm(model, cache, text)
    fork = copy.deepcopy(cache)
    first, second, third = tokens(3, seed=6), tokens(4, seed=7), tokens(2, seed=8)
    _expect(entry, model, dtype, fork, text, first)
    _expect(entry, model, dtype, cache, text, second)
    _expect(entry, model, dtype, fork, torch.cat([text, first], dim=1), third)
    del cache
    _expect(entry, model, dtype, fork, torch.cat([text, first, third], dim=1), second)


def pickled(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    text, cache = tokens(12, seed=5), entry.make(model)
    _warm(model, cache, text)
    again = pickle.loads(pickle.dumps(cache))
    assert again.get_seq_length() == 12
    _expect(entry, model, dtype, again, text, tokens(4, seed=6))


def saved_and_loaded(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    text, cache = tokens(12, seed=5), entry.make(model)
    _warm(model, cache, text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        cache.save(path)
        # What a source handed over is read by the class of its holder.
        held = getattr(cache, "holder", None) or cache
        again = type(held).load(path, model)
    sent = type(held).from_bytes(cache.to_bytes(held.codec), model, held.codec)
    assert again.get_seq_length() == sent.get_seq_length() == 12
    _expect(entry, model, dtype, again, text, tokens(4, seed=6))
    _expect(entry, model, dtype, sent, text, tokens(4, seed=8))
    _expect(entry, model, dtype, cache, text, tokens(4, seed=7))


def reset(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """A cache that was used with other rows is as good as new."""
    cache = entry.make(model)
    feed(model, cache, tokens(14, seed=1, rows=3), [12, 1, 1])
    cache.reset()
    assert cache.get_seq_length() == 0
    text = tokens(12, seed=5)
    close(entry, dtype, _warm(model, cache, text)[0], replay(entry, model, text, WARM), "logits after reset")
    _expect(entry, model, dtype, cache, text, tokens(4, seed=6))


def _rows_moved(entry: Entry, model: PreTrainedModel, dtype: torch.dtype, move: Callable[[Any], None], order: list[int]) -> None:
    """A padded batch whose rows are moved goes on as those rows would alone."""
    cache = entry.make(model)
    ids, mask = left_padded(PROMPTS)
    warm = torch.cat([ids, tokens(2, seed=50, rows=3)], dim=1)
    mask = torch.nn.functional.pad(mask, (0, 2), value=1)
    feed(model, cache, warm, [ids.shape[1], 1, 1], mask=mask)
    move(cache)
    assert cache.get_seq_length() == warm.shape[1]
    more = tokens(4, seed=51, rows=len(order))
    actual = feed(model, cache, more, mask=torch.nn.functional.pad(mask[order], (0, 4), value=1))
    for row, source in enumerate(order):
        text = torch.cat([PROMPTS[source][0], warm[source, -2:], more[row]])
        expected = replay(entry, model, text, [PROMPTS[source].shape[1], *[1] * 6])
        close(entry, dtype, actual[row], expected[-4:], f"row {row}, which was row {source}")


def reorder_cache(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    order = [2, 0, 0]
    _rows_moved(entry, model, dtype, lambda cache: cache.reorder_cache(torch.tensor(order, device=models.DEVICE)), order)


def batch_select_indices(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    order = [2, 0]
    _rows_moved(entry, model, dtype, lambda cache: cache.batch_select_indices(torch.tensor(order, device=models.DEVICE)), order)


def batch_repeat_interleave(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    _rows_moved(entry, model, dtype, lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2])


def offload_and_prefetch(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    text, cache = tokens(12, seed=5), entry.make(model)
    _warm(model, cache, text)
    for index in range(len(cache)):
        cache.offload(index, only_non_sliding=False)
    for index in range(len(cache)):
        cache.layers[index].prefetch()
    assert cache.get_seq_length() == 12
    _expect(entry, model, dtype, cache, text, tokens(4, seed=6))


def interleaved_caches(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Two caches take turns on one model, and neither they nor a `DynamicCache` between them notice."""
    one, two, dynamic = entry.make(model), entry.make(model), DynamicCache(config=model.config)
    text, other = tokens(12, seed=5), tokens(12, seed=9)
    _warm(model, one, text)
    _warm(model, two, other)
    twin = models.twin_of(model)
    close(entry, dtype, _warm(model, dynamic, text), _warm(twin, DynamicCache(config=twin.config), text), "logits with DynamicCache")
    _expect(entry, model, dtype, one, text, tokens(4, seed=6))
    _expect(entry, model, dtype, two, other, tokens(4, seed=7))
    with torch.no_grad():
        close(entry, dtype, model(text, use_cache=False).logits, twin(text, use_cache=False).logits, "logits without a cache")


def inference_mode_mixed(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """A cache that was filled in inference mode goes on outside it, and back."""
    text, cache, spans = tokens(14, seed=5), entry.make(model), [10, 1, 1, 1, 1]
    parts = []
    start = 0
    for turn, span in enumerate(spans):
        with torch.inference_mode(turn % 2 == 0):
            parts.append(feed(model, cache, text[:, start : start + span], [span]))
        start += span
    close(entry, dtype, torch.cat(parts, dim=1)[0], replay(entry, model, text, spans))


def ready_mask(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """A four-dimensional mask from the caller, which hides two tokens from all that follow."""
    text, cache = tokens(9, seed=5), entry.make(model)
    plain, other = reference(entry, model)
    hidden = torch.ones(1, 1, 9, 9, dtype=torch.bool, device=models.DEVICE).tril()
    hidden[..., 4:, 2:4] = False
    actual = []
    for runner, used in ((model, cache), (plain, other)):
        with torch.no_grad():
            prompt = runner(input_ids=text[:, :8], attention_mask=hidden[:, :, :8, :8], past_key_values=used).logits
            step = runner(input_ids=text[:, 8:], attention_mask=hidden[:, :, 8:], past_key_values=used).logits
        actual.append(torch.cat([prompt, step], dim=1))
    close(entry, dtype, actual[0], actual[1])


def wrong_rows(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """A batch of another size does not pass unseen."""
    cache = entry.make(model)
    _warm(model, cache, tokens(12, seed=5))
    more = tokens(1, seed=6, rows=2)
    with pytest.raises((ValueError, RuntimeError)):
        feed(model, cache, more)


def empty_cache(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Before the first token a cache can be copied, reset and looked at."""
    cache = entry.make(model)
    assert cache.get_seq_length() == 0
    assert cache.report().seen == 0
    assert repr(cache)
    copied = copy.deepcopy(pickle.loads(pickle.dumps(copy.deepcopy(cache))))
    text = tokens(12, seed=5)
    for fresh in (cache, copied):
        fresh.reset()
        _warm(model, fresh, text)
        _expect(entry, model, dtype, fresh, text, tokens(3, seed=6))


def refusals_change_nothing(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Who catches a refusal can go on; in a hybrid model no layer has been moved before another one refused."""
    rows = torch.zeros(1, dtype=torch.long, device=models.DEVICE)
    asked: dict[str, tuple[Any, ...]] = {
        "activate_past_recording": (),
        "crop": (-1,),
        "reorder_cache": (rows,),
        "batch_select_indices": (rows,),
        "batch_repeat_interleave": (2,),
        "reset": (),
    }
    text, more = tokens(12, seed=5), tokens(4, seed=6)
    for operation, arguments in asked.items():
        cache = entry.make(model)
        _warm(model, cache, text)
        before = {name: tensor.clone() for name, tensor in cache.owned_tensors().items()}
        try:
            getattr(cache, operation)(*arguments)
        except UnsupportedError:
            assert before.keys() == cache.owned_tensors().keys()
            assert all(torch.equal(tensor, before[name]) for name, tensor in cache.owned_tensors().items())
            assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
            _expect(entry, model, dtype, cache, text, more)
        except RuntimeError:
            assert operation == "crop"  # transformers' sliding layers want past recording first
            assert any(cache.is_sliding)


def report(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """The report's numbers are those of the tensors that are there."""
    cache = entry.make(model)
    _warm(model, cache, tokens(12, seed=5))
    told = cache.report()
    assert told.seen == cache.seen == 12
    assert len(told.kept) == len(cache) == model.config.num_hidden_layers
    assert told.bytes >= sum(tensor.numel() * tensor.element_size() for tensor in cache.owned_tensors().values()) // len(WARM) > 0
    assert told.as_dict()["seen"] == 12
    assert type(cache).__name__ in str(told)
    assert "12" in repr(cache)


def honest_flags(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """`generate` asks these flags before it relies on what they promise."""
    cache = entry.make(model)
    assert cache.is_croppable == (not entry.refuses_row("crop", models.family_of(model)))
    assert not cache.is_compileable or isinstance(cache, EquipCache)  # which tests/equip/test_compiled.py holds to it
    assert cache.get_max_length() == -1 or any(cache.is_sliding)


STATE = rows_in(globals())
