"""Prompts as agents send them, one after another: what a cache that reuses segments of earlier prompts is measured on.

Three workloads, each made from a seed. `agent_workload`: sessions over shared tools and pages, in which most of a prompt has been seen
before but seldom at the same place. `adversarial_workload`: one page again and again, behind a text that drifts away from under it.
`no_repeat_workload`: nothing comes twice. The prompts keep to the form of `documents.py`, so the testbed's models answer their questions
as long as nothing is reused; whatever is missing then was lost by the cache.

A request is asked in one go: prefill `prompt`, then feed `continuation`, which holds the true answers and the further questions. An answer
is right if the model would have said each of its tokens (`Request.right`).
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import torch

from tests import testbed
from tests.testbed.documents import ATTRIBUTES, DIGITS, NAMES, PREAMBLES, RULES, TOOLS, VALUES, WORDINGS, Fact

TITLES = (
    "Letters from the coast",
    "Minutes of the third meeting",
    "A visit to the doctor",
    "On the repair of roads",
    "Accounts of the year",
    "Reports of the watchmen",
    "Talks at dinner",
    "The voyage out",
    "Remarks on the weather",
    "A list of guests",
    "Papers found in a drawer",
    "The second hearing",
    "Orders for the household",
    "Notes of a walk",
)
_FIRST_PAGE = 20
_PROFILES = 3
_RUNNING = 5
_MOST_STEPS = 4
_QUESTIONS = 4
_UNITS = 24
# What the units of a drifting left context are replaced by, in turn: text of as many tokens, so that what is behind it stays in its place;
# text of another length; the same text with another value in its fact; a fact about a name of the page.
_CHANGES = ("alike", "moved", "stale", "alike", "moved", "trap")
# Wordings of the page that comes in every adversarial prompt, and what may be told elsewhere of the same name: a model this small looks
# facts up by name, and mistakes one for the other in other pairs even when nothing is reused. The last two go without.
_TRAPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("digits", ("chosen", "inverted", "reworded")),
    ("chosen", ("digits",)),
    ("digits", ("chosen", "inverted", "reworded")),
    ("inverted", ("digits",)),
    ("repeated", ()),
    ("reworded", ()),
)


class Part(NamedTuple):
    """A stretch of a prompt, `prompt[start:stop]`.

    The kinds are preamble, rules, tool, volatile, task, document, owner, action, text, fact, scaffold and question. In one workload, parts
    of one kind with the same key hold the same text, save those that are volatile. `step`: the step of the session that brought it in.
    """

    kind: str
    key: str
    step: int
    start: int
    stop: int


@dataclass(frozen=True)
class Request:
    """One prompt with its questions.

    Attributes:
        prompt: token ids up to the end of the first question.
        continuation: the first answer, then the further questions with their answers.
        answers: where the answers are in `continuation`.
        asked: the facts that they tell.
        where: for each of them, where it is told. `page`: on a page, or between the prose. `trapped`: on the page, while the left context
            tells something else of the same name. `left`, `stale`: in the left context, as in the first prompt or with another value.
            `hanging`: on a page that leaves the name to the line before it.
        kind: the workload: agents, adversarial or no_repeat.
        agent: the session.
        step: the place in the session.
        parts: what the prompt is made of, without gaps.
        drift: adversarial only: the share of the first request's left context that has been replaced.
    """

    prompt: list[int]
    continuation: list[int]
    answers: list[tuple[int, int]]
    asked: tuple[Fact, ...]
    where: tuple[str, ...]
    kind: str
    agent: int
    step: int
    parts: tuple[Part, ...]
    drift: float = 0.0

    def right(self, guesses: Sequence[int]) -> list[bool]:
        """Which answers are right.

        Args:
            guesses: for each token of `continuation` the likeliest one in its place.
        """
        return [list(guesses[start:stop]) == self.continuation[start:stop] for start, stop in self.answers]


class _Book:
    """Held-out prose without the names that facts are about and without repeats, and how many tokens a text has."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        # The book's licence says the same over and over.
        prose = re.sub(r"End of Project Gutenberg.*?\*END\*", " ", testbed.held_out(), flags=re.DOTALL)
        self.words: list[str] = []
        known: set[tuple[str, ...]] = set()
        for sentence in re.split(r"(?<=[.!?])\s+", prose):
            words = sentence.split()
            runs = {tuple(words[start : start + 5]) for start in range(len(words) - 4)}
            # Authors say a thing twice, too.
            if not runs & known and not set(NAMES) & set(re.findall("[A-Za-z]+", sentence)):
                self.words += words
                known |= runs

    def encode(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._known[text]

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def run(self, start: int, tokens: int) -> str:
        """The words from `start` on that come to at most that many tokens, and at least one word."""
        # The tokenizer cuts at spaces, so that a word counts alike wherever it stands; only the first has no space before it.
        room = tokens - self.count(self.words[start])
        stop = start + 1
        while stop < len(self.words) and room >= (size := self.count(f" {self.words[stop]}")):
            room -= size
            stop += 1
        return " ".join(self.words[start:stop])

    def passage(self, rng: random.Random, tokens: int, *, exactly: bool = False) -> str:
        """A passage from anywhere of at most, or exactly, that many tokens."""
        while True:
            text = self.run(rng.randrange(len(self.words) - tokens), tokens)
            if not exactly or self.count(text) == tokens:
                return text


class _Prompt:
    """A prompt that is being written, piece by piece; every piece starts a line."""

    def __init__(self, book: _Book) -> None:
        self.book = book
        self.ids: list[int] = []
        self.parts: list[Part] = []

    def add(self, kind: str, key: str, text: str, step: int = 0) -> None:
        start = len(self.ids)
        self.ids += self.book.encode(text)
        self.parts.append(Part(kind, key, step, start, len(self.ids)))

    def ask(self, quiz: Sequence[tuple[Fact, str]], *, kind: str, agent: int, step: int, drift: float = 0.0) -> Request:
        """The finished request, with questions about these facts, each with where it is told."""
        asked, where = zip(*quiz, strict=True)
        self.add("scaffold", "questions", "Questions:\n", step)
        self.add("question", asked[0].question, asked[0].question, step)
        continuation: list[int] = []
        answers = []
        for fact in asked:
            if continuation:
                continuation += self.book.encode(f".\n{fact.question}")
            answer = self.book.encode(fact.answer)
            answers.append((len(continuation), len(continuation) + len(answer)))
            continuation += answer
        return Request(self.ids, continuation, answers, asked, where, kind, agent, step, tuple(self.parts), drift)


def _fact(rng: random.Random, name: str, wordings: Sequence[str] = tuple(WORDINGS)) -> Fact:
    wording = rng.choice(wordings)
    value = " ".join(rng.choice(DIGITS) for _ in range(3)) if wording == "digits" else rng.choice(VALUES)
    return Fact(name, rng.choice(ATTRIBUTES), value, wording)


def _line(fact: Fact) -> str:
    return "".join(fact.note) + "\n"


def _changed(rng: random.Random, fact: Fact) -> Fact:
    """The same fact with another value of as many tokens."""
    while True:
        value = " ".join(rng.choice(DIGITS) for _ in range(3)) if fact.wording == "digits" else rng.choice(VALUES)
        if value != fact.value:
            return replace(fact, value=value)


@dataclass(frozen=True)
class _Page:
    """A document of the pool: a heading, then prose and facts by turns.

    Where a fact hangs on the line before, the heading is no part of `text`, since it tells whose the page is; the first line of `text` is a
    fact without its name. Keys and values of that line depend on the name, though the line itself never changes.
    """

    number: int
    title: str
    text: str
    facts: tuple[Fact, ...]
    hanging: Fact | None = None

    def heading(self, owner: str) -> str:
        return f"# {self.title}, for {owner}\n"

    def hung(self, owner: str) -> Fact:
        """The fact of the first line in a prompt where the page is that one's."""
        assert self.hanging is not None
        return replace(self.hanging, name=owner)


def _page(rng: random.Random, book: _Book, number: int, facts: Sequence[Fact], title: str, tokens: int, *, hanging: bool = False) -> _Page:
    hung = _fact(rng, "this", ("inverted",)) if hanging else None
    head = _line(hung) if hung else f"# Page {number}: {title}\n"
    room = tokens - book.count(head) - sum(book.count(_line(fact)) + 1 for fact in facts)
    # The shares of the room are uneven, and each leaves some prose between two facts.
    weights = [rng.uniform(0.5, 1.5) for _ in facts]
    prose = [book.passage(rng, max(4, int(room * weight / sum(weights)))) for weight in weights]
    text = head + "".join(f"{text}\n{_line(fact)}" for text, fact in zip(prose, facts, strict=True))
    return _Page(number, title, text, tuple(facts), hung)


class _Clock:
    """What never comes twice: times, ids and numbers of requests."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._now = datetime(2031, 4, 5, 9, 0, 0)
        self._number = 48_000

    def now(self) -> str:
        self._now += timedelta(seconds=self._rng.randint(1, 90))
        return f"{self._now:%Y-%m-%d %H:%M:%S}"

    def number(self) -> int:
        self._number += self._rng.randint(1, 9)
        return self._number

    def unique(self) -> str:
        return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))


class _World:
    """What the sessions share: profiles of agents, the pool of pages, the clock."""

    def __init__(self, tokenizer: Any, seed: int, length: int, hanging: bool) -> None:
        self.rng = random.Random(f"agents {seed}")
        self.book = _Book(tokenizer)
        self.clock = _Clock(self.rng)
        self.length = length
        rng = self.rng
        preambles = rng.sample(PREAMBLES, _PROFILES)
        self.profiles = [(preamble, rng.sample(RULES, 2), rng.sample(TOOLS, rng.randint(3, 4))) for preamble in preambles]
        names = rng.sample(NAMES, len(NAMES))
        self.pages = []
        for index, title in enumerate(rng.sample(TITLES, len(TITLES))):
            facts = [_fact(rng, names.pop()) for _ in range(rng.randint(2, 4))]
            self.pages.append(_page(rng, self.book, _FIRST_PAGE + index, facts, title, rng.randint(100, 140), hanging=hanging))
        # Names that no page tells of.
        self.owners = names

    def popular(self, count: int) -> list[_Page]:
        """Distinct pages, the first of the pool far oftener than the last."""
        left = list(enumerate(self.pages, 1))
        drawn = []
        for _ in range(count):
            pick = self.rng.choices(left, [1 / rank for rank, _ in left])[0]
            left.remove(pick)
            drawn.append(pick[1])
        return drawn


class _Session:
    """One agent: its head, and what it has read so far."""

    def __init__(self, world: _World, agent: int) -> None:
        self.world = world
        self.agent = agent
        rng = world.rng
        self.profile = rng.randrange(_PROFILES)
        self.preamble, self.rules, tools = world.profiles[self.profile]
        self.tools = rng.sample(tools, len(tools))
        # Some agents tell the time of the request and list their tools as they come, so that no two of their prompts begin alike.
        self.restless = rng.random() < 0.5
        self.task = world.book.passage(rng, rng.randint(30, 60))
        self.stamp = self._stamp()
        # Five are read at most; a sixth is there to be named.
        self.unread = world.popular(6)
        self.owners = rng.sample(world.owners, len(self.unread))
        self.facts: list[tuple[Fact, str]] = []
        self.log: list[tuple[str, str, str, int]] = []
        self.step = 0
        for _ in range(3):
            self._read(0)

    def _stamp(self) -> str:
        clock = self.world.clock
        return f"Session: {clock.unique()}\nTime: {clock.now()}, request {clock.number()}\n"

    def _read(self, step: int) -> None:
        page, owner = self.unread.pop(0), self.owners.pop()
        if page.hanging:
            self.log.append(("owner", f"{page.title}, {owner}", page.heading(owner), step))
            self.facts.append((page.hung(owner), "hanging"))
        self.log.append(("document", page.title, page.text, step))
        self.facts += [(fact, "page") for fact in page.facts]

    def _act(self, step: int, *, read: bool) -> None:
        """One more step: another page, or something short."""
        rng, clock, page = self.world.rng, self.world.clock, self.unread[0]
        thought = f"{page.title} may tell more" if read else "It may depend on the weather"
        tool = f'"read_page", "arguments": {{"page": {page.number}}}' if read else '"weather", "arguments": {"day": "today"}'
        reason = self.world.book.passage(rng, rng.randint(8, 16))
        action = f'Thought: {thought}, for {reason}\nAction: {{"tool": {tool}}}\n'
        self.log.append(("action", action, action, step))
        self.log.append(("volatile", "observation", f"Observation ({clock.now()}, {clock.number()}):\n", step))
        if read:
            self._read(step)
        else:
            weather = f"It will be {rng.choice(('mild', 'wet', 'fine'))}.\n"
            self.log.append(("text", weather, weather, step))

    def request(self) -> Request:
        """The prompt of the step that the session is in."""
        rng = self.world.rng
        if self.restless and self.step:
            self.stamp = self._stamp()
            rng.shuffle(self.tools)
        prompt = _Prompt(self.world.book)
        prompt.add("preamble", f"preamble {self.profile}", f"System: {self.preamble}")
        prompt.add("rules", f"rules {self.profile}", f" {' '.join(self.rules)}\n")
        prompt.add("volatile", "stamp", self.stamp, self.step if self.restless else 0)
        prompt.add("scaffold", "tools", "Tools:\n")
        for tool in self.tools:
            prompt.add("tool", tool, f"{tool}\n")
        prompt.add("task", f"task {self.agent}", f"Task: {self.task}\n")
        prompt.add("scaffold", "notes", "Notes:\n")
        for kind, key, text, step in self.log:
            prompt.add(kind, key, text, step)
        # One of the questions is about a fact that hangs on its page's heading, if there are such.
        quiz = rng.sample([each for each in self.facts if each[1] == "hanging"], 1) if self.unread[0].hanging else []
        quiz += rng.sample([each for each in self.facts if each[1] == "page"], _QUESTIONS - len(quiz))
        rng.shuffle(quiz)
        return prompt.ask(quiz, kind="agents", agent=self.agent, step=self.step)

    def next(self) -> Request | None:
        """The request of the next step, or None where it would be too long, or one too many."""
        self.step += 1
        if self.step >= _MOST_STEPS:
            return None
        before = [list(each) for each in (self.log, self.facts, self.unread, self.owners)]
        # Mostly a page, where there is room for one.
        wanted = self.world.rng.random() < 0.6
        for read in (wanted, not wanted):
            if read and len(self.unread) == 1:
                continue
            self._act(self.step, read=read)
            request = self.request()
            if len(request.prompt) + len(request.continuation) <= self.world.length:
                return request
            self.log, self.facts, self.unread, self.owners = (list(each) for each in before)
        return None


def agent_workload(tokenizer: Any, *, requests: int = 200, seed: int = 0, length: int = 900, hanging: bool = False) -> list[Request]:
    """Requests of several sessions at once, no two of one session in a row.

    A session has a profile (preamble, rules and tools, shared with other sessions), a task of its own and pages of a common pool, some
    far more popular than others. Each step appends a thought, an action and what was observed, mostly another page. Every prompt
    holds a session id and a time near its top, and half of the sessions renew these and the order of the tools with each request.

    Args:
        tokenizer: the testbed's.
        requests: how many.
        seed: what everything follows from.
        length: the most tokens of a prompt and its continuation, 850 to 1,000 (the models were trained up to there).
        hanging: whether the first fact of each page leaves its name to the heading, which differs from session to session while the rest
            of the page does not; a quarter of the questions ask for such facts. Without them no answer depends on what stands before a
            page, and a cache that reuses pages blindly answers all.
    """
    if not 850 <= length <= 1000:
        raise ValueError(f"length: expected 850 to 1000, got {length}; the pages of a session need the room, the models know no more")
    world = _World(tokenizer, seed, length, hanging)
    made: list[Request] = []
    running: list[_Session] = []
    last, agents = -1, 0
    while len(made) < requests:
        if len(running) < _RUNNING:
            session = _Session(world, agents)
            agents += 1
            running.append(session)
            request: Request | None = session.request()
        else:
            session = world.rng.choice([each for each in running if each.agent != last])
            request = session.next()
        if request is None:
            running.remove(session)
            continue
        made.append(request)
        last = session.agent
    return made


class _Drifting:
    """A left context of short units, each with what it will be replaced by."""

    def __init__(self, rng: random.Random, book: _Book, target: _Page, names: Sequence[str]) -> None:
        self.before: list[str] = []
        self.after: list[str] = []
        # unit -> the fact that it tells before, and after
        self.facts: dict[int, tuple[Fact, Fact]] = {}
        # name that the target tells of -> the unit that tells something else of it after
        self.traps: dict[str, int] = {}
        for unit in range(_UNITS):
            turn, kind = divmod(unit, len(_CHANGES))
            before = after = f"{book.passage(rng, rng.randint(14, 22))}\n"
            if _CHANGES[kind] == "alike":
                after = f"{book.passage(rng, book.count(before) - 1, exactly=True)}\n"
            elif _CHANGES[kind] == "moved":
                after = f"{book.passage(rng, rng.choice((6, 9, 28, 33)))}\n"
            elif _CHANGES[kind] == "stale":
                fact = _fact(rng, names[turn])
                self.facts[unit] = (fact, _changed(rng, fact))
                before, after = (text + _line(told) for text, told in zip((before, after), self.facts[unit], strict=True))
            else:
                name = target.facts[turn].name
                self.traps[name] = unit
                after = f"{book.passage(rng, 12)}\n{_line(_fact(rng, name, _TRAPS[turn][1]))}"
            self.before.append(before)
            self.after.append(after)
        self.order = rng.sample(range(_UNITS), _UNITS)


def adversarial_workload(tokenizer: Any, *, requests: int = 25, seed: int = 0) -> list[Request]:
    """One page in every prompt, behind a left context of which more is replaced from request to request.

    What comes in is of the same length, of another, the same but for one value, or tells something else about a name of the page. The
    page's heading names another owner in every prompt, and the page's first line hangs on that. The questions ask for every fact of the
    page and for two of the left context, as they stand in this prompt. The page is the same throughout, so a fact that the model misses is
    missed throughout: measure several seeds, and against the model without a cache.

    Args:
        tokenizer: the testbed's.
        requests: how many, 2 at least; the left context has 24 units, so with more than 25 some do not change it.
        seed: what everything follows from.
    """
    if requests < 2:
        raise ValueError(f"requests: expected 2 or more, got {requests}; the first holds none of the drift and the last all of it")
    rng = random.Random(f"adversarial {seed}")
    book = _Book(tokenizer)
    names = rng.sample(NAMES, len(NAMES))
    facts = [_fact(rng, names.pop(), (wording,)) for wording, _ in _TRAPS]
    target = _page(rng, book, _FIRST_PAGE, facts, rng.choice(TITLES), 200, hanging=True)
    left = _Drifting(rng, book, target, [names.pop() for _ in range(_UNITS // len(_CHANGES))])
    whole = sum(book.count(text) for text in left.before)
    preamble = f"System: {rng.choice(PREAMBLES)}\n"
    made = []
    for step in range(requests):
        gone = set(left.order[: round(_UNITS * step / (requests - 1))])
        prompt = _Prompt(book)
        prompt.add("preamble", preamble, preamble)
        prompt.add("scaffold", "notes", "Notes:\n")
        for unit in range(_UNITS):
            kind = "after" if unit in gone else "before"
            prompt.add("text", f"unit {unit} {kind}", (left.after if unit in gone else left.before)[unit])
        owner = names[step % len(names)]
        prompt.add("owner", f"{target.title}, {owner}", target.heading(owner))
        prompt.add("document", target.title, target.text)
        told = [(pair[unit in gone], "stale" if unit in gone else "left") for unit, pair in left.facts.items()]
        quiz = [(fact, "trapped" if left.traps.get(fact.name) in gone else "page") for fact in target.facts]
        quiz += [(target.hung(owner), "hanging"), *rng.sample(told, 2)]
        rng.shuffle(quiz)
        drift = sum(book.count(left.before[unit]) for unit in gone) / whole
        made.append(prompt.ask(quiz, kind="adversarial", agent=0, step=step, drift=drift))
    return made


def no_repeat_workload(tokenizer: Any, *, requests: int = 40, seed: int = 0, length: int = 900) -> list[Request]:
    """Prompts that have nothing in common but single words, the scaffold and the wordings: the price of looking for repeats in vain.

    No passage of the book and no question comes twice, so the book bounds the number of requests.

    Args:
        tokenizer: the testbed's.
        requests: how many.
        seed: what everything follows from.
        length: the most tokens of a prompt and its continuation; the prompts take 70 to 100% of them.
    """
    rng = random.Random(f"no repeat {seed}")
    book = _Book(tokenizer)
    turn = rng.randrange(len(book.words))
    book.words = book.words[turn:] + book.words[:turn]
    place = 0
    told: set[str] = set()

    def fresh(tokens: int) -> str:
        nonlocal place
        if place >= len(book.words):
            raise ValueError(f"requests: expected no more than the book has words for, got {requests}; it ended at request {len(made)}")
        text = book.run(place, tokens)
        place += len(text.split())
        return text

    made: list[Request] = []
    for index in range(requests):
        facts = []
        for name in rng.sample(NAMES, 10):
            while (fact := _fact(rng, name)).question in told:
                pass
            told.add(fact.question)
            facts.append(fact)
        prompt = _Prompt(book)
        prompt.add("preamble", f"preamble {index}", f"System: {fresh(rng.randint(30, 60))}\n")
        prompt.add("scaffold", "notes", "Notes:\n")
        asked = rng.sample(facts, _QUESTIONS)
        lines = [_line(fact) for fact in facts]
        scaffold = ["Questions:\n", *lines, *(f"{fact.question}{fact.answer}.\n" for fact in asked)]
        room = rng.randint(length * 7 // 10, length) - len(prompt.ids) - sum(book.count(text) for text in scaffold)
        for left, (fact, line) in zip(range(len(facts), 0, -1), zip(facts, lines, strict=True), strict=True):
            text = f"{fresh(room // left - 1)}\n"
            room -= book.count(text)
            prompt.add("text", f"text {index}", text)
            prompt.add("fact", fact.question, line)
        made.append(prompt.ask([(fact, "page") for fact in asked], kind="no_repeat", agent=index, step=0))
    return made


def recall(model: Any, requests: Iterable[Request]) -> float:
    """The share of right answers when nothing is reused."""
    right: list[bool] = []
    for request in requests:
        ids = torch.tensor([request.prompt + request.continuation], device=model.device)
        with torch.no_grad():
            guesses = model(input_ids=ids).logits[0].argmax(-1)
        right += request.right(guesses[len(request.prompt) - 1 : -1].tolist())
    return sum(right) / len(right)


def prefix_share(requests: Sequence[Request]) -> float:
    """The share of prompt tokens that stand in a prefix shared with an earlier prompt: what prefix caching saves at best."""
    # node of the trie and token -> node
    trie: dict[tuple[int, int], int] = {}
    saved = 0
    for request in requests:
        node, known = 0, True
        for token in request.prompt:
            known = known and (node, token) in trie
            saved += known
            node = trie.setdefault((node, token), len(trie) + 1)
    return saved / sum(len(request.prompt) for request in requests)


def repeat_share(requests: Sequence[Request]) -> float:
    """The share of prompt tokens in parts that stood word for word in an earlier prompt: what reuse of segments saves at best."""
    seen: set[tuple[int, ...]] = set()
    saved = 0
    for request in requests:
        parts = [tuple(request.prompt[part.start : part.stop]) for part in request.parts]
        saved += sum(len(part) for part in parts if part in seen)
        seen.update(parts)
    return saved / sum(len(request.prompt) for request in requests)
