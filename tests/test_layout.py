"""The house keeps its shape: imports point down, optional dependencies are imported late, files and functions stay short."""

import ast
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

import hf_kvcaches

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hf_kvcaches"

OPTIONAL = {"triton", "peft", "redis", "datasketch", "accelerate", "fastapi", "uvicorn"}
TOP_LEVEL = set(
    """.ci .github .gitignore CHANGELOG.md CONTRIBUTING.md LICENSE MANIFEST.in Makefile README.md SECURITY.md constraints.txt docs examples
    hf_kvcaches mkdocs.yml pyproject.toml scripts tests""".split()
)
ENGINES = {"vllm", "lmcache"}  # each is imported by the file of its name, which that engine loads
LONGEST_FILE, LONGEST_FUNCTION = 350, 50
# Lines of the files and functions that are longer for now. The list only gets shorter.
LONGER: dict[str, int] = {}


def imported_names(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything imported in a module of `package`, wherever in the module it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            anchor = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*anchor, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def module_level(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported: not those inside functions or under TYPE_CHECKING."""
    for node in nodes:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        bodies = ["orelse"] if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else ["body", "orelse", "finalbody"]
        for body in bodies:
            yield from module_level(getattr(node, body, []))
        for handler in getattr(node, "handlers", []):
            yield from module_level(handler.body)


def is_triton_file(relative: Path) -> bool:
    """Kernels are decorated as soon as their module is imported: `kernels/NAME_triton.py` may need Triton at once; it is imported late."""
    return relative.parts[0] == "kernels" and relative.name.endswith("_triton.py")


def eager_optionals(package: Path) -> list[str]:
    """Optional dependencies, and files of Triton kernels, that are imported as soon as a module of `package` is."""
    faults = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        allowed = {"triton"} if is_triton_file(relative) else {relative.stem} if relative.parts[0] == "engines" else set()
        statements = [node for node in module_level(ast.parse(path.read_text()).body) if isinstance(node, ast.Import | ast.ImportFrom)]
        for line, name in (found for node in statements for found in imported_names(node, (package.name, *relative.parts[:-1]))):
            is_kernel = not is_triton_file(relative) and any(part.endswith("_triton") for part in name.split("."))
            if is_kernel or name.partition(".")[0] in (OPTIONAL | ENGINES) - allowed:
                faults.append(f"{relative}:{line}: {name}")
    return faults


def length_faults(package: Path, longer: Mapping[str, int]) -> list[str]:
    """Files and functions that are too long, and exceptions that nothing needs."""
    excess: dict[str, int] = {}
    for path in sorted(package.rglob("*.py")):
        text, relative = path.read_text(), str(path.relative_to(package))
        excess[relative] = len(text.splitlines()) - LONGEST_FILE
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name, lines = f"{relative}: {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1
                excess[name] = max(lines - LONGEST_FUNCTION, excess.get(name, 0))
    allowed = {name: lines - (LONGEST_FUNCTION if ": " in name else LONGEST_FILE) for name, lines in longer.items()}
    faults = [f"{name} is {lines} lines too long" for name, lines in excess.items() if lines > allowed.get(name, 0)]
    return faults + [f"{name} needs no exception" for name in longer if excess.get(name, 0) <= 0]


def test_imports_keep_the_contracts_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True) == EXIT_STATUS_SUCCESS


def test_public_names_are_imported_from_the_modules_that_have_them() -> None:
    names = {f"hf_kvcaches.{name}" for name in hf_kvcaches.__all__}
    faults = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "cli"
        for line, name in imported_names(ast.parse(path.read_text()), ("hf_kvcaches", *path.relative_to(PACKAGE).parts[:-1]))
        if name in names
    ]
    assert faults == []


def test_no_optional_dependency_is_imported_with_the_package() -> None:
    assert eager_optionals(PACKAGE) == []


def test_files_and_functions_stay_short_and_no_exception_outlives_its_need() -> None:
    assert length_faults(PACKAGE, LONGER) == []


def test_top_level_is_exactly_what_the_project_lists() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: what belongs to the project is what git tracks")
    tracked = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert {name.split("/")[0] for name in tracked.split("\0") if name} == TOP_LEVEL
    assert [name for name in tracked.split("\0") if name.startswith(".ci/")] == [".ci/run"]


def test_optional_dependencies_checked_are_those_of_the_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        requirement.split(">")[0].replace("-", "_")
        for name, requirements in project["optional-dependencies"].items()
        if name not in ("dev", "docs")
        for requirement in requirements
    }
    assert extras == OPTIONAL


def test_no_two_classes_share_a_name() -> None:
    names = [
        node.name
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert sorted({name for name in names if names.count(name) > 1}) == []
