"""Policies keep what they say, protect what they must, and choose as the published presses do."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip.policies import (
    BlockPolicy,
    ChunkPolicy,
    CompactorPolicy,
    CriticalPolicy,
    CURPolicy,
    ExpectedAttentionPolicy,
    H2OPolicy,
    KeyDiffPolicy,
    KeyNormPolicy,
    KVZipPolicy,
    LagKVPolicy,
    LeveragePolicy,
    PeriodicPolicy,
    Policy,
    RandomPolicy,
    SnapKVPolicy,
    StreamingPolicy,
    TOVAPolicy,
    policy_from_settings,
    resolve_policy,
)
from hf_kvcaches.equip.policies.base import WaitingPolicy
from hf_kvcaches.equip.tokens import Tokens, newest_from
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.translate.states import ReadingCache
from tests.testbed import FOLDER

NAMES = ("streaming", "h2o", "tova", "snapkv", "lagkv", "knorm", "random")
PUBLISHED_NAMES = (*NAMES, "keydiff", "cur", "expected_attention")
SMALL = (
    StreamingPolicy(),
    H2OPolicy(),
    H2OPolicy(average=True),
    TOVAPolicy(),
    SnapKVPolicy(window=3, kernel_size=3),
    LagKVPolicy(lag_size=3),
    KeyNormPolicy(),
    RandomPolicy(seed=3),
    KeyDiffPolicy(interval=3),
    LeveragePolicy(interval=4),
    CURPolicy(window=3, interval=3),
    CompactorPolicy(chunk=4, interval=3),
    ExpectedAttentionPolicy(interval=3),
    KVZipPolicy(),
    ChunkPolicy(KeyDiffPolicy(interval=3), size=4, interval=3),
    BlockPolicy(CURPolicy(window=3, interval=3), size=4, interval=3),
    CriticalPolicy(H2OPolicy(), interval=3),
)
each_policy = pytest.mark.parametrize("policy", SMALL, ids=repr)


def tokens_of(seed: int, slots: int, *, padding: tuple[int, ...] = (0, 0), heads: int = 2, sinks: int = 2, **changes) -> Tokens:
    """A first block with random contents, left-padded by `padding` tokens in each row."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    rows, first = len(padding), torch.tensor(padding)
    positions = torch.arange(slots, dtype=torch.int32).expand(rows, heads, slots)
    positions = torch.where(positions < first[:, None, None], -1, positions)
    made = Tokens(
        keys=draw(rows, heads, slots, 6),
        values=draw(rows, heads, slots, 4),
        positions=positions,
        attention=draw(rows, heads, slots).abs() * (positions >= 0),
        seen=slots,
        sinks=sinks,
        first=first,
        queries=draw(rows, 2 * heads, slots, 6),
        scaling=0.5,
    )
    return replace(made, **changes)


