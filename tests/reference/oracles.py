"""Pruning caches written down plainly, as oracles: every row of a batch and every head is a list of tokens of its own.

They follow the papers where `EquipCache` does: a step evicts before it attends, and the attention of heads that share keys is averaged.

Nothing is done in place and nothing is done for all rows at once. Whatever is dropped is left out of a gather, whatever comes is
appended, and the tokens of a head therefore always stand in order of position. With `positions="compact"` keys are kept without their
rotation and all of them are rotated anew for every query.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import nn

from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.step import TokenMask
from hf_kvcaches.core.view import LayerView
from hf_kvcaches.errors import UnsupportedError

UNLIMITED = 1 << 40
"""A budget for what is never pruned."""


@dataclass
class Head:
    """What one key head of one row keeps, in order of position; each tensor has as many elements as there are tokens."""

    positions: torch.Tensor  # index of each token among those fed in, padding included
    ranks: torch.Tensor  # its index among the row's real tokens: where the model rotated its key
    keys: torch.Tensor  # as attention uses them: without rotation for compact positions
    given: torch.Tensor  # as they came from the model
    values: torch.Tensor
    scores: torch.Tensor  # float32, higher stays; infinite while a policy has not scored the token
    received: torch.Tensor  # float32, attention that a policy is still collecting

    def __len__(self) -> int:
        return self.positions.numel()

    def gather(self, index: torch.Tensor) -> Head:
        """The tokens at `index`, in that order."""
        return Head(*(getattr(self, f.name)[index] for f in fields(self)))

    def append(self, other: Head) -> Head:
        """These tokens and then the others."""
        return Head(*(torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)))


@dataclass
class Row:
    """One sequence of a batch: its heads, how many real tokens came, and the steps since they were last scored."""

    heads: list[Head]
    real: int = 0
    observed: int = 0

    @property
    def kept(self) -> int:
        return len(self.heads[0]) if self.heads else 0


class ReferenceLayer(KVLayer):
    """The layer of all references; a policy writes `rescore`."""

    first_score: ClassVar[float] = 0.0
    """The score of a token that the policy has not seen yet."""

    def __init__(self, cache: ReferenceCache, geometry: RotaryGeometry) -> None:
        super().__init__()
        self.budget, self.sinks, self.recent = cache.budget, cache.sinks, cache.recent
        self.compact = cache.positions == "compact"
        self.geometry = geometry
        self.kv_heads = 0
        self.rows: list[Row] = []

    @abstractmethod
    def rescore(self, row: Row, attention: list[torch.Tensor], block: bool) -> None:
        """Scores the tokens of a row after queries have attended to them."""

    def idle(self, row: Row) -> None:
        """Count a decoding step in which other rows got a token, and this one none."""

    @property
    def kept(self) -> int:
        return max((row.kept for row in self.rows), default=0)

    def owned_tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{b}.{h}.{f.name}": getattr(head, f.name)
            for b, row in enumerate(self.rows)
            for h, head in enumerate(row.heads)
            for f in fields(Head)
        }

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.kv_heads = key_states.shape[1]
        self.rows = [Row([]) for _ in range(key_states.shape[0])]
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Hands the new tokens on to the attention function, which knows the queries and the padding."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        view = ReferenceView(self, key_states, value_states, self.seen)
        self.seen += key_states.shape[-2]
        return view, view

    def take(self, row: Row, query: torch.Tensor, new: list[Head], step: bool, scaling: float, softcap: float | None) -> torch.Tensor:
        """Everything that happens to one row in one call; returns the output, (new tokens, heads, value_dim)."""
        if step and row.kept == self.budget:
            row.heads = [head.gather(self._all_but_victim(head)) for head in row.heads]
        before = row.kept
        row.heads = [head.append(fresh) for head, fresh in zip(row.heads, new, strict=True)] if row.heads else new
        row.real += len(new[0])
        group = query.shape[0] // self.kv_heads
        outputs, attention = [], []
        for head, queries in zip(row.heads, query.split(group), strict=True):
            probabilities = self._probabilities(head, queries, before, scaling, softcap)
            outputs.append(probabilities @ head.values.to(probabilities.dtype))
            attention.append(probabilities.mean(0).float())
        self.rescore(row, attention, block=not step)
        self.prune(row)
        return torch.cat(outputs).transpose(0, 1)

    def prune(self, row: Row) -> None:
        """Drops tokens beyond the budget, after queries have attended to them."""
        if row.kept > self.budget:
            row.heads = [head.gather(self._best(head)) for head in row.heads]

    def _probabilities(self, head: Head, queries: torch.Tensor, before: int, scaling: float, softcap: float | None) -> torch.Tensor:
        """Causal attention of the newest tokens' queries to all tokens, (group, new tokens, n)."""
        tokens, keys, queries = len(head), head.keys, _wide(queries)
        if self.compact:
            places = torch.arange(tokens)
            fresh = self.geometry.unrotate(queries[None], head.ranks[before:])
            queries = self.geometry.rotate(fresh, places[before:])[0]
            keys = self.geometry.rotate(keys[None, None], places)[0, 0]
        scores = queries @ keys.to(queries.dtype).T * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        later = torch.arange(tokens) > torch.arange(before, tokens)[:, None]
        return scores.masked_fill(later, -torch.inf).softmax(-1)

    def _protected(self, head: Head, recent: int) -> torch.Tensor:
        return (head.ranks < self.sinks) | (torch.arange(len(head)) >= len(head) - recent)

    def _all_but_victim(self, head: Head) -> torch.Tensor:
        """For a step: all but the lowest score; of equal ones the oldest goes. The token to come counts as the most recent one."""
        protected = self._protected(head, max(self.recent - 1, 0)).tolist()
        scores = head.scores.tolist()
        victim = min((i for i in range(len(head)) if not protected[i]), key=lambda i: (scores[i], i))
        return torch.tensor([i for i in range(len(head)) if i != victim])

    def _best(self, head: Head) -> torch.Tensor:
        """What is protected and the highest scores of the rest, `budget` in all."""
        protected = self._protected(head, self.recent)
        scores = head.scores.masked_fill(protected, torch.inf)
        unscored = torch.isposinf(scores)
        if unscored.sum() <= self.budget:
            # Not sorted by score and position, so that equal scores fall as they do for whoever else calls topk.
            return scores.topk(self.budget).indices.sort().values
        # Nothing tells these tokens apart but their age.
        rest = (unscored & ~protected).nonzero()[:, 0]
        newest = rest[rest.numel() - (self.budget - int(protected.sum())) :]
        return torch.cat([protected.nonzero()[:, 0], newest]).sort().values


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ReferenceView(LayerView):
    """New tokens on their way to the queries, after `start` others."""

    def __init__(self, layer: ReferenceLayer, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        self.layer, self.keys, self.values, self.start = layer, keys, values, start

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, heads, tokens, _ = query.shape
        read = TokenMask.read(mask, self.start, tokens)
        if read.allowed is not None or kwargs.get("position_bias") is not None:
            raise UnsupportedError("The references follow padding alone. Leave other masks and position biases out.")
        real = torch.ones(batch, tokens, dtype=torch.bool) if read.valid is None else read.valid
        output = query.new_zeros(batch, tokens, heads, self.values.shape[-1])
        step = tokens == 1 and self.start > 0
        for b, row in enumerate(self.layer.rows):
            if step and not bool(real[b].any()):
                self.layer.idle(row)
            which = real[b].nonzero()[:, 0]
            if which.numel():
                new = [self._head(b, h, which, row.real) for h in range(self.layer.kv_heads)]
                out = self.layer.take(row, query[b][:, which], new, step, kwargs["scaling"], kwargs.get("softcap"))
                output[b, which] = out.to(query.dtype)
        return output, None

    def _head(self, b: int, h: int, which: torch.Tensor, real: int) -> Head:
        given, values = self.keys[b, h, which], self.values[b, h, which]
        ranks = real + torch.arange(which.numel())
        keys = self.layer.geometry.unrotate(_wide(given)[None, None], ranks)[0, 0] if self.layer.compact else given
        zeros = torch.zeros(which.numel())
        return Head(self.start + which, ranks, keys, given, values, zeros + self.layer.first_score, zeros)


class ReferenceCache(KVCache):
    """The base of the references. No cropping, no other edits: only blocks and steps, and a step evicts before its query attends.

    Args:
        model: A transformers model.
        budget: Tokens to keep.
        sinks: First real tokens that always stay; None for those of the policy.
        recent: Newest tokens that always stay; None for those of the policy.
        positions: `"compact"`: kept tokens count from 0 for every query; `"original"`: rotations stay as the model gave them.
    """

    needs_attention = True
    layer_class: ClassVar[type[ReferenceLayer]]
    default_sinks: ClassVar[int] = 0

    def __init__(self, model: Any, *, budget: int, sinks: int | None = None, recent: int | None = None, positions: str = "compact") -> None:
        self.sinks = self.default_sinks if sinks is None else sinks
        self.budget, self.positions = budget, positions
        self.recent = self.default_recent() if recent is None else recent
        assert self.sinks + max(self.recent, 1) <= budget
        super().__init__(model)

    def default_recent(self) -> int:
        """The paper's number of recent tokens."""
        return 0

    def make_layer(self, layer_idx: int) -> ReferenceLayer:
        return self.layer_class(self, RotaryGeometry.from_config(self.config, layer_idx=layer_idx))

    def kept_positions(self, layer_idx: int) -> torch.Tensor:
        """Which tokens are kept, (batch, heads, budget or more): ascending positions, then -1 for every slot that is free."""
        layer = self.layers[layer_idx]
        found = torch.full((len(layer.rows), layer.kv_heads, layer.kept if self.budget >= UNLIMITED else max(layer.kept, self.budget)), -1)
        for b, row in enumerate(layer.rows):
            for h, head in enumerate(row.heads):
                found[b, h, : len(head)] = head.positions
        return found
