"""Looks into translated caches: how errors carry from layer to layer, and what bounds them.

    python scripts/analyse_translation.py [--producer base] [--consumer tuned] [--csv FILE.csv] [--plot FILE.png]

Translators are fitted first, with and without patched layers, the paper's and the default ones; prompts are other texts. `errors` is
the relative error, in the 2-norm, of the consumer's normalised attention inputs for the tokens that follow a prefix whose keys and values
are the producer's own or translated: the paper's figure 6. `bounds` sets the state of the first such token against what stability
constants allow, alpha and beta of each layer, for all that stays within a tenth of what the consumer's own prefills show: the segmented
bound of the measured errors of the cache, and the same where a patch is taken to reset the state, as in the paper, to the error that is
measured there. Then the most that the log-probability of any token changed, against its bound.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from _stability import LayerTrace, head_constant, layer_constants, nll_gap_bound, segmented_bound, spectral_norm
from calibrate_translator import held_out, layers_of, spaced
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.plot import Panel, draw, title_of
from shared.results import Row, environment, rows_where, table, write_csv
from torch import Tensor, nn
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.translator import CacheTranslator

RAW, REUSE, PATCHED = "raw keys and values", "reuse", "reuse and patch"
PAPER, PAPER_PATCHED = "paper's Reuse", "paper's Reuse and Patch"
COLUMNS = ("section", "variant", "measure", "layer", "count", "value", "low", "high")
# How far beyond what was seen the constants' domain reaches, as a share.
MARGIN = 0.1


@dataclass
class Seen:
    """What a model's layers had while it read tokens, by layer."""

    inputs: dict[int, Tensor] = field(default_factory=dict)  # of attention, normalised, (tokens, hidden)
    hidden: dict[int, Tensor] = field(default_factory=dict)  # of the layer, (tokens, hidden); the last one is what leaves the last layer
    middle: dict[int, Tensor] = field(default_factory=dict)  # of the second norm, (tokens, hidden)
    projected: dict[int, Tensor] = field(default_factory=dict)  # what the first projection gave: queries are in it, (tokens, width)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))  # (tokens, vocabulary)


