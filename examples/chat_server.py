"""A chat server that keeps a cache for each session: a turn computes its own tokens, and answers arrive while they are written.

    pip install "hf-kvcaches[examples]"
    python examples/chat_server.py --model Qwen/Qwen3-0.6B [--sessions 16] [--budget 2048]
    curl -N localhost:8000/chat/alice -H 'content-type: application/json' -d '{"message": "What is a KV cache?"}'

A session is a name in the URL. With more than `--sessions` of them the one that was idle for longest is forgotten. `--budget` keeps so many
tokens of a session with `EquipCache`, so that a chat of any length takes the same memory; without it `GrowingCache` keeps all of them.
"""

from __future__ import annotations

import argparse
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from hf_kvcaches import EquipCache, GrowingCache


@dataclass
class Session:
    """The tokens of one chat and the cache that holds them."""

    cache: Any
    token_ids: list[int] = field(default_factory=list)
    computed: int = 0  # prompt tokens that the last turn computed
    lock: threading.Lock = field(default_factory=threading.Lock)  # turns of one session follow each other


class Chats:
    """All sessions on one model. One of them writes at a time: a batch of one keeps the model busy.

    Args:
        make_cache: Makes the cache of a new session.
        limit: Sessions that are kept.
    """

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
        """The answer to a message, piece by piece."""
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        thread = threading.Thread(target=self._write, args=(session, message, max_new_tokens, streamer))
        thread.start()
        yield from streamer
        thread.join()

    def _write(self, session: Session, message: str, max_new_tokens: int, streamer: TextIteratorStreamer) -> None:
        with session.lock, self._model_lock:
            prompt_ids = [*session.token_ids, *self._turn_ids(message, is_first=not session.token_ids)]
            session.computed = len(prompt_ids) - session.cache.get_seq_length()
            inputs = torch.tensor([prompt_ids], device=self.model.device)
            settings = {"max_new_tokens": max_new_tokens, "pad_token_id": self.tokenizer.eos_token_id, "do_sample": False}
            try:
                output = self.model.generate(
                    inputs, attention_mask=torch.ones_like(inputs), past_key_values=session.cache, streamer=streamer, **settings
                )
                session.token_ids = output[0].tolist()
            except BaseException:
                session.cache = self.make_cache()  # a pass that broke off leaves a cache that can't go on
                streamer.end()
                raise

    def _turn_ids(self, message: str, is_first: bool) -> list[int]:
        """The tokens of a turn alone, behind what the session holds."""
        if self.tokenizer.chat_template is None:
            return self.tokenizer(f"{'' if is_first else chr(10)}User: {message}\nAssistant:", add_special_tokens=is_first)["input_ids"]
        turn = [{"role": "user", "content": message}]
        return self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]


class Message(BaseModel):
    """The body of a request."""

    message: str
    max_new_tokens: int = 256


def create_app(chats: Chats) -> FastAPI:
    """The HTTP interface: `POST /chat/NAME` streams an answer, `GET /sessions` lists sessions, `DELETE /chat/NAME` forgets one."""
    app = FastAPI(title="Chats with a cache for each session")

    @app.post("/chat/{name}")
    def chat(name: str, body: Message) -> StreamingResponse:
        return StreamingResponse(chats.answer(chats.session(name), body.message, body.max_new_tokens), media_type="text/plain")

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
    import uvicorn

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    make_cache = (lambda: EquipCache(model, "streaming", budget=args.budget)) if args.budget else (lambda: GrowingCache(model))
    chats = Chats(model, AutoTokenizer.from_pretrained(args.model), make_cache, args.sessions)
    uvicorn.run(create_app(chats), host=args.host, port=args.port)


if __name__ == "__main__":
    main()
