"""The swap: whenever and however the exact prefill takes over, what follows is as cold, and what goes wrong costs the time and no more."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from hf_kvcaches import GrowingCache, WarmStartCache
from hf_kvcaches.warmstart import swapping
from tests import tiny
from tests.segments.reference import Source, step_by_step
from tests.segments.test_cache import A, B, C, D, joined
from tests.warmstart.warm import OPEN, answer, forced, left_padded, library_of, logits_of, said, taken

EARLIER = joined(A, B, C)
CHANGED = joined(A, D[:, :5], B, D[:, 5:8], C)
LIKE = joined(D, A, B[:, ::3], C[:, -9:])
THREAD = "hf_kvcaches-prefill"


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def warm(model: PreTrainedModel, swap: Any, served: str = "align") -> WarmStartCache:
    options: dict[str, Any] = {"slots": 16, "full": False} if served == "slots" else {}
    return WarmStartCache(model, library_of(model, EARLIER, **options), strategy=served, swap=swap, gate=OPEN)  # type: ignore[arg-type]


def cold(model: PreTrainedModel, text: torch.Tensor, new: int, **inputs: Any) -> torch.Tensor:
    """The logits that the last `new` tokens of a text follow from."""
    with torch.no_grad():
        return model(text[:, :-1], **inputs).logits[:, -new:]


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == THREAD]


def no_threads_soon() -> bool:
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not threads()


class Stepwise:
    """Holds the exact prefill before each chunk until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chunk: int = 16) -> None:
        self.gate, self.chunks = threading.Event(), 0
        monkeypatch.setattr(swapping, "CHUNK", chunk)
        run = swapping.run_span

        def gated(*args: Any) -> None:
            assert self.gate.wait(30)
            self.chunks += 1
            run(*args)

        monkeypatch.setattr(swapping, "run_span", gated)


# At once


@pytest.mark.parametrize("served", ["align", "slots"])
@pytest.mark.parametrize("make", [tiny.llama, tiny.gemma2], ids=["llama", "gemma2"])
def test_before_the_second_token_the_exact_prefill_takes_over(make: Callable[[], PreTrainedModel], served: str) -> None:
    model, prompt = make(), CHANGED if served == "align" else LIKE
    cache = warm(model, "sync", served)
    found = answer(model, prompt, cache, 6)
    assert cache.report().strategies == (served,)
    assert cache.report().swapped
    logits, expected = torch.stack(found.logits, 1), cold(model, found.sequences, 6)
    close(logits[:, 1:], expected[:, 1:])
    assert not torch.allclose(logits[:, 0], expected[:, 0], atol=1e-4)
    windows = [index for index, slides in enumerate(cache.is_sliding) if slides]
    assert all(cache.report().kept[index] == prompt.shape[1] + 5 for index in range(len(cache.layers)) if index not in windows)
    assert cache.seen == prompt.shape[1] + 5
    if windows:
        return  # their first tokens are dropped, and can't be taken back
    # Nothing of the summary is left, so all can be taken back.
    cache.crop(-cache.seen + 40)
    close(forced(model, D, cache), _forced_cold(model, prompt[:, :40], D))


