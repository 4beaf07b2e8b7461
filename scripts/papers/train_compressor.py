"""Trains adapters for the summaries of a `SummaryLibrary`: maps of slots' keys and values, learned on the paper's L_C.

    python scripts/papers/train_compressor.py --out FOLDER [--model FOLDER_OR_HUB_ID] [--texts FILE.jsonl] [--slots 64] [--layout salient]

L_C is the mean squared distance of a head's output over slots from that over the whole prompt. Printed are L_C on the texts that were
learned from and on others (every fifth), and on the others how much the next token diverges behind slots from what it is behind the prompt
(KL, in nats): without adapters, and trained from each seed. The adapters with the least divergence are written. A line of the file is one
text, as JSON: a string, a list of token ids, or an object with one of these under "prompt"; default: pieces of the testbed's prose.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from tqdm import tqdm, trange
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where what the scripts share lies

from shared import TESTBED
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.results import Row, show

from hf_kvcaches import TrainedAdapters
from hf_kvcaches.cli.prompts import encode
from hf_kvcaches.cli.texts import read_prompts
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.rope import RotaryGeometry, rotation_of
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.warmstart.paper.adapters import Adapters
from hf_kvcaches.warmstart.paper.cache import SummaryCache, SummaryLibrary, read_attention
from hf_kvcaches.warmstart.paper.compressor import SlotCompressor
from hf_kvcaches.warmstart.paper.slots import rotated

HELD_OUT = 5  # every so many texts one is not learned from


class LayerSample(NamedTuple):
    """One layer of one prompt, in float32; keys and the query relative to the prompt's end."""

    keys: torch.Tensor  # of the slots, (kv_heads, slots, head_dim)
    values: torch.Tensor  # (kv_heads, slots, value_dim)
    bias: torch.Tensor  # logarithms of the slots' counts, (kv_heads, slots)
    live_keys: torch.Tensor  # of the tokens behind the slots, including the last, (kv_heads, tail, head_dim)
    live_values: torch.Tensor  # (kv_heads, tail, value_dim)
    query: torch.Tensor  # of the last token, scaled, (kv_heads, group, head_dim)
    output: torch.Tensor  # its attention output over the whole prompt, (kv_heads, group, value_dim)

    def attend(self, key_map: torch.Tensor, value_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """the two summands of the output, (kv_heads, group, value_dim): from mapped slots, and from the tokens behind them."""
        slots = self.query @ (self.keys @ key_map).mT + self.bias[:, None]
        weights = torch.cat([slots, self.query @ self.live_keys.mT], -1).softmax(-1)
        count = self.keys.shape[1]
        return weights[..., :count] @ self.values @ value_map, weights[..., count:] @ self.live_values


Sample = tuple[LayerSample, ...]


def sample_of(
    compressor: SlotCompressor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    query: Sequence[torch.Tensor],
    geometries: Sequence[RotaryGeometry],
    tail: int = 1,
    scaling: Sequence[float] | None = None,
) -> Sample:
    """Compress a prompt but for its last `tail` tokens, and compute the attention outputs over all of it; arguments as of `compress`."""
    length = keys[0].shape[1]
    start = length - tail
    slots = compressor.compress([layer[:, :start] for layer in keys], [layer[:, :start] for layer in values], query, length, scaling)
    scaling = [layer.shape[-1] ** -0.5 for layer in keys] if scaling is None else scaling
    sample = []
    for layer, geometry, all_keys, all_values, states, factor in zip(slots.layers, geometries, keys, values, query, scaling, strict=True):
        scaled = (states.float() * factor).unflatten(0, (layer.keys.shape[0], -1))
        output = (scaled @ all_keys.float().mT).softmax(-1) @ all_values.float()
        slot_keys, live_keys, scaled = (rotated(rows.float(), -length, geometry) for rows in (layer.keys, all_keys[:, start:], scaled))
        live_values = all_values[:, start:].float()
        sample.append(LayerSample(slot_keys, layer.values.float(), layer.counts.log(), live_keys, live_values, scaled, output))
    return tuple(sample)


def identity_adapters(sample: Sample) -> Adapters:
    """maps that leave everything as it is."""
    return Adapters(tuple(_identities(layer.keys) for layer in sample), tuple(_identities(layer.values) for layer in sample))


@torch.no_grad()
def loss_of(adapters: Adapters, samples: Sequence[Sample]) -> float:
    """L_C: the mean squared distance of a head's output over slots from that over the whole prompt."""
    return float(_loss(adapters, samples))


def train_adapters(
    samples: Sequence[Sample], *, steps: int, lr: float = 1e-3, weight: float = 1e-4, seed: int = 1, batch: int = 8, progress: bool = False
) -> Adapters:
    """Train adapters with AdamW on the paper's L_C plus `weight * |A - I|^2` over all maps (the paper: `|A|^2`)."""
    maps = identity_adapters(samples[0])
    parameters = [tensor.requires_grad_() for tensor in (*maps.keys, *maps.values)]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)  # its decay pulls towards 0
    generator = torch.Generator().manual_seed(seed)
    for _ in trange(steps, desc=f"seed {seed}", unit="step", disable=not progress):
        chosen = torch.randperm(len(samples), generator=generator)[:batch].tolist()
        with torch.enable_grad():
            loss = _loss(maps, [samples[index] for index in chosen])
            for tensor in parameters:
                loss = loss + weight * (tensor - _identities(tensor)).square().sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
        optimizer.step()
    return Adapters.of({name: tensor.detach().clone() for name, tensor in maps.tensors().items()})


