"""An agent that calls tools, and whose prompts begin alike: a store in Redis keeps what this and other agents have read.

    pip install "hf-kvcaches[distributed]"
    python examples/agent_loop.py --model Qwen/Qwen3-0.6B --store redis://localhost:6379/0 --task "What is 17 times 23?"

Each step sends instructions, tools and all earlier steps again. `SegmentReuseCache` finds the beginning in the store and computes the rest;
the answers are those of a prompt that is computed anew. Start the script twice, or on several machines with the same model and Redis: the
second agent finds the instructions and tools that the first has read. `--store memory` does without Redis.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvcaches import SegmentReuseCache, SegmentStore

TOOLS: dict[str, tuple[Callable[..., Any], str]] = {
    "multiply": (math.prod, "multiply([a, b, ...]): the product of numbers"),
    "add": (math.fsum, "add([a, b, ...]): the sum of numbers"),
    "today": (lambda: datetime.date.today().isoformat(), "today(): the date"),
    "finish": (lambda answer: answer, "finish(answer): ends the task with an answer"),
}
INSTRUCTIONS = """You solve a task step by step. In each step write one line with a call of a tool; its result comes in the next line.
Tools:
{tools}

Example
Task: What is 2 plus 3?
Call: add([2, 3])
Result: 5.0
Call: finish(5)

"""


@dataclass(frozen=True)
class Step:
    """One call of a tool."""

    call: str
    result: str
    prompt_tokens: int
    reused_tokens: int


def run_tool(call: str) -> str:
    """The result of a call such as `add([1, 2])`, whose arguments are literals; an error in words where it is none."""
    try:
        node = ast.parse(call.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in TOOLS:
            return f"error: call one of {', '.join(TOOLS)}"
        return str(TOOLS[node.func.id][0](*map(ast.literal_eval, node.args)))
    except (SyntaxError, ValueError, TypeError) as error:
        return f"error: {error}"


def run_agent(model: Any, tokenizer: Any, store: SegmentStore, task: str, max_steps: int, max_new_tokens: int = 32) -> list[Step]:
    """The steps of a task, until the model calls `finish` or has no step left."""
    prompt = INSTRUCTIONS.format(tools="\n".join(text for _, text in TOOLS.values())) + f"Task: {task}\n"
    steps: list[Step] = []
    while len(steps) < max_steps and not (steps and steps[-1].call.startswith("finish(")):
        inputs = tokenizer(f"{prompt}Call:", return_tensors="pt", return_token_type_ids=False).to(model.device)
        cache = SegmentReuseCache(model, store, tokenizer)
        output = model.generate(
            **inputs,
            cache=cache,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            stop_strings="\n",
            tokenizer=tokenizer,
            pad_token_id=tokenizer.eos_token_id,
        )
        length = inputs["input_ids"].shape[1]
        call = tokenizer.decode(output[0, length:], skip_special_tokens=True).strip().partition("\n")[0]
        steps.append(Step(call, run_tool(call), length, cache.report().reused_tokens))
        del cache  # what it computed goes to the store
        prompt += f"Call: {call}\nResult: {steps[-1].result}\n"
    return steps


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--store", default="redis://localhost:6379/0", help="memory, disk:FOLDER or redis://HOST:PORT/DB")
    parser.add_argument("--task", default="What is 17 times 23?")
    parser.add_argument("--steps", type=int, default=6, help="at most")
    args = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with SegmentStore(args.store, max_bytes="4GiB") as store:
        for number, step in enumerate(run_agent(model, tokenizer, store, args.task, args.steps), 1):
            print(f"step {number}: {step.call} -> {step.result}")
            print(f"  {step.reused_tokens} of {step.prompt_tokens} prompt tokens from the store")


if __name__ == "__main__":
    main()
