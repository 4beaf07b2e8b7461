"""The chat server: sessions with a cache each."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import EquipCache, GrowingCache
from tests import testbed
from tests.examples.running import import_example

pytest.importorskip("fastapi")
NEW = 6


@pytest.fixture(scope="module")
def example():
    return import_example("chat_server")


@pytest.fixture(scope="module")
def loaded():
    return testbed.load()


@pytest.fixture
def chats(example, loaded):
    model, tokenizer = loaded
    return example.Chats(model, tokenizer, lambda: GrowingCache(model), limit=2)


@pytest.fixture
def client(example, chats):
    from fastapi.testclient import TestClient

    return TestClient(example.create_app(chats))


def say(client, name: str, message: str) -> str:
    answer = client.post(f"/chat/{name}", json={"message": message, "max_new_tokens": NEW})
    assert answer.status_code == 200
    return answer.text


def alone(chats, *messages: str) -> list[str]:
    """The answers of a chat that is computed anew at each turn."""
    token_ids, answers = [], []
    for message in messages:
        prompt = torch.tensor([[*token_ids, *chats._turn_ids(message, not token_ids)]])
        settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": chats.tokenizer.eos_token_id}
        cache = DynamicCache(config=chats.model.config)
        output = chats.model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, **settings)
        answers.append(chats.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True))
        token_ids = output[0].tolist()
    return answers


def test_two_sessions_that_take_turns_answer_as_each_does_alone(client, chats):
    ours, theirs = ["The ship left the harbour", "and then"], ["She opened the door", "but nobody"]
    said = [(say(client, "us", mine), say(client, "them", other)) for mine, other in zip(ours, theirs, strict=True)]
    assert [answer for answer, _ in said] == alone(chats, *ours)
    assert [answer for _, answer in said] == alone(chats, *theirs)


def test_a_second_turn_computes_its_own_tokens_and_the_last_one_of_the_answer(client, chats):
    say(client, "us", "The ship left the harbour at dawn, and nobody saw it")
    seen = client.get("/sessions").json()["us"]["tokens"]
    say(client, "us", "and then")
    turn = len(chats._turn_ids("and then", False))
    assert client.get("/sessions").json()["us"]["computed"] == turn + 1 < seen


def test_an_answer_is_streamed_in_pieces(chats):
    pieces = [piece for piece in chats.answer(chats.session("us"), "The ship left the harbour", NEW) if piece]
    assert len(pieces) > 1
    assert "".join(pieces) == alone(chats, "The ship left the harbour")[0]


def test_the_session_that_was_idle_for_longest_is_forgotten(client):
    for name in ("one", "two", "one", "three"):
        say(client, name, "Hello")
    assert list(client.get("/sessions").json()) == ["one", "three"]


def test_a_busy_session_is_not_forgotten(chats):
    busy = chats.session("busy")
    with busy.lock:
        chats.session("two")
        chats.session("three")
        assert list(chats.sessions) == ["busy", "three"]


def test_a_session_is_forgotten_on_request(client):
    say(client, "us", "Hello")
    assert client.delete("/chat/us").json() == {"forgotten": True}
    assert client.delete("/chat/us").json() == {"forgotten": False}


def test_a_turn_that_fails_leaves_a_session_that_goes_on(chats, monkeypatch):
    session = chats.session("us")
    "".join(chats.answer(session, "The ship left", NEW))
    with monkeypatch.context() as patch:
        patch.setattr(chats.model, "generate", lambda *args, **options: (_ for _ in ()).throw(RuntimeError("out of memory")))
        patch.setattr("threading.excepthook", lambda args: None)
        assert "".join(chats.answer(session, "lost", NEW)) == ""
    assert "".join(chats.answer(session, "and then", NEW)) == alone(chats, "The ship left", "and then")[1]


def test_a_budget_bounds_what_a_session_holds(example, loaded):
    model, tokenizer = loaded
    chats = example.Chats(model, tokenizer, lambda: EquipCache(model, "streaming", budget=80), limit=1)
    session = chats.session("us")
    for _ in range(4):
        "".join(chats.answer(session, "The ship left the harbour at dawn, and nobody saw it " * 3, NEW))
    assert session.cache.get_seq_length() > 80
    assert max(map(len, session.cache.kept_positions(0)[0])) <= 80
