"""`SummaryCache`: a prompt starts from the summary of a similar one, as the paper has it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, get_args

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.identity import identity_of, require_identity
from hf_kvcaches.core.layers import append
from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.core.rope import rotation_of
from hf_kvcaches.core.source import PrefillCall
from hf_kvcaches.core.view import LayerView
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError, require_choice, require_instance, whole_number
from hf_kvcaches.evaluate.observer import Attended, WatchingCache
from hf_kvcaches.reuse.layer import SplicedLayer, SplicingCache
from hf_kvcaches.reuse.partial import run_module, run_span
from hf_kvcaches.warmstart.encoders import Embedding, Encoder, encoder_of
from hf_kvcaches.warmstart.paper.adapters import Adapters, TrainedAdapters
from hf_kvcaches.warmstart.paper.gate import SummaryGate
from hf_kvcaches.warmstart.paper.positions import PositionCorrection
from hf_kvcaches.warmstart.paper.projector import SlotProjector
from hf_kvcaches.warmstart.paper.slots import LayerSlots, Layout, Slots, summary
from hf_kvcaches.warmstart.paper.swapping import ExactPrefill, Swap
from hf_kvcaches.warmstart.reading import Prompt, listed, token_ids


class _ReadCache(WatchingCache):
    """Collects the queries, keys, values and scaling of each layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.attended: list[Attended] = []
        super().__init__(model)

    def watch(self, attended: Attended) -> None:
        self.attended.append(attended)


@torch.no_grad()
def _read(model: PreTrainedModel, ids: torch.Tensor) -> list[Attended]:
    """Run a prompt, (1, tokens), and return what each layer attended with."""
    cache = _ReadCache(model)
    run_module(model.base_model, cache, ids.to(compat.input_device(model)))
    return cache.attended


