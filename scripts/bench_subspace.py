"""Times SubspaceCache with a codec beside DynamicCache: whole decode steps behind a long text, and prompts.

    python scripts/bench_subspace.py [--device auto] [--layers 28] [--csv docs/benchmarks/subspace-speed.csv]

The model is a Llama with random weights, 16 query and 8 key heads of 128, and a codec of 0.125 of the bytes, calibrated on random tokens.
`step` is the forward pass of one new token a row, 4 first and 64 last tokens exact, and its processor time. Texts are random keys and
values, since what is in them does not matter to the clock. `prefill` is a prompt into an empty cache, so that what is measured is encoding.
Fewer `--layers` take less time and memory; times are printed for a layer, too. `roofline` is arithmetic: the bytes that a step of one row
reads and its operations in attention, and how long an H100 (SXM, 3.35 TB/s, 989 TFLOP/s in bfloat16) needs for these and the weights at
least. The query is projected into the codec's bases for each tile of 16 tokens, which is most of the operations.

Before anything is timed, a codec that keeps everything must give DynamicCache's logits. All sides run in turns in one process: a ratio is
the median over rounds of DynamicCache's time by ours. Bytes are those of all tensors that a cache keeps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from shared.bars import Bar
from shared.cli import check_counts, run_script
from shared.models import random_ids, random_llama
from shared.plot import Panel
from shared.results import Row
from shared.sections import TIMES, Output, begin_sections, run_sections, section_arguments
from shared.timing import compared, in_turns, ratios, seconds_of, spread
from tqdm import tqdm
from transformers import Cache, DynamicCache

from hf_kvcaches import KVCodec, SubspaceCache
from hf_kvcaches.core.report import measured_bytes
from hf_kvcaches.kernels.code_format import TILE, CodeLayout

SECTIONS = ("step", "prefill", "roofline")
FULL, CODEC = "DynamicCache", "codec 0.125"
H100_BYTES, H100_FLOPS = 3.35e12, 989e12  # a second
TOLERANCE = {"float32": 1e-3, "bfloat16": 6e-2}  # of logits of the order of 1
COLUMNS = (
    "section dtype layers batch tokens rounds steps side baseline time_ms time_q1_ms time_q3_ms ratio ratio_q1 ratio_q3 total_ratio "
    "processor_ms processor_ratio layer_ms bytes bytes_share operations h100_ms h100_ratio"
).split()
SHOWN = {
    "": "{dtype} {layers} layers {batch} x {tokens}",
    "side": "{side}",
    **TIMES,
    "of a layer": "{layer_ms:.3f}",
    "processor ms": "{processor_ms:.3f}",
    "ratio of it": "{processor_ratio:.2f}x",
    "bytes": "{bytes:,}",
    "share": "{bytes_share:.4f}",
    "operations": "{operations:.2e}",
    "H100 ms": "{h100_ms:.3f}",
    "ratio on it": "{h100_ratio:.1f}x",
}


@dataclass(frozen=True)
class Size:
    """The model, the texts, and how long to measure."""

    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 3072
    vocabulary: int = 2048
    layers: int = 28
    sinks: int = 4
    recent: int = 64
    tokens: tuple[int, ...] = (8192,)
    batches: tuple[int, ...] = (1, 4)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    rounds: int = 9
    steps: int = 4  # of a round
    roofline: tuple[int, ...] = (8192, 32768, 131072)
    prompt: int = 2048
    calibration: int = 1024


QUICK = Size(64, 4, 2, 16, 96, 64, 2, tokens=(96,), batches=(1, 2), rounds=2, steps=2, prompt=80, calibration=512)


class Bench:
    """A model of one dtype with its codec."""

    def __init__(self, size: Size, dtype: str, device: torch.device) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        sizes = {"vocab_size": size.vocabulary, "hidden_size": size.hidden, "intermediate_size": size.intermediate}
        heads = {"num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim}
        model = random_llama(device, num_hidden_layers=size.layers, **sizes, **heads)
        self.model = model.to(getattr(torch, dtype)).eval()
        ids = random_ids(size.vocabulary, size.calibration, seed=2).tolist()
        self.codec = KVCodec.calibrate(self.model, None, [ids], 0.125, progress=False)

    def feed(self, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    def full(self) -> Cache:
        return DynamicCache(config=self.model.config)

    def prove(self, codec: KVCodec | None = None) -> str:
        """An error if a codec that keeps everything gives other logits.

        Args:
            codec: Another one, for tests.
        """
        codec = codec or self.codec.at(1.5)
        caches = self.full(), SubspaceCache(self.model, codec, recent=16)
        prompt, *tokens = random_ids(self.size.vocabulary, 1, 72, seed=1).to(self.device).split([64, *[1] * 8], 1)
        for cache in caches:
            self.feed(cache, prompt)
        expected, found = (torch.cat([self.feed(cache, token).float() for token in tokens]) for cache in caches)
        error = float((expected - found).abs().max())
        if not error <= TOLERANCE[self.dtype]:
            raise SystemExit(f"{self.dtype}: logits differ by {error:.3g}, more than {TOLERANCE[self.dtype]:.0e}: nothing timed")
        return f"{self.dtype}: same logits as {FULL} with a codec that keeps everything, to {error:.1e}"

    def filled(self, batch: int, tokens: int) -> dict[str, Cache]:
        """Both caches behind the same random text."""
        full, size = self.full(), self.size
        shape = (batch, size.kv_heads, tokens, size.head_dim)
        random = torch.Generator(self.device).manual_seed(3)
        for layer in range(size.layers):
            states = (torch.randn(shape, generator=random, device=self.device, dtype=self.model.dtype) for _ in range(2))
            full.update(*states, layer)
        return {FULL: full, CODEC: SubspaceCache.from_cache(full, self.model, self.codec)}

    def step(self, batch: int, tokens: int) -> list[Row]:
        """The mean time of a step in each round; caches go on growing, all alike."""
        size, caches = self.size, self.filled(batch, tokens)
        ids = random_ids(size.vocabulary, batch, 1, seed=4).to(self.device)
        rows = self._timed({name: lambda cache=cache: self.feed(cache, ids) for name, cache in caches.items()}, size.steps)
        whole = cache_bytes(caches[FULL])
        for row in rows:
            owned = cache_bytes(caches[row["side"]])
            row |= {"batch": batch, "tokens": tokens, "bytes": owned, "bytes_share": round(owned / whole, 5)}
        return rows

    def prefill(self) -> list[Row]:
        """A whole prompt into an empty cache."""
        ids = random_ids(self.size.vocabulary, 1, self.size.prompt, seed=5).to(self.device)
        makers: dict[str, Callable[[], Cache]] = {FULL: self.full, CODEC: lambda: SubspaceCache(self.model, self.codec)}
        rows = self._timed({name: lambda make=make: self.feed(make(), ids) for name, make in makers.items()}, 1)
        return [row | {"batch": 1, "tokens": self.size.prompt} for row in rows]

    def roofline(self) -> list[Row]:
        """What a step of one row in bfloat16 reads and computes at least, and an H100's time for it."""
        size, rows = self.size, []
        exact = 2 * 2 * size.layers * size.kv_heads * size.head_dim  # bytes of a token
        ends = size.sinks + size.recent
        layers = list(self.codec.in_place.layers.values())
        levels = [sum(CodeLayout.of(layer.widths).counts) for layer in layers]
        bases = sum(2 * layer.shape.elements * count for layer, count in zip(layers, levels, strict=True))
        weights = 2 * sum(parameter.numel() for parameter in self.model.parameters())
        for tokens in size.roofline:
            logits = 2 * tokens * size.layers * size.heads * size.head_dim
            projecting, summing = 2 * tokens / TILE * size.heads * size.head_dim * sum(levels), 2 * 2 * tokens * size.heads * sum(levels)
            sides = {
                FULL: (tokens * exact, 2 * logits),
                CODEC: (tokens * self.codec.bytes_per_token + ends * exact + bases, projecting + summing),
            }
            least = [max(read / H100_BYTES, operations / H100_FLOPS) + weights / H100_BYTES for read, operations in sides.values()]
            for (side, (read, operations)), seconds in zip(sides.items(), least, strict=True):
                where = {"dtype": "bfloat16", "layers": size.layers, "batch": 1, "tokens": tokens, "side": side, "baseline": FULL}
                share = {"bytes": read, "bytes_share": round(read / (tokens * exact), 5), "operations": operations}
                rows.append(where | share | {"h100_ms": round(1e3 * seconds, 5), "h100_ratio": round(least[0] / seconds, 3)})
        return rows

    def _timed(self, works: Mapping[str, Callable[[], object]], steps: int) -> list[Row]:
        size, processor = self.size, time.process_time

        def measure(work: Callable[[], object]) -> tuple[float, float]:
            begin = processor()
            seconds = seconds_of(work, self.device, steps)
            return seconds, (processor() - begin) / steps

        measured = in_turns({name: lambda _, work=work: measure(work) for name, work in works.items()}, size.rounds, warm_up=1)
        seconds, spent = ({name: [pair[place] for pair in pairs] for name, pairs in measured.items()} for place in range(2))
        rows = []
        for row in compared(seconds, [FULL]):
            own = spent[row["side"]]
            row |= {"processor_ms": spread("processor", own, 1e3)["processor_ms"], "processor_ratio": ratios(spent[FULL], own)["ratio"]}
            row |= {"dtype": self.dtype, "layers": size.layers, "rounds": size.rounds, "steps": steps}
            rows.append(row | {"layer_ms": round(row["time_ms"] / size.layers, 4)})
        return rows


