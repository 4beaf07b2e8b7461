"""Read rows of text in one pass in which every token reads a coded past, as if the tokens came one by one; what is lost by that.

Token by token a cache codes each token as soon as it is no longer exact, and the next token attends to the codes. All of these attentions
can be computed in one pass: each query sees the exact keys and values of the tokens that are still exact for it, and what is read of the
codes of all others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_kvcaches import KVCodec, compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.call import Call
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.view import LayerView
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_instance, whole_number
from hf_kvcaches.evaluate.measures import divergence, losses
from hf_kvcaches.evaluate.observer import PassingLayer
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.kernels.code_format import TILE

# Logits of so many positions are compared at a time: a vocabulary may have 262k entries.
_POSITIONS = 64
# Scores of so many queries are held at a time.
_QUERIES = 256


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
        self.sinks = whole_number("sinks", sinks, 0, "a number of tokens, 0 or more")
        self.recent = whole_number("recent", recent, 0, "a number of tokens, 0 or more")

    @abstractmethod
    def read(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that are read of the codes of all tokens.

        Args:
            keys: (batch, kv_heads, tokens, head_dim), as the model rotated them, from position 0 on.
        """

    def read_open_group(self, keys: torch.Tensor) -> torch.Tensor | None:
        """Return, for codes of groups of tokens, the keys that are read of each token's group while that token is the newest.

        Args:
            keys: As in `read`.

        Returns:
            (batch, kv_heads, tokens, group, head_dim), groups counted from behind the sinks; None where tokens are coded by themselves.
        """
        return None


class CodecCoding(PastCoding):
    """The codes of a `KVCodec` in memory, as a `SubspaceCache` with the same codec, sinks and recent tokens reads them.

    Args:
        codec: Calibrated for the model.
        model: The model.
    """

    tile = TILE

    def __init__(self, codec: KVCodec, model: Any, *, sinks: int = 4, recent: int = 0) -> None:
        super().__init__(sinks, recent)
        require_instance("codec", codec, KVCodec, {"model": model}, "KVCodec.calibrate makes one for a model.")
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


class CodedPast(KVCache):
    """A cache for one pass over whole rows: every token reads the past as token-by-token decoding behind a prompt would.

    **Refuses**: padding, a second pass, learned sinks and position biases.

    **Memory per token**: nothing; it is for measurements and holds no tokens.

    Args:
        model: A transformers model that asks its attention by name.
        coding: How the past is coded in full-attention layers; other layers are the model's own.
        prompt: First tokens that are read as a prompt, which attends exactly to itself.
    """

    needs_attention = True

    def __init__(self, model: Any, coding: PastCoding, prompt: int = 1) -> None:
        require_instance("coding", coding, PastCoding, {"model": model}, "CodecCoding(codec, model) reads a codec's codes.")
        self.coding, self.prompt = coding, whole_number("prompt", prompt, 0, "a number of tokens, 0 or more")
        super().__init__(model)

    def make_layer(self, layer_idx: int) -> KVLayer:
        return _CodedPastLayer(self, layer_idx)


class _CodedPastLayer(PassingLayer):
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.seen:
            raise UnsupportedError("CodedPast: it is for one pass over whole rows. Make a new one for other rows.")
        self.seen = key_states.shape[2]
        view = _CodedPastView(self.cache, self.layer_idx, key_states, value_states)
        return view, view


