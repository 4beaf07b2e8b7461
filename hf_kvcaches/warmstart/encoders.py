"""Encoders: embed prompts as unit vectors, so that similar prompts have a high cosine.

The cosine only nominates earlier prompts, whose tokens are then compared. The look-up is part of the time to the first token, so an encoder
must be much cheaper than the prompt's prefill.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError, UnsupportedError, require
from hf_kvcaches.kernels.checksum import digest_of

Embedding = npt.NDArray[np.float32]

# Elements of a vector of `EmbeddingsEncoder`: cosines of random vectors are within 0.06 of 0, and whitening is fast.
_WIDTH = 256
# A token with this share of all text has half the weight of a rare one.
_COMMON = 1e-3
# Added to the variances before whitening, as a share of their mean.
_FLOOR = 0.01
# How many tokens the whitening is estimated from, more of the frequent ones.
_MOST_TOKENS = 32768
_PROBE = "How long is a piece of string?"


class Encoder(ABC):
    """Embeds prompts as unit vectors, the same in every process.

    Attributes:
        name: Identifies the vectors, also in fingerprints; vectors of other names can't be compared with them.
        dim: Elements of a vector.
        reads_text: Whether it reads the text; otherwise that may be empty.
    """

    name: str
    dim: int
    reads_text: bool = True

    def encode(self, text: str, ids: Sequence[int]) -> Embedding:
        """Return a vector of length 1, `(dim,)`, for a prompt's text and token ids."""
        vector = self._vector(text, ids)
        if vector.shape != (self.dim,):
            raise ConfigError.of("encoder", f"a vector of {self.dim} elements for each text", vector.shape)
        # In float64 neither very long nor very short vectors overflow.
        wide = vector.astype(np.float64)
        length = float(np.linalg.norm(wide))
        if not 0 < length < np.inf:  # or NaN
            raise ConfigError.of("encoder", "finite vectors that are not all zeros", f"{vector[:4]}...")
        unit: Embedding = (wide / length).astype(np.float32)
        return unit

    @abstractmethod
    def _vector(self, text: str, ids: Sequence[int]) -> Embedding:
        """Return a vector of any length, `(dim,)`; `encode` checks it."""


