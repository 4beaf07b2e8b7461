"""Damaged, lost and foreign segments: answers are right, it is said once, and good segments take their place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import BloomConfig, DynamicCache

from hf_kvcaches import SegmentReuseCache, SegmentStore
from hf_kvcaches.stores.blobs import Changes
from hf_kvcaches.stores.catalog import open_blobs
from tests import tiny
from tests.helpers.stores import header_end
from tests.helpers.warned import said
from tests.segments.store_helpers import LENGTH, PART, WHOLE, ask, opened, prompt, right


def segments_of(model, folder: Path) -> list[Path]:
    """The files that prompt 0 needs, in its order."""
    store = opened(folder)
    keys = ask(model, prompt(0), store).keys
    store.flush()  # or its thread warns of what is done to the folder next
    return [folder / f"{key}.kvblob" for key in keys]


def heals(model, folder: Path, damaged: Path, store: SegmentStore) -> None:
    """A store that has a damaged file says so once, answers rightly, and has a good one soon."""
    content = damaged.read_bytes()
    with said() as sentences:
        first = right(model, prompt(0), store)
        store.flush()
        again = right(model, prompt(0), store)
        store.flush()
    assert first.reused < WHOLE
    assert damaged.stem not in first.keys
    assert again.reused == WHOLE
    assert len(sentences) == 1
    assert "damaged" in sentences[0]
    assert damaged.stem in sentences[0]
    assert store.report().damaged == 1
    assert damaged.read_bytes() != content
    other = opened(folder)
    with said() as sentences:
        assert right(model, prompt(0), other).reused == WHOLE
        other.flush()  # or its thread meets what is damaged next
    assert sentences == []


@pytest.mark.parametrize("looked", [False, True])
def test_a_flipped_bit_anywhere_is_a_miss_and_is_mended(model, folder, looked):
    paths = segments_of(model, folder)
    header, size = header_end(paths[0].read_bytes()), paths[0].stat().st_size
    for number, place in enumerate((5, 17, 24, 31, 60, header // 2, header - 1, header, (header + size) // 2, size - 1)):
        path, store = paths[number % len(paths)], opened(folder)
        if looked:
            store.refresh()
        content = bytearray(path.read_bytes())
        content[min(place, len(content) - 1)] ^= 1 << number % 8
        path.write_bytes(content)
        heals(model, folder, path, store)


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
def test_any_of_a_prompts_segments_may_be_gone_when_it_is_read(model, folder, which, monkeypatch):
    paths = segments_of(model, folder)
    store = opened(folder)
    store.refresh()
    for number in which:
        paths[number].unlink()
    with said() as sentences:
        left = sum(PART if number < 2 else WHOLE - 2 * PART for number in range(3) if number not in which)
        real, calls = store.catalog.blobs.changes, iter([Changes([], [])])
        monkeypatch.setattr(store.catalog.blobs, "changes", lambda: next(calls, None) or real())
        assert right(model, prompt(0), store).reused == left
        assert right(model, prompt(0), store).reused == WHOLE
    # Nothing was damaged: another process may have evicted it.
    assert sentences == []


@pytest.mark.parametrize("number", range(3))
def test_behind_another_start_too_only_the_damaged_segment_is_computed(model, pristine, tmp_path, number):
    # There segments are found by what they hold.
    moved = torch.cat([tiny.ids(1, 8, seed=9), prompt(0)], dim=1)
    path = segments_of(model, pristine)[number]
    answers = []
    for name in ("whole", "damaged"):
        folder = Path(shutil.copytree(pristine, tmp_path / name))
        store = opened(folder)
        store.refresh()
        if name == "damaged":
            (folder / path.name).write_bytes(path.read_bytes()[:-1])
        with said() as sentences:
            answers.append(ask(model, moved, store, "approximate"))
            store.flush()
        assert len(sentences) == (name == "damaged")
    whole, damaged = answers
    assert path.stem in whole.keys
    assert path.stem not in damaged.keys
    assert damaged.reused < whole.reused
    # It was computed, among others that are approximations.
    plain = ask(model, moved).logits
    assert float((damaged.logits - plain).abs().max()) < 3


@pytest.mark.parametrize("rows", [1, 2])
def test_a_model_that_reuses_prefixes_alone_computes_all_behind_a_lost_segment(rows):
    model = tiny.build(BloomConfig(vocab_size=96, hidden_size=32, n_layer=3, n_head=4))
    ids = tiny.ids(1, 93).repeat(rows, 1)
    store = SegmentStore("memory", quantization=None)

    def logits(cache):
        with torch.no_grad():
            return model(ids, past_key_values=cache, logits_to_keep=1).logits

    logits(SegmentReuseCache(model, store, spans=[[(0, 29), (29, 60), (60, 93)]] * rows))
    load = store.load
    store.load = lambda records, device: {key: blob for key, blob in load(records, device).items() if records[key].start != 29}
    cache = SegmentReuseCache(model, store)
    assert torch.allclose(logits(cache), logits(DynamicCache(config=model.config)), atol=1e-5)
    assert cache.report().reused_tokens == 29 * rows
    assert {span.reason for span in cache.report().spans if span.start == 29} == {"The stored tokens are gone or damaged."}


# Other models


def nothing_is_reused(model, store: SegmentStore, ids: torch.Tensor, tokenizer=None) -> None:
    """Said once, and from the second time on it is this model's own."""
    with said() as sentences:
        assert right(model, ids, store, tokenizer=tokenizer).reused == 0
        assert right(model, ids, store, tokenizer=tokenizer).reused == ids.shape[1] - 1
    assert len(sentences) == 1
    assert "none for this model" in sentences[0]


