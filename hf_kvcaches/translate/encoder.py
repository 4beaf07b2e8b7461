"""The producer's half of a translator: runs a model over prompts, and makes codes while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import Identity, identity_of
from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError, whole_number
from hf_kvcaches.reuse.partial import twin_of
from hf_kvcaches.translate.codes import CodesHead, Part, Prompt, SemanticCodes, message_of
from hf_kvcaches.translate.maps import Maps
from hf_kvcaches.translate.states import LayerState, PromptTokens, read

# Weights that are moved in and out of a model's own modules are there for one pass at a time.
_OFFLOADED = threading.Lock()


class CacheEncoder:
    """Codes what a producer computes for prompts; made by `CacheTranslator.encoder`, and holds nothing of the consumer.

    Weights stay on the producer's devices, and nothing waits for a device while the producer runs. Any number of threads may encode at a
    time, also with a model in training mode, which is read without dropout.

    Args:
        digest: The translator's.
        models: The producer and the consumer that it was fitted for.
        maps: Those of the translator, of which only encoders are used.
        exact_tokens: How many first tokens of a prompt have no codes.
    """

    def __init__(self, digest: str, models: Mapping[str, ModelFingerprint], maps: Maps, exact_tokens: int) -> None:
        self.digest, self.models, self.maps, self.exact_tokens = digest, models, maps, exact_tokens

    def encode(self, producer: Any, input_ids: Any, attention_mask: Any = None, *, first: int = 0) -> SemanticCodes:
        """Run a producer over prompts and code all their tokens but the last, which the consumer runs itself.

        Args:
            producer: The model that this was fitted for.
            input_ids: (batch, tokens) or (tokens,), two tokens at least.
            attention_mask: 1 where a token is real, or None. Rows are padded on the left, and padding is not sent.
            first: The index of the first token with codes: the `seen` of the consumer's cache.
        """
        head, tokens = self._begin(input_ids, attention_mask, first)
        model, coefficients = self.check_producer(producer), dict[int, torch.Tensor]()
        if head.names:
            self._run(model, tokens, coefficients.__setitem__)
        records = self.maps.pack(coefficients)
        return SemanticCodes(head, [Part(name, records[code].cpu()) for code, name in enumerate(head.names)])

    def stream(self, producer: Any, input_ids: Any, attention_mask: Any = None, *, first: int = 0) -> Iterator[bytes]:
        """Yield the bytes of `encode`, each part as soon as the producer, in another thread, has its layers."""
        head, tokens = self._begin(input_ids, attention_mask, first)
        yield from message_of(head, self._parts_in_thread(head, self.check_producer(producer), tokens))

    def check_producer(self, model: Any) -> Any:
        """Return the model without its PEFT wrapper; refuse one that this was not fitted for."""
        return self._require_fitted(model, "producer")

    def _require_fitted(self, model: Any, role: str, identity: Identity | None = None) -> Any:
        """Return a model without its PEFT wrapper; refuse one that this was not fitted for.

        Args:
            role: "producer", which is run in evaluation mode whatever its mode, or "consumer".
            identity: Of the model, where it is known.
        """
        base, what = compat.base_model(model), f"The translator's {role}"
        if compat.has_learned_prompt(model):
            raise UnsupportedError(f"{role}: a learned prompt is in no fingerprint. Pass the model without that adapter.")
        require_all_heads(base, what, "Load the model whole, or use another cache.")
        identity = identity or identity_of(base, evaluates=role == "producer")
        if identity.reason:
            raise FingerprintMismatch(f"{what} is not what it was fitted for: {identity.reason}")
        if identity.digest != self.models[role].digest:
            swapped = next((other for other, fingerprint in self.models.items() if fingerprint.digest == identity.digest), None)
            if swapped is not None:
                raise FingerprintMismatch(f"{what} is another model. It is the {swapped} that the translator was fitted for.")
            self.models[role].require_model(identity.fingerprint, what)
        return base

    def _begin(self, input_ids: Any, attention_mask: Any, first: int) -> tuple[CodesHead, PromptTokens]:
        """Return the head of codes, and the prompts without their last tokens, with the slots from which on they are coded."""
        tokens = PromptTokens.of(input_ids, attention_mask)
        last = tokens.ids.shape[1] - 1
        if last - max(tokens.padding) < 1:
            hint = "The consumer runs the last one itself."
            raise ConfigError.of("input_ids", "at least two tokens a row", tuple(tokens.ids.shape), hint)
        first = whole_number("first", first, 0, f"an index before the last one, {last}", "Encode the whole conversation.", most=last - 1)
        tokens = tokens._replace(ids=tokens.ids[:, :last])
        starts = tuple(first if first > before else min(before + self.exact_tokens, last) for before in tokens.padding)
        rows = zip(tokens.rows(), starts, tokens.padding, strict=True)
        prompts = tuple(Prompt.of(ids, start - before) for ids, start, before in rows)
        names = self.maps.names if any(prompt.coded for prompt in prompts) else ()
        return CodesHead(self.digest, prompts, names), tokens._replace(starts=starts)

    def _run(self, model: Any, tokens: PromptTokens, on_code: Callable[[int, torch.Tensor], Any]) -> None:
        """Pass on the coefficients of each code as soon as the producer has its layers."""
        maps, states, known = self.maps, dict[int, torch.Tensor](), list[torch.Tensor]()
        sources = [encoder.sources for encoder in maps.encoders]
        pending = list(range(len(sources)))

        def on_state(layer: int, state: LayerState) -> None:
            states[layer] = state.states
            if layer == maps.side_layer:
                known.append(state.hidden)
            while pending and known and states.keys() >= {*sources[pending[0]]}:
                code = pending.pop(0)
                on_code(code, maps.coefficients(code, states, known[0]))
            for unused in states.keys() - {layer for code in pending for layer in sources[code]}:
                del states[unused]

        last = max(maps.side_layer, *(layer for layers in sources for layer in layers))
        offloaded = any(compat.offloaded_weights(module) is not None for module in compat.modules_of(model))
        with _OFFLOADED if offloaded else nullcontext():
            read(in_evaluation(model), tokens.to(compat.input_device(model)), on_state, hidden=[maps.side_layer], last=last)

    def _parts_in_thread(self, head: CodesHead, model: Any, tokens: PromptTokens) -> Iterator[Part]:
        """Yield each part while the producer runs in another thread; what is packed here does not keep it waiting."""
        if not head.names:
            return
        codes: SimpleQueue[tuple[int, torch.Tensor] | None] = SimpleQueue()
        with ThreadPoolExecutor(1) as executor:
            running = executor.submit(self._run, model, tokens, lambda *code: codes.put(code))
            running.add_done_callback(lambda _: codes.put(None))
            for code, coefficients in iter(codes.get, None):
                yield Part(head.names[code], self.maps.pack({code: coefficients})[code].cpu())
            running.result()


def in_evaluation(model: torch.nn.Module) -> Any:
    """Return a model in evaluation mode, or else a twin that shares all weights: other threads' passes stay in training mode."""
    if not any(module.training for module in model.modules()):
        return model
    names = [name for name, module in model.named_modules(remove_duplicate=False) if name and next(module.children(), None) is None]
    return twin_of(model, {name: twin_of(model.get_submodule(name), {}) for name in names}).eval()
