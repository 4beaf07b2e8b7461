"""What codes are worth: the divergence of a trained model's predictions, read one token at a time from codes."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import KVCodec, SubspaceCache
from hf_kvcaches.codec.past import CodecCoding, PackedCoding
from hf_kvcaches.evaluate.measures import compare
from hf_kvcaches.evaluate.past import read_rows
from tests import testbed

pytestmark = pytest.mark.full


@cache
def model_of(name: str) -> Any:
    return testbed.load(name)[0]


@cache
def ids() -> torch.Tensor:
    return torch.tensor(testbed.load()[1](testbed.held_out()[:60_000], verbose=False)["input_ids"])


@cache
def codec_of(name: str, metric: str, tokens: int = 8192) -> KVCodec:
    options: dict[str, Any] = {"metric": metric, "recent": 0, "progress": False}
    return KVCodec.calibrate(model_of(name), None, [ids()[:tokens].tolist()], **options)


@torch.no_grad()
def predictions(model: Any, cache: Any, rows: int = 4, tokens: int = 96) -> torch.Tensor:
    """Of text that no codec has read, behind a prompt of 32 tokens one at a time."""
    unseen = ids()[12_000 : 12_000 + rows * tokens].view(rows, tokens)
    chunks = [unseen[:, :32], *unseen[:, 32:].split(1, 1)]
    return torch.cat([model(chunk, past_key_values=cache).logits for chunk in chunks], 1).double().log_softmax(-1)[:, 32:]


@cache
def exact(name: str) -> torch.Tensor:
    return predictions(model_of(name), DynamicCache(config=model_of(name).config))


def divergence(name: str, codec: KVCodec) -> float:
    """The mean divergence from the model with a full cache, in nats."""
    found = predictions(model_of(name), SubspaceCache(model_of(name), codec, sinks=4, recent=0))
    return float((exact(name).exp() * (exact(name) - found)).sum(-1).mean())


@pytest.mark.parametrize("ratio", [0.07, 0.125])
@pytest.mark.parametrize("name", ["base", "deep"])
def test_at_equal_bytes_the_metric_of_the_loss_beats_none(name: str, ratio: float) -> None:
    loss, plain = (divergence(name, codec_of(name, metric).at(ratio)) for metric in ("loss", "plain"))
    assert loss < 0.4 * plain


@pytest.mark.parametrize("ratio", [0.07, 0.125])
@pytest.mark.parametrize("name", ["base", "deep"])
def test_at_equal_bytes_the_packed_form_beats_codes_in_memory(name: str, ratio: float) -> None:
    model, codec, rows = model_of(name), codec_of(name, "loss").at(ratio), ids()[12_000:12_384].view(4, 96)
    full = read_rows(model, rows)
    memory, packed = (
        compare(full, read_rows(model, rows, coding(codec, model, recent=32), 4), rows).kl for coding in (CodecCoding, PackedCoding)
    )
    assert packed < 0.8 * memory


@pytest.mark.parametrize("metric", ["loss", "plain"])
def test_fewer_bytes_lose_more(metric: str) -> None:
    codec = codec_of("base", metric)
    lost = [divergence("base", codec.at(ratio)) for ratio in (0.05, 0.1, 0.2, 0.4)]
    assert all(more < 0.5 * less for less, more in pairwise(lost))


def test_a_codec_of_more_text_loses_less() -> None:
    assert divergence("base", codec_of("base", "loss").at(0.1)) < divergence("base", codec_of("base", "loss", 512).at(0.1))


def test_keys_before_their_rotation_lose_less_than_behind_it() -> None:
    options: dict[str, Any] = {"rotation": "post", "recent": 0, "progress": False}
    post = KVCodec.calibrate(model_of("base"), None, [ids()[:8192].tolist()], **options)
    assert divergence("base", codec_of("base", "loss").at(0.1)) < divergence("base", post.at(0.1))


def test_a_codec_of_float32_is_as_good_in_a_bfloat16_model() -> None:
    codec = codec_of("base", "loss").at(0.1)
    half = testbed.load("base")[0].to(torch.bfloat16)
    usual = predictions(half, DynamicCache(config=half.config))
    found = predictions(half, SubspaceCache(half, codec, sinks=4, recent=0))
    lost = float((usual.exp() * (usual - found)).sum(-1).mean())
    assert lost < 1.3 * divergence("base", codec)
