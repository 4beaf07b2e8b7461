"""Prints which packages of an environment are newer than those of constraints.txt, and nothing where all are the same.

    python scripts/newer_than_tested.py .venv-newest

Only packages that pyproject.toml names are compared: others follow from them.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def required() -> set[str]:
    """The packages that the project depends on, with and without extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return {_canonical(re.split(r"[\[<>=!~; ]", requirement)[0]) for requirements in lists for requirement in requirements}


def tested() -> dict[str, str]:
    """The versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {_canonical(name): version for name, version in pairs}


def differing(environment: Path) -> Iterator[str]:
    """What is installed in another version than that of constraints.txt, such as `transformers 5.25.0 (tested: 5.24.0)`."""
    folders = [str(folder) for folder in environment.glob("lib*/python*/site-packages")]
    installed = {_canonical(package.name): package.version.partition("+")[0] for package in distributions(path=folders)}
    versions = tested()
    for name in sorted(required() & installed.keys()):
        if installed[name] != versions.get(name):
            yield f"{name} {installed[name]} (tested: {versions.get(name, 'none')})"


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path, help="the folder of a virtual environment")
    print(", ".join(differing(parser.parse_args().environment)))


if __name__ == "__main__":
    main()
