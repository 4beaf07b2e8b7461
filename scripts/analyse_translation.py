"""Looks into translated caches: how errors carry from layer to layer, what bounds them, and where translated states lie.

    python scripts/analyse_translation.py [--producer base] [--consumer tuned] [--csv FILE.csv] [--plot FILE.png]

Translators are fitted first, with and without patched layers, the paper's and the default ones; prompts are other texts. `errors` is
the relative error, in the 2-norm, of the consumer's normalised attention inputs for the tokens that follow a prefix whose keys and values
are the producer's own or translated: the paper's figure 6. `bounds` sets the state of the first such token against what stability
constants allow, alpha and beta of each layer, for all that stays within a tenth of what the consumer's own prefills show: the segmented
bound of the measured errors of the cache, and the same where a patch is taken to reset the state, as in the paper, to the error that is
measured there. Then the most that the log-probability of any token changed, against its bound. `map` is t-SNE of a layer's keys and
values: the producer's, the consumer's, and translated ones.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _common import check_counts, environment, pick_device, prepare, run_script, table, write_table
from _segments_sides import Row
from _translation_analysis import cache_matrix, relative, seen_by, traces_of, tsne
from _translation_timing import RAW
from calibrate_translator import held_out, layers_of, load_model, spaced
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError, require
from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.stability import head_constant, layer_constants, nll_gap_bound, segmented_bound, spectral_norm
from hf_kvcaches.translate.states import State, Tokens, read_states, require_plain_layers, state_of
from hf_kvcaches.translate.translator import CacheTranslator

REUSE, PATCHED, PAPER, PAPER_PATCHED = "reuse", "reuse and patch", "paper's Reuse", "paper's Reuse and Patch"
FIELDS = ("section", "variant", "measure", "layer", "count", "value", "low", "high", "x", "y")
# How far beyond what was seen the constants' domain reaches, as a share.
MARGIN = 0.1


class Analysis:
    """A pair of models, translators for it, and prompts."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.rows = args, list[Row]()
        (producer, one), (consumer, other) = (load_model(name, device) for name in (args.producer, args.consumer))
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

    def errors_and_bounds(self) -> None:
        """Rows of all prompts and variants; layer L is what leaves the last one."""
        length, layers = self.args.length, len(compat.decoder_layers(self.plain)[2])
        wide = copy.deepcopy(self.plain).double()
        traces = [traces_of(wide, ids[:, : length + 1]) for ids in self.prompts]
        constants = [layer_constants(wide, layer, [trace[layer] for trace in traces], margin=MARGIN) for layer in range(layers)]
        alphas, betas = [each.alpha for each in constants], [each.beta for each in constants]
        found: dict[tuple[str, str, int], list[float]] = {}
        for ids in self.prompts:
            own = DynamicCache(config=self.plain.config)
            with torch.no_grad():
                self.plain(input_ids=ids[:, :length], past_key_values=own, logits_to_keep=1)
            held = [cache_matrix(layer, length) for layer in own.layers]
            expected = seen_by(self.plain, ids[:, length:], own)
            head = head_constant(wide, [expected.hidden[layers][:1].double()], margin=MARGIN)
            for name, cache in self.caches(ids).items():
                off = [spectral_norm(cache_matrix(layer, length) - right) for layer, right in zip(cache.layers, held, strict=True)]
                model = self.plain if name == RAW else self.consumer
                seen = seen_by(model, ids[:, length:], cache)
                bound = segmented_bound(alphas, betas, off)
                moved = [float((seen.hidden[at][0] - expected.hidden[at][0]).double().norm()) for at in range(layers + 1)]
                patched = {} if name == RAW else {layer: moved[layer] for layer in self.codecs[name].patched_layers}
                reset = segmented_bound(alphas, betas, off, patched) if patched else []
                for layer in range(layers):
                    found.setdefault((name, "attention input, relative error", layer), []).append(
                        relative(seen.inputs[layer], expected.inputs[layer])
                    )
                    found.setdefault((name, "keys and values, spectral error", layer), []).append(off[layer])
                for layer in range(layers + 1):
                    found.setdefault((name, "state, error", layer), []).append(moved[layer])
                    found.setdefault((name, "state, bound", layer), []).append(bound[layer])
                    if reset:
                        found.setdefault((name, "state, bound if patches reset it", layer), []).append(reset[layer])
                gap = (seen.logits[0].double().log_softmax(-1) - expected.logits[0].double().log_softmax(-1)).abs().max()
                found.setdefault((name, "log-probability, change", layers), []).append(float(gap))
                found.setdefault((name, "log-probability, bound from the state's error", layers), []).append(nll_gap_bound(head, moved[-1]))
                found.setdefault((name, "log-probability, bound", layers), []).append(nll_gap_bound(head, bound[-1]))
        for layer, each in enumerate(constants):
            for measure in ("alpha", "beta", "paper_alpha", "paper_beta"):
                self.rows.append({"section": "constants", "measure": measure, "layer": layer, "value": getattr(each, measure)})
        for (name, measure, layer), values in found.items():
            section = "errors" if measure.startswith(("attention", "keys")) else "bounds"
            row = {"section": section, "variant": name, "measure": measure, "layer": layer, "count": len(values)}
            self.rows.append({**row, "value": statistics.median(values), "low": min(values), "high": max(values)})

    def map(self) -> None:
        """Where a layer's states of the first prompt lie: places, and the distances that t-SNE does not keep."""
        args, ids = self.args, self.prompts[0][:, : self.args.length]
        layers = len(compat.decoder_layers(self.plain)[2])
        layer = layers // 2 if args.layer is None else args.layer
        if not 0 <= layer < layers:
            raise ConfigError.of("--layer", f"0 to {layers - 1}", layer)
        tokens, states = Tokens.of(ids), dict[str, State]()
        for name, model in (("source", self.producer), ("target", self.plain)):
            read_states(model, tokens, lambda index, state, name=name: states.__setitem__(name, state) if index == layer else None)
        rotation = require_plain_layers(compat.decoder_config(self.plain.config))
        for name, cache in self.caches(self.prompts[0]).items():
            if name != RAW:
                held = cache.layers[layer]
                states[name] = state_of(rotation, layer, *(part[:, :, : args.length] for part in (held.keys, held.values)), tokens)
        target = states["target"].pair
        # Each number counts as much as it varies in the consumer, and keys are not drowned by values, nor the other way.
        scale = target.std(0).clamp_min(1e-6)
        some = torch.linspace(0, args.length - 1, min(args.points // len(states), args.length)).long()
        placed = tsne(torch.cat([(state.pair / scale)[some] for state in states.values()]), steps=args.steps)
        for name, where in zip(states, placed.split(len(some)), strict=True):
            away = relative(states[name].pair / scale, target / scale)
            self.rows.append(
                {"section": "map", "variant": name, "measure": "distance from target, relative", "layer": layer, "value": away}
            )
            own = {"section": "map", "variant": name, "measure": "place", "layer": layer}
            self.rows += [{**own, "x": round(x, 3), "y": round(y, 3)} for x, y in where.tolist()]


def show(rows: Sequence[Row]) -> str:
    """A table for each measure: a line for each variant, a column for each layer."""
    tables = []
    for section, measure in dict.fromkeys((row["section"], row["measure"]) for row in rows if "value" in row):
        own = [row for row in rows if (row["section"], row["measure"]) == (section, measure)]
        layers = sorted({row["layer"] for row in own})
        cells = {(row.get("variant", ""), row["layer"]): f"{row['value']:.3g}" for row in own}
        lines = [[name, *(cells.get((name, layer), "") for layer in layers)] for name in dict.fromkeys(name for name, _ in cells)]
        tables.append(table([f"{section}: {measure}, by layer", *map(str, layers)], lines))
    return "\n\n".join(tables)


def write_plot(path: Path, rows: Sequence[Row], patched: Sequence[int]) -> None:
    """Errors by layer, bounds beside what was measured, and the map."""
    require("matplotlib", "plots", "The plot").use("Agg")
    plots = require("matplotlib.pyplot", "plots", "The plot")
    figure, axes = plots.subplots(1, 3, figsize=(20, 6), layout="constrained")
    for axis, measures in ((axes[0], ("attention input, relative error",)), (axes[1], ("state, error", "state, bound"))):
        for measure, style in zip(measures, ("-", "--"), strict=False):
            own = [row for row in rows if row["measure"] == measure]
            for color, name in enumerate(dict.fromkeys(row["variant"] for row in own)):
                mine = sorted((row for row in own if row["variant"] == name), key=lambda row: row["layer"])
                line = {"marker": "o", "linestyle": style, "color": f"C{color}", "label": name if style == "-" else f"{name}, bound"}
                axis.plot([row["layer"] for row in mine], [row["value"] for row in mine], **line)
        axis.set(title=", ".join(measures), xlabel="layer")
    for layer in patched:
        axes[0].axvline(layer, color="black", linestyle=":", linewidth=1)
    axes[1].set_yscale("log")
    places = [row for row in rows if row["measure"] == "place"]
    for name in dict.fromkeys(row["variant"] for row in places):
        mine = [row for row in places if row["variant"] == name]
        axes[2].scatter([row["x"] for row in mine], [row["y"] for row in mine], s=6, label=name)
    axes[2].set(title="keys and values, t-SNE")
    for axis in axes:
        axis.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plots.close(figure)


def parse() -> argparse.Namespace:
    variants = (RAW, REUSE, PATCHED, PAPER, PAPER_PATCHED)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--layer", type=int, help="of the map; default: the one in the middle")
    parser.add_argument("--points", type=int, default=600, help="of the map")
    parser.add_argument("--steps", type=int, default=500, help="of t-SNE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--csv", type=Path, help="write every number here")
    parser.add_argument("--plot", type=Path, help="write a picture here (needs matplotlib)")
    args = parser.parse_args()
    check_counts(args, ["prefixes", "prompts", "length", "behind", "points", "steps"])
    return args


def main() -> None:
    args = parse()
    prepare(args)
    device = pick_device(args.device)
    analysis = Analysis(args, device)
    analysis.errors_and_bounds()
    analysis.map()
    print(show(analysis.rows))
    patched = sorted({layer for codec in analysis.codecs.values() for layer in codec.patched_layers})
    print(f"\n{len(analysis.prompts)} prompts; medians; patched layers: {', '.join(map(str, patched)) or 'none'}")
    if args.csv:
        write_table(args.csv, FIELDS, analysis.rows, environment(device))
    if args.plot:
        write_plot(args.plot, analysis.rows, patched)


if __name__ == "__main__":
    run_script(main)
