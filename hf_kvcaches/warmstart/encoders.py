"""Prompts as unit vectors, so that similar prompts have a high cosine.

The look-up is part of the time to the first token, so an encoder has to be much cheaper than the prompt's own prefill.

- `model` (the default) reads nothing but the model's input embeddings: their mean over the prompt's tokens, where common tokens and
  repetitions count less, and whitened, since all embeddings point the same way for the most part. It costs a hundredth of the testbed's
  prefill, and less of a larger model's. It knows the words of a prompt, and of their order nothing.
- `hidden` runs the lowest quarter of the layers over the prompt and takes the mean of their states. It costs a quarter of a prefill.
- The name or folder of a sentence-transformers model brings a second model, which knows paraphrases best.
- Any function of a list of texts does, too.

How often two wordings of one prompt are nearer to each other than two prompts are (AUC), how often the other wording is the nearest of 60,
the mean cosines of the two, and the time of a prompt of 300 tokens on one thread, where the testbed's 3 M parameters take 23 ms to prefill
(documents of `tests/testbed`: six facts alone, or between 150 words of a book; a piece of a book with a fifth of its words missing):

| | facts in other words | with 150 words of a book | the book alone | cosines (facts) | time |
|---|---|---|---|---|---|
| `model` | 97.6%, 52% | 100%, 100% | 100%, 100% | 0.92, 0.84 | 0.25 ms |
| not whitened | 95.7%, 38% | 100%, 100% | 100%, 100% | 0.98, 0.96 | |
| `hidden`: layer 1 of 4 | 93.0%, 40% | 100%, 100% | 100%, 100% | 0.99, 0.98 | 6.5 ms |
| layers 2, 3, 4 | 75%, 65%, 67% | 100%, 100% | 100%, 100% | 0.97, 0.96 | |
| all-MiniLM-L6-v2 | 98.7%, 80% | 100%, 100% | 100%, 98% | 0.90, 0.75 | 70 ms |

The cosines say that a threshold for one encoder means nothing for another.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.partial import RunningLayer, SkippedLayer, with_layers
from hf_kvcaches.core.prefill import run_module
from hf_kvcaches.errors import ConfigError, UnsupportedError, require

Embeddings = npt.NDArray[np.float32]

# Elements of a vector made from input embeddings: cosines of random vectors are within 0.06 of 0, and whitening takes no time.
_WIDTH = 256
# A token whose share of all text is this counts half of one that is rare.
_COMMON = 1e-3
# Added to the variances before they are made equal, in shares of their mean: what hardly varies is noise.
_FLOOR = 0.01
# Tokens whose embeddings show how embeddings vary, more of the frequent ones: enough for 256 directions.
_MOST_TOKENS = 32768
# Tokens that go through the lowest layers at a time, with padding.
_BATCH_TOKENS = 8192
_PROBE = "How long is a piece of string?"


class Encoder(ABC):
    """Prompts as unit vectors. The same prompts give the same vectors in every process.

    Attributes:
        name: Vectors of encoders with other names don't compare. It goes into fingerprints.
        dim: Elements of a vector.
        reads_text: Whether it looks at the texts; else they may be empty.
    """

    name: str
    dim: int
    reads_text: bool = True

    def encode(self, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> Embeddings:
        """A vector of length 1 for each prompt, `(prompts, dim)`.

        Args:
            ids: Their tokens, each at least one.
        """
        if len(texts) != len(ids):
            raise ConfigError.of("ids", f"{len(texts)} lists of tokens, one for each text", len(ids))
        if not len(texts):
            return np.zeros((0, self.dim), np.float32)
        return _unit(self._vectors(list(texts), list(ids)), len(texts), self.dim)

    @abstractmethod
    def _vectors(self, texts: list[str], ids: list[Sequence[int]]) -> Any:
        """Of any length, `(prompts, dim)`; `encode` checks them."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, dim={self.dim})"


