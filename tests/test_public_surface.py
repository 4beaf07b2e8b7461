"""What `import hf_kvcaches` gives: the promised names, documented, and nothing imported before it is asked for."""

import ast
import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hf_kvcaches
from hf_kvcaches.errors import MissingDependencyError, require

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "transformers", "triton", "peft", "redis", "accelerate"}


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after a statement."""
    program = f"import sys, json\n{statement}\nprint(json.dumps(sorted({{n.partition('.')[0] for n in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def extras_asked_for(package: Path) -> set[str]:
    """The extras that calls of `require` in the package name."""
    extras = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "require":
                given = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "extra")]
                extras |= {ast.literal_eval(value) for value in given}
    return extras


def test_all_lists_every_name_that_has_a_home_once() -> None:
    assert sorted(hf_kvcaches.__all__) == sorted(hf_kvcaches._HOMES)


def test_type_checkers_see_the_names_in_the_same_homes() -> None:
    tree = ast.parse(Path(hf_kvcaches.__file__).with_suffix(".pyi").read_text())
    seen = {alias.asname: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == {name: f"hf_kvcaches.{home}" for name, home in hf_kvcaches._HOMES.items()}


@pytest.mark.parametrize("name", hf_kvcaches.__all__)
def test_public_name_imports_and_is_documented(name: str) -> None:
    value = getattr(hf_kvcaches, name)
    assert value.__module__.startswith("hf_kvcaches."), "a public name is this package's own"
    # An inherited docstring describes another class, and a dataclass without one gets its signature.
    doc = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    assert doc
    assert not doc.startswith(f"{name}(")


def test_star_import_gives_exactly_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from hf_kvcaches import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(hf_kvcaches.__all__)


@pytest.mark.parametrize("statement", ["import hf_kvcaches", "from hf_kvcaches import ConfigError, KVCacheError, MissingDependencyError"])
def test_neither_the_package_nor_its_errors_import_anything_heavy(statement: str) -> None:
    modules = modules_after(statement)
    assert "hf_kvcaches" in modules
    assert modules & HEAVY == set()


@pytest.mark.full
def test_using_every_public_name_imports_no_optional_dependency() -> None:
    # transformers and torch look for accelerate, peft and triton by themselves; what they hold without us is theirs.
    theirs = modules_after("import torch, transformers; from transformers import Cache, PreTrainedModel, GenerationMixin")
    ours = modules_after("from hf_kvcaches import *")
    assert "transformers" in ours
    assert (ours - theirs) & HEAVY == set()


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no_such_cache"):
        hf_kvcaches.no_such_cache  # noqa: B018
    with pytest.raises(ImportError, match="no_such_cache"):
        exec("from hf_kvcaches import no_such_cache")


def test_a_name_shows_before_its_import_and_is_kept_after_it() -> None:
    program = """
import hf_kvcaches
assert set(hf_kvcaches.__all__) <= set(dir(hf_kvcaches))
assert "ConfigError" not in vars(hf_kvcaches)
assert hf_kvcaches.ConfigError is vars(hf_kvcaches)["ConfigError"]
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_a_missing_extra_names_itself_and_the_command() -> None:
    with pytest.raises(MissingDependencyError) as caught:
        require("no_such_module_anywhere", "retrieval", "Looking up paraphrases")
    message = str(caught.value)
    assert message.startswith("Looking up paraphrases needs the module 'no_such_module_anywhere'")
    assert "pip install 'hf-kvcaches[retrieval]'" in message
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_extras_named_in_errors_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras_asked_for(ROOT / "hf_kvcaches") <= set(extras)


@pytest.mark.parametrize("name", [name for name in hf_kvcaches.__all__ if name.endswith("Cache")])
def test_the_signature_of_a_cache_is_that_of_its_constructor(name: str) -> None:
    parameters = inspect.signature(getattr(hf_kvcaches, name)).parameters
    assert next(iter(parameters)) in ("model", "consumer")
