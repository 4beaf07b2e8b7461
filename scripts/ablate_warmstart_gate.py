"""Which rules and word lists of the gate change a verdict: how many pairs are admitted otherwise without each of them.

    python scripts/ablate_warmstart_gate.py [--pairs 8]

The pairs are those of the testbed, of all kinds, lengths and ways to ask, and those of the gate's tests. A pair may be admitted where the
texts are the same or differ in no content; any other one is a false admission. `content=0` is the default gate, which rejects every word of
content that differs; with `content=None` the rules alone decide.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, get_args

from shared.cli import arguments, check_counts, run_script
from shared.results import show
from tqdm import tqdm

from hf_kvcaches import WarmStartGate
from hf_kvcaches.warmstart import changes as rules
from hf_kvcaches.warmstart import words
from hf_kvcaches.warmstart.changes import Risk, TextChanges, changes
from tests.testbed.pairs import KINDS, make_pairs
from tests.warmstart.differing import CONTENT, RISKY, SLIGHT

LENGTHS = (128, 300, 600, 900)
HARMLESS = ("identical", "no_content")
# Texts that have less in common are rejected for many reasons, and take long to compare to the end.
KINDS_COMPARED = tuple(kind for kind in KINDS if kind != "unrelated")
GATES = {"content=0": WarmStartGate(), "content=None": WarmStartGate(content=None)}
# Lists of `words`, and what takes their place.
LISTS: dict[str, Any] = {
    name: type(value)() for name, value in vars(words).items() if name.isupper() and not name.startswith("_") and name != "SMALL"
}


class Texts(NamedTuple):
    """Two texts, and whether the first may answer for the second."""

    source: str
    target: str
    harmless: bool


def all_texts(tokenizer: Any, count: int) -> list[Texts]:
    """So many pairs of each kind, length and way to ask, and those of the tests in both directions."""
    texts = [Texts(source, target, False) for source, target, *_ in (*RISKY, *CONTENT)]
    texts += [Texts(source, target, True) for source, target in SLIGHT]
    texts += [Texts(target, source, harmless) for source, target, harmless in texts]
    for kind in KINDS_COMPARED:
        for length in LENGTHS:
            for asks in ("same", "other"):
                made = make_pairs(tokenizer, kind, count, 7, length, asks=asks)
                texts += [Texts(pair.source_text, pair.target_text, kind in HARMLESS and asks == "same") for pair in made]
    return texts


@contextmanager
def without(name: str) -> Iterator[None]:
    """A list of `words` is empty meanwhile."""
    kept = getattr(words, name)
    setattr(words, name, LISTS[name])
    try:
        yield
    finally:
        setattr(words, name, kept)


def less(found: TextChanges, risk: Risk) -> TextChanges:
    """The same, had nobody looked for this risk."""
    return TextChanges(tuple(pair for pair in found.risks if pair[0] != risk), found.content)


def row(name: str, texts: list[Texts], plain: list[TextChanges], found: list[TextChanges]) -> dict[str, Any]:
    """How many verdicts of each gate are other ones, and how many of these admit what may not be."""
    counts: dict[str, Any] = {"without": name}
    for label, gate in GATES.items():
        before, after = ([gate.decide(changes=each).admitted for each in side] for side in (plain, found))
        other = [pair for pair, old, new in zip(texts, before, after, strict=True) if old != new]
        counts |= {label: len(other), f"false, {label}": sum(not pair.harmless for pair in other)}
    return counts


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=8, help="of each kind, length and way to ask")
    args: argparse.Namespace = parser.parse_args()
    check_counts(args, ["pairs"])
    from tests import testbed

    texts = all_texts(testbed.load()[1], args.pairs)
    compare: Callable[[str], list[TextChanges]] = lambda text: [  # noqa: E731
        changes(pair.source, pair.target) for pair in tqdm(texts, desc=text, leave=False)
    ]
    plain = compare("all")
    rows = [row(f"risk: {risk}", texts, plain, [less(found, risk) for found in plain]) for risk in get_args(rules.Risk)]
    for name in LISTS:
        with without(name):
            rows.append(row(f"list: {name}", texts, plain, compare(name)))
    for label, gate in GATES.items():
        verdicts = [gate.decide(changes=found).admitted for found in plain]
        right = sum(admitted == pair.harmless for admitted, pair in zip(verdicts, texts, strict=True))
        wrong = sum(admitted and not pair.harmless for admitted, pair in zip(verdicts, texts, strict=True))
        print(f"{label}: {sum(verdicts)} of {len(texts)} pairs admitted, {wrong} of them falsely; {right} verdicts right")
    print(f"\n{show(rows, {name: f'{{{name}}}' for name in rows[0]})}")


if __name__ == "__main__":
    run_script(main)
