"""Positions that are integers: where slots stand in a model that adds positions to its embeddings, and what moving them takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hf_kvcaches.errors import ArtifactError, ConfigError, whole_number
from hf_kvcaches.warmstart.slots import Slots, require_layers


def repaired(positions: torch.Tensor, last: int) -> torch.Tensor:
    """Positions of which no two are the same and none is outside of 0 to `last`, changed no more than the paper's rule asks.

    "CP-KVP", section 2.4b: in ascending order each is raised to one above the one before it, then all are brought inside. Here that
    is done so that they stay different: those that run up against `last` move down. Each keeps its rank; what is in order already, and
    inside, stays as it is.

    Args:
        positions: Integers, (..., slots).
        last: The largest position allowed; at least slots - 1.
    """
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool or positions.ndim == 0:
        raise ConfigError.of("positions", "an integer tensor of shape (..., slots)", (positions.dtype, tuple(positions.shape)))
    slots = positions.shape[-1]
    last = whole_number("last", last, slots - 1, f"an integer of at least {slots - 1}, so that {slots} slots have a place each")
    if slots == 0:
        return positions
    ordered, order = positions.sort(dim=-1, stable=True)
    # Less their ranks, positions that differ by at least 1 are positions that don't fall, and bounds are the same for all.
    ranks = torch.arange(slots, dtype=positions.dtype, device=positions.device)
    apart = (ordered - ranks).cummax(-1).values.clamp(0, last - slots + 1) + ranks
    return torch.empty_like(apart).scatter(-1, order, apart)


@dataclass(frozen=True, eq=False)
class PositionCorrection:
    """For models with learned positions: what a key is added to when its slot moves. Experimental.

    "CP-KVP", section 2.4b, which learns a function B of the position for each head. Here B(t) is a linear map of the model's own embedding
    of position t. In the first layer a key is a linear map of the sum of both embeddings, after a LayerNorm, which is a change of length
    and mean: but for that length, which depends on the token, B is exact there. Higher up, what a position did to a key went through
    other layers, and B is the best linear guess. Values carry something of the positions, too, and are left alone.

    **Departs from the paper**: B is fitted in closed form, to keys at known positions and not to outputs of attention, and slots get the
    difference of B at both positions. At the length that they come from they are exactly what they were.

    Args:
        embeddings: Of the positions, (positions, embedding), float32.
        maps: For each layer (kv_heads, embedding, head_dim), float32.
    """

    embeddings: torch.Tensor
    maps: tuple[torch.Tensor, ...]

    @classmethod
    def fit(
        cls, embeddings: torch.Tensor, prompts: Iterable[tuple[Sequence[torch.Tensor], torch.Tensor]], gamma: float = 1e-3
    ) -> PositionCorrection:
        """Learns from the keys of prompts: a ridge regression from a token's position embedding to its key, with an intercept.

        Args:
            embeddings: The model's, (positions, embedding).
            prompts: Keys of each layer, (kv_heads, tokens, head_dim), and the tokens' positions, (tokens,) integers. Looked at once. The
                more prompts, the better tokens average out; a position that none of them has is guessed from its embedding.
            gamma: Above 0; 1 is as much as the mean variance of a dimension of the embeddings, at the positions seen.
        """
        if embeddings.ndim != 2:
            raise ConfigError.of("embeddings", "shape (positions, embedding)", tuple(embeddings.shape))
        if not gamma > 0:
            raise ConfigError.of("gamma", "a number above 0", gamma)
        rows = embeddings.detach().double().cpu()
        seen = torch.zeros(len(rows), dtype=torch.float64)
        sums: list[torch.Tensor] = []
        for keys, positions in prompts:
            where = positions.detach().cpu().long()
            if where.ndim != 1 or (len(where) and not 0 <= int(where.min()) <= int(where.max()) < len(rows)):
                raise ConfigError.of("prompts", f"positions of shape (tokens,) from 0 to {len(rows) - 1}", tuple(positions.shape))
            if not sums:
                sums = [torch.zeros(own.shape[0], len(rows), own.shape[-1], dtype=torch.float64) for own in keys]
            require_layers("prompts", keys, len(sums))
            seen.index_add_(0, where, torch.ones(len(where), dtype=torch.float64))
            for total, own in zip(sums, keys, strict=True):
                total.index_add_(1, where, own.detach().double().cpu())
        count = seen.sum()
        if int((seen > 0).sum()) < 2:
            raise ConfigError.of("prompts", "tokens at two positions at least", int((seen > 0).sum()))
        centred = rows - (seen @ rows) / count
        gram = (centred * seen[:, None]).mT @ centred
        damping = gamma * gram.diagonal().mean() * torch.eye(gram.shape[0], dtype=gram.dtype)
        # Rows are centred where tokens are, so the keys' mean falls out of the product by itself.
        maps = tuple(torch.linalg.solve(gram + damping, centred.mT @ total).float() for total in sums)
        return cls(embeddings.detach().float().cpu(), maps)

    def shifted(self, slots: Slots, delta: int) -> Slots:
        """The same slots at the end of a prompt that is `delta` tokens longer, at integer positions.

        Args:
            delta: Length of the other prompt minus that of the slots' own. The new prompt must have a position for each slot.
        """
        require_layers("slots", slots.keys, len(self.maps))
        length = slots.length + delta
        if not 1 <= length <= len(self.embeddings):
            raise ConfigError.of("delta", f"what makes a prompt of 1 to {len(self.embeddings)} tokens", f"{delta}, which makes {length}")
        keys, positions = [], []
        for own, before, mapping in zip(slots.keys, slots.positions, self.maps, strict=True):
            now, then = before.round().long(), (before + delta).round().long()
            # The last token of the prompt stands behind all slots, and at no slot's place.
            then = repaired(then, max(length - 2, 0))
            if delta == 0:
                then = now
            rows = self.embeddings.to(own.device)
            moved = (rows[then] - rows[now]) @ mapping.to(own.device)
            keys.append((own.float() + moved).to(own.dtype))
            positions.append(before if delta == 0 else then.float())
        return replace(slots, keys=tuple(keys), positions=tuple(positions), length=length)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The embeddings and maps by name, for storing."""
        return {"embeddings": self.embeddings, **{f"maps.{layer}": each for layer, each in enumerate(self.maps)}}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> PositionCorrection:
        """A correction from what `tensors` gave."""
        try:
            return cls(tensors["embeddings"], tuple(tensors[f"maps.{layer}"] for layer in range(len(tensors) - 1)))
        except KeyError as error:
            raise ArtifactError(f"The stored position correction lacks {error}.") from error
