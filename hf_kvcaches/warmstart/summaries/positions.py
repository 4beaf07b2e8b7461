"""`PositionCorrection`: moves slots of models that learned an embedding for each position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError, UnsupportedError, whole_number
from hf_kvcaches.warmstart.reading import read_prompt
from hf_kvcaches.warmstart.summaries.slots import Slots, require_layers

# The correction is fitted to prompts of random tokens: this many, of at most this many tokens.
_PROMPTS, _LONGEST = 8, 512


def repaired(positions: torch.Tensor, last: int) -> torch.Tensor:
    """Make integer positions, (..., slots), distinct and between 0 and `last`, which is at least slots - 1.

    "CP-KVP", section 2.4b: in ascending order each is raised to at least one above the previous one. Those that would exceed `last` move
    down, and stay distinct; every position keeps its rank.
    """
    slots = positions.shape[-1]
    last = whole_number("last", last, slots - 1, f"an integer of at least {slots - 1}, so that {slots} slots have a place each")
    ordered, order = positions.sort(dim=-1, stable=True)
    # Less their ranks, positions that differ by at least 1 are positions that don't fall, and bounds are the same for all.
    ranks = torch.arange(slots, dtype=positions.dtype, device=positions.device)
    apart = (ordered - ranks).cummax(-1).values.clamp(0, last - slots + 1) + ranks
    return torch.empty_like(apart).scatter(-1, order, apart)


@dataclass(frozen=True, eq=False)
class PositionCorrection:
    """For models with learned positions: what is added to a key when its slot moves. Experimental.

    "CP-KVP", section 2.4b, which learns a function B of the position for each head. Here B(t) is a linear map of the model's embedding of
    position t: exact in the first layer but for the LayerNorm's scale, and the best linear guess in higher ones. Values stay as they are.

    **Departs from the paper**: B is fitted in closed form, to keys at known positions and not to outputs of attention, and slots get the
    difference of B at both positions, so that they are unchanged at the length that they come from.

    Args:
        embeddings: Of the positions, (positions, embedding), float32.
        maps: For each layer (kv_heads, embedding, head_dim), float32.
    """

    embeddings: torch.Tensor
    maps: tuple[torch.Tensor, ...]

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> PositionCorrection:
        """Fit a correction to a model with positions like GPT-2's; the result is the same in every process."""
        embeddings = next((module for name, module in model.named_modules() if name.rpartition(".")[2] == "wpe"), None)
        if not isinstance(embeddings, nn.Embedding):
            raise UnsupportedError("correct_positions: this model has no table of learned positions as GPT-2 has it (`wpe`). Leave it out.")
        tokens = min(_LONGEST, embeddings.num_embeddings)
        vocabulary = model.get_input_embeddings().num_embeddings
        prompts = torch.randint(0, vocabulary, (_PROMPTS, 1, tokens), generator=torch.Generator().manual_seed(0))
        states = (read_prompt(model, ids) for ids in prompts.to(compat.input_device(model)))
        return cls.fit(embeddings.weight, (([layer.keys for layer in prompt.layers], torch.arange(tokens)) for prompt in states))

    @classmethod
    def fit(
        cls, embeddings: torch.Tensor, prompts: Iterable[tuple[Sequence[torch.Tensor], torch.Tensor]], gamma: float = 1e-3
    ) -> PositionCorrection:
        """Fit a ridge regression, with an intercept, from a token's position embedding to its key.

        Args:
            embeddings: The model's, (positions, embedding).
            prompts: Keys of each layer, (kv_heads, tokens, head_dim), and the tokens' positions, (tokens,) integers. Read once.
            gamma: Above 0, in units of the mean variance of a dimension of the embeddings at the positions seen.
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
            sums = sums or [torch.zeros(layer.shape[0], len(rows), layer.shape[-1], dtype=torch.float64) for layer in keys]
            require_layers("prompts", keys, len(sums))
            seen.index_add_(0, where, torch.ones(len(where), dtype=torch.float64))
            for total, layer in zip(sums, keys, strict=True):
                total.index_add_(1, where, layer.detach().double().cpu())
        if int((seen > 0).sum()) < 2:
            raise ConfigError.of("prompts", "tokens at two positions at least", int((seen > 0).sum()))
        centred = rows - (seen @ rows) / seen.sum()
        gram = (centred * seen[:, None]).mT @ centred
        damping = gamma * gram.diagonal().mean() * torch.eye(gram.shape[0], dtype=gram.dtype)
        # Rows are centred, so the keys' mean drops out of the product.
        maps = tuple(torch.linalg.solve(gram + damping, centred.mT @ total).float() for total in sums)
        return cls(embeddings.detach().float().cpu(), maps)

    def shifted(self, slots: Slots, delta: int) -> Slots:
        """Move slots to the end of a prompt that is `delta` tokens longer, at integer positions."""
        require_layers("slots", slots.layers, len(self.maps))
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
