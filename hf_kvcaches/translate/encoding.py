"""Run a producer over prompts, and make codes while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError, whole_number
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.translate.codes import CodesHead, Part, PartHead, Row
from hf_kvcaches.translate.maps import PartEncoder
from hf_kvcaches.translate.states import PromptTokens, State, read_states


class Encoding:
    """The encoding of prompts from the index `first` on, padding included: its head, and its parts once it runs.

    Args:
        model: The producer.
        encoders: Those of the translator.
        digest: That of the translator.
        part_heads: The parts of a message.
    """

    def __init__(
        self,
        model: Any,
        encoders: Sequence[PartEncoder],
        digest: str,
        part_heads: tuple[PartHead, ...],
        input_ids: Any,
        attention_mask: Any,
        first: int,
    ) -> None:
        self.encoders, self.model = encoders, model
        tokens = PromptTokens.of(input_ids, attention_mask)
        if int(tokens.real.sum(-1).min()) < 2:
            hint = "The consumer runs the last one itself."
            raise ConfigError.of("input_ids", "at least two tokens a row", tuple(tokens.ids.shape), hint)
        last = tokens.ids.shape[1] - 1
        first = whole_number("first", first, 0, f"an index before the last one, {last}", "Encode the whole conversation.", most=last - 1)
        self.tokens = PromptTokens.of(tokens.ids[:, :-1], tokens.real[:, :-1]).to(compat.input_device(self.model))
        coded = self.tokens.real.clone()
        coded[:, :first] = False
        self._coded = coded[self.tokens.real] if first else None
        skipped = (self.tokens.real.sum(-1) - coded.sum(-1)).tolist()
        rows = tuple(Row.of(ids, count) for ids, count in zip(self.tokens.rows(), skipped, strict=True))
        self.head = CodesHead(digest, rows, part_heads)

    def run(self, on_part: Callable[[Part], Any]) -> None:
        """Pass on each part, in the order of the head, as soon as the producer has its layers."""
        if not self.encoders:
            return
        pending, states = list(self.encoders), dict[int, State]()

        def on_state(layer: int, state: State) -> None:
            states[layer] = state if self._coded is None else state.rows(self._coded)
            while pending and pending[0].needs <= states.keys():
                encoder = pending.pop(0)
                on_part(Part(encoder.part, encoder.encode(states)))
            for unused in states.keys() - frozenset[int]().union(*(encoder.needs for encoder in pending)):
                del states[unused]

        inputs = frozenset[int]().union(*(encoder.inputs for encoder in pending))
        upto = max(layer for encoder in pending for layer in encoder.needs)
        # Maps were fitted to states without dropout.
        with evaluating(self.model):
            read_states(self.model, self.tokens, on_state, hidden=inputs, upto=upto)

    def run_in_thread(self) -> Iterator[Part]:
        """Yield each part while the producer runs in another thread."""
        parts: SimpleQueue[Part | None] = SimpleQueue()
        with ThreadPoolExecutor(1) as executor:
            running = executor.submit(self.run, parts.put)
            running.add_done_callback(lambda _: parts.put(None))
            yield from iter(parts.get, None)
            running.result()
