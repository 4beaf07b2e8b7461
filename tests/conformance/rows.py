"""The rows of the matrix that generate text. Each holds a cache to what a user would notice.

A lossless cache is compared with `DynamicCache` on an untouched twin of the model. A lossy one is compared with itself in the plainest
use: one row, no padding, the same text token by token.
"""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import ConfigError, compat
from tests.conformance import models
from tests.conformance.driving import close, feed, generate, loop, reference, replay, rows_in, tokens
from tests.conformance.entries import Entry
from tests.helpers.prompts import left_padded

PROMPTS = tuple(tokens(length, seed=length) for length in (13, 7, 10))


def _continuation_logits(output: Any) -> torch.Tensor:
    return torch.stack(output.logits, dim=1)


def _same_as_dynamic(entry: Entry, model: PreTrainedModel, dtype: torch.dtype, output: Any, ids: torch.Tensor, **options: Any) -> None:
    """Asserts that a lossless cache generated what `DynamicCache` does, called in the same way."""
    if not entry.lossless:
        return
    twin = models.twin_of(model)
    expected = generate(twin, ids, DynamicCache(config=twin.config), **options)
    assert output.sequences.tolist() == expected.sequences.tolist(), "other tokens than with DynamicCache"
    close(entry, dtype, _continuation_logits(output), _continuation_logits(expected), "logits beside DynamicCache")


def _same_as_replayed(
    entry: Entry, model: PreTrainedModel, dtype: torch.dtype, output: Any, prompts: list[torch.Tensor], *, greedy: bool = True
) -> None:
    """Asserts that each generated row has the logits of its own text, run alone."""
    logits = _continuation_logits(output)
    new = logits.shape[1]
    for row, prompt in enumerate(prompts):
        text = torch.cat([prompt[0], output.sequences[row, -new:-1]])
        close(entry, dtype, logits[row], replay(entry, model, text, [prompt.shape[1], *[1] * (new - 1)]), f"logits of row {row} run alone")
    if greedy:
        assert logits.argmax(-1).tolist() == output.sequences[:, -new:].tolist(), "not the most likely tokens"


def _checked(
    entry: Entry, model: PreTrainedModel, dtype: torch.dtype, ids: torch.Tensor, *prompts: torch.Tensor, greedy: bool = True, **options: Any
) -> tuple[Any, Any]:
    """What is generated, and the cache; each row of a batch is a prompt that is also run alone."""
    cache = entry.make(model)
    output = generate(model, ids, cache, **options)
    _same_as_dynamic(entry, model, dtype, output, ids, **options)
    _same_as_replayed(entry, model, dtype, output, list(prompts), greedy=greedy)
    return output, cache


