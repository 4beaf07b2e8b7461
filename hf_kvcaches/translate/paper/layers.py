"""The paper's two ways of a layer: Reuse translates its keys and values (section 4.3), Patch the input of its attention (section 4.4)."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

# The share of held-out tokens, after how many steps the error on them is measured, and the tokens of a step.
_HELD_OUT, _EVALUATE_AFTER, _BATCH = 0.1, 50, 512


class Translator(NamedTuple):
    """From the producer's keys or values in one layer to codes, (producer, rank), and to the consumer's, (rank, consumer)."""

    encode: torch.Tensor
    decode: torch.Tensor


def fit_reuse(producer: torch.Tensor, consumer: torch.Tensor, rank: int, ridge: float = 1e-6) -> Translator:
    """Factorise both models' states side by side, (tokens, width) each, by a truncated SVD, with a ridge encoder (equations 6 and 7).

    Args:
        ridge: As a share of the mean square of the producer's states.
    """
    both = torch.cat([producer, consumer], dim=1).double()
    latents = torch.linalg.eigh(both.T @ both)[1].flip(1)[:, :rank]
    return Translator(fit_ridge(producer, both @ latents, ridge), latents[producer.shape[1] :].T.float())


def fit_ridge(inputs: torch.Tensor, targets: torch.Tensor, ridge: float) -> torch.Tensor:
    """Return the weights of a ridge regression, (inputs, targets), float32."""
    inputs = inputs.double()
    squares = inputs.T @ inputs
    squares.diagonal().add_(ridge * squares.diagonal().mean() + torch.finfo(torch.float64).tiny)
    return torch.linalg.solve(squares, inputs.T @ targets.double()).float()


class Aligner(nn.Module):
    """From codes to the consumer's attention input (equation 11): a ridge solution, which the paper lacks, and an MLP."""

    linear: torch.Tensor
    spread: torch.Tensor

    def __init__(self, codes: torch.Tensor, targets: torch.Tensor, width: int) -> None:
        super().__init__()
        inputs = torch.cat([codes, codes.new_ones(len(codes), 1)], dim=1)
        self.register_buffer("linear", fit_ridge(inputs, targets, 1e-6))
        self.register_buffer("spread", codes.std(0).clamp_min(1e-6))
        self.inner, self.outer = nn.Linear(codes.shape[1], width), nn.Linear(width, targets.shape[1])
        for weights in (self.outer.weight, self.outer.bias):
            nn.init.zeros_(weights)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.inner(codes / self.spread))
        return codes @ self.linear[:-1] + self.linear[-1] + self.outer(hidden)


@torch.enable_grad()
def train_aligner(codes: torch.Tensor, targets: torch.Tensor, steps: int, rate: float = 1e-3) -> Aligner:
    """Train by AdamW, and keep the weights with the least error on the last tenth of the tokens: it is never worse than the ridge there."""
    torch.manual_seed(0)
    split = round((1 - _HELD_OUT) * len(codes))
    with torch.inference_mode(False):
        aligner = Aligner(codes[:split], targets[:split], 2 * targets.shape[1])
        optimizer = torch.optim.AdamW(aligner.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
        best, least = copy.deepcopy(aligner.state_dict()), float("inf")
        for step in range(steps + 1):
            if step % _EVALUATE_AFTER == 0:
                with torch.no_grad():
                    error = float(functional.mse_loss(aligner(codes[split:]), targets[split:]))
                if error < least:
                    best, least = copy.deepcopy(aligner.state_dict()), error
            rows = torch.randint(split, (min(_BATCH, split),))
            optimizer.zero_grad()
            functional.mse_loss(aligner(codes[rows]), targets[rows]).backward()
            optimizer.step()
            schedule.step()
    aligner.load_state_dict(best)
    return aligner.eval()
