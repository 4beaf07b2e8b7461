"""The other examples run as their docstrings say, on the small models of this repository."""

import json
import os

import pytest

from tests import testbed
from tests.examples.running import BASE, EXAMPLES, ROOT, import_example, output_of, start_example
from tests.helpers.stores import free_port

TEXT = testbed.held_out("prose")


def test_every_example_is_listed_short_and_says_how_it_is_run():
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert f"({path.name})" in listed
        assert len(text.splitlines()) < 150
        assert f"examples/{path.name}" in text.split('"""')[1]
    assert "(first_hour.ipynb)" in listed


def test_a_document_is_read_once_and_asked_again_from_its_file(tmp_path, capsys):
    main, document = import_example("long_document").main, tmp_path / "document.txt"
    document.write_text(TEXT[:1500], encoding="utf-8")
    options = ("--model", str(BASE), "--folder", str(tmp_path / "cache"), "--max-new-tokens", "4")
    main([str(document), "Who?", "Where?", *options])
    first = capsys.readouterr().out
    main([str(document), "Where?", *options])
    second = capsys.readouterr().out
    assert "calibrating a codec" in first
    assert "tokens into" in first
    assert "calibrating" not in second
    assert second.startswith("loaded")
    assert first.split("Where?")[1] == second.split("Where?")[1], "the same answer from the file"


@pytest.mark.full
def test_a_prompt_is_handed_over_to_another_process(tmp_path):
    texts, prompt, folder, port = tmp_path / "texts.txt", tmp_path / "prompt.txt", tmp_path / "pair", free_port()
    texts.write_text("\n\n".join(TEXT[start : start + 900].replace("\n\n", "\n") for start in range(0, 18000, 900)), encoding="utf-8")
    prompt.write_text(TEXT[-700:], encoding="utf-8")
    main, tuned = import_example("hand_over").main, BASE.with_name("tuned")
    main(["fit", "--producer", str(BASE), "--consumer", str(tuned), "--texts", str(texts), "--translator", str(folder)])
    common = ("--translator", folder, "--prompt", prompt, "--port", port)
    consumer = start_example("hand_over", "answer", "--consumer", tuned, *common, "--max-new-tokens", 4)
    producer = start_example("hand_over", "produce", "--producer", BASE, *common)
    assert output_of(producer).startswith("sent ")
    *_, last = output_of(consumer).splitlines()
    translated, tokens = int(last.split()[0]), int(last.split()[2])
    assert translated == tokens - 1
    assert 0 < float(last.split(", ")[1].split("%")[0]) < 5


def prompts_and_context(folder):
    prompts, context = folder / "prompts.txt", folder / "context.txt"
    prompts.write_text("The ship\nA stranger\n\nNobody\n", encoding="utf-8")
    context.write_text(TEXT[:1500], encoding="utf-8")
    return prompts, context


@pytest.fixture(scope="module")
def by_one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    prompts, context = prompts_and_context(folder)
    options = ("--model", BASE, "--context", context, "--store", f"disk:{folder / 'store'}", "--max-new-tokens", 4)
    return output_of(start_example("multi_gpu", prompts, *options)).splitlines()


def test_one_process_answers_all_prompts_behind_a_context_that_is_read_once(by_one_process):
    assert [line.split(": ")[1].split(" -> ")[0] for line in by_one_process] == ["The ship", "A stranger", "Nobody"]
    assert all(int(line.split(", ")[1].split()[0]) > 200 for line in by_one_process)


@pytest.mark.full
def test_two_processes_share_the_prompts_and_the_store_and_answer_as_one(by_one_process, tmp_path):
    prompts, context = prompts_and_context(tmp_path)
    options = ("--model", BASE, "--context", context, "--store", f"disk:{tmp_path / 'store'}", "--max-new-tokens", 4)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    lines = output_of(start_example("multi_gpu", prompts, *options, before=launcher)).splitlines()
    assert [line.split(", ")[0] for line in lines] == ["process 0", "process 1", "process 0"]
    assert [line.split(", ", 1)[1] for line in lines] == [line.split(", ", 1)[1] for line in by_one_process]


def test_the_notebook_runs_from_top_to_bottom_and_has_no_outputs_of_its_own(monkeypatch, capsys):
    monkeypatch.setitem(os.environ, "MODEL", str(ROOT / "tests" / "testbed" / "base"))
    notebook = json.loads((EXAMPLES / "first_hour.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    out = capsys.readouterr().out
    assert "tokens reused" in out
    assert "align" in out
