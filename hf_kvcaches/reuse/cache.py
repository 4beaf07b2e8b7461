"""The base of caches that reuse stored keys and values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.layers import GrowingLayer
from hf_kvcaches.core.parallel import is_tensor_parallel, shard_of
from hf_kvcaches.core.prompt import PrefillCall, Remaining, Stage
from hf_kvcaches.core.refusal import Refusal
from hf_kvcaches.core.source import SourceCache
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.reuse.background import Background
from hf_kvcaches.reuse.codec import TokenCodec
from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.partial import run_layers
from hf_kvcaches.reuse.plan import Indices, PlannedRow, PromptPlan
from hf_kvcaches.reuse.sparse import Look, LookingPass, RunningPass, SparsePass, SplicingPass, ids_at, slots_of, spans_refused
from hf_kvcaches.reuse.storage import Remembering
from hf_kvcaches.reuse.writer import Loaded, like_stored, splice_row


class SplicingCache(SourceCache):
    """Keeps every token; stored spans of a prompt are written into the layers' slots, and the tokens between are computed.

    A subclass implements `take_prefill`. The base records the tokens (`log`) and how keys are rotated (`rotation`), and runs passes
    over tokens that are not consecutive.

    Args:
        model: A transformers model.
        decode_with: A cache that takes over the prompt's tokens once it is answered; None to keep them all here.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
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
        self.exchanged = False
        # Why the last prompt was neither looked up nor stored, as a sentence; "" where it was.
        self.reason = ""
        self.background: Background | None = None
        self.remembering: Remembering | None = None

    def remember_with(self, background: Background) -> None:
        """Store prompts in the background once they are computed: those passed to `remembering.expect`."""
        self.background, self.remembering = background, Remembering(self.source_layers, background.later)
        background.watch(self.remembering)
        # Stores the prompt of a cache that is dropped after the first token, too.
        weakref.finalize(self, self.remembering.release).atexit = False

    def _release(self) -> None:
        """Hand a computed prompt to the store, before its buffers change."""
        if self.remembering is not None:
            self.remembering.release()

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> None:
        self._release()
        super().observe(input_ids, attention_mask, position_ids)
        if self.holder is None and not self.offloading:
            for layer in self.layers:
                if layer.window is not None:
                    layer.drop_unseen() if input_ids.shape[1] == 1 else layer.fit_slots(input_ids.shape[1])

    def steps_matter(self) -> bool:
        waiting = self.remembering is not None and self.remembering.waiting
        return waiting or any(layer.window is not None for layer in self.source_layers)

    @property
    def dropped(self) -> int:
        """How many of the first slots are lost in some layer: the model's windows no longer reach back to them."""
        return max(layer.dropped for layer in self.source_layers)

    @property
    def parts_refused(self) -> Refusal | None:
        """Why the model can't run spans of a prompt between others."""
        return spans_refused(self.model)

    @property
    def moving_refused(self) -> Refusal | None:
        """Why tokens can't be reused behind another text with this model."""
        if self.rotation.why:
            return Refusal(self.rotation.why)
        if self.parts_refused is None and self._model is not None and not _takes_positions(self.model):
            return Refusal(f"{type(self.model).__name__} takes no position_ids by name, so nobody can tell how it numbers tokens")
        return self.parts_refused

    @property
    def approximates(self) -> bool:
        """Whether tokens can be reused behind another text with this model."""
        return not self.moving_refused

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
            self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                **compat.cache_kwargs(self.model, self),
                logits_to_keep=1,
                **_generated_positions(self.model, attention_mask, input_ids.shape[1]),
            )
        self.crop(-1)
        return self.seen

    def prompt_left(self, refusal: Refusal) -> None:
        self.reason = str(refusal)

    def padding_of(self, call: PrefillCall) -> list[int] | Refusal:
        """Return each row's padding, or why the prompt is left to the model, as a sentence."""
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
        return self.log.padding(self.seen + tokens)

    def run_sparse(
        self, sparse: SparsePass, ids: torch.Tensor, start: int = 0, stop: int | None = None, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the tokens of a sparse pass through some layers and return their hidden states, (batch, tokens, hidden).

        Args:
            ids: The pass's token ids, (batch, tokens).
            start: The lowest layer.
            stop: The first layer not to run; None to run all.
            hidden: The input of layer `start`; None for layer 0.
        """
        return self._run(SplicingPass(self, sparse, start), ids, stop or len(self.layers), hidden)

    def look(self, sparse: SparsePass, ids: torch.Tensor, layer: int, hidden: torch.Tensor | None) -> Look:
        """Return the queries and keys that a layer computes for the tokens of a sparse pass; write nothing.

        Args:
            ids: The pass's token ids, (batch, tokens).
            hidden: The input of the layer; None for layer 0.
        """
        looking = LookingPass(self, sparse, layer)
        self._run(looking, ids, layer + 1, hidden)
        assert looking.look is not None
        return looking.look

    def _run(self, splicing: SplicingPass, ids: torch.Tensor, stop: int, hidden: torch.Tensor | None) -> torch.Tensor:
        return run_layers(self.model, splicing.start, stop, ids, splicing, splicing.running.sparse.positions, hidden=hidden)

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

    def execute(self, call: PrefillCall, plan: PromptPlan) -> int | Remaining:
        """Take a prefix if nothing else is reused; else have the model run the tokens between reused ones.

        Returns:
            How many tokens the cache took, or the tokens that the model runs.
        """
        if next(plan.stored, None) is None:
            return 0
        if plan.reuses_a_prefix_only or self.parts_refused or not _takes_positions(self.model):
            return self.take(min(plan.prefixes))
        padding = [row.padding for row in plan.rows]
        slots = slots_of([self._to_run(row) for row in plan.rows], padding, plan.total, call.input_ids.device)
        # Fillers first, so that each row ends with its last token.
        slots = slots.gather(1, (slots < plan.total).long().argsort(dim=1, stable=True))
        sparse = SparsePass(slots, torch.tensor(padding, device=slots.device), plan.total)
        self.sparse_pass = RunningPass.of(sparse, self.model)
        return Remaining(ids_at(call, slots, plan.total), sparse.positions)

    def _to_run(self, row: PlannedRow) -> Indices:
        """Return the indices of the tokens that all layers compute, the last one, and those whose queries the holder needs among them."""
        tokens = len(row.ids)
        window = 1 if self.holder is None else max(1, self.holder.adopt_window or 0)
        return np.union1d(row.recompute(), np.arange(max(row.begin, tokens - window), tokens))

    def write(self, plan: PromptPlan, blobs: Mapping[str, Mapping[str, torch.Tensor]], codec: TokenCodec | None, make_room: bool) -> None:
        """Write the tokens of some blobs into the layers; none counts as seen.

        Args:
            blobs: Tensors by the keys of the plan; at least one.
            codec: The codec of the blobs, if they are codes.
            make_room: Whether to make room for the prompt first.
        """
        loaded = [
            [
                Loaded(tokens.start, tokens.stop, tokens.offset, tokens.position, tokens.stored, blobs[tokens.key], span.depth, codec)
                for span in row.spans
                for tokens in span.stored
                if tokens.key in blobs
            ]
            for row in plan.rows
        ]
        if make_room:
            _, _, decoder = decoder_layers(self.model)
            sample = next(stored[0] for stored in loaded if stored)
            for layer, module, (keys, values) in zip(self.layers, decoder, like_stored(sample, len(self.layers)), strict=True):
                device = compat.layer_device(module)
                layer.open(len(plan.rows), plan.total, keys.to(device), values.to(device), max(row.padding for row in plan.rows))
        for number, (row, stored) in enumerate(zip(plan.rows, loaded, strict=True)):
            splice_row(self.layers, number, row.padding, stored, self.rotation.layers)

    def release_layer(self, layer: GrowingLayer) -> None:
        if self.remembering is None or not self.remembering.waiting:
            super().release_layer(layer)

    def prompt_answered(self) -> None:
        # The store holds the buffers until it has written the new tokens.
        self._release()
        for layer in self.source_layers:
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.source_layers:
            layer.require_croppable(tokens_to_remove)
        # New tokens will overwrite these slots, which the store's thread may be reading.
        self._release()
        reading_until = 0 if self.remembering is None else self.remembering.reading_until
        if self.background is not None and self.seen + int(tokens_to_remove) < reading_until:
            self.background.flush()
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        self._release()
        super().reset()
        self.exchanged, self.reason = False, ""

    def pick_rows(self, of_layer: Callable[[Any], None], pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._release()
        super().pick_rows(of_layer, pick)
        self.exchanged = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._release()
        memo[id(self.remembering)] = None
        copied = super().__deepcopy__(memo)
        if self.background is not None:
            copied.remember_with(self.background)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # A store belongs to its process. In another one the cache keeps its tokens only.
        self._release()
        return {**super().__getstate__(), "background": None, "remembering": None}

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


def _takes_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in compat.parameter_names(type(model))


def _generated_positions(model: PreTrainedModel, attention_mask: torch.Tensor | None, tokens: int) -> dict[str, torch.Tensor]:
    """The `position_ids` that `generate` would pass for the last tokens of a padded batch; nothing where it would pass none.

    Args:
        attention_mask: 1 where a token is real, (batch, all tokens), or None.
    """
    if attention_mask is None or not _takes_positions(model):
        return {}
    return {"position_ids": (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -tokens:]}