class EmbeddingsEncoder(Encoder):
    """The mean of a model's input embeddings over a prompt's tokens, weighted and whitened; the order of tokens does not matter.

    A token's weight is the square root of its count in the prompt, and lower for common tokens. Its share of all text is estimated from its
    id: tokenizers number tokens by frequency, and by Zipf's law the n-th token has a share of about 1 / n.
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
        sample = torch.arange(count)
        if count > _MOST_TOKENS:
            half = _MOST_TOKENS // 2
            sample = torch.cat([sample[:half], torch.linspace(half, count - 1, half).long()])
        vectors, weights = self._embedded(sample), self._shares[sample]
        self.dim = min(_WIDTH, vectors.shape[1])
        weights /= weights.sum()
        self._mean = weights @ vectors
        self._map = self._whitening(vectors - self._mean, weights)
        self.name = f"input embeddings, version 1, {self.dim}"

    def _embedded(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            # detach: a hook of models that are prepared for training enables gradients here.
            return self._embed(ids.to(compat.layer_device(self._embed))).detach().float().cpu()

    def _whitening(self, vectors: Tensor, shares: Tensor) -> Tensor:
        """Return a map from embeddings to vectors of `dim` elements, (hidden, dim), whose variance is the same in all directions."""
        hidden = vectors.shape[1]
        projection = torch.eye(hidden)
        if hidden > self.dim:
            # Random directions preserve cosines, and do not depend on the linear algebra library.
            projection = torch.randn(hidden, self.dim, generator=torch.Generator().manual_seed(0)) / self.dim**0.5
        projected = vectors @ projection
        covariance = (projected * shares[:, None]).T @ projected
        values, directions = torch.linalg.eigh(covariance.double())
        floored = values.clamp_min(0) + _FLOOR * values.mean().clamp_min(1e-30)
        # Symmetric, so that signs and order of the eigenvectors do not matter.
        return projection @ (directions @ torch.diag(floored.rsqrt()) @ directions.T).float()

    def _vector(self, text: str, ids: Sequence[int]) -> Embedding:
        tokens, counts = torch.tensor(list(ids)).unique(return_counts=True)
        weights = counts.sqrt() * _COMMON / (_COMMON + self._shares[tokens])
        vector: Embedding = ((weights @ self._embedded(tokens) - weights.sum() * self._mean) @ self._map).numpy()
        return vector


class SentenceEncoder(Encoder):
    """A sentence-transformers model, or its name.

    Such a model reads only the first few hundred tokens of a text. A longer text is cut, and its vector is the mean over its pieces.
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
        self.dim = len(self._vector(_PROBE, []))
        self.name = f"sentence-transformers, version 2, {digest_of(model.state_dict())}, {self._longest}"

    def _vector(self, text: str, ids: Sequence[int]) -> Embedding:
        pieces, tokens = zip(*self._pieces(text), strict=True)
        encoded = self._model.encode(list(pieces), convert_to_numpy=True, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(tokens, np.float32) @ np.asarray(encoded, np.float32)

    def _pieces(self, text: str) -> list[tuple[str, int]]:
        """Cut a text into pieces that the model reads whole, each with its number of tokens."""
        tokenizer: Any = getattr(self._model, "tokenizer", None)
        if self._longest is None or not getattr(tokenizer, "is_fast", False):
            return [(text, 1)]
        # A cut may add one token to a piece.
        room = max(1, self._longest - tokenizer.num_special_tokens_to_add() - 1)
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False)["offset_mapping"]
        if len(offsets) <= room + 1:
            return [(text, 1)]
        pieces = [offsets[start : start + room] for start in range(0, len(offsets), room)]
        return [(text[piece[0][0] : piece[-1][1]], len(piece)) for piece in pieces]


class FunctionEncoder(Encoder):
    """A function from a list of n strings to n vectors, as an array, a tensor or lists.

    Its attribute `name`, or else its module and qualified name, identify it: if its vectors change, change the `name`.
    """

    def __init__(self, function: Callable[[list[str]], Any]) -> None:
        self._function = function
        self.dim = len(self._vector(_PROBE, []))
        named = function if hasattr(function, "__qualname__") else type(function)
        name = getattr(function, "name", None)
        self.name = f"function {name if isinstance(name, str) else f'{named.__module__}.{named.__qualname__}'}, {self.dim}"

    def _vector(self, text: str, ids: Sequence[int]) -> Embedding:
        vectors = self._function([text])
        if isinstance(vectors, Tensor):
            vectors = vectors.detach().float().cpu().numpy()
        try:
            rows = np.asarray(vectors, np.float32)
        except (TypeError, ValueError) as error:
            raise ConfigError.of("encoder", "a function that makes an array of numbers", str(error)) from error
        if rows.ndim != 2 or len(rows) != 1 or not rows.shape[1]:
            raise ConfigError.of("encoder", "a function that makes (1, dim) numbers of a list of one text", rows.shape)
        vector: Embedding = rows[0]
        return vector


def encoder_of(encoder: str | Callable[[list[str]], Any] | Encoder | None, model: Any) -> Encoder:
    """Return the encoder for an argument; `model` is the language model, with or without a PEFT wrapper."""
    if isinstance(encoder, Encoder):
        return encoder
    if encoder is None or encoder == "model":
        return EmbeddingsEncoder(compat.base_model(model))
    if isinstance(encoder, str) and encoder:
        return SentenceEncoder(encoder, str(compat.base_model(model).device))
    if hasattr(encoder, "encode") and hasattr(encoder, "max_seq_length"):
        return SentenceEncoder(encoder)
    if callable(encoder):
        return FunctionEncoder(encoder)
    raise ConfigError.of("encoder", "'model', a sentence-transformers model, or a function of a list of texts", encoder)
