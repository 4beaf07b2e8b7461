"""Calibration in several processes: each reads a share of the texts, and all get the codec of one process."""

import os
from pathlib import Path

import pytest

from hf_kvcaches import KVCodec
from tests import tiny
from tests.codec.measured import calibrate, same_energies
from tests.parallel.processes import in_processes

CASES = [(5, "loss"), (1, "loss"), (5, "plain"), (1, "plain")]


def codec_of(texts: int, metric: str) -> KVCodec:
    return calibrate(texts=[tiny.ids(40, seed=seed).tolist() for seed in range(texts)], metric=metric)


def work(folder: Path) -> list[KVCodec]:
    """What one of the processes makes of each case."""
    from accelerate import PartialState

    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]  # or accelerate looks for other machines
    PartialState(cpu=True)
    return [codec_of(*case) for case in CASES]


@pytest.mark.full
def test_two_processes_get_the_codec_of_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for case, one, other in zip(CASES, *in_processes(work, tmp_path), strict=True):
        assert one.digest == other.digest
        same_energies(one, codec_of(*case))
