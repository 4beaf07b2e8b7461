"""Counts what a decode step and a prompt cost beside the arithmetic, for each cache over DynamicCache. No GPU is needed, and no clock.

    python scripts/step_cost.py [--cache NAME ...] [--csv docs/benchmarks/step-cost.csv]

`launches` are tensor operations of a layer that are no views, beyond DynamicCache's: on a GPU each is a kernel launch, and a layer of a
plain decode step has some forty. `syncs` are operations whose result Python waits for (`.item()`, `bool(tensor)`, `nonzero`,
`.cpu()`), beyond DynamicCache's: each stalls the queue of a GPU. `calls` are the functions of hf_kvcaches that Python enters for a layer,
in `files`: what a reader has to follow, and what the host pays. The phase `look-up` is the part of a prompt with a hit before the first
stored token is written: its calls are those of the whole model.

A small Llama of 4 layers reads 300 tokens: a single text, and a batch of three padded on the left. Each number is that of the second
prompt, and of the fourth step behind it. On CPU tensors the PyTorch paths are counted; the Triton kernels have fewer launches, and no more
syncs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from inspect import unwrap
from pathlib import Path
from typing import Any

import torch
import transformers
from shared.cli import arguments, run_script
from shared.models import word_tokenizer
from shared.results import tabulated
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_kvcaches as kv
from hf_kvcaches.cli.tables import Row, write_csv
from hf_kvcaches.compat import cache_kwargs
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.splice import splice

LAYERS, TOKENS, BUDGET = 4, 300, 128
PADDING = (0, 40, 9)  # of the rows of the batch
POLICIES = ("streaming", "h2o", "tova", "snapkv", "compactor", "keydiff", "expected_attention", "future")
FULL_CACHE = "DynamicCache"
COLUMNS = "cache batch phase launches syncs calls files"
_PACKAGE = str(Path(kv.__file__).parent)
# Operations that launch nothing, though their schemas name no alias; and those whose result the host waits for.
_NO_LAUNCH = ("_unsafe_view", "empty", "new_empty", "lift_fresh")
_WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique", "unique", "masked_select", "bincount")
_SPLICE = unwrap(splice).__code__  # what writes stored tokens
_COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")


@dataclass
class Count:
    """What a prompt or a step did."""

    launches: int = 0
    syncs: int = 0
    calls: int = 0
    files: set[str] = field(default_factory=set)
    look_up: tuple[int, int] | None = None  # calls and files before the first write of stored tokens


class Operations(TorchDispatchMode):
    """Counts the tensor operations of this thread."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if waits(name, args):
            self.count.syncs += 1
        if name != "_local_scalar_dense" and not name.startswith(_NO_LAUNCH) and not is_view(func):
            self.count.launches += 1
        return func(*args, **(kwargs or {}))


def is_view(func: Any) -> bool:
    """Whether an operation returns its argument's storage and writes nothing."""
    aliases = [value.alias_info for value in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def waits(name: str, args: Sequence[Any]) -> bool:
    """Whether the host waits for an operation: for its value, or for how many elements a mask selects."""
    if name in ("index", "index_put", "index_put_"):
        return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name in _WAITING or (name == "repeat_interleave" and len(args) == 1)


@contextmanager
def entered_functions(count: Count) -> Iterator[None]:
    """Count functions of the package that this thread enters, and copies to the host."""

    def profile(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE) and code.co_name not in _COMPREHENSIONS:
            if code is _SPLICE and count.look_up is None:
                count.look_up = count.calls, len(count.files)
            count.calls += 1
            count.files.add(code.co_filename)
        elif event == "c_call" and arg.__name__ == "cpu" and isinstance(getattr(arg, "__self__", None), torch.Tensor):
            count.syncs += 1

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


class Prompt:
    """A prompt of a number of rows, and the steps behind it."""

    def __init__(self, model: LlamaForCausalLM, ids: torch.Tensor, rows: int) -> None:
        self.model, self.ids = model, ids.expand(rows, -1)
        self.cache_name, _ = cache_kwargs(model, None)  # looked up here, so that it is in no count
        self.mask = (torch.arange(ids.shape[1]) >= torch.tensor(PADDING[:rows])[:, None]).long()

    def run(self, cache: Cache) -> None:
        """Feed the prompt."""
        self._forward(cache, self.ids, self.mask)

    def step(self, cache: Cache, number: int) -> None:
        """Feed the token of a step, counted from 1."""
        self._forward(cache, self.ids[:, :1], torch.nn.functional.pad(self.mask, (0, number), value=1))

    def _forward(self, cache: Cache, ids: torch.Tensor, mask: torch.Tensor) -> None:
        padding = {}
        if len(ids) > 1:
            padding = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]}
        self.model(input_ids=ids, logits_to_keep=1, **padding, use_cache=True, **{self.cache_name: cache})