def _forced_cold(model: PreTrainedModel, prompt: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(joined(prompt, more)).logits[:, -more.shape[1] :]


def test_rows_with_padding_are_swapped_too() -> None:
    model = tiny.llama()
    ids, mask = left_padded(CHANGED, EARLIER, joined(D, B, D[:, :4]), D)
    cache = warm(model, "sync")
    found = answer(model, ids, cache, 5, attention_mask=mask)
    assert cache.report().strategies == ("align", "exact", "align", "cold")
    whole = torch.nn.functional.pad(mask, (0, 5), value=1)[:, :-1]
    positions = (whole.cumsum(-1) - 1).clamp_min(0)
    expected = cold(model, found.sequences, 5, attention_mask=whole, position_ids=positions)
    close(torch.stack(found.logits, 1)[:, 1:], expected[:, 1:])


@pytest.mark.parametrize("swap", ["sync", "background"])
def test_beams_after_the_swap_have_the_scores_of_their_texts_in_one_run(monkeypatch: pytest.MonkeyPatch, swap: Any) -> None:
    """The first token of each is scored by what was reused; the others exactly."""
    model = tiny.llama()
    cache = warm(model, swap)
    start = cache._go_on
    # The thread is waited for, so that it takes over before the third token.
    monkeypatch.setattr(cache, "_go_on", lambda mask: (cache.wait(), start(mask)))
    prompts, mask = left_padded(CHANGED, joined(D, B, D[:, :6]))
    options = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.0, "output_scores": True, "attention_mask": mask}
    found = answer(model, prompts, cache, 6, **options)
    assert cache.report().swapped
    early = 1 if swap == "sync" else 2
    for number, (text, score) in enumerate(zip(found.sequences, found.sequences_scores, strict=True)):
        prompt = (CHANGED, joined(D, B, D[:, :6]))[number // 3]
        alone = WarmStartCache(model, cache.library, strategy="align", gate=OPEN)
        alone.prefill(prompt)
        with torch.no_grad():
            first = forced(model, torch.cat([prompt[0, -1:], text[-6:-1]])[None], alone)[0, :early]
        rest = cold(model, torch.cat([prompt[0], text[-6:]])[None], 6)[0, early:]
        own = torch.cat([first, rest]).log_softmax(-1).gather(1, text[-6:, None]).sum()
        close(score, own, atol=1e-3)


def test_rows_that_were_moved_repeated_and_dropped_before_the_swap_get_their_own_prompt() -> None:
    model = tiny.llama()
    ids, mask = left_padded(CHANGED, joined(D, B, D[:, :4]), EARLIER)
    cache = warm(model, "sync")
    cache.prefill(ids, mask)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([4, 1, 3]))
    rows = [joined(D, B, D[:, :4]), EARLIER, CHANGED]
    new = torch.cat([row[:, -1:] for row in rows])
    got = forced(model, new, cache, torch.cat([mask[row : row + 1] for row in (1, 2, 0)]))
    assert cache.report().swapped
    for line, row in zip(got, rows, strict=True):
        close(line[None], logits_of(model, row))


def test_what_was_exact_is_not_run_again() -> None:
    model = tiny.llama()
    for prompt, served in ((EARLIER, "exact"), (joined(A, B, D), "prefix"), (D, "cold")):
        cache = WarmStartCache(model, library_of(model, EARLIER), swap="sync")
        close(logits_of(model, prompt, cache, 4), logits_of(model, prompt, new=4))
        assert (cache.report().strategies, cache.report().swapped) == ((served,), False)
        assert cache._exact is None
    # What was rounded was not.
    cache = WarmStartCache(model, library_of(model, EARLIER, quantization="int8"), swap="sync")
    found = answer(model, EARLIER, cache, 4)
    assert cache.report().swapped
    close(torch.stack(found.logits, 1)[:, 1:], cold(model, found.sequences, 4)[:, 1:])


def test_after_prefill_by_hand_the_swap_comes_before_the_next_pass() -> None:
    model = tiny.llama()
    cache = warm(model, "sync")
    cache.prefill(CHANGED)
    close(logits_of(model, CHANGED, cache, 4), logits_of(model, CHANGED, new=4))
    assert cache.report().swapped


def test_a_prompt_in_chunks_is_swapped_too() -> None:
    model = tiny.llama()
    cache = warm(model, "sync")
    found = answer(model, CHANGED, cache, 12, prefill_chunk_size=60)
    assert cache.report().swapped
    close(torch.stack(found.logits, 1)[:, 1:], cold(model, found.sequences, 12)[:, 1:])


def test_a_cache_of_inference_mode_is_swapped() -> None:
    model = tiny.llama()
    for swap in ("sync", "background"):
        cache = warm(model, swap)
        with torch.inference_mode():
            found = answer(model, CHANGED, cache, 2)
            cache.wait()
            turn = joined(found.sequences, D)
            got = logits_of(model, turn, cache, 3)
        assert cache.report().swapped
        close(got, logits_of(model, turn, new=3))


# In the background


