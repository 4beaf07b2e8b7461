"""What everything that is calibrated on texts does: token ids, a model left as it was found, several processes, what comes next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.errors import ConfigError, require_tokenizer


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
    """Refuses a tensor-parallel model."""
    require_all_heads(model, "Calibration", "Calibrate with the whole model, on a CPU for example: what is made serves its shards, too.")


def sequences(texts: Iterable[str | Sequence[int]], tokenizer: Tokenized, model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """Token ids of each text, 1-D."""
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


def process_device() -> torch.device:
    """The device on which processes exchange tensors, where there are several."""
    from accelerate import PartialState

    return torch.device(PartialState().device)


def add_up(tensors: Iterable[torch.Tensor]) -> None:
    """Sums tensors over all processes, in place; each process has as many, of the same shapes."""
    from accelerate.utils import reduce

    for tensor in tensors:
        tensor.copy_(reduce(tensor.to(process_device()), reduction="sum"))


def divergence(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """The Kullback-Leibler divergence in nats, (...).

    Args:
        expected: Logits of the model alone, (..., vocabulary).
    """
    p, q = expected.float().log_softmax(-1), found.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp_min(0)


@torch.no_grad()
def next_tokens(model: PreTrainedModel, prompt: Sequence[int], asked: Sequence[int], cache: KVCache | None = None) -> torch.Tensor:
    """The logits of each asked token's place, (asked tokens, vocabulary).

    Args:
        cache: A new one that reuses, or None for the model alone.
    """
    device = compat.input_device(model)
    first, then = (torch.tensor([list(ids)], device=device) for ids in (prompt, asked))
    if cache is None:
        whole = torch.cat([first, then], dim=1)
        return model(input_ids=whole, use_cache=False, logits_to_keep=len(asked) + 1).logits[0, :-1]
    head = model(input_ids=first, **compat.cache_kwargs(model, cache), logits_to_keep=1).logits
    if len(asked) == 1:
        return head[0]
    # Without `logits_to_keep` this is no prompt to the cache: it is neither looked up nor stored.
    tail = model(input_ids=then[:, :-1], **compat.cache_kwargs(model, cache)).logits
    return torch.cat([head, tail], dim=1)[0]
