"""`WarmStartLibrary`: what is added is found again, here, in other processes and from files; what is damaged is a miss."""

from __future__ import annotations

import os
import shutil
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches import GrowingCache, WarmStartCache, WarmStartLibrary
from hf_kvcaches.errors import ArtifactError, ConfigError, FingerprintMismatch
from hf_kvcaches.reuse.index import as_ids, common_prefix
from hf_kvcaches.stores.blobs import BlobHead
from hf_kvcaches.warmstart.entries import Entry, EntryContents, record_of
from tests import tiny
from tests.helpers.stores import PROCESSES, header_end
from tests.helpers.warned import said
from tests.segments.store_helpers import small
from tests.segments.test_cache import A, B, C, D, joined
from tests.warmstart.warm import OPEN, answer, logits_of, words

EARLIER, CHANGED = joined(A, B, C), joined(A, D[:, :5], B, D[:, 5:8], C)


def len_of(texts: list[str]) -> np.ndarray:
    """An encoder that tells prompts apart by their length alone."""
    return np.array([[len(text) + 1.0] for text in texts])


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def prompt(seed: int) -> torch.Tensor:
    return tiny.ids(1, 48, seed=seed)


def opened(model: Any, location: str, **options: Any) -> WarmStartLibrary:
    return WarmStartLibrary(model, words(), location=location, **options)


def served(model: Any, library: WarmStartLibrary, ids: torch.Tensor) -> str:
    """How a prompt is served, and that the answer is the cold one where it is not by stretches or a summary."""
    cache = WarmStartCache(model, library, strategy="exact")
    close(logits_of(model, ids, cache, 2), logits_of(model, ids, new=2))
    return cache.report().strategies[0]


