"""Prompts answered by a consumer itself, from codes, and from raw keys and values: how long each takes, and what the time goes to.

Run as a program, it is the other process of `Remote`: a producer that is asked for prompts over a socket.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from _common import synchronize
from _equip_sides import spread
from _segments_sides import Pair, Phases, Row
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.kernels.rebuild import Decoder
from hf_kvcaches.translate import cache as cache_module
from hf_kvcaches.translate import codes as codes_module
from hf_kvcaches.translate import filling, maps, states, translator
from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.codes import SemanticCodes
from hf_kvcaches.translate.maps import Encoder, LayerDecoder, Maps
from hf_kvcaches.translate.routing import Route
from hf_kvcaches.translate.translator import CacheTranslator
from hf_kvcaches.translate.transports import receive, send

OWN, CODES, BYTES, ONE = "consumer's prefill", "codes in hand", "codes as bytes", "codes, first layer run"
PAPER, PATCH, RAW = "paper's Reuse", "paper's Reuse and Patch", "raw keys and values"
STREAM, WHOLE = "socket, streamed", "socket, all at once"
RAW_SOCKET = "socket, raw"
# Of logits: how far codes that are the keys and values themselves may change them, and the way through bytes.
LOSSLESS, EQUAL = 1e-4, 1e-5
_REQUEST = struct.Struct("<1sQ")
_MODES = {STREAM: b"s", WHOLE: b"w", RAW_SOCKET: b"r"}


class Answer(NamedTuple):
    """One request."""

    seconds: float  # until the first token, from what was sent on, the making of the cache included
    producing: float  # seconds of the producer, until it had what is sent
    nbytes: int  # of what is sent
    tokens: int  # of the prompt
    new: int  # the first token


class Side:
    """A way to the first token."""

    def __init__(self, name: str, producer: PreTrainedModel, pair: Pair, codec: CacheTranslator | None = None) -> None:
        self.name, self.producer, self.pair, self.codec = name, producer, pair, codec
        self.model: Any = pair.plain if codec is None else pair.switched

    def produce(self, ids: torch.Tensor) -> Any:
        """What is sent of a prompt."""
        if self.name == OWN:
            return None
        if self.codec is None:
            return raw_states(self.producer, ids)
        codes = self.codec.encode(self.producer, ids)
        return codes.to_bytes() if self.name == BYTES else codes

    def cache(self, payload: Any) -> Any:
        """A cache that knows what was sent."""
        if self.name == OWN:
            return DynamicCache(config=self.pair.plain.config)
        if self.codec is None:
            return self._filled(payload)
        codes = SemanticCodes.from_bytes(payload) if isinstance(payload, bytes) else payload
        return TranslatedCache(self.pair.switched, self.codec, codes)

    def _filled(self, payload: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
        cache = DynamicCache(config=self.pair.plain.config)
        for layer, pair in enumerate(payload):
            cache.update(*(part.to(self.pair.device, self.model.dtype) for part in pair), layer)
        return cache

    def answer(self, ids: torch.Tensor, payload: Any) -> tuple[float, int]:
        """Seconds until the first token, and that token."""
        synchronize(ids.device)
        begin = time.perf_counter()
        out = self.model.generate(ids, past_key_values=self.cache(payload), max_new_tokens=1, do_sample=False)
        synchronize(ids.device)
        return time.perf_counter() - begin, int(out[0, -1])

    @torch.no_grad()
    def logits(self, ids: torch.Tensor, payload: Any) -> torch.Tensor:
        """Of the first new token, in float64; arguments as of `answer`."""
        cache = self.cache(payload)
        out: torch.Tensor = self.model(input_ids=ids[:, cache.get_seq_length() :], past_key_values=cache, logits_to_keep=1).logits
        return out[0, -1].double()


@torch.no_grad()
def raw_states(producer: PreTrainedModel, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A producer's own keys and values of all tokens but the last, as they would be sent: bfloat16, in CPU memory as codes are."""
    cache = DynamicCache(config=producer.config)
    producer.base_model(input_ids=ids[:, :-1], past_key_values=cache)
    return [(layer.keys.to("cpu", torch.bfloat16), layer.values.to("cpu", torch.bfloat16)) for layer in cache.layers]


def bytes_of(payload: Any) -> int:
    """How many are sent."""
    if payload is None or isinstance(payload, bytes):
        return len(payload or b"")
    return payload.nbytes if isinstance(payload, SemanticCodes) else sum(part.nbytes for pair in payload for part in pair)


Answers = dict[str, list[Answer]]


def in_turns(sides: Sequence[Side], prompts: Sequence[torch.Tensor]) -> Answers:
    """All prompts: first what is sent of one, by all sides, then the answers to it, by all sides; another side is first each time."""
    answers: Answers = {side.name: [] for side in sides}
    for number, ids in enumerate(prompts):
        turn = number % len(sides)
        order = [*sides[turn:], *sides[:turn]]
        sent: dict[str, tuple[Any, float]] = {}
        for side in order:
            synchronize(ids.device)
            begin = time.perf_counter()
            payload = side.produce(ids)
            synchronize(ids.device)
            sent[side.name] = payload, time.perf_counter() - begin
        for side in order:
            payload, producing = sent[side.name]
            seconds, new = side.answer(ids, payload)
            answers[side.name].append(Answer(seconds, producing, bytes_of(payload), ids.shape[1], new))
    return answers


