"""What may be typed: the options of all commands. Mistakes are refused here, before torch, which takes seconds, is imported."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_kvcaches.errors import ConfigError, require_choice

REAL_MODELS = ("smollm2", "gemma3")  # folders that `make models` makes
CACHES = ("GrowingCache", "EquipCache", "SubspaceCache", "SegmentReuseCache", "WarmStartCache")
CACHE_HELP = (
    "such as \"EquipCache(policy='streaming', budget=512)\", \"SubspaceCache(KVCodec('FOLDER'))\" or "
    "\"SegmentReuseCache(SegmentStore('memory'))\""
)


def parse(text: str) -> ast.Call:
    """Read the name or the call of a cache, whose arguments are literals and other calls, without evaluating anything."""
    try:
        call = as_call(ast.parse(text.strip(), mode="eval").body)
        if call is not None:
            _check(call)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # what `ast` raises on text that is no literal
        call = None
    if call is None:
        expected = "a class, or a call of it with literals and other calls as arguments"
        raise ConfigError.of("cache", expected, text, f"Write it {CACHE_HELP}.")
    name = ast.unparse(call.func)
    hint = "It starts from the codes of a single prompt: call hf_kvcaches.verify with a function that makes it."
    require_choice("cache", name, CACHES, hint=hint if name == "TranslatedCache" else "")
    return call


def as_call(node: ast.expr) -> ast.Call | None:
    """A call, or a class's name as a call without arguments; None for what must be a literal."""
    return ast.Call(node, [], []) if isinstance(node, ast.Name) else node if isinstance(node, ast.Call) else None


def _check(node: ast.expr) -> None:
    """Raise a ValueError at the latest where a node is neither a literal nor a call of a class by its name."""
    call = as_call(node)
    if call is None:
        ast.literal_eval(node)
        return
    names = [keyword.arg for keyword in call.keywords]
    if not isinstance(call.func, ast.Name) or None in names or len(names) > len({*names}):
        raise ValueError
    for part in (*call.args, *(keyword.value for keyword in call.keywords)):
        _check(part)


def model_source(name: str) -> str:
    """The folder or the hub id that a model's name on the command line stands for."""
    if Path(name).is_dir():
        return name
    if name in REAL_MODELS:
        for folder in (Path.cwd(), *Path.cwd().parents):
            if (folder / ".models" / name).is_dir():
                return str(folder / ".models" / name)
        hint = "`make models`, in a checkout of the repository, makes it; then run this there."
        raise ConfigError.of("model", f"a folder .models/{name} here or in a folder above", name, hint)
    if not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name):
        raise ConfigError.of("model", "a folder that exists, or a hub id such as owner/name", name, "There is no such folder.")
    return name


def stated(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type whose `ConfigError` argparse prints."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def model(text: str) -> str:
    model_source(text)
    return text


def at_least(least: int) -> Callable[[str], int]:
    """The type of whole numbers from one on."""

    def whole_number(text: str) -> int:
        if (number := int(text)) < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {number}")
        return number

    return whole_number


def existing_file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"expected files that exist, got {text!r}")
    return Path(text)


def tokens(text: str) -> int:
    """A number of tokens, also one such as 32k."""
    match = re.fullmatch(r"([1-9]\d*)(k?)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a number of tokens, such as 4096 or 32k, got {text!r}")
    return int(match[1]) * (1024 if match[2] else 1)


