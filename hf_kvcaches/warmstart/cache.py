"""`WarmStartCache`: a prompt that resembles an earlier one starts from what that one had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.identity import Identity, identity_of
from hf_kvcaches.core.report import CacheReport
from hf_kvcaches.core.source import PrefillCall, Remaining
from hf_kvcaches.errors import (
    ConfigError,
    FingerprintMismatch,
    Refusal,
    UnsupportedError,
    require_choice,
    require_instance,
    require_tokenizer,
    whole_number,
)
from hf_kvcaches.reuse.cache import ReuseCache
from hf_kvcaches.reuse.index import EXACT, Piece, Record, TokenIndex
from hf_kvcaches.reuse.plan import PromptPlan, PromptRow, plan_row
from hf_kvcaches.reuse.store import PromptStates
from hf_kvcaches.warmstart.gate import WarmStartGate
from hf_kvcaches.warmstart.library import WarmStartLibrary

Strategy = Literal["auto", "align", "exact"]
Served = Literal["exact", "align", "prefix", "cold"]

# Fewer reused tokens take longer than computing them.
WORTH = 96
# On a CPU, attention behind a prefix is slower than that of a whole prompt, so a prefix alone pays only from 1 / SHARE of the prompt on.
SHARE = 3


@dataclass(frozen=True)
class WarmStartReport(CacheReport):
    """What a `WarmStartCache` holds, and how its prompt was served.

    Args:
        strategy: What served the prompt: "exact" (the same prompt), "align" (spans of similar ones), "prefix" (a common prefix) or "cold";
            "mixed" if rows of a batch were served differently, "" before a prompt.
        neighbour: The id of the entry that served it; None if there is none, or if rows have several.
        similarity: The cosine of that entry; None if it was looked up by its tokens.
        reused_tokens: Tokens of the prompt that were not computed, in all rows.
        computed_tokens: Tokens of the prompt that were computed.
        saved_seconds: The time that computing the others would have taken at the fastest pace of this process, less that of finding and
            loading them. None until this process has computed a prompt of 64 tokens or more.
        refused: Why no better strategy served the prompt, or "".
        reason: Why the prompt was not looked up at all, as a sentence; "" if it was.
        strategies: `strategy` of each row.
        neighbours: `neighbour` of each row.
        similarities: `similarity` of each row.
        refusals: `refused` of each row.
    """

    strategy: str = ""
    neighbour: str | None = None
    similarity: float | None = None
    reused_tokens: int = 0
    computed_tokens: int = 0
    saved_seconds: float | None = None
    refused: str = ""
    reason: str = ""
    strategies: tuple[Served, ...] = ()
    neighbours: tuple[str | None, ...] = ()
    similarities: tuple[float | None, ...] = ()
    refusals: tuple[str, ...] = ()


class WarmStartCache(ReuseCache):
    """Starts a prompt from the keys and values of similar ones in a library.

    Paper: Warm-Starting Transformer Inference via Position-Consistent Projection of KV Summaries (CP-KVP).

    **Departs from the paper**: see docs/benchmarks/warmstart.md. Spans that both prompts share keep the earlier one's keys and values, and
    what differs is computed; the paper's summaries are in `warmstart/paper/`.

    **Refuses**: models whose keys change with the length of the text, or with layers that keep no keys and values. Without rotary positions
    only common prefixes are reused.

    **Memory per token**: as `GrowingCache`.

    Args:
        model: The model that the library was made for.
        library: The earlier prompts.
        tokenizer: The library's, which is used in any case.
        strategy: `"auto"` and `"align"`: the same prompt, else the spans that similar prompts share with it, else a common prefix;
            `"align"` refuses models without rotary positions. `"exact"`: the same prompt and common prefixes only.
        gate: Which prompts and spans may be reused behind changed text, and how much of each span is repaired; None for the default.
        tail: How many tokens at the end of a prompt are always computed, where text before them has changed.
        remember: Whether the prompt is stored in the library once it is computed exactly: alone, or behind an exact prefix.
        decode_with: A new cache of the same model that holds the tokens once the prompt is answered; None to keep them all here.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    def __init__(
        self,
        model: Any,
        library: WarmStartLibrary | None = None,
        tokenizer: Any = None,
        strategy: Strategy = "auto",
        *,
        gate: WarmStartGate | None = None,
        tail: int = 16,
        remember: bool = False,
        decode_with: KVCache | None = None,
        offloading: bool = False,
    ) -> None:
        others = {"model": model, "tokenizer": tokenizer, "gate": gate}
        require_instance("library", library, WarmStartLibrary, others, "Make one with WarmStartLibrary(model, tokenizer).")
        assert library is not None
        require_tokenizer(tokenizer)
        require_choice("strategy", strategy, get_args(Strategy))
        tail = whole_number("tail", tail, 0, "a number of tokens")
        if gate is not None:
            require_instance("gate", gate, WarmStartGate, {}, "Or None.")
            if gate.tau > -1 and gate.encoder not in (None, library.encoder.name):
                hint = "Cosines of two encoders can't be compared. Calibrate it again, or pass dataclasses.replace(gate, tau=-1.0)."
                raise ConfigError.of("gate", f"one for the library's encoder, {library.encoder.name!r}", gate.encoder, hint)
        super().__init__(model, library, decode_with=decode_with, offloading=offloading)
        if self.model is not library.model and (refusal := library.refusal(identity_of(self.model))):
            raise FingerprintMismatch(f"library: was made for another model. {refusal} Make one with this model.")
        if strategy == "align" and (why := self.moving_refused):
            raise UnsupportedError(f"strategy='align': {why}. Use strategy='exact', or 'auto'.")
        self.strategy: Strategy = strategy
        self.gate, self.tail, self._remember = gate or WarmStartGate(), max(1, tail), remember
        self._cosines: dict[str, float] = {}  # of the entries that were compared with the prompt

    @property
    def library(self) -> WarmStartLibrary:
        """The earlier prompts."""
        library: WarmStartLibrary = self.store
        return library

    def settings(self) -> dict[str, Any]:
        raise UnsupportedError("save: a WarmStartCache depends on its library, which would not be in the file. Save the library instead.")

    def take_prefill(self, call: PrefillCall) -> int | Remaining:
        if self.seen or self.store is None:  # a cache that came from another process has no library
            self.reason = "Only the first prompt of a chat is looked up." if self.seen else "The cache came without its library."
            return 0
        return super().take_prefill(call)

    def find(self, rows: tuple[PromptRow, ...], identity: Identity) -> PromptPlan | Refusal:
        if reason := self.store.refusal(identity):
            return Refusal(reason)
        self.store.refresh()
        self._cosines = {}
        return PromptPlan(tuple(map(self._planned, rows)), rows[0].padding + len(rows[0].ids))

    def _planned(self, row: PromptRow) -> PromptRow:
        """Plan a row: the same prompt, or spans of similar ones, or a common prefix."""
        library, ids = self.store, row.ids
        record, shared = library.beginning(ids)
        shared = min(shared, len(ids) - 1)
        prefix = [] if record is None or not shared else [Piece(0, shared, record, 0)]
        alone = plan_row(row, prefix, [], None, len(self.layers))
        if shared < len(ids) - 1 and self.strategy != "exact" and not self.moving_refused:
            near, tokens, policy = library.near(ids, self.gate.tau), TokenIndex(), self.gate.policy
            for each, _ in near:
                tokens.add(each.key, each)
            runs = tokens.runs(ids[: -self.tail], shared, policy.shortest)
            aligned = plan_row(row, prefix, runs, policy.admit, len(self.layers))
            refusal = self.gate.refusal(aligned.reused, len(ids))
            if aligned.reused >= max(WORTH, alone.reused + 1) and not refusal:
                self._cosines |= {each.key: cosine for each, cosine in near}
                return aligned
            refused = "No entry is like it." if not near else f"{aligned.reused} tokens stand in earlier prompts, too few to be worth it."
            alone = alone.cut(shared, str(refusal) if refusal and near else refused)
        worth = max(WORTH, len(ids) // SHARE if self.model.device.type == "cpu" else 0)
        if shared >= min(worth, len(ids) - 1):
            return alone
        return alone.cut(0, next((span.reason for span in alone.spans if span.reason), "No entry is like it."))

    def note(self, plan: PromptPlan, identity: Identity) -> None:
        self.plans = list(plan.rows)
        for row in plan.rows:
            for record, tokens in _tokens_by_entry(row).items():
                self.store.used(record.key, tokens)
        library: WarmStartLibrary = self.store
        new = [row for row in plan.rows if self._choice(row)[0] in ("cold", "prefix") and len(row.ids) > 1]

        def keep(states: PromptStates) -> None:  # without a reference to the cache, which is stored when it is dropped
            for row in new if identity.is_current() else ():
                if library.exact(row.ids) is None:
                    library.keep(row.ids, states.of(row.number, row.padding, row.padding + len(row.ids)))

        if self._remember and new and not self.why_inexact:
            self.expect(plan, min(row.padding for row in new), keep)

    def leave(self, refusal: Refusal, rows: tuple[PromptRow, ...] = ()) -> int:
        self.plans = [row.cut(row.begin, str(refusal)) for row in rows]
        return super().leave(refusal, rows)

    def _choice(self, row: PromptRow) -> tuple[Served, str | None, float | None, str]:
        """How a row was served by its executed plan: what served it, the entry's id and cosine, and why it was not served better."""
        refused = next((span.reason for span in row.spans if span.reason), "")
        tokens = _tokens_by_entry(row)
        if not tokens:
            return "cold", None, None, refused
        record = max(tokens, key=lambda record: tokens[record])
        if any(span.sources and span.rule != EXACT for span in row.spans):
            return "align", record.key, self._cosines.get(record.key), refused
        return "exact" if np.array_equal(record.ids, row.ids) else "prefix", record.key, None, refused

    def report(self) -> WarmStartReport:
        reused = sum(row.reused for row in self.plans)
        strategies, neighbours, similarities, refusals = zip(*map(self._choice, self.plans), strict=True) if self.plans else ((),) * 4

        def common(values: Sequence[Any], default: Any = None) -> Any:
            return values[0] if len(set(values)) == 1 else default

        return WarmStartReport(
            **self._report_fields(),
            reason=self.reason,
            strategy=common(strategies, "mixed" if strategies else ""),
            neighbour=common(neighbours),
            similarity=common(similarities),
            reused_tokens=reused,
            computed_tokens=sum(len(row.ids) for row in self.plans) - reused,
            refused=common(refusals, ""),
            strategies=strategies,
            neighbours=neighbours,
            similarities=similarities,
            refusals=refusals,
        )


def _tokens_by_entry(row: PromptRow) -> Counter[Record]:
    """How many tokens of a row each entry has."""
    tokens: Counter[Record] = Counter()
    for piece in row.sources:
        tokens[piece.record] += piece.stop - piece.start
    return tokens