class EmbeddingsEncoder(Encoder):
    """The mean of a model's input embeddings over a prompt's tokens, weighted and whitened.

    A token counts by the root of how often it comes, and less the more common it is in general. That is read off its number: tokenizers
    number tokens in the order in which they found them worth having, and by Zipf's law the n-th has a share of about 1 / n.

    Args:
        model: Whose input embeddings. They are read once, here, as far as they are needed for the whitening.
    """

    reads_text = False

    def __init__(self, model: PreTrainedModel) -> None:
        embed: Any = model.get_input_embeddings()
        if not isinstance(getattr(embed, "num_embeddings", None), int):
            raise UnsupportedError("encoder: this model has no table of input embeddings. Name a sentence-transformers model instead.")
        self._embed = embed
        count = embed.num_embeddings
        shares = 1 / (torch.arange(count, dtype=torch.float32) + 2.7)
        self._shares = shares / shares.sum()
        # All tokens, or the frequent half of what is read and an even choice of the others.
        some = torch.arange(count)
        if count > _MOST_TOKENS:
            half = _MOST_TOKENS // 2
            some = torch.cat([some[:half], torch.linspace(half, count - 1, half).long()])
        vectors, weights = self._embedded(some), self._shares[some]
        self.dim = min(_WIDTH, vectors.shape[1])
        weights /= weights.sum()
        self._mean = weights @ vectors
        self._map = self._whitened(vectors - self._mean, weights)
        self.name = f"input embeddings, version 1, {self.dim}"

    def _embedded(self, ids: Tensor) -> Tensor:
        device = compat.layer_device(self._embed)
        with torch.no_grad():
            # A model that is prepared for training has a hook here that asks for gradients.
            return self._embed(ids.to(device)).detach().float().cpu()

    def _whitened(self, vectors: Tensor, shares: Tensor) -> Tensor:
        """What makes vectors of `dim` elements from embeddings, (hidden, dim): of the tokens of a text no direction then stands out."""
        hidden = vectors.shape[1]
        first = torch.eye(hidden)
        if hidden > self.dim:
            # Directions at random keep cosines, and unlike those that vary most they don't depend on how a library finds them.
            made = torch.Generator().manual_seed(0)
            first = torch.randn(hidden, self.dim, generator=made) / self.dim**0.5
        projected = vectors @ first
        covariance = (projected * shares[:, None]).T @ projected
        values, directions = torch.linalg.eigh(covariance.double())
        floored = values.clamp_min(0) + _FLOOR * values.mean().clamp_min(1e-30)
        # The same whichever way round the directions come out.
        second = directions @ torch.diag(floored.rsqrt()) @ directions.T
        return first @ second.float()

    def _vectors(self, texts: list[str], ids: list[Sequence[int]]) -> Any:
        rows = []
        for row in ids:
            tokens, counts = torch.as_tensor(_tokens(row), dtype=torch.long).unique(return_counts=True)
            weights = counts.sqrt() * _COMMON / (_COMMON + self._shares[tokens])
            rows.append((weights @ self._embedded(tokens) - weights.sum() * self._mean) @ self._map)
        return torch.stack(rows).numpy()


