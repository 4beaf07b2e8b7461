"""Initialisation that gives a small Llama the attention heads that recall is made of.

Plain training finds them late: a head that looks for places with the same past is of no use before there are heads that tell
every token its past, and the other way round. So layer 0 starts with heads that attend one, two and three tokens back and to the
nearest name, and layer 1 with a head that looks for a value with the same past and copies it. Training does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import LlamaForCausalLM

# Channels of the embedding with a meaning: the same for every token; raised for names; raised for values and digits.
CONSTANT, NAME, VALUE = 0, 1, 2


@torch.no_grad()
def plant_recall_heads(model: LlamaForCausalLM, *, seed: int, names: Sequence[int], values: Sequence[int], scale: float = 0.04) -> None:
    """Overwrites a fresh model's embedding and the heads named above; everything else keeps its random values.

    Args:
        model: A model with at least four query heads in two groups.
        seed: Of the random directions.
        names: Token ids of the names.
        values: Token ids of what a fact can say.
        scale: Standard deviation of the embedding.
    """
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    hidden, dim, half = config.hidden_size, config.head_dim, config.head_dim // 2
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, scale, generator=generator)
    embedding[:, :3] = 0
    embedding[:, CONSTANT] = 3 * scale
    embedding[list(names), NAME] = 3 * scale
    embedding[list(values), VALUE] = 3 * scale
    channel = 3.0  # about their value behind the norm

    def directions() -> torch.Tensor:
        """`head_dim` orthonormal directions of the residual stream that leave the meaningful channels out."""
        basis = torch.linalg.qr(torch.randn(hidden - 3, dim, generator=generator))[0]
        return torch.cat([torch.zeros(3, dim), basis])

    read, past, copy = directions(), directions(), directions()
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    frequency = model.model.rotary_emb.inv_freq.float()

    def point(queries: torch.Tensor, keys: torch.Tensor, pairs: Sequence[int], back: int, source: int, strength: float) -> None:
        """Makes a head look for a channel `back` tokens to the left: the rotations of query and key agree there only."""
        weight = math.sqrt(strength * math.sqrt(dim) / len(pairs)) / channel
        chosen = torch.tensor(pairs)
        keys[chosen, source] = weight
        queries[chosen, CONSTANT] = weight * torch.cos(frequency[chosen] * back)
        queries[chosen + half, CONSTANT] = -weight * torch.sin(frequency[chosen] * back)

    queries, keys = first.q_proj.weight.view(-1, dim, hidden), first.k_proj.weight.view(-1, dim, hidden)
    queries[:4] = 0
    keys[:2] = 0
    fast, medium = range(12), range(5, 10)
    point(queries[0], keys[0], fast, 1, CONSTANT, 35.0)
    point(queries[1], keys[0], fast, 2, CONSTANT, 35.0)
    point(queries[2], keys[1], range(5), 3, CONSTANT, 40.0)
    # The medium frequencies fall off over some tens of tokens, which makes the nearest name win.
    point(queries[3], keys[1], medium, 0, NAME, 25.0)
    first.v_proj.weight.view(-1, dim, hidden)[:] = read.T
    for head, share in enumerate((1.0, 0.5, 0.5, 2.0)):
        first.o_proj.weight[:, head * dim : (head + 1) * dim] = past * (share * scale)

    # What stands here and before is looked for in the pasts of values, on slow frequencies, whose angles hardly change over a context.
    slow = torch.nonzero(frequency * config.max_position_embeddings < 1.0).flatten()
    flag, slow = slow[-2:], slow[:-2]
    chosen = torch.cat([slow, slow + half])
    strength = math.sqrt(12.0 * math.sqrt(dim) / len(chosen))
    for projection, source in ((second.q_proj, past + read), (second.k_proj, past)):
        compare = projection.weight.view(-1, dim, hidden)[0]
        compare.zero_()
        compare[chosen] = source.T[: len(chosen)] * strength
    weight = math.sqrt(10.0 * math.sqrt(dim) / len(flag)) / channel
    second.q_proj.weight.view(-1, dim, hidden)[0][flag, CONSTANT] = 2 * weight
    second.k_proj.weight.view(-1, dim, hidden)[0][flag, VALUE] = 2 * weight
    second.v_proj.weight.view(-1, dim, hidden)[0] = copy.T
    second.o_proj.weight[:, :dim] = copy * (6 * scale)
