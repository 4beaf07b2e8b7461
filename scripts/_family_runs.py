"""Runs architectures with caches, and keeps what came of it in a file of JSON lines."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers
from shared import ROOT

from tests.families.caches import KINDS
from tests.families.models import Family
from tests.families.outcomes import Outcome, as_dict, outcomes

Job = tuple[Family, list[str]]
# JSON lines, one file for each version of transformers.
RESULTS = ROOT / ".families" / f"{transformers.__version__}.jsonl"


def read(results: Path) -> Iterator[Outcome]:
    """The results in a file."""
    if results.exists():
        yield from (Outcome(**json.loads(line)) for line in results.read_text(encoding="utf-8").splitlines())


def run(families: Iterable[Family], caches: Sequence[str], results: Path, jobs: int) -> None:
    """Runs what has no results yet; each family's are written at once, so that an interrupted run goes on where it was."""
    done = {(outcome.family, outcome.cache) for outcome in read(results)}
    todo = [(family, missing) for family in families if (missing := [name for name in caches if (family.name, name) not in done])]
    for (family, _), found in zip(todo, _all_of(todo, jobs), strict=True):
        with results.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(as_dict(outcome)) + "\n" for outcome in found)
        print(family.name, "fails" if any(outcome.fails for outcome in found) else "holds", flush=True)


def _all_of(todo: Sequence[Job], jobs: int) -> Iterator[list[Outcome]]:
    if jobs == 1:
        _be_quiet()
        yield from map(_of_family, todo)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_be_quiet) as pool:
        yield from pool.map(_of_family, todo)


def _be_quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)


def _of_family(job: Job) -> list[Outcome]:
    family, caches = job
    return outcomes(family, [kind for kind in KINDS if kind.name in caches])
