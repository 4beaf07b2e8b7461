"""Read rows of text in one pass in which every token reads a coded past, as if the tokens came one by one; what is lost by that.

Token by token a cache codes each token as soon as it is no longer exact, and the next token attends to the codes. All of these attentions
can be computed in one pass: each query sees the exact keys and values of the tokens that are still exact for it, and what is read of the
codes of all others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from hf_kvcaches import KVCodec, compat
from hf_kvcaches.cli.tables import Row
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.evaluate.measures import divergence, losses
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.kernels.code_format import TILE
from shared.models import with_attention

ATTENTION = "coded_past"
POSITIONS = 64  # whose logits are compared at a time: a vocabulary may have 262k entries
QUERIES = 256  # whose scores are held at a time


class PastCoding(ABC):
    """How the tokens of the past are coded, and which of them are still exact.

    Args:
        sinks: First tokens that stay exact.
        recent: Newest tokens that are exact, the query's own included; with 0 the query's own token is coded, too.

    Attributes:
        tile: Tokens are coded when so many behind the sinks are no longer among the newest.
    """

    tile = 1

    def __init__(self, sinks: int = 4, recent: int = 0) -> None:
        self.sinks, self.recent = sinks, recent

    @abstractmethod
    def read(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that are read of the codes of all tokens.

        Args:
            keys: (batch, kv_heads, tokens, head_dim), as the model rotated them, from position 0 on.
        """


class CodecCoding(PastCoding):
    """The codes of a `KVCodec` in memory, as a `SubspaceCache` with the same codec, sinks and recent tokens reads them."""

    tile = TILE

    def __init__(self, codec: KVCodec, model: Any, *, sinks: int = 4, recent: int = 0) -> None:
        super().__init__(sinks, recent)
        codec.require_model(model)
        self.codec, self.config = codec, compat.decoder_config(compat.base_model(model).config)

    def read(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        geometry, positions = self.codec.geometry(self.config, layer_idx), torch.arange(keys.shape[2], device=keys.device)
        coder = self.codec.in_place.coder(layer_idx, keys.dtype, keys.device)
        # Of the first token of each tile; those of the sinks are exact.
        starts = positions - (positions - self.sinks) % TILE
        wide = keys if keys.dtype == torch.float64 else keys.float()
        codes = coder.encode(keys if geometry is None else geometry.unrotate(wide, starts), values)
        decoded_keys, decoded_values = coder.decode(codes, keys.dtype)
        return decoded_keys if geometry is None else geometry.rotate(decoded_keys, starts), decoded_values


class PackedCoding(CodecCoding):
    """The packed form of a `KVCodec`, as stores keep it.

    Attributes:
        nbytes: Of all that was read, first tokens left out; they are kept exactly elsewhere.
    """

    tile = 1
    nbytes = 0

    def read(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        geometry, positions = self.codec.geometry(self.config, layer_idx), torch.arange(keys.shape[2], device=keys.device)
        plain = keys if geometry is None else geometry.unrotate(keys.float(), positions)
        records = [
            self.codec.pack({layer_idx: own}, {layer_idx: value}, self.sinks)[layer_idx] for own, value in zip(plain, values, strict=True)
        ]
        self.nbytes += sum(map(len, records))
        rows = self.codec.unpack([(layer_idx, record, 0, None) for record in records], keys.dtype)
        read_keys, read_values = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
        return read_keys if geometry is None else geometry.rotate(read_keys, positions), read_values


@dataclass(frozen=True)
class Attention:
    """Attention to a coded past in layers without a window; `prompt` are first tokens that attend exactly to themselves."""

    coding: PastCoding
    prompt: int

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        *,
        scaling: float,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        if options.get("s_aux") is not None or options.get("position_bias") is not None:
            raise UnsupportedError("Learned sinks and position biases are not measured in one pass. Measure this model token by token.")
        is_coded, wide = not options.get("sliding_window"), torch.promote_types(query.dtype, torch.float32)
        read = self.coding.read(module.layer_idx, keys, values) if is_coded else (keys, values)
        keys, values, read_keys, read_values = (part.to(wide)[:, :, None] for part in (keys, values, *read))  # [B, KV, 1, K, D]
        grouped, outputs = query.to(wide).unflatten(1, (keys.shape[1], -1)), []  # [B, KV, G, Q, D]
        for start in range(0, query.shape[2], QUERIES):
            block, is_exact = grouped[..., start : start + QUERIES, :], self._is_exact(start, keys)
            scores = torch.where(is_exact, block @ keys.mT, block @ read_keys.mT) * scaling
            if softcap := options.get("softcap"):
                scores = torch.tanh(scores / softcap) * softcap
            weights = (scores + mask[:, :, None, start : start + QUERIES]).softmax(-1)
            output = torch.where(is_exact, weights, 0) @ values + torch.where(is_exact, 0, weights) @ read_values
            outputs.append(output.flatten(1, 2).transpose(1, 2))
        return torch.cat(outputs, 1).to(query.dtype), None

    def _is_exact(self, start: int, keys: torch.Tensor) -> torch.Tensor:
        """Which tokens are exact for the queries from `start` on, (queries, tokens): behind each token whole tiles are coded."""
        columns, coding = torch.arange(keys.shape[-2], device=keys.device), self.coding
        rows = columns[start : start + QUERIES, None]
        coded = coding.sinks + (rows + 1 - coding.recent - coding.sinks).clamp_min(0) // coding.tile * coding.tile
        return (columns < coding.sinks) | (columns >= coded) | (rows < self.prompt)


@torch.no_grad()
def read_rows(model: Any, input_ids: torch.Tensor, coding: PastCoding | None = None, prompt: int = 1) -> torch.Tensor:
    """Return the logits of all tokens, (batch, tokens, vocabulary), in one pass.

    Args:
        input_ids: (batch, tokens), without padding.
        coding: How the past is coded; None reads it exactly.
        prompt: First tokens that are read as a prompt, which attends exactly to itself.
    """
    if coding is not None:
        AttentionInterface.register(ATTENTION, Attention(coding, prompt))
        AttentionMaskInterface.register(ATTENTION, eager_mask)
        model = with_attention(model, ATTENTION)
    with evaluating(model):
        logits: torch.Tensor = model(input_ids=input_ids.to(model.device), use_cache=False).logits
    return logits


def compare(full_logits: torch.Tensor, logits: torch.Tensor, input_ids: torch.Tensor, prompt: int = 4) -> Row:
    """What logits, (batch, tokens, vocabulary), lose over the positions behind the first `prompt` that have a successor, in nats.

    Returns:
        `tokens`, whose distributions were compared; the mean `kl`, KL(full || logits); the mean `loss`, and `full_loss`.
    """
    last, total = input_ids.shape[1] - 1, torch.zeros(3, dtype=torch.float64)
    for start in range(prompt, last, POSITIONS):
        span = slice(start, min(start + POSITIONS, last))
        targets = input_ids[:, span.start + 1 : span.stop + 1]
        full, other = full_logits[:, span], logits[:, span]
        total += torch.stack([part.sum() for part in (divergence(full, other), losses(other, targets), losses(full, targets))]).cpu()
    count = len(input_ids) * (last - prompt)
    kl, loss, full_loss = (total / count).tolist()
    return {"tokens": count, "kl": kl, "loss": loss, "full_loss": full_loss}
