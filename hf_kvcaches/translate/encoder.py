"""The producer's half of a translator: runs a model over prompts, and makes codes while it runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import Identity, identity_of
from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError, whole_number
from hf_kvcaches.translate.codes import CodesHead, Part, Prompt, SemanticCodes, message_of
from hf_kvcaches.translate.maps import CodeEncoder, Maps
from hf_kvcaches.translate.states import LayerState, PromptTokens, in_evaluation, read

# Weights that are moved in and out of a model's own modules are there for one pass at a time.
_passes: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()


class CacheEncoder:
    """Codes what a producer computes for prompts; made by `CacheTranslator.encoder`, and holds nothing of the consumer.

    Weights stay on the producer's devices. Nothing waits for a device while the producer runs, and all codes of a prompt leave it in one
    transfer. Any number of threads may encode at a time, also with a model in training mode, which is read without dropout.

    Args:
        digest: The translator's.
        models: The producer and the consumer that it was fitted for.
        maps: Those of the translator; only encoders are kept.
        exact_tokens: How many first tokens of a prompt have no codes.
    """

    def __init__(self, digest: str, models: Mapping[str, ModelFingerprint], maps: Maps, exact_tokens: int) -> None:
        self.digest, self.models, self.exact_tokens = digest, models, exact_tokens
        self._maps = Maps(maps.encoders, (), maps.side_layer, maps.coding)
        self._placed: dict[tuple[int, torch.device], CodeEncoder] = {}

    def encode(self, producer: Any, input_ids: Any, attention_mask: Any = None, *, first: int = 0) -> SemanticCodes:
        """Run a producer over prompts and code all their tokens but the last, which the consumer runs itself.

        Args:
            producer: The model that this was fitted for.
            input_ids: (batch, tokens) or (tokens,), two tokens at least.
            attention_mask: 1 where a token is real, or None. Rows are padded on the left, and padding is not sent.
            first: The index of the first token with codes: the `seen` of the consumer's cache.
        """
        head, tokens = self._begin(input_ids, attention_mask, first)
        model, codes = self.check_producer(producer), dict[int, torch.Tensor]()
        if head.names:
            self._run(model, tokens, codes.__setitem__)
        return SemanticCodes(head, map(Part, head.names, self._packed(codes)))

    def stream(self, producer: Any, input_ids: Any, attention_mask: Any = None, *, first: int = 0) -> Iterator[bytes]:
        """Yield the bytes of `encode`, each part as soon as the producer, in another thread, has its layers."""
        head, tokens = self._begin(input_ids, attention_mask, first)
        model = self.check_producer(producer)
        yield from message_of(head, self._parts_in_thread(head, model, tokens))

    def check_producer(self, model: Any) -> Any:
        """Return the model without its PEFT wrapper; refuse one that this was not fitted for."""
        return require_fitted(model, "producer", self.models)

    def _begin(self, input_ids: Any, attention_mask: Any, first: int) -> tuple[CodesHead, PromptTokens]:
        """Return the head of codes, and the prompts without their last tokens, with those `chosen` that are coded."""
        tokens = PromptTokens.of(input_ids, attention_mask)
        if int(tokens.real.sum(-1).min()) < 2:
            hint = "The consumer runs the last one itself."
            raise ConfigError.of("input_ids", "at least two tokens a row", tuple(tokens.ids.shape), hint)
        last = tokens.ids.shape[1] - 1
        first = whole_number("first", first, 0, f"an index before the last one, {last}", "Encode the whole conversation.", most=last - 1)
        tokens = tokens.first(last)
        padding = (~tokens.real).sum(-1)
        firsts = torch.where(first > padding, first - padding, self.exact_tokens).minimum(last - padding)
        prompts = tuple(Prompt.of(ids, count) for ids, count in zip(tokens.rows(), firsts.tolist(), strict=True))
        coded = tokens.real & (tokens.positions >= firsts.to(tokens.positions.device)[:, None])
        head = CodesHead(self.digest, prompts, self._maps.names if bool(coded.any()) else ())
        return head, tokens._replace(chosen=coded.flatten().nonzero()[:, 0])

    def _run(self, model: Any, tokens: PromptTokens, on_code: Callable[[int, torch.Tensor], Any]) -> None:
        """Pass on the coefficients of each code as soon as the producer has its layers."""
        encoders, side_layer = self._maps.encoders, self._maps.side_layer
        states, known, pending = dict[int, torch.Tensor](), list[torch.Tensor](), list(range(len(encoders)))

        def on_state(layer: int, state: LayerState) -> None:
            states[layer] = state.states
            if state.hidden is not None:
                known.append(state.hidden)
            while pending and known and states.keys() >= {*encoders[pending[0]].sources}:
                on_code(pending[0], self._coefficients(pending.pop(0), states, known[0]))
            for unused in states.keys() - {source for code in pending for source in encoders[code].sources}:
                del states[unused]

        last = max(side_layer, *(layer for encoder in encoders for layer in encoder.sources))
        with _alone(model):
            read(in_evaluation(model), tokens.to(compat.input_device(model)), on_state, hidden=[side_layer], last=last)

    def _coefficients(self, code: int, states: Mapping[int, torch.Tensor], known: torch.Tensor) -> torch.Tensor:
        encoder = self._maps.encoders[code]
        device = states[encoder.sources[-1]].device
        if (code, device) not in self._placed:
            self._placed[code, device] = encoder.to(device)
        return self._placed[code, device].coefficients(states, known)

    def _packed(self, codes: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Return the record of each code, on the CPU, of one transfer from each device."""
        coding = self._maps.coding
        records = {code: own.flatten().view(torch.uint8) for code, own in codes.items()} if coding is None else coding.pack(codes)
        for device in {record.device for record in records.values() if record.device.type != "cpu"}:
            own = {code: record for code, record in records.items() if record.device == device}
            records |= zip(own, torch.cat([*own.values()]).cpu().split([*map(len, own.values())]), strict=True)
        return [records[code] for code in sorted(records)]

    def _parts_in_thread(self, head: CodesHead, model: Any, tokens: PromptTokens) -> Iterator[Part]:
        """Yield each part while the producer runs in another thread; what is packed here does not keep it waiting."""
        codes: SimpleQueue[tuple[int, torch.Tensor] | None] = SimpleQueue()
        if not head.names:
            return
        with ThreadPoolExecutor(1) as executor:
            running = executor.submit(self._run, model, tokens, lambda *code: codes.put(code))
            running.add_done_callback(lambda _: codes.put(None))
            for code, coefficients in iter(codes.get, None):
                yield Part(head.names[code], *self._packed({code: coefficients}))
            running.result()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_placed": {}}


