"""What codes are worth: the divergence of a trained model's predictions, read one token at a time from codes."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import KVCodec, SubspaceCache
from tests import testbed
from tests.scripts.running import import_script

pytestmark = pytest.mark.full
past = import_script("shared.past")


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
    full = past.read_rows(model, rows)
    memory, packed = (
        past.compare(full, past.read_rows(model, rows, coding(codec, model, recent=32), 4), rows)["kl"]
        for coding in (past.CodecCoding, past.PackedCoding)
    )
    assert packed < 0.8 * memory


@pytest.mark.parametrize("metric", ["loss", "plain"])
def test_fewer_bytes_lose_more(metric: str) -> None:
    codec = codec_of("base", metric)
    lost = [divergence("base", codec.at(ratio)) for ratio in (0.05, 0.1, 0.2, 0.4)]
    assert all(more < 0.5 * less for less, more in pairwise(lost))
