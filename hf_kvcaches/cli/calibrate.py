"""`hf-kvcaches calibrate`: what is measured once for a model, and saved."""

from __future__ import annotations

import argparse
import time

from hf_kvcaches.cli import calibrate_segments, calibrate_translator, calibrate_warmstart
from hf_kvcaches.cli.options import begin, check_counts, load, require_files
from hf_kvcaches.cli.texts import read_texts
from hf_kvcaches.codec.codec import KVCodec


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
    check_counts(args, ["length", "max_tokens"], least=2)
    device = begin(args)
    require_files("--texts", args.texts)
    model, tokenizer = load(args.model, device, args.dtype)
    texts = [text for path in args.texts for text in read_texts(path, tokenizer, args.length)]
    options = {"metric": args.metric, "recent": args.recent, "rotation": args.rotation, "block": args.length, "max_tokens": args.max_tokens}
    began = time.perf_counter()
    codec = KVCodec.calibrate(model, tokenizer, texts, args.bytes_ratio, **options)
    seconds = time.perf_counter() - began
    codec.save_pretrained(args.out)
    print(f"{codec}\n{codec.settings.tokens} tokens of {len(texts)} texts, {seconds:.0f} s; written to {args.out}")
    if args.push_to_hub:
        print(f"uploaded: {codec.push_to_hub(args.push_to_hub)}")