def _loss(adapters: Adapters, samples: Sequence[Sample]) -> torch.Tensor:
    losses = []
    for sample in samples:
        for layer, key_map, value_map in zip(sample, adapters.keys, adapters.values, strict=True):
            from_slots, live = layer.attend(key_map, value_map)
            losses.append((from_slots + live - layer.output).square().sum(-1).mean())
    return torch.stack(losses).mean()


def _identities(rows: torch.Tensor) -> torch.Tensor:
    return torch.eye(rows.shape[-1], device=rows.device).repeat(rows.shape[0], 1, 1)


class Bench:
    """Texts read by a model: samples to learn from and to judge by."""

    def __init__(self, model: Any, tokenizer: Any, texts: Sequence[list[int]], args: argparse.Namespace) -> None:
        self.model, self.tokenizer, self.args = model, tokenizer, args
        rotation = rotation_of(model.config.get_text_config())
        if rotation.why:
            raise UnsupportedError(f"model: {rotation.why}. There are no summaries of its prompts.")
        compressor, samples = SlotCompressor(args.slots, args.layout), []
        for ids in tqdm(texts, desc="reading", unit="text"):
            layers = read_attention(model, torch.tensor([ids], device=model.device))
            states = zip(*((layer.keys[0], layer.values[0], layer.query[0, :, -1]) for layer in layers), strict=True)
            samples.append(sample_of(compressor, *states, rotation.layers, args.tail, [layer.scaling for layer in layers]))
        self.learned = [sample for number, sample in enumerate(samples) if number % HELD_OUT]
        self.others, self.asked = samples[::HELD_OUT], list(texts[::HELD_OUT])
        self._cold = [self._logits(ids, DynamicCache(config=model.config)) for ids in self.asked]

    @torch.no_grad()
    def _logits(self, ids: Sequence[int], cache: Any) -> torch.Tensor:
        prompt = torch.tensor([list(ids)], device=self.model.device)
        return self.model(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits[0, -1].double().log_softmax(-1)

    def measure(self, name: str, adapters: Adapters | None) -> Row:
        """A row of the table."""
        args, kls = self.args, []
        library = SummaryLibrary(self.model, self.tokenizer, args.slots, layout=args.layout, tail=args.tail, adapters=adapters)
        for ids, cold in zip(self.asked, self._cold, strict=True):
            library.add([ids])
            cache = SummaryCache(self.model, library)
            summarised = self._logits(ids, cache)
            if not cache.served:
                raise SystemExit(f"a text was not served from its summary: {cache.reason}")
            kls.append(float((cold.exp() * (cold - summarised)).sum()))
        maps = adapters if adapters is not None else identity_adapters(self.learned[0])
        return {"adapters": name, "L_C": loss_of(maps, self.learned), "L_C held out": loss_of(maps, self.others), "KL held out": fmean(kls)}


def texts_of(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """At most `--length` tokens of each text, and no text that its slots hold whole."""
    if args.texts is None:
        ids = encode(tokenizer, (TESTBED / "prose.txt").read_text(encoding="utf-8"))
        texts = [ids[number * (len(ids) // args.count) :][: args.length] for number in range(args.count)]
    else:
        texts = [ids[: args.length] for ids in read_prompts(args.texts, tokenizer)[: args.count]]
    texts = [ids for ids in texts if len(ids) > args.slots + args.tail]
    if len(texts) < 2:
        raise ConfigError.of("--texts", f"two or more texts of more than {args.slots + args.tail} tokens", len(texts))
    return texts


def main() -> None:
    parser = arguments(__doc__, "model", "device")
    parser.add_argument("--out", type=Path, required=True, help="the folder that the adapters are written to")
    parser.add_argument("--texts", type=Path, help="one text a line, as JSON")
    parser.add_argument("--count", type=int, default=100, help="how many texts to read at most")
    parser.add_argument("--length", type=int, default=600, help="the most tokens of a text")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--layout", choices=("salient", "paper"), default="salient")
    parser.add_argument("--tail", type=int, default=1, help="tokens that are run behind the slots")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    check_counts(args, ["count", "length", "slots", "tail", "steps"])
    model, tokenizer = load(args.model, begin(args))
    bench = Bench(model, tokenizer, texts_of(args, tokenizer), args)
    made = {f"seed {seed}": train_adapters(bench.learned, steps=args.steps, seed=seed, progress=True) for seed in args.seeds}
    rows = [bench.measure("no adapters", None), *(bench.measure(name, adapters) for name, adapters in made.items())]
    print(show(rows, {name: f"{{{name}}}" if name == "adapters" else f"{{{name}:.4g}}" for name in rows[0]}))
    best = min(rows[1:], key=lambda row: row["KL held out"])
    artifact = TrainedAdapters(made[best["adapters"]], args.slots, args.layout, args.tail, tuple(rows))
    object.__setattr__(artifact, "fingerprint", ModelFingerprint.of(model, tokenizer))
    artifact.save_pretrained(args.out)
    print(f"Written to {args.out}: {best['adapters']}.")


if __name__ == "__main__":
    run_script(main)
