"""Makes a fine-tuned variant of SmolLM2 under .models/, for measurements of translation on a real pair.

    python scripts/tune_smollm2.py [--steps 60] [--folder .models]

A LoRA adapter is trained on the first half of the repository's verse, in some ten minutes of one core, and merged; `smollm2` is made by
`make models` before. Calibration and measurements take texts of the other half. A folder that is complete is left alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from shared import ROOT, testbed
from shared.cli import arguments, run_script
from tqdm import trange
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvcaches.errors import ArtifactError

NAME, TOKENS, WARM_UP = "smollm2-verse", 512, 8
ADAPTER: dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "lora_dropout": 0.0}


def tune(model: Any, ids: torch.Tensor, steps: int, rate: float) -> Any:
    """Train an adapter on random stretches of the ids, and return the merged model."""
    adapted = get_peft_model(model, LoraConfig(**ADAPTER))
    optimizer = torch.optim.AdamW([part for part in adapted.parameters() if part.requires_grad], lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, (steps - step) / steps))
    generator = torch.Generator().manual_seed(0)
    adapted.train()
    with trange(steps, unit=" steps") as bar:
        for _ in bar:
            start = int(torch.randint(len(ids) - TOKENS, (), generator=generator))
            batch = ids[None, start : start + TOKENS]
            loss = adapted(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return adapted.merge_and_unload().eval()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=60, help=f"of {TOKENS} tokens")
    parser.add_argument("--rate", type=float, default=5e-4, help="learning rate")
    parser.add_argument("--folder", type=Path, default=ROOT / ".models")
    args = parser.parse_args()
    source, target = args.folder / "smollm2", args.folder / NAME
    if (target / "model.safetensors").exists():
        print(f"{target} is there already")
        return
    if not source.is_dir():
        raise ArtifactError(f"{source}: expected the folder of SmolLM2, got none. Run `make models` first.")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    verse = testbed.held_out("verse")
    ids = torch.tensor(tokenizer(verse[: len(verse) // 2], verbose=False)["input_ids"])
    tuned = tune(model, ids, args.steps, args.rate)
    tuned.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    run_script(main)