COUNT = at_least(1)
OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"required": True, "type": stated(model), "help": "a folder, a hub id, or smollm2 or gemma3 after make models"},
    "device": {"default": "auto", "help": "cpu, cuda, mps, or auto for the first accelerator that works"},
    "dtype": {"default": "auto", "choices": ("auto", "float32", "bfloat16", "float16"), "help": "of the weights; auto: as they are saved"},
    "threads": {"type": COUNT, "help": "of the CPU; default: as torch has it"},
    "metric": {"choices": ("loss", "plain"), "default": "loss", "help": "what errors cost"},
    "csv": {"type": Path, "help": "write every number here"},
    "json": {"action": "store_true", "help": "print one JSON document in place of tables"},
}
CACHE: dict[str, Any] = {"required": True, "type": stated(parse), "metavar": "SPEC", "help": CACHE_HELP}
SEVERAL_CACHES = CACHE | {"action": "append", "help": f"{CACHE_HELP}; may be given several times"}
TEXTS: dict[str, Any] = {"type": existing_file, "nargs": "+", "metavar": "FILE", "help": "text files, or .jsonl with one text a line"}


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the named ones of `OPTIONS`."""
    for name in names:
        parser.add_argument(f"--{name}", **OPTIONS[name])


def recommend(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "model", "dtype", "csv", "json")
    parser.add_argument("--context", type=tokens, default="8k", help="tokens of prompt and answer, such as 32k; default: 8k")
    parser.add_argument("--batch", type=COUNT, default=1, help="rows at a time")
    parser.add_argument("--memory", help="of the device, such as 16GiB, for weights and cache")
    parser.add_argument("--device", **OPTIONS["device"] | {"help": "where it will run, for the nearest row of the speed table"})
    parser.add_argument("--speed", type=existing_file, help="a file of hf-kvcaches bench --csv, in place of the package's speed table")


def verify(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "model", "device", "dtype", "threads", "json")
    parser.add_argument("--cache", **CACHE)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the prompt")
    prompt.add_argument("--file", type=existing_file, help="a text file with the prompt")
    parser.add_argument("--context", type=COUNT, help="take so many tokens of it at most")
    parser.add_argument("--max-new-tokens", type=COUNT, default=64, help="how many steps to compare at most")
    parser.add_argument("--prefill-chunk-size", type=COUNT, help="feed the prompt to the cache in chunks of so many tokens")
    parser.add_argument("--exact", action="store_true", help="exit with 1 where the text differs")


def evaluate(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "model", "device", "dtype", "threads", "csv", "json")
    parser.add_argument("--cache", **SEVERAL_CACHES)
    parser.add_argument("--texts", **TEXTS)
    parser.add_argument("--context", type=COUNT, default=1024, help="tokens of a text that are read as its prompt, at most")
    parser.add_argument("--following", type=COUNT, default=64, help="tokens of a text after its prompt, which are fed one by one")
    parser.add_argument("--limit", type=COUNT, default=16, help="texts at most, from all over the files; prompts of a kind in a suite")
    suites = "made-up prompts with known answers, in place of texts; the first of --texts is the prose around facts, if given"
    parser.add_argument("--suite", nargs="+", choices=("needles", "requests", "pairs"), help=suites)
    parser.add_argument("--state", type=Path, help="a file where rows of a suite are kept, so that a run that is cut off goes on there")


def bench(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "model", "device", "dtype", "threads", "csv", "json")
    parser.add_argument("--cache", **SEVERAL_CACHES)
    parser.add_argument("--random", action="store_true", help="random weights for the model's config: nothing but that is downloaded")
    parser.add_argument("--context", type=COUNT, default=1024, help="tokens of the prompt")
    parser.add_argument("--batch", type=COUNT, default=1, help="rows of the prompt")
    parser.add_argument("--steps", type=COUNT, default=32, help="decode steps of a round")
    parser.add_argument("--rounds", type=at_least(2), default=5, help="rounds after one that is not counted")


def calibrate(parser: argparse.ArgumentParser) -> None:
    """Add one command for each kind of artifact."""
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    for name, summary, noun, add in (
        ("codec", "a KVCodec: keys and values in few bits", "codec", codec),
        ("segments", "a SegmentPolicy: which segments may be reused after another text", "policy", segments),
        ("warmstart", "a WarmStartGate: which similar prompts may be started from", "gate", warmstart),
        ("translator", "a CacheTranslator: one model's cache becomes another's", "translator", translator),
    ):
        kind = kinds.add_parser(name, help=summary)
        kind.set_defaults(kind=name, parser=kind)
        kind.add_argument("--out", type=Path, required=True, help=f"the folder that the {noun} is written to")
        add_options(kind, "device", "dtype", "threads", *(["model"] if name != "translator" else []))
        add(kind)


def codec(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "metric")
    parser.add_argument("--texts", required=True, **TEXTS)
    parser.add_argument("--bytes-ratio", type=float, default=0.125, help="bytes of a token, as a share of exact ones in 16 bits")
    parser.add_argument("--for", dest="engine", choices=("vllm", "lmcache"), help="the engine that will load it; it decides the rotation")
    parser.add_argument("--recent", type=int, help="newest tokens that are exact where the codec is used (default 64, of engines 0)")
    parser.add_argument("--shards", type=COUNT, default=1, help="processes that will share the heads under tensor parallelism")
    parser.add_argument("--rotation", choices=("aware", "post"), help="keys before (default) or after they are rotated")
    parser.add_argument("--length", type=at_least(2), help="of a text, in tokens at most (default 512, for lmcache 4096)")
    parser.add_argument("--max-tokens", type=at_least(2), help="stop after so many; default: read all")


def segments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=existing_file, required=True, help="one prompt a line, as JSON, in the order of requests")
    parser.add_argument("--requests", type=COUNT, default=40, help="how many prompts to take at most")
    parser.add_argument("--asked", type=COUNT, default=16, help="tokens at the end of each prompt that are withheld and compared")
    parser.add_argument("--bound", type=float, default=0.05, help="the most that the mean KL divergence may be, in nats")
    parser.add_argument("--worst", type=float, default=float("inf"), help="the most that it may be for a single prompt")
    parser.add_argument("--least-same", type=float, default=0.0, help="the least share of next tokens that are the model's own")
    parser.add_argument("--quantization", choices=("int8", "int4", "none"), default="none", help="of the store that the policy is for")
    parser.add_argument("--codec", help="in place of it: the folder or hub id of a KVCodec, for a store of its codes")


def warmstart(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=existing_file, required=True, help="one pair a line, as JSON: an object with source and target")
    parser.add_argument("--bound", type=float, default=0.02, help="the most that the mean KL divergence of admitted pairs may be, in nats")
    parser.add_argument("--worst", type=float, default=0.05, help="the most that it may be for a single pair")
    parser.add_argument("--following", type=int, default=16, help="tokens after the first one that are compared")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none", help="how it keeps keys and values")


def translator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--producer", **OPTIONS["model"] | {"help": "the model that will read prompts: a folder or a hub id"})
    parser.add_argument("--consumer", **OPTIONS["model"] | {"help": "the model that will answer: a folder or a hub id"})
    add_options(parser, "metric")
    parser.add_argument("--texts", required=True, **TEXTS)
    parser.add_argument("--prefixes", type=COUNT, default=64, help="texts at most, taken from all over the files")
    parser.add_argument("--length", type=COUNT, default=512, help="of a text, in tokens at most")
    parser.add_argument("--payload", type=float, default=0.025, help="bytes that are sent, as a share of bfloat16 keys and values")
    parser.add_argument("--layers-per-code", type=int, help="how many consecutive layers share a code; default: by their width")
    parser.add_argument("--recompute-layers", default="0", help="how many of its lowest layers the consumer runs itself, or auto")
    parser.add_argument("--memory", default="8GiB", help="that the fit's sums may take; with less, models read the texts more than once")
