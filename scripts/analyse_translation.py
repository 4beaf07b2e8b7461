"""Measures how errors of translated caches carry from layer to layer.

    python scripts/analyse_translation.py [--producer base] [--consumer tuned] [--csv FILE.csv] [--plot FILE.png]

Translators are fitted first, with and without patched layers, the paper's and the default ones; prompts are other texts. Printed is the
relative error, in the 2-norm, of the consumer's normalised attention inputs for the tokens that follow a prefix whose keys and values are
the producer's own or translated: the paper's figure 6.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from calibrate_translator import held_out
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.plot import Panel, draw, title_of
from shared.results import Row, environment, table, write_csv
from torch import Tensor, nn
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.cli.calibrate_translator import layers_of
from hf_kvcaches.cli.texts import spaced
from hf_kvcaches.core.decoder import attention_module, decoder_layers
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.config import TranslatorConfig
from hf_kvcaches.translate.translator import CacheTranslator

RAW, REUSE, PATCHED = "raw keys and values", "reuse", "reuse and patch"
PAPER, PAPER_PATCHED = "paper's Reuse", "paper's Reuse and Patch"
VARIANTS = (RAW, REUSE, PATCHED, PAPER, PAPER_PATCHED)


@torch.no_grad()
def attention_inputs(model: Any, ids: Tensor, cache: Any) -> list[Tensor]:
    """Each layer's normalised attention input, (tokens, hidden), while a model reads tokens behind a cache."""
    inputs: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append((args[0] if args else kwargs["hidden_states"])[0])

    modules: list[Any] = [attention_module(layer) for layer in decoder_layers(model)[2]]
    handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    try:
        model(input_ids=ids, past_key_values=cache)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def relative(ours: Tensor, expected: Tensor) -> float:
    """The size of the error, as a share of what is expected."""
    return float((ours - expected).double().norm() / expected.double().norm())


class Analysis:
    """A pair of models, translators for it, and prompts."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args = args
        (producer, one), (consumer, other) = (load(name, device) for name in (args.producer, args.consumer))
        self.producer, self.consumer = compat.base_model(producer), compat.base_model(consumer)
        # The switched attention of other caches has no part in what is compared with.
        self.plain = copy.deepcopy(self.consumer)
        whole = args.length + args.behind
        texts = [ids for ids in held_out(other, whole) if len(ids) == whole]
        if len(texts) <= args.prompts:
            wanted = f"fewer than the {len(texts)} texts of {whole} tokens that there are"
            raise ConfigError.of("--prompts", wanted, args.prompts, "Ask for fewer or shorter ones.")
        self.prompts = [torch.tensor([ids], device=device) for ids in texts[-args.prompts :]]
        layers, single = layers_of(args.patch_layers), TranslatorConfig(metric=args.metric, layers_per_code=1)
        paper = {"payload": 0.1875, "config": TranslatorConfig(method="paper", aligner=args.aligner)}
        options: dict[str, dict[str, Any]] = {
            REUSE: {"config": TranslatorConfig(metric=args.metric)},
            PATCHED: {"config": single, "patch_layers": layers},
            PAPER: paper,
            PAPER_PATCHED: {**paper, "patch_layers": layers},
        }
        fit = (self.producer, self.consumer, (one, other), spaced(texts[: -args.prompts], args.prefixes))
        self.codecs = {name: CacheTranslator.fit(*fit, progress=False, **chosen) for name, chosen in options.items()}

    def cache(self, variant: str, ids: Tensor) -> Any:
        """A cache that holds a prompt but for the tokens that follow the prefix."""
        # One token more, which the caches leave to the model.
        prefix = ids[:, : self.args.length + 1]
        if variant == RAW:
            return self._read(self.producer, prefix[:, :-1])
        codec = self.codecs[variant]
        cache = TranslatedCache(self.consumer, codec, codec.encode(self.producer, prefix))
        cache.prefill(prefix)
        return cache

    @torch.no_grad()
    def _read(self, model: Any, ids: Tensor) -> DynamicCache:
        cache = DynamicCache(config=model.config)
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        return cache

    def measure(self) -> list[Row]:
        """A row for each variant and layer, over all prompts."""
        errors: dict[tuple[str, int], list[float]] = defaultdict(list)
        for ids in self.prompts:
            prefix, rest = ids[:, : self.args.length], ids[:, self.args.length :]
            expected = attention_inputs(self.plain, rest, self._read(self.plain, prefix))
            for variant in VARIANTS:
                model = self.plain if variant == RAW else self.consumer
                inputs = attention_inputs(model, rest, self.cache(variant, ids))
                for layer, (ours, right) in enumerate(zip(inputs, expected, strict=True)):
                    errors[variant, layer].append(relative(ours, right))
        return [
            {"variant": variant, "layer": layer, "count": len(values), "value": statistics.median(values)}
            | {"low": min(values), "high": max(values)}
            for (variant, layer), values in errors.items()
        ]


def report(rows: Sequence[Row]) -> str:
    """A line for each variant, a column for each layer."""
    layers = sorted({row["layer"] for row in rows})
    cells = {(row["variant"], row["layer"]): f"{row['value']:.3g}" for row in rows}
    lines = [[name, *(cells[name, layer] for layer in layers)] for name in VARIANTS]
    return table(["relative error of the attention input, by layer", *map(str, layers)], lines)


def panels(rows: Sequence[Row]) -> list[Panel]:
    return [Panel("attention input, relative error", rows, "{variant}", "layer", "value", unit="relative error")]


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "device", "csv", "plot")
    parser.add_argument("--producer", default="base", help="a folder, a hub id, base, tuned or lora")
    parser.add_argument("--consumer", default="tuned", help="a folder, a hub id, base, tuned or lora")
    parser.add_argument("--patch-layers", default="2", help="of the patched variants: auto, or numbers as in 1,3")
    parser.add_argument("--aligner", choices=("ridge", "mlp"), default="mlp", help="of the paper's patched layers")
    parser.add_argument("--metric", choices=("loss", "attention", "plain"), default="loss", help="of the default method")
    parser.add_argument("--prefixes", type=int, default=64, help="texts to fit to")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="of a translated prefix, in tokens")
    parser.add_argument("--behind", type=int, default=32, help="tokens that follow it")
    args = parser.parse_args()
    check_counts(args, ["prefixes", "prompts", "length", "behind"])
    return args


def main() -> None:
    args = parse()
    device = begin(args)
    analysis = Analysis(args, device)
    rows = analysis.measure()
    patched = sorted({layer for codec in analysis.codecs.values() for layer in codec.patched_layers})
    print(f"{report(rows)}\n\n{len(analysis.prompts)} prompts; medians; patched layers: {', '.join(map(str, patched)) or 'none'}")
    if args.csv:
        write_csv(args.csv, rows, environment(device))
    if args.plot:
        draw(args.plot, title_of(device, f"{args.producer} to {args.consumer}"), panels(rows))


if __name__ == "__main__":
    run_script(main)
