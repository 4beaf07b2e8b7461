"""Ways to start a prompt from a similar one's state: `WarmStartCache`, summaries of that state, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_kvcaches import SlotProjector, WarmStartCache, WarmStartGate, WarmStartLibrary
from hf_kvcaches.core.prefill import PrefillCall
from hf_kvcaches.errors import require
from hf_kvcaches.warmstart.compressor import SlotCompressor
from hf_kvcaches.warmstart.reading import PromptStates, read_prompt
from hf_kvcaches.warmstart.slots import LayerSlots, Slots
from tests.testbed.pairs import KINDS, Pair, make_pairs

Rule = Literal["salient", "paper", "last", "H2O", "SnapKV", "StreamingLLM"]
BASELINES: tuple[Rule, ...] = ("last", "H2O", "SnapKV", "StreamingLLM")
SIZES = (8, 16, 32, 64)
MOST = SIZES[-1]
# Sinks of StreamingLLM, SnapKV's window and the width of its pooling, as their papers have them; less where there are few slots.
_SINKS, _WINDOW, _POOL = 4, 16, 5
# Seeds that projectors and prefixes are fitted on begin here; those that they are measured on begin at `--seed`.
FITTED_SEED = 10**6


@dataclass(frozen=True)
class Side:
    """One way to start."""

    name: str  # as in tables
    strategy: Literal["auto", "slots", "align", "exact"] | None = None  # of a `WarmStartCache` with the library, or None
    rule: Rule | None = None  # how the pair's own source is summarised, whatever a gate would say, or None
    slots: int = MOST  # of that summary
    projected: bool = False  # whether it goes through a projector
    # `tail`: the last tokens of the target alone. `mismatch`: these behind another pair's source. `prefix`: these behind a learned prefix.
    control: Literal["tail", "mismatch", "prefix"] | None = None

    def __str__(self) -> str:
        return self.name


COLD = Side("cold")
EXACT, AUTO, ALIGN, GATED = Side("exact prefix", "exact"), Side("auto", "auto"), Side("align", "align"), Side("slots, gated", "slots")
TAIL_ONLY, MISMATCH = Side("tail only", control="tail"), Side("mismatched source", control="mismatch")
PREFIX_TUNED = Side("prefix-tuning", control="prefix")
SLOTS = {(rule, m): Side(f"slots {rule}, m={m}", rule=rule, slots=m) for rule in ("salient", "paper") for m in SIZES}
PROJECTED = {rule: Side(f"slots {rule}, m={MOST}, projected", rule=rule, projected=True) for rule in ("salient", "paper")}
SIDES = (
    COLD,
    EXACT,
    AUTO,
    ALIGN,
    GATED,
    *SLOTS.values(),
    *PROJECTED.values(),
    *(Side(f"last {MOST} tokens" if rule == "last" else f"{rule}, m={MOST}", rule=rule) for rule in BASELINES),
    TAIL_ONLY,
    MISMATCH,
)


class SummaryCache(WarmStartCache):
    """Starts every prompt from one summary, and runs its last token."""

    def __init__(self, model: Any, library: WarmStartLibrary, summary: Slots, projector: SlotProjector | None = None) -> None:
        super().__init__(model, library, strategy="slots", gate=WarmStartGate(), projector=projector)
        self.summary = summary

    def take_prefill(self, call: PrefillCall) -> int:
        if self.seen:
            return 0
        length, geometries = call.input_ids.shape[1], self.library.rotation.layers
        if self.projector is not None:
            slots = self.projector.apply(self.summary, length, geometries)
        else:
            slots = self.summary.shifted(length - self.summary.length, geometries)
        self.start_from(slots, length - 1)
        return length - 1


class Summaries:
    """Summaries of one prompt by any rule; what the rules look at is computed once."""

    def __init__(self, model: PreTrainedModel, watched: PreTrainedModel, ids: Sequence[int]) -> None:
        self.model, self.watched = model, watched
        self.ids = torch.tensor([list(ids)], device=model.device)
        self._states: PromptStates | None = None
        self._attention: list[torch.Tensor] | None = None

    @property
    def states(self) -> PromptStates:
        if self._states is None:
            self._states = read_prompt(self.model, self.ids)
        return self._states

    def attention(self) -> list[torch.Tensor]:
        """For each layer what every token pays to every token but the last, (kv_heads, queries, keys), summed over a key head's queries."""
        if self._attention is None:
            with torch.no_grad():
                found = self.watched(input_ids=self.ids, use_cache=False, output_attentions=True, logits_to_keep=1).attentions
            heads = [keys.shape[0] for keys, _ in self.states.layers]
            self._attention = [each[0, :, :, :-1].unflatten(0, (own, -1)).sum(1) for each, own in zip(found, heads, strict=True)]
        return self._attention

    def by(self, rule: Rule, slots: int) -> Slots:
        """The summary of all tokens but the last, which is run again."""
        states, length = self.states, self.ids.shape[1]
        before = [(keys[:, :-1], values[:, :-1]) for keys, values in states.layers]
        if rule in ("salient", "paper"):
            keys, values = zip(*before, strict=True)
            return SlotCompressor(slots, rule).compress(keys, values, states.queries, length, states.scaling)
        layers = []
        for index, (keys, values) in enumerate(before):
            kept = self._kept(rule, index, min(slots, length - 1), keys.shape[0])
            places = kept[..., None].expand(-1, -1, keys.shape[-1])
            counts = torch.ones_like(kept, dtype=torch.float32)
            layers.append(LayerSlots(keys.gather(1, places), values.gather(1, places), kept.float(), counts))
        return Slots.from_layers(layers, length)

    def _kept(self, rule: Rule, layer: int, slots: int, heads: int) -> torch.Tensor:
        """Which tokens a rule keeps, (kv_heads, slots), ascending."""
        tokens = self.ids.shape[1] - 1
        scores = torch.zeros(heads, tokens, device=self.ids.device)
        last = slots
        if rule == "StreamingLLM":
            sinks = min(_SINKS, slots // 2)
            scores[:, :sinks], last = torch.inf, slots - sinks
        elif rule == "H2O":
            # Half of them are the last tokens; the others those that were paid most attention by all queries.
            scores, last = self.attention()[layer].sum(1), slots // 2
        elif rule == "SnapKV":
            last = min(_WINDOW, slots // 2)
            paid = self.attention()[layer][:, -last:].sum(1)
            scores = functional.avg_pool1d(paid, _POOL, stride=1, padding=_POOL // 2, count_include_pad=False)
        scores = scores.clone()
        scores[:, tokens - last :] = torch.inf
        return scores.topk(slots).indices.sort().values


def eager_twin(name: str, model: PreTrainedModel) -> PreTrainedModel:
    """The same model, telling its attention."""
    twin = AutoModelForCausalLM.from_pretrained(name, dtype=model.dtype, attn_implementation="eager")
    return twin.to(model.device).eval()


def fitting_pairs(tokenizer: Any, count: int, length: int) -> list[Pair]:
    """Pairs of other seeds, of all kinds whose prompts resemble each other, in turn."""
    kinds = [kind for kind in KINDS if kind not in ("identical", "unrelated")]
    each = [make_pairs(tokenizer, kind, -(-count // len(kinds)), FITTED_SEED, length) for kind in kinds]
    return [pair for turn in zip(*each, strict=True) for pair in turn][:count]


def fit_projectors(
    library: WarmStartLibrary, summaries: Callable[[Sequence[int]], Summaries], pairs: Sequence[Pair]
) -> dict[str, SlotProjector]:
    """One projector for each layout, of `MOST` slots."""
    read = [(summaries(pair.source.prompt), summaries(pair.target.prompt)) for pair in pairs]
    geometries = library.rotation.layers
    return {
        rule: SlotProjector.fit([(source.by(rule, MOST), target.by(rule, MOST)) for source, target in read], geometries)
        for rule in ("salient", "paper")
    }


class Example(NamedTuple):
    """What a learned prefix is trained on."""

    tail: list[int]
    continuation: list[int]
    expected: torch.Tensor


class LearnedPrefix:
    """`MOST` virtual tokens in place of every prompt but its tail, trained to predict what the whole prompt does; through peft."""

    def __init__(self, model: PreTrainedModel, examples: Sequence[Example], steps: int) -> None:
        peft = require("peft", "peft", "Prefix-tuning")
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=MOST)
        self.model = peft.get_peft_model(model, config)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        with torch.enable_grad():
            for step in range(steps):
                example = examples[step % len(examples)]
                found = self.logits(example.tail, example.continuation).log_softmax(-1)
                loss = functional.kl_div(found, example.expected.to(found.device).log_softmax(-1), log_target=True, reduction="batchmean")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    def logits(self, tail: Sequence[int], continuation: Sequence[int]) -> torch.Tensor:
        """At each token of a continuation, (tokens, vocabulary)."""
        ids = torch.tensor([[*tail, *continuation]], device=self.model.device)
        return self.model(input_ids=ids).logits[0, len(tail) - 1 : -1]
