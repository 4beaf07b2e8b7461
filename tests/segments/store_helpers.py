"""Prompts that are asked with and without a store of segments, in this process and in others."""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - the forkserver has it loaded, then
from transformers import PreTrainedModel

from hf_kvcaches import SegmentReuseCache, SegmentStore
from tests import tiny
from tests.helpers.stores import PROCESSES

# Tokens of a prompt, and of each of its segments: the last is cut off, because the cut ends there.
LENGTH, PART = 48, 16
# All but the last token, which is always computed.
WHOLE = LENGTH - 1


def opened(folder: Path) -> SegmentStore:
    return SegmentStore(f"disk:{folder}", quantization=None)


class Answer(NamedTuple):
    """What came of a prompt: the logits of its last token and of those generated, and how many tokens were reused."""

    logits: torch.Tensor
    reused: int
    keys: tuple[str, ...]


def prompt(seed: int, shared: int = 0) -> torch.Tensor:
    """A row of tokens, of which the first are those of prompt 0."""
    return torch.cat([tiny.ids(1, LENGTH, seed=0)[:, :shared], tiny.ids(1, LENGTH, seed=seed)[:, shared:]], dim=1)


def small() -> PreTrainedModel:
    return tiny.llama(num_hidden_layers=2, hidden_size=16, intermediate_size=16)


def ask(
    model: Any, ids: torch.Tensor, store: SegmentStore | None = None, mode: str = "exact", tokenizer: Any = None, tokens: int = 2
) -> Answer:
    """Has a model go on from a prompt, which is cut into segments of `PART` tokens. Without a store nothing is reused."""
    cuts = [(start, min(start + PART, ids.shape[1])) for start in range(0, ids.shape[1], PART)]
    cache = None if store is None else SegmentReuseCache(model, store, tokenizer, mode, spans=[cuts])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    report = None if cache is None else cache.report()
    keys = () if report is None else tuple(key for span in report.spans for key in span.segments)
    return Answer(torch.stack(out.logits), 0 if report is None else report.reused_tokens, keys)


def right(model: Any, ids: torch.Tensor, store: SegmentStore, **options: Any) -> Answer:
    """Asks, and holds the logits to those without reuse. With `mode="exact"` and nothing quantised they are equal but for rounding."""
    answer, plain = ask(model, ids, store, **options), ask(model, ids)
    torch.testing.assert_close(answer.logits, plain.logits, rtol=1e-5, atol=1e-5)
    return answer


def blob_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kvblob"))


def real_bytes(location: str) -> int:
    """What all segments take in the back-end itself."""
    if location.startswith("disk:"):
        return sum(path.stat().st_size for path in blob_files(Path(location.removeprefix("disk:"))))
    import redis

    url, _, prefix = location.partition("?prefix=")
    client = redis.Redis.from_url(url)
    prefix = prefix or "hf_kvcaches"
    return int(sum(client.strlen(key) for key in client.keys(f"{prefix}:body:*")))


# What other processes do.


def answer_questions(location: str, options: dict[str, Any], pipe: Connection) -> None:
    """Asks the prompts that come through a pipe, and answers with how much of each was reused."""
    torch.set_num_threads(1)
    model = small()
    with SegmentStore(location, quantization=None, **options) as store:
        pipe.send("ready")
        for seeds in iter(pipe.recv, None):
            found = [right(model, prompt(*seed), store).reused for seed in seeds]
            store.flush()
            pipe.send(found)
        pipe.send(store.report())


def ask_after_fork(location: str, pipe: Connection) -> None:
    """Asks, forks while the store's thread is at work, and asks again in the child, where there is no such thread."""
    torch.set_num_threads(1)
    model, store = small(), SegmentStore(location, quantization=None)
    ask(model, prompt(1), store)
    store.flush()
    begun, over = threading.Event(), threading.Event()
    store.queue.add(lambda: begun.set() or over.wait(30))
    begun.wait(30)
    if os.fork() == 0:
        found = [right(model, prompt(seed), store).reused for seed in (1, 2, 2)]
        store.flush()
        pipe.send(found)
        os._exit(0)
    os.wait()
    over.set()


class Other:
    """Another process that shares a store. It has its own model of the same weights.

    Args:
        location: Of the store.
        **options: Of the store.
    """

    def __init__(self, location: str, **options: Any) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=answer_questions, args=(location, options, theirs), daemon=True)
        self._process.start()
        theirs.close()
        assert self.answer() == "ready"

    def ask(self, *seeds: tuple[int, ...]) -> None:
        """Sends prompts, by the arguments of `prompt`, and does not wait."""
        self._pipe.send(seeds)

    def answer(self) -> Any:
        assert self._pipe.poll(60), "the other process hangs"
        return self._pipe.recv()

    def end(self) -> Any:
        """Has it close its store and end; returns the store's last report."""
        self._pipe.send(None)
        report = self.answer()
        self._process.join(30)
        assert self._process.exitcode == 0
        return report


def run_apart(target: Any, *arguments: Any) -> Any:
    """What a function sends, run in another process."""
    ours, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(60), "the other process hangs"
    found = ours.recv()
    process.join(30)
    return found
