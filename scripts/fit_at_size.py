"""Plans a translator's fit for models of some shape, and runs it on random weights: how much memory and time it takes.

    python scripts/fit_at_size.py --dry-run                              # an 8B pair: bytes, passes, seconds; nothing is made
    python scripts/fit_at_size.py --size 28x1024 [--texts 4] [--length 512] [--memory 2GiB]

A fit keeps no states, so its memory follows from the models' shapes alone. Seconds of a dry run are operations by the speed of this
machine's matrix products, which is measured first; the models' own passes over the texts are stated apart. Random weights have no
structure to be found, so only the course of the fit means something.
"""

from __future__ import annotations

import argparse
import copy
import resource
import time
from typing import Any

import torch
from shared.cli import run_script
from shared.models import random_ids
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvcaches import CacheTranslator, TranslatorConfig
from hf_kvcaches.stores.catalog import bytes_of_size
from hf_kvcaches.translate.plan import FitPlan, Widths

# Layers, hidden, intermediate, query heads, KV heads, head size, vocabulary.
SIZES = {"8b": (32, 4096, 14336, 32, 8, 128, 128256), "28x1024": (28, 1024, 3072, 16, 8, 64, 32000), "small": (4, 64, 128, 4, 2, 16, 256)}


def speed(dtype: torch.dtype) -> float:
    """Multiplications of a second."""
    x = torch.randn(1024, 1024, dtype=dtype)
    x @ x
    began = time.perf_counter()
    for _ in range(8):
        x @ x
    return 8 * 1024**3 / (time.perf_counter() - began)


def plan(args: argparse.Namespace) -> FitPlan:
    """The plan of a fit between two models of a size."""
    layers, hidden, _, _, heads, dim, _ = SIZES[args.size]
    width = 2 * heads * dim
    widths = Widths(dict.fromkeys(range(layers), width), dict.fromkeys(range(layers), width), hidden, hidden)
    return FitPlan.of(widths, range(layers), [0], TranslatorConfig().layers_of_width(width), bytes_of_size("memory", args.memory))


def show_plan(args: argparse.Namespace) -> None:
    """Print what the fit would take."""
    own, tokens = plan(args), args.texts * args.length
    layers, hidden, intermediate, queries, heads, dim, vocabulary = SIZES[args.size]
    weights = layers * (hidden * dim * 2 * (queries + heads) + 3 * hidden * intermediate)
    # Both models read the texts; a quarter of them is predicted, there and back.
    reading = len(own.passes) * 2 * tokens * weights + tokens / 4 * 2 * (weights + hidden * vocabulary)
    groups, width = [group for groups in own.passes for group in groups], 2 * heads * dim
    sizes = [len(group.layers) * width for group in groups]
    products = sum(2 * size**2 + 4 * hidden * size for size in sizes) + len(own.passes) * 3 * hidden**2
    solving = sum(12 * size**3 + 10 * hidden**2 * size for size in sizes)
    single, double = speed(torch.float32), speed(torch.float64)
    print(f"{args.size}: {layers} layers of {hidden}, {heads} KV heads of {dim}; {args.texts} texts of {args.length} tokens")
    print(f"{len(own.passes)} passes over the texts, {own.bytes / 2**30:.2f} GiB beside the models, {own.sample} tokens sampled")
    seconds = products * tokens / single, solving / double, reading / single
    print("on one thread of this machine: products {:.0f} s, solving {:.0f} s, the models' own passes {:.0f} s".format(*seconds))


def run(args: argparse.Namespace) -> None:
    """Fit between two models with random weights."""
    layers, hidden, intermediate, queries, heads, dim, vocabulary = SIZES[args.size]
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "head_dim": dim}
    config = LlamaConfig(**sizes, num_attention_heads=queries, num_key_value_heads=heads, vocab_size=vocabulary)
    torch.manual_seed(0)
    producer = LlamaForCausalLM(config).eval()
    consumer = copy.deepcopy(producer)
    with torch.no_grad():
        for weight in consumer.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape) if weight.ndim > 1 else 0
    texts = random_ids(vocabulary, args.texts, args.length, seed=1).tolist()
    before, began, used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter(), time.process_time()
    options = TranslatorConfig(memory=args.memory, metric=args.metric)
    translator = CacheTranslator.fit(producer, consumer, None, texts, config=options, payload=args.payload)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stages = ", ".join(f"{stage} {spent:.1f}" for stage, spent in translator.settings.seconds.items())
    print(f"{seconds:.1f} s ({used:.1f} s of processor time): {stages}")
    own, grown = plan(args), (peak - before) / 2**20
    print(f"{len(own.passes)} passes; the process grew by {grown:.2f} GiB, planned {own.bytes / 2**30:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--dry-run", action="store_true", help="plan only")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--length", type=int, default=512, help="of a text, in tokens")
    parser.add_argument("--memory", default="16GiB", help="that the sums may take")
    parser.add_argument("--metric", choices=("loss", "plain"), default="loss")
    parser.add_argument("--payload", type=float, default=0.025)
    args = parser.parse_args()
    show_plan(args)
    if not args.dry_run:
        run(args)


if __name__ == "__main__":
    run_script(main)
