"""Policies score as they say, alone as in a padded batch, and choose as the published presses do."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip.policies import (
    CompactorPolicy,
    ExpectedAttentionPolicy,
    FuturePolicy,
    H2OPolicy,
    KeyDiffPolicy,
    KVZipPolicy,
    Policy,
    PressPolicy,
    SnapKVPolicy,
    StreamingPolicy,
    TOVAPolicy,
    policy_from_settings,
    resolve_policy,
)
from hf_kvcaches.equip.policies.future import future_attention
from hf_kvcaches.equip.policies.tokens import UNSCORED, Tokens, unscored
from hf_kvcaches.equip.refit import context_queries
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests import tiny

SMALL = (
    StreamingPolicy(),
    H2OPolicy(),
    TOVAPolicy(),
    SnapKVPolicy(window=3, kernel_size=3),
    KeyDiffPolicy(),
    CompactorPolicy(chunk=4),
    ExpectedAttentionPolicy(),
    KVZipPolicy(),
    FuturePolicy(ahead=2, chunk=4),
    FuturePolicy(),
)
GEOMETRY = RotaryGeometry.from_config(tiny.llama().config, layer_idx=0)
each_policy = pytest.mark.parametrize("policy", SMALL, ids=repr)


def tokens_of(seed: int, slots: int, *, padding: tuple[int, ...] = (0, 0), heads: int = 2, sinks: int = 2, **changes) -> Tokens:
    """A first block with random contents, left-padded by `padding` tokens in each row."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    rows = len(padding)
    positions = (torch.arange(slots) - torch.tensor(padding)[:, None]).clamp(min=-1)
    tokens = Tokens(
        keys=draw(rows, heads, slots, 8),
        values=draw(rows, heads, slots, 4),
        positions=positions[:, None].expand(rows, heads, slots),
        count=slots - torch.tensor(padding)[:, None, None],
        sinks=sinks,
        attention=draw(rows, heads, slots).abs() * (positions >= 0)[:, None],
        queries=draw(rows, 2 * heads, slots, 8),
        query_index=positions,
        scaling=0.5,
        geometry=GEOMETRY,
    )
    return replace(tokens, **changes)


def pick(tokens: Tokens, slots: torch.Tensor) -> Tokens:
    """The tokens in other slots, (tokens,), with the same queries."""
    names = ("keys", "values", "positions", "attention", "scores")
    return replace(tokens, **{name: part[:, :, slots] for name in names if (part := getattr(tokens, name)) is not None})


def expanded(policy: Policy, tokens: Tokens) -> torch.Tensor:
    return policy.checked_score(tokens).expand(tokens.keys.shape[:3])


# Every policy.


@pytest.mark.parametrize("policy", [p for p in SMALL if not isinstance(p, CompactorPolicy)], ids=repr)
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 20), data=st.data())
def test_other_slots_do_not_change_what_a_token_is_worth(policy, seed, slots, data):
    padding = tuple(data.draw(st.lists(st.integers(0, slots - 1), min_size=2, max_size=2)))
    tokens = tokens_of(seed, slots, padding=padding)
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))
    scores, moved = expanded(policy, tokens)[:, :, order], pick(tokens, order)
    torch.testing.assert_close(expanded(policy, moved)[moved.real], scores[moved.real], atol=1e-5, rtol=1e-4)


