"""Storing what a prompt had computed, once its first token is out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hf_kvcaches.core.splicing import codec
from hf_kvcaches.core.splicing.codec import LayerStates
from hf_kvcaches.core.splicing.layer import SplicedLayer
from hf_kvcaches.core.splicing.tokens import Ids
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.segments.admission import Plan, PlannedSpan
from hf_kvcaches.segments.records import CONTEXT, Record, Tier
from hf_kvcaches.segments.scope import Reader
from hf_kvcaches.segments.store import NewSegment, SegmentStore

Hidden = Mapping[int, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class NewRow:
    """A row of a prompt, of which something is new.

    Args:
        padding: Slots at its start that hold no token.
        hidden: What entered some layers: the slots that ran, (tokens,), and their states, (tokens, hidden).
    """

    row: int
    padding: int
    ids: Ids
    plan: Plan
    earlier: tuple[PlannedSpan, ...] = ()
    given: tuple[tuple[int, int], ...] = ()
    hidden: Hidden | None = None


class Remembering:
    """What a cache has still to store.

    Args:
        layers: Of the cache, in which prompts are computed.
    """

    def __init__(self, layers: Sequence[SplicedLayer], store: SegmentStore) -> None:
        self._layers, self._store = layers, store
        self._rows: list[NewRow] = []
        self._scope = ""
        self._reader: Reader | None = None
        self._needed = 0
        self._is_confirmed: Callable[[], bool] = lambda: True
        # A finalizer may come in the middle of anything, also of its own thread's work here.
        self._lock = threading.RLock()
        self.reading_until = 0

    def expect(self, rows: Sequence[NewRow], scope: str, reader: Reader, needed: int, is_confirmed: Callable[[], bool]) -> None:
        """Takes over what is to be stored as soon as it is computed.

        Args:
            is_confirmed: Whether it was computed by the model of the scope. Asked before anything is stored.
        """
        with self._lock:
            self._rows, self._scope, self._reader, self._needed = list(rows), scope, reader, needed
            self._is_confirmed = is_confirmed

    @property
    def waiting(self) -> bool:
        """Whether anything is to be stored."""
        with self._lock:
            return bool(self._rows)

    def release(self, drop: bool = True) -> None:
        """Hands over to the store what is computed.

        Args:
            drop: Whether to give up what is not: a pass failed, or goes another way. False while another thread may be at it.
        """
        with self._lock:
            rows, reader = self._rows, self._reader
            done = all(layer.seen >= self._needed for layer in self._layers)
            if not rows or not (done or drop):
                return
            self._rows = []
            if not done or reader is None:
                return
            scope, store, is_confirmed = self._scope, self._store, self._is_confirmed
            self.reading_until = self._needed
            # New tokens are written behind these slots, or into other buffers: what is read here stays as it is.
            buffers = [(layer.key_buffer, layer.value_buffer) for layer in self._layers]

        def put() -> None:
            if is_confirmed():
                store.put([new for row in rows for new in _segments(row, buffers, scope, reader, store)])

        store.later(put)


def _segments(
    row: NewRow,
    buffers: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]],
    scope: str,
    reader: Reader,
    store: SegmentStore,
) -> list[NewSegment]:
    """The new segments of a row, each with its own tensors."""
    begin = row.plan.prefix
    spans = reader.discovery.spans(row.ids.astype(np.int64), row.given)
    edges = {begin, len(row.ids)} | {span.start for span in spans} | {edge for part in row.plan.parts for edge in (part.start, part.stop)}
    places = sorted(edge for edge in edges if begin <= edge <= len(row.ids))
    chain, found = row.plan.chain, []
    whole = _encoded(row, buffers, store) if begin < len(row.ids) else None
    bounds = [(a, b) for a, b in pairwise(places) if b > a]
    signatures = reader.signer.of(row.ids.astype(np.int64), bounds)
    surroundings = reader.signer.left_of(row.ids.astype(np.int64), [start for start, _ in bounds])
    for number, (start, stop) in enumerate(bounds):
        left, chain = chain, chain.extend(row.ids[start:stop])
        origin, fresh = _origin([*row.earlier, *row.plan.parts], start, stop)
        record = Record(
            scope,
            row.ids[start:stop],
            left.name,
            chain.name,
            start,
            row.ids[max(0, start - CONTEXT) : start],
            origin,
            fresh,
            {},
            signatures[number],
            surroundings[number],
        )
        hidden = _hidden(row.hidden, slice(start + row.padding, stop + row.padding)) if fresh else {}
        if store.depth is not None and store.depth < len(buffers) and store.depth not in hidden:
            continue  # without them the layers above could not be run
        slots = slice(start + row.padding, stop + row.padding)
        layers = [
            LayerStates(keys[row.row, :, slots].detach(), values[row.row, :, slots].detach())
            for keys, values in buffers[: store.depth]
            if keys is not None and values is not None
        ]
        encoded = None if whole is None or hidden else (codec.part_of(whole[0], start - begin, stop - begin), whole[1])
        found.append(NewSegment(record, layers, hidden, encoded))
    return found


def _encoded(
    row: NewRow, buffers: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]], store: SegmentStore
) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """All that is new of a row, encoded at once, which is quicker than segment by segment; None where it can't be."""
    slots = slice(row.plan.prefix + row.padding, len(row.ids) + row.padding)
    layers = [
        LayerStates(keys[row.row, :, slots].detach(), values[row.row, :, slots].detach())
        for keys, values in buffers[: store.depth]
        if keys is not None and values is not None
    ]
    try:
        return codec.encode(layers, {}, store.quantization)
    except ConfigError:  # Not finite somewhere: the segments that are finite can be stored all the same.
        return None


def _origin(parts: Sequence[PlannedSpan], start: int, stop: int) -> tuple[Tier, bool]:
    """How a stretch of a row came about, and whether all of it was computed where it stands."""
    reused = [part for part in parts if part.pieces and part.start < stop]
    drifted = [part.tier for part in reused if part.tier != "exact"]
    fresh = not any(part.stop > start for part in reused)
    return (drifted[-1] if drifted else "exact"), fresh


def _hidden(hidden: Hidden | None, slots: slice) -> dict[int, torch.Tensor]:
    """The hidden states of a stretch, at those layers where all of its tokens ran."""
    found = {}
    for cut, (ran, states) in (hidden or {}).items():
        inside = ((ran >= slots.start) & (ran < slots.stop)).nonzero()[:, 0]
        if len(inside) == slots.stop - slots.start:
            order = torch.from_numpy(np.argsort(ran[inside].numpy(), kind="stable"))
            found[cut] = states[inside[order].to(states.device)]
    return found
