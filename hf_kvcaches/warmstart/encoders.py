"""Encoders: embed prompts as unit vectors, so that similar prompts have a high cosine.

The cosine only nominates earlier prompts, whose tokens are then compared. The look-up is part of the time to the first token, so an encoder
must be much cheaper than the prompt's prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

# Elements of a vector of the encoder `"model"`: cosines of random vectors are within 0.06 of 0, and whitening is fast.
_WIDTH = 256
# A token with this share of all text has half the weight of a rare one.
_COMMON = 1e-3
# Added to the variances before whitening, as a share of their mean.
_FLOOR = 0.01
# How many tokens the whitening is estimated from, more of the frequent ones.
_MOST_TOKENS = 32768
_PROBE = "How long is a piece of string?"


@dataclass(frozen=True)
class Encoder:
    """Embeds prompts as unit vectors, the same in every process.

    Args:
        name: Identifies the vectors, also in fingerprints; vectors of other names can't be compared with them.
        dim: Elements of a vector.
        vector: Returns a vector of any length, `(dim,)`, for a prompt's text and token ids.
        reads_text: Whether it reads the text; otherwise that may be empty.
    """

    name: str
    dim: int
    vector: Callable[[str, Sequence[int]], Embedding]
    reads_text: bool = True

    def encode(self, text: str, ids: Sequence[int]) -> Embedding:
        """Return a vector of length 1, `(dim,)`, for a prompt's text and token ids."""
        vector = self.vector(text, ids)
        if vector.shape != (self.dim,):
            raise ConfigError.of("encoder", f"a vector of {self.dim} elements for each text", vector.shape)
        # In float64 neither very long nor very short vectors overflow.
        wide = vector.astype(np.float64)
        length = float(np.linalg.norm(wide))
        if not 0 < length < np.inf:  # or NaN
            raise ConfigError.of("encoder", "finite vectors that are not all zeros", f"{vector[:4]}...")
        unit: Embedding = (wide / length).astype(np.float32)
        return unit


def encoder_of(encoder: str | Callable[[list[str]], Any] | Encoder | None, model: Any) -> Encoder:
    """Return the encoder for an argument; `model` is the language model, with or without a PEFT wrapper."""
    if isinstance(encoder, Encoder):
        return encoder
    if encoder is None or encoder == "model":
        return _of_embeddings(compat.base_model(model))
    if isinstance(encoder, str) and encoder:
        library = require("sentence_transformers", "retrieval", "An encoder that is named")
        try:
            encoder = library.SentenceTransformer(encoder, device=str(compat.base_model(model).device))
        except (OSError, ValueError, RuntimeError) as error:
            hint = "Name one, give its folder, or take 'model', which needs no other model."
            raise ConfigError.of("encoder", "a sentence-transformers model", f"{encoder}: {error}", hint) from error
    if hasattr(encoder, "encode") and hasattr(encoder, "max_seq_length"):
        return _of_sentences(encoder)
    if callable(encoder):
        return _of_function(encoder)
    raise ConfigError.of("encoder", "'model', a sentence-transformers model, or a function of a list of texts", encoder)


def _of_embeddings(model: PreTrainedModel) -> Encoder:
    """The mean of a model's input embeddings over a prompt's tokens, weighted and whitened; the order of tokens does not matter.

    A token's weight is the square root of its count in the prompt, and lower for common tokens. Its share of all text is estimated from its
    id: tokenizers number tokens by frequency, and by Zipf's law the n-th token has a share of about 1 / n.
    """
    embed: Any = model.get_input_embeddings()
    count = getattr(embed, "num_embeddings", None)
    if not isinstance(count, int):
        raise UnsupportedError("encoder: this model has no table of input embeddings. Name a sentence-transformers model instead.")
    shares = 1 / (torch.arange(count, dtype=torch.float32) + 2.7)
    shares /= shares.sum()

    @torch.no_grad()
    def embedded(tokens: Tensor) -> Tensor:
        # detach: a hook of models that are prepared for training enables gradients here.
        states: Tensor = embed(tokens.to(compat.layer_device(embed)))
        return states.detach().float().cpu()

    sample = torch.arange(count)
    if count > _MOST_TOKENS:
        half = _MOST_TOKENS // 2
        sample = torch.cat([sample[:half], torch.linspace(half, count - 1, half).long()])
    vectors, weights = embedded(sample), shares[sample]
    weights /= weights.sum()
    mean = weights @ vectors
    whitening = _whitening(vectors - mean, weights)

    def vector(text: str, ids: Sequence[int]) -> Embedding:
        tokens, counts = torch.tensor(list(ids)).unique(return_counts=True)
        weights = counts.sqrt() * _COMMON / (_COMMON + shares[tokens])
        whitened: Embedding = ((weights @ embedded(tokens) - weights.sum() * mean) @ whitening).numpy()
        return whitened

    dim = whitening.shape[1]
    return Encoder(f"input embeddings, version 1, {dim}", dim, vector, reads_text=False)