@pytest.mark.parametrize("served", ["align", "slots"])
def test_when_the_thread_is_ready_its_keys_take_over_between_two_tokens(monkeypatch: pytest.MonkeyPatch, served: str) -> None:
    model, prompt = tiny.llama(), CHANGED if served == "align" else LIKE
    steps, cache = Stepwise(monkeypatch), warm(tiny.llama(), "background", served)
    model = cache.model
    text = answer(model, prompt, cache, 5).sequences
    assert not cache.report().swapped
    # Until then all is as without a swap.
    off = warm(model, "off", served)
    assert torch.equal(text, answer(model, prompt, off, 5).sequences)
    more = joined(text[:, -1:], D)
    close(forced(model, more[:, :3], cache), forced(model, more[:, :3], off))
    steps.gate.set()
    cache.wait()
    assert not cache.report().swapped
    close(forced(model, more[:, 3:], cache), _forced_cold(model, joined(text, D[:, :2]), D[:, 2:]))
    assert cache.report().swapped
    assert steps.chunks == -(-prompt.shape[1] // 16)
    assert no_threads_soon()


def test_generation_that_ends_before_the_thread_is_ready_goes_on_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    steps, cache = Stepwise(monkeypatch), warm(model, "background")
    text = answer(model, CHANGED, cache, 3).sequences
    assert cache._exact is not None
    assert cache._exact.running
    steps.gate.set()
    turn = joined(text, D)
    cache.wait()
    close(logits_of(model, turn, cache, 4), logits_of(model, turn, new=4))
    assert cache.report().swapped


def test_one_token_starts_no_thread() -> None:
    model = tiny.llama()
    cache = warm(model, "background")
    answer(model, CHANGED, cache, 1)
    assert not threads()
    cache.wait()
    assert not cache.report().swapped


def test_the_exact_prefill_asks_nothing_of_the_forward_of_the_model() -> None:
    model, prompt = tiny.llama(), joined(A, B)
    filled = swapping.ExactPrefill(model, prompt, None, torch.arange(prompt.shape[1])[None]).result()
    assert filled.seen == prompt.shape[1]
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("swap", ["sync", "background"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_in_the_thread_is_a_warning_and_the_prompt_is_run(monkeypatch: pytest.MonkeyPatch, swap: Any) -> None:
    model, run, failures = tiny.llama(), swapping.run_span, [RuntimeError("no memory")]

    def once(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return run(*arguments)

    monkeypatch.setattr(swapping, "run_span", once)
    cache = warm(model, swap)
    if swap == "sync":
        with pytest.raises(RuntimeError, match="no memory"):
            answer(model, CHANGED, cache, 3)
        return
    text = answer(model, CHANGED, cache, 2).sequences
    assert no_threads_soon()
    with said() as sentences:
        got = forced(model, joined(text[:, -1:], D), cache)
    assert len(sentences) == 1
    assert "RuntimeError: no memory" in sentences[0]
    close(got, _forced_cold(model, text[:, :-1], joined(text[:, -1:], D)))
    assert cache.report().swapped


def test_a_cache_that_nobody_has_any_more_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    for drop in (lambda cache: None, lambda cache: cache.reset(), lambda cache: cache.crop(-60)):
        with monkeypatch.context() as patched:
            steps, cache = Stepwise(patched, chunk=8), warm(model, "background")
            answer(model, CHANGED, cache, 3)
            assert len(threads()) == 1
            gone = weakref.ref(cache)
            drop(cache)
            kept = cache if cache.seen != CHANGED.shape[1] + 2 else None
            del cache
            gc.collect()
            assert (gone() is None) == (kept is None)
            steps.gate.set()
            assert no_threads_soon()
            assert steps.chunks <= 1


def test_what_was_computed_for_the_swap_goes_with_the_cache_that_took_it() -> None:
    model = tiny.llama()
    cache = warm(model, "background")
    answer(model, CHANGED, cache, 2)
    cache.wait()
    exact, filled = weakref.ref(cache._exact), weakref.ref(cache._exact.result())  # type: ignore[union-attr]
    forced(model, D, cache)
    assert cache.report().swapped
    gc.collect()
    assert exact() is None
    assert filled() is None


def test_two_copies_take_over_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    for swap in ("sync", "background"):
        cache = warm(model, swap)
        text = answer(model, CHANGED, cache, 1 if swap == "sync" else 2).sequences
        other, sent = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
        more = joined(text[:, -1:], D)
        for each, following in ((cache, more), (other, joined(text[:, -1:], C))):
            each.wait()
            got = forced(model, following, each)
            expected = _forced_cold(model, text[:, :-1], following)
            each.wait()
            if swap == "sync":
                close(got, expected)
            again = forced(model, B[:, :9], each)
            close(again, _forced_cold(model, joined(text[:, :-1], following), B[:, :9]))
            assert each.report().swapped
        # What the one wrote is nothing to the other.
        close(forced(model, A, cache), _forced_cold(model, joined(text[:, :-1], more, B[:, :9]), A))
        # Elsewhere it goes on with what was reused.
        off = warm(model, "off")
        answer(model, CHANGED, off, 1 if swap == "sync" else 2)
        close(forced(model, more, sent), forced(model, more, off))
        assert not sent.report().swapped


def test_another_generation_with_the_model_while_the_thread_runs_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    library = library_of(model, EARLIER)
    monkeypatch.setattr(swapping, "CHUNK", 1)
    prompts = [joined(A, tiny.ids(1, 6, seed=seed), B, C) for seed in range(20, 26)]
    for prompt in prompts:
        cache = WarmStartCache(model, library, swap="background")
        text = answer(model, prompt, cache, 2).sequences
        started = cache._exact is not None and cache._exact.running
        assert started
        # These run parts of the model, for which layers are exchanged, and plain passes.
        for other in (WarmStartCache(model, library, strategy="exact"), GrowingCache(model), DynamicCache(config=model.config)):
            close(logits_of(model, prompt, other, 2), cold(model, answer(model, prompt, None, 2).sequences, 2))
        cache.wait()
        assert cache._exact is not None
        assert cache._exact.failure is None
        close(forced(model, joined(text[:, -1:], D), cache), _forced_cold(model, text[:, :-1], joined(text[:, -1:], D)))


def test_tokens_that_the_cache_was_not_told_of_leave_it_as_it_is() -> None:
    model = tiny.llama()
    cache, off = warm(model, "sync"), warm(model, "off")
    for each in (cache, off):
        answer(model, CHANGED, each, 1)
        with torch.no_grad():
            model(inputs_embeds=model.get_input_embeddings()(D), past_key_values=each)
    with said() as sentences:
        got = forced(model, C, cache)
    close(got, forced(model, C, off))
    assert sum("was not told of" in sentence for sentence in sentences) == 1
    assert not cache.report().swapped


@pytest.mark.full
def test_a_process_that_ends_while_the_thread_runs_ends_well() -> None:
    program = """
import torch
from hf_kvcaches import WarmStartCache
from hf_kvcaches.warmstart import planning, swapping
from tests import tiny
from tests.warmstart.test_swapping import CHANGED, EARLIER, OPEN, answer, library_of
torch.set_num_threads(1)
planning.WORTH, swapping.CHUNK = 2, 1
model = tiny.llama()
library = library_of(model, EARLIER)
caches = [WarmStartCache(model, library, strategy="align", swap="background", gate=OPEN) for _ in range(6)]
for cache in caches:
    answer(model, CHANGED, cache, 2)
assert cache._exact.running
print("over")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, "Fatal" in done.stderr) == (0, "over\n", False)


def test_without_a_swap_the_oracle_of_stretches_goes_on() -> None:
    model = tiny.llama()
    cache = warm(model, "off")
    text = answer(model, CHANGED, cache, 4).sequences
    _, reference = step_by_step(model, CHANGED, taken(cache), Source(model, EARLIER))
    forced(model, text[:, CHANGED.shape[1] : -1], reference)
    close(forced(model, D, cache), forced(model, D, reference))
    assert not cache.report().swapped


def test_finished_rows_are_swapped_with_their_padding() -> None:
    model = tiny.llama()
    ids, mask = left_padded(CHANGED, joined(D, B, D[:, :4]))
    cache = warm(model, "background")
    end = int(answer(model, ids, warm(model, "off"), 1, attention_mask=mask).sequences[0, -1])
    config = GenerationConfig(eos_token_id=end, pad_token_id=0, do_sample=False, max_new_tokens=4, return_dict_in_generate=True)
    text = model.generate(ids, attention_mask=mask, past_key_values=cache, generation_config=config).sequences
    cache.wait()
    seen = torch.nn.functional.pad(mask, (0, text.shape[1] - ids.shape[1] + 3), value=1)
    more = torch.cat([text[:, -1:], D[:, :3].repeat(2, 1)], 1)
    got = forced(model, more, cache, seen)
    assert cache.report().swapped
    positions = (seen.cumsum(-1) - 1).clamp_min(0)
    whole = torch.cat([text, D[:, :3].repeat(2, 1)], 1)
    with torch.no_grad():
        close(got, model(whole, attention_mask=seen, position_ids=positions).logits[:, -4:])