def cache_bytes(cache: Cache) -> int:
    if isinstance(cache, SubspaceCache):
        return measured_bytes(cache.owned_tensors().values())
    return measured_bytes(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))


class Run:
    """All cells; a model serves the sections that follow each other."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        self._bench: Bench | None = None

    def bench(self, dtype: str) -> Bench:
        if self._bench is None or self._bench.dtype != dtype:
            self._bench = None  # before the next one takes memory
            self._bench = Bench(self.size, dtype, self.device)
            print(self._bench.prove(), flush=True)
        return self._bench

    def step(self) -> Iterator[Row]:
        cells = [(dtype, batch, tokens) for dtype in self.size.dtypes for tokens in self.size.tokens for batch in self.size.batches]
        for dtype, batch, tokens in tqdm(cells, unit="cell"):
            yield from self.bench(dtype).step(batch, tokens)

    def roofline(self) -> Iterator[Row]:
        yield from self.bench("bfloat16").roofline()

    def prefill(self) -> Iterator[Row]:
        for dtype in tqdm(reversed(self.size.dtypes), unit="cell", total=len(self.size.dtypes)):
            yield from self.bench(dtype).prefill()


def bars(dtypes: Iterable[str]) -> list[Bar]:
    promised = []
    for dtype in dtypes:
        where = {"section": "step", "side": CODEC, "dtype": dtype}
        promised.append(Bar(f"{dtype}, steps of 4 rows faster than DynamicCache's", where | {"batch": 4}, least=1.0, name="tokens"))
        text = f"{dtype}, steps of one row at most 1.2x the time of DynamicCache's (0.833x)"
        promised.append(Bar(text, where | {"batch": 1}, least=1 / 1.2, name="tokens"))
        text = f"{dtype}, encoding takes at most 5% more of a prefill (0.952x)"
        promised.append(Bar(text, where | {"section": "prefill"}, least=1 / 1.05, name="tokens"))
    return promised


def panels(rows: Sequence[Row]) -> list[Panel]:
    timed = [row for row in rows if row["side"] == CODEC]
    place = "{section} {dtype} {batch} x {tokens}"
    return [Panel("times as fast as DynamicCache", timed, "{side}", place, "ratio", levels=(1.0,))]


def size_of(args: argparse.Namespace, device: torch.device) -> Size:
    size = QUICK if args.quick else Size()
    if device.type == "cuda" and not args.quick:
        size = replace(size, dtypes=("bfloat16",), steps=16)
    chosen: dict[str, Any] = {name: tuple(getattr(args, name) or ()) for name in ("dtypes", "tokens", "batches")}
    return replace(size, layers=args.layers or size.layers, **{name: values for name, values in chosen.items() if values})


@torch.no_grad()
def main() -> None:
    parser = section_arguments(__doc__, SECTIONS)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), help="default: both; on GPUs bfloat16")
    parser.add_argument("--layers", type=int, help="of the model; default: 28")
    for name in ("tokens", "batches"):
        parser.add_argument(f"--{name}", nargs="+", type=int, help="only these, of steps")
    args = parser.parse_args()
    check_counts(args, ["layers", "tokens", "batches"])
    device = begin_sections(args)
    size = size_of(args, device)
    run = Run(size, device)
    output = Output("SubspaceCache over DynamicCache, times as fast", COLUMNS, SHOWN, bars(size.dtypes), panels)
    run_sections(args, device, {"step": run.step, "prefill": run.prefill, "roofline": run.roofline}, output)


if __name__ == "__main__":
    run_script(main)
