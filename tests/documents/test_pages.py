"""The pages say what the code has: errors, public names, commands, and numbers as they were measured."""

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_kvcaches
from hf_kvcaches import errors
from tests.documents.blocks import ROOT, blocks, documents
from tests.scripts.running import import_script

# Programs that a reader has, or installs beside the package.
PROGRAMS = {"lmcache", "pip", "pytest", "redis-server", "torchrun", "uvicorn", "vllm"}


def test_every_error_has_a_section() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.KVCacheError)}
    assert kinds == set(sections) - {"Warnings"}


def test_every_public_name_is_in_the_api_reference_once() -> None:
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "api").glob("*.md"))]
    names = [name for page in pages for name in re.findall(r"^::: hf_kvcaches\.(\w+)$", page, flags=re.MULTILINE)]
    assert sorted(names) == sorted(hf_kvcaches.__all__)


def test_the_tables_are_those_of_the_measurements() -> None:
    tables = import_script("docs_tables")
    stale = [page.name for page in tables.pages() if tables.renewed(text := page.read_text(encoding="utf-8")) != text]
    assert stale == [], "run python scripts/docs_tables.py"


@pytest.mark.parametrize(
    ("page", "written", "shown"),
    [
        ("index.md", "[it](docs/equip.md#memory)", "[it](equip.md#memory)"),
        ("index.md", "![it](docs/images/x.svg)", "![it](images/x.svg)"),
        ("guides/serving.md", "[it](../../README.md#install)", "[it](../index.md#install)"),
        ("guides/serving.md", "[it](../equip.md)", "[it](../equip.md)"),
        ("equip.md", "[the script](../scripts/demo.py)", "the script"),
        ("equip.md", "[it](../nowhere.md)", "[it](../nowhere.md)"),
        ("equip.md", "[it](https://example.org/a.md) [b](#here)", "[it](https://example.org/a.md) [b](#here)"),
    ],
)
def test_links_of_a_checkout_become_links_of_the_site(page: str, written: str, shown: str) -> None:
    assert import_script("_site_pages").rewritten(written, page) == shown


def commands() -> Iterator[tuple[str, str]]:
    """Every command of the bash blocks, with its place."""
    for document in documents():
        for block in blocks(document, "bash"):
            for line in block.code.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield shlex.join(words), f"{document.relative_to(ROOT)}:{block.line}"


def options_of(script: Path) -> set[str]:
    """The options and subcommands that a script's parser and the shared ones name."""
    sources = [script, *(ROOT / "scripts" / "shared").glob("*.py")]
    texts = {
        node.value for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Constant)
    }
    return {text for text in texts if isinstance(text, str)} | {f"--{text}" for text in texts if isinstance(text, str)}


def fault(command: str) -> str | None:
    """What a reader who types a command would find missing."""
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    program = Path(words[0]).name
    console_scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("scripts", {})
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        return next((f"no target {word}" for word in words[1:] if word not in targets), None)
    if program.startswith("python") and words[1].endswith(".py"):
        script = ROOT / words[1]
        if not script.exists():
            return f"no {words[1]}"
        known = options_of(script)
        return next((f"no option {word}" for word in words[2:] if word.startswith("--") and word.split("=")[0] not in known), None)
    is_known = program in PROGRAMS | set(console_scripts) or program.startswith("python") or (ROOT / words[0]).exists()
    return None if is_known else f"no {program}"


def test_every_command_of_the_documents_can_be_typed() -> None:
    found = [f"{place}: {command}: {problem}" for command, place in commands() if (problem := fault(command))]
    assert found == []