class HiddenEncoder(Encoder):
    """The mean of the states that leave the lowest quarter of a model's layers, each token's with the same weight.

    The layers above don't run. Caches are not touched, and hooks on the model itself don't see the call. Padding changes only rounding.

    Args:
        model: Which should be in `eval()` mode: with dropout no two vectors are the same.
    """

    reads_text = False

    def __init__(self, model: PreTrainedModel) -> None:
        layers = len(compat.decoder_layers(model)[2])
        self._model, self._depth = model, max(1, layers // 4)
        if self._depth >= layers:
            raise UnsupportedError("encoder: 'hidden' needs a model of two layers or more. Take 'model'.")
        config = compat.decoder_config(model.config)
        self._longest = getattr(config, "max_position_embeddings", None) or 1 << 62
        self._device = compat.input_device(model)
        self.dim = int(config.hidden_size)
        self.name = f"hidden states, version 1, layer {self._depth}"

    def _vectors(self, texts: list[str], ids: list[Sequence[int]]) -> Any:
        rows = [_tokens(row)[: self._longest] for row in ids]
        out = torch.zeros(len(rows), self.dim)
        # Rows of about one length together, so that there is little padding.
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        while order:
            count = max(1, min(len(order), _BATCH_TOKENS // len(rows[order[-1]])))
            some, order = order[-count:], order[:-count]
            out[some] = self._means([rows[index] for index in some])
        return out.numpy()

    def _means(self, rows: list[list[int]]) -> Tensor:
        longest = max(map(len, rows))
        ids = torch.tensor([row + [row[-1]] * (longest - len(row)) for row in rows], device=self._device)
        real = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self._device)
        # Padding at the end needs no mask: what comes later changes nothing.
        states = self._states(ids)
        # A few tokens, such as the first, have states many times as long as the others.
        states = nn.functional.normalize(states.float(), dim=-1) * real[..., None].to(states.device)
        return states.sum(1).cpu()

    def _states(self, ids: Tensor) -> Tensor:
        layers = compat.decoder_layers(self._model)[2]
        last = RunningLayer(layers[self._depth - 1], self._depth - 1, None)
        twin = with_layers(self._model, [*layers[: self._depth - 1], last, *map(SkippedLayer, layers[self._depth :])])
        with torch.no_grad():
            run_module(twin, None, ids)
        states: Tensor = last.output
        return states


class SentenceEncoder(Encoder):
    """A sentence-transformers model.

    Such a model reads only the first few hundred tokens of a text. A longer one is cut into parts, and its vector is the mean of theirs.

    Args:
        device: Where a model that is named is put.
    """

    def __init__(self, model: Any, device: str | None = None) -> None:
        if isinstance(model, str):
            library = require("sentence_transformers", "retrieval", "An encoder that is named")
            try:
                model = library.SentenceTransformer(model, device=device)
            except (OSError, ValueError, RuntimeError) as error:
                hint = "Name one, give its folder, or take 'model', which needs no other model."
                raise ConfigError.of("encoder", "a sentence-transformers model", f"{model}: {error}", hint) from error
        self._model = model
        self._longest = model.max_seq_length
        self.dim = int(self._run([_PROBE]).shape[-1])
        self.name = f"sentence-transformers, version 1, {_digest(model)}, {self._longest}"

    def _run(self, texts: list[str]) -> Embeddings:
        encoded = self._model.encode(texts, convert_to_numpy=True, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(encoded, np.float32)

    def _vectors(self, texts: list[str], ids: list[Sequence[int]]) -> Any:
        cut = [self._parts(text) for text in texts]
        encoded = self._run([part for parts in cut for part, _ in parts])
        out, first = [], 0
        for parts in cut:
            weights = np.array([tokens for _, tokens in parts], np.float32)
            out.append(weights @ encoded[first : first + len(parts)])
            first += len(parts)
        return np.stack(out)

    def _parts(self, text: str) -> list[tuple[str, int]]:
        """Parts of a text that the model reads whole, and how many tokens each has."""
        tokenizer: Any = getattr(self._model, "tokenizer", None)
        if self._longest is None or not getattr(tokenizer, "is_fast", False):
            return [(text, 1)]
        # A token may be spelled with one more where the text is cut.
        room = max(1, self._longest - tokenizer.num_special_tokens_to_add() - 1)
        places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False)["offset_mapping"]
        if len(places) <= room + 1:
            return [(text, 1)]
        return [
            (text[some[0][0] : some[-1][1]], len(some)) for some in (places[start : start + room] for start in range(0, len(places), room))
        ]


class FunctionEncoder(Encoder):
    """Any function that makes vectors of texts.

    Args:
        function: From a list of n strings to n vectors, as an array, a tensor or lists. Its attribute `name`, or else its module and
            qualified name, stand for what it does: where that changes, so should its `name`.
    """

    def __init__(self, function: Callable[[list[str]], Any]) -> None:
        self._function = function
        vectors = _array(function([_PROBE]))
        if vectors.ndim != 2 or len(vectors) != 1 or not vectors.shape[1]:
            raise ConfigError.of("encoder", "a function that makes (1, dim) numbers of a list of one text", vectors.shape)
        self.dim = int(vectors.shape[1])
        named = function if hasattr(function, "__qualname__") else type(function)
        own = getattr(function, "name", None)
        self.name = f"function {own if isinstance(own, str) else f'{named.__module__}.{named.__qualname__}'}, {self.dim}"

    def _vectors(self, texts: list[str], ids: list[Sequence[int]]) -> Any:
        return self._function(texts)


def encoder_of(encoder: str | Callable[[list[str]], Any] | Encoder | None, model: Any, tokenizer: Any = None) -> Encoder:
    """The encoder that an argument stands for.

    Args:
        encoder: `model` or None, `hidden`, the name or folder of a sentence-transformers model (or the model), a function of a list of
            texts, or an `Encoder`.
        model: The language model. One in a PEFT wrapper is taken out of it, with its adapters.
    """
    if isinstance(encoder, Encoder):
        return encoder
    if encoder is None or encoder == "model":
        return EmbeddingsEncoder(compat.base_model(model))
    if encoder == "hidden":
        return HiddenEncoder(compat.base_model(model))
    if isinstance(encoder, str) and encoder:
        return SentenceEncoder(encoder, str(compat.base_model(model).device))
    if hasattr(encoder, "encode") and hasattr(encoder, "max_seq_length"):
        return SentenceEncoder(encoder)
    if callable(encoder):
        return FunctionEncoder(encoder)
    raise ConfigError.of("encoder", "'model', 'hidden', a sentence-transformers model, or a function of a list of texts", encoder)


def _tokens(row: Sequence[int]) -> list[int]:
    tokens = list(row)
    if not tokens:
        raise ConfigError.of("ids", "at least one token in each prompt", tokens)
    return tokens


def _array(vectors: Any) -> Embeddings:
    if isinstance(vectors, Tensor):
        vectors = vectors.detach().float().cpu().numpy()
    try:
        return np.asarray(vectors, np.float32)
    except (TypeError, ValueError) as error:
        raise ConfigError.of("encoder", "a function that makes an array of numbers", str(error)) from error


def _unit(made: Any, count: int, dim: int) -> Embeddings:
    vectors = _array(made)
    if vectors.shape != (count, dim):
        raise ConfigError.of("encoder", f"vectors of shape {(count, dim)}", vectors.shape)
    # In float64 neither very long nor very short vectors get lost.
    wide = vectors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    if not (np.isfinite(lengths) & (lengths > 0)).all():
        wrong = int((~(np.isfinite(lengths) & (lengths > 0))).argmax())
        raise ConfigError.of("encoder", "finite vectors that are not all zeros", f"{vectors[wrong][:4]}... for text {wrong}")
    unit: Embeddings = (wide / lengths).astype(np.float32)
    return unit


def _digest(model: nn.Module) -> str:
    """Of a model's weights: its name or folder may be another elsewhere."""
    hasher = hashlib.blake2b(digest_size=8)
    for name, tensor in model.state_dict().items():
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
