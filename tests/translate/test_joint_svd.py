"""The paper's factorisation against an SVD of all rows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_kvcaches.translate.paper.joint_svd import joint_svd
from tests.translate.test_regression import SEEDS, close, least_squares, rows_of


def svd_by_hand(x: Tensor, y: Tensor, rank: int) -> Tensor:
    """What the paper's translator rebuilds of the consumer's states at full length: an SVD of both side by side, and least squares."""
    _, _, directions = torch.linalg.svd(torch.cat([x, y], dim=1), full_matrices=False)
    latents = torch.cat([x, y], dim=1) @ directions[:rank].T
    return least_squares(x, latents) @ directions[:rank, x.shape[1] :]


@given(seed=SEEDS, producer=st.integers(1, 6), consumer=st.integers(1, 6), rank=st.integers(1, 9), begin=st.integers(0, 2))
def test_the_papers_factorisation_is_an_svd_of_both_models_states_side_by_side(seed, producer, consumer, rank, begin):
    rows = rows_of(seed, producer=producer + begin, consumer=2 * consumer)
    columns = slice(begin, begin + producer), slice(consumer, 2 * consumer)
    rank = min(rank, producer, consumer)
    encode, decode = joint_svd(rows.moments(), *columns, rank, 1e-12)
    assert (encode.shape, decode.shape) == ((producer, rank), (rank, consumer))
    x, y = rows.producer[:, columns[0]], rows.consumer[:, columns[1]]
    close(x @ encode @ decode, svd_by_hand(x, y, rank), 1e-3)
