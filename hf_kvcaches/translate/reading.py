"""What errors of a consumer's keys and values cost, and how much each token of a text counts.

The last quarter of each text is predicted, and the gradients of the loss of tokens drawn from these predictions are taken at the keys and
values of the tokens before it. Their second moments, head by head, are the cost of errors, in one unit for all layers. Half of a token's
weight in a fit is by its gradients, which are large for facts that later tokens ask for.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from hf_kvcaches import compat
from hf_kvcaches.translate.pair import Pair, States
from hf_kvcaches.translate.states import cache_of

# The share of a text that is predicted, and its tokens at the most.
_PREDICTED, _MOST_PREDICTED = 0.25, 256
SHORTEST = 8
"""Tokens of a text that has a share to predict."""
# What gradients don't touch costs this share of the mean of its head, and of its layer: other texts ask for other facts.
_DAMPING, _LAYER_DAMPING, _TINY = 0.2, 0.1, 1e-30


def split_of(tokens: int) -> int:
    """Return how many tokens of a text come before those that are predicted."""
    return tokens - min(_MOST_PREDICTED, max(2, int(_PREDICTED * tokens)))


class ErrorCosts:
    """Second moments of gradients at the keys and at the values of the consumer's layers, (heads, size, size)."""

    def __init__(self) -> None:
        self.sides: dict[int, list[torch.Tensor]] = {}

    def add(self, pair: Pair, ids: torch.Tensor, states: States, exact_tokens: int, seed: int) -> torch.Tensor:
        """Add the gradients of a text, and return its tokens' weights, (tokens,), 1 on average.

        Args:
            states: The consumer's, of all tokens.
            exact_tokens: How many of the first tokens have no errors.
        """
        exact, weights = min(exact_tokens, split_of(len(ids)) - 1), torch.ones(len(ids))
        by_layer = gradients(pair, ids, states, seed)
        for layer, rows in by_layer.items():
            heads, key_dim, value_dim = states[layer].shape
            energies = rows[exact:].float().square().sum(1)
            if layer:  # the lowest one is never translated
                weights[exact : len(rows)] += 0.5 / (len(by_layer) - 1) * (energies / energies.mean().clamp_min(_TINY) - 1).cpu()
            sides = rows[exact:].double().split([heads * key_dim, heads * value_dim], dim=1)
            by_head = [side.unflatten(1, (heads, -1)).transpose(0, 1) for side in sides]
            moments = [side.mT @ side for side in by_head]
            before = self.sides.get(layer, [torch.zeros_like(moment) for moment in moments])
            self.sides[layer] = [total + moment for total, moment in zip(before, moments, strict=True)]
        return weights

    def roots(self, layer: int) -> list[torch.Tensor]:
        """Return the square roots of the costs of a layer's keys and of its values."""
        found = []
        for total in self.sides[layer]:
            mean = total.diagonal(dim1=1, dim2=2).mean(1)
            damping = _DAMPING * mean + _LAYER_DAMPING * mean.mean()
            values, vectors = torch.linalg.eigh(total)
            spread = torch.where(damping > 0, damping, torch.ones_like(damping))[:, None] + values.clamp_min(0)
            found.append((vectors * spread.sqrt()[:, None]) @ vectors.mT)
        return found


def gradients(pair: Pair, ids: torch.Tensor, states: States, seed: int) -> dict[int, torch.Tensor]:
    """Return the gradients at the unrotated keys and values of the tokens before those that are predicted, (tokens, width) by layer.

    Gradients are at one layer's keys and values with those of the others fixed, as each layer is translated by itself.
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
    """Return why a consumer has no gradients at its keys and values, tried on a few tokens; "" where it has."""
    ids = torch.zeros(SHORTEST, dtype=torch.long)
    try:
        found = gradients(pair, ids, pair.states(ids)[1], 0)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        return str(error).partition("\n")[0]
    return "" if all(bool(rows.isfinite().all()) for rows in found.values()) else "they are not finite"
