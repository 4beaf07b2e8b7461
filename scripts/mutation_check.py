"""Breaks the package in one place after another, and says which faults the tests of the fast tier notice.

    python scripts/mutation_check.py [--only WORD ...] [--least 28]

The faults are in `mutations.toml`: a file of hf_kvcaches, text that occurs once in it, what takes its place, and the tests that should
notice. Each is made in a copy of the checkout and its tests are run there; fewer found than `--least` is a failure, as is text that does
not occur exactly once, and so are tests that fail without any fault.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared import ROOT
from shared.cli import arguments, run_script
from shared.results import tabulated

from hf_kvcaches import ConfigError

FAULTS = Path(__file__).with_name("mutations.toml")
COPIED = ("hf_kvcaches", "tests", "scripts", "docs", "examples", "pyproject.toml", "README.md")
TIMEOUT = 900  # seconds of a fault's tests
PASSED, NOTICED = 0, 1  # exit codes of pytest


@dataclass(frozen=True)
class Fault:
    """One change."""

    name: str  # what is wrong then
    file: str  # in hf_kvcaches
    old: str  # text that occurs once in the file
    new: str  # what takes its place
    tests: tuple[str, ...]  # paths, or ids of tests, in tests/

    def path(self, root: Path) -> Path:
        return root / "hf_kvcaches" / self.file

    def applied(self, root: Path) -> str:
        """The file's text with the fault; a `ConfigError` where the text does not occur exactly once."""
        text = self.path(root).read_text(encoding="utf-8") if self.path(root).exists() else ""
        if text.count(self.old) != 1:
            hint = f"Change {FAULTS.name}: the file is another now."
            raise ConfigError.of(self.name, f"text that occurs once in {self.file}", f"{text.count(self.old)} times {self.old!r}", hint)
        return text.replace(self.old, self.new)


def read_faults(path: Path = FAULTS) -> list[Fault]:
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    return [Fault(**row | {"tests": tuple(row["tests"])}) for row in rows]


def run_tests(root: Path, tests: Sequence[str]) -> int:
    """The exit code of pytest in a copy of the checkout."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not full", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        return subprocess.run(command, cwd=root, env=environment, check=False, timeout=TIMEOUT, **quiet).returncode
    except subprocess.TimeoutExpired:
        return NOTICED


def check(fault: Fault, root: Path) -> str:
    """Make a fault, run its tests, and undo it: `found`, `missed`, or what else pytest said."""
    path, faulty = fault.path(root), fault.applied(root)
    original = path.read_text(encoding="utf-8")
    path.write_text(faulty, encoding="utf-8")
    try:
        code = run_tests(root, fault.tests)
    finally:
        path.write_text(original, encoding="utf-8")
    return {NOTICED: "found", PASSED: "missed"}.get(code, f"pytest ended with {code}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="faults with one of these in their file or name")
    parser.add_argument("--least", type=int, default=28, help="so many must be found; with --only, all")
    args = parser.parse_args()
    faults = [fault for fault in read_faults() if not args.only or any(word in f"{fault.file} {fault.name}" for word in args.only)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, root / name)
        for fault in faults:
            fault.applied(root)
        if run_tests(root, sorted({test for fault in faults for test in fault.tests})) != PASSED:
            raise SystemExit("error: the tests fail without any fault")
        for fault in faults:
            rows.append({"file": fault.file, "fault": fault.name, "result": check(fault, root)})
            print(f"{rows[-1]['result']}: {fault.file}: {fault.name}", flush=True)
    found = sum(row["result"] == "found" for row in rows)
    print(f"\n{tabulated(rows, 'file fault result')}\n\n{found} of {len(rows)} found")
    if found < (len(rows) if args.only else args.least):
        raise SystemExit(1)


if __name__ == "__main__":
    run_script(main)
