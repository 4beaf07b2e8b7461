"""The house keeps its shape: imports point downward, rooms are separate, files and functions stay short."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hf_kvcaches"

ROOMS = ("equip", "subspace", "segments", "warmstart", "translate")
FLOORS = (
    {"errors": 0, "version": 0, "compat": 0, "kernels": 1, "stores": 1, "core": 2, "evaluate": 3}
    | dict.fromkeys(ROOMS, 4)
    | {"cli": 5, "__main__": 6}
)
# The command line takes the names that users type, which are those of the front door.
AT_THE_DOOR = {"cli"}
OPTIONAL = {"triton", "faiss", "sentence_transformers", "peft", "redis", "datasketch", "accelerate", "matplotlib", "fastapi", "uvicorn"}
TOP_LEVEL = {
    ".ci",
    ".github",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
    "docs",
    "examples",
    "hf_kvcaches",
    "mkdocs.yml",
    "pyproject.toml",
    "scripts",
    "tests",
}
LONGEST_FILE, LONGEST_FUNCTION = 450, 75


def imported_names(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything imported in a module of `package`, wherever in the module it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            anchor = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*anchor, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                name = node.args[0].value
                level = len(name) - len(name.lstrip("."))
                anchor = package[: len(package) - level + 1] if level else ()
                yield node.lineno, ".".join([*anchor, name.lstrip(".")])


def import_faults(package: Path) -> list[str]:
    """Imports inside `package` that point upward, at a neighbouring room, or at a place that has no floor."""
    faults = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        if relative == Path("__init__.py"):
            continue
        here = relative.parts[0].removesuffix(".py")
        if here not in FLOORS:
            faults.append(f"{relative}: {here!r} has no floor")
            continue
        parent = (package.name, *relative.parts[:-1])
        for line, name in imported_names(ast.parse(path.read_text()), parent):
            top, _, rest = name.partition(".")
            there = rest.partition(".")[0]
            if top != package.name or name == f"{package.name}.__version__":
                continue
            where = f"{relative}:{line}"
            if there not in FLOORS and here in AT_THE_DOOR:
                continue
            if there not in FLOORS:
                faults.append(f"{where}: {name} is a name of the front door; import it from the module that has it")
            elif FLOORS[there] > FLOORS[here]:
                faults.append(f"{where}: {here} imports upward, from {there}")
            elif here in ROOMS and there in ROOMS and here != there:
                faults.append(f"{where}: the room {here} imports its neighbour {there}")
    return faults


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


def eager_triton_files(package: Path) -> list[str]:
    """Files of Triton kernels that anything but each other or a function of their own wrapper imports.

    The wrapper of `kernels/NAME_triton.py` is `kernels/NAME.py`.
    """
    faults = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        if is_triton_file(relative):
            continue
        tree, parent = ast.parse(path.read_text()), (package.name, *relative.parts[:-1])
        at_once = {node.lineno for node in module_level(tree.body) if isinstance(node, ast.Import | ast.ImportFrom)}
        for line, name in imported_names(tree, parent):
            for part in name.split("."):
                if is_triton_file(Path("kernels", f"{part}.py")):
                    wrapper = Path("kernels", part.removesuffix("_triton") + ".py")
                    if relative != wrapper or line in at_once:
                        faults.append(f"{relative}:{line}: {part}")
    return faults


def eager_optionals(package: Path) -> list[str]:
    """Optional dependencies that are imported as soon as a module of `package` is."""
    faults = []
    for path in sorted(package.rglob("*.py")):
        allowed = {"triton"} if is_triton_file(path.relative_to(package)) else set()
        for node in module_level(ast.parse(path.read_text()).body):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            faults += [f"{path.relative_to(package)}:{node.lineno}: {n}" for n in names if n.partition(".")[0] in OPTIONAL - allowed]
    return faults


def too_long(package: Path, longest_file: int = LONGEST_FILE, longest_function: int = LONGEST_FUNCTION) -> list[str]:
    """Files and functions of `package` beyond the limits, counted in lines."""
    faults = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        if (lines := len(text.splitlines())) > longest_file:
            faults.append(f"{path.relative_to(package)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > longest_function:
                    faults.append(f"{path.relative_to(package)}:{node.lineno}: {node.name} has {lines} lines")
    return faults


def build(root: Path, files: dict[str, str]) -> Path:
    """A made-up package called `house` from relative paths and sources."""
    package = root / "house"
    for name, source in {"__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return package


def test_imports_of_the_package_point_downward_and_never_next_door() -> None:
    assert import_faults(PACKAGE) == []


def test_no_optional_dependency_is_imported_with_the_package() -> None:
    assert eager_optionals(PACKAGE) == []


def test_triton_kernels_are_imported_by_functions_of_their_wrapper_only() -> None:
    assert eager_triton_files(PACKAGE) == []


def test_files_and_functions_stay_short() -> None:
    assert too_long(PACKAGE) == []


def test_the_checker_reads_the_package_and_not_an_empty_folder() -> None:
    seen = {name for path in PACKAGE.rglob("*.py") for _, name in imported_names(ast.parse(path.read_text()), ("hf_kvcaches",))}
    assert "hf_kvcaches.errors.KVCacheError" in seen


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
        requirement.split(">")[0].replace("-", "_").replace("faiss_cpu", "faiss")
        for name, requirements in project["optional-dependencies"].items()
        if name not in ("dev", "docs")
        for requirement in requirements
    }
    assert extras == OPTIONAL


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("equip/cache.py", "from house.subspace import basis", "equip/cache.py:1: the room equip imports its neighbour subspace"),
        ("equip/cache.py", "from ..subspace.basis import fit", "equip/cache.py:1: the room equip imports its neighbour subspace"),
        ("equip/cache.py", "from .. import translate", "equip/cache.py:1: the room equip imports its neighbour translate"),
        ("equip/deep/cache.py", "from ...segments import store", "equip/deep/cache.py:1: the room equip imports its neighbour segments"),
        ("core/cache.py", "import house.warmstart.cache as w", "core/cache.py:1: core imports upward, from warmstart"),
        ("core/cache.py", "def f():\n    from house.equip import cache", "core/cache.py:2: core imports upward, from equip"),
        ("core/cache.py", "def f():\n    import_module('house.equip')", "core/cache.py:2: core imports upward, from equip"),
        ("core/cache.py", "def f():\n    i.import_module('..equip', p)", "core/cache.py:2: core imports upward, from equip"),
        (
            "kernels/gather.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.core.rope import R",
            "kernels/gather.py:3: kernels imports upward, from core",
        ),
        ("stores/disk.py", "from ..core import rope", "stores/disk.py:1: stores imports upward, from core"),
        ("errors.py", "from . import kernels", "errors.py:1: errors imports upward, from kernels"),
        ("compat.py", "from .core.cache import KVCache", "compat.py:1: compat imports upward, from core"),
        (
            "core/cache.py",
            "from house import KVCache",
            "core/cache.py:1: house.KVCache is a name of the front door; import it from the module that has it",
        ),
        ("core/cache.py", "from house.cli import main", "core/cache.py:1: core imports upward, from cli"),
        ("equip/cache.py", "from house.cli.tables import show", "equip/cache.py:1: equip imports upward, from cli"),
        ("helpers.py", "", "helpers.py: 'helpers' has no floor"),
        ("attic/a.py", "", "attic/a.py: 'attic' has no floor"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, path: str, source: str, fault: str) -> None:
    assert import_faults(build(tmp_path, {path: source})) == [fault]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("equip/cache.py", "from house.core.cache import KVCache\nfrom .layer import L\nfrom . import policies\nfrom ..errors import E"),
        ("core/cache.py", "from house.kernels.gather import g\nfrom ..stores import disk\nfrom .rope import R\nimport torch"),
        ("compat.py", "from .errors import E\nimport transformers"),
        ("core/artifact.py", "from house import __version__"),
        ("core/cache.py", "import equip\nfrom equip import subspace\nimport houses.equip"),
        ("__init__.py", "from house.equip import cache\nfrom .subspace import cache as c"),
        ("cli/specs.py", "import house\nfrom house import KVCache\nfrom house.equip import cache\nfrom house.core import cache as c"),
        ("__main__.py", "from house.cli import main"),
    ],
)
def test_an_allowed_import_is_left_alone(tmp_path: Path, path: str, source: str) -> None:
    assert import_faults(build(tmp_path, {path: source})) == []


@pytest.mark.parametrize(
    "source",
    [
        "import triton",
        "import triton.language as tl",
        "from faiss import IndexFlatIP",
        "try:\n    import peft\nexcept ImportError:\n    peft = None",
        "try:\n    import torch\nexcept ImportError:\n    import redis",
        "class C:\n    import matplotlib.pyplot as plt",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import accelerate",
    ],
)
def test_an_optional_dependency_imported_at_once_is_found(tmp_path: Path, source: str) -> None:
    assert len(eager_optionals(build(tmp_path, {"core/a.py": source}))) == 1


@pytest.mark.parametrize(
    "source",
    ["def f():\n    import triton", "if TYPE_CHECKING:\n    import peft", "import tritonish", "from .peft import x", "import torch"],
)
def test_an_optional_dependency_imported_where_it_is_used_is_fine(tmp_path: Path, source: str) -> None:
    assert eager_optionals(build(tmp_path, {"core/a.py": source})) == []


def test_a_file_of_triton_kernels_may_import_triton_and_nothing_else(tmp_path: Path) -> None:
    source = "import triton.language as tl\nimport peft"
    assert eager_optionals(build(tmp_path, {"kernels/a_triton.py": source})) == ["kernels/a_triton.py:2: peft"]
    assert len(eager_optionals(build(tmp_path / "other", {"kernels/a.py": "import triton", "core/a_triton.py": "import triton"}))) == 2


def test_a_file_of_triton_kernels_that_is_imported_at_once_or_by_others_is_found(tmp_path: Path) -> None:
    package = build(
        tmp_path,
        {
            "kernels/a.py": "def f():\n    from house.kernels import a_triton\n    from house.kernels.a_triton import g",
            "kernels/b.py": "def f():\n    from house.kernels import a_triton",
            "kernels/c.py": "from .c_triton import f",
            "core/d.py": "def f():\n    import house.kernels.a_triton",
            "kernels/e_triton.py": "from house.kernels.a_triton import f",
        },
    )
    assert eager_triton_files(package) == ["core/d.py:2: a_triton", "kernels/b.py:2: a_triton", "kernels/c.py:1: c_triton"]


def test_a_long_file_and_a_long_function_are_found(tmp_path: Path) -> None:
    function = "async def f():\n" + "    x = 1\n" * 4
    package = build(tmp_path, {"core/long.py": "x = 1\n" * 11, "core/fits.py": "x = 1\n" * 10, "core/function.py": function})
    assert too_long(package, longest_file=10, longest_function=4) == ["core/function.py:1: f has 5 lines", "core/long.py: 11 lines"]
    assert too_long(package, longest_file=11, longest_function=5) == []


def test_no_two_classes_share_a_name():
    names = [
        node.name
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert sorted({name for name in names if names.count(name) > 1 and not name.startswith("_")}) == []
