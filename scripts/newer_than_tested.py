"""Prints which packages of an environment are in other versions than those of constraints.txt, and nothing where all are the same.

    python scripts/newer_than_tested.py .venv-newest

Only packages that pyproject.toml names are compared: others follow from them.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def differing(environment: Path) -> list[str]:
    """What is installed in another version, such as `transformers 5.25.0 (tested: 5.24.0)`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = sum(project["optional-dependencies"].values(), project["dependencies"])
    named = {canonical(re.split(r"[\[<>=!~; ]", requirement)[0]) for requirement in requirements}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = {canonical(name): version for name, _, version in (line.partition("==") for line in lines if "==" in line)}
    folders = [str(folder) for folder in environment.glob("lib*/python*/site-packages")]
    installed = {canonical(package.name): package.version.partition("+")[0] for package in distributions(path=folders)}
    names = [name for name in sorted(named & installed.keys()) if installed[name] != tested.get(name)]
    return [f"{name} {installed[name]} (tested: {tested.get(name, 'none')})" for name in names]


if __name__ == "__main__":
    print(", ".join(differing(Path(sys.argv[1]))))
