"""Where tokens lie: a few exactly, all others as coefficients.

Tokens are numbered by *column*, as they were fed in, padding included. The first real `sinks` tokens of each row and the last `recent`
columns are exact, each in a buffer of their own. Every column before the recent ones has coefficients, but for the first `sinks` columns,
which are exact or padding in every row. What a row doesn't have is not attended to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from hf_kvcaches.core.growing import append
from hf_kvcaches.core.layers import TensorLayer
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.coefficients import TILE, quantize_tiles
from hf_kvcaches.subspace.maps import LayerMaps, LayerSource

# Buffers have room for one token more for each so many: coefficients are small, and copying them often is cheap.
RESERVE = 32
SIDES = ("key", "value")
_PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Args:
        sinks: First tokens of each row that stay exact.
        recent: Newest tokens that stay exact.
        coefficients: How coefficients are kept: as they are, or in 8 bits.
        bases_dtype: Of the bases; None for the keys' own.
        backend: Of the kernels.
    """

    sinks: int
    recent: int
    coefficients: Literal["int8"] | None = None
    bases_dtype: torch.dtype | None = None
    backend: Any = "auto"


class Piece(NamedTuple):
    """Neighbouring tokens of a group of heads.

    Args:
        start: Which coefficient the first one is.
        keys: (batch, heads, tokens, r_k).
        values: (batch, heads, tokens, r_v).
        key_scale: Of whole tiles in 8 bits, (batch, heads, tiles).
        value_scale: Likewise.
    """

    start: int
    keys: torch.Tensor
    values: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


