"""Questions about a long document that is read once: the cache is kept in a file, as codes in an eighth of its bytes.

    python examples/long_document.py report.txt "Who signed it?" "What does it cost?" --model Qwen/Qwen3-0.6B --folder report-cache

The first run calibrates a codec on the document, or takes the one in `--codec`, and writes codec and cache to `--folder`; every later run
with the same model loads them and reads no more than the questions.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvcaches import KVCodec, SubspaceCache

FILE = "document.safetensors"


def read_document(model: Any, document_ids: torch.Tensor, folder: Path, codec_folder: Path | None) -> SubspaceCache:
    """The cache behind a document, (1, tokens): from the folder, or computed and written there."""
    codec_folder = codec_folder or folder / "codec"
    if not codec_folder.exists():
        print("calibrating a codec")
        KVCodec.calibrate(model, None, document_ids.tolist(), bytes_ratio=0.125, progress=False).save_pretrained(codec_folder)
    codec = KVCodec.from_pretrained(codec_folder)
    if (folder / FILE).exists():
        cache = SubspaceCache.load(folder / FILE, model, codec=codec)
        print(f"loaded {cache.get_seq_length()} tokens")
        return cache
    cache = SubspaceCache(model, codec)
    with torch.no_grad():
        model(document_ids, cache=cache, use_cache=True, logits_to_keep=1)
    folder.mkdir(parents=True, exist_ok=True)
    cache.save(folder / FILE, codec=codec)
    print(f"read {cache.get_seq_length()} tokens into {cache.report().bytes / 2**20:.1f} MiB")
    return cache


def answer(model: Any, tokenizer: Any, cache: SubspaceCache, document_ids: torch.Tensor, question: str, max_new_tokens: int) -> str:
    """The answer to a question behind the document; the cache stays as it is for the next one."""
    question_ids = tokenizer(f"\n\nQuestion: {question}\nAnswer:", return_tensors="pt", add_special_tokens=False)["input_ids"]
    prompt_ids = torch.cat([document_ids, question_ids.to(document_ids)], dim=1)
    output = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        cache=copy.deepcopy(cache),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(output[0, prompt_ids.shape[1] :], skip_special_tokens=True)).strip()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path, help="a text file")
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--folder", type=Path, default=Path("document-cache"), help="of the cache, and of the codec where none is named")
    parser.add_argument("--codec", type=Path, help="a folder with a codec of this model, such as one that was calibrated on more texts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    document_ids = tokenizer(args.document.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"].to(model.device)
    cache = read_document(model, document_ids, args.folder, args.codec)
    for question in args.questions:
        print(f"{question}\n  {answer(model, tokenizer, cache, document_ids, question, args.max_new_tokens)}")


if __name__ == "__main__":
    main()