def rows_of(answers: Answers, **labels: Any) -> list[Row]:
    """Two rows for each side: until the first token, and until the producer had what is sent."""
    rows = []
    for name, own in answers.items():
        row = {**labels, "side": name, "tokens": round(statistics.mean(answer.tokens for answer in own)), "count": len(own)}
        sent = round(statistics.mean(answer.nbytes for answer in own))
        row |= {"value": sent, "unit": "bytes"} if sent else {}
        seconds = [answer.seconds for answer in own]
        ratios = [base.seconds / mine for base, mine in zip(answers[OWN], seconds, strict=True)]
        rows.append({**row, "measure": "first token", **spread("time", seconds, 1e3), **spread("ratio", ratios)})
        if sent and any(answer.producing for answer in own):
            rows.append({**row, "measure": "producer", **spread("time", [answer.producing for answer in own], 1e3)})
    return rows


def unchanged(pair: Pair) -> Side:
    """A side whose codes are the consumer's own keys and values: all that is not fitted is on its way."""
    config: Any = pair.plain.config
    width = 2 * config.num_key_value_heads * config.head_dim
    sent, same = range(1, config.num_hidden_layers), torch.eye(width)
    encoders = [Encoder(f"layer.{layer}", "reuse", (layer,), {"kv": same}) for layer in sent]
    decoders = [LayerDecoder(layer, f"layer.{layer}", "reuse", Decoder(codes=same)) for layer in sent]
    settings = translator.TranslatorSettings("joint", 1.0, "float32", None, 0, "plain", 1e-4, config.num_hidden_layers)
    model = ModelFingerprint.of(pair.switched)
    return Side("unchanged", pair.switched, pair, CacheTranslator(Maps(encoders, decoders), settings, Route(()), model, model))


def prove(sides: Sequence[Side], prompts: Sequence[torch.Tensor], what: str, *, trained: bool) -> tuple[str, list[Row]]:
    """Compares the first token's distribution with that of the consumer's prefill, and says so; the rows have the divergences."""
    lossless, worst = unchanged(sides[0].pair), 0.0
    kls, same = {side.name: list[float]() for side in sides}, {side.name: 0 for side in sides}
    for ids in prompts:
        found = {side.name: side.logits(ids, side.produce(ids)) for side in sides}
        base = found[OWN]
        worst = max(worst, float((lossless.logits(ids, lossless.produce(ids)) - base).abs().max()))
        if (apart := float((found[CODES] - found[BYTES]).abs().max())) > EQUAL:
            raise SystemExit(f"{what}: codes as bytes give other logits than codes in hand, by {apart:.2g}: nothing timed")
        for name, ours in found.items():
            kls[name].append(float((base.softmax(-1) * (base.log_softmax(-1) - ours.log_softmax(-1))).sum()))
            same[name] += bool(base.argmax() == ours.argmax())
    if not worst <= LOSSLESS:
        raise SystemExit(f"{what}: codes that are its own keys and values change a model's logits by {worst:.2g}: nothing timed")
    mean = {name: statistics.fmean(own) for name, own in kls.items()}
    if trained and not mean[CODES] < mean[RAW]:
        raise SystemExit(f"{what}: codes diverge by {mean[CODES]:.2g} nats, raw keys and values by {mean[RAW]:.2g}: nothing timed")
    rows: list[Row] = [
        {"side": name, "measure": "KL", "count": len(prompts), "value": round(mean[name], 6), "unit": "nats"}
        for name in mean
        if name != OWN
    ]
    each = ", ".join(f"{name} {mean[name]:.2g} ({same[name]}/{len(prompts)})" for name in mean if name != OWN)
    text = f"{what}: a model's own keys and values as codes change nothing, to {worst:.1e}"
    return f"{text}; mean KL of the first token in nats (same token): {each}", rows


REST = "generate, the rest"


def producing_places() -> list[tuple[str, Any, str]]:
    """What is timed of a producer, phase by phase."""
    return [
        ("producer's prefill", translator, "read_states"),
        ("producer's prefill", sys.modules[__name__], "raw_states"),
        ("encode", states, "state_of"),
        ("encode", Encoder, "encode"),
        ("encode", maps, "pack"),
        ("encode", SemanticCodes, "to_bytes"),
        ("encode", CacheTranslator, "encode"),
    ]


def answering_places(model: PreTrainedModel) -> list[tuple[str, Any, str]]:
    """What is timed of a consumer, phase by phase."""
    return [
        ("read bytes", codes_module, "_collected"),
        ("make the cache", TranslatedCache, "__init__"),
        ("see that models are the same", translator, "_checked"),
        ("find the prompt", cache_module, "place"),
        ("run the lowest layers", filling.Filling, "_run_lowest"),
        ("run the lowest layers", filling.Filling, "_run_distinct"),
        ("rebuild", filling, "rebuild"),
        ("rebuild, around the kernel", filling.Filling, "_rebuild"),
        ("patch", filling.Filling, "_regenerate"),
        ("fill, the rest", TranslatedCache, "_take"),
        ("copy keys and values", Side, "_filled"),
        ("the model's pass", type(model), "forward"),
    ]


