"""`hf-kvcaches recommend`: what caches cost for a model's config, which one fits, and what was measured of it."""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedConfig

from hf_kvcaches import compat
from hf_kvcaches.cli.inputs import begin, from_pretrained
from hf_kvcaches.cli.sizes import ModelSize, model_size
from hf_kvcaches.cli.tables import Row, emit, show
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.stores.catalog import bytes_of_size

GIB = 2**30
SOURCES = ("SegmentReuseCache", "WarmStartCache")  # save the prefill, and no memory
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
# Columns of the speed table in which a row is to be near.
_NUMBERS = ("hidden", "layers", "batch", "context")
_PACKAGED = files("hf_kvcaches.cli")
Support = dict[str, str]
"""Whether each cache works with a family: "yes", or "yes, but" or "no" with the reason."""
Measured = dict[str, str]
"""A row of the speed table."""


class CacheChoice(NamedTuple):
    """A cache with a setting."""

    cache: str
    setting: str
    row_bytes: float  # of one row of the batch
    exact: bool = False  # whether its text is that of the full cache
    measured: str = ""  # a part of its arguments in the speed table
    setup: str = ""  # a line of code that makes what it needs

    @property
    def family(self) -> str:
        """Its column in the table of families; empty for transformers' own."""
        return {"DynamicCache": "", "SegmentReuseCache": "SegmentReuseCache, exact"}.get(self.cache, self.cache)

    @property
    def code(self) -> str:
        """Lines to paste behind those that load the model and the inputs."""
        if not self.family:
            return "output = model.generate(**inputs, max_new_tokens=256)"
        names = sorted([self.cache, "per_call", *re.findall(r"^\w+ = (\w+)", self.setup)])
        arguments = ", ".join(filter(None, (self.cache, self.setting)))
        call = f"output = model.generate(**inputs, custom_generate=per_call({arguments}), max_new_tokens=256)"
        return "\n".join([f"from hf_kvcaches import {', '.join(names)}", "", *filter(None, [self.setup]), call])

    def __str__(self) -> str:
        ratio = re.search(r"bytes_ratio=[\d.]+", self.setup)
        return f"{self.cache}({self.setting}{f' of {ratio[0]}' if ratio else ''})"


