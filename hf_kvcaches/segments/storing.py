"""Cut a computed prompt into new segments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.reuse.plan import PlannedRow, PlannedSpan
from hf_kvcaches.reuse.storage import Buffers, states_in
from hf_kvcaches.segments.discovery import Discovery
from hf_kvcaches.segments.records import CONTEXT, Chain, Record
from hf_kvcaches.segments.signatures import signature_of
from hf_kvcaches.segments.store import NewSegment

# For each layer: the slots of the tokens that it ran, (tokens,), and their hidden states, (tokens, hidden).
Hidden = Mapping[int, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class NewRow:
    """A row of a prompt with new segments.

    Args:
        row: The executed plan of the row.
        stored: How many of its first tokens are in the store.
        earlier: The spans of earlier prompts in the same cache.
        caller_spans: The caller's segments, as (start, stop).
    """

    row: PlannedRow
    stored: int
    earlier: tuple[PlannedSpan, ...] = ()
    caller_spans: tuple[tuple[int, int], ...] = ()
    hidden: Hidden | None = None


@dataclass(frozen=True)
class SegmentForm:
    """How segments are made.

    Args:
        scope: See `Record`.
        depth: How many layers are stored; None: all.
        signed: Whether segments get signatures.
        geometries: How each layer's keys are rotated.
    """

    scope: str
    discovery: Discovery
    depth: int | None
    signed: bool
    geometries: Sequence[RotaryGeometry | None]


def new_segments(new: NewRow, buffers: Buffers, form: SegmentForm) -> Iterator[NewSegment]:
    """Yield the segments of a row that are not in the store."""
    row, begin = new.row, new.stored
    ids, spans = row.ids.astype(np.int64), [*new.earlier, *row.spans]
    edges = {begin, len(ids), *(start for start, _ in form.discovery.spans(ids, new.caller_spans))}
    edges.update(edge for span in row.spans for edge in (span.start, span.stop))
    chain = Chain().extend(row.ids[:begin])
    for start, stop in pairwise(sorted(edge for edge in edges if begin <= edge <= len(ids))):
        left, chain = chain, chain.extend(row.ids[start:stop])
        origin, fresh = _origin(spans, start, stop)
        slots = slice(start + row.padding, stop + row.padding)
        hidden = _hidden(new.hidden, slots) if fresh else {}
        if form.depth is not None and form.depth < len(buffers) and form.depth not in hidden:
            continue  # without hidden states the layers above could not run
        context = row.ids[max(0, start - CONTEXT) : start]
        signature = signature_of(form.discovery.text(ids[start:stop])) if form.signed else None
        record = Record(form.scope, row.ids[start:stop], left.name, chain.name, start, context, origin, fresh, signature=signature)
        yield NewSegment(record, states_in(buffers[: form.depth], row.number, slots), hidden, form.geometries)


def _origin(spans: Sequence[PlannedSpan], start: int, stop: int) -> tuple[str, bool]:
    """Return the tier of a span of a row, and whether all of it was computed at its index."""
    reused = [span for span in spans if span.stored and span.start < stop]
    approximate = [span.tier for span in reused if span.tier != "exact"]
    fresh = not any(span.stop > start for span in reused)
    return (approximate[-1] if approximate else "exact"), fresh


def _hidden(hidden: Hidden | None, slots: slice) -> dict[int, torch.Tensor]:
    """Return the hidden states of a span at the layers that layer_slots all of its tokens."""
    complete = {}
    for layer, (layer_slots, states) in (hidden or {}).items():
        inside = ((layer_slots >= slots.start) & (layer_slots < slots.stop)).nonzero()[:, 0]
        if len(inside) == slots.stop - slots.start:
            order = layer_slots[inside].argsort(stable=True)
            complete[layer] = states[inside[order].to(states.device)]
    return complete
