"""One run of a producer over prompts, and the codes that are made on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_kvcaches import compat
from hf_kvcaches.core.verify import evaluating
from hf_kvcaches.errors import ConfigError, whole_number
from hf_kvcaches.translate.codes import Part
from hf_kvcaches.translate.head import CodesHead, Row
from hf_kvcaches.translate.states import PromptTokens, State, read_states

if TYPE_CHECKING:
    from hf_kvcaches.translate.translator import CacheTranslator


class Encoding:
    """Codes of prompts that are to be made.

    Args:
        first: The index of the first token with codes, padding included.
    """

    def __init__(self, translator: CacheTranslator, producer: Any, input_ids: Any, attention_mask: Any, first: int) -> None:
        self.translator, self.model = translator, translator.check_producer(producer)
        tokens = PromptTokens.of(input_ids, attention_mask)
        if int(tokens.real.sum(-1).min()) < 2:
            raise ConfigError.of(
                "input_ids", "at least two tokens a row", tuple(tokens.ids.shape), "The consumer runs the last one itself."
            )
        last = tokens.ids.shape[1] - 1
        first = whole_number("first", first, 0, f"an index before the last one, {last}", "Encode the whole conversation.", most=last - 1)
        self.tokens = PromptTokens.of(tokens.ids[:, :-1], tokens.real[:, :-1]).to(compat.input_device(self.model))
        before = self.tokens.real[:, :first].sum(-1).tolist()
        rows = tuple(Row.of(ids, skipped) for ids, skipped in zip(self.tokens.rows(), before, strict=True))
        self._kept = None
        if first:
            real = self.tokens.real.clone()
            real[:, :first] = False
            self._kept = real[self.tokens.real]
        self.head = CodesHead(translator.digest, rows, translator.part_heads)

    def run(self, on_part: Callable[[Part], Any]) -> None:
        """Hands each part on, in the order of the head."""
        waiting = list(self.translator.maps.encoders)
        if not waiting:
            return
        needed = frozenset[int]().union(*(encoder.needs for encoder in waiting))
        states: dict[int, State] = {}

        def take(layer: int, state: State) -> None:
            if layer in needed:
                states[layer] = state if self._kept is None else state.rows(self._kept)
            while waiting and waiting[0].needs <= states.keys():
                encoder = waiting.pop(0)
                on_part(Part(encoder.part, encoder.encode(states)))
                left = frozenset[int]().union(*(encoder.needs for encoder in waiting))
                for used in encoder.needs - left:
                    del states[used]

        inputs = frozenset[int]().union(*(encoder.inputs for encoder in waiting))
        # What dropout leaves is no state that any map was fitted to.
        with evaluating(self.model):
            read_states(self.model, self.tokens, take, hidden=sorted(inputs), upto=max(needed))