def _whitening(vectors: Tensor, shares: Tensor) -> Tensor:
    """Return a map from embeddings to vectors of at most `_WIDTH` elements, (hidden, dim), whose variance is the same in all directions."""
    hidden = vectors.shape[1]
    projection = torch.eye(hidden)
    if hidden > _WIDTH:
        # Random directions preserve cosines, and do not depend on the linear algebra library.
        projection = torch.randn(hidden, _WIDTH, generator=torch.Generator().manual_seed(0)) / _WIDTH**0.5
    projected = vectors @ projection
    covariance = (projected * shares[:, None]).T @ projected
    values, directions = torch.linalg.eigh(covariance.double())
    floored = values.clamp_min(0) + _FLOOR * values.mean().clamp_min(1e-30)
    # Symmetric, so that signs and order of the eigenvectors do not matter.
    return projection @ (directions @ torch.diag(floored.rsqrt()) @ directions.T).float()


def _of_sentences(model: Any) -> Encoder:
    """A sentence-transformers model, which reads some hundred tokens: a longer text is cut, and its vector is the mean over its pieces."""
    longest = model.max_seq_length
    tokenizer: Any = getattr(model, "tokenizer", None)

    def pieces(text: str) -> list[tuple[str, int]]:
        """Cut a text into pieces that the model reads whole, each with its number of tokens."""
        if longest is None or not getattr(tokenizer, "is_fast", False):
            return [(text, 1)]
        # A cut may add one token to a piece.
        room = max(1, longest - tokenizer.num_special_tokens_to_add() - 1)
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False)["offset_mapping"]
        if len(offsets) <= room + 1:
            return [(text, 1)]
        cuts = [offsets[start : start + room] for start in range(0, len(offsets), room)]
        return [(text[cut[0][0] : cut[-1][1]], len(cut)) for cut in cuts]

    def vector(text: str, ids: Sequence[int]) -> Embedding:
        texts, tokens = zip(*pieces(text), strict=True)
        encoded = model.encode(list(texts), convert_to_numpy=True, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(tokens, np.float32) @ np.asarray(encoded, np.float32)

    name = f"sentence-transformers, version 2, {digest_of(model.state_dict())}, {longest}"
    return Encoder(name, len(vector(_PROBE, [])), vector)


def _of_function(function: Callable[[list[str]], Any]) -> Encoder:
    """A function from a list of n strings to n vectors, as an array, a tensor or lists.

    Its attribute `name`, or else its module and qualified name, identify it: if its vectors change, change the `name`.
    """

    def vector(text: str, ids: Sequence[int]) -> Embedding:
        vectors = function([text])
        if isinstance(vectors, Tensor):
            vectors = vectors.detach().float().cpu().numpy()
        try:
            rows = np.asarray(vectors, np.float32)
        except (TypeError, ValueError) as error:
            raise ConfigError.of("encoder", "a function that makes an array of numbers", str(error)) from error
        if rows.ndim != 2 or len(rows) != 1 or not rows.shape[1]:
            raise ConfigError.of("encoder", "a function that makes (1, dim) numbers of a list of one text", rows.shape)
        row: Embedding = rows[0]
        return row

    named = function if hasattr(function, "__qualname__") else type(function)
    name, dim = getattr(function, "name", None), len(vector(_PROBE, []))
    return Encoder(f"function {name if isinstance(name, str) else f'{named.__module__}.{named.__qualname__}'}, {dim}", dim, vector)
