"""The options of all commands. Nothing heavy is imported here, so that `--help` answers at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"required": True, "help": "a folder, a hub id, or smollm2 or gemma3 after make models"},
    "device": {"default": "auto", "help": "cpu, cuda, mps, or auto for the first accelerator that works"},
    "dtype": {"default": "auto", "choices": ("auto", "float32", "bfloat16", "float16"), "help": "of the weights; auto: as they are saved"},
    "threads": {"type": int, "help": "of the CPU; default: as torch has it"},
    "csv": {"type": Path, "help": "write every number here"},
    "json": {"action": "store_true", "help": "print one JSON document in place of tables"},
}
CACHE_HELP = (
    "such as \"EquipCache(policy='streaming', budget=512)\", \"SubspaceCache(KVCodec('FOLDER'))\" or "
    "\"SegmentReuseCache(SegmentStore('memory'))\""
)
SUITES = ("needles", "requests", "pairs")
TEXTS: dict[str, Any] = {"type": Path, "nargs": "+", "metavar": "FILE", "help": "text files, or .jsonl with one text a line"}


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the named ones of `OPTIONS`."""
    for name in names:
        parser.add_argument(f"--{name}", **OPTIONS[name])


def add_cache(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the option `--cache`.

    Args:
        several: Whether it may be given more than once.
    """
    more = {"action": "append", "help": f"{CACHE_HELP}; may be given several times"} if several else {"help": CACHE_HELP}
    parser.add_argument("--cache", required=True, metavar="SPEC", **more)


def recommend(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "model", "dtype", "csv", "json")
    parser.add_argument("--context", default="8k", help="tokens of prompt and answer, such as 32k; default: 8k")
    parser.add_argument("--batch", type=int, default=1, help="rows at a time")
    parser.add_argument("--memory", help="of the device, such as 16GiB, for weights and cache")
    parser.add_argument("--device", **OPTIONS["device"] | {"help": "where it will run, for the nearest row of the speed table"})
    parser.add_argument("--speed", type=Path, help="a file of hf-kvcaches bench --csv, in place of the speed table of the package")


def verify(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "model", "device", "dtype", "threads", "json")
    add_cache(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the prompt")
    prompt.add_argument("--file", type=Path, help="a text file with the prompt")
    parser.add_argument("--context", type=int, help="take so many tokens of it at most")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="how many steps to compare at most")
    parser.add_argument("--prefill-chunk-size", type=int, help="feed the prompt to the cache in chunks of so many tokens")
    parser.add_argument("--exact", action="store_true", help="exit with 1 where the text differs")


def evaluate(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "model", "device", "dtype", "threads", "csv", "json")
    add_cache(parser, several=True)
    parser.add_argument("--texts", **TEXTS)
    parser.add_argument("--context", type=int, default=1024, help="tokens of a text that are read as its prompt, at most")
    parser.add_argument("--following", type=int, default=64, help="tokens of a text after its prompt, which are fed one by one")
    parser.add_argument("--limit", type=int, default=16, help="texts at most, taken from all over the files; prompts of a kind in a suite")
    suites = "made-up prompts with known answers, in place of texts; the first of --texts is the prose around facts, if given"
    parser.add_argument("--suite", nargs="+", choices=SUITES, help=suites)
    parser.add_argument("--state", type=Path, help="a file where rows of a suite are kept, so that a run that is cut off goes on there")


def bench(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "model", "device", "dtype", "threads", "csv", "json")
    add_cache(parser, several=True)
    parser.add_argument("--random", action="store_true", help="random weights for the model's config: nothing but that is downloaded")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--batch", type=int, default=1, help="rows of the prompt")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after one that is not counted")


def calibrate(parser: argparse.ArgumentParser) -> None:
    """Add one command for each kind of artifact."""
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    for name, summary, add in (
        ("codec", "a KVCodec: keys and values in few bits", codec),
        ("segments", "a SegmentPolicy: which segments may be reused after another text", segments),
        ("warmstart", "a WarmStartGate: which similar prompts may be started from", warmstart),
        ("translator", "a CacheTranslator: one model's cache becomes another's", translator),
    ):
        kind = kinds.add_parser(name, help=summary)
        add_options(kind, "device", "dtype", "threads")
        if name != "translator":  # which names two models
            add_options(kind, "model")
        add(kind)
        kind.set_defaults(kind=name, parser=kind)


def codec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="the folder that the codec is written to")
    parser.add_argument("--push-to-hub", metavar="ID", help="also uploads it, as owner/name")
    parser.add_argument("--texts", required=True, **TEXTS)
    parser.add_argument("--bytes-ratio", type=float, default=0.125, help="bytes of a token, as a share of exact ones in 16 bits")
    parser.add_argument("--metric", choices=("loss", "plain"), default="loss", help="what errors cost")
    parser.add_argument("--for", dest="engine", choices=("vllm", "lmcache"), help="the engine that will load it; it decides the rotation")
    parser.add_argument("--recent", type=int, help="newest tokens that are exact where the codec is used (default 64, of engines 0)")
    parser.add_argument("--shards", type=int, default=1, help="processes that will share the heads under tensor parallelism")
    parser.add_argument("--rotation", choices=("aware", "post"), help="keys before (default) or after they are rotated")
    parser.add_argument("--length", type=int, help="of a text, in tokens at most (default 512, for lmcache 4096)")
    parser.add_argument("--max-tokens", type=int, help="stop after so many; default: read all")


def segments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--out", type=Path, required=True, help="the folder that the policy is written to")
    parser.add_argument("--prompts", type=Path, required=True, help="one prompt a line, as JSON, in the order of requests")
    parser.add_argument("--requests", type=int, default=40, help="how many prompts to take at most")
    parser.add_argument("--asked", type=int, default=16, help="tokens at the end of each prompt of a file that are withheld and compared")
    parser.add_argument("--bound", type=float, default=0.05, help="the most that the mean KL divergence may be, in nats")
    parser.add_argument("--worst", type=float, default=float("inf"), help="the most that it may be for a single prompt")
    parser.add_argument("--least-same", type=float, default=0.0, help="the least share of next tokens that are the model's own")
    parser.add_argument("--quantization", choices=("int8", "int4", "none"), default="none", help="of the store that the policy is for")
    parser.add_argument("--codec", help="in place of it: the folder or hub id of a KVCodec, for a store of its codes")


def warmstart(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--out", type=Path, required=True, help="the folder that the gate is written to")
    parser.add_argument("--pairs", type=Path, required=True, help="one pair a line, as JSON: an object with source and target")
    parser.add_argument("--bound", type=float, default=0.02, help="the most that the mean KL divergence of admitted pairs may be, in nats")
    parser.add_argument("--worst", type=float, default=0.05, help="the most that it may be for a single pair")
    parser.add_argument("--encoder", help="of the library that the gate is for; default: the model's input embeddings")
    parser.add_argument("--following", type=int, default=16, help="tokens after the first one that are compared")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none", help="how it keeps keys and values")


def translator(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--producer", required=True, help="the model that will read prompts: a folder or a hub id")
    parser.add_argument("--consumer", required=True, help="the model that will answer: a folder or a hub id")
    parser.add_argument("--out", type=Path, required=True, help="the folder that the translator is written to")
    parser.add_argument("--push-to-hub", metavar="ID", help="also uploads it, as owner/name")
    parser.add_argument("--texts", required=True, **TEXTS)
    parser.add_argument("--prefixes", type=int, default=64, help="texts at most, taken from all over the files")
    parser.add_argument("--length", type=int, default=512, help="of a text, in tokens at most")
    parser.add_argument("--payload", type=float, default=0.025, help="bytes that are sent, as a share of bfloat16 keys and values")
    parser.add_argument("--layers-per-code", type=int, help="how many consecutive layers share a code; default: by their width")
    parser.add_argument("--recompute-layers", default="0", help="how many of its lowest layers the consumer runs itself, or auto")
    parser.add_argument("--metric", choices=("loss", "plain"), default="loss", help="what errors cost")
    parser.add_argument("--memory", default="8GiB", help="that the fit's sums may take; with less, models read the texts more than once")
