"""The paper's claims are judged by what is measured, and bounds on sketches hold on every case."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import testbed
from tests.scripts.running import import_script, rows_of, run_script
from tests.scripts.test_paper_bounds import covers, tokens

BOUNDS, SCRIPT = import_script("papers._bounds"), import_script("papers.falsify_subspace")


@pytest.mark.full
def test_each_claim_has_a_line_and_a_verdict(tmp_path):
    done = run_script("papers/falsify_subspace", "--device", "cpu", "--quick", "--csv", tmp_path / "claims.csv")
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "claims.csv")
    assert len({row["claim"] for row in rows}) == len(rows) > 20
    assert {row["verdict"] for row in rows} == {"holds", "refuted"}
    assert all(row["model"] == "base" and row["measured"] for row in rows)
    for row in rows:
        line = next(line for line in done.stdout.splitlines() if line.startswith(f"base: {row['claim']} "))
        assert line.split()[-1] == row["verdict"]


@pytest.fixture(scope="module")
def layers():
    model, tokenizer = testbed.load("base")
    ids = tokenizer(testbed.held_out(), return_tensors="pt").input_ids[:, :256]
    return SCRIPT.record(model, ids), model, ids


def test_recorded_keys_and_values_are_those_of_the_cache_and_keys_without_positions(layers):
    recorded, model, ids = layers
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    for own, layer in zip(recorded, cache.layers, strict=True):
        torch.testing.assert_close(own.keys, layer.keys.double(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(own.values, layer.values.double(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(own.plain[:, :, 0], own.keys[:, :, 0])
        assert not torch.allclose(own.plain[:, :, 9], own.keys[:, :, 9], atol=1e-2)
    assert recorded[0].queries.shape == (1, 2, 128, 64)


def test_bounds_that_hold_are_said_to_hold_and_the_papers_counterexample_is_refuted(layers):
    found = {row["claim"]: row for row in (*SCRIPT.bound_claims(layers[0]), *SCRIPT.sketch_claims(layers[0]))}
    refuted = [claim for claim, row in found.items() if row["verdict"] == "refuted"]
    assert any("of the energies 100, 1, 0" in claim for claim in refuted)
    for sure in ("with gamma = 1", "the largest row", "on softmax", "on outputs:", "||A'A - S'S|| <=", "sqrt(s_(r+1)^2"):
        assert not [claim for claim in refuted if claim.startswith("bound ") and sure in claim]
        assert any(sure in claim for claim in found)


def tail_energies(gram: torch.Tensor) -> torch.Tensor:
    """What the best subspace of each rank misses, from rank 0 on."""
    energies = torch.linalg.eigvalsh(gram.double()).clamp_min(0)
    return torch.stack([energies[: len(energies) - rank].sum() for rank in range(len(energies) + 1)])


def frequent_directions_bound(tails: torch.Tensor, sketch_size: int) -> torch.Tensor:
    """How far a Frequent Directions sketch can be from what it has seen, by the paper of that method."""
    return torch.stack([tail / (sketch_size - rank) for rank, tail in enumerate(tails[:sketch_size])]).amin()


def sketched(x: torch.Tensor, size: int, buffer: int) -> tuple[torch.Tensor, float]:
    """A plain sketch that takes off the square of singular value `size` whenever `buffer` rows are full, and the sum of what it took."""
    rows: list[torch.Tensor] = []
    taken = 0.0
    for token in x:
        rows.append(token)
        if len(rows) == buffer:
            _, values, directions = torch.linalg.svd(torch.stack(rows), full_matrices=False)
            squares = values**2
            off = float(squares[size - 1]) if len(squares) >= size else 0.0
            taken += off
            rows = [(square - off) ** 0.5 * direction for square, direction in zip(squares, directions, strict=True) if square > off]
    return torch.stack(rows) if rows else x.new_zeros(1, x.shape[1]), taken


@given(data=st.data(), seed=st.integers(0, 2**31), size=st.integers(1, 6), extra=st.sampled_from(["none", "as many", "half"]))
def test_sketches_stay_within_their_bounds_and_so_do_bases_taken_from_them(data: st.DataObject, seed: int, size: int, extra: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = data.draw(st.integers(1, 7))
    x = data.draw(tokens(generator, data.draw(st.integers(1, 40)), width))
    buffer = {"none": size, "as many": 2 * size, "half": 2 * size}[extra]
    sketch, taken = sketched(x, size, buffer)
    gram = x.T @ x
    energy = float(gram.trace())
    error = torch.linalg.matrix_norm(gram - sketch.T @ sketch, ord=2)
    certificate = BOUNDS.certificate(gram.trace(), sketch.square().sum(), size)
    prior = frequent_directions_bound(tail_energies(gram), size)
    assert covers(taken, error, energy)
    assert covers(certificate, taken, energy)
    assert covers(prior, certificate, energy)
    values, directions = torch.linalg.svd(sketch)[1:]
    own = torch.linalg.svdvals(x)
    for rank in range(width + 1):
        missed = torch.linalg.matrix_norm(x - x @ directions[:rank].T @ directions[:rank], ord=2)
        for singular in (values, own):
            following = singular[rank] if rank < len(singular) else torch.zeros(())
            for bound in (error, certificate, prior):
                # Squares were compared before the root was taken.
                assert covers(BOUNDS.sketched_residual_bound(following, bound) ** 2, missed**2, energy)


def test_a_basis_from_a_sketch_misses_what_the_papers_bound_has_no_room_for() -> None:
    x = torch.diag(torch.tensor([100.0, 1.0, 0.0]).double().sqrt())
    size, rank, gap = 101, 1, 99.0
    sketch, _ = sketched(x, size, 2 * size)
    basis = torch.linalg.svd(sketch).Vh[:rank]
    epsilon = float(tail_energies(x.T @ x)[rank]) / (size - rank)
    missed = float(BOUNDS.residual_norm(x, basis))
    assert missed == pytest.approx(1.0)
    paper = float(BOUNDS.paper_sketch_bound(x.T @ x, rank, size))
    assert paper == pytest.approx(epsilon**0.5 + 2 * epsilon / gap)
    assert paper < 0.13 < missed <= float(BOUNDS.sketched_residual_bound(torch.tensor(1.0), torch.tensor(epsilon)))
