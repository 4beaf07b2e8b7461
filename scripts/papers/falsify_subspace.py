"""Which claims of *Online Subspace Projection for KV Caches* hold on a model: its falsifiers, its bounds, and what its defaults rest on.

    python scripts/papers/falsify_subspace.py [--model FOLDER_OR_HUB_ID ...] [--text FILE] [--csv FILE]

Queries, keys and values of rows of text are recorded from the model's own attention. r is a quarter of the head size d unless a line says
otherwise; "rotated" keys are as they are cached, which is the paper's main text. A line is a claim, what was measured, and a verdict: a
bound holds if nothing measured is above it; the other limits stand in the claims. Divergences (KL) and changes of the perplexity are those
of a `SubspaceCache` with `AdaptiveSubspace`, 4 sinks and no other exact tokens, from those of the full cache, of single tokens.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where what the scripts share lies

from papers import _bounds as bounds
from papers._bounds import residual_norm, residual_rows
from shared import TESTBED
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.models import with_attention

from hf_kvcaches import AdaptiveSubspace, SubspaceCache
from hf_kvcaches.cli.prompts import encode
from hf_kvcaches.cli.tables import Row, environment, show, write_csv
from hf_kvcaches.codec.calibrate import measure
from hf_kvcaches.codec.meter import Reading
from hf_kvcaches.codec.moments import LayerStatistics, descending
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate import measures
from hf_kvcaches.subspace.paper.settings import Bases
from hf_kvcaches.subspace.paper.side import Sketch

# Rounding may lift a measured number above a bound that it reaches.
SLACK = 1 + 1e-6
QUERIES = 64  # the last ones of a row are measured
SINKS = 4


def read_rows(ids: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    """Rows that begin at equal distances, so that they are different text, (rows, tokens)."""
    if len(ids) < rows * 16:
        raise ConfigError.of("--text", f"at least {rows * 16} tokens after those for calibration", len(ids), "Name a longer file.")
    length = min(tokens, len(ids) // rows)
    return torch.stack([ids[row * (len(ids) // rows) :][:length] for row in range(rows)])


@dataclass(frozen=True, eq=False)
class Recorded:
    """What one layer's attention was given, in float64: (rows, heads, tokens, d), and the last queries, (rows, kv_heads, queries, d)."""

    queries: torch.Tensor
    keys: torch.Tensor  # as they are cached
    plain: torch.Tensor  # keys before their rotation
    values: torch.Tensor
    scaling: float

    @property
    def sides(self) -> dict[str, torch.Tensor]:
        return {"rotated keys": self.keys, "keys before the rotation": self.plain, "values": self.values}


@torch.no_grad()
def record(model: Any, ids: torch.Tensor) -> list[Recorded]:
    """The layers of a model over rows of text, (rows, tokens)."""
    layers: list[Recorded] = []

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any) -> Any:
        geometry = RotaryGeometry.from_config(model.config, layer_idx=module.layer_idx)
        queries = query[:, :, -QUERIES:].double().unflatten(1, (key.shape[1], -1)).flatten(2, 3)
        plain = geometry.unrotate(key.double(), torch.arange(key.shape[2], device=key.device)) if geometry.kind == "rope" else key.double()
        scaling = options.get("scaling") or query.shape[-1] ** -0.5
        layers.append(Recorded(queries, key.double(), plain, value.double(), scaling))
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("recording", attend)
    with_attention(model, "recording")(input_ids=ids.to(model.device), use_cache=False)
    return layers


def basis(vectors: torch.Tensor, rank: int) -> torch.Tensor:
    """The directions with most energy, (..., rank, d)."""
    return torch.linalg.eigh(vectors.mT @ vectors).eigenvectors[..., -rank:].mT


def energy_claims(layers: list[Recorded]) -> Iterator[Row]:
    """The hypothesis: rank and energy, and whether subspaces stay."""
    for name in layers[0].sides:
        kept, near, far = [], [], []
        for layer in layers:
            vectors = layer.sides[name]
            rank, part = vectors.shape[-1] // 4, vectors.shape[2] // 4
            lost = lambda some, of, rank=rank: residual_rows(some, basis(of, rank)).square().sum(-1) / some.square().sum((-1, -2))  # noqa: E731
            kept.append(1 - lost(vectors, vectors))
            first, second, *_, last = vectors.split(part, 2)[:4]
            near.append(lost(second, first))
            far.append(lost(last, first))
        shares = torch.stack(kept).flatten()
        most = float((shares >= 0.9).double().mean())
        yield verdict(f"{name}: half of the heads have 90% of their energy in d / 4 directions", f"{most:.0%} of the heads", most >= 0.5)
        soon, late = (float(torch.stack(each).mean()) for each in (near, far))
        claim = f"{name}: a basis of a row's first quarter loses at most 1.2 times as much of the last quarter as of the second"
        yield verdict(claim, f"{soon:.1%} of the energy, later {late:.1%}", late <= 1.2 * soon)


