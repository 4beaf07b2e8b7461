"""Only `compat.py` knows private or unofficial names of torch, transformers, peft and accelerate."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "hf_kvcaches"
# The one file that may.
COMPAT = "compat.py"
# Names without an underscore that no documentation promises.
UNOFFICIAL = {"get_layer_types_and_kwargs", "output_capturing", "weights_map", "execution_device"}
# What named tuples promise.
PROMISED = {"_asdict", "_fields", "_make", "_replace"}
# Private names of others that some class of the package has, too.
OF_OTHERS = {"_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_hf_hook", "_old_forward", "_orig_mod"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name.strip("_") != ""


def names_defined(tree: ast.AST) -> Iterator[str]:
    """The names that a file gives to functions, classes, variables, arguments and attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_self(node):
            yield node.attr


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_names(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of what is private or unofficial, and not the package's own."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and not is_of_self(node):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not (node.level or (node.module or "").startswith("hf_kvcaches")):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [step for alias in node.names if not alias.name.startswith("hf_kvcaches") for step in alias.name.split(".")]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr", "delattr"):
            names = [
                argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
        for name in names:
            if name in UNOFFICIAL | OF_OTHERS or (is_private(name) and name not in own):
                yield getattr(node, "lineno", 0), name


def faults(package: Path) -> list[str]:
    """Where files of `package` other than the one that may use private names of others."""
    trees = {path.relative_to(package).as_posix(): ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    own = {name for tree in trees.values() for name in names_defined(tree)} | PROMISED
    uses = ((path, line, name) for path, tree in trees.items() if path != COMPAT for line, name in private_names(tree, own))
    return [f"{path}:{line}: {name}" for path, line, name in uses]


def test_private_names_of_other_packages_are_in_compat_alone() -> None:
    assert faults(PACKAGE) == []
