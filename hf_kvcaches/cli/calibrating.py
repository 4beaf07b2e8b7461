"""`hf-kvcaches calibrate`: what is measured once for a model, and saved."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from hf_kvcaches.cli import calibrating_segments, calibrating_translator, calibrating_warmstart
from hf_kvcaches.cli.options import add_options, begin, check_counts, load, require_files
from hf_kvcaches.cli.texts import read_texts
from hf_kvcaches.core.codec.codec import KVCodec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one command for each kind of artifact."""
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    codec = kinds.add_parser("codec", help="a KVCodec: keys and values in few bits")
    add_options(codec, "model", "device", "dtype", "threads")
    add_codec_arguments(codec)
    codec.set_defaults(calibrate=calibrate_codec)
    segments = kinds.add_parser("segments", help="a SegmentPolicy: which segments may be reused behind another text")
    add_options(segments, "model", "device", "dtype", "threads")
    calibrating_segments.add_arguments(segments)
    segments.set_defaults(calibrate=calibrating_segments.run)
    warmstart = kinds.add_parser("warmstart", help="a WarmStartGate: which similar prompts may be started from")
    add_options(warmstart, "model", "device", "dtype", "threads")
    calibrating_warmstart.add_arguments(warmstart)
    warmstart.set_defaults(calibrate=calibrating_warmstart.run)
    translator = kinds.add_parser("translator", help="a CacheTranslator: one model's cache becomes another's")
    add_options(translator, "device", "dtype", "threads")
    calibrating_translator.add_arguments(translator)
    translator.set_defaults(calibrate=calibrating_translator.run)


def run(args: argparse.Namespace) -> int:
    args.calibrate(args)
    return 0


def add_codec_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="the folder that the codec is written to")
    parser.add_argument("--push-to-hub", metavar="ID", help="also uploads it, as owner/name")
    parser.add_argument("--texts", type=Path, nargs="+", metavar="FILE", required=True, help="text files, or .jsonl with one text a line")
    parser.add_argument("--bytes-ratio", type=float, default=0.125, help="bytes of a token, as a share of exact ones in 16 bits")
    parser.add_argument("--metric", choices=("loss", "attention", "plain"), default="loss", help="what errors cost")
    parser.add_argument("--rotation", choices=("aware", "post"), default="aware", help="keys before or after they are rotated")
    parser.add_argument("--length", type=int, default=512, help="of a text, in tokens at most")
    parser.add_argument("--max-tokens", type=int, help="stop after so many; default: read all")


def calibrate_codec(args: argparse.Namespace) -> None:
    check_counts(args, ["length", "max_tokens"], least=2)
    device = begin(args)
    require_files("--texts", args.texts)
    model, tokenizer = load(args.model, device, args.dtype)
    texts = [text for path in args.texts for text in read_texts(path, tokenizer, args.length)]
    options = {"metric": args.metric, "rotation": args.rotation, "block": args.length, "max_tokens": args.max_tokens}
    began = time.perf_counter()
    codec = KVCodec.calibrate(model, tokenizer, texts, args.bytes_ratio, **options)
    seconds = time.perf_counter() - began
    codec.save_pretrained(args.out)
    print(f"{codec}\n{codec.settings.tokens} tokens of {len(texts)} texts, {seconds:.0f} s; written to {args.out}")
    if args.push_to_hub:
        print(f"uploaded: {codec.push_to_hub(args.push_to_hub)}")