class SubspaceStore(TensorLayer):
    """Writes tokens where they belong, and says what is where.

    For each group of heads there are, with its number behind the name: `key_coefficients`, (batch, heads, capacity, r_k), and
    `value_coefficients`. In 8 bits these are whole tiles, with `key_scales` and `value_scales`, (batch, heads, tiles, 1), and what is not
    yet a tile is in `key_loose` and `value_loose`, (batch, heads, tokens, r).

    Attributes:
        sink_keys: The first real tokens of each row, as the model rotated them, (batch, kv_heads, sinks, head_dim); and `sink_values`.
        recent_keys: Column c is in slot c % (number of slots), (batch, kv_heads, slots, head_dim); and `recent_values`.
        real: False where a column is padding, (batch, capacity, 1); None while nothing is padded.
        places: The model's position of each column, (batch, capacity, 1), int32; None while it is the column itself.
        open: Newest columns that may be taken back, while that is recorded.
        loose_from: How many coefficients are in tiles only.
    """

    counters: ClassVar[tuple[str, ...]] = ("seen", "open", "loose_from")
    sink_keys: torch.Tensor | None = None
    sink_values: torch.Tensor | None = None
    recent_keys: torch.Tensor | None = None
    recent_values: torch.Tensor | None = None
    real: torch.Tensor | None = None
    places: torch.Tensor | None = None

    def __init__(self, settings: Settings, source: LayerSource, geometry: RotaryGeometry | None) -> None:
        kinds = ("coefficients", "loose", "scales") if settings.coefficients == "int8" else ("coefficients",)
        own = [f"{side}_{kind}_{index}" for index in range(source.groups) for kind in kinds for side in SIDES]
        exact = ("sink_keys", "sink_values", "recent_keys", "recent_values", "real", "places")
        self.row_tensors = (*exact, *own)  # type: ignore[misc]
        for name in own:
            setattr(self, name, None)
        super().__init__()
        self.settings, self.source, self.geometry = settings, source, geometry
        self.recording = False
        self.open = self.loose_from = 0

    @property
    def kept(self) -> int:
        return self.seen

    @property
    def rows(self) -> int:
        """How many sequences; 0 before the first token."""
        held = (getattr(self, name) for name in self.row_tensors)
        return next((tensor.shape[0] for tensor in held if tensor is not None), 0)

    @property
    def maps(self) -> LayerMaps:
        """The bases, where and how the layer needs them."""
        return self.source.on(self.settings.bases_dtype or self.dtype, self.device, self.settings.coefficients == "int8")

    @property
    def window(self) -> int:
        """How many slots there are for recent tokens by now."""
        return 0 if self.recent_keys is None else self.recent_keys.shape[2]

    def count(self, seen: int) -> int:
        """How many coefficients a row has after so many columns.

        Args:
            seen: Columns.
        """
        return max(0, seen - self.settings.recent - self.settings.sinks)

    def note(self, valid: torch.Tensor | None, places: torch.Tensor | None, rows: int, tokens: int) -> None:
        """Remembers of new columns what is not in their keys.

        Args:
            valid: True where a token is real, (batch, tokens), or None for all.
            places: Where the model put them, (batch or 1, tokens), or None where that is the column.
            rows: Sequences.
            tokens: New ones.
        """
        if valid is not None or self.real is not None:
            if self.real is None:
                self.real = torch.ones(rows, self.seen, 1, dtype=torch.bool, device=self.device)
            new = torch.ones(rows, tokens, dtype=torch.bool, device=self.device) if valid is None else valid
            self._check_padding(new)
            self.real = append(self.real[:, None], new[:, None, :, None], self.seen, RESERVE)[:, 0]
        if places is not None or self.places is not None:
            columns = torch.arange(self.seen + tokens, dtype=torch.int32, device=self.device)
            if self.places is None:
                self.places = columns[: self.seen, None].repeat(rows, 1, 1)
            new = (columns[None, self.seen :] if places is None else places.to(torch.int32)).expand(rows, -1)
            self.places = append(self.places[:, None], new[:, None, :, None], self.seen, RESERVE)[:, 0]

    def _check_padding(self, new: torch.Tensor) -> None:
        """Refuses padding that would leave a row fewer exact tokens than others."""
        assert self.real is not None
        before = self.real[:, : self.seen, 0].any(1, keepdim=True) | (new.cumsum(1) > 0)
        if bool((before & ~new).any()):
            raise UnsupportedError("SubspaceCache takes padding before a row's first token only. Feed rows of different lengths singly.")

    def store(self, keys: torch.Tensor, values: torch.Tensor, final: bool) -> None:
        """Puts new columns where they belong.

        Args:
            keys: (batch, kv_heads, tokens, head_dim), as the model rotated them.
            values: Like `keys`.
            final: Whether they will not be taken back.
        """
        sinks, tokens = self.settings.sinks, keys.shape[2]
        before, after = self.count(self.seen), self.count(self.seen + tokens)
        if self.recording and not final:
            self.open += tokens
            self._widen(self.settings.recent + self.open)
        if after > before:
            self._encode(*self._columns(sinks + before, sinks + after, keys, values), before)
        self._store_sinks(keys, values)
        self._store_recent(keys, values)
        self.seen += tokens

    def _columns(self, start: int, stop: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact keys and values of columns, of which the last may be among the new ones."""
        found = []
        for held, new in ((self.recent_keys, keys), (self.recent_values, values)):
            later = new[:, :, max(start, self.seen) - self.seen : max(stop, self.seen) - self.seen]
            if start < self.seen:
                assert held is not None
                columns = torch.arange(start, min(stop, self.seen), device=held.device)
                earlier = held.index_select(2, columns % self.window)
                later = torch.cat([earlier, later], 2) if later.shape[2] else earlier
            found.append(later)
        return found[0], found[1]

    def _places_of(self, start: int, stop: int) -> torch.Tensor:
        """The model's positions of columns, (batch or 1, tokens)."""
        if self.places is not None:
            return self.places[:, start:stop, 0]
        return torch.arange(start, stop, device=self.device)[None]

    def _encode(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Writes the coefficients of tokens, the first of which is coefficient `start`."""
        column, tokens = start + self.settings.sinks, keys.shape[2]
        if self.geometry is not None:
            keys = self.geometry.unrotate(keys.float(), self._places_of(column, column + tokens))
        for index, group in enumerate(self.maps.groups):
            heads = list(group.heads)
            for side, states, encode in (("key", keys, group.key_encode), ("value", values, group.value_encode)):
                own = states if len(heads) == states.shape[1] else states[:, heads]
                found = torch.matmul(own.to(encode.dtype), encode.mT).to(self.dtype)
                if self.settings.coefficients == "int8":
                    self._quantize(f"{side}_{{}}_{index}", found, start)
                else:
                    name = f"{side}_coefficients_{index}"
                    setattr(self, name, append(getattr(self, name), found, start, RESERVE))
        if self.settings.coefficients == "int8":
            self.loose_from = self._kept_loose(start + tokens)

    def _kept_loose(self, count: int) -> int:
        """From which coefficient on they are kept as they were, if there are so many."""
        # What may be taken back may end within a tile that is closed by then.
        return max(self.loose_from, (count - min(count, self.open)) // TILE * TILE)

    def _quantize(self, name: str, found: torch.Tensor, start: int) -> None:
        held, kept = getattr(self, name.format("loose")), self.loose_from
        loose = found if held is None else torch.cat([held[:, :, : start - kept], found], 2)
        count = start + found.shape[2]
        closed, closing = start // TILE * TILE, count // TILE * TILE
        if closing > closed:
            data, scale = quantize_tiles(loose[:, :, closed - kept : closing - kept])
            tiles = append(getattr(self, name.format("coefficients")), data, closed, RESERVE)
            setattr(self, name.format("coefficients"), tiles)
            setattr(self, name.format("scales"), append(getattr(self, name.format("scales")), scale[..., None], closed // TILE, RESERVE))
        setattr(self, name.format("loose"), loose[:, :, self._kept_loose(count) - kept :].clone())

    def pieces(self, group: int) -> list[Piece]:
        """The coefficients of a group of heads, as they are kept.

        Args:
            group: Its number.
        """
        count = self.count(self.seen)

        def held(kind: str, span: slice) -> list[torch.Tensor]:
            return [getattr(self, f"{side}_{kind}_{group}")[:, :, span] for side in SIDES]

        if self.settings.coefficients != "int8":
            return [Piece(0, *held("coefficients", slice(count)))] if count else []
        closed, found = count // TILE * TILE, []
        if closed:
            scales = (scale[..., 0] for scale in held("scales", slice(closed // TILE)))
            found.append(Piece(0, *held("coefficients", slice(closed)), *scales))
        if count > closed:
            found.append(Piece(closed, *held("loose", slice(closed - self.loose_from, count - self.loose_from))))
        return found

    def _store_sinks(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        sinks, rows, tokens = self.settings.sinks, keys.shape[0], keys.shape[2]
        if not sinks or (self.real is None and self.seen >= sinks):
            return
        if self.real is None:
            whole = torch.arange(self.seen, self.seen + tokens, device=keys.device)[None].expand(rows, -1)
        else:
            ranks = self.real[:, : self.seen + tokens, 0].cumsum(1) - 1
            whole = torch.where(self.real[:, self.seen : self.seen + tokens, 0], ranks[:, self.seen :], -1)
        for name, new in (("sink_keys", keys), ("sink_values", values)):
            held = getattr(self, name)
            held = new.new_zeros(*new.shape[:2], sinks, new.shape[3]) if held is None else held
            # (batch, sinks, tokens): which new token is a row's n-th real one.
            chosen = whole[:, None] == torch.arange(sinks, device=keys.device)[:, None]
            came = chosen.any(-1)[:, None, :, None]
            index = chosen.int().argmax(-1)[:, None, :, None].expand_as(held)
            setattr(self, name, torch.where(came, new.gather(2, index), held))

    def _store_recent(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self.settings.recent and not self.window:
            return
        if self.recent_keys is None:
            self._widen(self.settings.recent, keys, values)
        assert self.recent_keys is not None
        assert self.recent_values is not None
        tokens = min(keys.shape[2], self.window)
        slots = torch.arange(self.seen + keys.shape[2] - tokens, self.seen + keys.shape[2], device=keys.device) % self.window
        for name, new in (("recent_keys", keys), ("recent_values", values)):
            held = getattr(self, name)
            new = new[:, :, new.shape[2] - tokens :]
            if torch.is_grad_enabled() and (held.requires_grad or new.requires_grad):
                held = held.index_copy(2, slots, new)
            else:
                if held.is_inference() and not torch.is_inference_mode_enabled():
                    held = held.clone()
                held.index_copy_(2, slots, new)
            setattr(self, name, held)

    def _widen(self, slots: int, *like: torch.Tensor) -> None:
        """Makes room for so many recent columns."""
        if slots <= self.window and not like:
            return
        for name, new in zip(("recent_keys", "recent_values"), like or (self.recent_keys, self.recent_values), strict=True):
            held = getattr(self, name)
            if new is None:
                return
            wider = new.new_zeros(*new.shape[:2], slots, new.shape[3])
            if held is not None:
                columns = torch.arange(max(0, self.seen - held.shape[2]), self.seen, device=held.device)
                wider = wider.index_copy(2, columns % slots, held.index_select(2, columns % held.shape[2]))
            setattr(self, name, wider)

    def recent_columns(self) -> torch.Tensor:
        """The last columns, those that are exact, in ascending order."""
        return torch.arange(max(0, self.seen - self.settings.recent), self.seen, device=self.device)

    def take_back(self, tokens: int) -> None:
        """Forgets the last columns, as if they had never come.

        Args:
            tokens: How many.
        """
        left = self.seen - tokens
        exact = self.seen <= self.window or tokens + min(self.settings.recent, left) <= self.window or not self.settings.recent
        whole = self.settings.coefficients != "int8" or self.loose_from <= self.count(left) // TILE * TILE
        if tokens and not (exact and whole):
            raise UnsupportedError(
                f"crop: {tokens} tokens are to be taken back, and what came before them is no longer as it was then. Call "
                "activate_past_recording() before the tokens that may be taken back, or build the cache anew from the shorter text."
            )
        self.seen, self.open = left, 0

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
        count, tiles = self.count(self.seen), self.count(self.seen) // TILE
        quantized = self.settings.coefficients == "int8"
        used = {"coefficients": tiles * TILE if quantized else count, "scales": tiles}
        for name, tensor in tensors.items():
            if name in ("real", "places"):
                tensors[name] = tensor[:, : self.seen]
            elif (kind := name.split("_")[1]) in used:
                tensors[name] = tensor[:, :, : used[kind]]
        return tensors, values

    def import_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        super().import_state(tensors, values)
        # Coefficients in 8 bits don't tell the model's precision; all others do.
        like = next((tensors[name] for name in self.row_tensors if name in tensors and tensors[name].dtype in _PRECISIONS), None)
        if like is not None:
            self.lazy_initialization(like, like)

    def owned_tensors(self) -> dict[str, torch.Tensor]:
        """The declared tensors, and the bases, which all caches of a model share."""
        bases = self.maps.tensors() if self.is_initialized else {}
        return super().owned_tensors() | {f"bases.{name}": tensor for name, tensor in bases.items()}

    def _move(self, device: torch.device | str) -> None:
        for name in self.row_tensors:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.to(device, non_blocking=True))
