"""`Encoder`: embeds prompts, so that similar prompts have a high cosine, which nominates those whose tokens are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.checksum import digest_of

Embedding = npt.NDArray[np.float32]

# Elements of a vector of hashed token ids: cosines of prompts that share no token are 0 with a standard deviation of 0.06.
_WIDTH = 256
# Tokenizers number tokens by frequency, and frequent ones say little: this id has half the weight of the highest ones.
_COMMON = 80


class Encoder:
    """Embeds prompts as unit vectors, the same in every process.

    Args:
        function: From a list of n texts to n vectors, as an array, a tensor or lists. Its attribute `name`, or else its module and
            qualified name, identify it. Or a model of sentence-transformers, which its weights identify, and which reads no more
            than its `max_seq_length` first tokens. None, `"tokens"` or `"model"` (the name of a former default): the prompt's token ids
            are hashed; their order does not matter.

    Attributes:
        name: Identifies the vectors, which can't be compared with those of other names.
        dim: Elements of a vector.
        reads_text: Whether it reads a prompt's text; otherwise that may be empty.
    """

    def __init__(self, function: Any = None) -> None:
        if isinstance(function, str) and function in ("tokens", "model"):
            function = None
        name = getattr(function, "name", None)
        if isinstance(function, nn.Module) and hasattr(function, "encode"):
            # Pooling and the longest text are not in the weights.
            digest = digest_of([repr(function), dict(function.state_dict())], "encoder")
            function, name = function.encode, f"{type(function).__name__} {digest}"
        if not (function is None or callable(function)):
            hint = "Pass SentenceTransformer(name) for a model of sentence-transformers."
            raise ConfigError.of("encoder", "'tokens', or a function from a list of texts to vectors", function, hint)
        self._function, self.reads_text = function, function is not None
        self.name, self.dim = "token ids, version 1", _WIDTH
        if function is not None:
            named: Any = function if hasattr(function, "__qualname__") else type(function)
            self.dim = len(self._vector("How long is a piece of string?", []))
            self.name = f"function {name if isinstance(name, str) else f'{named.__module__}.{named.__qualname__}'}, {self.dim}"

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

    def _vector(self, text: str, ids: Sequence[int]) -> Embedding:
        if self._function is None:
            return _hashed(ids)
        vectors = self._function([text])
        if isinstance(vectors, torch.Tensor):
            vectors = vectors.detach().float().cpu().numpy()
        try:
            rows = np.asarray(vectors, np.float32)
        except (TypeError, ValueError) as error:
            raise ConfigError.of("encoder", "a function that makes an array of numbers", str(error)) from error
        if rows.ndim != 2 or len(rows) != 1 or not rows.shape[1]:
            raise ConfigError.of("encoder", "a function that makes (1, dim) numbers of a list of one text", rows.shape)
        row: Embedding = rows[0]
        return row


def _hashed(ids: Sequence[int]) -> Embedding:
    """Add up, at the index and with the sign that each token's id is hashed to, its weight times the square root of its count."""
    tokens, counts = np.unique(np.asarray(ids, np.uint32), return_counts=True)
    hashes = tokens * np.uint32(2654435761)  # modulo 2^32
    weights = np.sqrt(counts) * (tokens + 1) / (tokens + _COMMON)
    signs = np.where(hashes >> np.uint32(8) & np.uint32(1), 1, -1)
    return np.bincount((hashes >> np.uint32(16)) % _WIDTH, weights * signs, _WIDTH).astype(np.float32)
