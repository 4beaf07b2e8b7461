"""`hf-kvcaches recommend`: what caches cost for a model's config, and which one fits."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_kvcaches import compat
from hf_kvcaches.cli.checks import tokens_of
from hf_kvcaches.cli.knowledge import Measured, family_of, nearest, speed_table
from hf_kvcaches.cli.options import begin, load_config
from hf_kvcaches.cli.sizes import ModelSize, model_size
from hf_kvcaches.cli.tables import Row, print_json, show, write_csv
from hf_kvcaches.stores.catalog import bytes_of_size

GIB = 2**30
COLUMNS = {
    "cache": "{cache}",
    "GiB": "{gib:.2f}",
    "of full": "{share:.0%}",
    "with weights": "{total_gib:.2f}",
    "fits": "{fits}",
    "text": "{text}",
    "works": "{works}",
    "prefill": "{prefill_ratio:.2f}x",
    "step": "{decode_ratio:.2f}x",
}
_GENERATE = "output = model.generate(**inputs, custom_generate=per_call({arguments}), max_new_tokens=256)"


@dataclass(frozen=True)
class CacheChoice:
    """A cache with a setting.

    Args:
        family: Its column in the table of families; empty for transformers' own.
        row_bytes: Of one row of the batch.
        exact: Whether its text is that of the full cache.
        measured: A part of its arguments in the speed table.
        setup: Lines of code that make what it needs.
        source: Whether it saves the prefill and no memory.
    """

    cache: str
    setting: str
    family: str
    row_bytes: float
    exact: bool = False
    measured: str = ""
    setup: tuple[str, ...] = ()
    source: bool = False

    @property
    def code(self) -> str:
        """Lines to paste behind those that load the model and the inputs."""
        if not self.family:
            return "output = model.generate(**inputs, max_new_tokens=256)"
        arguments = ", ".join(filter(None, (self.cache, self.setting)))
        needed = [name for name in ("KVCodec", "SegmentStore", "WarmStartLibrary") if any(name in line for line in self.setup)]
        names = ", ".join(sorted([self.cache, "per_call", *needed]))
        return "\n".join([f"from hf_kvcaches import {names}", "", *self.setup, _GENERATE.format(arguments=arguments)])


def choices(size: ModelSize, tokens: int) -> list[CacheChoice]:
    """All settings: what changes the text least comes first, and sources of prompts last."""
    growing = size.growing(tokens)
    offered = [
        CacheChoice("GrowingCache", "", "GrowingCache", growing, exact=True),
        CacheChoice("DynamicCache", "", "", size.full(tokens), exact=True),
    ]
    for ratio in (0.25, 0.125):
        setup = f"codec = KVCodec.calibrate(model, tokenizer, texts, bytes_ratio={ratio})  # once; texts: strings like your prompts"
        offered.append(CacheChoice("SubspaceCache", "codec", "SubspaceCache", size.codes(tokens, ratio), measured="codec", setup=(setup,)))
    for part in (2, 4, 8):
        budget = max(64, tokens // part)
        held, quantized = size.slots(tokens, budget), size.quantized_slots(tokens, budget, 8)
        offered.append(CacheChoice("EquipCache", f"budget={budget}", "EquipCache", held, measured="policy='future'"))
        offered.append(CacheChoice("EquipCache", f"budget={budget}, storage='int8'", "EquipCache", quantized, measured="storage='int8'"))
    store = 'store = SegmentStore("disk:segments", max_bytes="4GiB")'
    library = "library = WarmStartLibrary(model, tokenizer)"
    return [
        *offered,
        CacheChoice("SegmentReuseCache", "store, tokenizer", "SegmentReuseCache, exact", growing, exact=True, setup=(store,), source=True),
        CacheChoice("WarmStartCache", "library", "WarmStartCache", growing, setup=(library,), source=True),
    ]


def run(args: argparse.Namespace) -> int:
    device, tokens, memory = begin(args), tokens_of(args.context), bytes_of_size("--memory", args.memory)
    config = load_config(args.model)
    dtype = _dtype(config, args.dtype)
    size = model_size(config, dtype)
    family, support = family_of(config)
    text = compat.decoder_config(config)
    case = {"hidden": getattr(text, "hidden_size", None), "layers": len(size.layers), "batch": args.batch, "context": tokens}
    case |= {"dtype": str(dtype).removeprefix("torch."), "device": device.type}
    offered = choices(size, tokens)
    answers = [_answer(choice, support, latents=getattr(text, "kv_lora_rank", None) is not None) for choice in offered]
    # What was measured on a CPU says nothing about a GPU.
    table = [row for row in speed_table(args.speed) if row["device"] == device.type]
    speeds = [
        None if answer.startswith("no") else nearest(table, choice.cache, choice.measured, case)
        for choice, answer in zip(offered, answers, strict=True)
    ]
    rows = [_row(choice, answer, speed, size, case, memory) for choice, answer, speed in zip(offered, answers, speeds, strict=True)]
    found = next((number for number, choice in enumerate(offered) if _is_chosen(choice, rows[number])), None)
    if args.json:
        chosen = None if found is None else {"cache": rows[found]["cache"], "code": offered[found].code}
        about = {"model": args.model, "family": family, **case, "full_attention_layers": _full_layers(size)}
        print_json({**about, "weight_bytes": size.weight_bytes, "memory_bytes": memory, "caches": rows, "choice": chosen})
    else:
        print(f"{args.model}: {family}, {len(size.layers)} layers, {case['dtype']}; {args.batch} x {tokens:,} tokens")
        print(f"weights: {size.weight_bytes / GIB:.2f} GiB; activations come on top of what is listed\n\n{show(rows, COLUMNS)}\n")
        _print_notes(family, support, offered, speeds, size, device.type)
        _print_choice(None if found is None else (rows[found]["cache"], offered[found].code), size.weight_bits is not None)
    if args.csv:
        write_csv(args.csv, rows, {"model": args.model, **case})
    return 1 if found is None else 0


def _row(choice: CacheChoice, answer: str, speed: Measured | None, size: ModelSize, case: Row, memory: int | None) -> Row:
    """What a cache costs; without numbers where it does not work."""
    row: Row = {"cache": f"{choice.cache}({_shown(choice)})", "fits": "", "works": _verdict(answer), "answer": answer}
    if answer.startswith("no"):
        return row
    held = case["batch"] * choice.row_bytes
    total = held + size.weight_bytes
    row |= {"gib": held / GIB, "share": choice.row_bytes / size.full(case["context"]), "total_gib": total / GIB}
    row |= {"fits": "" if memory is None else "yes" if total <= memory else "no", "text": "same" if choice.exact else "close"}
    return row | ({} if speed is None else {name: float(speed[name]) for name in ("prefill_ratio", "decode_ratio")})


def _is_chosen(choice: CacheChoice, row: Row) -> bool:
    """Whether a cache saves memory or time of steps, fits and works."""
    return not choice.source and row["fits"] != "no" and not row["answer"].startswith("no")


def _full_layers(size: ModelSize) -> int:
    """How many layers keep all tokens: the others have windows or states, which no cache changes."""
    return sum(layer.window is None and layer.numbers > 0 for layer in size.layers)


def _answer(choice: CacheChoice, support: Measured | None, latents: bool) -> str:
    """Whether a cache works with the family, as the table of families says.

    Args:
        latents: Whether the model keeps latents in place of keys and values.
    """
    if not choice.family:
        return "yes"
    if latents and "storage=" in choice.setting:
        return "no (storage: this model keeps latents, which are held in its dtype)"
    return "unknown" if support is None else support[choice.family]


def _verdict(answer: str) -> str:
    """An answer without its reasons."""
    return "partly" if answer.startswith("yes, but") else answer.partition(" (")[0]


def _shown(choice: CacheChoice) -> str:
    """The arguments, with the bytes of a codec."""
    ratio = re.search(r"bytes_ratio=[\d.]+", " ".join(choice.setup))
    return f"{choice.setting} of {ratio[0]}" if ratio else choice.setting


def _print_notes(
    family: str,
    support: Measured | None,
    offered: Sequence[CacheChoice],
    speeds: Sequence[Measured | None],
    size: ModelSize,
    device: str,
) -> None:
    """What the columns mean, and why a cache is refused."""
    if (full := _full_layers(size)) < len(size.layers):
        print(f"pruning and codes apply to {full} of {len(size.layers)} layers; the others keep windows or states of the model's own.")
    if support is None:
        print(f"family: {family!r} was not tried; run hf-kvcaches verify.")
    else:
        columns = dict.fromkeys(choice.family for choice in offered if choice.family)
        for column in columns:
            if support[column] != "yes":
                print(f"{column} with {family}: {support[column]}")
        print(f"TranslatedCache, from codes of another model: {_verdict(support['TranslatedCache'])}")
    measured = [speed for choice, speed in zip(offered, speeds, strict=True) if speed is not None and choice.family]
    if not measured:
        print(f"prefill, step: nothing was measured on {device}; measure with hf-kvcaches bench --csv FILE, and pass it as --speed.")
        return
    cases = dict.fromkeys("{hidden} x {layers} layers, {dtype}, {batch} x {context} tokens, {hardware}".format(**row) for row in measured)
    print(f"prefill, step: times as fast as DynamicCache where it was measured nearest ({'; '.join(cases)}); sources with a hit.")


def _print_choice(chosen: tuple[str, str] | None, quantized: bool) -> None:
    """The first that fits and works, and its code.

    Args:
        chosen: A cache and its code.
        quantized: Whether the weights are quantized.
    """
    if chosen is None:
        others = "or make the batch smaller" if quantized else "make the batch smaller, or quantize the weights"
        print(f"\nNothing fits: shorten the context, {others}.")
    else:
        print("\nThe first that fits and works is {}:\n\n{}".format(*chosen))


def _dtype(config: PreTrainedConfig, name: str) -> torch.dtype:
    chosen: Any = getattr(config, "dtype", None) if name == "auto" else getattr(torch, name)
    return chosen if isinstance(chosen, torch.dtype) else torch.float32