def shuffled(tokens: Tokens, seed: int) -> tuple[Tokens, torch.Tensor]:
    """The same tokens in other slots, and where each slot's token was."""
    order = torch.rand(tokens.keys.shape[:3], generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return tokens.pick(order), order


# What stays, and what goes.


@dataclass
class Case:
    scores: torch.Tensor
    positions: torch.Tensor
    first: torch.Tensor
    sinks: int
    recent: int
    budget: int
    seen: int

    @property
    def sinks_end(self) -> torch.Tensor:
        return self.first[:, None, None] + self.sinks


@st.composite
def cases(draw) -> Case:
    slots = draw(st.integers(2, 24))
    padding = draw(st.lists(st.integers(0, slots - 1), min_size=1, max_size=3))
    sinks, recent = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    budget = draw(st.integers(sinks + max(recent, 1), sinks + max(recent, 1) + 10))
    torch.manual_seed(draw(st.integers(0, 10**6)))
    first = torch.tensor(padding)
    positions = torch.arange(slots, dtype=torch.int32).expand(len(padding), 2, slots)
    positions = torch.where(positions < first[:, None, None], -1, positions)
    # Few different values make ties; the last ones are what a policy may say by mistake or on purpose.
    values = torch.tensor([0.0, 0.25, 0.5, -1.0, 1e-30, torch.inf, -torch.inf, torch.nan])
    scores = values[torch.randint(0, draw(st.integers(1, len(values))), positions.shape)]
    return Case(scores, positions, first, sinks, recent, budget, slots)


@given(cases())
def test_a_block_keeps_what_is_protected_and_the_highest_scores(case):
    kept = StreamingPolicy().keep(case.scores, case.positions, case.budget, sinks_end=case.sinks_end, recent=case.recent)
    for b in range(case.scores.shape[0]):
        for h in range(2):
            slots, positions = kept[b, h].tolist(), case.positions[b, h].tolist()
            assert slots == sorted(set(slots))
            assert len(slots) == min(case.budget, len(positions))
            # NaN is worth nothing; an empty slot even less.
            worth = case.scores[b, h].nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).tolist()
            newest = sorted(p for p in positions if p >= 0)[-case.recent :] if case.recent else []
            protected = [0 <= p < case.first[b] + case.sinks or p in newest for p in positions]
            # Which of equal scores stays is left to topk, as in kvpress.
            value = [(protected[s], worth[s]) if positions[s] >= 0 else (-1, 0) for s in range(len(positions))]
            assert sorted(value[s] for s in slots) == sorted(value)[-case.budget :]


@given(cases(), st.booleans())
def test_a_step_overwrites_an_empty_slot_or_the_lowest_score_that_is_not_protected_of_equals_the_oldest(case, shared):
    policy = KeyNormPolicy()
    scores = case.scores.nan_to_num(nan=0.0)
    positions = case.positions
    if shared:  # one choice for all heads
        scores, positions = scores[:, :1], positions[:, :1]
    kept = policy.keep(scores, positions, case.budget, sinks_end=case.sinks_end, recent=case.recent)
    scores, positions = scores.gather(-1, kept), positions.gather(-1, kept)
    order = torch.rand(positions.shape).argsort(-1)
    scores, positions = scores.gather(-1, order), positions.gather(-1, order)
    start = case.seen - max(case.recent - 1, 0)
    chosen = policy.victim(scores, positions, sinks_end=case.sinks_end, recent_start=start)
    assert chosen.shape == (*positions.shape[:2], 1)
    for b in range(positions.shape[0]):
        for h in range(positions.shape[1]):
            row, worth = positions[b, h].tolist(), scores[b, h].tolist()
            if -1 in row:
                assert chosen[b, h].item() == row.index(-1)
            elif len(row) == case.budget:
                free = [s for s, p in enumerate(row) if case.first[b] + case.sinks <= p < start]
                assert chosen[b, h].item() == min(free, key=lambda s: (worth[s], row[s]))


def test_a_score_that_is_not_a_number_lets_the_oldest_go_and_no_sink():
    positions = torch.tensor([[[5, 0, 3, 4, 2, 1]]], dtype=torch.int32)
    scores = torch.full((1, 1, 6), torch.nan)
    assert StreamingPolicy().victim(scores, positions, sinks_end=2, recent_start=5).item() == 4


def test_where_more_than_the_budget_is_infinitely_worth_the_oldest_go():
    positions = torch.arange(10)[None, None]
    scores = torch.full((1, 1, 10), torch.inf)
    scores[..., 3] = 0.5
    assert StreamingPolicy().keep(scores, positions, 5, sinks_end=1, recent=1).tolist() == [[[0, 6, 7, 8, 9]]]
    assert StreamingPolicy().keep(scores, positions, 9, sinks_end=1, recent=1).tolist() == [[[0, 1, 2, 4, 5, 6, 7, 8, 9]]]