def bound_claims(layers: list[Recorded]) -> Iterator[Row]:
    """The bounds of section 8, over all heads and queries, with a basis of the row itself."""
    above = dict.fromkeys(("gamma", "one", "ours", "weights", "output"), 0)
    pairs: list[list[torch.Tensor]] = [[], [], [], []]  # bound and error of logits, then of outputs
    plain_error, gamma_error, best = [], [], []
    for layer in layers:
        dim, rank = layer.keys.shape[-1], layer.keys.shape[-1] // 4
        gamma, maps = (rank / dim) ** 0.5, [basis(each, rank) for each in (layer.keys, layer.values)]
        logits = layer.scaling * layer.queries @ layer.keys.mT
        near = layer.scaling * layer.queries @ (layer.keys @ maps[0].mT @ maps[0]).mT
        near_values, lengths = layer.values @ maps[1].mT @ maps[1], torch.linalg.vector_norm(layer.queries, dim=-1)
        norm = residual_norm(layer.keys, maps[0])[..., None]
        errors = {factor: (logits - factor * near).abs().amax(-1) for factor in (1.0, gamma)}
        for name, factor in (("one", 1.0), ("gamma", gamma)):
            above[name] += _above(errors[factor], factor * layer.scaling * norm * lengths)
        key_rows, value_rows = residual_rows(layer.keys, maps[0], gamma=gamma), residual_rows(layer.values, maps[1])
        radius = bounds.value_radius(layer.values)[..., None]
        found = bounds.attention_error_bound(key_rows[:, :, None], value_rows[:, :, None], lengths, radius, layer.scaling)
        weights = [each.softmax(-1) for each in (logits, gamma * near)]
        output = torch.linalg.vector_norm(weights[0] @ layer.values - weights[1] @ near_values, dim=-1)
        above["ours"] += _above(errors[gamma], found.logits)
        above["weights"] += _above((weights[0] - weights[1]).abs().sum(-1), bounds.weight_error_bound(errors[gamma]))
        above["output"] += _above(output, found.output)
        for kept, new in zip(pairs, (found.logits, errors[gamma], found.output, output), strict=True):
            kept.append(new.flatten())
        plain_error.append((logits - near).square().mean())
        gamma_error.append((logits - gamma * near).square().mean())
        best.append(((logits * near).sum((-1, -2)) / near.square().sum((-1, -2)) / gamma).flatten())
    count = sum(len(each) for each in pairs[0])
    for name, claim in (
        ("gamma", "logits: gamma ||K (I - P)|| ||q|| / sqrt(d), with the paper's gamma, sqrt(r / d)"),
        ("one", "logits: the same with gamma = 1"),
        ("ours", "logits: the largest row of K - gamma K P in place of the norm (scripts/papers/_bounds.py)"),
        ("weights", "softmax: 2 tanh(error of the logits / 2)"),
        ("output", "outputs: errors of weights times values, and of values"),
    ):
        yield verdict(f"bound on {claim}", f"{above[name]} of {count} queries above it", not above[name])
    # The key has no residual, and its logit is off by the factor gamma all the same.
    found, claim = f"{1 - gamma:.2f} of the logit is missed, 0 allowed", "bound on logits: the paper's, of a key inside the subspace"
    yield verdict(claim, found, gamma == 1)
    for name, bound, error in (("logits", *pairs[:2]), ("outputs", *pairs[2:])):
        alike = _rank_correlation(torch.cat(bound), torch.cat(error))
        yield verdict(f"bounds on {name} predict errors: rank correlation of at least 0.5", f"{alike:.2f}", alike >= 0.5)
    ratio = float((torch.stack(gamma_error).mean() / torch.stack(plain_error).mean()).sqrt())
    yield verdict("gamma = sqrt(r / d) makes logits better than gamma = 1", f"{ratio:.2f} times the error", ratio < 1)
    low, middle, high = torch.cat(best).quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    claim = "the best gamma is 1.05 to 1.20 times sqrt(r / d)"
    yield verdict(claim, f"{middle:.2f} times, half of the heads from {low:.2f} to {high:.2f}", 1.05 <= middle <= 1.2)


