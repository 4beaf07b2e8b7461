"""`SummaryLibrary` and `SummaryCache`: a prompt starts from the summary of a similar one, as the paper has it."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.identity import identity_of, require_identity
from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.core.rope import rotation_of
from hf_kvcaches.core.source import PrefillCall
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError, require_choice, require_instance, whole_number
from hf_kvcaches.reuse.layer import PlainCache, SplicingCache
from hf_kvcaches.reuse.layout import LayerStates
from hf_kvcaches.reuse.partial import run_span
from hf_kvcaches.reuse.store import mark, own_stream, wait_for
from hf_kvcaches.warmstart.encoders import Embedding, Encoder
from hf_kvcaches.warmstart.entries import Prompt, prompt_states, rows_of
from hf_kvcaches.warmstart.paper.maps import PositionCorrection, SlotProjector, TrainedAdapters
from hf_kvcaches.warmstart.paper.slots import Slots, SummaryLayer, summary

Swap = Literal["off", "sync", "background"]

# Tokens that a thread runs at a time; between two chunks it can be stopped.
CHUNK = 128


class SummaryGate(NamedTuple):
    """When a prompt is started from the summary of its nearest neighbour: the limits of "CP-KVP", section 2.5."""

    tau: float = 0.9  # the least cosine of the two prompts
    lengths: tuple[float, float] = (0.5, 2.0)  # the least and the greatest length of the earlier prompt, as a multiple of the new one's

    def refusal(self, similarity: float, earlier: int, tokens: int) -> str:
        """Why prompts of so many tokens are too different, as a sentence; "" if they are not."""
        if not similarity >= self.tau:  # or NaN
            return f"The similarity is {similarity:.3f}, below {self.tau:g}."
        least, most = self.lengths
        if not least * tokens <= earlier <= most * tokens:
            return f"The earlier prompt is {earlier / max(tokens, 1):.2f} times as long, outside {least:g} to {most:g}."
        return ""


class SummaryLibrary:
    """Summaries of prompts, in memory.

    Args:
        slots: How many slots a summary has for each layer and key head.
        tail: How many tokens at the end of a prompt no slot stands for; they are computed behind the slots.
        adapters: Maps for slots that were trained for it, or None.
        correct_positions: Experimental, for models with learned positions (GPT-2), whose keys can't be rotated.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        slots: int = 64,
        *,
        tail: int = 1,
        adapters: TrainedAdapters | None = None,
        correct_positions: bool = False,
    ) -> None:
        require_all_heads(model, "A summary", "Use WarmStartLibrary.")
        self.model, self.tokenizer, self.slots = compat.base_model(model), tokenizer, whole_number("slots", slots, 1)
        self.tail = whole_number("tail", tail, 1, hint="The last token is always computed.")
        self.rotation = rotation_of(compat.decoder_config(self.model.config))
        self.correction = PositionCorrection.of_model(self.model) if correct_positions else None
        if self.correction is None and self.rotation.why:
            raise UnsupportedError(f"model: {self.rotation.why}. Use WarmStartLibrary, which reuses common starts of prompts.")
        self.adapters = None if adapters is None else adapters.checked(self.model, self.slots, "paper", self.tail)
        self.encoder, self.digest = Encoder(), require_identity(self.model, "The library").digest
        self._summaries, self._embeddings = list[Slots](), list[Embedding]()

    def add(self, prompts: Prompt | Sequence[Prompt]) -> None:
        """Run prompts, texts or token ids, and keep their summaries."""
        for ids, _ in rows_of(prompts, self.model, self.tokenizer):
            self._summaries.append(self.summarised(ids))
            self._embeddings.append(self.encoder.encode("", ids))

    def summarised(self, ids: Sequence[int]) -> Slots:
        """Run a prompt, and return its summary."""
        if len(ids) <= self.tail:
            raise ConfigError.of("prompts", f"at least {self.tail + 1} tokens each", len(ids))
        layers = [LayerStates(keys[:, : -self.tail], values[:, : -self.tail]) for keys, values in prompt_states(self.model, ids)]
        slots = summary(layers, len(ids), self.slots)
        return slots if self.adapters is None else self.adapters.apply(slots, self.rotation.layers)

    def nearest(self, ids: Sequence[int]) -> tuple[Slots, float] | None:
        """Return the summary of the most similar prompt, and its cosine."""
        if not self._summaries:
            return None
        cosines = np.stack(self._embeddings) @ self.encoder.encode("", ids)
        best = int(cosines.argmax())
        return self._summaries[best], float(cosines[best])

    def __deepcopy__(self, memo: dict[int, Any]) -> SummaryLibrary:
        return self


