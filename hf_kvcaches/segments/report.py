"""The report of a `SegmentReuseCache`, and what a prefill costs: multiplications and additions in the decoder layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.report import CacheReport
from hf_kvcaches.reuse.plan import Indices, PromptRow


class ReusedSpan(NamedTuple):
    """Consecutive tokens of a prompt of one tier, which is the name of the rule that admitted them.

    Args:
        start: The first token's index in its row, padding not counted.
        repaired: How many stored tokens were recomputed.
        depth: The layers below it recomputed them; None: all layers.
        segments: The stored segments' ids, for `SegmentStore.pin` and `delete`.
        reason: Why stored tokens were computed, as sentences; "" if none are stored, or all are reused.
    """

    row: int
    start: int
    stop: int
    tier: str
    repaired: int
    depth: int | None
    segments: tuple[str, ...]
    reason: str = ""

    def __repr__(self) -> str:
        """Shorten ids to 8 digits, and leave out what is as in most spans; `segments` has whole ids."""
        ids = ", ".join(f"{key[:8]}…" for key in self.segments[:3]) + (f", {len(self.segments) - 3} more" if len(self.segments) > 3 else "")
        shown = {"row": self.row, "start": self.start, "stop": self.stop, "tier": repr(self.tier), "repaired": self.repaired or None}
        shown |= {"depth": self.depth, "segments": f"[{ids}]" if ids else None, "reason": repr(self.reason) if self.reason else None}
        return f"ReusedSpan({', '.join(f'{name}={value}' for name, value in shown.items() if value is not None)})"


@dataclass(frozen=True)
class SegmentReport(CacheReport):
    """What a `SegmentReuseCache` holds, and how its prompts were filled in.

    Args:
        reused_tokens: Tokens of prompts that were not computed, in all rows.
        repaired_tokens: Stored tokens that were recomputed in their new context.
        computed_tokens: All other tokens.
        tiers: Tokens by tier.
        flops_saved: Operations that were saved, as a share of those of a prefill without reuse, in the decoder layers.
        spans: The spans of all prompts, in order.
        reason: Why the last prompt was neither looked up nor stored, as a sentence; "" where it was.
    """

    reused_tokens: int = 0
    repaired_tokens: int = 0
    computed_tokens: int = 0
    tiers: dict[str, int] | None = None
    flops_saved: float = 0.0
    spans: tuple[ReusedSpan, ...] = ()
    reason: str = ""


def report_of(plans: Sequence[PromptRow], costs: Costs, **fields: Any) -> SegmentReport:
    """Report executed plans; `fields` are the other fields of the report."""
    spans = tuple(
        ReusedSpan(
            *(row.number, span.start, span.stop, span.rule, len(span.repaired), span.repair_depth),
            tuple(piece.record.key for piece in span.sources),
            span.reason,
        )
        for row in plans
        for span in row.spans
    )
    tiers: Counter[str] = Counter()
    for span in spans:
        tiers[span.tier] += span.stop - span.start
    full_cost = sum(costs.of_prompt(row.begin, len(row.ids)) for row in plans)
    return SegmentReport(
        **fields,
        reused_tokens=sum(row.reused for row in plans),
        repaired_tokens=sum(span.repaired for span in spans),
        computed_tokens=sum(span.stop - span.start for span in spans if not span.segments),
        tiers=dict(tiers),
        flops_saved=1 - sum(map(costs.of_row, plans)) / full_cost if full_cost else 0.0,
        spans=spans,
    )


class Costs(NamedTuple):
    """The floating-point operations of one token in the matrices of each layer, and for each key that it attends to there."""

    linear: tuple[float, ...]
    scores: tuple[float, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Costs:
        """Read the costs from a model's weights and config, once. All experts of a mixture are counted."""
        if model in _COSTS:
            return _COSTS[model]
        _, _, layers = decoder_layers(model)
        linear = tuple(float(2 * sum(weight.numel() for weight in layer.parameters() if weight.ndim >= 2)) for layer in layers)
        configs = compat.decoder_config(model.config).per_layer_config
        sizes = [getattr(each, "head_dim", None) or each.hidden_size // each.num_attention_heads for each in configs]
        # A product of queries and keys, and one of weights and values.
        scores = tuple(4.0 * each.num_attention_heads * size for each, size in zip(configs, sizes, strict=True))
        return _COSTS.setdefault(model, cls(linear, scores))

    def of_tokens(self, indices: Indices, start: int = 0) -> float:
        """Return the cost of tokens, each of which attends to all up to itself, in the layers from `start` on."""
        return len(indices) * sum(self.linear[start:]) + sum(self.scores[start:]) * float((indices + 1).sum())

    def of_prompt(self, begin: int, stop: int) -> float:
        """Return the cost of a span of tokens."""
        return self.of_tokens(np.arange(begin, stop))

    def of_row(self, row: PromptRow) -> float:
        """Return the cost of the tokens that a plan does not reuse, of the last token, and of those that ran once more."""
        saved = sum(self.of_tokens(span.computed, span.repair_depth) for span in row.spans if span.repair_depth is not None)
        probed = self.of_prompt(len(row.ids) - row.probed, len(row.ids))
        return self.of_tokens(np.append(row.computed, len(row.ids) - 1)) + probed - saved


_COSTS: WeakKeyDictionary[PreTrainedModel, Costs] = WeakKeyDictionary()