@pytest.fixture(params=["disk", "redis"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place of each kind that processes can share."""
    return str(request.getfixturevalue("redis_location")) if request.param == "redis" else f"disk:{tmp_path / 'library'}"


# One process


def test_texts_and_tokens_are_the_same_prompts(location: str) -> None:
    model = small()
    library = opened(model, location)
    text = words().decode(A[0])
    assert len(text.split()) == 29
    (key,) = library.add(text, {"from": "a test", "parts": [1, None]})
    assert library.add([A[0].tolist(), text]) == [key, key]
    assert library.add(A[0]) == [key]
    assert library.add(A) == [key]
    assert library.add([np.array(A[0])]) == [key]  # type: ignore[list-item]
    others = library.add([B[0].tolist(), words().decode(C[0]), D[0]], {"from": "more"})
    assert library.ids() == [key, *others] or sorted(library.ids()) == sorted([key, *others])  # type: ignore[type-var]
    assert len(library) == library.report().entries == 4
    assert library.provenance(key or "") == {"from": "a test", "parts": [1, None]}
    assert [library.provenance(str(other)) for other in others] == [{"from": "more"}] * 3
    assert library.prompt(str(others[0])) == words().decode(B[0])
    assert (library.prompt("none"), library.provenance("none")) == (None, None)
    assert "4 prompts" in repr(library)
    for ids in (A, B, C, D):
        assert served(model, library, ids) == "exact"


def test_above_the_cap_pinned_prompts_stay_and_those_that_saved_most(location: str) -> None:
    model = small()
    library = opened(model, location)
    keys = library.add([prompt(seed)[0] for seed in range(3)])
    size = library.report().bytes // 3
    assert library.delete(keys[1] or "")
    assert not library.delete(keys[1] or "")
    assert served(model, library, prompt(1)) == "cold"
    library.pin(keys[0] or "")
    for _ in range(3):
        assert served(model, library, prompt(2)) == "exact"
    library.catalog.max_bytes = int(3.5 * size)
    library.add([prompt(seed)[0] for seed in range(3, 8)])
    report = library.report()
    assert report.bytes <= 3.5 * size
    assert (len(library), report.pinned, report.evicted) == (3, 1, 4)
    assert report.saved_tokens == 3 * 47
    assert [served(model, library, prompt(seed)) for seed in (0, 2)] == ["exact", "exact"]
    library.pin(keys[0] or "", False)
    assert library.report().pinned == 0
    with said() as sentences:
        assert opened(model, "memory", max_bytes=size // 2).add(prompt(0)[0]) == [None]
    assert "not stored" in sentences[0]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "texts or rows of token ids"),
        ([1.5, 2.5], "texts or rows of token ids"),
        ([["a", "b"]], "texts or rows of token ids"),
        ({"input_ids": [1, 2, 3]}, "add input_ids"),
        ([[4]], "at least 2 tokens"),
        ([[]], "at least 2 tokens"),
        ([-1, 3], "token ids from 0 to 95"),
        ([3, 96], "token ids from 0 to 95"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts: Any, message: str) -> None:
    library = opened(small(), "memory")
    with pytest.raises(ConfigError, match=message):
        library.add(prompts)
    assert len(library) == 0
    assert library.add([]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokenizer": None}, "tokenizer"),
        ({"tokenizer": "gpt2"}, "tokenizer"),
        ({"quantization": "int2"}, "quantization"),
        ({"encoder": 3}, "encoder"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"location": "cloud"}, "location"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WarmStartLibrary(small(), **{"tokenizer": words(), **arguments})


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=12), st.lists(st.integers(0, 3), max_size=9))
def test_the_longest_beginning_is_found_as_by_looking_at_all(prompts: list[list[int]], asked: list[int]) -> None:
    rows = [as_ids(row) for row in prompts]
    form = {"quantization": None, "dtype": "float32", "piles": [[0]], "dims": [[1, 4, 4]]}
    entries = [Entry(record_of("scope", row, form), "", np.ones(1, np.float32), {}) for row in rows]
    contents = EntryContents("scope", 1)
    for entry in entries:
        contents.add([BlobHead(entry.record.key, {**entry.record.to_dict(), **entry.head()}, 1)])
    best, shared = contents.beginning(as_ids(asked))
    assert shared == max(common_prefix(row, as_ids(asked)) for row in rows)
    assert (best is None) == (shared == 0)
    if best is not None:
        assert common_prefix(best.ids, as_ids(asked)) == shared


def test_the_nearest_prompts_are_those_of_the_highest_cosines_also_behind_removals() -> None:
    made = np.random.default_rng(0).standard_normal((41, 8)).astype(np.float32)
    query, *vectors = made / np.linalg.norm(made, axis=1, keepdims=True)
    form = {"quantization": None, "dtype": "float32", "piles": [[0]], "dims": [[1, 4, 4]]}
    entries = [Entry(record_of("scope", as_ids([1, number]), form), "", vector, {}) for number, vector in enumerate(vectors)]
    contents = EntryContents("scope", 8)
    assert contents.nearest(query, 3) == []
    # Some replace what was known, and some are added to what has been looked up.
    for number, known in enumerate((entries[:1], entries[:20], entries, entries[5:], entries[5:9], entries[5:10], entries[5:])):
        contents.remove([key for key in contents.entries if number < 5])
        known = [entry for entry in known if entry.record.key not in contents.entries]
        contents.add([BlobHead(entry.record.key, {**entry.record.to_dict(), **entry.head()}, 1) for entry in known])
        held = contents.entries.values()
        expected = sorted(((float(entry.embedding @ query), entry.record.key) for entry in held), reverse=True)[:3]
        found = contents.nearest(query, 3)
        assert [record.key for record, _ in found] == [key for _, key in expected]
        assert [cosine for _, cosine in found] == pytest.approx([cosine for cosine, _ in expected], abs=1e-6)


def test_a_prompt_is_only_decoded_for_an_encoder_that_reads_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    library = opened(model, "memory")
    library.add(A)
    monkeypatch.setattr(library, "_text", lambda ids: pytest.fail("decoded"))
    assert [record.key for record, _ in library.near(as_ids(A[0]))] == library.ids()


# Files


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}])
def test_a_library_comes_back_from_its_folder_with_the_same_answers(tmp_path: Path, options: dict[str, Any]) -> None:
    model = tiny.llama()
    library = WarmStartLibrary(model, words(), **options)
    library.add([EARLIER[0], D[0]], {"from": "here"})
    library.save_pretrained(tmp_path / "saved")
    again = WarmStartLibrary.from_pretrained(tmp_path / "saved", model, words(), location=f"disk:{tmp_path / 'entries'}")
    assert sorted(again.ids()) == sorted(library.ids())
    assert again.quantization == library.quantization
    assert all(again.provenance(key) == {"from": "here"} and again.prompt(key) == library.prompt(key) for key in library.ids())
    for ids in (EARLIER, CHANGED, joined(B, C[:, -9:])):
        caches = [WarmStartCache(model, each, gate=OPEN) for each in (library, again)]
        found = [answer(model, ids, cache, 4) for cache in caches]
        assert torch.equal(torch.stack(found[0].logits), torch.stack(found[1].logits))
        assert caches[0].report().as_dict() == caches[1].report().as_dict()
        assert caches[0].report().strategies != ("cold",)


def test_an_empty_library_comes_back(tmp_path: Path) -> None:
    model = small()
    opened(model, "memory").save_pretrained(tmp_path)
    assert len(WarmStartLibrary.from_pretrained(tmp_path, model, words())) == 0


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = small()
    library = opened(model, "memory")
    library.add(prompt(0)[0])
    library.save_pretrained(tmp_path / "saved")
    with pytest.raises(FingerprintMismatch):
        WarmStartLibrary.from_pretrained(tmp_path / "saved", tiny.llama(), words())
    with pytest.raises(FingerprintMismatch):
        WarmStartLibrary.from_pretrained(tmp_path / "saved", model, words(50))
    with pytest.raises(ConfigError, match="encoder: expected the one that the library was made with"):
        WarmStartLibrary.from_pretrained(tmp_path / "saved", model, words(), len_of)
    former = opened(model, "memory")
    former.encoder.name = "input embeddings, version 2"
    former.save_pretrained(tmp_path / "former")
    with pytest.raises(ConfigError, match=r"version 2', got 'token ids, version 1'\. If you no longer have that encoder, make a new"):
        WarmStartLibrary.from_pretrained(tmp_path / "former", model, words())
    for number, damage in enumerate((lambda data: data[: len(data) // 2], lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])):
        folder = Path(shutil.copytree(tmp_path / "saved", tmp_path / f"damaged {number}"))
        for path in folder.glob("*.safetensors"):
            path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(ArtifactError):
            WarmStartLibrary.from_pretrained(folder, model, words())
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(FingerprintMismatch, match="The model has changed"):
        library.save_pretrained(tmp_path / "changed")


def test_libraries_that_differ_do_not_see_each_other_in_one_place(tmp_path: Path) -> None:
    place, model = f"disk:{tmp_path}", small()
    opened(model, place).add(prompt(0)[0])
    for options in ({"quantization": "int8"}, {"encoder": len_of}):
        with said() as sentences:
            other = opened(model, place, **options)
        assert len(other) == 0
        assert "of another model, tokenizer or encoder" in sentences[0]
        assert other.report().foreign == 1
    assert len(opened(tiny.llama(), place)) == 0
    assert len(opened(model, place)) == 1


# Damage


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_flipped_bit_is_a_miss_that_is_said_once(tmp_path: Path, when: str) -> None:
    model = small()
    opened(model, f"disk:{tmp_path / 'whole'}").add(prompt(0)[0])
    (path,) = (tmp_path / "whole").glob("*.kvblob")
    content = path.read_bytes()
    header = header_end(content)
    for place in (0, 9, header // 2, header - 2, header, (header + len(content)) // 2, len(content) - 1):
        folder = Path(shutil.copytree(tmp_path / "whole", tmp_path / f"{place}"))
        library = opened(model, f"disk:{folder}") if when == "after" else None
        (folder / path.name).write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        with said() as sentences:
            library = library or opened(model, f"disk:{folder}")
            assert [served(model, library, prompt(0)) for _ in range(2)] == ["cold", "cold"], place
        assert ["damaged" in sentence for sentence in sentences] == [True], place
        assert len(library) == 0
        library.add(prompt(0)[0])
        assert served(model, library, prompt(0)) == "exact"


# Threads and processes


def test_threads_that_add_and_ask_get_right_answers() -> None:
    """Each asks with the others' prompts coming in, and all run parts of one model."""
    model = small()
    library, faults = opened(model, "memory"), []

    def adds(start: int) -> None:
        try:
            for seed in range(start, start + 8):
                library.add(prompt(seed)[0])
        except Exception as error:
            faults.append(error)

    # A pass of a cache that takes over a prompt exchanges the last layer, all the time.
    workers = [threading.Thread(target=adds, args=(start,)) for start in (100, 200, 104)]
    for worker in workers:
        worker.start()
    asked = 0
    while asked < 3 or any(worker.is_alive() for worker in workers):
        for seed in (100 + asked % 8, 204, 300):
            cold = WarmStartCache(model, library, strategy="exact")
            cold.prefill(prompt(seed))
        library.near(as_ids(prompt(100)[0]))
        asked += 1
    for worker in workers:
        worker.join(60)
    assert not faults
    assert len(library) == 20
    for seed in (*range(100, 112), *range(200, 208)):
        key = library.exact(as_ids(prompt(seed)[0]))
        alone = GrowingCache(model)
        with torch.no_grad():
            model(prompt(seed), past_key_values=alone)
        tensors = library.load({key: library.contents.entries[key].record})[key]
        for layer, own in enumerate(alone.layers):
            close(tensors["keys.0"][layer], own.keys[0])
            close(tensors["values.0"][layer], own.values[0])


def add_elsewhere(location: str, seeds: list[int], pipe: Connection) -> None:
    """Adds prompts in another process, and tells of each."""
    torch.set_num_threads(1)
    library = opened(small(), location)
    for seed in seeds:
        library.add(prompt(seed)[0])
        pipe.send((seed, os.getpid()))


def test_what_another_process_adds_is_found_and_what_it_deletes_is_not(shared: str) -> None:
    model = small()
    library = opened(model, shared)
    assert served(model, library, prompt(1)) == "cold"
    ours, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=add_elsewhere, args=(shared, [1, 2], theirs), daemon=True)
    process.start()
    for seed in (1, 2):
        assert ours.poll(60)
        assert ours.recv()[0] == seed
        assert served(model, library, prompt(seed)) == "exact"
    process.join(30)
    other = opened(model, shared)
    for key in other.ids():
        other.delete(key)
    assert served(model, library, prompt(1)) == "cold"
    assert len(library) == 0