@each_policy
@pytest.mark.parametrize("slots", [3, 4, 11, 30])
def test_a_padded_row_is_worth_what_it_is_alone(policy, slots):
    alone = tokens_of(5, slots, padding=(0,))
    both = tokens_of(6, slots + 7)
    row = lambda whole, part, value: torch.cat([whole[:1], functional.pad(part, value)], 0)  # noqa: E731
    padded = Tokens(
        keys=row(both.keys, alone.keys, (0, 0, 7, 0)),
        values=row(both.values, alone.values, (0, 0, 7, 0)),
        positions=torch.cat([both.positions[:1], functional.pad(alone.positions, (7, 0), value=-1)]),
        count=torch.tensor([slots + 7, slots])[:, None, None],
        sinks=2,
        attention=row(both.attention, alone.attention, (7, 0)),
        queries=row(both.queries, functional.pad(alone.queries, (0, 0, 7, 0), value=9.0), (0, 0)),
        query_index=torch.cat([both.query_index[:1], functional.pad(alone.query_index, (7, 0), value=-1)]),
        scaling=0.5,
        geometry=GEOMETRY,
    )
    scores = expanded(policy, padded)
    torch.testing.assert_close(scores[1:, :, 7:], expanded(policy, alone), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(scores[:1], expanded(policy, pick_rows(both, 1)), atol=1e-5, rtol=1e-4)


def pick_rows(tokens: Tokens, rows: int) -> Tokens:
    names = ("keys", "values", "positions", "count", "attention", "queries", "query_index")
    return replace(tokens, **{name: getattr(tokens, name)[:rows] for name in names})


@each_policy
def test_bfloat16_keys_are_scored_in_float32_without_gradients(policy):
    tokens = tokens_of(1, 12)
    half = {name: getattr(tokens, name).bfloat16().requires_grad_() for name in ("keys", "values", "queries")}
    scores = policy.checked_score(replace(tokens, **half))
    assert scores.dtype == torch.float32
    assert not scores.requires_grad
    assert scores.isfinite().all()


@each_policy
def test_a_policy_is_its_settings(policy):
    stored = json.loads(json.dumps(policy.settings()))
    assert policy_from_settings(stored) == policy == copy.deepcopy(policy)
    assert policy_from_settings(stored).observes == policy.observes


@pytest.mark.parametrize(("policy", "hint"), [(H2OPolicy(), "observes"), (TOVAPolicy(), "observes"), (FuturePolicy(), "reads_queries")])
def test_without_what_it_reads_a_policy_says_how_to_get_it(policy, hint):
    with pytest.raises(UnsupportedError, match=hint):
        policy.score(tokens_of(0, 5, attention=None, queries=None))


def test_scores_are_finite_and_infinity_says_that_there_is_none_yet():
    class Wild(Policy):
        def score(self, tokens: Tokens) -> torch.Tensor:
            return torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38, 0.0]).expand(2, 1, 5)

    low, most, least, large, zero = Wild().checked_score(tokens_of(0, 5))[0, 0].tolist()
    assert low == least < zero < large < UNSCORED < most < torch.inf


# One by one.


def test_streaming_scores_by_age_and_protects_all_but_the_sinks():
    tokens = tokens_of(0, 9, padding=(0, 4))
    assert StreamingPolicy().score(tokens)[tokens.real].unique().tolist() == list(range(-9, 0))
    far = replace(tokens, positions=tokens.positions + 2**25, count=tokens.count + 2**25)
    assert torch.equal(StreamingPolicy().score(far), StreamingPolicy().score(tokens))
    assert (StreamingPolicy().order_only, StreamingPolicy().recent(512, 4)) == (True, 508)


def test_snapkv_pools_over_neighbours_in_the_text_wherever_they_lie():
    positions = torch.tensor([4, 0, 9, 2, 30, 31]).expand(2, 2, 6)
    tokens = tokens_of(0, 6, positions=positions, attention=torch.tensor([8.0, 1, 16, 4, 99, 99]).expand(2, 2, 6))
    # In the text the four before the window got 1, 4, 8 and 16.
    expected = torch.tensor([28 / 3, 5 / 3, 24 / 3, 13 / 3, torch.inf, torch.inf]).expand(2, 2, 6)
    torch.testing.assert_close(SnapKVPolicy(window=2, kernel_size=3).score(tokens), expected)


def test_kvzip_takes_the_second_reading_and_until_then_keeps_what_it_said_and_all_later_tokens():
    tokens = tokens_of(0, 6)
    assert torch.equal(KVZipPolicy().score(tokens), tokens.attention)
    before = torch.tensor([0.5, 0.1, 0.9, -torch.inf, -torch.inf, 0.2]).expand(2, 2, 6)
    scores = KVZipPolicy().checked_score(replace(tokens, attention=None, scores=before))
    assert torch.equal(scores[..., [0, 1, 2, 5]], before[..., [0, 1, 2, 5]])
    assert (scores[..., 4] > scores[..., 3]).all()
    assert (scores[..., 3] >= UNSCORED).all()
    first = KVZipPolicy().checked_score(replace(tokens, attention=None))
    assert (first.diff(dim=-1) > 0).all()


