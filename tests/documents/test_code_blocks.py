"""The code of the documents runs as it stands, from the first block of a page to the last."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_kvcaches import SegmentStore
from tests.documents.blocks import ROOT, blocks, documents, missing_outputs, run
from tests.documents.reader import add_policy

# Pages that calibrate or fit, and take seconds.
SLOW = {"docs/subspace.md", "docs/translation.md"}
# Pages whose code needs several processes: tests/parallel runs it.
ELSEWHERE = {"docs/parallel.md"}
NAMES = [path.relative_to(ROOT).as_posix() for path in documents() if any(blocks(path, "python"))]
WITH_CODE = [name for name in NAMES if name not in ELSEWHERE]


def equip(names: dict[str, Any]) -> None:
    assert names["pool"].free_pages == names["pool"].pages, "the cache that held pages was reset"
    assert names["cache"].report().seen == names["inputs"]["input_ids"].shape[1], "the drafts were taken back"


def subspace(names: dict[str, Any]) -> None:
    assert names["cache"].report().seen > names["inputs"]["input_ids"].shape[1]
    assert Path("kv-codec").is_dir()


def segments(names: dict[str, Any]) -> None:
    report = names["report"]
    assert 0.4 < report.flops_saved < 0.9, "most of the second prompt was in the first"
    assert report.reused_tokens > 3 * report.computed_tokens
    assert any(Path("segments").iterdir())
    with SegmentStore(os.environ["REDIS_URL"]) as shared:
        assert shared.report().segments > 0
    assert (names["store"].report().segments, names["small"].report().segments > 0) == (0, True)


def warmstart(names: dict[str, Any]) -> None:
    report = names["report"]
    assert report.strategy == "align"
    assert report.reused_tokens > report.computed_tokens
    assert len(names["library"]) == 3
    assert Path("my-library").is_dir()


def translation(names: dict[str, Any]) -> None:
    assert names["cache"].report().translated == names["input_ids"].shape[1] - 1
    assert names["translator"].settings.recompute_layers <= 1


OUTCOMES: dict[str, Callable[[dict[str, Any]], None]] = {
    "docs/equip.md": equip,
    "docs/subspace.md": subspace,
    "docs/segments.md": segments,
    "docs/warmstart.md": warmstart,
    "docs/translation.md": translation,
}


@pytest.mark.parametrize("document", [pytest.param(name, marks=[pytest.mark.full] if name in SLOW else []) for name in WITH_CODE])
def test_the_blocks_of_a_document_run_one_after_the_other(
    document: str, reader: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if any("REDIS_URL" in block.code for block in blocks(ROOT / document, "python")):
        request.getfixturevalue("redis_url")
    if "segment-policy" in (ROOT / document).read_text(encoding="utf-8"):
        add_policy(reader, reader / "Qwen" / "Qwen3-0.6B")
    names = run(ROOT / document)
    assert missing_outputs(ROOT / document, capsys.readouterr().out) == []
    OUTCOMES.get(document, lambda names: None)(names)
