"""The paper's method, written down plainly: all tokens are kept, and each head is projected tile by tile from the first token on."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from hf_kvcaches import AdaptiveSubspace
from hf_kvcaches.core.rope import RotaryGeometry

TILE = 16


@dataclass
class Walk:
    """One head of one row.

    Args:
        rank: The directions of its basis.
        tau: The largest relative residual of a tile; None for 1.5 times what a basis lost when it was new.
        first: What the first basis is made of where it is not the first tokens, (n, d), and counts as a chunk of tokens.

    Attributes:
        begins: The tiles with which a basis begins.
        closest: How near a residual came to its limit, as a share.
    """

    settings: AdaptiveSubspace
    rank: int
    tau: float | None
    first: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.begins = [0]
        self.closest = 1.0

    def top(self, gram: torch.Tensor, tile: torch.Tensor | None = None) -> None:
        """Take the top directions as basis, of a block that begins with a tile."""
        energies, axes = torch.linalg.eigh(gram)
        self.basis = axes.flip(1)[:, : self.rank].T
        lost = float((energies.flip(0)[self.rank :].sum() / energies.sum().clamp_min(1e-30)).clamp_min(0))
        residual = max(lost**0.5, 0.0 if tile is None else self.residual(tile))
        self.limit = max(1.5 * residual, 1e-3) if self.tau is None else self.tau

    def residual(self, tile: torch.Tensor) -> float:
        return float((tile - tile @ self.basis.T @ self.basis).norm() / tile.norm())

    def follow(self, tokens: torch.Tensor) -> torch.Tensor:
        """What is left of tokens (n, d), whole tiles."""
        own = self.settings
        begun = tokens[: own.warmup] if self.first is None else self.first * (own.chunk or 1) ** 0.5
        gram = begun.T @ begun
        self.top(gram)
        found = []
        for start in range(0, len(tokens), TILE):
            tile = tokens[start : start + TILE]
            if own.chunk is not None and start >= own.warmup:
                over = start > own.warmup and start % own.chunk == 0
                residual = self.residual(tile)
                if not over and self.limit:
                    self.closest = min(self.closest, abs(residual / self.limit - 1))
                gram = gram * (own.decay if over else 1.0) + tile.T @ tile
                if over or residual > self.limit:
                    self.top(gram, tile)
                    self.begins.append(start // TILE)
            found.append(tile @ self.basis.T @ self.basis)
        return torch.cat(found) if found else tokens


class PaperOracle(DynamicCache):
    """Hands out keys and values for a model's own attention, one softmax over all tokens; `real` is False where a token is padding."""

    def __init__(
        self, config: Any, settings: AdaptiveSubspace, ranks: tuple[int, int], sinks: int, recent: int, real: torch.Tensor | None = None
    ) -> None:
        super().__init__(config=config)
        self.config, self.settings, self.ranks, self.sinks, self.recent, self.real = config, settings, ranks, sinks, recent, real
        self.begins: dict[tuple[int, int, int, int], list[int]] = {}
        self.closest = 1.0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        before = self.get_seq_length(layer_idx)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if not before:
            return keys, values
        keys, values = keys.clone(), values.clone()
        real = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool) if self.real is None else self.real[:, : keys.shape[2]]
        # A single token reads what is left once it is there; several are exact to each other.
        held = real if key_states.shape[2] == 1 else real[:, :before]
        for row in range(len(keys)):
            places = held[row].nonzero()[:, 0][self.sinks :]
            if len(places) >= self.settings.warmup + self.recent:
                places = places[: max(0, len(places) - self.recent) // TILE * TILE]
                self._project(keys[row], values[row], places, (layer_idx, row))
        return keys, values

    def _project(self, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor, where: tuple[int, int]) -> None:
        """Replace the tokens of a row, (heads, tokens, d), by what is left of them."""
        geometry = RotaryGeometry.from_config(self.config, layer_idx=where[0])
        aware = self.settings.rotation == "aware" and geometry.kind == "rope"
        positions = self.sinks + torch.arange(len(places))
        plain = keys[None, :, places]
        plain = geometry.unrotate(plain, positions) if aware else plain
        for side, (states, rank, tau) in enumerate(
            zip((plain[0], values[:, places]), self.ranks, (self.settings.tau_k, self.settings.tau_v), strict=True)
        ):
            bases = self.settings.bases
            for head, tokens in enumerate(states):
                walk = Walk(self.settings, rank, tau, None if bases is None else bases[where[0]][side][head].double())
                states[head] = walk.follow(tokens.double()).to(tokens.dtype)
                self.begins[(*where, side, head)] = walk.begins
                self.closest = min(self.closest, walk.closest)
            if side:
                values[:, places] = states
            else:
                gamma = (rank / states.shape[2]) ** 0.5 if self.settings.gamma == "paper" else 1.0
                keys[:, places] = gamma * (geometry.rotate(states[None], positions)[0] if aware else states)