def future_slowly(tokens: Tokens, policy: FuturePolicy, few: bool) -> torch.Tensor:
    """What the queries of a chunk, one at a time, give to its tokens beside a sample of others; with `few` all queries to each chunk."""
    best = torch.full(tokens.keys.shape[:3], torch.inf)
    for b in range(best.shape[0]):
        asked = [q for q, index in enumerate(tokens.query_index[b].tolist()) if index >= 0]
        end = int(tokens.positions[b].max()) + 1
        for h in range(best.shape[1]):
            slots = [s for s in tokens.positions[b, h].argsort().tolist() if tokens.positions[b, h, s] >= 0]
            every, rest, slots = slots, len(slots) - tokens.sinks, slots if few else slots[len(slots) - len(asked) :]
            sample = [*range(tokens.sinks), *(tokens.sinks + number * rest // 128 for number in range(128))]
            stands_for = torch.tensor([1.0] * tokens.sinks + [rest / 128] * 128)
            best[b, h, slots] = -1.0
            for start in range(0, len(slots), policy.chunk):
                start = max(0, min(start, len(slots) - policy.chunk))
                part = slots[start : start + policy.chunk]
                outside = [number for number, place in enumerate(sample) if every[place] not in part]
                keys = tokens.keys[b, h, part + [every[sample[number]] for number in outside]]
                share = torch.cat([torch.ones(len(part)), stands_for[outside]])
                for q in asked if few else asked[start : start + policy.chunk]:
                    query = tokens.geometry.unrotate(tokens.queries[b : b + 1, 2 * h : 2 * h + 2, q : q + 1], int(tokens.query_index[b, q]))
                    query = tokens.geometry.rotate(query, end + policy.ahead)[0, :, 0]
                    weights = (query @ keys.T * tokens.scaling).exp() * share
                    weights = (weights / weights.sum(-1, keepdim=True))[:, : len(part)].amax(0)
                    best[b, h, part] = torch.maximum(best[b, h, part], weights)
    return best


@pytest.mark.parametrize("policy", [FuturePolicy(ahead=3, chunk=4), FuturePolicy()], ids=repr)
@pytest.mark.parametrize("case", ["block", "later block", "few"])
def test_future_attention_is_the_most_that_queries_of_a_chunk_give_from_behind_the_end(policy, case, monkeypatch):
    tokens = pick(tokens_of(3, 13, padding=(0, 5)), torch.randperm(13))
    if case != "block":  # the newest five tokens alone have queries
        tokens = replace(tokens, queries=tokens.queries[:, :, -5:], query_index=tokens.query_index[:, -5:])
    if case == "later block":
        tokens = replace(tokens, scores=torch.full(tokens.keys.shape[:3], -torch.inf))
    expected = future_slowly(tokens, policy, case == "few")
    for most in (1 << 20, 100):
        monkeypatch.setattr("hf_kvcaches.equip.policies.future.piece", lambda keys, most=most: most)
        torch.testing.assert_close(policy.score(tokens)[tokens.real], expected[tokens.real])


def test_future_queries_count_positions_from_the_index_that_keys_are_rotated_to():
    tokens = tokens_of(4, 12)
    index = tokens.positions + 100
    moved = replace(tokens, keys=GEOMETRY.shift(tokens.keys, 100), queries=GEOMETRY.shift(tokens.queries, 100), index=index)
    moved = replace(moved, query_index=tokens.query_index + 100)
    policy = FuturePolicy(chunk=5)
    torch.testing.assert_close(policy.score(moved), policy.score(tokens), atol=1e-5, rtol=1e-4)


def test_queries_of_a_refit_take_turns_over_the_positions_behind_the_end():
    tokens = tokens_of(4, 12, padding=(0, 5))
    plain, turning = (context_queries(tokens, None, 12, spread) for spread in (1, 4))
    for row, padding in enumerate((0, 5)):
        turns = torch.arange(12 - padding) % 4
        expected = GEOMETRY.shift(plain[row : row + 1, :, padding:], turns)
        torch.testing.assert_close(turning[row : row + 1, :, padding:], expected, atol=1e-5, rtol=1e-4)


def test_a_score_does_not_fall_and_old_scores_of_new_tokens_do_not_count():
    tokens = tokens_of(5, 8)
    before = torch.full((2, 2, 8), -torch.inf)
    before[..., 1], before[..., 2], before[..., 3] = 5.0, 0.0, float(unscored(torch.tensor(3)))
    now, then = FuturePolicy().score(tokens), FuturePolicy().score(replace(tokens, scores=before))
    assert (then[..., 1] == 5.0).all()
    assert torch.equal(then[..., [0, 2, 3, 4]], now[..., [0, 2, 3, 4]])


def test_a_row_without_a_real_query_keeps_its_scores():
    tokens = tokens_of(6, 8, scores=torch.full((2, 2, 8), 0.25))
    index = tokens.query_index.clone()
    index[1] = -1
    assert (FuturePolicy().score(replace(tokens, query_index=index))[1] == 0.25).all()


def test_without_known_angles_queries_stay_as_they_are():
    tokens = tokens_of(7, 9, geometry=None)
    assert torch.equal(context_queries(tokens, None, 9), tokens.queries)
    assert future_attention(tokens).sum(-1).ge(1 - 1e-5).all()


def test_compactor_is_leverage_and_the_attention_of_a_chunk_without_a_mask():
    tokens = tokens_of(8, 11, padding=(0,))
    keys, group = tokens.geometry.unrotate(tokens.keys, tokens.positions)[0].double(), tokens.queries[0].unflatten(0, (2, 2))
    expected = torch.zeros(2, 11, dtype=torch.float64)
    for head in range(2):
        rest = keys[head, 2:] - keys[head, 2:].mean(0)
        moments = rest.T @ rest
        moments += 1e-2 * moments.diagonal().mean() * torch.eye(8)
        hat = functional.pad((rest @ moments.inverse() @ rest.T).diagonal(), (2, 0))
        received = torch.cat(
            [(group[head, :, part] @ tokens.keys[0, head, part].T).softmax(-1).sum(1).mean(0) for part in torch.arange(11).split(4)]
        )
        received = functional.avg_pool1d((received * tokens.values[0, head].norm(dim=-1))[None], 3, 1, 1)[0].double()
        for part in (hat, received):
            expected[head] += (part - part.mean()) / part.std(correction=0)
    torch.testing.assert_close(CompactorPolicy(chunk=4).score(tokens)[0].double(), expected, atol=1e-4, rtol=1e-4)


def test_compactor_adds_attention_for_the_tokens_of_a_block_alone():
    whole = tokens_of(9, 12)
    later = replace(whole, queries=whole.queries[:, :, 8:], query_index=whole.query_index[:, 8:])
    plain, both = CompactorPolicy(chunk=4).score(replace(whole, queries=None)), CompactorPolicy(chunk=4).score(later)
    assert torch.equal(both[..., :8], plain[..., :8])
    assert (both[..., 8:] != plain[..., 8:]).all()
    elsewhere = replace(later, query_index=later.query_index + 50)
    assert torch.equal(CompactorPolicy(chunk=4).score(elsewhere), plain)


def test_a_press_scores_by_what_the_attention_is_called_with():
    press = SimpleNamespace(score=lambda module, hidden, keys, values, attentions, kwargs: hidden.mean(-1)[:, None] + kwargs["shift"])
    tokens, hidden = tokens_of(0, 5), torch.randn(2, 5, 3)
    shown = replace(tokens, module=torch.nn.Identity(), inputs={"hidden_states": hidden, "shift": 2.0})
    torch.testing.assert_close(PressPolicy(press).checked_score(shown), hidden.mean(-1)[:, None] + 2)
    with pytest.raises(UnsupportedError, match="no model runs"):
        PressPolicy(press).score(tokens)
    with pytest.raises(ConfigError, match="press"):
        PressPolicy(None)


# Names, parameters, policies of one's own.


def test_names_stand_for_policies_with_the_usual_parameters():
    names = ("streaming", "h2o", "tova", "snapkv", "compactor", "expected_attention", "keydiff", "future", "kvzip")
    policies = [resolve_policy(name) for name in names]
    assert [policy.name for policy in policies] == list(names)
    assert [policy.observes for policy in policies] == [0, None, 1, 64, 0, 0, 0, 0, 0]
    assert [policy.recent(512, 4) for policy in policies] == [508, 256, 1, 64, 64, 64, 64, 64, 64]
    assert {policy.name for policy in policies if policy.head_budgets == "global"} == {"snapkv", "future", "kvzip"}
    assert all(policy.comparable for policy in policies if policy.head_budgets == "global")
    assert resolve_policy(policy := SnapKVPolicy(window=8)) is policy


def test_an_unknown_policy_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match=r"one of .*'future'.*'h2o'.*'streaming', 'tova'"):
        resolve_policy("lru")
    with pytest.raises(ConfigError, match="not its class"):
        resolve_policy(H2OPolicy)
    with pytest.raises(UnsupportedError, match="'Mine'"):
        policy_from_settings({"policy": "Mine"})


def test_a_subclass_of_a_built_in_policy_does_not_pass_for_it():
    class Mine(StreamingPolicy):
        pass

    assert StreamingPolicy().settings() == {"policy": "streaming"}
    assert Mine().settings()["policy"].endswith("Mine")


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        (SnapKVPolicy, {"window": 0}),
        (SnapKVPolicy, {"window": True}),
        (SnapKVPolicy, {"kernel_size": 4}),
        (FuturePolicy, {"chunk": 0}),
        (FuturePolicy, {"ahead": -1}),
        (CompactorPolicy, {"weight": -1}),
        (ExpectedAttentionPolicy, {"epsilon": -0.5}),
        (KVZipPolicy, {"deferred": 0}),
        (KeyDiffPolicy, {"interval": 0}),
    ],
)
def test_parameters_that_can_not_work_are_refused(kind, parameters):
    with pytest.raises(ConfigError, match=next(iter(parameters))):
        kind(**parameters)


class WrongShape(Policy):
    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.values.norm(dim=-1).mean(0)


def test_scores_of_a_wrong_shape_are_refused_by_the_name_of_the_policy():
    with pytest.raises(ConfigError, match=r"WrongShape.score: expected scores of the shape \(2, 2, 9\)"):
        WrongShape().checked_score(tokens_of(0, 9))
