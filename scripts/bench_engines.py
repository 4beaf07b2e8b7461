"""What the plug-ins for vLLM and LMCache cost and lose on a CPU: bytes, quality and speed of a prompt's keys and values.

    python scripts/bench_engines.py --model .models/smollm2 --text FILE --vllm FOLDER --lmcache FOLDER [--engine FOLDER] [--csv FILE]

`make engines` makes the environment. The folders are what `hf-kvcaches calibrate codec --for vllm` and `--for lmcache` write; other shares
of the bytes are made from them. Prompts of 1,024 tokens are stored and read in chunks of 256, and the next 256 tokens are compared with
those after the exact prompt; so are answers about needles in contexts of 1,000 tokens. `--engine FOLDER` measures first tokens of vLLM in
place of that, with an empty store there.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from shared.cli import arguments
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_kvcaches.cli.prompts import needle_prompts
from hf_kvcaches.cli.suite import answers
from hf_kvcaches.cli.tables import write_csv
from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.engines.chunks import ChunkCoder, States
from hf_kvcaches.engines.engine_codec import EngineCodec
from hf_kvcaches.evaluate.measures import divergence, losses

PROMPT, FOLLOWING, CHUNK = 1024, 256, 256
RATIOS = (0.25, 0.125, 0.0625)
SECONDS = {"codec": 0.0}  # of packing and unpacking alone
Encode = Callable[[States, int], tuple[Any, int]]
Decode = Callable[[Any, int, States], States]
Prompt = tuple[torch.Tensor, States, torch.Tensor]  # ids, keys and values of the first ones, logits of the others
NeedleTest = tuple[States, list[tuple[list[int], list[int]]]]  # keys and values of a context, and questions with their answers


def cast(dtype: torch.dtype) -> tuple[Encode, Decode]:
    encode = lambda states, first: ([side.to(dtype) for side in states], dtype.itemsize * sum(side.numel() for side in states))  # noqa: E731
    return encode, lambda sides, first, like: tuple(side.float() for side in sides)


def timed(name: str) -> None:
    """Have all codecs count the seconds of a processor that one of their methods takes."""
    call = getattr(KVCodec, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        result = call(*args, **kwargs)
        SECONDS["codec"] += time.process_time() - began
        return result

    setattr(KVCodec, name, counted)


class Side(NamedTuple):
    """What is compared."""

    name: str
    encode: Encode
    decode: Decode


def stacked(layers: Iterable[States]) -> States:
    keys, values = (torch.stack(side) for side in zip(*layers, strict=True))
    return keys, values


def connector(coder: ChunkCoder) -> tuple[Encode, Decode]:
    def encode(states: States, first: int) -> tuple[Any, int]:
        (blob,) = coder.encode(states, first)
        exact = sum(tensor.numel() * 2 for name, tensor in blob.items() if name.startswith("first"))
        return blob, blob["codes"].nbytes + blob["sizes"].nbytes + exact

    return encode, lambda blob, first, like: stacked(coder.decode([blob], first, 0, torch.device("cpu")))


def serde(own: Any) -> tuple[Encode, Decode]:
    def chunk_of(states: States) -> torch.Tensor:
        return torch.stack([side.transpose(1, 2).flatten(2) for side in states])

    key = SimpleNamespace(model_name="model")

    def encode(states: States, first: int) -> tuple[Any, int]:
        chunk = chunk_of(states).bfloat16()
        size = own.estimate_serialized_size(SimpleNamespace(shapes=[chunk.shape], dtypes=[chunk.dtype]))
        buffer = SimpleNamespace(tensor=torch.zeros(size, dtype=torch.uint8))
        return buffer, own.serialize(SimpleNamespace(tensor=chunk), buffer, key)

    def decode(buffer: Any, first: int, like: States) -> States:
        found = SimpleNamespace(tensor=torch.empty_like(chunk_of(like).bfloat16()))
        own.deserialize(buffer, found, key)
        keys, values = found.tensor.float().unflatten(-1, (like[0].shape[1], -1)).transpose(2, 3)
        return keys, values

    return encode, decode


def sides(args: argparse.Namespace, config: Any) -> Iterator[Side]:
    yield Side("exact, bfloat16", *cast(torch.bfloat16))
    yield Side("fp8 (e4m3)", *cast(torch.float8_e4m3fn))
    codec = EngineCodec.load(args.vllm, "vllm").codec
    for ratio in RATIOS:
        yield Side(f"connector, {ratio:g}", *connector(ChunkCoder(codec.at(ratio), config, CHUNK)))
    if args.lmcache:
        from hf_kvcaches.engines.lmcache import CodecSerde

        codec = EngineCodec.load(args.lmcache, "lmcache").codec
        for ratio in RATIOS:
            yield Side(f"serde, {ratio:g}", *serde(CodecSerde(codec.at(ratio), "model")))


@torch.no_grad()
def measure(model: Any, prompts: list[Prompt], needles: list[NeedleTest], side: Side) -> dict[str, float]:
    """Bytes as a share of those in 16 bits, what is lost, and MB of exact keys and values in 16 bits a second and thread."""
    totals = {"bytes": 0, "exact": 0, "encode": 0.0, "decode": 0.0}
    SECONDS["codec"] = 0.0

    def read(states: States) -> DynamicCache:
        """Keys and values of a prompt, chunk by chunk, as they come back."""
        found = []
        for start in range(0, states[0].shape[2], CHUNK):
            part = states[0][:, :, start : start + CHUNK], states[1][:, :, start : start + CHUNK]
            began = time.process_time()
            coded, size = side.encode(part, start)
            between = time.process_time()
            found.append(side.decode(coded, start, part))
            totals["decode"] += time.process_time() - between
            totals["encode"] += between - began
            totals["bytes"] += size
            totals["exact"] += sum(numbers.numel() * 2 for numbers in part)
        cache = DynamicCache(config=model.config)
        for layer in range(len(states[0])):
            cache.update(*(torch.cat([part[which][layer] for part in found], 1)[None] for which in range(2)), layer)
        return cache

    right = [answer.matches for states, questions in needles for answer in answers(model, read(states), questions)]
    kls, nats = [], []
    for ids, states, reference in prompts:
        logits = model(ids[:, PROMPT:], past_key_values=read(states)).logits[0]
        kls.append(float(divergence(reference, logits).mean()))
        nats.append(float(losses(logits[:-1], ids[0, PROMPT + 1 :]).mean()))
    return {
        "share of bytes": totals["bytes"] / totals["exact"],
        "KL": statistics.mean(kls),
        "perplexity": float(torch.tensor(statistics.mean(nats)).exp()),
        "needles": sum(right),
        "of needles": len(right),
        "encode MB/s": totals["exact"] / totals["encode"] / 1e6,
        "decode MB/s": totals["exact"] / totals["decode"] / 1e6,
        "the codec's share of this time": SECONDS["codec"] / (totals["encode"] + totals["decode"]) or None,
    }


def engine(args: argparse.Namespace, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Seconds to the first token in a process of vLLM's, cold and then from the store, and how many tokens came from there."""
    from vllm import LLM, SamplingParams

    transfer = {"kv_connector": "CodecConnector", "kv_connector_module_path": "hf_kvcaches.engines.vllm", "kv_role": "kv_both"}
    transfer |= {"kv_load_failure_policy": "recompute"}
    transfer["kv_connector_extra_config"] = {"codec": args.vllm, "store": f"disk:{args.engine}", "timeout": 60}
    sizes = {"max_model_len": 2304, "max_num_seqs": 4, "block_size": 128}
    llm = LLM(args.model, dtype="float32", enforce_eager=True, enable_prefix_caching=False, kv_transfer_config=transfer, **sizes)
    for number, ids in enumerate([[3, 4, 5], *prompts, *prompts]):  # the first pass of a process is slow
        if number == 1 + len(prompts):
            time.sleep(10)  # chunks are stored in the background
        began = time.perf_counter()
        (done,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        yield {"tokens": len(ids), "from the store": done.num_cached_tokens, "seconds": time.perf_counter() - began}


@torch.no_grad()
def states_of(model: Any, ids: torch.Tensor) -> tuple[States, DynamicCache]:
    """Keys and values of a prompt, (layers, kv_heads, tokens, head_dim), and the cache that has them."""
    cache = model(ids, logits_to_keep=1).past_key_values
    keys, values = (torch.stack([getattr(layer, side)[0] for layer in cache.layers]) for side in ("keys", "values"))
    return (keys, values), cache


@torch.no_grad()
def needle_tests(model: Any, tokenizer: Any, prose: str, contexts: int) -> list[NeedleTest]:
    """Contexts of about 1,000 tokens, and those of their questions that the exact prompt answers."""
    tests = []
    for prompt in needle_prompts(tokenizer, contexts, "digits", 4, tokens=1000, seed=1, prose=prose):
        states, cache = states_of(model, torch.tensor([prompt.context]))
        asked = prompt.asked[:-1]  # the last one is the continuation
        known = [answer.matches for answer in answers(model, cache, asked)]
        tests.append((states, list(itertools.compress(asked, known))))
    return tests


def main() -> None:
    parser = arguments(__doc__, "threads")
    for name in ("model", "vllm"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--lmcache")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--contexts", type=int, default=12, help="of four needles each")
    parser.add_argument("--engine", type=Path, metavar="FOLDER", help="of a store that vLLM fills and then reads")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    args.threads = args.threads or 1
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = args.text.read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    if args.engine:
        print(*engine(args, [ids[number * 2000 :][:2000].tolist() for number in range(2)]), sep="\n")
        return
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    prompts, rows = list[Prompt](), []
    for start in range(0, args.prompts * 2000, 2000):
        prompt = ids[None, start : start + PROMPT + FOLLOWING]
        states, cache = states_of(model, prompt[:, :PROMPT])
        with torch.no_grad():
            prompts.append((prompt, states, model(prompt[:, PROMPT:], past_key_values=cache).logits[0]))
    needles = needle_tests(model, tokenizer, text, args.contexts)
    timed("pack")
    timed("unpack")
    for side in sides(args, model.config):
        rows.append({"": side.name} | measure(model, prompts, needles, side))
        print(side.name, {name: round(value, 4) for name, value in list(rows[-1].items())[1:] if value is not None}, flush=True)
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
