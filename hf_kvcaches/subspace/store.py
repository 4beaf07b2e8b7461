"""Where tokens lie: a few exactly, all others as coefficients.

Tokens are numbered in each row by themselves: padding has no number and is not kept. Of each row the first `sinks` tokens and the last
`recent` ones are exact, each in a buffer of their own; those between them are coefficients. So a row is kept as if it were alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from hf_kvcaches.core.calls import Call
from hf_kvcaches.core.passes import Pass
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.coefficients import TILE, Coefficients, quantize_tiles
from hf_kvcaches.subspace.maps import Grouping
from hf_kvcaches.subspace.numbering import Arrival, SlotSpan, gathered, latest, resized
from hf_kvcaches.subspace.shadow import SHADOW, SHADOW_COUNTERS, ShadowedLayer

SIDES = ("key", "value")
_PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class StoreSettings:
    """What the user asked for.

    Args:
        sinks: First tokens of each row that stay exact.
        coefficients: How coefficients are kept: as they are, or in 8 bits.
        bases_dtype: Of the bases; None for the keys' own.
        shadow: Whether all tokens are kept exactly, too, to measure errors.
    """

    sinks: int
    recent: int
    coefficients: Literal["int8"] | None = None
    bases_dtype: torch.dtype | None = None
    backend: Any = "auto"
    shadow: bool = False


class CoefficientSpan(NamedTuple):
    """Neighbouring tokens of a group of heads, for the kernels.

    Args:
        keys: (batch, heads, tokens, r_k), and how to read them.
        values: (batch, heads, tokens, r_v), likewise.
        key_basis_of: Which of several bases each tile of keys is in, (batch, heads, tiles), or None where there is one.
    """

    places: SlotSpan
    keys: Coefficients
    values: Coefficients
    key_basis_of: torch.Tensor | None = None
    value_basis_of: torch.Tensor | None = None


class SubspaceStore(ShadowedLayer):
    """Writes tokens where they belong, and says what is where.

    For each group of heads there are, with its number behind the name: `key_coefficients`, (batch, heads, capacity, r_k), and
    `value_coefficients`; coefficient i is that of token sinks + i. In 8 bits these are whole tiles, with `key_scales` and `value_scales`,
    (batch, heads, tiles, 1), and what is not yet a tile is in the rings `key_loose` and `value_loose`, (batch, heads, slots, r).

    Attributes:
        sink_keys: The first tokens of each row, as the model rotated them, (batch, kv_heads, sinks, head_dim); and `sink_values`.
        recent_keys: The last ones, token n in slot n % (number of slots), (batch, kv_heads, slots, head_dim); and `recent_values`.
        real: False where a column is padding, (batch, capacity, 1); None while nothing is padded.
        places: The model's position of each token, (batch, capacity, 1), int32; None while that is its number.
        open: Newest columns that may be taken back, while that is recorded.
    """

    counters: ClassVar[tuple[str, ...]] = ("seen", "open")
    sink_keys: torch.Tensor | None = None
    sink_values: torch.Tensor | None = None
    recent_keys: torch.Tensor | None = None
    recent_values: torch.Tensor | None = None
    real: torch.Tensor | None = None
    places: torch.Tensor | None = None

    def __init__(self, settings: StoreSettings, geometry: RotaryGeometry | None, groups: int) -> None:
        self.declare(settings, groups)
        if settings.shadow:
            self.counters = (*self.counters, *SHADOW_COUNTERS)  # type: ignore[misc]
        super().__init__()
        self.settings, self.geometry = settings, geometry
        self.recording = False
        self.open = 0

    def declare(self, settings: StoreSettings, groups: int, *more: str) -> None:
        """Names the tensors that there may be."""
        kinds = ("coefficients", "loose", "scales") if settings.coefficients == "int8" else ("coefficients",)
        own = (*(f"{side}_{kind}_{index}" for index in range(groups) for kind in kinds for side in SIDES), *more)
        exact = ("sink_keys", "sink_values", "recent_keys", "recent_values", "real", "places")
        self.row_tensors = (*exact, *(SHADOW if settings.shadow else ()), *own)  # type: ignore[misc]
        for name in own:
            setattr(self, name, None)

    @property
    @abstractmethod
    def grouping(self) -> Grouping:
        """Which heads lie in one tensor."""

    @abstractmethod
    def decoders(self, group: int) -> list[torch.Tensor]:
        """What reads the coefficients of a group of heads: of keys, and of values; as `Coefficients.decode`."""

    @abstractmethod
    def bases_of(self, group: int, tiles: SlotSpan) -> list[torch.Tensor | None]:
        """In which of several bases tiles are, of keys and of values; None where there is one."""

    @abstractmethod
    def encode(self, query: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor, call: Call | None, arrival: Arrival) -> None:
        """Writes the coefficients of what is no longer exact with new tokens.

        Args:
            query: Of all new columns; None where only keys and values are taken over.
            keys: Of the new real tokens, as the model rotated them.
            call: What else the model said, likewise.
        """

    @property
    def kept(self) -> int:
        return self.seen

    @property
    def rows(self) -> int:
        """How many sequences; 0 before the first token."""
        held = (getattr(self, name) for name in self.row_tensors)
        return next((tensor.shape[0] for tensor in held if tensor is not None), 0)

    @property
    def window(self) -> int:
        """How many slots there are for recent tokens by now."""
        return 0 if self.recent_keys is None else self.recent_keys.shape[2]

    def count(self, tokens: int) -> int:
        """How many coefficients a row with so many tokens has."""
        return max(0, tokens - self.settings.recent - self.settings.sinks)

    def first_exact(self, tokens: int) -> int:
        """The first token behind those with coefficients, in a row with so many."""
        return self.settings.sinks + self.count(tokens)

    def slots(self, lengths: Sequence[int]) -> int:
        """How many recent tokens must be held before rows get as long as that."""
        return self.settings.recent

    def lengths(self, columns: int, rows: int) -> list[int]:
        """How many real tokens each row has among the first columns."""
        if self.real is None:
            return [columns] * rows
        found: list[int] = self.real[:, :columns, 0].sum(1).tolist()
        return found

    def arrive(self, running: Pass, rows: int) -> Arrival:
        """Which tokens come with a pass, or with a part of it; the same for all layers."""

        def find() -> Arrival:
            return Arrival(self.lengths(self.seen, rows), running.valid, running.tokens, running.device)

        arrival: Arrival = running.shared(("arrival", self.seen), find)
        return arrival

    def take(
        self, query: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor, call: Call | None, running: Pass, final: bool
    ) -> None:
        """Puts the new tokens of a pass where they belong.

        Args:
            query: (batch, heads, tokens, head_dim), as the model rotated them; None where only keys and values are taken over.
            keys: (batch, kv_heads, tokens, head_dim), likewise.
            call: What else the model said, or None likewise.
            running: The pass, or the part of it that these are.
        """
        rows, tokens, valid = keys.shape[0], keys.shape[2], running.valid
        arrival = self.arrive(running, rows)
        if valid is not None or self.real is not None:
            if self.real is None:
                self.real = torch.ones(rows, self.seen, 1, dtype=torch.bool, device=keys.device)
            new = torch.ones(rows, tokens, dtype=torch.bool, device=keys.device) if valid is None else valid
            columns = SlotSpan((self.seen,) * rows, (self.seen + tokens,) * rows, keys.device)
            self.real = columns.put(self.real[:, None], new[:, None, :, None])[:, 0]
        if arrival.numbers.longest:
            places = running.shared(("places", self.seen), lambda: _places(running, arrival))
            if places is not None or self.places is not None:
                self._note_places(arrival.numbers, places)
            keys, values = arrival.real(keys), arrival.real(values)
            if self.settings.shadow:
                self.keep_shadow(query, keys, values, call, arrival)
            self._store(query, keys, values, call, arrival, final)
        self.seen += tokens

    def _note_places(self, numbers: SlotSpan, places: torch.Tensor | None) -> None:
        if self.places is None:
            most = max(numbers.starts)
            self.places = torch.arange(most, dtype=torch.int32, device=numbers.device)[:, None].repeat(len(numbers.starts), 1, 1)
        new = numbers.index if places is None else places
        self.places = numbers.put(self.places[:, None], new.to(torch.int32)[:, None, :, None])[:, 0]

    def _store(
        self, query: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor, call: Call | None, arrival: Arrival, final: bool
    ) -> None:
        numbers = arrival.numbers
        if self.recording and not final:
            self.open += numbers.longest
        self._make_room(keys, values, numbers)
        self.encode(query, keys, values, call, arrival)
        self._store_sinks(keys, values, numbers)
        self._store_recent(keys, values, numbers)

    def states(self, keys: torch.Tensor, values: torch.Tensor, numbers: SlotSpan, wanted: SlotSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact keys and values of tokens, which are new or among the recent ones; the keys before rotation if bases are for these."""
        keys, values = latest(self.recent_keys, keys, numbers, wanted), latest(self.recent_values, values, numbers, wanted)
        if self.geometry is None:
            return keys, values
        return self.geometry.unrotate(keys if keys.dtype == torch.float64 else keys.float(), self.places_of(wanted)), values

    def places_of(self, wanted: SlotSpan) -> torch.Tensor:
        """The model's positions of tokens, (batch or 1, longest)."""
        if self.places is not None:
            return wanted.take(self.places[:, None])[:, 0, :, 0]
        return wanted.index[:1] if wanted.same else wanted.index

    def write(self, name: str, found: torch.Tensor, span: SlotSpan) -> None:
        """Puts coefficients behind those of a group of heads.

        Args:
            found: (batch, heads, longest, rank).
        """
        kept = name.format("coefficients")
        if self.settings.coefficients != "int8":
            setattr(self, kept, span.put(getattr(self, kept), found))
            return
        loose_name, scales_name = name.format("loose"), name.format("scales")
        loose = self._loose_ring(getattr(self, loose_name), found, span)
        tiles = SlotSpan.of([start // TILE for start in span.starts], [stop // TILE for stop in span.stops], found.device).evened()
        if tiles.longest:
            # What a row with fewer tiles gets besides will be overwritten, and only must be numbers.
            data, scale = quantize_tiles(latest(loose, found, span, tiles.times(TILE)))
            setattr(self, kept, tiles.times(TILE).put(getattr(self, kept), data))
            setattr(self, scales_name, tiles.put(getattr(self, scales_name), scale[..., None]))
        setattr(self, loose_name, span.put_turning(loose, found))

    def _loose_ring(self, held: torch.Tensor | None, found: torch.Tensor, span: SlotSpan) -> torch.Tensor:
        """Room for what is not yet a tile, also after as many have been taken back as may be."""
        slots = -(-(TILE + self.open) // TILE) * TILE
        if held is None:
            return found.new_zeros(*found.shape[:2], slots, found.shape[3])
        return held if held.shape[2] >= slots else resized(held, span.first, slots)

    def all_pieces(self, held: SlotSpan) -> list[list[CoefficientSpan]]:
        """The coefficients of each group of heads, as they are kept.

        Args:
            held: Those of each row, from 0 on.
        """
        return [self._pieces(group, held) for group in range(len(self.grouping.heads))] if held.longest else [[]]

    def _pieces(self, group: int, held: SlotSpan) -> list[CoefficientSpan]:
        def own(kind: str) -> list[torch.Tensor]:
            return [getattr(self, f"{side}_{kind}_{group}") for side in SIDES]

        def piece(places: SlotSpan, data: list[torch.Tensor], scales: list[Any]) -> CoefficientSpan:
            keys, values = (Coefficients(*each) for each in zip(data, self.decoders(group), scales, strict=True))
            tiles = SlotSpan(tuple(s // TILE for s in places.starts), tuple(-(-s // TILE) for s in places.stops), places.device)
            return CoefficientSpan(places, keys, values, *self.bases_of(group, tiles))

        if self.settings.coefficients != "int8":
            return [piece(held, [held.take(each) for each in own("coefficients")], [None, None])]
        found = []
        if held.tiles.longest:
            tokens = held.tiles.times(TILE)
            scales = [held.tiles.take(each)[..., 0] for each in own("scales")]
            found.append(piece(tokens, [tokens.take(each) for each in own("coefficients")], scales))
        if held.loose.longest:
            found.append(piece(held.loose, [held.loose.take_turning(each) for each in own("loose")], [None, None]))
        return found

    def _store_sinks(self, keys: torch.Tensor, values: torch.Tensor, numbers: SlotSpan) -> None:
        sinks = self.settings.sinks
        if min(numbers.starts) >= sinks:
            return
        behind = torch.arange(sinks, device=keys.device) - numbers.first
        came = ((behind >= 0) & (behind < numbers.last - numbers.first))[:, None, :, None]
        for name, new in (("sink_keys", keys), ("sink_values", values)):
            held = getattr(self, name)
            held = new.new_zeros(*new.shape[:2], sinks, new.shape[3]) if held is None else held
            setattr(self, name, torch.where(came, gathered(new, behind.clamp(0, new.shape[2] - 1)), held))

    def _store_recent(self, keys: torch.Tensor, values: torch.Tensor, numbers: SlotSpan) -> None:
        if self.recent_keys is None or self.recent_values is None:
            return
        self.recent_keys = numbers.put_turning(self.recent_keys, keys)
        self.recent_values = numbers.put_turning(self.recent_values, values)

    def _make_room(self, keys: torch.Tensor, values: torch.Tensor, numbers: SlotSpan) -> None:
        """Sees to it that there are slots for all tokens that are to be exact."""
        # Whole tiles of those that may be taken back, so that not every token moves all.
        slots = self.slots(numbers.stops) + -(-self.open // TILE) * TILE
        if slots <= self.window:
            return
        for name, new in (("recent_keys", keys), ("recent_values", values)):
            held = getattr(self, name)
            empty = held is None
            setattr(self, name, new.new_zeros(*new.shape[:2], slots, new.shape[3]) if empty else resized(held, numbers.first, slots))

    def take_back(self, tokens: int) -> None:
        """Forgets the last columns, as if they had never come."""
        if tokens:
            rows = self.rows
            before, left = self.lengths(self.seen, rows), self.lengths(self.seen - tokens, rows)
            if not all(self._holds(after, now) for after, now in zip(left, before, strict=True)):
                raise UnsupportedError(
                    f"crop: {tokens} tokens are to be taken back, and what came before them is no longer as it was then. Call "
                    "activate_past_recording() before the tokens that may be taken back, or build the cache anew from the shorter text."
                )
            self.shadow_query = None  # it may have been one of those
        self.seen, self.open = self.seen - tokens, 0

    def _holds(self, tokens: int, now: int) -> bool:
        """Whether all is there that a row of so many tokens is made of, now that it has more."""
        count, first = self.count(tokens), min(tokens, self.first_exact(tokens))
        loose = count % TILE if self.settings.coefficients == "int8" else 0
        whole = first == tokens or now - first <= self.settings.recent + self.open
        return whole and (not loose or self.count(now) - (count - loose) <= TILE + self.open)

    def activate_past_recording(self) -> None:
        """From now on tokens can be taken back with `crop`, up to the last crop. Several tokens at once count as so many steps."""
        self.recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last tokens back, as if they had never come.

        Args:
            tokens_to_remove: Minus the number of tokens, as in transformers. 0 only makes final what came.
        """
        tokens = -int(tokens_to_remove)
        if not 0 <= tokens <= self.seen:
            raise ConfigError.of("tokens_to_remove", f"a number from -{self.seen} to 0", -tokens, "crop(-n) removes the last n tokens.")
        self.take_back(tokens)

    def reset(self) -> None:
        super().reset()
        self.recording = False

    def export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, values = super().export_state()
        most = max(self.lengths(self.seen, self.rows), default=0)
        count, tiles = self.count(most), self.count(most) // TILE
        quantized = self.settings.coefficients == "int8"
        used = {"coefficients": tiles * TILE if quantized else count, "scales": tiles}
        for name, tensor in tensors.items():
            if name in ("real", "places"):
                tensors[name] = tensor[:, : self.seen if name == "real" else most]
            elif (kind := name.split("_")[1]) in used:
                tensors[name] = tensor[:, :, : used[kind]]
        return self.used_shadow(tensors, most), values

    def import_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        super().import_state(tensors, values)
        # Coefficients in 8 bits don't tell the model's precision; all others do.
        like = next((tensors[name] for name in self.row_tensors if name in tensors and tensors[name].dtype in _PRECISIONS), None)
        if like is not None:
            self.lazy_initialization(like, like)


def _places(running: Pass, arrival: Arrival) -> torch.Tensor | None:
    """The model's positions of the new real tokens, (batch, longest), or None where these are their numbers."""
    numbers = arrival.numbers
    if numbers.same and running.start == numbers.starts[0]:
        return None
    positions = running.positions().expand(len(numbers.starts), -1)
    positions = positions if arrival.order is None else positions.gather(1, arrival.order)
    off = positions != numbers.index
    if numbers.inside is not None:
        off = off & numbers.inside
    return positions if bool(off.any()) else None
