"""The demo runs as a user runs it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.scripts.running import run_script


def demo(*arguments: str | Path | int) -> subprocess.CompletedProcess[str]:
    return run_script("demo", "--device", "cpu", *arguments)


def cells(line: str) -> list[str]:
    return [cell for cell in line.split("  ") if cell.strip()]


@pytest.mark.full
def test_the_document_is_read_by_every_cache_and_its_questions_are_judged():
    done = demo("--model", "base", "--max-new-tokens", 4, "--questions", 2)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("cache "))
    full, growing, future, streaming, subspace = (cells(lines[header + 2 + row]) for row in range(5))
    assert growing[1].strip() == "yes"
    assert float(growing[2]) < 1e-9
    sizes = [int(row[3].replace(",", "")) for row in (full, growing, future, streaming, subspace)]
    assert sizes[1] >= sizes[0] > 0
    assert all(0.4 < size / sizes[0] < 0.7 for size in sizes[2:4])
    assert 0.05 < sizes[4] / sizes[0] < 0.35, "codes, and 68 exact tokens"
    assert done.stdout.count(", right\n") + done.stdout.count(", the notes say") == 12, "two questions to six caches"
    first, second = (cells(next(line for line in lines if line.startswith(name))) for name in ("as they come", "in another order"))
    assert set(map(int, first[1:4])) == {0}
    assert int(first[4]) > 0, "nothing is stored yet, so all is computed"
    assert (first[5].strip(), first[6].strip()) == ("0%", "yes")
    assert sum(map(int, second[1:4])) > int(second[4]) > 0, "most of the second prompt was in the first"
    assert int(second[5].strip(" %")) > 0
    assert "WarmStartCache" in done.stdout


def test_a_prompt_of_ones_own_is_continued():
    done = demo("--model", "base", "--prompt", "Once upon a time", "--max-new-tokens", 3, "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert re.search(r"1 rows of up to \d+ tokens, 3 new tokens each, torch.bfloat16", done.stdout)
    assert "the notes say" not in done.stdout
    assert "in another order" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max-new-tokens", "0"), "--max-new-tokens: expected at least 1, got 0"),
        (("--model", "no/such/folder/anywhere"), "no/such/folder/anywhere"),
    ],
)
def test_a_wrong_argument_is_named_without_a_traceback(arguments, said):
    done = demo(*arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
