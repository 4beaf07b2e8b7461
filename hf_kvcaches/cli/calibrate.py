"""`hf-kvcaches calibrate`: what is measured once for a model, and saved."""

from __future__ import annotations

import argparse
import time

from hf_kvcaches.cli import calibrate_segments, calibrate_translator, calibrate_warmstart
from hf_kvcaches.cli.options import begin, load, model_source
from hf_kvcaches.cli.texts import read_texts
from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.engines import engine_codec
from hf_kvcaches.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    calibrators = {
        "codec": calibrate_codec,
        "segments": calibrate_segments.run,
        "warmstart": calibrate_warmstart.run,
        "translator": calibrate_translator.run,
    }
    calibrators[args.kind](args)
    return 0


def calibrate_codec(args: argparse.Namespace) -> None:
    device = begin(args)
    rotation = engine_codec.ROTATIONS[args.engine] if args.engine else args.rotation or "aware"
    recent = args.recent if args.recent is not None else 0 if args.engine else 64
    # Where keys are coded with their rotation, codes of positions that no text reached take half as many bytes again.
    length = args.length or (4096 if args.engine == "lmcache" else 512)
    if args.engine:
        if args.rotation not in (None, rotation):
            raise ConfigError.of("--rotation", f"{rotation!r} for {args.engine}", args.rotation, "Leave it out.")
        if args.push_to_hub:
            raise ConfigError.of("--push-to-hub", "none with --for: engines load folders", args.push_to_hub, "Copy the folder.")
        engine_codec.checkpoint_digest(model_source(args.model))
    model, tokenizer = load(args.model, device, args.dtype)
    texts = [text for path in args.texts for text in read_texts(path, tokenizer, length)]
    options = {name: getattr(args, name) for name in ("metric", "max_tokens", "shards")} | {"block": length}
    began = time.perf_counter()
    codec = KVCodec.calibrate(model, tokenizer, texts, args.bytes_ratio, rotation=rotation, recent=recent, **options)
    seconds = time.perf_counter() - began
    if args.engine:
        engine_codec.save(codec, args.out, args.engine, model_source(args.model))
    else:
        codec.save_pretrained(args.out)
    print(f"{codec}\n{codec.settings.tokens} tokens of {len(texts)} texts, {seconds:.0f} s; written to {args.out}")
    if args.push_to_hub:
        print(f"uploaded: {codec.push_to_hub(args.push_to_hub)}")