def require_fitted(model: Any, role: str, models: Mapping[str, ModelFingerprint], identity: Identity | None = None) -> Any:
    """Return a model without its PEFT wrapper; refuse one that a translator was not fitted for.

    Args:
        role: "producer", which is run in evaluation mode whatever its mode, or "consumer".
        identity: Of the model, where it is known.
    """
    base = compat.base_model(model)
    if compat.has_learned_prompt(model):
        raise UnsupportedError(f"{role}: a learned prompt is in no fingerprint. Pass the model without that adapter.")
    require_all_heads(base, f"The translator's {role}", "Load the model whole, or use another cache.")
    identity = identity or identity_of(base, evaluates=role == "producer")
    if identity.reason:
        raise FingerprintMismatch(f"The translator's {role} is not what it was fitted for: {identity.reason}")
    if identity.digest != models[role].digest:
        swapped = [
            f"It is the {other} that the translator was fitted for." for other, own in models.items() if own.digest == identity.digest
        ]
        try:
            models[role].require_model(identity.fingerprint, f"The translator's {role}")
        except FingerprintMismatch as error:
            raise FingerprintMismatch(" ".join([str(error), *swapped])) from None
    return base


def _alone(model: Any) -> AbstractContextManager[Any]:
    """Keep other threads' passes out where weights are offloaded; elsewhere nothing."""
    offloaded = any(compat.offloaded_weights(module) is not None for module in compat.modules_of(model))
    return _passes.setdefault(model, threading.Lock()) if offloaded else nullcontext()
