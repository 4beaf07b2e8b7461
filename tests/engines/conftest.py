"""Codecs of the testbed's model for engines, a Redis server, and processes of vLLM."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_kvcaches import KVCodec
from hf_kvcaches.engines.engine_codec import save
from tests.helpers.stores import shared_server
from tests.testbed import FOLDER, held_out, load

__all__ = ["shared_server"]

BASE, RATIOS = str(FOLDER / "base"), (0.25, 0.125, 0.0625)


def codecs(folder: Path, engine: str, rotation: str) -> dict[float, str]:
    """A folder for each share of the bytes."""
    model, tokenizer = load()
    ids = tokenizer(held_out(), add_special_tokens=False)["input_ids"][:8192]
    texts = [ids[start : start + 512] for start in range(0, len(ids), 512)]
    codec = KVCodec.calibrate(model, None, texts, rotation=rotation, recent=0, progress=False)
    for ratio in RATIOS:
        save(codec.at(ratio), folder / str(ratio), engine, BASE)
    return {ratio: str(folder / str(ratio)) for ratio in RATIOS}


@pytest.fixture(scope="session")
def vllm_codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[float, str]:
    return codecs(tmp_path_factory.mktemp("vllm"), "vllm", "aware")


@pytest.fixture(scope="session")
def lmcache_codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[float, str]:
    return codecs(tmp_path_factory.mktemp("lmcache"), "lmcache", "post")


@pytest.fixture(scope="session")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Answers prompts in a process of vLLM's; see `answering.answer`."""

    def asked(prompts: list[list[int]], codec: str = "", store: str = "", **task: Any) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("task")
        extra = {"codec": codec, "store": store, "timeout": 10} if codec else None
        (folder / "task.json").write_text(json.dumps({"model": BASE, "prompts": prompts, "max_tokens": 24, "extra": extra} | task))
        command = [sys.executable, str(Path(__file__).parent / "answering.py"), str(folder / "task.json"), str(folder / "answers.json")]
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads((folder / "answers.json").read_text())

    return asked