def sketch_claims(layers: list[Recorded]) -> Iterator[Row]:
    """Frequent Directions of 2 r rows, over rotated keys and values of all heads."""
    heads, far, paper, ours = 0, 0, 0, 0
    for layer in layers:
        for vectors in (layer.keys, layer.values):
            rank = vectors.shape[-1] // 4
            sketch = Sketch(2 * rank)
            state = sketch.start(vectors.shape[:2], vectors.shape[-1], vectors.device)
            for block in vectors.split(16, 2):
                state = sketch.update(state, block)
            gram, known = vectors.mT @ vectors, sketch.gram(state)
            error = torch.linalg.matrix_norm(gram - known, ord=2)
            tail, energy = torch.linalg.eigvalsh(gram)[..., :-rank].sum(-1), gram.diagonal(dim1=-2, dim2=-1).sum(-1)
            values, axes = torch.linalg.eigh(known)
            missed = residual_norm(vectors, axes[..., -rank:].mT)
            allowed = bounds.certificate(energy, known.diagonal(dim1=-2, dim2=-1).sum(-1), 2 * rank + 1)
            heads += missed.numel()
            far += _above(error, tail / rank + 1e-6 * energy)
            paper += _above(missed, bounds.paper_sketch_bound(gram, rank, 2 * rank))
            # The sketch is in float32.
            allowed = bounds.sketched_residual_bound(values[..., -rank - 1].clamp_min(0).sqrt(), allowed + 1e-6 * energy)
            ours += _above(missed, allowed)
    yield verdict("bound on a sketch: ||A'A - S'S|| <= ||A - A_r||_F^2 / (l - r)", f"{far} of {heads} heads above it", not far)
    yield verdict("bound on a sketch's basis: sqrt(eps) + 2 eps / gap, on this model", f"{paper} of {heads} heads above it", not paper)
    # The sketch of 101 rows knows all of it, and its basis of rank 1 misses the second direction.
    allowed = float(bounds.paper_sketch_bound(torch.diag(torch.tensor([100.0, 1.0, 0.0])), 1, 101))
    claim = "bound on a sketch's basis: the same, of the energies 100, 1, 0 and 101 rows"
    yield verdict(claim, f"1 is missed, {allowed:.2f} allowed", allowed >= 1)
    yield verdict("bound on a sketch's basis: sqrt(s_(r+1)^2 + ||A'A - S'S||)", f"{ours} of {heads} heads above it", not ours)