@contextmanager
def watching(model: nn.Module, seen: Seen) -> Iterator[None]:
    """While open, a pass over one prompt leaves here what its layers had. Layers of other kinds than Llama's or GPT-2's lack some of it."""
    layers = compat.decoder_layers(model)[2]

    def before(kept: dict[int, Tensor], index: int) -> Callable[..., None]:
        def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept[index] = (args[0] if args else kwargs["hidden_states"])[0].detach().clone()

        return look

    def after(kept: dict[int, Tensor], index: int) -> Callable[..., None]:
        def look(_: nn.Module, args: Any, out: Any) -> None:
            kept[index] = (out[0] if isinstance(out, tuple) else out)[0].detach().clone()

        return look

    handles = []
    for index, layer in enumerate(layers):
        attention: Any = compat.attention_module(layer)
        norm = getattr(layer, "post_attention_layernorm", getattr(layer, "ln_2", None))
        inward = next((getattr(attention, name) for name in ("q_proj", "qkv_proj", "c_attn") if hasattr(attention, name)), None)
        handles.append(layer.register_forward_pre_hook(before(seen.hidden, index), with_kwargs=True))
        handles.append(attention.register_forward_pre_hook(before(seen.inputs, index), with_kwargs=True))
        handles += [] if norm is None else [norm.register_forward_pre_hook(before(seen.middle, index), with_kwargs=True)]
        handles += [] if inward is None else [inward.register_forward_hook(after(seen.projected, index))]
    handles.append(layers[-1].register_forward_hook(after(seen.hidden, len(layers))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def seen_by(model: Any, ids: Tensor, cache: Any) -> Seen:
    """What layers have while a model reads tokens behind a cache."""
    seen = Seen()
    with watching(model, seen):
        seen.logits = model(input_ids=ids, past_key_values=cache).logits[0]
    return seen


def traces_of(model: Any, ids: Tensor) -> list[LayerTrace]:
    """Each layer's trace of a prompt, for `layer_constants`."""
    cache = DynamicCache(config=model.config)
    seen, traces = seen_by(model, ids, cache), []
    for index, layer in enumerate(cache.layers):
        keys, values = (part[0].transpose(0, 1) for part in (layer.keys, layer.values))
        queries = seen.projected[index].unflatten(-1, (-1, keys.shape[-1]))[:, : model.config.num_attention_heads]
        traces.append(LayerTrace(seen.hidden[index], seen.middle[index], queries, keys, values))
    return traces


def relative(ours: Tensor, expected: Tensor) -> float:
    """The error's size by that of what is expected."""
    return float((ours - expected).double().norm() / expected.double().norm())


def cache_matrix(layer: Any, tokens: int) -> Tensor:
    """A layer's keys and values beside each other, keys as attention sees them, (tokens, width), float64."""
    return torch.cat([part[0, :, :tokens].transpose(0, 1).flatten(1) for part in (layer.keys, layer.values)], 1).double()


class Analysis:
    """A pair of models, translators for it, and prompts."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.rows = args, list[Row]()
        (producer, one), (consumer, other) = (load(name, device) for name in (args.producer, args.consumer))
        self.producer, self.consumer = compat.base_model(producer), compat.base_model(consumer)
        # The switched attention of other caches has no part in what is compared with.
        self.plain = copy.deepcopy(self.consumer)
        whole = args.length + args.behind
        texts = [ids for ids in held_out(other, whole) if len(ids) == whole]
        self.prompts = [torch.tensor([ids], device=device) for ids in texts[-args.prompts :]]
        if len(texts) <= args.prompts:
            wanted = f"fewer than the {len(texts)} texts of {whole} tokens that there are"
            raise ConfigError.of("--prompts", wanted, args.prompts, "Ask for fewer or shorter ones.")
        fitted = spaced(texts[: -args.prompts], args.prefixes)
        self.codecs: dict[str, CacheTranslator] = {}
        layers = layers_of(args.patch_layers)
        paper: dict[str, Any] = {"method": "paper", "payload": 0.25, "metric": "plain"}
        options: dict[str, dict[str, Any]] = {
            REUSE: {"metric": args.metric, "patch_layers": None},
            PATCHED: {"metric": args.metric, "patch_layers": layers},
            PAPER: {**paper, "patch_layers": None},
            PAPER_PATCHED: {**paper, "patch_layers": layers, "aligner": args.aligner},
        }
        for name, chosen in options.items():
            if name in args.variants:
                self.codecs[name] = CacheTranslator.fit(self.producer, self.consumer, (one, other), fitted, progress=False, **chosen)

    def caches(self, ids: torch.Tensor) -> dict[str, Any]:
        """A cache of each kind that holds a prompt but for its last tokens."""
        # One token more, which the caches leave to the model.
        prefix = ids[:, : self.args.length + 1]
        made: dict[str, Any] = {}
        if RAW in self.args.variants:
            made[RAW] = DynamicCache(config=self.producer.config)
            with torch.no_grad():
                self.producer(input_ids=prefix[:, :-1], past_key_values=made[RAW], logits_to_keep=1)
        for name, codec in self.codecs.items():
            made[name] = TranslatedCache(self.consumer, codec, codec.encode(self.producer, prefix))
            made[name].prefill(prefix)
        return made

    def measure(self) -> None:
        """Rows of all prompts and variants; layer L is what leaves the last one."""
        length, layers = self.args.length, len(compat.decoder_layers(self.plain)[2])
        wide = copy.deepcopy(self.plain).double()
        traces = [traces_of(wide, ids[:, : length + 1]) for ids in self.prompts]
        constants = [layer_constants(wide, layer, [trace[layer] for trace in traces], margin=MARGIN) for layer in range(layers)]
        alphas, betas = [layer.alpha for layer in constants], [layer.beta for layer in constants]
        numbers: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        for ids in self.prompts:
            own = DynamicCache(config=self.plain.config)
            with torch.no_grad():
                self.plain(input_ids=ids[:, :length], past_key_values=own, logits_to_keep=1)
            exact = [cache_matrix(layer, length) for layer in own.layers]
            expected = seen_by(self.plain, ids[:, length:], own)
            head = head_constant(wide, [expected.hidden[layers][:1].double()], margin=MARGIN)
            for name, cache in self.caches(ids).items():
                off = [spectral_norm(cache_matrix(layer, length) - right) for layer, right in zip(cache.layers, exact, strict=True)]
                seen = seen_by(self.plain if name == RAW else self.consumer, ids[:, length:], cache)
                bound = segmented_bound(alphas, betas, off)
                moved = [float((seen.hidden[at][0] - expected.hidden[at][0]).double().norm()) for at in range(layers + 1)]
                patched = {} if name == RAW else {layer: moved[layer] for layer in self.codecs[name].patched_layers}
                by_layer = {
                    "attention input, relative error": [relative(seen.inputs[at], expected.inputs[at]) for at in range(layers)],
                    "keys and values, spectral error": off,
                    "state, error": moved,
                    "state, bound": bound,
                    "state, bound if patches reset it": segmented_bound(alphas, betas, off, patched) if patched else [],
                }
                for measure, values in by_layer.items():
                    for layer, value in enumerate(values):
                        numbers[name, measure, layer].append(value)
                gap = (seen.logits[0].double().log_softmax(-1) - expected.logits[0].double().log_softmax(-1)).abs().max()
                numbers[name, "log-probability, change", layers].append(float(gap))
                numbers[name, "log-probability, bound from the state's error", layers].append(nll_gap_bound(head, moved[-1]))
                numbers[name, "log-probability, bound", layers].append(nll_gap_bound(head, bound[-1]))
        for layer, constant in enumerate(constants):
            for measure in ("alpha", "beta", "paper_alpha", "paper_beta"):
                self.rows.append({"section": "constants", "measure": measure, "layer": layer, "value": getattr(constant, measure)})
        for (name, measure, layer), values in numbers.items():
            section = "errors" if measure.startswith(("attention", "keys")) else "bounds"
            row = {"section": section, "variant": name, "measure": measure, "layer": layer, "count": len(values)}
            self.rows.append({**row, "value": statistics.median(values), "low": min(values), "high": max(values)})


def report(rows: Sequence[Row]) -> str:
    """A table for each measure: a line for each variant, a column for each layer."""
    tables = []
    for section, measure in dict.fromkeys((row["section"], row["measure"]) for row in rows):
        group = rows_where(rows, section=section, measure=measure)
        layers = sorted({row["layer"] for row in group})
        cells = {(row.get("variant", ""), row["layer"]): f"{row['value']:.3g}" for row in group}
        lines = [[name, *(cells.get((name, layer), "") for layer in layers)] for name in dict.fromkeys(name for name, _ in cells)]
        tables.append(table([f"{section}: {measure}, by layer", *map(str, layers)], lines))
    return "\n\n".join(tables)


def parse() -> argparse.Namespace:
    variants = (RAW, REUSE, PATCHED, PAPER, PAPER_PATCHED)
    parser = arguments(__doc__, "device", "csv", "plot")
    parser.add_argument("--producer", default="base", help="a folder, a hub id, base, tuned or lora")
    parser.add_argument("--consumer", default="tuned", help="likewise")
    parser.add_argument("--variants", nargs="+", choices=variants, default=variants, help="only these")
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
    analysis.measure()
    rows = analysis.rows
    print(report(rows))
    patched = sorted({layer for codec in analysis.codecs.values() for layer in codec.patched_layers})
    print(f"\n{len(analysis.prompts)} prompts; medians; patched layers: {', '.join(map(str, patched)) or 'none'}")
    if args.csv:
        write_csv(args.csv, rows, environment(device), COLUMNS)
    if args.plot:
        measures = ("attention input, relative error", "state, error", "state, bound")
        panels = [Panel(name, rows_where(rows, measure=name), "{variant}", "layer", "value", log="y") for name in measures]
        draw(args.plot, title_of(device, f"{args.producer} to {args.consumer}"), panels)


if __name__ == "__main__":
    run_script(main)
