"""`PositionCorrection`: moves slots of models that learned an embedding for each position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError, UnsupportedError, whole_number
from hf_kvcaches.warmstart.paper.slots import Slots

# The correction is fitted to this many prompts of random tokens, of at most this many tokens each.
_PROMPTS, _LONGEST = 8, 512


def repaired(positions: torch.Tensor, last: int) -> torch.Tensor:
    """Make integer positions, (..., slots), distinct and between 0 and `last`, which is at least slots - 1.

    "CP-KVP", section 2.4b: in ascending order each is raised to at least one above the previous one. Those that would exceed `last` move
    down, and stay distinct; every position keeps its rank.
    """
    slots = positions.shape[-1]
    last = whole_number("last", last, slots - 1, f"an integer of at least {slots - 1}, so that {slots} slots have a position each")
    ordered, order = positions.sort(dim=-1, stable=True)
    # Minus their ranks, distinct ascending positions are a non-decreasing sequence, with the same bounds for all.
    ranks = torch.arange(slots, dtype=positions.dtype, device=positions.device)
    apart = (ordered - ranks).cummax(-1).values.clamp(0, last - slots + 1) + ranks
    return torch.empty_like(apart).scatter(-1, order, apart)


@dataclass(frozen=True, eq=False)
class PositionCorrection:
    """The change of a key when its slot moves, in models with learned positions. Experimental.

    "CP-KVP", section 2.4b, which learns a function B of the position for each head. Here B(t) is a linear map of the model's embedding of
    position t: exact in the first layer but for the LayerNorm's scale, and the best linear guess in higher ones. Values stay as they are.

    **Departs from the paper**: B is fitted in closed form, to keys at known positions and not to outputs of attention. Slots get the
    difference of B between both positions, so they do not change at their original length.

    Args:
        embeddings: Of the positions, (positions, embedding), float32.
        maps: For each layer (kv_heads, embedding, head_dim), float32.
    """

    embeddings: torch.Tensor
    maps: tuple[torch.Tensor, ...]

    @classmethod
    def prompts_for(cls, model: PreTrainedModel) -> torch.Tensor:
        """Return the random prompts that a correction of a model is fitted to, (prompts, 1, tokens); the same in every process."""
        tokens = min(_LONGEST, _table(model).num_embeddings)
        vocabulary = model.get_input_embeddings().num_embeddings
        prompts = torch.randint(0, vocabulary, (_PROMPTS, 1, tokens), generator=torch.Generator().manual_seed(0))
        return prompts.to(compat.input_device(model))

    @classmethod
    def of_model(cls, model: PreTrainedModel, keys: Iterable[Sequence[torch.Tensor]]) -> PositionCorrection:
        """Fit a correction to a model with positions like GPT-2's, from the keys of `prompts_for` in each layer."""
        return cls.fit(_table(model).weight, ((layers, torch.arange(layers[0].shape[1])) for layers in keys))

    @classmethod
    def fit(
        cls, embeddings: torch.Tensor, prompts: Iterable[tuple[Sequence[torch.Tensor], torch.Tensor]], gamma: float = 1e-3
    ) -> PositionCorrection:
        """Fit a ridge regression, with an intercept, from a token's position embedding to its key.

        Args:
            embeddings: The model's position embeddings, (positions, embedding).
            prompts: Keys of each layer, (kv_heads, tokens, head_dim), and the tokens' positions, (tokens,) integers.
            gamma: The ridge penalty, above 0, in units of the mean variance of a dimension of the embeddings at these positions.
        """
        samples = [(keys, positions.cpu().long()) for keys, positions in prompts]
        if len({position for _, positions in samples for position in positions.tolist()}) < 2:
            raise ConfigError.of("prompts", "tokens at two positions at least", len(samples))
        indices = torch.cat([positions for _, positions in samples])
        if not 0 <= int(indices.min()) <= int(indices.max()) < len(embeddings):
            raise ConfigError.of("prompts", f"positions from 0 to {len(embeddings) - 1}", (int(indices.min()), int(indices.max())))
        rows = embeddings.detach().double().cpu()[indices]
        centred = rows - rows.mean(0)
        gram = centred.mT @ centred
        damping = gamma * gram.diagonal().mean() * torch.eye(gram.shape[0], dtype=gram.dtype)
        maps = []
        for layer in zip(*(keys for keys, _ in samples), strict=True):
            # Rows are centred, so the keys' mean drops out of the product.
            keys = torch.cat([states.detach().double().cpu() for states in layer], 1)
            maps.append(torch.linalg.solve(gram + damping, centred.mT @ keys).float())
        return cls(embeddings.detach().float().cpu(), tuple(maps))

    def shifted(self, slots: Slots, delta: int) -> Slots:
        """Move slots to the end of a prompt that is `delta` tokens longer, at integer positions."""
        length = slots.length + delta
        if not 1 <= length <= len(self.embeddings):
            raise ConfigError.of("delta", f"what makes a prompt of 1 to {len(self.embeddings)} tokens", f"{delta}, which makes {length}")
        if delta == 0:
            return slots
        layers = []
        for layer, mapping in zip(slots.layers, self.maps, strict=True):
            # The prompt's last token has the position behind all slots.
            before, after = layer.positions.round().long(), repaired((layer.positions + delta).round().long(), max(length - 2, 0))
            rows = self.embeddings.to(before.device)
            keys = layer.keys.float() + (rows[after] - rows[before]) @ mapping.to(before.device)
            layers.append(layer._replace(keys=keys.to(layer.keys.dtype), positions=after.float()))
        return Slots(layers, length)


def _table(model: PreTrainedModel) -> nn.Embedding:
    table = next((module for name, module in model.named_modules() if name.rpartition(".")[2] == "wpe"), None)
    if not isinstance(table, nn.Embedding):
        raise UnsupportedError("correct_positions: this model has no table of learned positions as GPT-2 has it (`wpe`). Leave it out.")
    return table