def phases(sides: Sequence[Side], prompts: Sequence[torch.Tensor], **labels: Any) -> list[Row]:
    """What producing and answering take: a row for each side and phase. Timing adds a little to all."""
    rows: list[Row] = []
    for side in sides:
        found: dict[str, list[dict[str, float]]] = {"producer": [], "first token": []}
        for ids in prompts:
            clock = Phases(side.pair.device)
            with clock.watching(producing_places()):
                payload = side.produce(ids)
            found["producer"].append(dict(clock.seconds))
            clock = Phases(side.pair.device)
            with clock.watching(answering_places(side.pair.plain)):
                seconds, _ = side.answer(ids, payload)
            found["first token"].append({**clock.seconds, REST: seconds - sum(clock.seconds.values())})
        for workload, own in found.items():
            whole = sum(sum(each.values()) for each in own)
            for phase in dict.fromkeys(name for each in own for name in each):
                times = [each.get(phase, 0.0) for each in own]
                row = {**labels, "section": "phases", "workload": workload, "side": side.name, "measure": phase, "count": len(own)}
                rows.append({**row, **spread("time", times, 1e3), "value": round(sum(times) / whole, 4), "unit": "of the time"})
    return rows


class Remote:
    """A producer in a process of its own, asked over TCP on this computer."""

    def __init__(self, pair: Pair, codec: CacheTranslator, folder: Path, load: str) -> None:
        self.pair, self.codec = pair, codec
        with socket.create_server(("127.0.0.1", 0)) as server:
            command = [sys.executable, __file__, "--port", str(server.getsockname()[1]), "--translator", str(folder), "--model", load]
            command += ["--device", str(pair.device), "--threads", str(torch.get_num_threads())]
            self.process = subprocess.Popen(command)
            server.settimeout(180)
            self.sock = server.accept()[0]
        self.sock.settimeout(180)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        self.process.wait(timeout=60)

    def ask(self, name: str, ids: torch.Tensor) -> Answer:
        """Has a prompt read by the other process, and answers it here; the time is that of all."""
        tokens = ids[0].cpu().numpy().astype("<i8").tobytes()
        side = Side(RAW, self.pair.plain, self.pair)
        synchronize(ids.device)
        begin = time.perf_counter()
        self.sock.sendall(_REQUEST.pack(_MODES[name], ids.shape[1]) + tokens)
        cache: Any
        if name == RAW_SOCKET:
            payload = _receive_raw(self.sock)
            cache, nbytes, model = side.cache(payload), bytes_of(payload), self.pair.plain
        else:
            codes = receive(self.sock)
            cache, nbytes, model = TranslatedCache(self.pair.switched, self.codec, codes), codes.nbytes, self.pair.switched
        out: Any = model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)  # type: ignore[operator]
        synchronize(ids.device)
        return Answer(time.perf_counter() - begin, 0.0, nbytes, ids.shape[1], int(out[0, -1]))


def _exactly(sock: socket.socket, count: int) -> bytearray:
    content = bytearray()
    while len(content) < count:
        piece = sock.recv(min(count - len(content), 1 << 20))
        if not piece:
            raise EOFError(f"the other side closed the connection {count - len(content)} bytes too early")
        content += piece
    return content


def _receive_raw(sock: socket.socket) -> list[tuple[torch.Tensor, torch.Tensor]]:
    layers, *shape = struct.unpack("<5Q", _exactly(sock, 40))
    size = 2 * torch.Size(shape).numel()
    part = lambda: torch.frombuffer(_exactly(sock, size), dtype=torch.bfloat16).view(shape)  # noqa: E731
    return [(part(), part()) for _ in range(layers)]


def serve() -> None:
    """The other process of `Remote`."""
    from tests import testbed

    parser = argparse.ArgumentParser()
    for name in ("--port", "--threads"):
        parser.add_argument(name, type=int)
    for name in ("--translator", "--model", "--device"):
        parser.add_argument(name)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    producer = testbed.load(args.model)[0].to(args.device)
    codec = CacheTranslator.from_pretrained(args.translator, producer=producer)
    with socket.create_connection(("127.0.0.1", args.port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while start := sock.recv(_REQUEST.size, socket.MSG_WAITALL):
            mode, count = _REQUEST.unpack(start)
            ids = torch.frombuffer(_exactly(sock, 8 * count), dtype=torch.int64)[None].to(args.device)
            if mode == _MODES[RAW_SOCKET]:
                layers = raw_states(producer, ids)
                sock.sendall(struct.pack("<5Q", len(layers), *layers[0][0].shape))
                for part in (part for pair in layers for part in pair):
                    sock.sendall(part.contiguous().view(torch.uint8).numpy().data)
            else:
                send(sock, codec.stream(producer, ids) if mode == _MODES[STREAM] else codec.encode(producer, ids))


if __name__ == "__main__":
    serve()
