"""Calibration in several processes: each reads a share of the texts, and all get the codec of one process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_kvcaches import KVCodec
from tests import tiny
from tests.codec.measured import energies

ROOT = Path(__file__).parents[2]
_WORKER = """
import sys
from accelerate import PartialState
from hf_kvcaches import KVCodec
from tests import tiny
PartialState(cpu=True)
texts = [tiny.ids(40, seed=seed).tolist() for seed in range(int(sys.argv[1]))]
codec = KVCodec.calibrate(tiny.llama(), None, texts, metric=sys.argv[3], progress=False)
codec.save_pretrained(sys.argv[2])
PartialState().destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.parametrize(("texts", "metric"), [(5, "loss"), (1, "loss"), (5, "plain"), (1, "plain")])
def test_two_processes_get_the_codec_of_one(tmp_path: Path, texts: int, metric: str) -> None:
    pytest.importorskip("accelerate")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(texts), str(tmp_path / str(rank)), metric],
            cwd=ROOT,
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
    alone = KVCodec.calibrate(
        tiny.llama(), None, [tiny.ids(40, seed=seed).tolist() for seed in range(texts)], metric=metric, progress=False
    )
    together = [KVCodec.from_pretrained(tmp_path / str(rank), model=tiny.llama()) for rank in range(2)]
    assert together[0].digest == together[1].digest
    assert together[0].settings == alone.settings
    for mine, theirs in zip(energies(together[0]), energies(alone), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-5 * float(theirs.max()))
