"""One layer of a `SubspaceCache` with a codec: exact ends, codes between them, and the attention over both."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_kvcaches.codec.fixed import FixedForm, LayerCoder
from hf_kvcaches.core.call import AnsweringLayer, Call
from hf_kvcaches.core.layers import TensorLayer
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.step import Pass, Passes
from hf_kvcaches.core.view import previous_attention
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError
from hf_kvcaches.kernels.attention import AttentionPart, exact_part, merged
from hf_kvcaches.kernels.code_format import TILE
from hf_kvcaches.kernels.codes import TileRotation, code_part
from hf_kvcaches.kernels.launch import Backend
from hf_kvcaches.kernels.rotation import cos_sin
from hf_kvcaches.subspace.rows import Encoded, Ends, Move, Seen, move, visible

# How many of the last tokens can be taken back while they are recorded.
_RECORDED = 256
# Queries of a chunk whose scores are held at a time, and tokens that are decoded for them.
_QUERIES, _DECODED = 256, 4096


class CodedLayer(TensorLayer, AnsweringLayer):
    """Keeps a few tokens exactly, and of all others only their codes. `rows.py` says which tokens of a row lie where."""

    is_croppable = True
    cache_name: ClassVar[str] = "SubspaceCache"
    row_tensors: ClassVar[tuple[str, ...]] = ("exact_keys", "exact_values", "codes", "positions", "starts")
    counters: ClassVar[tuple[str, ...]] = ("seen", "counts", "padded")
    exact_keys: Tensor | None = None  # as the model rotated them, (batch, kv_heads, slots, head_dim)
    exact_values: Tensor | None = None
    codes: Tensor | None = None  # (batch, groups, bytes, capacity), uint8
    positions: Tensor | None = None  # the model's, of exact tokens, (batch, 1, slots, 1); None where keys are not rotated
    starts: Tensor | None = None  # those of the first token of each tile, (batch, capacity)
    counts: tuple[int, ...] = (0,)  # real tokens of each row; one number while all rows have as many
    coded = 0  # tokens that are codes, in the row with most
    padded = 0  # how many tokens there were when the last padding came

    def __init__(
        self, form: FixedForm | None, ends: Ends, backend: Backend, layer_idx: int, geometry: RotaryGeometry | None, passes: Passes
    ) -> None:
        super().__init__()
        self.form, self.ends, self.backend, self.layer_idx, self.geometry, self.passes = form, ends, backend, layer_idx, geometry, passes

    @property
    def kept(self) -> int:
        return self.seen

    @property
    def coder(self) -> LayerCoder:
        """What encodes and decodes, shared by all caches with this codec."""
        assert self.form is not None
        return self.form.coder(self.layer_idx, self.dtype, self.device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, call: Call) -> Tensor:
        call.check("SubspaceCache")
        if call.bias is not None:
            raise UnsupportedError("SubspaceCache does not support attention with a position bias. Use another cache with this model.")
        if torch.is_grad_enabled() and any(states.requires_grad for states in (query, keys, values)):
            raise UnsupportedError("SubspaceCache: codes are integers, which have no gradients. Call the model under torch.no_grad().")
        self.leave_inference_mode()
        tokens = keys.shape[2]
        before = self.counts[0] if len(self.counts) == 1 else torch.tensor(self.counts, device=keys.device)[:, None]
        running = self.passes.enter(call, self.seen, tokens, keys.device, before)
        block = self.passes.block_length(tokens, begun=bool(self.seen), recording=self.record_past)
        if block == tokens:
            return self._chunk(query, keys, values, call, running)
        if tokens == 1:
            return self._step(query, keys, values, call, running)
        outputs, start = [], 0
        for stop in range(block or 1, tokens + 1):
            attend, span = (self._chunk if stop == block else self._step), slice(start, stop)
            outputs.append(attend(query[:, :, span], keys[:, :, span], values[:, :, span], call, running.part(start, stop)))
            start = stop
        return torch.cat(outputs, 1)

    def _step(self, query: Tensor, keys: Tensor, values: Tensor, call: Call, running: Pass) -> Tensor:
        """One token, which is coded first if its row says so, and then attends."""
        exact_keys, exact_values, (seen_exact, seen_codes) = self._take(keys, values, running)
        parts = self._code_parts(query, seen_codes, call, running) if self.coded else []
        if exact_keys.shape[2]:
            parts.append(exact_part(query, exact_keys, exact_values, call.scaling, seen_exact, call.softcap))
        return merged(parts).to(query.dtype)

    def _chunk(self, query: Tensor, keys: Tensor, values: Tensor, call: Call, running: Pass) -> Tensor:
        """Several tokens, which are exact to each other, and are coded when they have attended."""
        if not self.seen and running.whole:
            output, _ = previous_attention(call.module, query, keys, values, call.mask, **call.options)
        else:
            output = self._attend_chunk(query, keys, values, call, running)
        self._take(keys, values, running)
        return output

    def _attend_chunk(self, query: Tensor, keys: Tensor, values: Tensor, call: Call, running: Pass) -> Tensor:
        tokens, seen_codes = query.shape[2], None
        if running.allowed is not None:
            seen_exact = running.allowed[:, 0, :, self.seen :]
        else:
            seen_exact = torch.ones(1, tokens, tokens, dtype=torch.bool, device=query.device).tril()
            seen_exact = seen_exact if running.valid is None else seen_exact & running.valid[:, None]
        if self.exact_keys is not None and self.exact_values is not None:
            held = self.exact_keys.shape[2]
            key = ("visible", self.counts, held)
            before, seen_codes = running.shared(key, lambda: visible(self.ends, self.counts, held, running.allowed, running.device))
            before = seen_exact.new_ones(1, 1, held) if before is None else before
            rows = max(len(before), len(seen_exact))
            seen_exact = torch.cat([seen.expand(rows, tokens, -1) for seen in (before, seen_exact)], 2)
            keys, values = torch.cat([self.exact_keys, keys], 2), torch.cat([self.exact_values, values], 2)
        pieces = [slice(start, min(start + _QUERIES, tokens)) for start in range(0, tokens, _QUERIES)]
        parts = [[exact_part(query[:, :, piece], keys, values, call.scaling, seen_exact[:, piece], call.softcap)] for piece in pieces]
        for start in range(0, self.coded, _DECODED):
            block = slice(start, min(start + _DECODED, self.coded))
            decoded = self._decoded(block)
            for piece, own in zip(pieces, parts, strict=True):
                seen = None if seen_codes is None else seen_codes[:, piece if seen_codes.shape[1] > 1 else slice(None), block]
                own.append(exact_part(query[:, :, piece], *decoded, call.scaling, seen, call.softcap))
        return torch.cat([merged(own) for own in parts], 1).to(query.dtype)

    def adopt(self, keys: Tensor, values: Tensor, positions: Tensor, padding: Tensor | None, queries: Any = None) -> None:
        self._take(keys, values, self.passes.of_prompt(positions, padding, keys.shape[2], keys.device))

    def _take(self, keys: Tensor, values: Tensor, running: Pass) -> tuple[Tensor, Tensor, Seen]:
        """Take new tokens and code those that are no longer exact.

        Returns:
            Exact keys and values, and which exact tokens and which codes the query of a step sees.
        """
        keys, values, held = keys.detach(), values.detach(), 0
        if self.exact_keys is not None and self.exact_values is not None:
            held = self.exact_keys.shape[2]
            keys, values = torch.cat([self.exact_keys, keys], 2), torch.cat([self.exact_values, values], 2)
        # Tells layers apart that rotate keys and that do not, and those that a failed pass did not reach.
        key = ("move", self.geometry is None, self.counts, held, self.record_past, id(self.positions), id(self.starts))
        to: Move = running.shared(key, lambda: self._move_of(running, held, len(keys)))
        if to.encoded is not None:
            self._encode(to.encoded.of(keys), to.encoded.of(values), to.new_starts, to.encoded)
        kept_keys, kept_values = to.keep(keys), to.keep(values)
        if not held or keys.shape[2] > held + 1:  # the rest of a prompt is not kept alive, nor anything of the caller's
            kept_keys, kept_values = kept_keys.clone(), kept_values.clone()
        self.exact_keys, self.exact_values, self.positions, self.starts = kept_keys, kept_values, to.positions, to.starts
        if to.padding is not None:
            self.padded = self.seen + to.padding
        self.seen += running.tokens
        self.counts, self.coded = to.counts, to.coded
        return kept_keys, kept_values, to.seen

    def _move_of(self, running: Pass, held: int, rows: int) -> Move:
        """Where new tokens go, and what follows from it for all layers that are as far as this one."""
        to = move(self.ends, self.counts, held, running, _RECORDED * self.record_past, rows)
        if running.tokens == 1:
            to = to._replace(seen=visible(self.ends, to.counts, to.sinks + to.newest, running.allowed, running.device))
        if self.geometry is None:
            return to
        positions, starts, new_starts = running.positions().expand(rows, -1)[:, None, :, None], self.starts, None
        if self.positions is not None:
            positions = torch.cat([self.positions, positions], 2)
        if to.encoded is not None:
            new_starts = to.encoded.of(positions)[:, 0, ::TILE, 0]
            starts = to.encoded.written(starts, new_starts, 1)
        return to._replace(positions=to.keep(positions), starts=starts, new_starts=new_starts)

    def _encode(self, keys: Tensor, values: Tensor, starts: Tensor | None, encoded: Encoded) -> None:
        """Write the codes of whole tiles, whose first tokens have the positions `starts`, (batch, tiles); keys are rotated."""
        if self.geometry is not None and starts is not None:
            keys = self.geometry.unrotate(keys if keys.dtype == torch.float64 else keys.float(), starts.repeat_interleave(TILE, 1))
        self.codes = encoded.written(self.codes, self.coder.encode(keys, values), TILE)

    def _code_parts(self, query: Tensor, seen: Tensor | None, call: Call, running: Pass) -> list[AttentionPart]:
        """Attention of one token over all codes."""
        assert self.codes is not None
        rotation: TileRotation | None = None
        if self.geometry is not None:
            key = ("tiles", id(self.starts), id(self.geometry), self.coded)
            rotation = running.shared(key, lambda: self._tile_rotation(query.dtype))
        codes, scaling, softcap = self.codes[..., : self.coded], call.scaling, call.softcap
        return [code_part(query, codes, self.coder.map, scaling, rotation=rotation, visible=seen, softcap=softcap, backend=self.backend)]

    def _tile_rotation(self, dtype: torch.dtype) -> TileRotation:
        """By what queries of a dtype are rotated back for tiles with codes."""
        assert self.geometry is not None
        wide, scale = torch.promote_types(dtype, torch.float32), self.geometry.attention_scaling
        tables = cos_sin(self.geometry.frequencies_on(self.device), self._starts_of(slice(0, self.coded)), wide)
        cos, sin = tables if scale == 1 else (tables[0] * scale, tables[1] * scale)
        return TileRotation(cos, sin, self.geometry.layout)

    def _starts_of(self, block: slice) -> Tensor:
        """The positions of the first tokens of some tiles with codes, (batch, tiles)."""
        assert self.starts is not None
        return self.starts[:, block.start // TILE : block.stop // TILE]

    def _decoded(self, block: slice) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values of some tokens with codes, whole tiles, (batch, kv_heads, tokens, head_dim)."""
        assert self.codes is not None
        keys, values = self.coder.decode(self.codes[..., block], torch.promote_types(self.dtype, torch.float32))
        if self.geometry is not None:
            keys = self.geometry.rotate(keys, self._starts_of(block).repeat_interleave(TILE, 1))
        return keys, values

    def activate_past_recording(self) -> None:
        """From now on the last 256 tokens can be taken back with `crop`."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, as if they had never come; `tokens_to_remove` is minus their number, as in transformers."""
        tokens = -int(tokens_to_remove)
        if not 0 <= tokens <= self.seen:
            raise ConfigError.of("tokens_to_remove", f"a number from -{self.seen} to 0", -tokens, "crop(-n) removes the last n tokens.")
        if not tokens or self.exact_keys is None or self.exact_values is None:
            return
        counts, held = tuple(count - tokens for count in self.counts), self.exact_keys.shape[2]
        sinks = min(self.ends.sinks, max(self.counts))
        short = self.seen - tokens < self.padded and len(self.counts) > 1
        if short or any(count < 0 or self.ends.window(count) > max(0, held - sinks - tokens) for count in counts):
            raise UnsupportedError(
                f"crop: {tokens} tokens are to be taken back, and what came before them is no longer as it was then. Call "
                "activate_past_recording() before the tokens that may be taken back, or build the cache anew from the shorter text."
            )
        for name in ("exact_keys", "exact_values", "positions"):
            if (tensor := getattr(self, name)) is not None:
                setattr(self, name, tensor[:, :, : held - tokens])
        self.seen -= tokens
        self._count(counts)

    def _count(self, counts: tuple[int, ...]) -> None:
        """Say how many real tokens the rows have."""
        self.counts, self.coded = counts, TILE * self.ends.tiles(max(counts))

    def reset(self) -> None:
        super().reset()
        self.record_past = False
        self._count((0,))

    def import_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        counts = values.get("counts")
        if not isinstance(counts, list) or not counts or not all(type(count) is int and 0 <= count <= values["seen"] for count in counts):
            raise ArtifactError(f"The stored state of a {type(self).__name__} has the counts {str(counts)[:200]}. Save the cache again.")
        super().import_state(tensors, values)
        self._count(tuple(counts))
        if self.exact_keys is not None:
            self.lazy_initialization(self.exact_keys, self.exact_keys)

    def export_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, values = super().export_state()
        if "codes" in tensors:
            tensors["codes"] = tensors["codes"][..., : self.coded]
        return tensors, values | {"counts": list(self.counts)}

    def _map_rows(self, function: Any) -> None:
        super()._map_rows(function)
        if len(self.counts) > 1:
            self._count(tuple(function(torch.tensor(self.counts)).tolist()))