def test_segments_of_other_weights_are_not_reused(model, folder):
    nothing_is_reused(tiny.llama(seed=1, num_hidden_layers=2, hidden_size=16, intermediate_size=16), opened(folder), prompt(0))
    assert right(model, prompt(0), opened(folder)).reused == WHOLE


def test_segments_of_another_format_are_not_reused(model, folder):
    store = SegmentStore(f"disk:{folder}", quantization="int8")
    with said() as sentences:
        assert ask(model, prompt(0), store).reused == 0
        assert ask(model, prompt(0), store).reused == WHOLE
    assert len(sentences) == 1


def test_it_is_said_what_differs_where_that_can_be_known(tmp_path):
    from tests.testbed import load

    model, tokenizer = load()
    torch.manual_seed(0)
    ids = torch.randint(3, 200, (1, LENGTH))
    with opened(tmp_path / "ids") as store:
        ask(model, ids, store)
    with said() as sentences:
        ask(model, ids, opened(tmp_path / "ids"), tokenizer=tokenizer)
    assert "stored without a tokenizer" in sentences[0]
    with SegmentStore(f"disk:{tmp_path / 'int8'}", quantization="int8") as store:
        ask(model, ids, store)
    with said() as sentences:
        ask(model, ids, opened(tmp_path / "int8"))
    assert "stored with quantization='int8'" in sentences[0]


# Segments with right checksums that somebody wrote who is no store


def nan(tensors, head):
    tensors["keys.0"][0, 0, 0, 0] = float("nan")


def short(tensors, head):
    tensors["values.0"] = tensors["values.0"][:, :, :-1]


def lacking(tensors, head):
    del tensors["values.0"]


def flat(tensors, head):
    tensors["keys.0"] = tensors["keys.0"].flatten()


def forged(folder: Path, key: str, forge=lambda tensors, head: None, **changes) -> None:
    """Puts a segment in a folder anew, with other tensors or another head."""
    blobs = open_blobs(f"disk:{folder}")
    head = next(stored.head for stored in blobs.changes().added if stored.key == key)
    tensors = {name: tensor.clone() for name, tensor in blobs.tensors(key).items()}
    forge(tensors, head)
    blobs.delete(key)
    blobs.put(key, head | changes, tensors)


@pytest.mark.parametrize("forge", [nan, short, lacking, flat])
def test_a_segment_that_is_not_what_its_head_says_is_a_miss_and_is_mended(model, folder, forge):
    path = segments_of(model, folder)[1]
    forged(folder, path.stem, forge)
    heals(model, folder, path, opened(folder))


@pytest.mark.parametrize(
    "change",
    [
        {"form": {}},
        {"form": {"quantization": None, "dtype": "float32", "piles": [[0, 10**9]], "dims": []}},
        {"form": {"quantization": None, "dtype": "float32", "piles": 3, "dims": []}},
        {"form": {"quantization": None, "dtype": "float32", "piles": [[1, 0]], "dims": [[2, 4, 4]]}},
        {"form": {"quantization": "int3", "dtype": "float32", "piles": [[0, 1]], "dims": []}},
        {"start": -1},
        {"ids": "!"},
    ],
)
def test_a_head_that_makes_no_sense_is_a_miss(model, folder, change):
    forged(folder, segments_of(model, folder)[1].stem, **change)
    with said() as sentences:
        assert right(model, prompt(0), opened(folder)).reused < WHOLE
    assert len(sentences) == 1
