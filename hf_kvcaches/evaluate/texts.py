"""What everything that is calibrated on texts shares: token ids, and sums over several processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.errors import ConfigError, require_tokenizer

Block = tuple[int, torch.Tensor]
"""The number of a sequence, and its token ids."""


class Tokenized:
    """A tokenizer, and whether it was needed."""

    def __init__(self, tokenizer: Any) -> None:
        require_tokenizer(tokenizer)
        # A processor's first argument is an image.
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer) if not hasattr(tokenizer, "get_vocab") else tokenizer
        self.used = False

    def encode(self, text: str) -> list[int]:
        self.used = True
        # A long text would draw a warning about a length that the blocks keep to.
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        return ids


def require_whole(model: Any) -> None:
    """Refuse a tensor-parallel model."""
    require_all_heads(model, "Calibration", "Calibrate with the whole model, on a CPU for example: what is made serves its shards, too.")


def sequences(texts: Iterable[str | Sequence[int]], tokenizer: Tokenized, model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """Yield the token ids of each text, 1-D."""
    require_whole(model)
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise ConfigError.of("texts", "a list of strings or of lists of token ids", type(texts).__name__, "Pass [text].")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for index, text in enumerate(texts):
        if isinstance(text, str) and tokenizer.tokenizer is None:
            raise ConfigError.of("tokenizer", "the model's tokenizer, since texts holds strings", None, "Or pass lists of token ids.")
        try:
            ids = torch.as_tensor(tokenizer.encode(text) if isinstance(text, str) else text)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError.of(f"texts[{index}]", "a string or a list of token ids", type(text).__name__) from error
        if not ids.numel():
            continue
        if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            shape = f"{ids.dtype} of shape {tuple(ids.shape)}"
            raise ConfigError.of(f"texts[{index}]", "a string or a list of token ids", shape, "Pass [ids] for a single text.")
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ConfigError.of(f"texts[{index}]", f"token ids of 0 to {vocabulary - 1}", (int(ids.min()), int(ids.max())))
        yield ids.to("cpu", torch.long)


def blocks_of(sequences: Iterable[torch.Tensor], block: int, max_tokens: int | None) -> Iterator[torch.Tensor]:
    """Yield texts cut into sequences; a single token at the end is left out."""
    left = float("inf") if max_tokens is None else max_tokens
    for sequence in sequences:
        for piece in sequence.split(block):
            ids = piece[: int(min(left, len(piece)))]
            if len(ids) >= 2:
                left -= len(ids)
                yield ids
            if left < 2:
                return


def batches_of(blocks: Iterable[Block], block: int, batch_size: int) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield sequences of one length together, so that nothing is padded: whole blocks wait for others, short ones go alone."""
    waiting: list[Block] = []
    for number, ids in blocks:
        if len(ids) < block:
            yield [number], ids[None]
            continue
        waiting.append((number, ids))
        if len(waiting) == batch_size:
            yield [each for each, _ in waiting], torch.stack([each for _, each in waiting])
            waiting = []
    if waiting:
        yield [each for each, _ in waiting], torch.stack([each for _, each in waiting])


def process_device() -> torch.device:
    """Return the device on which processes exchange tensors, where there are several."""
    from accelerate import PartialState

    return torch.device(PartialState().device)


def add_up(tensors: Iterable[torch.Tensor]) -> None:
    """Sum tensors over all processes, in place; each process has as many, of the same shapes."""
    from accelerate.utils import reduce

    for tensor in tensors:
        tensor.copy_(reduce(tensor.to(process_device()), reduction="sum"))