def trigger_claims(layers: list[Recorded]) -> Iterator[Row]:
    """Thresholds at the 95th percentile of a token's residual, of keys or values."""
    over = []
    for layer in layers:
        of_sides = []
        for vectors in (layer.keys, layer.values):
            lost = residual_rows(vectors, basis(vectors, vectors.shape[-1] // 4)) / torch.linalg.vector_norm(vectors, dim=-1)
            of_sides.append(lost > lost.quantile(0.95, dim=-1, keepdim=True))
        over.append((of_sides[0] | of_sides[1]).double().mean())
    length = 1 / float(torch.stack(over).mean())
    yield verdict("chunks that end where a token is above the 95th percentile have 128 tokens", f"{length:.0f} tokens", length >= 128)


@torch.no_grad()
def losses(model: Any, cache: Any, ids: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Divergences from the full cache, and by how much losses are above its own, of tokens behind a prompt of `first`, (rows, tokens)."""
    full, ids = DynamicCache(config=model.config), ids.to(model.device)
    read = lambda block, past: model(input_ids=block, past_key_values=past, use_cache=True).logits  # noqa: E731
    for past in (full, cache):
        read(ids[:, :first], past)
    divergences, changes = [], []
    for index in range(first, ids.shape[1] - 1):
        expected, found = (read(ids[:, index : index + 1], past)[:, 0] for past in (full, cache))
        divergences.append(measures.divergence(expected, found))
        changes.append(measures.losses(found, ids[:, index + 1]) - measures.losses(expected, ids[:, index + 1]))
    return torch.stack(divergences, 1), torch.stack(changes, 1)


def calibrated_bases(model: Any, texts: list[list[int]], rotation: str) -> Bases:
    """The main directions of each head: right singular vectors as rows, multiplied by their singular values."""
    bases, reading = {}, Reading(rotation=rotation, metric="plain", progress=False)
    for layer, sums in measure(model, None, texts, reading)[0].sums.items():
        moment, dim = LayerStatistics.of(sums, "plain").in_shape(sums.shape._replace(group=1)).moment, sums.shape.key_dim
        main = [descending(side) for side in (moment[:, :dim, :dim], moment[:, dim:, dim:])]
        keys, values = (energies.clamp_min(0.0).sqrt()[..., None] * directions for energies, directions in main)
        bases[layer] = keys, values
    return bases


def cache_claims(model: Any, calibration: list[list[int]], ids: torch.Tensor, dim: int) -> Iterator[Row]:
    """The falsifiers that take a cache."""
    bases = {rotation: calibrated_bases(model, calibration, rotation) for rotation in ("aware", "post")}
    make = lambda **options: SubspaceCache(model, adaptive=AdaptiveSubspace(**options), sinks=SINKS, recent=0)  # noqa: E731
    static: dict[str, Any] = {rotation: {"rotation": rotation, "bases": own, "chunk": None} for rotation, own in bases.items()}
    for name, options in (
        ("the paper's settings", {**static["post"], "gamma": "paper"}),
        ("keys before the rotation, gamma = 1", static["aware"]),
    ):
        changes = {}
        for quarter in (1, 2, 3):
            cache = make(rank=quarter * dim // 4, **options)
            changes[quarter] = 100 * math.expm1(float(losses(model, cache, ids[:, : ids.shape[1] // 2], SINKS)[1].mean()))
        found = ", ".join(f"r = {quarter / 4:g} d: {change:+.1f}%" for quarter, change in changes.items())
        claim = f"falsifier 1, {name}: d / 2 directions or fewer cost at most 1% of perplexity"
        yield verdict(claim, found, min(changes[1], changes[2]) <= 1)
    rank, warmup = (dim // 4, dim // 2), min(256, ids.shape[1] // 32 * 16)
    for rotation, where in (("aware", "before the rotation"), ("post", "rotated")):
        follows = make(rank=rank, rotation=rotation, warmup=warmup)
        kept, own = (losses(model, cache, ids, SINKS + warmup)[0] for cache in (make(rank=rank, **static[rotation]), follows))
        claim = f"falsifier 2, keys {where}: bases that follow lose no more than calibrated ones, at r = d / 4 and d / 2"
        yield verdict(claim, f"KL {own.mean():.3f}, calibrated {kept.mean():.3f}", bool(own.mean() <= kept.mean()))
        part = -(-own.shape[1] // 4)
        early, late = (float(side.mean()) for side in (own[:, :part], own[:, -part:]))
        claim = f"falsifier 3, keys {where}: bases that follow lose at most 1.5 times as much at a row's end as before"
        yield verdict(claim, f"KL {early:.3f}, at the end {late:.3f}", late <= 1.5 * early)


def verdict(claim: str, measured: str, holds: bool) -> Row:
    return {"claim": claim, "measured": measured, "verdict": "holds" if holds else "refuted"}


def _above(errors: torch.Tensor, bound: torch.Tensor) -> int:
    return int((errors > SLACK * bound + 1e-9).sum())


def _rank_correlation(left: torch.Tensor, right: torch.Tensor) -> float:
    ranks = torch.stack([each.argsort().argsort().double() for each in (left, right)])
    return float(torch.corrcoef(ranks)[0, 1])


def main() -> None:
    parser = arguments(__doc__, "device", "threads", "csv", "quick")
    parser.add_argument("--model", nargs="+", default=["base"], help="folders or hub ids; default: a model of this repository")
    parser.add_argument("--text", type=Path, default=TESTBED / "prose.txt", help="what is read, after what is calibrated on")
    for name, default in (("calibrate", 16384), ("rows", 4), ("tokens", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    check_counts(args, "rows tokens calibrate".split())
    if args.quick:
        vars(args).update(rows=1, tokens=128, calibrate=1024)
    device, rows = begin(args), []
    for name in args.model:
        model, tokenizer = load(name, device)
        text = torch.tensor(encode(tokenizer, args.text.read_text(encoding="utf-8")))
        ids = read_rows(text[args.calibrate :], args.rows, args.tokens)
        layers = record(model, ids)
        claims = [*energy_claims(layers), *bound_claims(layers), *sketch_claims(layers), *trigger_claims(layers)]
        claims += cache_claims(model, [text[: args.calibrate].tolist()], ids, layers[0].keys.shape[-1])
        rows += [{"model": Path(name).name, "text_rows": args.rows, "row_tokens": ids.shape[1], **claim} for claim in claims]
    print(show(rows, {"claim": "{model}: {claim}", "measured": "{measured}", "verdict": "{verdict}"}))
    if args.csv:
        write_csv(args.csv, rows, environment(device))


if __name__ == "__main__":
    run_script(main)
