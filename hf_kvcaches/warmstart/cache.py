"""`WarmStartCache`: a prompt that resembles an earlier one starts from its state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self, get_args

import torch

from hf_kvcaches import compat
from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.identity import Identity, identity_of
from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.core.prompt import PrefillCall, Remaining
from hf_kvcaches.errors import (
    ConfigError,
    FingerprintMismatch,
    UnsupportedError,
    require_choice,
    require_instance,
    require_tokenizer,
    whole_number,
)
from hf_kvcaches.reuse.alignment import Block
from hf_kvcaches.reuse.cache import SplicingCache
from hf_kvcaches.reuse.partial import run_span
from hf_kvcaches.reuse.pipeline import Pipeline, Tensors
from hf_kvcaches.reuse.plan import PromptPlan, PromptRow
from hf_kvcaches.warmstart.gate import WarmStartGate
from hf_kvcaches.warmstart.layer import WarmLayer
from hf_kvcaches.warmstart.library import WarmStartLibrary
from hf_kvcaches.warmstart.planning import Choice, Chooser, ServedRow, Strategy
from hf_kvcaches.warmstart.report import WarmStartReport, report_of
from hf_kvcaches.warmstart.storing import storing_job
from hf_kvcaches.warmstart.summaries.projector import SlotProjector
from hf_kvcaches.warmstart.summaries.slots import LayerSlots, Slots
from hf_kvcaches.warmstart.swapping import ExactPrefill, Swap


class WarmStartCache(SplicingCache):
    """Starts a prompt from the state of a similar one in a library.

    Paper: Warm-Starting Transformer Inference via Position-Consistent Projection of KV Summaries (CP-KVP).

    **Departs from the paper**: see docs/benchmarks/warmstart.md. By default spans that both prompts share keep the earlier one's
    keys and values, and the rest is recomputed; the paper's summaries are `strategy="slots"`.

    **Refuses**: models whose keys change with the length of the text, or with layers that keep no keys and values. Without rotary positions
    only common prefixes are reused.

    **Memory per token**: as `GrowingCache`; behind a summary, its slots and what was generated since.

    Args:
        model: The model that the library was made for.
        library: The earlier prompts.
        tokenizer: The model's; None for the library's.
        strategy: `"auto"`: the same prompt, else alignment where at least `gate.reusable` of the tokens can be reused, else, with a `swap`,
            the summary where the gate admits it, else a common prefix. `"align"`: without summaries. `"slots"`: summaries only, where the
            gate admits them, also without a swap. `"exact"`: the same prompt and common prefixes only.
        swap: When the exact prefill replaces inexact reuse: `"off"` (never), `"sync"` (before the second token) or `"background"` (once a
            thread has computed it).
        gate: Limits on the prompts that may be reused; None for the default ones.
        guard: How many tokens behind every change are recomputed, with alignment.
        tail: How many tokens at the end of a prompt are always computed, with alignment.
        projector: A `SlotProjector` for summaries, or None.
        remember: Whether the prompt is stored in the library once it is computed exactly: alone, behind an exact prefix, or by the exact
            prefill of a swap.
        decode_with: A new cache of the same model that holds the tokens once the prompt is answered; None to keep them all here.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    def __init__(
        self,
        model: Any,
        library: WarmStartLibrary,
        tokenizer: Any = None,
        strategy: Strategy = "auto",
        swap: Swap = "off",
        *,
        gate: WarmStartGate | None = None,
        guard: int = 8,
        tail: int = 16,
        projector: SlotProjector | None = None,
        remember: bool = False,
        decode_with: KVCache | None = None,
        offloading: bool = False,
    ) -> None:
        require_instance("library", library, WarmStartLibrary, {"model": model, "tokenizer": tokenizer, "gate": gate})
        require_tokenizer(tokenizer)
        for name, value, allowed in (("strategy", strategy, get_args(Strategy)), ("swap", swap, get_args(Swap))):
            require_choice(name, value, allowed)
        guard, tail = whole_number("guard", guard, 0, "a number of tokens"), whole_number("tail", tail, 0, "a number of tokens")
        if gate is not None and not isinstance(gate, WarmStartGate):
            raise ConfigError.of("gate", "a WarmStartGate, or None", gate)
        if projector is not None and not isinstance(projector, SlotProjector):
            raise ConfigError.of("projector", "a SlotProjector, or None", projector)
        if decode_with is not None and (swap != "off" or strategy == "slots"):
            raise UnsupportedError(
                "decode_with: takes keys and values once, when the prompt is answered, and no summary. Use swap='off', and "
                "strategy='auto', 'align' or 'exact'."
            )
        super().__init__(model, decode_with=decode_with, offloading=offloading)
        if swap == "background":
            require_all_heads(self.model, "The exact prefill of swap='background', in a thread,", "Use swap='sync'.")
        if self.model is not library.model and (why_not := library.why_not(identity_of(self.model))):
            raise FingerprintMismatch(f"library: was made for another model. {why_not} Make one with this model.")
        corrected = strategy == "slots" and library.correction is not None
        why = self.parts_refused if corrected else self.moving_refused
        if strategy in ("slots", "align") and why:
            raise UnsupportedError(f"strategy={strategy!r}: {why}. Use strategy='exact', or 'auto'.")
        if projector is not None and library.correction is not None:
            raise UnsupportedError("projector: keys with learned positions can't be rotated to a common position. Leave it out.")
        if strategy == "slots" and not library.slots:
            raise ConfigError("strategy='slots': the library has no summaries. Make it with slots=64, or use another strategy.")
        self.library, self.tokenizer = library, tokenizer if tokenizer is not None else library.tokenizer
        self.strategy: Strategy = strategy
        self.swap, self.gate, self.guard, self.tail, self.projector = swap, gate or WarmStartGate(), guard, tail, projector
        self.plans: tuple[ServedRow, ...] = ()
        self._inexact = False
        self._exact: ExactPrefill | None = None
        self._swapped = False
        self._remember = remember
        self.remember_with(library.background)

    @property
    def why_inexact(self) -> str:
        approximate = self._inexact and not self._swapped
        return "What it reused is approximate, and the exact prefill has not replaced it." if approximate else ""

    def make_layer(self, layer_idx: int) -> WarmLayer:
        return WarmLayer()

    def settings(self) -> dict[str, Any]:
        raise UnsupportedError("save: a WarmStartCache depends on its library, which would not be in the file. Save the library instead.")

    def take_prefill(self, call: PrefillCall) -> int | Remaining:
        if self.seen or self.library is None:  # a cache that came from another process has no library
            self.reason = "Only the first prompt of a chat is looked up." if self.seen else "The cache came without its library."
            return 0
        self.reason, self._swapped = "", False
        return _WarmStartPipeline(self, call).fill()

    def note(self, rows: Sequence[ServedRow], inexact: bool) -> None:
        """Keep the plan of each row, and whether an exact prefill gives other keys and values."""
        self.plans, self._inexact = tuple(rows), inexact

    def remember(self, rows: Sequence[ServedRow], identity: Identity, slots: int) -> None:
        """Store rows of a prompt in the library once the first `slots` slots are computed, if `remember` is set."""
        if self._remember and self.library.full and self.remembering is not None:
            self.remembering.expect(storing_job(self.library, self.model, rows, identity, slots))

    def expect_swap(self, call: PrefillCall, padding: Sequence[int]) -> None:
        """Prepare the exact prefill that replaces what was reused, if `swap` is set."""
        if self.swap != "off":
            ids, mask = call.input_ids.clone(), call.attention_mask
            positions = torch.arange(ids.shape[1], device=ids.device) - torch.tensor(padding, device=ids.device)[:, None]
            self._exact = ExactPrefill(self.model, ids, None if mask is None else mask.clone(), positions.clamp_min(0))

    def start_from(self, summaries: Slots | Sequence[Slots], covered: int) -> None:
        """Begin with a summary for each row, rotated to its positions, that stand for the first `covered` slots of the prompt."""
        summaries = [summaries] if isinstance(summaries, Slots) else summaries
        _, _, decoder = decoder_layers(self.model)
        for index, (layer, module) in enumerate(zip(self.layers, decoder, strict=True)):
            rows = (summary.layers[index] for summary in summaries)
            rows = (row._replace(keys=row.keys.to(self.model.dtype), values=row.values.to(self.model.dtype)) for row in rows)
            device = compat.layer_device(module)
            layer.take_slots([LayerSlots(*(tensor.to(device) for tensor in row)) for row in rows], covered)

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> None:
        if self._exact is not None and self.seen:
            self._go_on(attention_mask)
        super().observe(input_ids, attention_mask, position_ids)

    def steps_matter(self) -> bool:
        return self._exact is not None or super().steps_matter()

    def _go_on(self, attention_mask: Any) -> None:
        """Start the exact prefill before a decode step, or swap it in if it is ready."""
        exact = self._exact
        assert exact is not None
        # The thread starts here so that it does not delay the first token.
        if self.swap == "background" and not exact.started:
            exact.start(self)
            return
        if exact.running:
            return
        if exact.failure is not None:
            failure = f"{type(exact.failure).__name__}: {exact.failure}"
            _warn(f"The exact prefill in the background failed ({failure}); the prompt is run now.")
        self._take_over(exact, attention_mask)
        self._exact = None  # last, so that an interrupted swap is repeated before the next pass

    def _take_over(self, exact: ExactPrefill, attention_mask: Any) -> None:
        """Replace what was reused by the exact keys and values, and recompute the generated tokens."""
        if len(self.log) != self.seen:
            _warn("Tokens went by that the cache was not told of, so it goes on without the exact prefill.")
            return
        exact_cache = exact.result() if identity_of(self.model).matches(self.provenance.identity) else None
        if exact_cache is None or not exact_cache.provenance.identity.matches(self.provenance.identity):
            _warn("The model has changed since it read the prompt, so the cache goes on without the exact prefill.")
            return
        rows = exact.rows[:, 0].to(exact.ids.device)
        if not torch.equal(rows.cpu(), torch.arange(exact.ids.shape[0])):
            exact_cache.batch_select_indices(rows)
        start, seen = exact.ids.shape[1], self.seen
        if seen > start:
            new_ids = self.log.ids[:, start:seen].to(exact.ids.device)
            positions = exact.positions[rows, -1:] + 1 + torch.arange(seen - start, device=rows.device)
            mask = attention_mask[:, :seen] if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2 else None
            with torch.no_grad():
                run_span(self.model, exact_cache, new_ids, positions, mask)
        for layer, exact_layer in zip(self.layers, exact_cache.layers, strict=True):
            layer.take_tokens(exact_layer.key_buffer, exact_layer.value_buffer, seen)
        self._swapped = True
        if not self.exchanged:
            self.remember(self.plans, self.provenance.identity, start)

    def wait(self) -> None:
        """Wait for the exact prefill in the background, if there is one, and raise its exception; the next pass goes on from it."""
        if self._exact is not None and self._exact.started:
            self._exact.result()

    def report(self) -> WarmStartReport:
        return report_of(self.plans, **self._report_fields(), reason=self.reason, swapped=self._swapped)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        exact = self._exact
        if exact is not None and self.seen < exact.ids.shape[1]:
            exact.stop()
            self._exact = exact.cropped(self.seen)

    def reset(self) -> None:
        if self._exact is not None:
            self._exact.stop()
        super().reset()
        self._exact, self.plans, self._inexact, self._swapped = None, (), False, False

    def pick_rows(self, of_layer: Callable[[Any], None], pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().pick_rows(of_layer, pick)
        if self._exact is not None:
            self._exact.rows = pick(self._exact.rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo |= {id(shared): shared for shared in (self.tokenizer, self.gate, self.projector)}
        if self._exact is not None:
            # Each copy swaps in a prefill of its own.
            memo[id(self._exact)] = self._exact.cropped(self._exact.ids.shape[1])
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "library": None, "tokenizer": None, "_exact": None, "projector": None}


class _WarmStartPipeline(Pipeline[WarmStartCache]):
    """Looks up a neighbour for each row, chooses what is reused from it, and runs the rest."""

    @property
    def codec(self) -> KVCodec | None:
        return self.cache.library.codec

    def refused(self, identity: Identity) -> str:
        return self.cache.library.why_not(identity)

    def leave(self, reason: str, rows: tuple[PromptRow, ...] = ()) -> int:
        self.cache.note([self._planned(row, Choice(refused=reason)) for row in rows], inexact=False)
        return super().leave(reason, rows)

    def look_up(self, identity: Identity, rows: tuple[PromptRow, ...]) -> PromptPlan:
        cache = self.cache
        cache.library.refresh()
        options = cache.strategy, cache.swap, cache.gate, cache.guard, cache.tail
        chooser = Chooser(cache.library, *options, parts=not cache.parts_refused, moved=cache.approximates, on_cpu=self.on_cpu)
        choices = [chooser.choose(row.ids) for row in rows]
        summaries = sum(choice.served == "slots" for choice in choices)
        if 0 < summaries < len(rows):
            alone = "The rows of a batch take summaries only where all of them can."
            choices = [Choice(refused=alone) if choice.served == "slots" else choice for choice in choices]
        return PromptPlan(tuple(map(self._planned, rows, choices)), self.total)

    def _planned(self, row: PromptRow, choice: Choice) -> ServedRow:
        head = None if choice.neighbour is None else self.cache.library.entries.head(choice.neighbour.key)
        spans = choice.spans(len(row.ids), {} if head is None else head.stored)
        return ServedRow(row.number, row.padding, row.ids, row.begin, spans, choice=choice)

    def reuses(self, plan: PromptPlan) -> bool:
        return any(isinstance(row, ServedRow) and row.choice.neighbour is not None for row in plan.rows)

    def read(self, key: str) -> Tensors | None:
        entry = self.cache.library.full_of(key)
        return None if entry is None else entry[1]

    def run(self, plan: PromptPlan) -> tuple[int | Remaining, PromptPlan]:
        if all(isinstance(row, ServedRow) and row.choice.served == "slots" for row in plan.rows):
            return self._run_behind_summaries(plan)
        return super().run(plan)

    def _run_behind_summaries(self, plan: PromptPlan) -> tuple[int, PromptPlan]:
        """Begin each row with the summary of a similar prompt, and compute only its tail."""
        library = self.cache.library
        rows = [row for row in plan.rows if isinstance(row, ServedRow) and row.choice.neighbour is not None]
        stored = [library.slots_of(row.choice.neighbour.key) for row in rows if row.choice.neighbour is not None]
        summaries = [slots for slots in stored if slots is not None]
        counts = {layer.keys.shape[1] for slots in summaries for layer in slots.layers}
        if len(summaries) < len(rows) or (len(rows) > 1 and len(counts) > 1):
            refused = "A batch takes summaries of one size, and those of short prompts are smaller."
            refused = "The summary is gone or damaged." if len(summaries) < len(rows) else refused
            return 0, replace(plan, rows=tuple(replace(row, choice=Choice(refused=refused)) for row in rows))
        moved = [self._moved(slots, len(row.ids), row.padding) for slots, row in zip(summaries, rows, strict=True)]
        taken = plan.total - library.tail
        self.cache.start_from(moved, taken)
        served = [replace(row, choice=replace(row.choice, blocks=(Block(0, 0, len(row.ids) - library.tail),))) for row in rows]
        return taken, replace(plan, rows=tuple(served))

    def _moved(self, slots: Slots, tokens: int, padding: int) -> Slots:
        """Move a summary to the end of a row of `tokens` tokens, with columns of the mask as positions."""
        cache, library = self.cache, self.cache.library
        # A prompt of fewer tokens than slots keeps all of them, so nothing is projected.
        if cache.projector is not None and all(layer.keys.shape[1] == library.slots for layer in slots.layers):
            slots = cache.projector.apply(slots, tokens, library.rotation.layers)
        elif library.correction is not None:
            slots = library.correction.shifted(slots, tokens - slots.length)
        else:
            slots = slots.shifted(tokens - slots.length, library.rotation.layers)
        # In a shorter prompt some slots have positions before its start.
        return replace(slots, layers=[layer._replace(positions=layer.positions.clamp_min(0) + padding) for layer in slots.layers])

    def report(self, plan: PromptPlan, identity: Identity) -> None:
        cache, library = self.cache, self.cache.library
        rows = [row for row in plan.rows if isinstance(row, ServedRow)]
        choices = [row.outcome() for row in rows]
        lossy = library.quantization is not None
        inexact = any(choice.served in ("align", "slots") or (choice.blocks and lossy) for choice in choices)
        cache.note(rows, inexact)
        for choice in choices:
            if choice.neighbour is not None:
                library.entries.used(choice.neighbour.key, choice.reused)
        if inexact:
            cache.expect_swap(self.call, [row.padding for row in rows])
        elif new := [row for row, choice in zip(rows, choices, strict=True) if choice.served in ("cold", "prefix")]:
            cache.remember(new, identity, self.total)


def _warn(sentence: str) -> None:
    warnings.warn(sentence, RuntimeWarning, stacklevel=4)
