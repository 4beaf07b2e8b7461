"""The errors: a small tree, each also the builtin that one would catch, with messages that say what to do."""

import itertools
import pickle

import pytest

import hf_kvcaches
from hf_kvcaches import errors

NATURAL = {
    "ConfigError": ValueError,
    "UnsupportedError": NotImplementedError,
    "FingerprintMismatch": ValueError,
    "ArtifactError": ValueError,
    "MissingDependencyError": ImportError,
    "PoolExhausted": MemoryError,
}


def own_errors() -> dict[str, type[BaseException]]:
    found = {name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, BaseException)}
    return {name: value for name, value in found.items() if value.__module__ == errors.__name__}


def test_the_tree_holds_exactly_the_documented_errors() -> None:
    assert set(own_errors()) == {"KVCacheError", *NATURAL}
    for name in own_errors():
        assert name in (errors.__doc__ or "")


@pytest.mark.parametrize(("name", "builtin"), NATURAL.items())
def test_each_error_is_caught_as_its_root_and_as_its_builtin(name: str, builtin: type[Exception]) -> None:
    kind = own_errors()[name]
    for caught in (errors.KVCacheError, builtin):
        with pytest.raises(caught, match="what happened"):
            raise kind("what happened")


def test_the_root_is_no_builtin_that_other_code_raises() -> None:
    assert errors.KVCacheError.__bases__ == (Exception,)


def test_no_error_is_a_kind_of_another() -> None:
    for first, second in itertools.permutations(NATURAL, 2):
        assert not issubclass(own_errors()[first], own_errors()[second])


@pytest.mark.parametrize("name", ["KVCacheError", *NATURAL])
def test_errors_are_public_and_survive_a_process_boundary(name: str) -> None:
    kind = getattr(hf_kvcaches, name)
    assert kind is own_errors()[name]
    copy = pickle.loads(pickle.dumps(kind("budget: too small")))
    assert (type(copy), str(copy)) == (kind, "budget: too small")


def test_a_config_error_says_argument_expected_got_and_what_to_do() -> None:
    error = errors.ConfigError.of("budget", "a positive number of slots", -4, "Leave it out to keep every token.")
    assert str(error) == "budget: expected a positive number of slots, got -4. Leave it out to keep every token."
    assert type(error) is errors.ConfigError
    assert str(errors.ConfigError.of("path", "a folder", "")).endswith("got ''.")
    assert str(errors.ConfigError.of("path", "a folder", None)).endswith("got None.")
