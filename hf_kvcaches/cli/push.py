"""`hf-kvcaches push-generate`: a cache as a repository that `generate` takes as `custom_generate`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from hf_kvcaches.cli.specs import CallSpec, caches_of, parse
from hf_kvcaches.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    if args.repo is None and args.folder is None:
        raise ConfigError.of("--repo, --folder", "one of them", None, "Name a repository to upload to, or a folder to write to.")
    spec = parse(args.cache)
    if any(isinstance(value, CallSpec) for value in (*spec.args, *spec.options.values())):
        hint = "Only such values can be written into the repository's code."
        raise ConfigError.of("--cache", "literals as arguments", args.cache, hint)
    caches = caches_of(spec)
    if args.folder is not None:
        caches.save_pretrained(args.folder, repo_id=args.repo)
        print(f"written to {args.folder}")
    if args.repo is None:
        return 0
    if args.dry_run:
        with tempfile.TemporaryDirectory() as scratch:
            caches.save_pretrained(scratch, repo_id=args.repo)
            files = sorted(path for path in Path(scratch).rglob("*") if path.is_file())
            print(f"{args.repo} would get:")
            print("\n".join(f"\n--- {path.relative_to(scratch).as_posix()}\n{path.read_text(encoding='utf-8').strip()}" for path in files))
        return 0
    print(f"uploaded: {caches.push_to_hub(args.repo, private=args.private or None, revision=args.revision)}")
    return 0
