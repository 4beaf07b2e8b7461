"""The counts of the roofline against a plain implementation whose matrix products, rotations and tensors are counted as it runs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV3Config,
    DynamicCache,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3Config,
)

from hf_kvcaches.core.quantize import quantize
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests import tiny
from tests.scripts.running import import_script, run_script

script = import_script("roofline")
Work = script.Work


def roofline(config, rank, tokens, *, coefficients=None, rotation="aware", **options):
    ranks = rank if isinstance(rank, tuple) else (rank, rank)
    return script.roofline(config, script.Plan(ranks, tokens, int8=coefficients == "int8", aware=rotation == "aware", **options))


DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class Elementwise(TorchDispatchMode):
    """Counts the results of multiplications, additions and subtractions while `on`."""

    on = False
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self.on and func.__name__.split(".")[0] in ("mul", "add", "sub"):
            self.count += out.numel()
        return out


class Plain:
    """Decodes one token in one layer, head by head, over tensors that it makes itself.

    `reads` has every tensor that a step needs, once; `keeps` those that stay; sketches run for as many steps as they have rows.
    """

    def __init__(self, shape: SimpleNamespace, dtype_bytes: int, seed: int = 0) -> None:
        self.shape, self.dtype = shape, DTYPES[dtype_bytes]
        self.generator = torch.Generator().manual_seed(seed)
        self.reads: dict[str, int] = {}
        self.keeps: dict[str, int] = {}
        self.elementwise = Elementwise()
        self.sketch_flops = 0

    def new(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def note(self, part: str, *tensors: torch.Tensor, keep: bool = True) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.reads[part] = self.reads.get(part, 0) + size
        self.keeps[part] = self.keeps.get(part, 0) + size * keep

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = cos.shape[-1]
        self.elementwise.on = True
        first, second = x[:, :half], x[:, half : 2 * half]
        turned = (first * cos - second * sin, second * cos + first * sin)
        self.elementwise.on = False
        return torch.cat((*turned, x[:, 2 * half :]), dim=-1)

    def decode(self) -> list[tuple[torch.Tensor, Callable[[], torch.Tensor]]]:
        """Attention over coefficients in all rows and heads; beside each output a slower way to it."""
        shape, outputs = self.shape, []
        lengths = [min(shape.chunk or shape.n, shape.n - start) for start in range(0, shape.n, shape.chunk or max(shape.n, 1))]
        angles = [self.new(length, shape.turned // 2) for length in lengths]
        tables = [(angle.cos(), angle.sin()) for angle in angles]
        if shape.aware:
            self.note("rebuilding", *(each for table in tables for each in table), keep=False)
        shared = [self.bases(lengths) for _ in range(shape.kv_heads)] if shape.chunk is None else None
        for _ in range(shape.batch):
            for head in range(shape.kv_heads):
                bases = shared[head] if shared else self.bases(lengths)
                outputs += self.head(lengths, bases, tables)
        return outputs

    def bases(self, lengths: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        shape = self.shape
        made = [(self.new(shape.r, shape.d), self.new(shape.s, shape.d)) for _ in lengths]
        self.note("bases", *(each for pair in made for each in pair))
        return made

    def coefficients(self, length: int, rank: int) -> torch.Tensor:
        stored = self.new(length, rank)
        if not self.shape.int8:
            self.note("coefficients", stored)
            return stored
        levels = quantize(stored)
        self.note("coefficients", *levels.tensors().values())
        return levels.dequantize()

    def head(self, lengths, bases, tables) -> list[tuple[torch.Tensor, Callable[[], torch.Tensor]]]:
        shape = self.shape
        query = self.new(shape.group, shape.d)
        exact_keys, exact_values = self.new(shape.x, shape.d), self.new(shape.x, shape.d)
        self.note("exact", exact_keys, exact_values)
        stored = [(self.coefficients(length, shape.r), self.coefficients(length, shape.s)) for length in lengths]
        logits = []
        for (basis, _), (keys, _), table in zip(bases, stored, tables, strict=True):
            logits.append(query @ self.rotate(keys @ basis, *table).T if shape.aware else (query @ basis.T) @ keys.T)
        logits.append(query @ exact_keys.T)
        weights = torch.cat(logits, dim=-1).softmax(-1)
        *parts, last = weights.split([*lengths, shape.x], dim=-1)
        output = last @ exact_values
        for part, (_, basis), (_, values) in zip(parts, bases, stored, strict=True):
            output = output + (part @ values) @ basis
        if lengths:
            leaving = self.new(1, shape.d)
            if shape.aware:
                leaving = self.rotate(leaving, *(each[:1] for each in tables[-1]))
            for basis in bases[-1]:
                assert (leaving @ basis.T).shape[1] == basis.shape[0]
        return [(output, lambda: self.slow(query, stored, bases, tables, exact_keys, exact_values))]

    def slow(self, query, stored, bases, tables, exact_keys, exact_values) -> torch.Tensor:
        """The same output from keys and values that are all decoded first."""
        keys = torch.cat([self.slow_keys(c @ b, t) for (c, _), (b, _), t in zip(stored, bases, tables, strict=True)] + [exact_keys])
        values = torch.cat([c @ b for (_, c), (_, b) in zip(stored, bases, strict=True)] + [exact_values])
        return (query @ keys.T).softmax(-1) @ values

    def slow_keys(self, keys: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if not self.shape.aware:
            return keys
        half = self.shape.turned // 2
        turned = torch.complex(keys[:, :half].double(), keys[:, half : 2 * half].double()) * torch.complex(*(t.double() for t in table))
        return torch.cat((turned.real, turned.imag, keys[:, 2 * half :].double()), dim=-1).to(keys.dtype)

    def sketch(self, size: int, width: int) -> None:
        """One shrinking, whose cost a step has a share of. Eigenvectors are no matrix product: their estimate is added."""
        rows = torch.randn(2 * size, width, generator=self.generator)
        share = rows.numel() * rows.element_size() // size
        self.reads["sketches"] = self.reads.get("sketches", 0) + share
        self.keeps["sketches"] = self.keeps.get("sketches", 0) + rows.numel() * rows.element_size()
        with FlopCounterMode(display=False) as counter:
            if 2 * size < width:
                values, vectors = torch.linalg.eigh(rows @ rows.T)
                shrunk = (vectors.T[-size:] / values[-size:].clamp_min(1e-6).sqrt()[:, None]) @ rows
            else:
                values, vectors = torch.linalg.eigh(rows.T @ rows)
                shrunk = vectors.T[-size:]
            assert shrunk.shape[1] == width
        side = min(2 * size, width)
        self.sketch_flops += -(-(counter.get_total_flops() + 9 * side**3) // size)


def counted(plain: Plain) -> tuple[int, list[tuple[torch.Tensor, Callable[[], torch.Tensor]]]]:
    with FlopCounterMode(display=False) as counter, plain.elementwise:
        outputs = plain.decode()
    if plain.shape.sketch:
        for _ in range(2 * plain.shape.batch * plain.shape.kv_heads):
            plain.sketch(plain.shape.sketch, plain.shape.d)
    return counter.get_total_flops() + plain.elementwise.count + plain.sketch_flops, outputs


@st.composite
def requests(draw: st.DrawFn) -> dict:
    rank = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    return {
        "kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 3)),
        "rank": rank,
        "tokens": draw(st.integers(1, 60)),
        "sinks": draw(st.integers(0, 4)),
        "recent": draw(st.integers(0, 9)),
        "dtype_bytes": draw(st.sampled_from([2, 4, 8])),
        "coefficients": draw(st.sampled_from([None, "int8"])),
        "rotation": draw(st.sampled_from(["aware", "post"])),
        "chunk": draw(st.sampled_from([None, 1, 7, 16, 100])),
        "sketch_size": draw(st.sampled_from([None, max(rank), max(rank) + 5])),
        "batch": draw(st.integers(1, 3)),
        "rotary": draw(st.sampled_from([1.0, 0.5])),
        "layers": draw(st.integers(1, 3)),
    }


SIZE = 24


@given(request=requests())
def test_flops_bytes_and_memory_are_those_of_a_plain_implementation(request: dict) -> None:
    request = dict(request)
    kv_heads, group, rotary, layers = (request.pop(name) for name in ("kv_heads", "group", "rotary", "layers"))
    heads = kv_heads * group
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": rotary}
    common = {"num_attention_heads": heads, "num_hidden_layers": layers, "hidden_size": heads * SIZE}
    config = (
        LlamaConfig(**common, num_key_value_heads=kv_heads, head_dim=SIZE)
        if rotary == 1.0
        else GPTNeoXConfig(**common, rope_parameters=rope)
    )
    if rotary != 1.0:
        kv_heads, group = heads, 1
    found = roofline(config, **request)
    n = max(0, request["tokens"] - request["sinks"] - request["recent"])
    shape = SimpleNamespace(
        kv_heads=kv_heads,
        group=group,
        d=SIZE,
        turned=int(SIZE * rotary),
        r=request["rank"][0],
        s=request["rank"][1],
        n=n,
        x=request["tokens"] - n,
        chunk=request["chunk"],
        sketch=request["sketch_size"],
        batch=request["batch"],
        int8=request["coefficients"] == "int8",
        aware=request["rotation"] == "aware",
    )
    plain = Plain(shape, request["dtype_bytes"])
    flops, outputs = counted(plain)
    assert found.subspace.flops == layers * flops
    assert {name: work.bytes for name, work in found.parts.items() if work.bytes} == {k: layers * v for k, v in plain.reads.items() if v}
    assert {name: work.memory for name, work in found.parts.items() if work.memory} == {k: layers * v for k, v in plain.keeps.items() if v}
    assert found.compressed == n
    exact = Plain(
        SimpleNamespace(**{**vars(shape), "n": 0, "x": request["tokens"], "sketch": None, "aware": False}), request["dtype_bytes"]
    )
    flops, _ = counted(exact)
    assert found.baseline == Work(layers * flops, layers * exact.reads["exact"], layers * exact.keeps["exact"])
    if request["dtype_bytes"] == 8:
        # What was counted is attention, and not something cheaper.
        for fast, slow in outputs:
            torch.testing.assert_close(fast, slow(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("size", [4, 11, 12, 13, 40])
def test_a_sketch_takes_the_smaller_of_the_two_products(size: int) -> None:
    shape = {"num_attention_heads": 1, "num_hidden_layers": 1, "hidden_size": SIZE, "num_key_value_heads": 1}
    parts = roofline(LlamaConfig(**shape), 4, 10, sketch_size=size, chunk=4).parts
    plain = Plain(SimpleNamespace(), 2)
    plain.sketch(size, SIZE)
    assert parts["sketches"].flops == 2 * plain.sketch_flops
    assert parts["sketches"].memory == 2 * plain.keeps["sketches"]


FAMILIES = {
    "grouped": lambda: tiny.llama(),
    "a head size of its own": lambda: tiny.build(Qwen3Config(**{**tiny._SHAPE, "head_dim": 24})),
    "all heads": tiny.gpt2,
    "one key head": lambda: tiny.build(FalconConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)),
    "key heads that are repeated before the cache": lambda: tiny.build(
        FalconConfig(
            vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True
        )
    ),
    "rotated in part": lambda: tiny.build(GPTNeoXConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)),
    "linear layers": lambda: tiny.build(
        JambaConfig(
            **{**tiny._SHAPE, "num_hidden_layers": 8}, num_experts=1, num_experts_per_tok=1, mamba_d_state=4, use_mamba_kernels=False
        )
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_baseline_keeps_what_transformers_own_cache_keeps(family: str) -> None:
    model = FAMILIES[family]()
    cache = DynamicCache(config=model.config)
    model(tiny.ids(2, 21), past_key_values=cache)
    tensors = [
        each for layer in cache.layers for each in (getattr(layer, "keys", None), getattr(layer, "values", None)) if each is not None
    ]
    kept = sum(each.numel() * each.element_size() for each in tensors)
    found = roofline(model, 2, 21, batch=2, dtype_bytes=4, recent=4)
    assert found.baseline.memory == found.baseline.bytes == kept > 0
    assert found == roofline(model.config, 2, 21, batch=2, dtype_bytes=4, recent=4)


def test_layers_with_a_window_cost_the_same_on_both_sides() -> None:
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32, "num_hidden_layers": 4}
    found = roofline(Gemma2Config(**shape, sliding_window=16), 4, 200, recent=20, rotation="post")
    full = roofline(LlamaConfig(**{**shape, "num_hidden_layers": 2}), 4, 200, recent=20, rotation="post")
    window = roofline(LlamaConfig(**{**shape, "num_hidden_layers": 2}), 4, 16, recent=20).baseline
    assert (found.layers, found.sliding_layers) == (2, 2)
    assert found.parts["sliding"] == window
    assert found.subspace == full.subspace + window
    assert found.baseline == full.baseline + window


def test_keys_that_are_not_rotated_need_no_rebuilding() -> None:
    config = GPT2Config(n_embd=32, n_head=4, n_layer=2)
    aware, post = (roofline(config, 4, 300, rotation=rotation) for rotation in ("aware", "post"))
    assert aware == post
    assert aware.parts["rebuilding"] == Work()


def test_rotating_late_costs_arithmetic_and_rotating_early_saves_it() -> None:
    config = LlamaConfig(num_key_value_heads=8)
    aware, post = (roofline(config, 32, 32768, rotation=rotation) for rotation in ("aware", "post"))
    assert aware.ratio("flops") < 1 < post.ratio("flops") < 4
    assert 3 < aware.ratio("bytes") < post.ratio("bytes") < 4
    assert aware.ratio("memory") == post.ratio("memory") == pytest.approx(4, rel=0.02)


def test_a_machine_waits_for_its_memory_or_its_arithmetic() -> None:
    counts = roofline(LlamaConfig(num_key_value_heads=8), 32, 32768)
    assert counts.baseline.seconds(1e15, 3e12) == pytest.approx(counts.baseline.bytes / 3e12)
    assert counts.subspace.seconds(1e14, 3e12) == pytest.approx(counts.subspace.flops / 1e14)


def test_it_prints_a_table_for_the_model_that_is_named() -> None:
    done = run_script("roofline", "--rank", "16", "32", "--chunk", "512", "--sketch-size", "64", "--flops", "1e14", "--bandwidth", "1e12")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "4 layers and 0 with a window, 4096 tokens, 4028 of them compressed"
    names = ["baseline", "exact", "coefficients", "bases", "rebuilding", "sketches", "subspace", "times"]
    assert [line.split()[0] for line in lines[3:11]] == names
    assert lines[3].split()[1:] == [f"{2 * 4 * 4 * 4096 * 128 / 1e6:.3f}", *[f"{4 * 2 * 4096 * 128 * 2 / 1e6:.3f}"] * 2, "2.00"]
    assert lines[-1].endswith("times faster")


@pytest.mark.parametrize(
    ("options", "name"), [({"rank": 129}, "rank"), ({"rank": (4, 129)}, "rank"), ({"rank": 16, "sketch_size": 8}, "sketch_size")]
)
def test_ranks_that_a_head_or_a_sketch_has_no_room_for_are_refused(options: dict, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        roofline(LlamaConfig(), options.pop("rank"), 100, **options)


@pytest.mark.parametrize("config", [DeepseekV3Config, MambaConfig])
def test_models_without_keys_and_values_of_the_usual_kind_are_refused(config) -> None:
    with pytest.raises(UnsupportedError, match=config.model_type):
        roofline(config(), 8, 100)
