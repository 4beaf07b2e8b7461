"""A prompt that one model has read is answered by its fine-tuned sibling in another process, from codes sent over a socket.

    python examples/hand_over.py fit     --producer Qwen/Qwen3-0.6B --consumer me/tuned --texts texts.txt --translator pair
    python examples/hand_over.py answer  --consumer me/tuned        --translator pair --prompt prompt.txt     # waits for codes
    python examples/hand_over.py produce --producer Qwen/Qwen3-0.6B --translator pair --prompt prompt.txt     # sends them

`fit` is done once for a pair of models with the same tokenizer, on texts like the prompts, separated by empty lines. The consumer rebuilds
its keys and values layer by layer while the producer still computes, and runs the last token of the prompt alone.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvcaches import CacheTranslator, TranslatedCache
from hf_kvcaches.translate.transports import receive, send

PATIENCE = 60.0  # seconds to wait for the other process


def load(name: str) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval(), AutoTokenizer.from_pretrained(name)


def encode_prompt(tokenizer: Any, path: Path, device: torch.device) -> torch.Tensor:
    """Token ids, (1, tokens); both processes read the same file."""
    ids: torch.Tensor = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"]
    return ids.to(device)


def fit(args: argparse.Namespace) -> None:
    """Write the translator of a pair."""
    (producer, tokenizer), (consumer, _) = load(args.producer), load(args.consumer)
    texts = [text for text in args.texts.read_text(encoding="utf-8").split("\n\n") if text.strip()]
    CacheTranslator.fit(producer, consumer, tokenizer, texts, payload=args.payload, progress=False).save_pretrained(args.translator)
    print(f"fitted to {len(texts)} texts: {args.translator}")


def produce(args: argparse.Namespace) -> None:
    """Read the prompt and send its codes as they are made."""
    producer, tokenizer = load(args.producer)
    translator = CacheTranslator.from_pretrained(args.translator, producer=producer)
    prompt_ids = encode_prompt(tokenizer, args.prompt, producer.device)
    with connect(args.port) as connection:
        nbytes = send(connection, translator.stream(producer, prompt_ids))
    print(f"sent {nbytes} bytes for {prompt_ids.shape[1]} tokens")


def connect(port: int) -> socket.socket:
    """A connection to the consumer, as soon as it listens."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def answer(args: argparse.Namespace) -> None:
    """Wait for codes, and write on from them."""
    consumer, tokenizer = load(args.consumer)
    translator = CacheTranslator.from_pretrained(args.translator, consumer=consumer)
    prompt_ids = encode_prompt(tokenizer, args.prompt, consumer.device)
    with socket.create_server(("127.0.0.1", args.port)) as server:
        server.settimeout(PATIENCE)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(PATIENCE)
        cache = TranslatedCache(consumer, translator, receive(connection))
        output = consumer.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            cache=cache,
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    report = cache.report()
    print(tokenizer.decode(output[0, prompt_ids.shape[1] :], skip_special_tokens=True).strip())
    print(
        f"{report.translated} of {prompt_ids.shape[1]} tokens from codes, {report.payload_share:.1%} of the bytes of their keys and values"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("fit", "produce", "answer"))
    parser.add_argument("--producer", default="Qwen/Qwen3-0.6B-Base")
    parser.add_argument("--consumer", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--translator", type=Path, default=Path("pair"), help="a folder")
    parser.add_argument("--texts", type=Path, help="a file to fit to")
    parser.add_argument("--prompt", type=Path, help="a file")
    parser.add_argument("--payload", type=float, default=0.025, help="bytes of codes, as a share of those of keys and values")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args(arguments)
    needed = "texts" if args.command == "fit" else "prompt"
    if getattr(args, needed) is None:
        parser.error(f"{args.command} needs --{needed}")
    {"fit": fit, "produce": produce, "answer": answer}[args.command](args)


if __name__ == "__main__":
    main()
