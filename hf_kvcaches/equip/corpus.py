"""What calibrations share: artifacts of tensors by layer, their texts, and what a model attends to when it reads one of these again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from tqdm import tqdm

from hf_kvcaches import compat
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.hub import Artifact
from hf_kvcaches.equip.policies.future import even_chunks, most_received
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.observer import Attended, WatchingCache
from hf_kvcaches.evaluate.texts import Tokenized, sequences
from hf_kvcaches.reuse.partial import run_module

SINKS = 4  # the first tokens of a text, which always stay


@dataclass(frozen=True, eq=False, repr=False)
class LayerArtifact(Artifact):
    """Named tensors of each layer with full attention.

    Attributes:
        entry: What there is of a layer, a `NamedTuple` of tensors.
    """

    format_version: ClassVar[int] = 1
    entry: ClassVar[Any]

    layers: Mapping[int, Any]
    tokens: int
    fingerprint: ModelFingerprint | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{index}.{name}": tensor for index, layer in self.layers.items() for name, tensor in layer._asdict().items()}

    def metadata(self) -> dict[str, Any]:
        return {"layers": list(self.layers), "tokens": self.tokens}

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Self:
        fields = cls.entry._fields
        layers = {index: cls.entry(*(tensors[f"{index}.{name}"] for name in fields)) for index in metadata["layers"]}
        return cls(layers, metadata["tokens"])

    def describe_calibration(self) -> str:
        return f"{self.tokens:,} tokens, {len(self.layers)} layers."

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tokens:,} tokens, model {self.fingerprint})"


class Corpus:
    """The token ids of texts, (tokens,) each, on the model's device; `tokens` counts them, and `base` is the model inside a wrapper.

    Args:
        least: Shorter texts are left out.
        block: Texts are cut into sequences of at most so many tokens; None: not at all.
    """

    def __init__(
        self, model: Any, tokenizer: Any, texts: Iterable[str | Sequence[int]], least: int, progress: bool, block: int | None = None
    ) -> None:
        self.model, self.tokenizer, self.texts, self.least, self.progress, self.block = model, tokenizer, texts, least, progress, block
        self.base, self.encoder, self.tokens = compat.base_model(model), Tokenized(tokenizer), 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        whole = sequences(self.texts, self.encoder, self.base)
        parts = (part for text in whole for part in text.split(self.block or max(1, len(text))) if len(part) >= self.least)
        for ids in tqdm(parts, unit=" texts", desc="Calibrating", disable=not self.progress):
            self.tokens += len(ids)
            yield ids.to(compat.input_device(self.base))
        if not self.tokens:
            raise ConfigError(
                f"texts: expected a text of at least {self.least} tokens, got none. Pass longer strings or lists of token ids."
            )

    def fingerprint(self) -> ModelFingerprint:
        """Of the model, and of the tokenizer if a text needed it."""
        return ModelFingerprint.of(self.model, self.tokenizer if self.encoder.used else None)


def attention_modules(model: Any) -> dict[int, nn.Module]:
    """The modules of full attention by layer index."""
    full = {index for index, (kind, _) in enumerate(compat.layer_plan(model.config)) if kind == "full_attention"}
    modules: list[Any] = [module for module in compat.modules_of(model.get_decoder()) if hasattr(module, "is_causal")]
    return {module.layer_idx: module for module in modules if getattr(module, "layer_idx", None) in full}


@contextmanager
def asked_before(modules: Iterable[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    """Call a hook with a module's arguments before it computes; what the hook returns takes their place."""
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def attention_inputs(model: Any, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """What full attention is called with for a text, by layer index, (tokens, hidden)."""
    states: dict[int, torch.Tensor] = {}

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[module.layer_idx] = (args[0] if args else kwargs["hidden_states"])[0].detach()

    with asked_before(attention_modules(model).values(), before):
        run_module(model.base_model, None, ids[None])
    return states


class _Reconstruction(WatchingCache):
    """Notes the most that any query of a repeated chunk gives to each token of the chunk, in one pass over [context; chunk]."""

    def __init__(self, model: Any, chunk: slice, context: int) -> None:
        self.chunk, self.context = chunk, context
        self.received: dict[int, torch.Tensor] = {}
        super().__init__(model)

    def watch(self, attended: Attended) -> None:
        repeated = slice(self.context, None)
        queries = attended.query[:, :, repeated].float() * attended.scaling
        keys = attended.keys.float()
        received = most_received(queries, keys[:, :, self.chunk], keys[:, :, repeated], attended.options.get("softcap"))
        self.received[attended.layer_idx] = received[0]


@torch.no_grad()
def reconstruction_scores(model: Any, ids: torch.Tensor, chunk: int = 512) -> dict[int, torch.Tensor]:
    """What each token of a text gets when the model reads the text again, by layer index, (kv_heads, tokens) in float32.

    KVzip (arXiv 2505.23416): the largest weight that any query of the repeated text gives.

    Args:
        model: A transformers model, in evaluation mode.
        ids: (tokens,), on its device.
        chunk: Tokens that are repeated at a time.
    """
    base, parts = compat.base_model(model), list[dict[int, torch.Tensor]]()
    for span in even_chunks(len(ids), chunk):
        cache = _Reconstruction(base, span, len(ids))
        run_module(base.base_model, cache, torch.cat([ids, ids[span]])[None])
        parts.append(cache.received)
    return {index: torch.cat([part[index] for part in parts], -1) for index in parts[0]}
