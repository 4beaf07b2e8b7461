"""vLLM processes that share prompts as codes in one Redis."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_kvcaches import ConfigError, UnsupportedError
from hf_kvcaches.stores.catalog import open_blobs
from tests.engines.conftest import RATIOS
from tests.helpers.stores import Server
from tests.testbed import held_out, load

vllm = pytest.importorskip("vllm", reason="make engines installs it")

CHUNK, LAYERS = 128, 4
OF_TOKEN = 2 * 2 * 64 * LAYERS  # numbers


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Twenty prompts: four documents of 530 to 710 tokens, with five questions each; and one of whole chunks."""
    _, tokenizer = load()
    ids = tokenizer(held_out("verse"), add_special_tokens=False)["input_ids"]
    documents = [ids[1000 * number :][: 530 + 60 * number] for number in range(4)]
    questions = [ids[20_000 + 50 * number :][: 9 + number] for number in range(5)]
    return [*(document + question for document in documents for question in questions), documents[0][:512]]


def whole_chunks(ids: list[int]) -> int:
    return min(len(ids) // CHUNK * CHUNK, len(ids) - 1)


def stored_bytes(location: str) -> int:
    store = open_blobs(location)
    return sum(blob.bytes for blob in store.changes().added)


def divergence(exact: dict[str, Any], other: dict[str, Any]) -> float:
    return sum(math.exp(p) * (p - q) for p, q in zip(exact["logprobs"], other["logprobs"], strict=True))


def require_equal_texts(answers: list[dict[str, Any]], exact: list[dict[str, Any]]) -> None:
    """Texts are equal up to where the exact text hangs on less than a twentieth of a nat: any code, however good, may turn that.

    Of 21 texts of 24 tokens most come to such a place, and together they have over a hundred tokens before it.
    """
    decided = [next((step for step, gap in enumerate(answer["gaps"]) if gap < 0.05), len(answer["gaps"])) for answer in exact]
    assert sum(decided) > 5 * len(answers)
    assert [answer["ids"][:end] for answer, end in zip(answers, decided, strict=True)] == [
        answer["ids"][:end] for answer, end in zip(exact, decided, strict=True)
    ]


@pytest.fixture(scope="module")
def plain(ask, prompts):
    return ask(prompts)


@pytest.fixture(scope="module")
def filled(ask, prompts, shared_server, vllm_codecs, plain):
    """A store that one process has filled at a quarter of the bytes, and what it answered."""
    location = f"{shared_server.location}?prefix=quarter"
    return location, ask(prompts, vllm_codecs[0.25], location)


@pytest.mark.timeout(600)
def test_a_process_that_fills_the_store_answers_as_without_it(filled, plain):
    require_equal_texts(filled[1], plain)


@pytest.mark.timeout(600)
def test_another_process_computes_new_tokens_or_the_last_one_only_and_its_texts_are_equal(ask, prompts, filled, plain, vllm_codecs):
    answers = ask(prompts, vllm_codecs[0.25], filled[0])
    assert [answer["cached"] for answer in answers] == [whole_chunks(ids) for ids in prompts]
    require_equal_texts(answers, plain)


def test_the_store_has_the_bytes_that_were_promised(filled, prompts):
    chunks = {tuple(ids[: start + CHUNK]) for ids in prompts for start in range(0, len(ids) - CHUNK + 1, CHUNK)}
    exact = 4 * 4 * OF_TOKEN * 4  # the first four tokens of each document, in float32
    promised = 0.25 * 2 * OF_TOKEN * CHUNK * len(chunks)
    assert stored_bytes(filled[0]) - exact == pytest.approx(promised, rel=0.35)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ratio", RATIOS[1:])
def test_first_tokens_are_within_what_the_codec_loses(ask, prompts, shared_server, vllm_codecs, plain, ratio):
    some, location = prompts[:20:5], f"{shared_server.location}?prefix=share{ratio}"
    answers = ask(some * 2, vllm_codecs[ratio], location, max_tokens=1, pause_before=4, pause=5)
    assert [answer["cached"] for answer in answers] == [0] * 4 + [whole_chunks(ids) for ids in some]
    assert sum(map(divergence, answers[:4], answers[4:])) / 4 < {0.125: 0.06, 0.0625: 0.3}[ratio]


@pytest.mark.timeout(600)
def test_a_damaged_blob_is_a_miss_and_a_killed_server_costs_no_request(ask, prompts, filled, plain, vllm_codecs, tmp_path):
    other = Server(tmp_path)
    other.start()
    location = f"{other.location}?prefix=damaged"
    store, source = open_blobs(location), open_blobs(filled[0])
    for key in source.versions():
        store.put(key, {}, source.tensors(key))
    client = other.client()
    for key in store.versions():
        name = f"damaged:body:{key}"
        client.setrange(name, client.strlen(name) - 5, b"\0\xff\0\xff")
    half = ask(prompts[:6], vllm_codecs[0.25], location, kill=client.info("server")["process_id"], kill_before=3)
    require_equal_texts(half, plain[:6])
    assert half[0]["cached"] == 0, "all blobs were damaged"
    assert half[5]["cached"] == 0, "the server is gone"


@pytest.mark.timeout(600)
def test_chunks_that_vllm_has_in_part_are_completed_from_the_store(ask, prompts, filled, plain, vllm_codecs):
    _, answer = ask([prompts[0][:200], prompts[0]], vllm_codecs[0.25], filled[0], prefix_caching=True, block=32)
    assert answer["cached"] == whole_chunks(prompts[0])
    require_equal_texts([answer], plain[:1])


@pytest.mark.timeout(600)
def test_instances_of_one_process_and_of_two_share_a_store(ask, prompts, filled, plain, shared_server, vllm_codecs):
    some, exact = prompts[:20:7], plain[:20:7]
    read = ask(some, vllm_codecs[0.25], filled[0], processes=2)
    assert [answer["cached"] for answer in read] == [whole_chunks(ids) for ids in some]
    require_equal_texts(read, exact)

    location = f"{shared_server.location}?prefix=sharded"
    require_equal_texts(ask(some, vllm_codecs[0.25], location, processes=2), exact)
    read = ask(some, vllm_codecs[0.25], location)
    assert [answer["cached"] for answer in read] == [whole_chunks(ids) for ids in some]
    require_equal_texts(read, exact)


def config(spec: Any = None, groups: int = 1, **changes: int) -> tuple[Any, Any, Any]:
    """What `require_served` looks at: of vLLM's configs, and of a codec of four layers."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    plain = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float32)
    group = SimpleNamespace(kv_cache_spec=spec or plain, layer_names=[f"model.layers.{index}.self_attn.attn" for index in range(4)])
    parallel = SimpleNamespace(**{"pipeline_parallel_size": 1, "decode_context_parallel_size": 1} | changes)
    codec = SimpleNamespace(codec=SimpleNamespace(layer_count=4))
    return SimpleNamespace(parallel_config=parallel), SimpleNamespace(kv_cache_groups=[group] * groups), codec


def test_what_is_not_served_is_refused_with_the_reason():
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from hf_kvcaches.engines.vllm import require_served

    require_served(*config())
    sizes = {"block_size": 128, "num_kv_heads": 2, "head_size": 64}
    for given, reason in (
        (config(groups=2), "hybrid"),
        (config(SlidingWindowSpec(**sizes, dtype=torch.float32, sliding_window=64)), "windows"),
        (config(FullAttentionSpec(**sizes, dtype=torch.float32, sliding_window=64)), "windows"),
        (config(FullAttentionSpec(**sizes, dtype=torch.float8_e4m3fn)), "quantized"),
        (config(pipeline_parallel_size=2), "pipeline"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            require_served(*given)


def test_misspelt_options_are_refused_by_name(vllm_codecs):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from hf_kvcaches.engines.vllm import CodecConnector

    transfer = SimpleNamespace(kv_connector_extra_config={"sotre": "memory", "codec": vllm_codecs[0.25]})
    engine = SimpleNamespace(
        kv_transfer_config=transfer, model_config=None, cache_config=SimpleNamespace(block_size=128), parallel_config=None
    )
    with pytest.raises(ConfigError, match="sotre"):
        CodecConnector(engine, KVConnectorRole.SCHEDULER, None)
    transfer.kv_connector_extra_config = {"store": "memory", "codec": vllm_codecs[0.25], "chunk": 100}
    with pytest.raises(ConfigError, match="multiple of 64 and of vLLM's block size, 128, got 100"):
        CodecConnector(engine, KVConnectorRole.SCHEDULER, None)
