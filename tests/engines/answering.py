"""One vLLM process that answers prompts: `python answering.py TASK.json ANSWERS.json`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any


def answer(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Answer the prompts of a task one after the other.

    Args:
        task: The `model`, the `prompts` as token ids, `max_tokens`; perhaps the connector's `extra` config, `processes` for tensor
            parallelism, `prefix_caching` and tokens of a `block` of vLLM's own, `dtype`, `length`; a process to `kill` before the prompt
            `kill_before`, and `pause` seconds before the prompt `pause_before`.
    """
    from vllm import LLM, SamplingParams

    transfer = {
        "kv_connector": "CodecConnector",
        "kv_connector_module_path": "hf_kvcaches.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": task.get("extra"),
    }
    engine = LLM(
        model=task["model"],
        dtype=task.get("dtype", "float32"),
        max_model_len=task.get("length", 1024),
        max_num_seqs=4,
        block_size=task.get("block", 128),
        max_logprobs=-1,
        enforce_eager=True,
        enable_prefix_caching=task.get("prefix_caching", False),
        tensor_parallel_size=task.get("processes", 1),
        kv_transfer_config=transfer if task.get("extra") else None,
    )
    # The first pass of a process is slow.
    engine.generate([{"prompt_token_ids": [3, 4, 5]}], SamplingParams(max_tokens=2), use_tqdm=False)
    options = SamplingParams(max_tokens=task["max_tokens"], temperature=0, logprobs=-1 if task["max_tokens"] == 1 else 2)
    answers = []
    for number, ids in enumerate(task["prompts"]):
        if number == task.get("kill_before"):
            os.kill(task["kill"], signal.SIGKILL)
        if number == task.get("pause_before"):
            time.sleep(task["pause"])
        began = time.perf_counter()
        (done,) = engine.generate([{"prompt_token_ids": ids}], options, use_tqdm=False)
        output = done.outputs[0]
        answers.append({"ids": list(output.token_ids), "cached": done.num_cached_tokens, "seconds": time.perf_counter() - began})
        answers[-1]["logprobs"] = [entry.logprob for _, entry in sorted(output.logprobs[0].items())]
        ranked = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in output.logprobs]
        answers[-1]["gaps"] = [step[0] - step[1] for step in ranked]
    engine.llm_engine.engine_core.shutdown()
    return answers


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else as many processes as NUMA nodes
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with open(sys.argv[1], encoding="utf-8") as file:
        given = json.load(file)
    answered = answer(given)
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(answered, file)
