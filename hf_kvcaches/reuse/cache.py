"""The bases of caches that reuse stored keys and values."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.identity import Identity
from hf_kvcaches.core.layers import GrowingLayer
from hf_kvcaches.core.parallel import is_tensor_parallel, shard_of
from hf_kvcaches.core.prompt import PrefillCall, Stage
from hf_kvcaches.core.refusal import Refusal
from hf_kvcaches.core.source import SourceCache
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.reuse import layout
from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.plan import PromptPlan, PromptRow
from hf_kvcaches.reuse.record import NewPrompt, PromptStates, Recorder
from hf_kvcaches.reuse.sparse import spans_refused
from hf_kvcaches.reuse.store import SpanStore
from hf_kvcaches.reuse.writer import write_rows


class SplicingCache(SourceCache):
    """Keeps every token, in buffers that stored tokens can be written into at any index.

    A subclass implements `take_prefill`.

    Args:
        model: A transformers model.
        decode_with: A cache that takes over the prompt's tokens once it is answered; None to keep them all here.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.

    Attributes:
        reason: Why the last prompt was neither looked up nor stored, as a sentence; "" where it was.
        exchanged: Whether rows were reordered, selected or repeated.
    """

    def __init__(self, model: Any, *, decode_with: KVCache | None = None, offloading: bool = False) -> None:
        super().__init__(model, decode_with=decode_with, offloading=offloading)
        self._check_layers()
        if self.holder is None:  # which takes all tokens of a layer
            for layer, (kind, plain) in zip(self.layers, compat.layer_plan(self.config), strict=True):
                if kind == "sliding_attention":
                    layer.see_window(plain.sliding_window)
        self.shard = shard_of(model)
        if self.shard is None and self._model is not None and is_tensor_parallel(self.model):
            raise UnsupportedError(
                f"model: {type(self).__name__} serves tensor parallelism that splits keys and values by head, and this model's plan splits "
                "other modules only. Use GrowingCache."
            )
        self.exchanged, self.reason = False, ""

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> None:
        super().observe(input_ids, attention_mask, position_ids)
        if self.holder is None and not self.offloading:
            for layer in self.layers:
                if layer.window is not None:
                    layer.drop_unseen() if input_ids.shape[1] == 1 else layer.fit_slots(input_ids.shape[1])

    def steps_matter(self) -> bool:
        return any(layer.window is not None for layer in self.source_layers)

    @property
    def dropped(self) -> int:
        """How many of the first slots are lost in some layer: the model's windows no longer reach back to them."""
        return max(layer.dropped for layer in self.source_layers)

    def make_layer(self, layer_idx: int) -> SplicedLayer:
        return SplicedLayer()

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Fill the cache with all tokens of a prompt but the last, as `generate` does.

        Args:
            input_ids: (batch, tokens), the tokens that follow those in the cache.
            attention_mask: (batch, tokens seen before + new tokens), 1 for real tokens; or None.

        Returns:
            How many tokens the cache has seen. Go on with `model(input_ids[:, -1:], past_key_values=cache)` or `generate(input_ids, ...)`.
        """
        if self.holder is not None:
            raise UnsupportedError(
                "prefill: with decode_with, the pass that answers the prompt hands it over. Pass the prompt to generate."
            )
        if input_ids.ndim != 2 or input_ids.shape[1] < 2:
            raise ConfigError.of("input_ids", "at least two tokens a row, (batch, tokens)", tuple(input_ids.shape))
        with torch.no_grad():
            self.read_prompt(input_ids, attention_mask)
        return self.seen

    def read_prompt(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        """Have the model read all tokens of a prompt but the last."""
        self.read(input_ids[:, :-1], None if attention_mask is None else attention_mask[:, :-1])

    def read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        """Run the model, with the positions that `generate` passes."""
        self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            **compat.cache_kwargs(self.model, self),
            logits_to_keep=1,
            **_generated_positions(self.model, attention_mask, input_ids.shape[1]),
        )

    def prompt_left(self, refusal: Refusal) -> None:
        self.reason = str(refusal)

    def take(self, slots: int) -> int:
        """Count the first slots as seen, now that they hold the prompt's tokens; return how many of them are new."""
        before = self.seen
        for layer in self.layers:
            layer.seen = slots
        return slots - before

    def abandon_prefill(self, seen: int) -> None:
        # Passes write behind the seen slots, so these are unchanged.
        for layer in self.layers:
            if seen == 0:
                layer.reset()
            layer.seen = seen
        self.log.crop(seen)
        self.stage = Stage.OPEN

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.source_layers:
            layer.require_croppable(tokens_to_remove)
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.exchanged, self.reason = False, ""

    def pick_rows(self, of_layer: Callable[[Any], None], pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().pick_rows(of_layer, pick)
        self.exchanged = True

    def _check_layers(self) -> None:
        foreign = sorted({kind for kind, _ in compat.layer_plan(self.config) if kind not in self.own_layer_types})
        if foreign:
            raise UnsupportedError(f"model: layers of the types {foreign} keep no keys and values that could be reused. Use DynamicCache.")
        if self.rotation.refused:
            raise UnsupportedError(f"model: {self.rotation.why}. Use DynamicCache.")
        if self._model is not None:
            decoder_layers(self.model)  # refuses models without decoder layers
        if compat.is_family(self.config, "inserts_tokens"):
            raise UnsupportedError("model: it inserts tokens before every text, which count in the cache. Use DynamicCache.")
        if self.learned_prompt:
            raise UnsupportedError("model: a learned prompt stands before every text, and is in no fingerprint. Use DynamicCache.")


class ReuseCache(SplicingCache):
    """Takes keys and values of tokens that earlier prompts had from a store, and has the others computed (`fill.py`).

    A subclass finds what is stored (`find`), and counts what was reused (`note`).

    Args:
        store: Where the spans are; None where the cache has none, as in another process.

    Attributes:
        plans: The executed plan of each row of each prompt.
    """

    def __init__(self, model: Any, store: SpanStore, *, decode_with: KVCache | None = None, offloading: bool = False) -> None:
        super().__init__(model, decode_with=decode_with, offloading=offloading)
        self.plans: list[PromptRow] = []
        self._attach(store)

    def _attach(self, store: SpanStore) -> None:
        self.store: Any = store
        self.recorder: Recorder | None = Recorder(self.source_layers, store.queue)
        store.queue.watch(self.recorder)
        # Stores the prompt of a cache that is dropped after the first token, too.
        weakref.finalize(self, self.recorder.release).atexit = False

    @abstractmethod
    def find(self, rows: tuple[PromptRow, ...], identity: Identity) -> PromptPlan | Refusal:
        """Look the rows up and plan what is reused; or return why nothing is looked up."""

    @abstractmethod
    def note(self, plan: PromptPlan, identity: Identity) -> None:
        """Count an executed plan, and have new tokens stored (`expect`)."""

    def leave(self, refusal: Refusal, rows: tuple[PromptRow, ...] = ()) -> int:
        """Leave the prompt to the model, and keep the reason for the report."""
        self.reason = str(refusal)
        return 0

    @property
    def moving_refused(self) -> Refusal | None:
        """Why tokens can't be reused behind another text with this model."""
        if self.rotation.why:
            return Refusal(self.rotation.why)
        refusal = spans_refused(self.model)
        if refusal is None and "position_ids" not in compat.parameter_names(type(self.model)):
            return Refusal(f"{type(self.model).__name__} takes no position_ids by name, so nobody can tell how it numbers tokens")
        return refusal

    def rows_of(self, call: PrefillCall) -> tuple[PromptRow, ...] | Refusal:
        """Return the rows of a prompt; or why it is left to the model."""
        tokens = call.input_ids.shape[1]
        if torch.is_grad_enabled():
            return Refusal("Gradients are enabled, and stored keys and values have none. Call the model under torch.no_grad().")
        if torch.compiler.is_compiling():
            return Refusal("The pass is compiled, and look-ups happen in Python.")
        if self.offloading:
            return Refusal("The cache offloads its layers, which can't be filled out of their order.")
        if call.most != tokens - 1:
            asked = f"The call asks for logits of the last {tokens - call.most} tokens, which the model has to run."
            return Refusal(f"{asked} Pass logits_to_keep=1.")
        padding = self.log.padding(self.seen + tokens)
        if isinstance(padding, Refusal):
            return padding
        rows = zip(self.log.rows(), padding, strict=True)
        return tuple(PromptRow(number, pad, slots[pad:], max(self.seen - pad, 0)) for number, (slots, pad) in enumerate(rows))

    def write(self, plan: PromptPlan, blobs: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Make room for the prompt, and write the tokens of a plan into the layers; none counts as seen."""
        _, _, decoder = decoder_layers(self.model)
        form = next(tokens.form for row in plan.rows for tokens in row.sources)
        padding, dtype = max(row.padding for row in plan.rows), layout.dtype_of(form)
        for layer, module, (heads, *dims) in zip(self.layers, decoder, layout.shapes_of(form, len(self.layers)), strict=True):
            device = compat.layer_device(module)
            keys, values = (torch.empty(1, heads, 0, dim, dtype=dtype, device=device) for dim in dims)
            layer.open(len(plan.rows), plan.total, keys, values, padding)
        write_rows(self.layers, plan.rows, blobs, self.rotation.layers, self.store.codec)

    def expect(self, plan: PromptPlan, first: int, store: Callable[[PromptStates], None]) -> None:
        """Have the prompt of a plan stored, from a slot on, once it is computed."""
        if self.recorder is not None:
            self.recorder.expect(NewPrompt(plan.total, first, store))

    def _release(self) -> None:
        """Hand a computed prompt to the store, before its buffers change."""
        if self.recorder is not None:
            self.recorder.release()

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> None:
        self._release()
        super().observe(input_ids, attention_mask, position_ids)

    def steps_matter(self) -> bool:
        return (self.recorder is not None and self.recorder.waiting) or super().steps_matter()

    def release_layer(self, layer: GrowingLayer) -> None:
        if self.recorder is None or not self.recorder.waiting:
            super().release_layer(layer)

    def prompt_answered(self) -> None:
        # The store holds the buffers until it has written the new tokens.
        self._release()
        for layer in self.source_layers:
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        if self.recorder is not None:
            self._release()
            self.recorder.protect(self.source_layers, self.seen + int(tokens_to_remove))
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        self._release()
        super().reset()
        self.plans = []

    def pick_rows(self, of_layer: Callable[[Any], None], pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._release()
        super().pick_rows(of_layer, pick)

    @property
    def reused_spans(self) -> Sequence[tuple[int, Any]]:
        """The spans with reused tokens, each with the number of its row."""
        return [(row.number, span) for row in self.plans for span in row.spans if span.sources]

    @property
    def why_inexact(self) -> str:
        spans = [span for _, span in self.reused_spans]
        exact = all(span.rule == "exact" and tokens.form["quantization"] is None for span in spans for tokens in span.sources)
        return "" if exact else "What it reused is not exact."

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._release()
        memo[id(self.recorder)] = None
        copied = super().__deepcopy__(memo)
        if self.recorder is not None:
            copied._attach(self.store)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # A store belongs to its process. In another one the cache keeps its tokens only.
        self._release()
        return {**super().__getstate__(), "store": None, "recorder": None}


def _generated_positions(model: PreTrainedModel, attention_mask: torch.Tensor | None, tokens: int) -> dict[str, torch.Tensor]:
    """The `position_ids` that `generate` would pass for the last tokens of a padded batch; nothing where it would pass none.

    Args:
        attention_mask: 1 where a token is real, (batch, all tokens), or None.
    """
    if attention_mask is None or "position_ids" not in compat.parameter_names(type(model)):
        return {}
    return {"position_ids": (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -tokens:]}