def test_the_newest_tokens_are_counted_and_not_measured_so_padding_in_between_does_no_harm():
    positions = torch.tensor([[[0, 1, 2, -1, -1, 5, 6]], [[-1, -1, -1, -1, -1, -1, 6]]])
    assert newest_from(positions, 3).flatten().tolist() == [2, 0]
    assert newest_from(positions, 0).flatten().tolist() == [7, 7]
    assert newest_from(positions, 99).flatten().tolist() == [0, 0]


# Every policy.


@each_policy
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 20), data=st.data())
def test_other_slots_do_not_change_what_a_token_is_worth(policy, seed, slots, data):
    padding = tuple(data.draw(st.lists(st.integers(0, slots - 1), min_size=2, max_size=2)))
    tokens = tokens_of(seed, slots, padding=padding)
    moved, order = shuffled(tokens, seed)
    real = moved.positions >= 0
    scores = policy.checked_score(tokens)
    expected = scores.gather(-1, order[:, : scores.shape[1]]) if scores.shape[1] == 2 else scores.expand(-1, 2, -1).gather(-1, order)
    if scores.shape[1] == 1:  # one choice for all heads: they hold the same tokens
        same = order[:, :1].expand_as(order)
        moved, real = tokens.pick(same), tokens.pick(same).positions >= 0
        expected = scores.gather(-1, order[:, :1])
        real = real[:, :1]
    torch.testing.assert_close(policy.checked_score(moved)[real], expected[real])


@each_policy
@pytest.mark.parametrize("slots", [2, 5, 12])
def test_slots_in_reversed_order_are_worth_the_same(policy, slots):
    tokens = tokens_of(3, slots)
    reverse = torch.arange(slots - 1, -1, -1).expand(*tokens.keys.shape[:3])
    scores = policy.checked_score(tokens)
    torch.testing.assert_close(policy.checked_score(tokens.pick(reverse)).flip(-1), scores)


# RandomPolicy draws row by row over the whole block, padding and all, as its press does.
@pytest.mark.parametrize("policy", [p for p in SMALL if not isinstance(p, RandomPolicy)], ids=repr)
@pytest.mark.parametrize("slots", [4, 11, 30])
def test_padding_on_the_left_does_not_change_what_a_row_keeps(policy, slots):
    alone = tokens_of(5, slots, padding=(0,))
    pad = lambda x, value=0: functional.pad(x, (0, 0, 7, 0) if x.ndim == 4 else (7, 0), value=value)  # noqa: E731
    padded = Tokens(
        keys=pad(alone.keys),
        values=pad(alone.values),
        positions=pad(torch.where(alone.positions < 0, -1, alone.positions + 7), -1),
        attention=pad(alone.attention),
        seen=slots + 7,
        sinks=2,
        first=torch.tensor([7]),
        queries=pad(alone.queries, 9.0),
        scaling=alone.scaling,
    )
    for budget in (4, 9, 40):
        expected = policy.keep(policy.score(alone), alone.positions, budget, sinks_end=2, recent=1)
        found = policy.keep(policy.score(padded), padded.positions, budget, sinks_end=9, recent=1)
        found = [
            [sorted(p for p in head if p >= 0) for head in row] for row in padded.positions.gather(-1, found.expand(1, 2, -1)).tolist()
        ]
        assert found == (alone.positions.gather(-1, expected.expand(1, 2, -1)) + 7).tolist()


@each_policy
def test_bfloat16_keys_are_scored_in_float32(policy):
    tokens = tokens_of(1, 12)
    tokens = replace(tokens, keys=tokens.keys.bfloat16(), values=tokens.values.bfloat16())
    assert policy.score(tokens).dtype == torch.float32


@each_policy
def test_a_policy_is_its_settings(policy):
    stored = json.loads(json.dumps(policy.settings()))
    assert policy_from_settings(stored) == policy == copy.deepcopy(policy)
    assert policy_from_settings(stored).observes == policy.observes


