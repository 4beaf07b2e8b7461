"""A chat server that keeps a cache for each session: a turn computes its own tokens, and answers arrive while they are written.

    pip install "hf-kvcaches[examples]"
    python examples/chat_server.py --model Qwen/Qwen3-0.6B [--sessions 16] [--budget 2048]
    curl -N localhost:8000/chat/alice -H 'content-type: application/json' -d '{"message": "What is a KV cache?"}'

A session is a name in the URL. With more than `--sessions` of them the one that was idle for longest is forgotten. `--budget` keeps so many
tokens of a session with `EquipCache`, so that a chat of any length takes the same memory; without it `GrowingCache` keeps all of them.
"""

from __future__ import annotations

import argparse
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any

try:  # before torch and transformers, which take seconds
    import uvicorn
    from fastapi import Body, FastAPI, HTTPException
    from fastapi.responses import StreamingResponse
except ImportError:
    raise SystemExit('This example needs FastAPI and uvicorn: pip install "hf-kvcaches[examples]"') from None

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList, TextIteratorStreamer

from hf_kvcaches import EquipCache, GrowingCache


@dataclass
class Session:
    """The messages of one chat, and the cache that holds their tokens."""

    cache: Any
    messages: list[dict[str, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # of the messages, as the model read and wrote them
    computed: int = 0  # prompt tokens that the last turn computed
    lock: threading.Lock = field(default_factory=threading.Lock)  # turns of one session follow each other


class Chats:
    """Up to `limit` sessions on one model, which writes one answer at a time: a batch of one keeps it busy."""

    def __init__(self, model: Any, tokenizer: Any, make_cache: Callable[[], Any], limit: int) -> None:
        self.model, self.tokenizer, self.make_cache, self.limit = model, tokenizer, make_cache, limit
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self._sessions_lock, self._model_lock = threading.Lock(), threading.Lock()

    def session(self, name: str) -> Session:
        """The session of a name, new or old, as the one that was used last."""
        with self._sessions_lock:
            session = self.sessions.setdefault(name, Session(self.make_cache()))
            self.sessions.move_to_end(name)
            idle = [name for name, other in self.sessions.items() if other is not session and not other.lock.locked()]
            for victim in idle[: max(0, len(self.sessions) - self.limit)]:
                del self.sessions[victim]
        return session

    def answer(self, session: Session, message: str, max_new_tokens: int) -> Iterator[str]:
        """The answer to a message, piece by piece; closing the iterator stops the generation."""
        streamer, stopped = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True), threading.Event()
        stopping = StoppingCriteriaList([lambda ids, scores: torch.full((len(ids),), stopped.is_set(), device=ids.device)])
        settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": self.tokenizer.eos_token_id}
        settings |= {"streamer": streamer, "stopping_criteria": stopping}
        with ThreadPoolExecutor(1) as executor:
            turn = executor.submit(self._write, session, message, settings)
            turn.add_done_callback(lambda _: streamer.end())  # `generate` ends the streamer only where it succeeds
            try:
                yield from streamer
                turn.result()  # raises the error of a turn that failed
            finally:
                stopped.set()

    def _write(self, session: Session, message: str, settings: dict[str, Any]) -> None:
        with session.lock, self._model_lock:
            messages = [*session.messages, {"role": "user", "content": message}]
            prompt_ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            cache, seen = session.cache, session.cache.get_seq_length()
            if prompt_ids[:seen] != session.token_ids[:seen]:
                # The template changes earlier messages (some remove reasoning), or an answer's text becomes other tokens.
                cache.reset()
                seen = 0
            session.computed = len(prompt_ids) - seen
            inputs = torch.tensor([prompt_ids], device=self.model.device)
            try:
                output = self.model.generate(inputs, attention_mask=torch.ones_like(inputs), cache=cache, **settings)
            except BaseException:
                if {layer.get_seq_length() for layer in cache.layers} != {seen}:
                    cache.reset()  # a pass broke off: the next turn computes the chat anew
                raise
            session.token_ids = output[0].tolist()
            text = self.tokenizer.decode(session.token_ids[len(prompt_ids) :], skip_special_tokens=True)
            session.messages = [*messages, {"role": "assistant", "content": text}]


def create_app(chats: Chats) -> FastAPI:
    """The HTTP interface: `POST /chat/NAME` streams an answer, `GET /sessions` lists sessions, `DELETE /chat/NAME` forgets one."""
    app = FastAPI(title="Chats with a cache for each session")

    @app.post("/chat/{name}")
    def chat(name: str, message: Annotated[str, Body()], max_new_tokens: Annotated[int, Body(ge=1)] = 256) -> StreamingResponse:
        pieces = chats.answer(chats.session(name), message, max_new_tokens)
        try:
            first = next(filter(None, pieces), "")  # once an answer has begun, its status is sent
        except Exception as error:
            raise HTTPException(500, f"The model could not answer: {error}") from error
        return StreamingResponse(itertools.chain([first], pieces), media_type="text/plain")

    @app.get("/sessions")
    def sessions() -> dict[str, dict[str, int]]:
        return {
            name: {"tokens": len(session.token_ids), "computed": session.computed, "bytes": session.cache.report().bytes}
            for name, session in list(chats.sessions.items())
        }

    @app.delete("/chat/{name}")
    def forget(name: str) -> dict[str, bool]:
        return {"forgotten": chats.sessions.pop(name, None) is not None}

    return app


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--sessions", type=int, default=16, help="that are kept")
    parser.add_argument("--budget", type=int, help="tokens that are kept of a session; default: all")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if tokenizer.chat_template is None:
        parser.error(f"{args.model} has no chat template: name a model that is made for chats")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    make_cache = (lambda: EquipCache(model, "streaming", budget=args.budget)) if args.budget else (lambda: GrowingCache(model))
    uvicorn.run(create_app(Chats(model, tokenizer, make_cache, args.sessions)), host=args.host, port=args.port)


if __name__ == "__main__":
    main()
