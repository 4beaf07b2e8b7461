"""The command starts fast, names its commands, and ends errors that a user can mend with a sentence."""

import subprocess
import sys
import tomllib

import pytest

import hf_kvcaches
from hf_kvcaches.cli import COMMANDS, main
from hf_kvcaches.cli.options import model_source
from tests.cli.running import BASE, run
from tests.scripts.running import ROOT


def test_help_names_all_commands_and_imports_no_torch():
    text, _ = _printed("--help")
    assert all(f" {command} " in text.replace("\n", " ") for command in COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, "calibrate codec"])
def test_help_of_a_command_takes_at_most_half_a_second_of_processor_time(command):
    text, seconds = _printed(*command.split(), "--help")
    assert f"hf-kvcaches {command}" in text
    assert seconds <= 0.5


def test_scripts_get_the_module_of_options_and_not_that_of_arguments():
    program = "from hf_kvcaches.cli import options; print(options.__name__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "hf_kvcaches.cli.options\n"


def _printed(*options: str) -> tuple[str, float]:
    """What the command prints, and the processor time of its process; it imports neither torch nor transformers."""
    program = f"""
import sys, time
from hf_kvcaches.cli import main
try:
    main({list(options)!r})
finally:
    assert not {{"torch", "transformers"}} & set(sys.modules)
    print(time.process_time(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout, float(done.stderr)


@pytest.mark.full
def test_the_module_runs_as_the_command():
    command = [sys.executable, "-m", "hf_kvcaches", "verify", "--model", "nowhere/at-all-here", "--cache", "GrowingCache(", "--prompt", "a"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --cache: expected a class, or a call of it")
    assert "Traceback" not in done.stderr


def test_the_script_of_the_project_is_the_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"hf-kvcaches": "hf_kvcaches.cli:main"}


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"hf-kvcaches {hf_kvcaches.__version__}\n"


@pytest.mark.parametrize("options", [[], ["verrify"], ["verify", "--model", "x"]])
def test_arguments_that_are_missing_or_unknown_end_with_2(options, capsys):
    with pytest.raises(SystemExit) as end:
        main(options)
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["verify", "--model", "no-such-folder/at-all/", "--cache", "GrowingCache", "--prompt", "a"], "no-such-folder"),
        (["verify", "--model", BASE, "--cache", "GrowingCache", "--file", "no-such.txt"], "--file: expected files that exist"),
        (["verify", "--model", BASE, "--cache", "GrowingCache", "--prompt", "a", "--context", "0"], "--context: expected at least 1"),
        (["verify", "--model", BASE, "--cache", "GrowingCache", "--prompt", "a", "--device", "gpuu"], "--device: expected auto"),
        (["eval", "--model", BASE, "--cache", "EquipCash", "--texts", BASE / "config.json"], "Did you mean 'EquipCache'?"),
        (["bench", "--model", BASE, "--cache", "GrowingCache", "--rounds", "1"], "--rounds: expected at least 2"),
        (["recommend", "--model", BASE, "--context", "long"], "--context: expected a number of tokens, such as 4096 or 32k"),
        (["recommend", "--model", BASE, "--memory", "much"], "--memory: expected a number of bytes"),
        (["calibrate", "codec", "--model", BASE, "--texts", "no-such.txt", "--out", "x"], "--texts: expected files that exist"),
    ],
)
def test_what_a_user_can_mend_ends_with_2_and_a_sentence(options, message, capsys):
    done = run(capsys, *options)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert message in done.err


@pytest.mark.parametrize("command", ["recommend", "verify", "bench"])
@pytest.mark.parametrize("name", ["./no/such/folder", "folders/of/models", "/absolute", "no-such-folder/"])
def test_a_folder_that_does_not_exist_is_said_to_be_none(command, name, capsys):
    options = {"recommend": (), "verify": ("--cache", "GrowingCache", "--prompt", "a"), "bench": ("--cache", "GrowingCache")}[command]
    done = run(capsys, command, "--model", name, *options)
    assert (done.code, done.out) == (2, "")
    assert (
        done.err == f"error: model: expected a folder that exists, or a hub id such as owner/name, got {name!r}. There is no such folder.\n"
    )


def test_the_name_of_a_real_model_is_its_folder_in_the_checkout(tmp_path, monkeypatch, capsys):
    (tmp_path / ".models").mkdir()
    (tmp_path / ".models" / "smollm2").symlink_to(BASE, target_is_directory=True)
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    assert run(capsys, "recommend", "--model", "smollm2").code == 0


def test_a_real_model_that_was_not_made_is_refused_with_what_makes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    done = run(capsys, "recommend", "--model", "gemma3")
    assert done.code == 2
    assert "make models" in done.err


def test_a_folder_named_as_a_real_model_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gemma3").mkdir()
    assert model_source("gemma3") == "gemma3"
