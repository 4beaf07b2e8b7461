"""Known answers are asked behind a context, rows are kept in a log, and summaries count what the full cache can do."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import EquipCache
from hf_kvcaches.cli.suite import Log, answers, needle_summary, read_context
from hf_kvcaches.errors import ArtifactError, ConfigError
from tests import tiny


def test_an_answer_matches_exactly_if_greedy_decoding_writes_it() -> None:
    model, context, question = tiny.llama(), tiny.ids(20).tolist(), tiny.ids(5, seed=1).tolist()
    prompt = torch.tensor([[*context, *question]])
    written = model.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)[0, -4:].tolist()
    other = [*written[:3], (written[3] + 1) % tiny.VOCABULARY]
    cache = read_context(model, DynamicCache(config=model.config), context)
    right, wrong = answers(model, cache, [(question, written), (question, other)])
    assert (right.matches, wrong.matches) == (True, False)
    assert right.loss < wrong.loss
    assert cache.get_seq_length() == 20
    with pytest.raises(ConfigError, match="questions"):
        answers(model, cache, [([], [6])])


def test_a_context_is_pruned_before_its_questions_are_known() -> None:
    model = tiny.llama()
    cache = read_context(model, EquipCache(model, "kvzip", 0.25, head_budgets=None), tiny.ids(80).tolist())
    assert max(cache.report().kept) <= 20


def test_rows_in_the_log_are_not_measured_again(tmp_path: Path) -> None:
    measured: list[str] = []

    def rows_of(name: str) -> list[dict[str, object]]:
        measured.append(name)
        return [{"value": len(measured)}]

    path = tmp_path / "new" / "log.jsonl"
    first = Log(path).measured("task", "a", 0, rows_of, "a")
    log = Log(path)
    assert first == log.measured("task", "a", 0, rows_of, "a") == [{"task": "task", "cache": "a", "item": 0, "sample": 0, "value": 1}]
    log.measured("task", "b", 0, rows_of, "b")
    assert measured == ["a", "b"]
    assert Log(path).rows == log.rows


def test_a_damaged_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"task": "a"\n', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"log\.jsonl: a line is no row"):
        Log(tmp_path / "log.jsonl")


def test_answers_that_the_full_cache_does_not_give_are_not_asked_of_others() -> None:
    row = {"task": "needles words 4", "sample": 0, "losses": [1.0, 2.0], "continuation": 3.0}
    rows = [row | {"cache": "full cache", "right": [True, False]}, row | {"cache": "x", "right": [True, True], "continuation": 3.25}]
    found = needle_summary(rows, "x")
    assert (found["right"], found["questions"]) == (1, 1)
    assert found["continuation_loss"] == pytest.approx(0.25)