class Caches:
    """The model, and an empty cache of each kind."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, num_hidden_layers=LAYERS, pad_token_id=0, **sizes)).eval()
        self.texts = torch.randint(1, 1000, (8, TOKENS))

    @cached_property
    def codec(self) -> kv.KVCodec:
        return kv.KVCodec.calibrate(self.model, None, self.texts.tolist(), bytes_ratio=0.125, progress=False)

    @cached_property
    def probe(self) -> kv.KeepProbe:
        return kv.KeepProbe.calibrate(self.model, None, self.texts.tolist(), progress=False)

    @cached_property
    def translator(self) -> kv.CacheTranslator:
        return kv.CacheTranslator.fit(self.model, self.model, None, self.texts.tolist(), payload=0.5, progress=False)

    def store(self, prompt: Prompt | None = None) -> kv.SegmentStore:
        """A store with the rows of a prompt, or without any."""
        store = kv.SegmentStore("memory")
        if prompt is not None:
            prompt.run(kv.SegmentReuseCache(self.model, store))
            store.flush()
        return store

    def library(self, prompt: Prompt | None = None) -> kv.WarmStartLibrary:
        """A library with the rows of a prompt, or without any."""
        library = kv.WarmStartLibrary(self.model, word_tokenizer(1000))
        if prompt is not None:
            library.add([ids[mask.bool()].tolist() for ids, mask in zip(prompt.ids, prompt.mask, strict=True)])
        return library

    def makers(self) -> dict[str, Callable[[Prompt], Cache]]:
        """By name, a function that makes an empty cache for a prompt."""
        model = self.model
        makers: dict[str, Callable[[Prompt], Cache]] = {
            FULL_CACHE: lambda prompt: DynamicCache(config=model.config),
            "GrowingCache": lambda prompt: kv.GrowingCache(model),
        }
        for positions in ("original", "compact"):
            for policy, named in [*((policy, policy) for policy in POLICIES), ("probe", self.probe)]:
                options = {"policy": named, "budget": BUDGET, "positions": positions}
                makers[f"EquipCache {policy}, {positions}"] = lambda prompt, options=options: kv.EquipCache(model, **options)
        return makers | {
            "EquipCache int8": lambda prompt: kv.EquipCache(model, "compactor", BUDGET, storage="int8"),
            "EquipCache codec": lambda prompt: kv.EquipCache(model, "compactor", BUDGET, codec=self.codec),
            "SubspaceCache": lambda prompt: kv.SubspaceCache(model, self.codec),
            "SubspaceCache adaptive": lambda prompt: kv.SubspaceCache(model, adaptive=kv.AdaptiveSubspace(bytes_ratio=0.25)),
            "SegmentReuseCache, no hit": lambda prompt: kv.SegmentReuseCache(model, self.store()),
            "SegmentReuseCache, hit": lambda prompt: kv.SegmentReuseCache(model, self.store(prompt)),
            "WarmStartCache, no hit": lambda prompt: kv.WarmStartCache(model, self.library()),
            "WarmStartCache, hit": lambda prompt: kv.WarmStartCache(model, self.library(prompt)),
            "TranslatedCache": lambda prompt: kv.TranslatedCache(
                model, self.translator, self.translator.encode(model, prompt.ids, prompt.mask)
            ),
        }


@torch.no_grad()
def costs(make: Callable[[Prompt], Cache], prompt: Prompt) -> dict[str, Count]:
    """Count a prompt and a step of a cache."""
    counts = {"prompt": Count(), "step": Count()}

    def run(counting: Callable[[Count], Any]) -> None:
        cache = make(prompt)
        with counting(counts["prompt"]):
            prompt.run(cache)
        for number in range(1, 4):
            prompt.step(cache, number)
        with counting(counts["step"]):
            prompt.step(cache, 4)

    run(lambda _: nullcontext())  # what is made once
    run(Operations)
    run(entered_functions)
    return counts


def measure(names: Sequence[str] = ()) -> list[Row]:
    """Count the prompts and steps of the named caches; of all where none is named."""
    caches = Caches()
    makers, rows = caches.makers(), []
    if unknown := sorted(set(names) - makers.keys()):
        raise ConfigError.of("--cache", f"some of {', '.join(makers)}", unknown)
    for batch in (1, len(PADDING)):
        prompt = Prompt(caches.model, caches.texts[:1], batch)
        base = costs(makers[FULL_CACHE], prompt)
        for name in names or makers:
            for phase, count in costs(makers[name], prompt).items():
                over = (count.launches - base[phase].launches) / LAYERS, count.syncs - base[phase].syncs
                numbers = {"launches": over[0], "syncs": over[1], "calls": count.calls / LAYERS, "files": len(count.files)}
                rows.append({"cache": name, "batch": batch, "phase": phase, **numbers})
                if count.look_up is not None:
                    numbers = {"launches": "", "syncs": "", "calls": count.look_up[0], "files": count.look_up[1]}
                    rows.append({"cache": name, "batch": batch, "phase": "look-up", **numbers})
    return rows


def main() -> None:
    parser = arguments(__doc__, "csv")
    parser.add_argument("--cache", action="append", default=[], metavar="NAME", help="of the first column; more than once for several")
    args = parser.parse_args()
    rows = measure(args.cache)
    print(tabulated(rows, COLUMNS))
    if args.csv:
        write_csv(args.csv, rows, {"torch": torch.__version__, "transformers": transformers.__version__})


if __name__ == "__main__":
    run_script(main)
