"""Prompts on several GPUs: one model spread over all of them, or one copy on each with a shared store of what they have read.

    python examples/multi_gpu.py prompts.txt --model Qwen/Qwen3-0.6B                                 # device_map="auto"
    torchrun --nproc-per-node 2 examples/multi_gpu.py prompts.txt --model Qwen/Qwen3-0.6B            # a copy in each process

Caches follow the devices of a model's layers: with `device_map="auto"` nothing else has to be said. Under torchrun each process answers its
share of the prompts (one a line), and all find what others have stored in `--store`; without GPUs processes talk by gloo, on the CPU.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvcaches import SegmentReuseCache, SegmentStore


def load_model(name: str) -> Any:
    """On this process's own device under torchrun; else spread over the GPUs, or on the CPU."""
    if not torch.cuda.is_available():
        return AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
    place = int(os.environ["LOCAL_RANK"]) if dist.is_initialized() else "auto"
    return AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map=place).eval()


def answer(model: Any, tokenizer: Any, store: SegmentStore, prompt: str, max_new_tokens: int) -> tuple[str, int]:
    """What the model writes behind a prompt, and how many of its tokens came from the store."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    cache = SegmentReuseCache(model, store, tokenizer)
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    output = model.generate(**inputs, cache=cache, **settings)
    text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return " ".join(text.split()), cache.report().reused_tokens


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="a text file with a prompt in each line")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--context", type=Path, help="a text that all prompts begin with")
    parser.add_argument("--store", default="disk:segments", help="disk:FOLDER that all processes see, or redis://HOST:PORT/DB")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args(arguments)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model, tokenizer = load_model(args.model), AutoTokenizer.from_pretrained(args.model)
    context = args.context.read_text(encoding="utf-8") + "\n" if args.context else ""
    prompts = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    with SegmentStore(args.store, max_bytes="4GiB") as store:
        if context and rank == 0:
            answer(model, tokenizer, store, context, 1)
            store.flush()
        if dist.is_initialized():
            dist.barrier()  # the context is read once, by the first process
        lines = []
        for number in range(rank, len(prompts), processes):
            text, reused = answer(model, tokenizer, store, context + prompts[number], args.max_new_tokens)
            lines.append((number, f"process {rank}, {reused} tokens from the store: {prompts[number]} -> {text}"))
    gathered: list[Any] = [lines]
    if dist.is_initialized():
        gathered = [None] * processes
        dist.all_gather_object(gathered, lines)
        dist.destroy_process_group()
    if rank == 0:
        print("\n".join(text for _, text in sorted(line for group in gathered for line in group)))


if __name__ == "__main__":
    main()
