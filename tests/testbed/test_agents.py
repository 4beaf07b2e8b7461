"""The workloads repeat what they should and nothing else, and their answers follow from their notes."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import testbed
from tests.testbed import agents
from tests.testbed.documents import NAMES

pytestmark = pytest.mark.full

WORKLOADS = {
    "agents": lambda tokenizer, **options: agents.agent_workload(tokenizer, **{"requests": 60, **options}),
    "hanging": lambda tokenizer, **options: agents.agent_workload(tokenizer, **{"requests": 60, "hanging": True, **options}),
    "adversarial": agents.adversarial_workload,
    "no_repeat": agents.no_repeat_workload,
}
every_workload = pytest.mark.parametrize("workload", list(WORKLOADS))


@pytest.fixture(scope="module")
def base():
    return testbed.load("base")


@pytest.fixture(scope="module")
def tokenizer(base):
    return base[1]


@pytest.fixture(scope="module")
def made(tokenizer):
    return {name: make(tokenizer) for name, make in WORKLOADS.items()}


def notes(tokenizer, request) -> str:
    """The prompt up to its questions."""
    return tokenizer.decode(request.prompt).split("Questions:\n")[0]


def of_kind(request, kind: str) -> list[agents.Part]:
    return [part for part in request.parts if part.kind == kind]


@every_workload
def test_the_same_seed_makes_the_same_requests_and_another_seed_makes_others(tokenizer, made, workload):
    assert WORKLOADS[workload](tokenizer, seed=0) == made[workload]
    assert not {tuple(r.prompt) for r in WORKLOADS[workload](tokenizer, seed=1)} & {tuple(r.prompt) for r in made[workload]}


@every_workload
def test_requests_are_as_many_as_asked_for_and_begin_alike_when_more_are(tokenizer, made, workload):
    fewer = WORKLOADS[workload](tokenizer, requests=7)
    assert len(fewer) == 7
    # What drifts is spread over all requests, so that only the first is the same.
    begin = 1 if workload == "adversarial" else 7
    assert fewer[:begin] == made[workload][:begin]


@given(seed=st.integers(0, 10**6), length=st.integers(850, 1000))
def test_prompts_and_continuations_stay_within_the_length(tokenizer, seed, length):
    for request in agents.agent_workload(tokenizer, requests=30, seed=seed, length=length):
        assert 450 < len(request.prompt) + len(request.continuation) <= length
    for request in agents.no_repeat_workload(tokenizer, requests=10, seed=seed, length=length):
        assert 0.6 * length < len(request.prompt) + len(request.continuation) <= length
    for request in agents.adversarial_workload(tokenizer, requests=9, seed=seed):
        assert 500 < len(request.prompt) + len(request.continuation) <= 1000


def test_what_cannot_be_made_is_refused_with_a_reason(tokenizer):
    with pytest.raises(ValueError, match="length: expected 850 to 1000, got 700"):
        agents.agent_workload(tokenizer, length=700)
    with pytest.raises(ValueError, match="requests: expected 2 or more, got 1"):
        agents.adversarial_workload(tokenizer, requests=1)
    with pytest.raises(ValueError, match="requests: expected no more than the book has words for, got 1000"):
        agents.no_repeat_workload(tokenizer, requests=1000)


@every_workload
def test_the_parts_cover_the_prompt_and_the_tokenizer_cuts_between_them(tokenizer, made, workload):
    for request in made[workload]:
        assert [0, *(part.stop for part in request.parts)] == [*(part.start for part in request.parts), len(request.prompt)]
        ids = request.prompt + request.continuation
        assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids


@every_workload
def test_a_part_is_the_same_tokens_in_every_prompt_and_documents_start_a_line(tokenizer, made, workload):
    (newline,) = tokenizer.encode("\n", add_special_tokens=False)
    seen: dict[tuple[str, str], list[int]] = {}
    places: dict[str, set[int]] = {}
    for request in made[workload]:
        for part in request.parts:
            tokens = request.prompt[part.start : part.stop]
            if part.kind not in ("volatile", "question") and workload != "no_repeat":
                assert seen.setdefault((part.kind, part.key), tokens) == tokens
            if part.kind == "document":
                assert request.prompt[part.start - 1] == tokens[-1] == newline
                places.setdefault(part.key, set()).add(part.start)
    if workload != "no_repeat":
        assert max(len(starts) for starts in places.values()) > 5


@every_workload
def test_answers_stand_behind_their_questions_and_follow_from_the_notes(tokenizer, made, workload):
    for request in made[workload]:
        told = notes(tokenizer, request)
        before, place = tokenizer.decode(request.prompt), 0
        for (start, stop), fact, where in zip(request.answers, request.asked, request.where, strict=True):
            before += tokenizer.decode(request.continuation[place:start])
            assert before.endswith(f"\n{fact.question}")
            assert tokenizer.decode(request.continuation[start:stop]) == fact.answer
            before, place = before + fact.answer, stop
            note = "".join(fact.note)
            if where == "hanging":
                assert f", for {fact.name}\n{note.replace(fact.name, 'this')}\n" in told
            else:
                assert told.count(f"\n{note}\n") == 1
        assert place == len(request.continuation)
        assert len(set(request.asked)) == len(request.asked) >= 4


@pytest.mark.parametrize("workload", ["agents", "hanging", "no_repeat"])
def test_no_name_stands_twice_in_the_notes_of_a_prompt(tokenizer, made, workload):
    for request in made[workload]:
        names = [word for word in re.findall("[A-Za-z]+", notes(tokenizer, request)) if word in NAMES]
        assert len(names) == len(set(names)) >= 6


def test_sessions_take_turns_and_a_step_appends_to_the_one_before(tokenizer):
    made = agents.agent_workload(tokenizer)
    assert all(a.agent != b.agent for a, b in pairwise(made))
    sessions: dict[int, list[agents.Request]] = {}
    for request in made:
        sessions.setdefault(request.agent, []).append(request)
    assert all(len(steps) <= 4 and [each.step for each in steps] == list(range(len(steps))) for steps in sessions.values())
    # One step only: those that had just begun when the workload ended.
    assert sum(len(steps) == 1 for steps in sessions.values()) <= 5
    assert {len(steps) for steps in sessions.values()} >= {2, 3, 4}
    kept = 0
    for steps in sessions.values():
        for earlier, later in pairwise(steps):
            head, tail = notes(tokenizer, earlier).split("Tools:\n")
            assert notes(tokenizer, later).split("Notes:\n")[1].startswith(tail.split("Notes:\n")[1])
            kept += notes(tokenizer, later).startswith(f"{head}Tools:\n{tail}")
        assert all(3 <= len(of_kind(each, "document")) <= 5 for each in steps)
    # Half of the sessions renew their heads.
    assert 0.25 < kept / (len(made) - len(sessions)) < 0.75


def test_ids_and_times_come_once_and_some_pages_far_oftener_than_others(tokenizer):
    made = agents.agent_workload(tokenizer)
    stamps = {(tuple(r.prompt[p.start : p.stop]), r.agent) for r in made for p in of_kind(r, "volatile")}
    assert len({stamp for stamp, _ in stamps}) == len(stamps)
    times = [re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", tokenizer.decode(stamp)) for stamp, _ in stamps]
    assert all(len(found) == 1 for found in times)
    assert len({found[0] for found in times}) == len(stamps)
    shown = [part.key for request in made for part in of_kind(request, "document") if part.step == request.step]
    often = sorted(shown.count(key) for key in set(shown))
    assert len(often) >= 12
    assert often[-1] > 5 * often[0]


def test_prefixes_save_a_fair_part_of_the_agents_prompts_and_repeats_most(tokenizer):
    for seed in range(2):
        made = agents.agent_workload(tokenizer, seed=seed)
        assert 0.2 <= agents.prefix_share(made) <= 0.5
        assert 0.7 <= agents.repeat_share(made) <= 0.85


def test_the_shares_are_those_of_a_slow_count(made):
    requests = made["agents"][:25]
    prefix = repeated = 0
    for place, request in enumerate(requests):
        earlier = [each.prompt for each in requests[:place]]
        prefix += max((next(i for i, (a, b) in enumerate(zip(request.prompt, e)) if a != b) for e in earlier), default=0)  # noqa: B905
        blocks = [each.prompt[part.start : part.stop] for each in requests[:place] for part in each.parts]
        repeated += sum(part.stop - part.start for part in request.parts if request.prompt[part.start : part.stop] in blocks)
    total = sum(len(each.prompt) for each in requests)
    assert agents.prefix_share(requests) == prefix / total > 0.1
    assert agents.repeat_share(requests) == repeated / total > 0.5


@pytest.mark.parametrize("seed", [0, 1])
def test_without_repeats_no_twelve_tokens_come_twice_before_the_questions(tokenizer, seed):
    # What does come again: the line `Questions:` and the question's wording behind it, which are left out here.
    seen: set[tuple[int, ...]] = set()
    for request in agents.no_repeat_workload(tokenizer, seed=seed):
        ids = request.prompt[: request.parts[-2].start]
        runs = {tuple(ids[i : i + 12]) for i in range(len(ids) - 11)}
        assert not runs & seen
        seen |= runs
    assert len(seen) > 20_000


def test_drift_grows_from_none_to_all_while_the_page_stays(made):
    requests = made["adversarial"]
    drifts = [request.drift for request in requests]
    assert drifts == sorted(set(drifts))
    assert (drifts[0], drifts[-1]) == (0.0, 1.0)
    old = {part.key: part.stop - part.start for part in of_kind(requests[0], "text")}
    assert len(old) == 24
    for request in requests:
        left = [part.key for part in of_kind(request, "text")]
        assert request.drift == pytest.approx(1 - sum(old.get(key, 0) for key in left) / sum(old.values()))
        assert [key.split()[1] for key in left] == [str(unit) for unit in range(24)]
        assert len(of_kind(request, "document")) == 1
    assert len({part.key for request in requests for part in of_kind(request, "owner")}) == len(requests)


def test_what_drifts_in_is_as_long_or_longer_or_stale_or_a_trap(tokenizer, made):
    first, last = made["adversarial"][0], made["adversarial"][-1]
    units = [
        [tokenizer.decode(each.prompt[part.start : part.stop]).splitlines() for part in of_kind(each, "text")] for each in (first, last)
    ]
    sizes = [[part.stop - part.start for part in of_kind(each, "text")] for each in (first, last)]
    page = tokenizer.decode(first.prompt[of_kind(first, "document")[0].start :])
    for unit, (before, after) in enumerate(zip(*units, strict=True)):
        change = unit % 6
        assert before != after
        if change in (0, 3):
            assert sizes[0][unit] == sizes[1][unit]
        if change in (1, 4):
            assert abs(sizes[0][unit] - sizes[1][unit]) > 1
        if change == 2:
            assert before[0] == after[0]
            assert len(before) == len(after) == 2
            assert sizes[0][unit] == sizes[1][unit]
        if change == 5:
            (name,) = set(re.findall("[A-Za-z]+", after[1])) & set(NAMES)
            assert f" {name}" in page
            assert after[1] not in page
    assert {where for request in made["adversarial"] for where in request.where} == {"page", "trapped", "left", "stale", "hanging"}
    assert not {"stale", "trapped"} & set(first.where)
    assert "left" not in last.where


def test_an_answer_is_right_only_if_all_of_its_tokens_are(made):
    request = next(each for each in made["agents"] if any(stop - start == 3 for start, stop in each.answers))
    index, place = next((i, stop - 1) for i, (start, stop) in enumerate(request.answers) if stop - start == 3)
    assert request.right(request.continuation) == [True] * 4
    wrong = list(request.continuation)
    wrong[place] += 1
    assert request.right(wrong) == [i != index for i in range(4)]


@every_workload
def test_the_base_model_answers_when_nothing_is_reused(base, made, workload):
    assert agents.recall(base[0], made[workload][:10]) >= 0.97


def test_a_page_read_alone_loses_what_hangs_on_the_line_before_it_and_nothing_else(base, made):
    model, _ = base
    right: dict[str, list[bool]] = {}
    for request in made["hanging"][:10]:
        ids = torch.tensor([request.prompt + request.continuation])
        seen = torch.ones(ids.shape[1], ids.shape[1]).tril()
        for part in of_kind(request, "document"):
            seen[part.start : part.stop, : part.start] = 0
        with torch.no_grad():
            guesses = model(input_ids=ids, attention_mask=torch.where(seen > 0, 0.0, -1e9)[None, None]).logits[0].argmax(-1)
        for where, hit in zip(request.where, request.right(guesses[len(request.prompt) - 1 : -1].tolist()), strict=True):
            right.setdefault(where, []).append(hit)
    assert sum(right["page"]) / len(right["page"]) >= 0.97
    # Those that are still right are first guesses.
    assert sum(right["hanging"]) / len(right["hanging"]) <= 0.3
