"""A layer of `SubspaceCache` by the paper: coefficients in bases that follow the text, and one softmax over all blocks."""

from __future__ import annotations

from bisect import bisect
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from hf_kvcaches.core.call import Call
from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.core.rope import undoable_rotation
from hf_kvcaches.core.rope_families import head_sizes
from hf_kvcaches.core.step import Pass, Passes
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.kernels.attention import AttentionPart, exact_part
from hf_kvcaches.kernels.code_format import TILE
from hf_kvcaches.subspace.layer import CodedLayer
from hf_kvcaches.subspace.paper.settings import AdaptiveSubspace
from hf_kvcaches.subspace.paper.side import Side
from hf_kvcaches.subspace.rows import Encoded, Ends


class PaperLayer(CodedLayer):
    """Keeps a few tokens exactly, and of all others the coefficients in the bases of their block, of which `blocks` has the first tiles.

    At a new block, each row and head has a new basis or goes on with its old one.
    """

    is_croppable = False
    row_tensors: ClassVar[tuple[str, ...]] = (
        *("exact_keys", "exact_values", "positions", "starts"),
        *("key_coefficients", "key_bases", "key_limit", "key_sketch"),
        *("value_coefficients", "value_bases", "value_limit", "value_sketch"),
    )
    counters: ClassVar[tuple[str, ...]] = (*CodedLayer.counters, "blocks")
    blocks: tuple[int, ...] = (0,)

    def __init__(
        self, adaptive: AdaptiveSubspace, ends: Ends, layer_idx: int, config: Any, passes: Passes, shard: HeadShard | None = None
    ) -> None:
        geometry, sizes = None, head_sizes(config, layer_idx)
        if adaptive.rotation == "aware":
            geometry = undoable_rotation(config, layer_idx, "rotation='aware'", "rotation='post' works.")
        if sizes and isinstance(adaptive.rank, tuple) and any(rank > size for rank, size in zip(adaptive.rank, sizes, strict=True)):
            expected = f"1 to {sizes[0]} for keys and 1 to {sizes[1]} for values, the model's head size"
            raise ConfigError.of("rank", expected, adaptive.rank)
        # The first tokens that are coded are then all that the first bases are made of, however they come.
        ends = replace(ends, warmup=adaptive.warmup + ends.recent)
        super().__init__(None, ends, "torch", layer_idx, geometry, passes)
        self.adaptive, self.shard = adaptive, shard

    @property
    def sides(self) -> tuple[Side, Side]:
        """Keys and values, once any was coded."""
        keys, values = self.adaptive.rules(self.key_bases.shape[-1], self.value_bases.shape[-1])
        key_side = Side(keys, self.key_coefficients, self.key_bases, self.key_limit, self.key_sketch)
        return key_side, Side(values, self.value_coefficients, self.value_bases, self.value_limit, self.value_sketch)

    def _keep(self, keys: Side, values: Side) -> None:
        _, self.key_coefficients, self.key_bases, self.key_limit, self.key_sketch = keys
        _, self.value_coefficients, self.value_bases, self.value_limit, self.value_sketch = values

    def _encode(self, keys: Tensor, values: Tensor, starts: Tensor | None, encoded: Encoded) -> None:
        wide = torch.promote_types(keys.dtype, torch.float32)
        states = [keys.to(wide), values.to(wide)]
        if self.geometry is not None and starts is not None:
            states[0] = self.geometry.unrotate(states[0], _positions_of(starts))
        if "key_coefficients" not in self.owned_tensors():
            rules = self.adaptive.rules(keys.shape[3], values.shape[3])
            self._keep(*(Side.empty(rule, side, keys.dtype) for rule, side in zip(rules, states, strict=True)))
        self._keep(*(side.with_room(TILE * encoded.stop, 0) for side in self.sides))
        for rows, first, tiles in encoded.spans:
            if not first:
                samples = self._calibrated(keys[rows]) or [side[rows, :, : self.adaptive.warmup] for side in states]
                self._keep(*(side.begun(rows, sample) for side, sample in zip(self.sides, samples, strict=True)))
            for tile in range(tiles):
                self._advance(rows, first + tile, [side[rows, :, TILE * tile : TILE * (tile + 1)] for side in states])

    def _calibrated(self, keys: Tensor) -> list[Tensor] | None:
        """Return calibrated bases as if they were a chunk of tokens of some rows, (rows, heads, d, d) of keys and of values; or None."""
        if self.adaptive.bases is None:
            return None
        heads = slice(None) if self.shard is None else self.shard.span(self.shard.size * keys.shape[1])
        sides, weight = self.adaptive.bases[self.layer_idx], self.adaptive.chunk or 1
        return [weight**0.5 * side[heads].to(keys.device).expand(len(keys), -1, -1, -1) for side in sides]

    def _advance(self, rows: slice, tile: int, tokens: list[Tensor]) -> None:
        """Code a tile of some rows, in a new basis where it loses too much in the old one or a chunk is over."""
        start, chunk, block = TILE * tile, self.adaptive.chunk, bisect(self.blocks, tile) - 1
        if chunk is not None and start >= self.adaptive.warmup:
            chunk_over, due = start > self.adaptive.warmup and start % chunk == 0, []
            for side, states in zip(self.sides, tokens, strict=True):
                due.append((side.residual(rows, block, states) > side.limit[rows]) | chunk_over)
                side.learn(rows, states, self.adaptive.decay if chunk_over else 1.0)
            if chunk_over or bool(due[0].any() | due[1].any()):
                block = self._begin_block(tile)
                for side, heads, states in zip(self.sides, due, tokens, strict=True):
                    side.renew(rows, block, heads, states)
        for side, states in zip(self.sides, tokens, strict=True):
            side.coefficients[rows, :, start : start + TILE] = (states @ side.bases[rows, :, block].mT).to(side.coefficients.dtype)

    def _begin_block(self, tile: int) -> int:
        """Begin a block with a tile, in the bases of the one before, and return its number."""
        if tile not in self.blocks:
            block = bisect(self.blocks, tile)
            self.blocks = (*self.blocks[:block], tile, *self.blocks[block:])
            before = [*range(block), *range(block - 1, len(self.blocks) - 1)]
            self._keep(*(side._replace(bases=side.bases[:, :, before]) for side in self.sides))
        return self.blocks.index(tile)

    def _blocks_of(self, tokens: slice) -> list[tuple[int, slice]]:
        """Return the numbers of the blocks that some tokens are in, and which of these."""
        ends = pairwise(TILE * tile for tile in (*self.blocks, self.coded // TILE))
        spans = [slice(max(start, tokens.start), min(stop, tokens.stop)) for start, stop in ends]
        return [(block, span) for block, span in enumerate(spans) if span.start < span.stop]

    def _code_parts(self, query: Tensor, seen: Tensor | None, call: Call, running: Pass) -> list[AttentionPart]:
        """Attend to each block by itself: the paper's blockwise softmax, before it is merged."""
        keys, values = self.sides
        parts = []
        for block, tokens in self._blocks_of(slice(0, self.coded)):
            if self.geometry is None:
                block_query = _by_head(query, keys.bases[:, :, block].mT * self._gamma(block))
                block_keys = keys.coefficients[:, :, tokens]
            else:
                block_query, block_keys = query, self._decoded_keys(block, tokens)
            visible = None if seen is None else seen[..., tokens]
            part = exact_part(block_query, block_keys, values.coefficients[:, :, tokens], call.scaling, visible, call.softcap)
            parts.append(part._replace(sums=_by_head(part.sums, values.bases[:, :, block])))
        return parts

    def _gamma(self, block: int) -> Tensor | float:
        """Return what logits of coefficients are multiplied with: 1, or the paper's sqrt(trace(P) / d), (batch, kv_heads, 1, 1)."""
        if self.adaptive.gamma == "one":
            return 1.0
        return (self.key_bases[:, :, block].square().sum((-2, -1), keepdim=True) / self.key_bases.shape[-1]).sqrt()

    def _decoded_keys(self, block: int, tokens: slice) -> Tensor:
        """Return keys of a block, rotated, (batch, kv_heads, tokens, head_dim)."""
        keys = self.sides[0].decoded(block, tokens) * self._gamma(block)
        return keys if self.geometry is None else self.geometry.rotate(keys, _positions_of(self._starts_of(tokens)))

    def _decoded(self, block: slice) -> tuple[Tensor, Tensor]:
        parts = [(self._decoded_keys(*part), self.sides[1].decoded(*part)) for part in self._blocks_of(block)]
        keys, values = (torch.cat(side, 2) for side in zip(*parts, strict=True))
        return keys, values

    def activate_past_recording(self) -> NoReturn:
        self._refuse("activate_past_recording", "Bases follow tokens for good. Decode without an assistant, or use a codec.")

    def reset(self) -> None:
        super().reset()
        self.blocks = (0,)

    def import_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        blocks = values.get("blocks")
        if not isinstance(blocks, list) or not all(type(tile) is int for tile in blocks) or blocks != sorted({0, *blocks}):
            raise ArtifactError(f"The stored state of a {type(self).__name__} has the blocks {str(blocks)[:200]}. Save the cache again.")
        super().import_state(tensors, values | {"blocks": tuple(blocks)})

    def export_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self.adaptive.bases is not None:
            self._refuse("save", "A file does not bring calibrated bases.")
        tensors, values = super().export_state()
        coefficients = {name: tensors[name][:, :, : self.coded] for name in ("key_coefficients", "value_coefficients") if name in tensors}
        return tensors | coefficients, values | {"blocks": list(self.blocks)}


def _positions_of(starts: Tensor) -> Tensor:
    """Return the positions of all tokens of tiles, (batch or 1, tokens), from those of their first ones, (batch or 1, tiles)."""
    return (starts[:, :, None] + torch.arange(TILE, device=starts.device)).flatten(1)


def _by_head(states: Tensor, matrices: Tensor) -> Tensor:
    """Multiply rows, (batch, heads, rows, n), with a matrix for each key head, (batch, kv_heads, n, m), in the dtype of the matrices."""
    grouped = states.to(matrices.dtype).reshape(len(states), matrices.shape[1], -1, states.shape[3])
    return (grouped @ matrices).view(*states.shape[:3], -1)
