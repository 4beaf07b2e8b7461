"""The command starts fast, refuses wrong arguments before torch is imported, and ends what a user can mend with a sentence."""

import importlib
import subprocess
import sys

import pytest

import hf_kvcaches
from hf_kvcaches.cli import COMMANDS
from hf_kvcaches.cli.arguments import model_source
from tests.cli.running import BASE, run
from tests.scripts.running import ROOT

CACHE = ("--cache", "GrowingCache")
# Of each command, what it needs.
COMPLETE = {
    "recommend": ("recommend", "--model", BASE),
    "verify": ("verify", "--model", BASE, *CACHE, "--prompt", "a"),
    "eval": ("eval", "--model", BASE, *CACHE, "--suite", "needles"),
    "bench": ("bench", "--model", BASE, *CACHE),
    "calibrate": ("calibrate", "codec", "--model", BASE, "--out", "x", "--texts", BASE / "config.json"),
}
TRANSLATOR = ("calibrate", "translator", "--producer", BASE, "--consumer", "./none", "--out", "x", "--texts", BASE / "config.json")
WRONG = [
    ((), "COMMAND"),
    (("verrify",), "invalid choice: 'verrify'"),
    (("verify", "--model", BASE, *CACHE), "--prompt --file is required"),
    (("verify", "--model", BASE, "--cache", "EquipCash", "--prompt", "a"), "Did you mean 'EquipCache'?"),
    (("verify", "--model", BASE, *CACHE, "--file", "no-such.txt"), "--file: expected files that exist"),
    (("verify", "--model", "./nowhere", *CACHE, "--prompt", "a"), "got './nowhere'. There is no such folder."),
    (("bench", "--model", "/absolute", *CACHE), "got '/absolute'. There is no such folder."),
    (("recommend", "--model", "folders/of/models"), "got 'folders/of/models'. There is no such folder."),
    (("eval", "--model", BASE, *CACHE), "--texts: expected files of text, or --suite"),
    ((*COMPLETE["bench"], "--steps", "0"), "--steps: expected at least 1, got 0"),
    ((*COMPLETE["bench"], "--rounds", "1"), "--rounds: expected at least 2"),
    ((*COMPLETE["recommend"], "--context", "long"), "--context: expected a number of tokens, such as 4096 or 32k"),
    (("calibrate", "segments", "--model", BASE, "--out", "x", "--prompts", "no-such.jsonl"), "--prompts: expected files that exist"),
    (TRANSLATOR, "--consumer: model: expected a folder that exists, or a hub id such as owner/name, got './none'."),
    *((("calibrate", kind, "--out", "x"), "required") for kind in ("codec", "segments", "warmstart", "translator")),
    *(((*options, "--nope"), "unrecognized arguments: --nope") for options in COMPLETE.values()),
]


def fresh(program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that may not have imported torch in the end."""
    end = 'assert not {"torch", "transformers"} & set(sys.modules)'
    program = f"import sys, time\nfrom hf_kvcaches.cli import main\ntry:\n    {program}\nfinally:\n    {end}\n"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)


@pytest.mark.parametrize("command", ["", *COMMANDS, "calibrate codec"])
def test_help_takes_at_most_half_a_second_of_processor_time(command):
    done = fresh(f"main({[*command.split(), '--help']!r})\nfinally:\n    print(time.process_time(), file=sys.stderr)\ntry:\n    pass")
    assert f"hf-kvcaches {command}" in done.stdout
    assert command or all(f" {name} " in done.stdout.replace("\n", " ") for name in COMMANDS)
    assert float(done.stderr) <= 0.5


def test_wrong_arguments_are_refused_before_torch_is_imported():
    calls = [[str(option) for option in options] for options, _ in WRONG]
    program = f"""
    for options in {calls!r}:
        try:
            code = main(options)
        except SystemExit as end:
            code = end.code
        assert code == 2, (options, code)
        print("----", file=sys.stderr)"""
    for (options, message), printed in zip(WRONG, fresh(program).stderr.split("----\n")[:-1], strict=True):
        assert message in printed, (options, printed)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_prints_the_usage_of_its_command(command, capsys):
    printed = run(capsys, *COMPLETE[command], "--nope").err
    assert printed.startswith(f"usage: hf-kvcaches {'calibrate codec' if command == 'calibrate' else command} ")


def test_what_a_user_can_mend_ends_with_2_and_a_sentence(capsys):
    for command, option, value, expected in (
        ("verify", "--device", "gpuu", "auto"),
        ("recommend", "--memory", "much", "a number of bytes"),
    ):
        done = run(capsys, *COMPLETE[command], option, value)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"error: {option}: expected {expected}")


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_ends_a_command_with_130_and_one_word(command, capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(f"hf_kvcaches.cli.{COMMANDS[command][-1]}"), f"run_{command}", interrupted)
    assert run(capsys, *COMPLETE[command]) == (130, "", "interrupted\n")


@pytest.mark.full
def test_the_module_runs_as_the_command():
    command = [sys.executable, "-m", "hf_kvcaches", "verify", "--model", "nowhere/at-all-here", "--cache", "GrowingCache(", "--prompt", "a"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--cache: cache: expected a class, or a call of it" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_is_the_packages(capsys):
    assert run(capsys, "--version") == (0, f"hf-kvcaches {hf_kvcaches.__version__}\n", "")


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_said_to_be_none(capsys, monkeypatch):
    def offline(*args, **options):
        raise OSError("We couldn't connect to the Hub.")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", offline)
    done = run(capsys, "recommend", "--model", "nowhere")
    assert done.code == 2
    assert "got 'nowhere'. There is no such folder, and from the Hub came: We couldn't connect to the Hub.\n" in done.err


def test_the_name_of_a_real_model_is_its_folder_in_the_checkout(tmp_path, monkeypatch, capsys):
    (tmp_path / ".models").mkdir()
    (tmp_path / ".models" / "smollm2").symlink_to(BASE, target_is_directory=True)
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    assert run(capsys, "recommend", "--model", "smollm2").code == 0
    done = run(capsys, "recommend", "--model", "gemma3")
    assert done.code == 2
    assert "make models" in done.err
    (tmp_path / "deeper" / "gemma3").mkdir()
    assert model_source("gemma3") == "gemma3"