def greedy(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    _, cache = _checked(entry, model, dtype, PROMPTS[0], PROMPTS[0], new=16)
    assert cache.get_seq_length() == PROMPTS[0].shape[1] + 15


def left_padded_batch(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    ids, mask = left_padded(PROMPTS)
    _checked(entry, model, dtype, ids, *PROMPTS, mask=mask, new=10)


def padded_loop_without_positions(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """A loop of the user's own that leaves the numbering of tokens to the model: most count the padding, and so must the cache."""
    for prompts in (PROMPTS, PROMPTS[:1]):
        ids, mask = left_padded(prompts)
        more = torch.cat([tokens(5, seed=80 + row) for row in range(len(prompts))])
        padding = mask if len(prompts) > 1 else None
        logits = loop(model, entry.make(model), ids, more, padding)
        assert torch.isfinite(logits).all()
        if entry.lossless:
            twin = models.twin_of(model)
            close(entry, dtype, logits, loop(twin, DynamicCache(config=twin.config), ids, more, padding), "logits beside DynamicCache")


def chunked_prefill(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """`generate` cuts the prompt up as a loop over the model would; a last chunk of one token is among the cuts."""
    for chunk in (4, 5, 50):
        prompt, cache = PROMPTS[0], entry.make(model)
        output = generate(model, prompt, cache, prefill_chunk_size=chunk)
        assert cache.get_seq_length() == prompt.shape[1] + 7
        _same_as_dynamic(entry, model, dtype, output, prompt)
        spans = [min(chunk, prompt.shape[1] - start) for start in range(0, prompt.shape[1], chunk)]
        expected = replay(entry, model, output.sequences[0, :-1], [*spans, *[1] * 7])
        close(entry, dtype, _continuation_logits(output)[0], expected[len(spans) - 1 :], "logits after chunks")


def chunked_prefill_of_a_padded_batch(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """A chunk may hold nothing but padding for a row. Rows are cut at different places of their texts, so only lossless ones must agree."""
    ids, mask = left_padded(PROMPTS)
    cache = entry.make(model)
    output = generate(model, ids, cache, mask=mask, prefill_chunk_size=3)
    assert cache.get_seq_length() == ids.shape[1] + 7
    assert torch.isfinite(_continuation_logits(output)).all()
    _same_as_dynamic(entry, model, dtype, output, ids, mask=mask)
    if entry.lossless:
        _same_as_replayed(entry, model, dtype, output, list(PROMPTS))


def sampling(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    _checked(entry, model, dtype, PROMPTS[0], PROMPTS[0], greedy=False, do_sample=True, temperature=1.5, top_k=0)


def num_return_sequences(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    ids, mask = left_padded(PROMPTS[:2])
    options: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 0, "num_return_sequences": 3, "mask": mask}
    output, _ = _checked(entry, model, dtype, ids, *[prompt for prompt in PROMPTS[:2] for _ in range(3)], greedy=False, **options)
    assert len({tuple(row) for row in output.sequences.tolist()}) == 6


def _beams(entry: Entry, model: PreTrainedModel, dtype: torch.dtype, **more: Any) -> None:
    """Beams end up with the scores that their texts have when run alone, which needs every reordering to be right."""
    ids, mask = left_padded(PROMPTS[:2])
    new = 7
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0, "mask": mask, "new": new, **more}
    output = generate(model, ids, entry.make(model), **options)
    if entry.lossless:
        twin = models.twin_of(model)
        expected = generate(twin, ids, DynamicCache(config=twin.config), **options)
        assert output.sequences.tolist() == expected.sequences.tolist(), "other beams than with DynamicCache"
        close(entry, dtype, output.sequences_scores, expected.sequences_scores, "beam scores")
    for row, sequence in enumerate(output.sequences):
        prompt = PROMPTS[row // 2]
        text = torch.cat([prompt[0], sequence[-new:]])
        logits = replay(entry, model, text[:-1], [prompt.shape[1], *[1] * (new - 1)])
        score = logits.float().log_softmax(-1).gather(1, text[-new:, None]).mean()
        close(entry, dtype, output.sequences_scores[row] / new, score, f"mean score of beam {row} run alone")


def beam_search(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    _beams(entry, model, dtype)


def beam_sampling(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    _beams(entry, model, dtype, do_sample=True, top_k=0)


def _assisted(entry: Entry, model: PreTrainedModel, dtype: torch.dtype, prompt: torch.Tensor, **options: Any) -> None:
    output, cache = _checked(entry, model, dtype, prompt, prompt, greedy=not options.get("do_sample"), new=14, **options)
    assert cache.get_seq_length() == output.sequences.shape[1] - 1
    # What the drafts left behind must not show afterwards either.
    more = torch.cat([output.sequences[:, -1:], tokens(3, seed=90)], dim=1)
    if entry.records and any(cache.is_sliding):
        return  # up to some version sliding layers want a crop after each pass that they record
    spans = [1] * 4 if entry.records else [4]
    expected = replay(entry, model, torch.cat([output.sequences[:, :-1], more], dim=1), [prompt.shape[1], *[1] * 13, *spans])
    close(entry, dtype, feed(model, cache, more, spans)[0], expected[-len(spans) :], "logits after the drafts")


def assisted_by_a_model(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    _assisted(entry, model, dtype, PROMPTS[0], assistant_model=models.assistant_for(models.family_of(model), dtype))


def assisted_sampling(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    assistant = models.assistant_for(models.family_of(model), dtype)
    _assisted(entry, model, dtype, PROMPTS[0], assistant_model=assistant, do_sample=True, top_k=0)


def prompt_lookup(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """The prompt holds what the model is about to say, and then goes wrong, so that drafts are both kept and dropped."""
    twin = models.twin_of(model)
    start = tokens(6, seed=3)
    said = generate(twin, start, DynamicCache(config=twin.config), new=10).sequences
    prompt = torch.cat([said, tokens(2, seed=4), said[:, :8]], dim=1)
    _assisted(entry, model, dtype, prompt, prompt_lookup_num_tokens=3)


def chat(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Three turns with one cache; the last gives only the new tokens and the mask of the whole talk."""
    cache, new = entry.make(model), 5
    talk, spans, logits = tokens(9, seed=1), [9], []
    for turn in range(3):
        if turn < 2:
            output = generate(model, talk, cache, new=new)
            reply = output.sequences[:, -new:]
        else:
            fresh = talk[:, cache.get_seq_length() :]
            output = generate(model, fresh, cache, new=new, mask=torch.ones_like(talk))
            reply = output.sequences[:, -new:]
        logits.append(_continuation_logits(output)[0])
        question = tokens(6 - turn, seed=20 + turn)
        talk = torch.cat([talk, reply, question], dim=1)
        spans += [*[1] * (new - 1), 1 + question.shape[1]]
        assert cache.get_seq_length() == talk.shape[1] - question.shape[1] - 1
    spoken = talk[:, : cache.get_seq_length()]
    expected = replay(entry, model, spoken, spans[:-1])
    close(entry, dtype, torch.cat(logits), expected, "logits of the talk")
    assert torch.cat(logits).argmax(-1).tolist() == expected.argmax(-1).tolist()


def chat_of_a_padded_batch(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Questions of different lengths leave holes in the middle of the mask."""
    cache, new = entry.make(model), 4
    rows = [list(prompt[0].tolist()) for prompt in PROMPTS]
    spans = [[len(row)] for row in rows]
    ids, mask = left_padded(PROMPTS)
    logits = []
    for turn in range(3):
        output = generate(model, ids, cache, mask=mask, new=new)
        logits.append(_continuation_logits(output))
        questions = [tokens(2 + (turn + row) % 3, seed=30 + 3 * turn + row) for row in range(3)]
        asked, asked_mask = left_padded(questions)
        reply = output.sequences[:, -new:]
        ids = torch.cat([ids, reply, asked], dim=1)
        mask = torch.cat([mask, torch.ones_like(reply), asked_mask], dim=1)
        for row, question in enumerate(questions):
            rows[row] += reply[row].tolist() + question[0].tolist()
            spans[row] += [*[1] * (new - 1), 1 + question.shape[1]]
    for row in range(3):
        text = torch.tensor(rows[row], device=models.DEVICE)[: sum(spans[row][:-1])]
        close(
            entry,
            dtype,
            torch.cat([turn[row] for turn in logits]),
            replay(entry, model, text, spans[row][:-1]),
            f"talk of row {row} held alone",
        )


def repeated_prompt_cache(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """A prompt is run once, and its cache repeated for several samples."""
    prompt, cache = PROMPTS[0], entry.make(model)
    feed(model, cache, prompt[:, :-1], [prompt.shape[1] - 1])
    cache.batch_repeat_interleave(3)
    output = generate(model, prompt.repeat(3, 1), cache, do_sample=True, temperature=2.0, top_k=0)
    assert len({tuple(row) for row in output.sequences.tolist()}) == 3
    logits = _continuation_logits(output)
    for row in range(3):
        expected = replay(entry, model, output.sequences[row, :-1], [prompt.shape[1] - 1, *[1] * 8])
        close(entry, dtype, logits[row], expected[1:], f"logits of sample {row}")


def prompt_as_embeddings(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    prompt = PROMPTS[0]
    torch.manual_seed(0)
    output = model.generate(
        inputs_embeds=model.get_input_embeddings()(prompt).detach(),
        attention_mask=torch.ones_like(prompt),
        past_key_values=entry.make(model),
        max_new_tokens=8,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    _same_as_replayed(entry, model, dtype, output, [prompt])


def both_names(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """A chat is the same by each name of the argument and with the names mixed, in `generate` and in the model itself.

    Before transformers 5.24 there is one name.
    """
    plain, other = reference(entry, model)
    expected = _two_turns(plain, other, "past_key_values", "past_key_values")
    names = ("cache", "past_key_values") if "cache" in compat.parameter_names(type(model)) else ("past_key_values",)
    for first in names:
        for second in names:
            cache = entry.make(model)
            answer, logits = _two_turns(model, cache, first, second)
            assert answer.tolist() == expected[0].tolist()
            close(entry, dtype, logits, expected[1])
            with pytest.raises(ConfigError, match=r"generate makes one for each call"):
                model.generate(tokens(40, seed=3), **{second: cache}, max_new_tokens=2)


def _two_turns(model: PreTrainedModel, cache: Any, first: str, second: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The text of two turns, (1, tokens), and the logits of its last tokens, which the model is called with."""
    answer = model.generate(PROMPTS[0], **{first: cache}, max_new_tokens=5, do_sample=False)
    talk = torch.cat([answer, tokens(4, seed=2)], dim=1)
    answer = model.generate(talk, **{second: cache}, max_new_tokens=5, do_sample=False)
    with torch.no_grad():
        return answer, model(answer[:, cache.get_seq_length() :], **{first: cache}, use_cache=True).logits


def conflicting_arguments(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """A second cache asked for in the same call is an error of transformers, not a silent choice."""
    cache = entry.make(model)
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(PROMPTS[0], past_key_values=cache, cache_implementation="static", max_new_tokens=2)


GENERATING = rows_in(globals())