class ExactPrefill:
    """Runs a prompt, (1, tokens), as if there were no summary: in a thread, or when the result is asked for.

    Attributes:
        stopped: Makes the thread end after its chunk.
        error: What the thread failed with, or None.
    """

    def __init__(self, model: weakref.ref[PreTrainedModel], ids: torch.Tensor) -> None:
        self.ids, self.stopped = ids, threading.Event()
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self._model = model
        self._cache: PlainCache | None = None
        self._events = mark([ids])  # behind the work that is queued on a GPU

    def start(self, owner: object) -> None:
        """Start a thread, which ends soon after it is stopped, the owner is freed, or the main thread has ended."""
        weakref.finalize(owner, self.stopped.set)  # refers to the event alone, so that the filled cache can be freed
        # The interpreter would wait for a pool's thread, and be taken down by a daemon that is computing.
        thread = threading.Thread(target=self._run_in_thread, name="hf_kvcaches-prefill")
        thread.start()
        self.thread = thread

    def _run_in_thread(self) -> None:
        try:
            self._run(stoppable=True)
        except BaseException as error:  # the cache warns of it
            self.error = error

    def result(self) -> PlainCache:
        """Return the filled cache, computed now if no thread has."""
        if self.thread is not None:
            self.thread.join()
        if self._cache is None:
            self._run()
        assert self._cache is not None
        wait_for(self._events, self._cache.owned_tensors().values())
        return self._cache

    def _run(self, stoppable: bool = False) -> None:
        """Fill a cache, in chunks between which a thread can end."""
        model = self._model()
        if model is None:
            raise RuntimeError("the model is gone")
        with own_stream(self._events), torch.no_grad():
            cache, tokens = PlainCache(model), self.ids.shape[1]
            for start in range(0, tokens, CHUNK):
                if stoppable and (self.stopped.is_set() or not threading.main_thread().is_alive()):
                    return
                positions = torch.arange(start, min(start + CHUNK, tokens), device=self.ids.device)
                run_span(model, cache, self.ids[:, start : start + CHUNK], positions)
            self._events, self._cache = mark(cache.owned_tensors().values()), cache

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactPrefill:
        """A copy runs the prompt itself: neither a thread nor the buffers that it fills can belong to two caches."""
        return ExactPrefill(self._model, self.ids)


