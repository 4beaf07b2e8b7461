"""What calibrations share: artifacts of tensors by layer, texts, and what a model attends to when it reads one of these again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from tqdm import tqdm

from hf_kvcaches import compat
from hf_kvcaches.core.files import Artifact
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.equip.policies.future import even_chunks, most_received
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.observer import Attended, WatchingCache
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.evaluate.texts import Tokenized, sequences
from hf_kvcaches.reuse.partial import run_module

SINKS = 4  # the first tokens of a text, which always stay


@dataclass(frozen=True, eq=False, repr=False)
class LayerArtifact(Artifact):
    """Named tensors of each layer with full attention: of a layer there is an `entry`, a `NamedTuple` of tensors."""

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


def each_text(
    add: Callable[[Any, torch.Tensor], None],
    model: Any,
    tokenizer: Any,
    texts: Iterable[str | Sequence[int]],
    least: int,
    progress: bool,
    block: int | None = None,
) -> dict[str, Any]:
    """Call a function with the model inside of a wrapper and the ids of each text, (tokens,); return what an artifact says of them.

    Args:
        least: Shorter texts are left out.
        block: The most tokens at a time; longer texts are cut.
    """
    base, encoder = compat.base_model(model), Tokenized(tokenizer)
    parts = [part for text in sequences(texts, encoder, base) for part in text.split(block or len(text)) if len(part) >= least]
    if not parts:
        raise ConfigError(f"texts: expected a text of at least {least} tokens, got none. Pass longer strings or lists of token ids.")
    with evaluating(base), torch.no_grad():
        for ids in tqdm(parts, "Calibrating", unit=" texts", disable=not progress):
            add(base, ids.to(compat.input_device(base)))
    return {"tokens": sum(map(len, parts)), "fingerprint": ModelFingerprint.of(model, tokenizer if encoder.used else None)}


class Watcher(WatchingCache):
    """Has a function told of each full attention."""

    def __init__(self, model: Any, told: Callable[[Attended], None]) -> None:
        self.told = told
        super().__init__(model)

    def watch(self, attended: Attended) -> None:
        self.told(attended)


def attention_modules(model: Any) -> dict[int, nn.Module]:
    """The modules of full attention by layer index."""
    full = {index for index, (kind, _) in enumerate(compat.layer_plan(model.config)) if kind == "full_attention"}
    modules: list[Any] = [module for module in compat.modules_of(model.get_decoder()) if hasattr(module, "is_causal")]
    return {module.layer_idx: module for module in modules if getattr(module, "layer_idx", None) in full}


def attention_inputs(model: Any, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """What full attention is called with for a text, by layer index, (tokens, hidden)."""
    states: dict[int, torch.Tensor] = {}

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[module.layer_idx] = (args[0] if args else kwargs["hidden_states"])[0].detach()

    with ExitStack() as hooks:
        for module in attention_modules(model).values():
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
        run_module(model.base_model, None, ids[None])
    return states


@torch.no_grad()
def reconstruction_scores(model: Any, ids: torch.Tensor, chunk: int = 512) -> dict[int, torch.Tensor]:
    """KVzip's score of each token of a text, (tokens,), by layer index, (kv_heads, tokens), float32.

    As many tokens as a `chunk` are read again at a time, and share one softmax.
    """
    base, parts, context = compat.base_model(model), dict[int, list[torch.Tensor]](), len(ids)
    for span in even_chunks(context, chunk):

        def note(attended: Attended, span: slice = span) -> None:
            queries, keys = attended.query[:, :, context:].float() * attended.scaling, attended.keys.float()
            received = most_received(queries, keys[:, :, span], keys[:, :, context:], attended.options.get("softcap"))
            parts.setdefault(attended.layer_idx, []).append(received[0])

        run_module(base.base_model, Watcher(base, note), torch.cat([ids, ids[span]])[None])
    return {index: torch.cat(received, -1) for index, received in parts.items()}