@pytest.mark.parametrize("policy", [p for p in SMALL if p.observes != 0], ids=repr)
def test_without_attention_a_policy_that_needs_it_says_how_to_get_it(policy):
    with pytest.raises(UnsupportedError, match="observes"):
        policy.score(tokens_of(0, 5, attention=None))


# Steps.


def stepped(policy: Policy, tokens: Tokens, budget: int, steps: int, seed: int) -> tuple[torch.Tensor, Tokens]:
    """Prunes to the budget, then decodes that many tokens with random contents; a plain way to do what a layer does."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    first = tokens.first[:, None, None]
    scores = policy.checked_score(tokens)
    kept = policy.keep(scores, tokens.positions, budget, sinks_end=first + tokens.sinks, recent=1)
    heads = tokens.keys.shape[1]
    scores, tokens = scores.gather(-1, kept[:, : scores.shape[1]]).clone(), tokens.pick(kept.expand(-1, heads, -1))
    received = tokens.attention if policy.observes is None else torch.zeros_like(tokens.attention)
    for step in range(1, steps + 1):
        shared = tokens.positions[:, : scores.shape[1]]
        slot = policy.victim(scores, shared, sinks_end=first + tokens.sinks, recent_start=tokens.seen + 1)
        wide = slot.expand(-1, heads, -1)
        keys = tokens.keys.scatter(2, wide[..., None].expand(-1, -1, -1, 6), draw(*wide.shape[:2], 1, 6))
        values = tokens.values.scatter(2, wide[..., None].expand(-1, -1, -1, 4), draw(*wide.shape[:2], 1, 4))
        positions = tokens.positions.scatter(-1, wide, tokens.seen)
        attention = draw(*positions.shape).abs() * (positions >= 0)
        received = received.scatter(-1, wide, 0) + attention
        complete = not policy.observes or step % policy.observes == 0
        tokens = replace(tokens, keys=keys, values=values, positions=positions, attention=received, seen=tokens.seen + 1)
        due = not isinstance(policy, WaitingPolicy) or policy.due(tokens.seen - tokens.row_start, tokens.sinks, complete)
        last = torch.cat([tokens.queries, draw(*tokens.queries.shape[:2], 1, 6)], 2)[:, :, -policy.queries :] if policy.queries else None
        tokens = replace(tokens, queries=last, due=due)
        scores = policy.rescore(scores, tokens, slot)
        if complete and policy.observes is not None:
            received = torch.zeros_like(received)
    return scores, tokens


@pytest.mark.parametrize("policy", [p for p in SMALL if not isinstance(p, LagKVPolicy | RandomPolicy | KVZipPolicy)], ids=repr)
@pytest.mark.parametrize("steps", [3, 12])
def test_after_a_step_scores_are_those_from_scratch(policy, steps):
    if isinstance(policy, PeriodicPolicy):
        policy = replace(policy, interval=1)
    scores, tokens = stepped(policy, tokens_of(2, 14, padding=(0, 9)), 8, steps, seed=7)
    assert torch.as_tensor(tokens.due).all()
    real = (tokens.positions >= 0)[:, : scores.shape[1]]
    torch.testing.assert_close(scores[real], policy.score(tokens)[real])


@pytest.mark.parametrize("policy", [p for p in SMALL if isinstance(p, PeriodicPolicy)], ids=repr)
def test_between_two_scorings_a_periodic_policy_keeps_every_new_token(policy):
    policy = replace(policy, interval=5)
    at_five, _ = stepped(policy, tokens_of(2, 20), 14, 5, seed=7)
    at_seven, tokens = stepped(policy, tokens_of(2, 20), 14, 7, seed=7)
    new = tokens.positions >= 25
    assert new.sum() == 2 * 4
    assert at_seven[new].isposinf().all()
    assert torch.equal(at_seven[~new], at_five[~new])


def test_between_two_observations_snapkv_keeps_what_the_last_one_said_and_every_new_token():
    policy = SnapKVPolicy(window=5, kernel_size=1)
    at_five, _ = stepped(policy, tokens_of(2, 20), 14, 5, seed=7)
    at_seven, tokens = stepped(policy, tokens_of(2, 20), 14, 7, seed=7)
    new = tokens.positions >= 25
    assert new.sum() == 2 * 4
    assert at_seven[new].isposinf().all()
    assert torch.equal(at_seven[~new], at_five[~new])


def test_snapkv_pools_over_neighbours_in_the_text_wherever_they_lie():
    tokens = replace(tokens_of(0, 6), positions=torch.tensor([4, 0, 9, 2, 30, 31]).expand(2, 2, 6), seen=32)
    tokens = replace(tokens, attention=torch.tensor([8.0, 1, 16, 4, 99, 99]).expand(2, 2, 6))
    # In the text the four before the window got 1, 4, 8 and 16.
    expected = torch.tensor([28 / 3, 5 / 3, 24 / 3, 13 / 3, torch.inf, torch.inf]).expand(2, 2, 6)
    torch.testing.assert_close(SnapKVPolicy(window=2, kernel_size=3).score(tokens), expected)


def lag_ranks_slowly(tokens: Tokens, size: int, before: dict[tuple[int, int, int], float]) -> dict[tuple[int, int, int], float]:
    """Ranks within lags by (row, head, position), one lag at a time; what is known already stays."""
    known = {}
    for b in range(tokens.keys.shape[0]):
        for h in range(tokens.keys.shape[1]):
            slot = {p: s for s, p in enumerate(tokens.positions[b, h].tolist()) if p >= 0}
            known |= {(b, h, p): before[b, h, p] for p in slot if (b, h, p) in before}
            start = int(tokens.first[b]) + tokens.sinks
            for begin in range(start, tokens.seen, size):
                lag, following = range(begin, begin + size), range(begin + size, begin + 2 * size)
                if not all(p in slot for p in (*lag, *following)) or (b, h, begin) in known:
                    continue
                worth = torch.zeros(size)
                for states in (tokens.keys, tokens.values):
                    this, reference = (states[b, h, [slot[p] for p in lag_]] for lag_ in (lag, following))
                    low, high = reference.min(0).values, reference.max(0).values
                    worth += ((this - low) / (high - low)).std(-1).softmax(-1)
                known |= {(b, h, p): sum(bool(other < worth[i]) for other in worth) / size for i, p in enumerate(lag)}
    return known


@pytest.mark.parametrize("budget", [10, 13, 16, 40])
def test_lagkv_scores_a_lag_once_when_the_next_one_is_complete(budget):
    policy = LagKVPolicy(lag_size=4)
    start = tokens_of(3, 21, padding=(0, 5))
    known = lag_ranks_slowly(start, 4, {})
    for steps in range(25):
        # Deterministic, so each run repeats the one before and adds a step.
        scores, tokens = stepped(policy, start, budget, steps, seed=11)
        if steps:
            known = lag_ranks_slowly(tokens, 4, known)
        for b, h, s in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(tokens.keys.shape[2])).tolist():
            position = int(tokens.positions[b, h, s])
            if position >= 0:
                assert scores[b, h, s].item() == pytest.approx(known.get((b, h, position), float("inf")))


def test_lagkv_in_a_later_block_leaves_what_it_said_and_scores_the_rest():
    policy = LagKVPolicy(lag_size=4)
    whole = tokens_of(4, 26)
    early = whole.pick(torch.arange(14).expand(2, 2, 14))
    early = replace(early, seen=14)
    said = policy.score(early)
    before = torch.cat([said, torch.full((2, 2, 12), torch.nan)], -1)
    found = policy.score(replace(whole, scores=before))
    assert torch.equal(found, policy.score(whole))
    marked = torch.where(said.isfinite(), 0.125, said)
    found = policy.score(replace(whole, scores=torch.cat([marked, before[..., 14:]], -1)))
    assert (found[..., 2:10] == 0.125).all()
    assert torch.equal(found[..., 10:], policy.score(whole)[..., 10:])


def test_lagkv_ignores_a_channel_that_is_constant_in_the_next_lag():
    tokens = tokens_of(6, 14)
    values = tokens.values.clone()
    values[..., 0] = 3.0
    # It counts as 0 in each token, where the quotient would be infinite or no number.
    expected = torch.zeros(2, 2, 2, 4)
    for lag in range(2):
        for states in (tokens.keys, values):
            this, following = (states[:, :, 2 + 4 * n : 6 + 4 * n] for n in (lag, lag + 1))
            low, high = following.amin(2, keepdim=True), following.amax(2, keepdim=True)
            expected[:, :, lag] += torch.nan_to_num((this - low) / (high - low), nan=0.0).std(-1).softmax(-1)
    found = LagKVPolicy(lag_size=4).score(replace(tokens, values=values))
    assert torch.equal(found[..., 2:10].unflatten(-1, (2, 4)), expected.argsort(-1).argsort(-1) / 4)


def test_random_lots_are_even_differ_between_heads_and_seeds_and_come_back_alike():
    tokens = tokens_of(0, 4000, padding=(0, 0), seen=100_000)
    lots = RandomPolicy(seed=1).score(tokens)
    assert torch.equal(lots, RandomPolicy(seed=1).score(tokens))
    assert (lots >= 0).all()
    assert (lots < 1).all()
    share = torch.histc(lots, 10, 0, 1) / lots.numel()
    assert share.sub(0.1).abs().max() < 0.01
    assert torch.equal(lots[0], lots[1]), "a row has the lots it would have alone"
    streams = torch.cat([lots[0], RandomPolicy(seed=2).score(tokens)[0], lots[:1, 0].roll(1)])
    assert torch.corrcoef(streams).fill_diagonal_(0).abs().max() < 0.08


def test_a_random_lot_is_drawn_when_the_token_comes_and_stays():
    policy = RandomPolicy(seed=5)
    scores, tokens = stepped(policy, tokens_of(1, 12), 8, 0, seed=0)
    first = {
        (b, h, p): s
        for b in range(2)
        for h in range(2)
        for p, s in zip(tokens.positions[b, h].tolist(), scores[b, h].tolist(), strict=True)
    }
    later, tokens = stepped(policy, tokens_of(1, 12), 8, 9, seed=0)
    block = policy.score(replace(tokens, scores=torch.where(tokens.positions < 20, later, torch.nan)))
    assert torch.equal(block, later)
    for (b, h, p), lot in first.items():
        if p in (held := tokens.positions[b, h].tolist()):
            assert later[b, h, held.index(p)].item() == lot


# Names, parameters, policies of one's own.


def test_names_stand_for_policies_with_the_usual_parameters():
    found = [resolve_policy(name) for name in NAMES]
    assert [policy.name for policy in found] == list(NAMES)
    assert [policy.observes for policy in found] == [0, None, 1, 64, 0, 0, 0]
    assert [policy.recent(512, 4) for policy in found] == [508, 256, 1, 64, 254, 1, 1]
    assert [policy.order_only for policy in found] == [True] + [False] * 6
    assert resolve_policy(policy := SnapKVPolicy(window=8)) is policy


def test_an_unknown_policy_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match=r"one of 'block', .*'h2o', .*'streaming', 'tova'"):
        resolve_policy("lru")
    with pytest.raises(ConfigError, match="not its class"):
        resolve_policy(H2OPolicy)
    with pytest.raises(UnsupportedError, match="'Mine'"):
        policy_from_settings({"policy": "Mine"})


def test_a_subclass_of_a_built_in_policy_does_not_pass_for_it():
    class Mine(KeyNormPolicy):
        pass

    assert KeyNormPolicy().settings() == {"policy": "knorm"}
    assert Mine().settings()["policy"].endswith("Mine")


@pytest.mark.parametrize(
    "make",
    [
        lambda: SnapKVPolicy(window=0),
        lambda: SnapKVPolicy(window=True),
        lambda: SnapKVPolicy(kernel_size=4),
        lambda: LagKVPolicy(lag_size=1),
        lambda: RandomPolicy(seed=-1),
        lambda: RandomPolicy(seed=None),
    ],
)
def test_parameters_that_can_not_work_are_refused(make):
    with pytest.raises(ConfigError, match=r"window|kernel_size|lag_size|seed"):
        make()


class SmallValues(Policy):
    def score(self, tokens: Tokens) -> torch.Tensor:
        return -tokens.values.norm(dim=-1)


class WrongShape(Policy):
    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.values.norm(dim=-1).mean(0)


def test_a_policy_of_ones_own_is_one_method():
    policy, tokens = resolve_policy(SmallValues()), tokens_of(0, 9)
    tokens.values.requires_grad_()
    scores, after = stepped(policy, tokens, 6, 4, seed=1)
    assert not scores.requires_grad
    torch.testing.assert_close(scores, -after.values.norm(dim=-1).detach())
    assert policy.settings()["policy"].endswith("SmallValues")
    assert (policy.observes, policy.recent(512, 4)) == (0, 1)


def test_scores_of_a_wrong_shape_are_refused_by_the_name_of_the_policy():
    with pytest.raises(ConfigError, match=r"WrongShape.score: expected scores of the shape \(2, 2, 9\)"):
        WrongShape().checked_score(tokens_of(0, 9))


# The published presses.

PUBLISHED = json.loads((Path(__file__).parent / "kvpress_kept.json").read_text())


def listed(spans: str) -> list[int]:
    """`0-3 7` as 0, 1, 2, 3, 7."""
    ends = [[int(end) for end in span.split("-")] for span in spans.split()]
    return [position for span in ends for position in range(span[0], span[-1] + 1)]


@pytest.fixture(scope="module")
def prompt():
    """Keys, values, attention probabilities and queries of each layer for the published prompt."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "base", attn_implementation="eager").eval()
    ids, queries = torch.tensor([PUBLISHED["ids"]]), []
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        output = model(ids, past_key_values=cache, output_attentions=True)
        model(ids, past_key_values=ReadingCache(model, lambda attended: queries.append(attended.query)))
    layers = zip(cache.layers, output.attentions, queries, strict=True)
    return model.config, [(layer.keys, layer.values, probabilities, query) for layer, probabilities, query in layers]


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_a_prompt_is_pruned_to_the_same_tokens_as_by_the_press_of_that_name(prompt, name):
    config, tensors = prompt
    parameters = dict(PUBLISHED["settings"].get(name, {}))
    sinks = parameters.pop("sinks", 0)
    policy = policy_from_settings({"policy": name, **parameters})
    assert len(PUBLISHED["kept"][name]) == 2
    for budget, layers in PUBLISHED["kept"][name].items():
        assert sum(heads is not None for heads in layers) >= 3
        for index, ((keys, values, probabilities, queries), expected) in enumerate(zip(tensors, layers, strict=True)):
            if expected is None:  # a choice between equals
                continue
            count = keys.shape[2]
            watched = probabilities if policy.observes is None else probabilities[:, :, count - policy.observes :]
            attention = watched.sum(2).unflatten(1, (keys.shape[1], -1)).mean(2)
            positions = torch.arange(count, dtype=torch.int32)[None, None]
            geometry = RotaryGeometry.from_config(config, layer_idx=index)
            shown = {"queries": queries, "scaling": keys.shape[3] ** -0.5, "geometry": geometry}
            tokens = Tokens(keys, values, positions, attention, seen=count, sinks=sinks, **shown)
            kept = policy.keep(policy.checked_score(tokens), positions, int(budget), sinks_end=sinks, recent=0)
            assert kept.expand(1, keys.shape[1], -1)[0].tolist() == [listed(head) for head in expected]
