"""Wrong arguments are refused before torch is imported, and Ctrl-C ends every command without a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_kvcaches import cli
from hf_kvcaches.cli import COMMANDS, main
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("verify", "--model", BASE, "--cache", "EquipCash", "--prompt", "a"), "Did you mean 'EquipCache'?"),
        (("verify", "--model", BASE, *CACHE), "--prompt --file is required"),
        (("verify", "--model", "./nowhere", *CACHE, "--prompt", "a"), "There is no such folder"),
        (("eval", "--model", BASE, *CACHE), "--texts: expected files of text, or --suite"),
        (("bench", "--model", BASE, *CACHE, "--steps", "0"), "--steps: expected at least 1"),
        (("recommend", "--model", BASE, "--context", "long"), "--context: expected a number of tokens"),
        (("calibrate", "segments", "--model", BASE, "--out", "x", "--prompts", "no-such.jsonl"), "--prompts: expected files that exist"),
        (("calibrate", "translator", "--producer", BASE, "--consumer", "./none", "--out", "x", "--texts", ROOT / "README.md"), "./none"),
    ],
)
def test_a_wrong_argument_is_refused_before_torch_is_imported(options, message):
    program = f"""
import sys
from hf_kvcaches.cli import main
try:
    code = main({[str(option) for option in options]!r})
finally:
    assert not {{"torch", "transformers"}} & set(sys.modules)
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_prints_the_usage_of_its_command(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([str(option) for option in (*COMPLETE[command], "--nope")])
    printed = capsys.readouterr().err
    assert end.value.code == 2
    assert printed.startswith(f"usage: hf-kvcaches {'calibrate codec' if command == 'calibrate' else command} ")
    assert "unrecognized arguments: --nope" in printed


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_ends_a_command_with_130_and_one_word(command, capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib.import_module(f"hf_kvcaches.cli.{COMMANDS[command][-1]}"), "run", interrupted)
    done = run(capsys, *COMPLETE[command])
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_said_to_be_none(capsys, monkeypatch):
    def offline(*args, **options):
        raise OSError("We couldn't connect to the Hub.")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", offline)
    done = run(capsys, "recommend", "--model", "nowhere")
    assert done.code == 2
    assert done.err == (
        "error: model: expected a folder that exists, or a model of the Hub, got 'nowhere'. "
        "There is no such folder, and from the Hub came: We couldn't connect to the Hub.\n"
    )


def test_the_same_cache_twice_is_refused(capsys):
    done = run(capsys, "eval", "--model", BASE, *CACHE, "--cache", "GrowingCache()", "--suite", "needles")
    assert done.code == 2
    assert "--cache: expected caches that differ" in done.err
