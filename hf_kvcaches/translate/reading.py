"""What a translator is fitted to: products of both models' states, a sample of tokens, and the cost of errors.

The cost of an error of a layer's keys and values is what it does to the predictions behind a text: the last quarter of each text is
predicted, and the gradients of the loss of tokens drawn from these predictions are taken at the keys and values of the tokens before it.
Their second moments, head by head, are what errors of keys and values cost, in the same unit in all layers. Half of a token's weight in
the products is by its gradients, which are large for facts that later tokens ask for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch
from torch.nn import functional
from tqdm import tqdm

from hf_kvcaches import compat
from hf_kvcaches.evaluate.texts import add_up
from hf_kvcaches.translate.pair import Pair, States
from hf_kvcaches.translate.plan import Group
from hf_kvcaches.translate.regression import Key, Products
from hf_kvcaches.translate.states import cache_of

# The share of a text that is predicted, its tokens at the most, and texts that gradients are taken of at the most.
_PREDICTED, _MOST_PREDICTED, _GRADIENT_TEXTS = 0.25, 256, 32
SHORTEST = 8
"""Tokens of a text that has a share to predict."""
# What gradients don't touch costs this share of the mean of its head, and of its layer.
_DAMPING, _LAYER_DAMPING, _TINY = 0.02, 1e-4, 1e-30


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the time inside to the seconds of a stage."""
    start = perf_counter()
    yield
    seconds[stage] = round(seconds.get(stage, 0.0) + perf_counter() - start, 3)


def split_of(tokens: int) -> int:
    """How many tokens of a text stand before those that are predicted."""
    return tokens - min(_MOST_PREDICTED, max(2, int(_PREDICTED * tokens)))


def pairs_of(groups: Sequence[Group], lowest: Sequence[int], plain: bool) -> list[tuple[Key, Key]]:
    """Return the pairs of blocks whose products are needed.

    Args:
        lowest: The numbers of layers that the consumer may run. The next layer's attention input is what is known of a token.
        plain: Whether all errors of a layer cost the same, which takes their variance.
    """
    pairs: list[tuple[Key, Key]] = []
    for layer in lowest:
        own, theirs = ("consumer input", layer), ("producer input", layer)
        pairs += [(own, own), (theirs, theirs), (own, theirs)]
        of_groups = [(kind, group.layers[0]) for group in groups if group.layers[-1] > layer for kind in ("producer", "consumer")]
        pairs += [(side, block) for block in of_groups for side in (own, theirs)]
    for group in groups:
        x, y = ("producer", group.layers[0]), ("consumer", group.layers[0])
        pairs += [(x, x), (x, y), *([(y, y)] if plain else [])]
    return pairs


class ErrorCosts:
    """Sums of what errors of the consumer's keys and values cost: second moments of gradients, (heads, size, size), by layer and side."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def add(self, pair: Pair, ids: torch.Tensor, states: States, exact_tokens: int, seed: int) -> torch.Tensor:
        """Add the gradients of a text, and return its tokens' weights, (tokens,), 1 on average.

        Args:
            states: The consumer's, of all tokens.
            exact_tokens: How many of the first tokens have no errors.
        """
        exact, weights = min(exact_tokens, split_of(len(ids)) - 1), torch.ones(len(ids))
        found = gradients(pair, ids, states, seed)
        for layer, rows in found.items():
            heads, key_dim, value_dim = states[layer].shape
            energies = rows[exact:].float().square().sum(1)
            if layer:  # the lowest one is never translated
                weights[exact : len(rows)] += 0.5 / (len(found) - 1) * (energies / energies.mean().clamp_min(_TINY) - 1).cpu()
            sides = rows[exact:].split([heads * key_dim, heads * value_dim], dim=1)
            for totals, side in zip((self.keys, self.values), sides, strict=True):
                by_head = side.double().unflatten(1, (heads, -1)).transpose(0, 1)
                totals[layer] = totals.get(layer, 0) + by_head.mT @ by_head
        return weights

    def roots(self, layer: int) -> list[torch.Tensor]:
        """Return the square roots of the costs of a layer's keys and of its values."""
        found = []
        for total in (self.keys[layer], self.values[layer]):
            mean = total.diagonal(dim1=1, dim2=2).mean(1)
            damping = _DAMPING * mean + _LAYER_DAMPING * mean.mean()
            values, vectors = torch.linalg.eigh(total)
            spread = torch.where(damping > 0, damping, torch.ones_like(damping))[:, None] + values.clamp_min(0)
            found.append((vectors * spread.sqrt()[:, None]) @ vectors.mT)
        return found


