"""One pass over whole rows with a coded past gives the logits of decoding token by token."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from hf_kvcaches import KVCodec, SubspaceCache, compat
from hf_kvcaches.evaluate.measures import divergence, losses
from tests import tiny
from tests.scripts.running import import_script

past, peers = import_script("shared.past"), import_script("shared.peers")
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


@cache
def codec_of(family: str) -> KVCodec:
    texts = [tiny.ids(1, 96, seed=seed)[0].tolist() for seed in range(4)]
    return KVCodec.calibrate(getattr(tiny, family)(), None, texts, bytes_ratio=0.2, progress=False)


def one_by_one(model: Any, cache: Cache, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    with torch.no_grad():
        blocks = [ids[:, :prompt], *ids[:, prompt:].split(1, 1)]
        return torch.cat([model(input_ids=block, **compat.cache_kwargs(model, cache)).logits for block in blocks], 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("sinks", "recent", "prompt"), [(4, 0, 4), (4, 8, 4), (0, 1, 1), (2, 0, 20)])
def test_a_codec_reads_as_a_subspace_cache_does_token_by_token(dtype: torch.dtype, sinks: int, recent: int, prompt: int) -> None:
    model, codec, ids = tiny.llama().to(dtype), codec_of("llama"), tiny.ids(2, 63)
    window = {"sinks": sinks, "recent": recent}
    expected = one_by_one(model, SubspaceCache(model, codec, **window), ids, prompt)
    got = past.read_rows(model, ids, past.CodecCoding(codec, model, **window), prompt)
    if dtype == torch.float64:
        torch.testing.assert_close(got, expected, **TOLERANCE)
    # In float32, arithmetic in another order gives a code or two to the neighbour of their step.
    assert float((got - expected).abs().mean()) < 2e-3


def test_layers_with_windows_and_capped_scores_are_read_as_well() -> None:
    model, codec, ids = tiny.gemma2().double(), codec_of("gemma2"), tiny.ids(1, 40)
    model.set_attn_implementation("eager")  # in older releases sdpa does not cap scores
    expected = one_by_one(model, SubspaceCache(model, codec, recent=3), ids, 5)
    torch.testing.assert_close(past.read_rows(model, ids, past.CodecCoding(codec, model, recent=3), 5), expected, atol=2e-4, rtol=2e-4)


class KiviLayer(DynamicLayer):
    """One layer. A prompt attends exactly to itself."""

    def __init__(self, bits: int, sinks: int) -> None:
        super().__init__()
        self.bits, self.coded = bits, sinks  # tokens before `coded` are as they will be read

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        is_prompt = not self.get_seq_length()
        super().update(key_states, value_states)
        whole = self.coded + max(0, self.get_seq_length() - self.coded) // peers.GROUP * peers.GROUP
        if whole > self.coded:
            span = slice(self.coded, whole)
            self.keys[:, :, span] = peers.quantized(self.keys[:, :, span], self.bits, 2)
            self.values[:, :, span] = peers.quantized(self.values[:, :, span], self.bits, 3)
            self.coded = whole
        return (key_states, value_states) if is_prompt else (self.keys, self.values)


class KiviCache(Cache):
    def __init__(self, config: PreTrainedConfig, bits: int, sinks: int = 4) -> None:
        super().__init__(layers=[KiviLayer(bits, sinks) for _ in range(config.num_hidden_layers)])


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("prompt", [1, 4, 40])
def test_groups_are_read_as_kivi_reads_them_token_by_token(bits: int, prompt: int) -> None:
    model, ids = tiny.llama().double(), tiny.ids(2, 83)
    expected = one_by_one(model, KiviCache(model.config, bits), ids, prompt)
    torch.testing.assert_close(past.read_rows(model, ids, peers.KiviCoding(bits), prompt), expected, atol=2e-4, rtol=2e-4)


class Exact(past.PastCoding):
    def read(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values


def test_a_coding_that_loses_nothing_gives_the_logits_of_the_full_cache() -> None:
    model, ids = tiny.llama().double(), tiny.ids(2, 300)
    torch.testing.assert_close(past.read_rows(model, ids, Exact()), past.read_rows(model, ids), atol=1e-9, rtol=1e-9)


class Rounded(past.PastCoding):
    def read(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keys.round(decimals=1), values.round(decimals=1)


def test_text_quality_is_the_mean_over_all_positions_behind_the_prompt() -> None:
    model, ids = tiny.llama(), tiny.ids(2, 150)
    full, coded = past.read_rows(model, ids), past.read_rows(model, ids, Rounded(), 5)
    quality, full, coded = past.compare(full, coded, ids, 5), full[:, 5:-1], coded[:, 5:-1]
    assert quality["tokens"] == 2 * 144
    assert quality["kl"] == pytest.approx(float(divergence(full, coded).mean()), rel=1e-4)
    for name, logits in (("loss", coded), ("full_loss", full)):
        assert quality[name] == pytest.approx(float(losses(logits, ids[:, 6:]).mean()), rel=1e-5)