class SummaryLibrary:
    """Summaries of prompts, in memory.

    Args:
        slots: How many slots a summary has for each layer and key head.
        encoder: See `WarmStartLibrary`.
        layout: `"salient"` or `"paper"`; see `summary`.
        tail: How many tokens at the end of a prompt no slot stands for; they are computed behind the slots.
        adapters: Maps for pooled slots that were trained for it, or None.
        correct_positions: Experimental, for models with learned positions (GPT-2), whose keys can't be rotated.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        slots: int = 64,
        encoder: str | Callable[[list[str]], Any] | Encoder | None = None,
        *,
        layout: Layout = "salient",
        tail: int = 1,
        adapters: TrainedAdapters | Adapters | None = None,
        correct_positions: bool = False,
    ) -> None:
        require_all_heads(model, "A summary", "Use WarmStartLibrary.")
        require_choice("layout", layout, get_args(Layout))
        self.model, self.tokenizer = compat.base_model(model), tokenizer
        self.slots, self.layout = whole_number("slots", slots, 1), layout
        self.tail = whole_number("tail", tail, 1, hint="The last token is always computed.")
        self.rotation = rotation_of(compat.decoder_config(self.model.config))
        self.correction = None
        if correct_positions:
            prompts = PositionCorrection.prompts_for(self.model)
            self.correction = PositionCorrection.of_model(
                self.model, ([layer.keys[0] for layer in _read(self.model, ids)] for ids in prompts)
            )
        elif self.rotation.why:
            raise UnsupportedError(f"model: {self.rotation.why}. Use WarmStartLibrary, which reuses common starts of prompts.")
        if isinstance(adapters, TrainedAdapters):
            adapters = adapters.checked(self.model, slots, layout, tail)
        self.adapters, self.encoder = adapters, encoder_of(encoder, self.model)
        self.digest = require_identity(self.model, "The library").digest
        self._summaries, self._embeddings = list[Slots](), list[Embedding]()

    def add(self, prompts: Prompt | Sequence[Prompt]) -> None:
        """Run prompts, texts or token ids, and keep their summaries."""
        for prompt in listed(prompts):
            ids = token_ids(prompt, self.model, self.tokenizer)
            self._summaries.append(self.summarised(ids))
            self._embeddings.append(self._embedded(ids))

    def summarised(self, ids: Sequence[int]) -> Slots:
        """Run a prompt, and return its summary."""
        if len(ids) <= self.tail:
            raise ConfigError.of("prompts", f"at least {self.tail + 1} tokens each", len(ids))
        read = _read(self.model, torch.tensor([list(ids)]))
        keys, values = ([getattr(layer, side)[0, :, : -self.tail] for layer in read] for side in ("keys", "values"))
        queries = [layer.query[0, :, -1] * layer.scaling for layer in read]
        slots = summary(keys, values, queries, len(ids), self.slots, self.layout)
        return slots if self.adapters is None else self.adapters.apply(slots, self.rotation.layers)

    def _embedded(self, ids: Sequence[int]) -> Embedding:
        return self.encoder.encode(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False), ids)

    def nearest(self, ids: Sequence[int]) -> tuple[Slots, float] | None:
        """Return the summary of the most similar prompt, and its cosine."""
        if not self._summaries:
            return None
        cosines = np.stack(self._embeddings) @ self._embedded(ids)
        best = int(cosines.argmax())
        return self._summaries[best], float(cosines[best])

    def __deepcopy__(self, memo: dict[int, Any]) -> SummaryLibrary:
        return self


class SummaryLayer(SplicedLayer):
    """A layer that begins, after `take_slots`, with slots in place of a prompt's first tokens; `seen` counts the replaced tokens."""

    row_tensors: ClassVar[tuple[str, ...]] = (*SplicedLayer.row_tensors, "counts", "places")
    counters: ClassVar[tuple[str, ...]] = (*SplicedLayer.counters, "left_out")

    def __init__(self) -> None:
        super().__init__()
        # (1, kv_heads, slots): how many tokens each slot stands for, and its column in the mask.
        self.counts: torch.Tensor | None = None
        self.places: torch.Tensor | None = None
        self.left_out = 0  # tokens seen less slots kept

    @property
    def kept(self) -> int:
        return super().kept - self.left_out

    def take_slots(self, slots: LayerSlots, seen: int) -> None:
        """Begin with slots that stand for `seen` tokens."""
        keys, values, places, counts = (tensor[None] for tensor in slots)
        self.lazy_initialization(keys, values)
        self.key_buffer, self.value_buffer = append(None, keys, 0), append(None, values, 0)
        self.counts, self.places, self.left_out, self.seen = counts, places, seen - keys.shape[2], seen

    def take_tokens(self, keys: torch.Tensor, values: torch.Tensor, seen: int) -> None:
        """Replace the content by all tokens, in buffers whose first `seen` slots are filled."""
        self.key_buffer, self.value_buffer, self.counts, self.places = keys, values, None, None
        self.left_out, self.seen, self.dropped, self.offset = 0, seen, 0, 0

    def exact_states(self, window: bool = False) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        return super().exact_states(window) if self.counts is None else None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.counts is None:
            return super().update(key_states, value_states, *args, **kwargs)
        self.check_new_tokens(key_states, value_states)
        first, start = self.seen, self.kept
        self.key_buffer, self.value_buffer = append(self.key_buffer, key_states, start), append(self.value_buffer, value_states, start)
        self.seen += key_states.shape[2]
        view = _SlotView(self, self.key_buffer.narrow(2, 0, self.kept), self.value_buffer.narrow(2, 0, self.kept), first)
        return view, view

    def crop(self, tokens_to_remove: int) -> None:
        if self.counts is not None and -int(tokens_to_remove) > self.kept - self.counts.shape[2]:
            raise UnsupportedError("crop: the last tokens reach into a prompt of which only a summary is kept. reset() the cache.")
        super().crop(tokens_to_remove)


