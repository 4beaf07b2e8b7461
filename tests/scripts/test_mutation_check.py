"""The faults of the mutation check can be made, and it tells found ones from missed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_kvcaches import ConfigError
from tests.scripts.running import ROOT, import_script, run_script

script = import_script("mutation_check")


@pytest.mark.parametrize("fault", script.read_faults(), ids=lambda fault: fault.name)
def test_each_fault_changes_text_that_occurs_once_and_names_tests_that_exist(fault) -> None:
    changed = fault.applied(ROOT)
    assert changed != fault.path(ROOT).read_text(encoding="utf-8")
    compile(changed, fault.file, "exec")
    assert all((ROOT / "tests" / test.partition("::")[0]).exists() for test in fault.tests)


def test_thirty_faults_lie_in_all_packages() -> None:
    faults = script.read_faults()
    assert len(faults) == len({fault.name for fault in faults}) == 30
    packages = "kernels stores core evaluate codec reuse engines equip subspace segments warmstart translate cli".split()
    assert {fault.file.partition("/")[0] for fault in faults} == set(packages)


@pytest.mark.parametrize("text", ["", "a a"])
def test_text_that_does_not_occur_once_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "hf_kvcaches").mkdir()
    (tmp_path / "hf_kvcaches" / "a.py").write_text(text)
    with pytest.raises(ConfigError, match=r"a fault: expected text that occurs once in a\.py"):
        script.Fault("a fault", "a.py", "a", "b", ()).applied(tmp_path)


@pytest.mark.full
def test_a_fault_is_found_or_missed_by_its_tests_and_undone(tmp_path: Path) -> None:
    files = {"hf_kvcaches/a.py": "x = 1\n", "tests/test_a.py": "from hf_kvcaches.a import x\n\n\ndef test():\n    assert x\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for new, expected in (("x = 0", "found"), ("x = 2", "missed")):
        assert script.check(script.Fault("a", "a.py", "x = 1", new, ("test_a.py",)), tmp_path) == expected
    assert script.check(script.Fault("a", "a.py", "x = 1", "x = 0", ("none.py",)), tmp_path) == "pytest ended with 4"
    assert (tmp_path / "hf_kvcaches" / "a.py").read_text() == "x = 1\n"


def test_an_unknown_option_is_refused() -> None:
    assert run_script("mutation_check", "--all").returncode == 2
