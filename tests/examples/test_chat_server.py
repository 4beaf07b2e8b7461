"""The chat server: sessions with a cache each."""

import copy
import sys
from types import ModuleType

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import EquipCache, GrowingCache
from tests import testbed
from tests.examples.running import BASE, import_example

pytest.importorskip("fastapi")
NEW = 6
# The testbed's tokenizer has none. An answer begins with the space that the model writes.
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ ' ' if message.role == 'user' }}{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "uvicorn", ModuleType("uvicorn"))  # no test here opens a port
        return import_example("chat_server")


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = testbed.load()
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


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
    chat, answers = [], []
    for message in messages:
        chat.append({"role": "user", "content": message})
        prompt = torch.tensor([chats.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)])
        settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": chats.tokenizer.eos_token_id}
        cache = DynamicCache(config=chats.model.config)
        output = chats.model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, **settings)
        answers.append(chats.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True))
        chat.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_two_sessions_that_take_turns_answer_as_each_does_alone(client, chats):
    ours, theirs = ["The ship left the harbour", "and then"], ["She opened the door", "but nobody"]
    said = [(say(client, "us", mine), say(client, "them", other)) for mine, other in zip(ours, theirs, strict=True)]
    assert [answer for answer, _ in said] == alone(chats, *ours)
    assert [answer for _, answer in said] == alone(chats, *theirs)


def test_a_second_turn_computes_its_own_tokens_and_the_last_ones_of_the_answer(client, chats):
    say(client, "us", "The ship left the harbour at dawn, and nobody saw it")
    seen = client.get("/sessions").json()["us"]["tokens"]
    say(client, "us", "and then")
    assert client.get("/sessions").json()["us"]["computed"] < seen
    assert client.get("/sessions").json()["us"]["computed"] < 20


def test_a_template_that_changes_earlier_messages_has_the_chat_computed_anew(chats):
    chats.tokenizer = copy.copy(chats.tokenizer)
    chats.tokenizer.chat_template = "{{ messages | length }} messages: {{ messages[-1].content }}\n"
    session = chats.session("us")
    answers = ["".join(chats.answer(session, message, NEW)) for message in ("The ship left", "and then")]
    assert answers == alone(chats, "The ship left", "and then")


def test_the_session_that_was_idle_for_longest_is_forgotten_and_another_on_request(client, chats):
    for name in ("one", "two", "one", "three"):
        say(client, name, "Hello")
    assert list(client.get("/sessions").json()) == ["one", "three"]
    assert client.delete("/chat/one").json() == {"forgotten": True}
    assert client.delete("/chat/one").json() == {"forgotten": False}
    with chats.session("busy").lock:
        chats.session("four")
        chats.session("five")
        assert list(chats.sessions) == ["busy", "five"]


@pytest.mark.parametrize("fed", [False, True])
def test_a_turn_that_fails_is_an_error_for_the_client_and_leaves_a_session_that_goes_on(client, chats, monkeypatch, fed):
    say(client, "us", "The ship left")
    session = chats.sessions["us"]
    seen, original = session.cache.get_seq_length(), chats.model.generate

    def fail(*args, **options):
        if fed:
            original(*args, **{**options, "streamer": None})
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(chats.model, "generate", fail)
        answer = client.post("/chat/us", json={"message": "lost", "max_new_tokens": NEW})
    assert answer.status_code == 500
    assert "out of memory" in answer.json()["detail"]
    assert session.cache.get_seq_length() == (0 if fed else seen)
    assert say(client, "us", "and then") == alone(chats, "The ship left", "and then")[1]


def test_no_new_tokens_are_refused_before_anything_is_computed(client):
    assert client.post("/chat/us", json={"message": "Hello", "max_new_tokens": 0}).status_code == 422


def test_an_answer_is_streamed_in_pieces_and_a_client_that_leaves_stops_it(chats):
    session = chats.session("us")
    pieces = [piece for piece in chats.answer(session, "The ship left the harbour", NEW) if piece]
    assert len(pieces) > 1
    assert "".join(pieces) == alone(chats, "The ship left the harbour")[0]
    session = chats.session("them")
    more = chats.answer(session, "The ship left the harbour", 200)
    next(more)
    more.close()
    assert not session.lock.locked()
    assert 0 < len(session.token_ids) < 150


def test_a_budget_bounds_what_a_session_holds(example, loaded):
    model, tokenizer = loaded
    chats = example.Chats(model, tokenizer, lambda: EquipCache(model, "streaming", budget=80), limit=1)
    session = chats.session("us")
    for _ in range(4):
        "".join(chats.answer(session, "The ship left the harbour at dawn, and nobody saw it " * 3, NEW))
    assert session.cache.get_seq_length() > 80
    assert max(map(len, session.cache.kept_positions(0)[0])) <= 80


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_a_missing_package_is_said_before_anything_is_loaded(monkeypatch, package):
    monkeypatch.setitem(sys.modules, "uvicorn", ModuleType("uvicorn"))
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "examples_chat_server", raising=False)
    with pytest.raises(SystemExit, match=r"hf-kvcaches\[examples\]"):
        import_example("chat_server")


def test_a_model_without_a_chat_template_is_refused_before_it_is_loaded(example, monkeypatch, capsys):
    monkeypatch.setattr(example, "AutoModelForCausalLM", None)
    with pytest.raises(SystemExit):
        example.main(["--model", str(BASE)])
    assert "has no chat template" in capsys.readouterr().err
