"""`hf-kvcaches calibrate`: what is measured once for a model, and saved."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hf_kvcaches.cli.arguments import model_source
from hf_kvcaches.cli.inputs import begin, load, read_lines, read_texts, spaced, token_ids
from hf_kvcaches.cli.tables import show
from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.engines import engine_codec
from hf_kvcaches.errors import ConfigError, require
from hf_kvcaches.segments.calibration import calibrate as calibrate_policy
from hf_kvcaches.translate.fit import TranslatorConfig
from hf_kvcaches.translate.translator import CacheTranslator
from hf_kvcaches.warmstart.calibration import CLOSED, calibrate_gate


def run_calibrate(args: argparse.Namespace) -> int:
    kinds = {"codec": codec, "segments": segments, "warmstart": warmstart, "translator": translator}
    kinds[args.kind](args, begin(args))
    return 0


def codec(args: argparse.Namespace, device: torch.device) -> None:
    rotation = engine_codec.ROTATIONS[args.engine] if args.engine else args.rotation or "aware"
    recent = args.recent if args.recent is not None else 0 if args.engine else 64
    # Where keys are coded with their rotation, codes of positions that no text reached take half as many bytes again.
    length = args.length or (4096 if args.engine == "lmcache" else 512)
    if args.engine:
        if args.rotation not in (None, rotation):
            raise ConfigError.of("--rotation", f"{rotation!r} for {args.engine}", args.rotation, "Leave it out.")
        engine_codec.checkpoint_digest(model_source(args.model))
    model, tokenizer = load(args.model, device, args.dtype)
    texts = read_texts(args.texts, tokenizer, length)
    options = {name: getattr(args, name) for name in ("metric", "max_tokens", "shards")}
    options |= {"bytes_ratio": args.bytes_ratio, "rotation": rotation, "recent": recent, "block": length}
    made, seconds = _timed(KVCodec.calibrate, model, tokenizer, texts, **options)
    if args.engine:
        engine_codec.save(made, args.out, args.engine, model_source(args.model))
    else:
        made.save_pretrained(args.out)
    print(f"{made}\n{made.settings.tokens} tokens of {len(texts)} texts, {seconds:.0f} s; written to {args.out}")


def segments(args: argparse.Namespace, device: torch.device) -> None:
    model, tokenizer = load(args.model, device, args.dtype)
    prompts = [token_ids(text, tokenizer) for [text] in read_lines(args.prompts, "prompt")][: args.requests]
    quantization = KVCodec.from_pretrained(args.codec, model=model) if args.codec is not None else _quantization(args)
    bounds = {"bound": args.bound, "worst": args.worst, "least_same": args.least_same}
    policy, seconds = _timed(calibrate_policy, model, tokenizer, prompts, **bounds, asked=args.asked, quantization=quantization)
    policy.save_pretrained(args.out)
    print(f"{_measured(policy.measured)}\n\n{seconds:.0f} s; written to {args.out}: {policy}\n")


def warmstart(args: argparse.Namespace, device: torch.device) -> None:
    pairs = [(source, target) for source, target in read_lines(args.pairs, "source", "target")]
    model, tokenizer = load(args.model, device, args.dtype)
    library = {"quantization": _quantization(args)}
    bounds = {"bound": args.bound, "worst": args.worst, "following": args.following}
    gate, seconds = _timed(calibrate_gate, model, tokenizer, library, pairs, **bounds)
    gate.save_pretrained(args.out)
    reusable = f"{gate.reusable:.4f}" if gate.reusable < CLOSED else f"{gate.reusable:g}, which refuses everything"
    print(f"{_measured(gate.measured)}\n\n{len(pairs)} pairs, {seconds:.0f} s; written to {args.out}")
    print(f"reusable: {reusable}\nrepair: {gate.repair:g}")


def translator(args: argparse.Namespace, device: torch.device) -> None:
    state = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # started by `accelerate launch` or torchrun
        state = require("accelerate", "distributed", "A calibration in several processes").PartialState()
        device = state.device if args.device == "auto" else device
    first = state is None or state.is_main_process
    (producer, one), (consumer, other) = (load(name, device, args.dtype) for name in (args.producer, args.consumer))
    texts = spaced(read_texts(args.texts, other, args.length), args.prefixes)
    options = {
        "payload": args.payload,
        "recompute_layers": int(args.recompute_layers) if args.recompute_layers.isdigit() else args.recompute_layers,
        "config": TranslatorConfig(layers_per_code=args.layers_per_code, metric=args.metric, memory=args.memory),
        "max_length": max(args.length, 8),
    }
    made, seconds = _timed(CacheTranslator.fit, producer, consumer, (one, other), texts, progress=first, **options)
    if first:
        made.save_pretrained(args.out)
        print(f"{made.describe_calibration()}\n\n{len(texts)} texts, {seconds:.1f} s; written to {args.out}")


def _timed(calibrate: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, float]:
    """What a calibration made, and its seconds."""
    began = time.perf_counter()
    return calibrate(*args, **options), time.perf_counter() - began


def _quantization(args: argparse.Namespace) -> Any:
    return None if args.quantization == "none" else args.quantization


def _measured(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table of the settings that a calibration measured, the chosen ones marked."""
    as_text = lambda value: "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)  # noqa: E731
    texts = [{name: as_text(value) for name, value in row.items()} | {"chosen": "*" if row["chosen"] else ""} for row in rows]
    names = [name for row in texts[:1] for name in row if name != "chosen"]
    return show(texts, {"": "{chosen}", **{name: f"{{{name}}}" for name in names}})
