"""Initialisation that gives a small Llama the two attention heads that recall is made of.

Plain training finds these heads late: an induction head is of no use before there is a head that tells every token what stood
before it, and the other way round. So layer 0 starts with heads that attend one, two and three tokens back, and
layer 1 with a head that looks for places with the same past and copies what stands there. Training does the rest.
"""

from __future__ import annotations

import math

import torch
from transformers import LlamaForCausalLM

CONSTANT = 0  # the channel of the embedding that is the same for every token


@torch.no_grad()
def plant_recall_heads(model: LlamaForCausalLM, *, seed: int, sharpness: float = 20.0, match: float = 30.0, write: float = 1.0) -> None:
    """Overwrites a fresh model's embedding and the heads named above; everything else keeps its random values."""
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    hidden, dim, half = config.hidden_size, config.head_dim, config.head_dim // 2
    scale = 0.04
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, scale, generator=generator)
    embedding[:, CONSTANT] = 3 * scale
    channel = 3 / math.sqrt((hidden - 1 + 9) / hidden)  # its value behind the norm

    def directions() -> torch.Tensor:
        """`head_dim` orthonormal directions of the residual stream that leave the constant channel out."""
        basis = torch.linalg.qr(torch.randn(hidden - 1, dim, generator=generator))[0]
        return torch.cat([torch.zeros(1, dim), basis])

    read, past, copy = directions(), directions(), directions()
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn

    # Layer 0: queries and keys are constants whose rotations agree at one distance only. Fast frequencies tell neighbours apart.
    frequency = model.model.rotary_emb.inv_freq.float()
    weight = torch.zeros(half)
    weight[: half // 2] = math.sqrt(sharpness * math.sqrt(dim) / (half // 2)) / channel
    first.k_proj.weight.zero_()
    first.k_proj.weight.view(-1, dim, hidden)[:, :half, CONSTANT] = weight
    queries = first.q_proj.weight.view(-1, dim, hidden)
    for head, back in enumerate((1, 2, 3)):
        # The key `back` places to the left is rotated by that much less, so the query starts rotated back by it.
        queries[head] = 0
        queries[head, :half, CONSTANT] = weight * torch.cos(frequency * back)
        queries[head, half:, CONSTANT] = -weight * torch.sin(frequency * back)
    first.v_proj.weight.view(-1, dim, hidden)[:] = read.T
    for head in range(3):
        first.o_proj.weight[:, head * dim : (head + 1) * dim] = past * (write * scale)

    # Layer 1, head 0: what stands here and before is looked for in the pasts of other places, on slow frequencies, whose angles
    # hardly change over a context, and the token found is copied.
    slow = torch.nonzero(frequency * config.max_position_embeddings < 1.0).flatten()
    chosen = torch.cat([slow, slow + half])
    strength = math.sqrt(match * math.sqrt(dim) / len(chosen))
    for projection, source in ((second.q_proj, past + 2 * read), (second.k_proj, past)):
        compare = projection.weight.view(-1, dim, hidden)[0]
        compare.zero_()
        compare[chosen] = source.T[: len(chosen)] * strength
    second.v_proj.weight.view(-1, dim, hidden)[0] = copy.T
    second.o_proj.weight[:, :dim] = copy * (6 * write * scale)