def gradients(pair: Pair, ids: torch.Tensor, states: States, seed: int) -> dict[int, torch.Tensor]:
    """Return the gradients at the unrotated keys and values of a text's tokens before its last quarter, (tokens, width) by layer.

    The loss is that of tokens that are drawn from the consumer's predictions in the last quarter. Gradients are at one layer's keys and
    values with those of the others fixed, as each layer is translated by itself.
    """
    split, model = split_of(len(ids)), pair.consumer
    with torch.inference_mode(False), torch.enable_grad():
        leaves = {layer: state._replace(states=state.states[:split].clone().requires_grad_()) for layer, state in states.items()}
        cache = cache_of(pair.rotation, leaves, model.dtype)
        asked = ids[None, split:].clone().to(compat.input_device(model))
        logits = model(input_ids=asked, **compat.cache_kwargs(model, cache)).logits[0].float()
        drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=torch.Generator().manual_seed(seed))[:, 0]
        loss = functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum")
        found = torch.autograd.grad(loss, [leaf.states for leaf in leaves.values()], allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def why_no_gradients(pair: Pair) -> str:
    """Why a consumer has no gradients at its keys and values, tried on a few tokens; "" where it has."""
    ids = torch.zeros(SHORTEST, dtype=torch.long)
    try:
        found = gradients(pair, ids, pair.states(ids)[1], 0)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        return str(error).partition("\n")[0]
    return "" if all(bool(rows.isfinite().all()) for rows in found.values()) else "they are not finite"


class TextSums:
    """Sums over texts that both models read, for the codes of some groups of layers.

    Args:
        lowest: The numbers of layers that the consumer may run.
        exact_tokens: How many of a text's first tokens are left out, because the consumer runs them.
        costs: What errors cost, if that is to be added to; None if it is known or all cost the same.
        weights: Of the tokens of texts that gradients were taken of, by a text's number; added to with `costs`.

    Attributes:
        samples: Sampled rows of the blocks of the producer.
    """

    def __init__(
        self,
        pair: Pair,
        groups: Sequence[Group],
        lowest: Sequence[int],
        exact_tokens: int,
        products: Products,
        costs: ErrorCosts | None,
        weights: dict[int, torch.Tensor],
    ) -> None:
        self.pair, self.groups, self.lowest, self.exact_tokens = pair, groups, lowest, exact_tokens
        self.products, self.costs, self.weights, self.samples = products, costs, weights, dict[Key, torch.Tensor]()

    def read(self, texts: Sequence[torch.Tensor], sample: int, progress: bool, seconds: dict[str, float]) -> None:
        """Read all texts, each process its share, and add up the sums of all processes.

        Args:
            sample: Tokens that are sampled.
        """
        process, processes = compat.process()
        every, size = -(-len(texts) // _GRADIENT_TEXTS), -(-sample // len(texts))
        for number, ids in enumerate(tqdm(texts, unit=" texts", desc="Reading texts", disable=not progress or process > 0)):
            if number % processes != process:
                continue
            with timed(seconds, "reading"):
                producer, consumer = self.pair.states(ids, self.lowest)
            if self.costs is not None and len(ids) >= SHORTEST and (number // processes) % every == 0:
                with timed(seconds, "gradients"):
                    self.weights[number] = self.costs.add(self.pair, ids, consumer, self.exact_tokens, number)
            with timed(seconds, "products"):
                weights = self.weights.get(number, torch.ones(len(ids)))
                self._add(producer, consumer, weights, slice(number * size, (number + 1) * size), len(texts) * size)
        self.products.finish(processes)
        if processes > 1:
            costs = [] if self.costs is None else [*self.costs.keys.values(), *self.costs.values.values()]
            add_up([*self.samples.values(), *costs])

    def _add(self, producer: States, consumer: States, weights: torch.Tensor, rows: slice, sampled: int) -> None:
        """Add a text, of which some tokens are sampled, in rows of its own so that the samples of processes can be added up."""
        device, blocks = self.products.device, dict[Key, torch.Tensor]()
        for layer in self.lowest:
            blocks["consumer input", layer] = consumer[layer].known
            blocks["producer input", layer] = producer[self.pair.sources[layer]].known
        for group in self.groups:
            for role, states, layers in (("producer", producer, group.sources), ("consumer", consumer, group.layers)):
                blocks[role, group.layers[0]] = torch.cat([states[layer].states.to(device) for layer in layers], dim=1)
        exact = min(self.exact_tokens, len(weights) - 2)
        blocks = {name: block[exact:] for name, block in blocks.items()}
        self.products.add(blocks, weights[exact:])
        for name in (name for name in blocks if name[0].startswith("producer")):
            if name not in self.samples:
                self.samples[name] = torch.zeros(sampled, blocks[name].shape[1], device=device)
            chosen = torch.linspace(0, len(blocks[name]) - 1, rows.stop - rows.start).long()
            self.samples[name][rows] = blocks[name][chosen.to(device)].to(self.samples[name])
