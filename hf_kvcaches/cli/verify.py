"""`hf-kvcaches verify`: what a cache changes on a prompt."""

from __future__ import annotations

import argparse
import sys

from hf_kvcaches.cli.calls import parse
from hf_kvcaches.cli.options import begin, load
from hf_kvcaches.cli.specs import caches_of
from hf_kvcaches.cli.tables import environment, print_json
from hf_kvcaches.cli.texts import read_text
from hf_kvcaches.evaluate.verify import verify


def run(args: argparse.Namespace) -> int:
    device, spec = begin(args), parse(args.cache)
    text = args.prompt if args.file is None else read_text(args.file)
    model, tokenizer = load(args.model, device, args.dtype)
    caches = caches_of(spec, model, tokenizer)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, : args.context]
    report = verify(model, lambda: caches.new_cache(model), ids, args.max_new_tokens, prefill_chunk_size=args.prefill_chunk_size)
    if args.json:
        fixed = {"model": args.model, "cache": repr(spec), "prompt_tokens": ids.shape[1]}
        print_json({"environment": environment(device), **fixed, **report.as_dict()})
    else:
        print(f"{spec}: {ids.shape[1]:,} tokens and {report.steps} steps behind them\n{report}")
    if args.exact and report.first_divergence is not None:
        print(f"The text differs from step {report.first_divergence} on.", file=sys.stderr if args.json else sys.stdout)
        return 1
    return 0