class _SlotView(LayerView):
    """Slots and the tokens behind them, (1, kv_heads, slots + tokens, head_dim), in place of keys and of values."""

    def __init__(self, layer: SummaryLayer, keys: torch.Tensor, values: torch.Tensor, first: int) -> None:
        self.layer, self.keys, self.values, self.first = layer, keys, values, first

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        layer = self.layer
        assert layer.counts is not None
        assert layer.places is not None
        # A slot is as visible as the token at its position; its count is a bias on the logits.
        slots = layer.counts.shape[2]
        behind = (layer.left_out + torch.arange(slots, self.keys.shape[2], device=query.device)).expand(*layer.counts.shape[:2], -1)
        columns = torch.cat([layer.places.round().long(), behind], 2)[:, :, None]
        hidden = columns > self.first + torch.arange(query.shape[2], device=query.device)[:, None]
        weights = nn.functional.pad(layer.counts, (0, behind.shape[2]), value=1.0).log()[:, :, None].expand_as(hidden)
        bias = weights.masked_fill(hidden, torch.finfo(query.dtype).min).to(query.dtype)
        bias = bias.repeat_interleave(query.shape[1] // bias.shape[1], 1)
        attend = nn.functional.scaled_dot_product_attention
        output = attend(query, self.keys, self.values, bias, scale=kwargs.get("scaling"), enable_gqa=True)
        return output.transpose(1, 2).contiguous(), None


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
        self.reason, self.served, self.swapped = "", False, False
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
        for layer, row in zip(self.layers, self._moved(slots, tokens).layers, strict=True):
            states = row._replace(keys=row.keys.to(self.model.dtype), values=row.values.to(self.model.dtype))
            layer.take_slots(states, tokens - tail)
        self.served = True
        self._exact = None if self.swap == "off" else ExactPrefill(self.model, call.input_ids.clone())
        return tokens - tail

    def _moved(self, slots: Slots, tokens: int) -> Slots:
        """Move a summary to the end of a prompt of `tokens` tokens: one rotation is right for all slots."""
        library = self.library
        # A prompt of fewer tokens than slots keeps all of them, so nothing is projected.
        if self.projector is not None and all(layer.keys.shape[1] == library.slots for layer in slots.layers):
            slots = self.projector.apply(slots, tokens, library.rotation.layers)
        elif library.correction is not None:
            slots = library.correction.shifted(slots, tokens - slots.length)
        else:
            slots = slots.shifted(tokens - slots.length, library.rotation.layers)
        # In a shorter prompt some slots have positions before its start.
        return replace(slots, layers=[layer._replace(positions=layer.positions.clamp_min(0)) for layer in slots.layers])

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> None:
        exact = self._exact
        if exact is not None and self.seen:
            if self.swap == "background" and not exact.started:
                exact.start(self)  # here, so that it does not delay the first token
            elif not exact.running:
                self._take_over(exact)
                self._exact = None  # last, so that an interrupted swap is repeated before the next pass
        super().observe(input_ids, attention_mask, position_ids)

    def steps_matter(self) -> bool:
        return self._exact is not None or super().steps_matter()

    @torch.no_grad()
    def _take_over(self, exact: ExactPrefill) -> None:
        """Replace the summary by the exact keys and values, and compute the generated tokens anew."""
        if exact.failure is not None:
            sentence = f"The exact prefill in the background failed ({exact.failure!r}); the prompt is run now."
            warnings.warn(sentence, RuntimeWarning, stacklevel=4)
        if identity_of(self.model).digest != self.library.digest or len(self.log) != self.seen or self.exchanged:
            warnings.warn("The model or the rows have changed, so the summary stays.", RuntimeWarning, stacklevel=4)
            return
        cache, start = exact.result(), exact.ids.shape[1]
        if self.seen > start:
            ids = self.log.ids[:, start : self.seen].to(exact.ids.device)
            run_span(self.model, cache, ids, torch.arange(start, self.seen, device=ids.device))
        for layer, exact_layer in zip(self.layers, cache.layers, strict=True):
            layer.take_tokens(exact_layer.key_buffer, exact_layer.value_buffer, self.seen)
        self.swapped = True

    def wait(self) -> None:
        """Wait for the exact prefill in the background, if there is one; the next pass goes on from it."""
        if self._exact is not None and self._exact.started:
            self._exact.result()

    def reset(self) -> None:
        if self._exact is not None:
            self._exact.stop()
        super().reset()
        self._exact, self.served, self.swapped = None, False, False
