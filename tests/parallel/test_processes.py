"""Two processes with half of the heads each, or with prompts of their own: both give the text of a single process, or refuse."""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.distributed import DistributedConfig

from hf_kvcaches import HeadBudgets, KeepProbe, KVCodec, ModelFingerprint, QueryStatistics, SegmentReuseCache, SegmentStore, set_fingerprint
from tests import testbed, tiny
from tests.parallel.holders import HOLDERS, attempted, differences, whole_model
from tests.parallel.processes import in_processes
from tests.parallel.sources import REFUSED, SCENARIOS, outcomes, prompts, refusals, text_of
from tests.translate.pairs import lossless

# In the fast tier: what gathers scores, a codec, bits by bytes, a store and files.
FAST = (
    "growing",
    "tova",
    "future",
    "statistics",
    "codec",
    "bytes_ratio",
    "segments, repaired in lower layers",
    "segments, lost by one process",
    "saved slots",
)
# Processes start, and load two models each.
pytestmark = pytest.mark.timeout(900)
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "parallel.md"
# Rounding in another order may move single codes by a step.
TOLERANCE = 2e-4
CODED = {"int8": 0.05, "rank": 0.05, "energy": 0.05, "bytes_ratio": 0.05, "frequent directions": 0.05}

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _results(tmp_path_factory.mktemp("fast"), FAST)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _results(tmp_path_factory.mktemp("full"), [name for name in (*HOLDERS, *SCENARIOS) if name not in FAST])


def _results(folder: Path, names: Sequence[str]) -> Results:
    model, texts = whole_model(), [tiny.ids(160).tolist()]
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(testbed.FOLDER / "base").save_pretrained(folder / "model")
    made = {
        "codec": KVCodec.calibrate(
            model, None, texts, 1.5, shards=2, progress=False
        ),  # codes of fewer bits change with the rounding of sums
        "statistics": QueryStatistics.calibrate(model, None, texts, progress=False),
        "heads": HeadBudgets.calibrate(model, None, texts, progress=False),
        "probe": KeepProbe.calibrate(model, None, texts, progress=False),
        "translator": lossless(model),
    }
    (folder / "work").mkdir()
    return in_processes(work, folder / "work", folder / "model", made, names)


def work(folder: Path, model_folder: Path, made: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """What one of the processes does."""
    whole = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    model = AutoModelForCausalLM.from_pretrained(model_folder, distributed_config=DistributedConfig(tp_plan="auto")).eval()
    gathered = ModelFingerprint.gathered(model)
    set_fingerprint(model, gathered)
    return {
        "holders": differences(model, whole, made, [name for name in names if name in HOLDERS]),
        "scenarios": outcomes(folder, model, whole, made, [name for name in names if name in SCENARIOS]),
        "refused": refusals(model, made),
        "differs": gathered.differs_from(ModelFingerprint.of(whole)),
        "data parallel": data_parallel(whole, folder / "shared"),
        "guide": attempted(run_guide, folder / "guide", model_folder) if "growing" in names else None,
    }


def data_parallel(model: PreTrainedModel, folder: Path) -> list[tuple[bool, int]]:
    """The prompts in turn, each in the process that it belongs to: whether the text is that without a store, and the tokens reused."""
    store, found = SegmentStore(f"disk:{folder}"), []
    for number, ids in enumerate(prompts()[:2]):
        if number == dist.get_rank():
            cache = SegmentReuseCache(model, store)
            same = torch.equal(text_of(model, ids, cache), text_of(model, ids, None))
            found.append((same, cache.report().reused_tokens))
            store.flush()
        dist.barrier()
    return found


def run_guide(folder: Path, model_folder: Path) -> int:
    """Runs the code of the guide as under torchrun, with another model; how many blocks there are."""
    folder.mkdir(exist_ok=True)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    with contextlib.chdir(folder):
        for block in blocks:
            exec(block.replace("Qwen/Qwen3-0.6B", str(model_folder)), names)
    return len(blocks)


def tiered(names: Sequence[str]) -> list[Any]:
    """Those beside the fast ones are left to the full tier."""
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in names]


@pytest.mark.parametrize("name", tiered(list(HOLDERS)))
def test_a_holder_gives_the_text_of_one_process(name: str, request: pytest.FixtureRequest) -> None:
    for result in request.getfixturevalue("fast" if name in FAST else "full"):
        assert not isinstance(result["holders"][name], str), result["holders"][name]
        same, difference = result["holders"][name]
        assert same
        assert difference < CODED.get(name, TOLERANCE)


@pytest.mark.parametrize("name", tiered(list(SCENARIOS)))
def test_stored_and_saved_heads_give_the_text_of_one_process(name: str, request: pytest.FixtureRequest) -> None:
    for result in request.getfixturevalue("fast" if name in FAST else "full"):
        assert not isinstance(result["scenarios"][name], str), result["scenarios"][name]
        (text, reused), (expected, expected_reused) = result["scenarios"][name]
        assert torch.equal(text, expected)
        assert reused == ([0, expected_reused[1]] if "lost" in name else expected_reused)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_heads_is_refused_by_every_process(name: str, fast: Results) -> None:
    for result in fast:
        error = result["refused"][name]
        assert error.startswith(("UnsupportedError", "FingerprintMismatch"))
        assert any(words in error for words in ("tensor parallelism", "tensor-parallel", "set_fingerprint"))


def test_a_gathered_fingerprint_is_that_of_the_whole_model(fast: Results) -> None:
    assert all(result["differs"] == [] for result in fast)


def test_the_code_of_the_guide_runs(fast: Results) -> None:
    assert [result["guide"] for result in fast] == [4, 4]


def test_processes_with_prompts_of_their_own_share_a_store_on_a_disk(fast: Results) -> None:
    assert [result["data parallel"] for result in fast] == [[(True, 0)], [(True, 300)]]