class SummaryCache(SplicingCache):
    """Starts a prompt from the summary of its nearest neighbour, and computes only its tail; single prompts.

    Paper: "CP-KVP", section 2.5. What it answers is the earlier prompt until the exact prefill is swapped in.

    Args:
        gate: When the nearest prompt is near enough.
        swap: When the exact prefill replaces the summary: `"off"` (never), `"sync"` (before the second token) or `"background"` (once a
            thread has computed it).
        projector: A `SlotProjector`, or None.

    Attributes:
        served: Whether the prompt was started from a summary.
        swapped: Whether the exact prefill has replaced it.
    """

    def __init__(
        self,
        model: Any,
        library: SummaryLibrary,
        *,
        gate: SummaryGate | None = None,
        swap: Swap = "off",
        projector: SlotProjector | None = None,
    ) -> None:
        require_instance("library", library, SummaryLibrary, {"model": model})
        require_choice("swap", swap, get_args(Swap))
        super().__init__(model)
        if any(layer.window is not None for layer in self.layers):
            raise UnsupportedError("model: a slot has no single place in a sliding window. Use WarmStartCache.")
        if identity_of(self.model).digest != library.digest:
            raise FingerprintMismatch("library: was made for another model, or with other adapters. Make one with this model.")
        if projector is not None and library.correction is not None:
            raise UnsupportedError("projector: keys with learned positions can't be rotated to a common position. Leave it out.")
        self.library, self.gate, self.swap, self.projector = library, gate or SummaryGate(), swap, projector
        self.served = self.swapped = False
        self._exact: ExactPrefill | None = None

    def make_layer(self, layer_idx: int) -> SummaryLayer:
        return SummaryLayer()

    @property
    def why_inexact(self) -> str:
        return "It began with the summary of another prompt." if self.served and not self.swapped else ""

    def settings(self) -> dict[str, Any]:
        raise UnsupportedError("save: a SummaryCache depends on its library. Let the exact prefill replace the summary in another cache.")

    def take_prefill(self, call: PrefillCall) -> int:
        self.reason = ""
        tokens, tail = call.input_ids.shape[1], self.library.tail
        if self.seen or len(call.input_ids) > 1 or self.log.padding(tokens) != [0] or torch.is_grad_enabled():
            self.reason = "Only the first prompt of a cache, alone and without gradients, is started from a summary."
            return 0
        found = self.library.nearest(call.input_ids[0].tolist())
        if found is None or tokens <= tail or call.most < tokens - tail or identity_of(self.model).digest != self.library.digest:
            self.reason = "The library has nothing for this prompt."
            return 0
        slots, similarity = found
        self.reason = self.gate.refusal(similarity, slots.length, tokens)
        if self.reason:
            return 0
        for layer, states in zip(self.layers, self._moved(slots, tokens).layers, strict=True):
            layer.take_slots(states, tokens - tail)
        self.served, self.swapped = True, False
        self._exact = None if self.swap == "off" else ExactPrefill(weakref.ref(self.model), call.input_ids.clone())
        return tokens - tail

    def _moved(self, slots: Slots, tokens: int) -> Slots:
        """Move a summary to the end of a prompt of `tokens` tokens: one rotation is right for all slots."""
        library = self.library
        # A prompt of fewer tokens than slots keeps all of them, so nothing is projected.
        if self.projector is not None and len(slots.positions) == library.slots:
            return self.projector.apply(slots, tokens, library.rotation.layers)
        if library.correction is not None:
            return library.correction.shifted(slots, tokens - slots.length)
        return slots.shifted(tokens - slots.length, library.rotation.layers)

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> None:
        exact = self._exact
        if exact is not None and self.seen:
            if self.swap == "background" and exact.thread is None:
                exact.start(self)  # here, so that it does not delay the first token
            elif exact.thread is None or not exact.thread.is_alive():
                self._take_over(exact)
                self._exact = None  # last, so that an interrupted swap is repeated before the next pass
        super().observe(input_ids, attention_mask, position_ids)

    def steps_matter(self) -> bool:
        return self._exact is not None or super().steps_matter()

    @torch.no_grad()
    def _take_over(self, exact: ExactPrefill) -> None:
        """Replace the summary by the exact keys and values, and compute the generated tokens anew."""
        if exact.error is not None:
            sentence = f"The exact prefill in the background failed ({exact.error!r}); the prompt is run now."
            warnings.warn(sentence, RuntimeWarning, stacklevel=4)
        if identity_of(self.model).digest != self.library.digest or len(self.log) != self.seen or self.exchanged:
            warnings.warn("The model or the rows have changed, so the summary stays.", RuntimeWarning, stacklevel=4)
            return
        cache, start = exact.result(), exact.ids.shape[1]
        cache.abandon_prefill(start)  # where an earlier swap was interrupted
        if self.seen > start:
            ids = self.log.ids[:, start : self.seen].to(exact.ids.device)
            run_span(self.model, cache, ids, torch.arange(start, self.seen, device=ids.device))
        for layer, exact_layer in zip(self.layers, cache.layers, strict=True):
            layer.take_tokens(exact_layer.key_buffer, exact_layer.value_buffer, self.seen)
        self.swapped = True

    def reset(self) -> None:
        if self._exact is not None:
            self._exact.stopped.set()
        super().reset()
        self._exact, self.served, self.swapped = None, False, False