class _CodedPastView(LayerView):
    """Keys and values of whole rows, on their way to their queries."""

    def __init__(self, cache: CodedPast, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.coding, self.prompt = cache.coding, cache.prompt
        self.layer_idx, self.keys, self.values = layer_idx, keys, values

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        call = Call(module, mask, kwargs)
        call.check("CodedPast")
        if call.bias is not None:
            raise UnsupportedError("CodedPast does not support attention with a position bias. Measure this model token by token.")
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        read = [states.to(wide) for states in self.coding.read(self.layer_idx, self.keys, self.values)]
        exact, open_keys = [self.keys.to(wide), self.values.to(wide)], self.coding.read_open_group(self.keys)
        blocks = []
        for start in range(0, query.shape[2], _QUERIES):
            block, stop = query[:, :, start : start + _QUERIES].to(wide), min(start + _QUERIES, query.shape[2])
            opened = None if open_keys is None else open_keys[:, :, start:stop].to(wide)
            blocks.append(self._attend(block, start, [states[:, :, :stop] for states in (*exact, *read)], opened, call))
        return torch.cat(blocks, 1).to(query.dtype), None

    def _attend(
        self, query: torch.Tensor, start: int, states: Sequence[torch.Tensor], open_keys: torch.Tensor | None, call: Call
    ) -> torch.Tensor:
        """Return the output of some queries, (batch, queries, heads, head_dim).

        Args:
            states: Keys and values, then those that are read of their codes, up to the last query.
            open_keys: What is read of each query's open group.
        """
        (_, heads, _, _), kv_heads, stop = query.shape, states[0].shape[1], start + query.shape[2]
        keys, values, read_keys, read_values = (part[:, :, None] for part in states)
        grouped = query.unflatten(1, (kv_heads, heads // kv_heads))  # [B, KV, G, Q, D]
        rows, columns = torch.arange(start, stop, device=query.device)[:, None], torch.arange(stop, device=query.device)
        coding = self.coding
        # Behind each token whole tiles are coded.
        coded = coding.sinks + (rows + 1 - coding.recent - coding.sinks).clamp_min(0) // coding.tile * coding.tile
        exact = (columns < coding.sinks) | (columns >= coded) | (rows < self.prompt)
        scores = grouped @ read_keys.mT  # [B, KV, G, Q, K]
        if open_keys is not None:
            scores = self._with_open_group(scores, grouped, start, open_keys)
        scores = torch.where(exact, grouped @ keys.mT, scores) * call.scaling
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        weights = scores.masked_fill(columns > rows, -torch.inf).softmax(-1)
        output = torch.where(exact, weights, 0) @ values + torch.where(exact, 0, weights) @ read_values
        return output.flatten(1, 2).transpose(1, 2)

    def _with_open_group(self, scores: torch.Tensor, grouped: torch.Tensor, start: int, open_keys: torch.Tensor) -> torch.Tensor:
        """Return the scores with those of each query's open group in their columns."""
        count, stop = scores.shape[-2:]
        size, sinks = open_keys.shape[3], self.coding.sinks
        rows = torch.arange(start, start + count, device=scores.device)[:, None]
        columns = sinks + (rows - sinks).clamp(min=0) // size * size + torch.arange(size, device=scores.device)  # [Q, group]
        open_scores = torch.einsum("bkgqd,bkqnd->bkgqn", grouped, open_keys)
        padded = torch.nn.functional.pad(scores, (0, max(0, int(columns.max()) + 1 - stop)))
        return padded.scatter(-1, columns.expand(open_scores.shape), open_scores)[..., :stop]


@torch.no_grad()
def read_rows(model: Any, input_ids: torch.Tensor, coding: PastCoding | None = None, prompt: int = 1) -> torch.Tensor:
    """Return the logits of all tokens, (batch, tokens, vocabulary), in one pass.

    Args:
        input_ids: (batch, tokens), without padding.
        coding: How the past is coded; None reads it exactly.
        prompt: First tokens that are read as a prompt, which attends exactly to itself.
    """
    ids = require_rows(input_ids, 1).to(model.device)
    with evaluating(model):
        cache = None if coding is None else CodedPast(model, coding, prompt)
        logits: torch.Tensor = model(input_ids=ids, **compat.cache_kwargs(model, cache)).logits
    return logits


@dataclass(frozen=True)
class TextQuality:
    """What a cache loses over a text.

    Args:
        tokens: How many distributions were compared.
        kl: The mean KL(full || cache) in nats.
        loss: The mean loss with the cache in nats.
        full_loss: That with the full cache.
    """

    tokens: int
    kl: float
    loss: float
    full_loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def change(self) -> float:
        """By which share the perplexity is higher than that of the full cache."""
        return math.expm1(self.loss - self.full_loss)


def compare(full_logits: torch.Tensor, logits: torch.Tensor, input_ids: torch.Tensor, prompt: int = 4) -> TextQuality:
    """Return what logits lose against those of the full cache, over the positions behind a prompt that have a successor.

    Args:
        full_logits: (batch, tokens, vocabulary); and `logits`.
        input_ids: (batch, tokens).
        prompt: First tokens of each row, which are not compared.
    """
    require_rows(input_ids, prompt + 2)
    last, total = input_ids.shape[1] - 1, torch.zeros(3, dtype=torch.float64)
    for start in range(prompt, last, _POSITIONS):
        span = slice(start, min(start + _POSITIONS, last))
        targets = input_ids[:, span.start + 1 : span.stop + 1]
        full, other = full_logits[:, span], logits[:, span]
        total += torch.stack([part.sum() for part in (divergence(full, other), losses(other, targets), losses(full, targets))]).cpu()
    count = len(input_ids) * (last - prompt)
    return TextQuality(count, *(total / count).tolist())


def require_rows(input_ids: object, least: int) -> torch.Tensor:
    """Refuse anything but rows of token ids.

    Args:
        least: Tokens that a row needs.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or not len(input_ids) or input_ids.shape[1] < least:
        got = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise ConfigError.of("input_ids", f"token ids (batch, tokens) of at least {least} tokens", got)
    return input_ids