def choices(size: ModelSize, tokens: int) -> list[CacheChoice]:
    """All settings: what changes the text least comes first, and sources of prompts last."""
    growing = size.growing(tokens)
    offered = [CacheChoice("GrowingCache", "", growing, exact=True), CacheChoice("DynamicCache", "", size.full(tokens), exact=True)]
    for ratio in (0.25, 0.125):
        setup = f"codec = KVCodec.calibrate(model, tokenizer, texts, bytes_ratio={ratio})  # once; texts: strings like your prompts"
        offered.append(CacheChoice("SubspaceCache", "codec", size.codes(tokens, ratio), measured="codec", setup=setup))
    for budget in (max(64, tokens // part) for part in (2, 4, 8)):
        int8 = size.int8_slots(tokens, budget)
        offered.append(CacheChoice("EquipCache", f"budget={budget}", size.slots(tokens, budget), measured="policy='future'"))
        offered.append(CacheChoice("EquipCache", f"budget={budget}, storage='int8'", int8, measured="storage='int8'"))
    store = 'store = SegmentStore("disk:segments", max_bytes="4GiB")'
    offered.append(CacheChoice("SegmentReuseCache", "store, tokenizer", growing, exact=True, setup=store))
    offered.append(CacheChoice("WarmStartCache", "library", growing, setup="library = WarmStartLibrary(model, tokenizer)"))
    return offered


def run_recommend(args: argparse.Namespace) -> int:
    device, table = begin(args), speed_table(args.speed)
    memory, config = bytes_of_size("--memory", args.memory), from_pretrained(AutoConfig, args.model)
    dtype: Any = getattr(config, "dtype", None) if args.dtype == "auto" else getattr(torch, args.dtype)
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
    size, text, (family, support) = model_size(config, dtype), compat.decoder_config(config), family_of(config)
    case = {"hidden": getattr(text, "hidden_size", None), "layers": len(size.layers), "batch": args.batch, "context": args.context}
    case |= {"dtype": str(dtype).removeprefix("torch."), "device": device.type}
    latents, offered = getattr(text, "kv_lora_rank", None) is not None, choices(size, args.context)
    speeds = [nearest(table, choice.cache, choice.measured, case) for choice in offered]
    rows = [
        _row(choice, _answer(choice, support, latents), size, case, memory, speed) for choice, speed in zip(offered, speeds, strict=True)
    ]
    fitting = (choice for choice, row in zip(offered, rows, strict=True) if "gib" in row and row["fits"] != "no")
    chosen = next((choice for choice in fitting if choice.cache not in SOURCES), None)
    lines = [
        f"{args.model}: {family}, {len(size.layers)} layers, {case['dtype']}; {args.batch} x {args.context:,} tokens",
        f"weights: {size.weight_bytes / GIB:.2f} GiB; activations come on top of what is listed\n\n{show(rows, COLUMNS)}\n",
    ]
    full_layers = len(size.full_layers)
    if full_layers < len(size.layers):
        lines.append(
            f"pruning and codes apply to {full_layers} of {len(size.layers)} layers; the others keep windows or states of their own."
        )
    shown = [speed for choice, row, speed in zip(offered, rows, speeds, strict=True) if choice.family and "gib" in row and speed]
    lines += [*_reasons(family, support, offered), _where_measured(shown, device.type), ""]
    if chosen is not None:
        lines.append(f"The first that fits and works is {chosen}:\n\n{chosen.code}")
    else:
        others = "make the batch smaller, or quantize the weights" if size.weight_bits is None else "or make the batch smaller"
        lines.append(f"Nothing fits: shorten the context, {others}.")
    about = {"model": args.model, "family": family, **case, "full_attention_layers": full_layers, "weight_bytes": size.weight_bytes}
    choice = None if chosen is None else {"cache": str(chosen), "code": chosen.code}
    document = {**about, "memory_bytes": memory, "caches": rows, "choice": choice}
    emit(args, document, "\n".join(lines), rows, {"model": args.model, **case})
    return 1 if chosen is None else 0


def _answer(choice: CacheChoice, support: Support | None, latents: bool) -> str:
    """Whether a cache works with the family, as the table of families says, and with a model that keeps latents."""
    if not choice.family:
        return "yes"
    if latents and "storage=" in choice.setting:
        return "no (storage: this model keeps latents, which are held in its dtype)"
    return "unknown" if support is None else support[choice.family]


def _verdict(answer: str) -> str:
    """An answer without its reasons."""
    return "partly" if answer.startswith("yes, but") else answer.partition(" (")[0]


def _row(choice: CacheChoice, answer: str, size: ModelSize, case: Row, memory: int | None, speed: Measured | None) -> Row:
    """What a cache costs; without numbers where it does not work."""
    row: Row = {"cache": str(choice), "fits": "", "works": _verdict(answer), "answer": answer}
    if answer.startswith("no"):
        return row
    held = case["batch"] * choice.row_bytes
    total = held + size.weight_bytes
    row |= {"gib": held / GIB, "share": choice.row_bytes / size.full(case["context"]), "total_gib": total / GIB}
    row |= {"fits": "" if memory is None else "yes" if total <= memory else "no", "text": "same" if choice.exact else "close"}
    return row | ({} if speed is None else {name: float(speed[name]) for name in ("prefill_ratio", "decode_ratio")})


def _reasons(family: str, support: Support | None, offered: Sequence[CacheChoice]) -> list[str]:
    """Lines that say why caches are refused."""
    if support is None:
        return [f"family: {family!r} was not tried; run hf-kvcaches verify."]
    columns = dict.fromkeys(choice.family for choice in offered if choice.family)
    refused = [f"{column} with {family}: {support[column]}" for column in columns if support[column] != "yes"]
    return [*refused, f"TranslatedCache, from codes of another model: {_verdict(support['TranslatedCache'])}"]


def _where_measured(speeds: Iterable[Measured], device: str) -> str:
    case = "{hidden} x {layers} layers, {dtype}, {batch} x {context} tokens, {hardware}"
    if cases := "; ".join(dict.fromkeys(case.format(**speed) for speed in speeds)):
        return f"prefill, step: times as fast as DynamicCache where it was measured nearest ({cases}); sources with a hit."
    return f"prefill, step: nothing was measured on {device}; measure with hf-kvcaches bench --csv FILE, and pass it as --speed."


def family_of(config: PreTrainedConfig) -> tuple[str, Support | None]:
    """The name of a config's family in `docs/families.md`, and its row; None if it is not there."""
    rows = {name: row for row in _reader(_PACKAGED / "families.csv") for name in row["families"].split()}
    kind = config.model_type
    names = [f"{kind}+alibi"] if getattr(config, "alibi", False) else []
    if getattr(config, "sliding_window", None) is None:
        names.append(f"{kind}+full")
    found = next((name for name in (*names, kind, f"{kind}@image") if name in rows), kind)
    return found, rows.get(found)


def speed_table(path: Path | None = None) -> list[Measured]:
    """The rows that `hf-kvcaches bench --csv` wrote, or of the table that comes with the package."""
    reader = _reader(path or _PACKAGED / "speed.csv")
    needed = {"hardware", "device", "dtype", "cache", "setting", "prefill_ratio", "decode_ratio", *_NUMBERS}
    missing, rows = needed - {*(reader.fieldnames or ())}, list(reader)
    if missing or not rows:
        fault = f"the columns {sorted(missing)} are missing" if missing else "it has no rows. Measure again"
        raise ArtifactError(f"{path}: expected a file of hf-kvcaches bench --csv, {fault}.")
    return rows


def _reader(source: Any) -> csv.DictReader[str]:
    return csv.DictReader(source.read_text(encoding="utf-8").splitlines())


def nearest(rows: Sequence[Measured], cache: str, setting: str, case: Row) -> Measured | None:
    """The row of a cache on a kind of device, preferably with a part of its arguments, that was measured most like a case."""

    def kind(arguments: str) -> str:
        """What makes a cache's steps another matter."""
        return next((name for name in ("storage", "page_size", "adaptive", "codec=") if name in arguments), "")

    def distance(row: Measured) -> tuple[bool, float]:
        """Whether the part is missing; doublings between two cases, another dtype for one of them."""
        numbers = [(float(row[name]), case[name]) for name in _NUMBERS if row[name] and case[name]]
        doublings = sum(abs(math.log2(measured / wanted)) for measured, wanted in numbers)
        return setting not in row["setting"], doublings + (row["dtype"] != case["dtype"])

    own = [row for row in rows if row["cache"].partition("(")[0] == cache and row["device"] == case["device"]]
    return min((row for row in own if kind(row["setting"]) == kind(setting)), key=distance, default=None)
