"""The benchmark of TranslatedCache runs as a user runs it, in its smallest size, and its numbers are what they are said to be."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.scripts.running import ROOT, quick_bench, rows_of

SECTIONS = {"first token", "larger"}
CODED = {"codes in hand", "codes as bytes", "codes, first layer run"}
SIDES = {"consumer's prefill", "raw keys and values", *CODED}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "new"
    return folder, quick_bench("bench_translation", folder, "some")


@pytest.fixture(scope="module")
def rows(quick) -> list[dict[str, str]]:
    assert quick[1].returncode == 0, quick[1].stderr
    return rows_of(quick[0] / "some.csv")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("bench_translation")


@pytest.fixture
def timing(script):
    return importlib.import_module("_translation_timing")


@pytest.fixture
def small(script, timing):
    """A consumer of random weights, a side of each kind for it, and a prompt; the producer is the consumer."""
    torch.manual_seed(0)
    pair = script.Pair.random(script.Shape(32, 3, 4, 48, 64), "gqa", torch.device("cpu"))
    coded = timing.unchanged(pair)
    sides = {name: timing.Side(name, pair.switched, pair, coded.codec) for name in (timing.CODES, timing.BYTES)}
    sides |= {name: timing.Side(name, pair.plain, pair) for name in (timing.OWN, timing.RAW)}
    return pair, sides, torch.randint(1, 64, (1, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.full
def test_it_compares_answers_first_then_prints_tables_the_break_even_and_a_line_for_the_bar(quick):
    _, done = quick
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "threads 1" in out
    assert out.index("base to tuned: a model's own keys and values as codes change nothing") < out.index("\nfirst token ")
    assert out.index("larger: a model's own keys and values as codes change nothing") < out.index("\nlarger ")
    assert all(f"\n{section} " in out for section in SECTIONS)
    for length in (40, 60):
        assert f"first token, {length} tokens: codes beat the consumer's prefill (" in out
    assert "  codes as bytes at least 8x as fast as the larger consumer's prefill, 2,048 tokens: not measured" in out.splitlines()


@pytest.mark.full
def test_its_numbers_stand_in_a_file_with_what_they_depend_on(rows):
    assert {row["section"] for row in rows} == SECTIONS
    assert all(
        row[name] for row in rows for name in ("hardware", "device", "threads", "python", "torch", "transformers", "tokens", "count")
    )
    for row in rows:
        if row["time_ms"]:
            low, middle, high = (float(row[f"time{quartile}_ms"]) for quartile in ("_q1", "", "_q3"))
            assert 0 <= low <= middle <= high
    first = {row["side"]: row for row in rows if (row["section"], row["measure"], row["length"]) == ("first token", "first token", "60")}
    assert set(first) == SIDES
    assert float(first["consumer's prefill"]["ratio"]) == 1
    raw, ours = (float(first[side]["value"]) for side in ("raw keys and values", "codes in hand"))
    assert raw == 2 * 59 * 4 * 2 * 64 * 2, "bfloat16 keys and values of 2 heads in 4 layers, for all tokens but the last"
    assert ours < raw
    made = {row["side"] for row in rows if (row["section"], row["measure"]) == ("first token", "producer")}
    assert made == SIDES - {"consumer's prefill"}
    assert {row["side"] for row in rows if row["measure"] == "KL"} == SIDES - {"consumer's prefill"}


@pytest.mark.full
def test_it_draws_a_picture(quick):
    assert (quick[0] / "some.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["consumer's prefill", "codes in hand", "codes as bytes", "raw keys and values"])
def test_every_side_gives_the_consumers_logits_where_the_producer_is_the_consumer(small, name):
    pair, sides, ids = small
    side = sides[name]
    assert side.answer(ids, side.produce(ids)) > 0
    with torch.no_grad():
        expected = pair.plain(input_ids=ids).logits[0, -1].double()
    # bfloat16 rounds raw keys and values.
    tolerance = 2e-2 if name == "raw keys and values" else 1e-5
    assert float((side.logits(ids, side.produce(ids)) - expected).abs().max()) < tolerance


def test_what_a_side_is_given_is_what_it_goes_by(small):
    _, sides, ids = small
    side, other = sides["raw keys and values"], ids.flip(1).contiguous()
    expected = side.logits(ids, side.produce(ids))
    assert float((side.logits(ids, side.produce(other)) - expected).abs().max()) > 1e-3


def test_sides_take_turns_and_all_produce_before_any_answers(timing):
    log = []

    class Fake:
        def __init__(self, name):
            self.name = name

        def produce(self, ids):
            log.append(("produce", self.name, int(ids[0, 0])))
            return b"xyz" if self.name == "b" else None

        def answer(self, ids, payload):
            log.append(("answer", self.name, payload))
            return 1.0

    answers = timing.ask_in_turns([Fake("a"), Fake("b")], [torch.tensor([[1, 5]]), torch.tensor([[2, 5]])])
    assert log[:4] == [("produce", "a", 1), ("produce", "b", 1), ("produce", "b", 2), ("produce", "a", 2)]
    assert log[4:] == [("answer", "a", None), ("answer", "b", b"xyz"), ("answer", "b", b"xyz"), ("answer", "a", None)]
    assert [(each.nbytes, each.tokens) for each in answers["b"]] == [(3, 2)] * 2


def some_answers(timing, own=(0.1, 0.2), ours=(0.05, 0.04), producing=0.01, nbytes=1_000_000):
    make = lambda seconds, ahead, size: timing.Answer(seconds, ahead, size, 10)  # noqa: E731
    return {
        timing.OWN: [make(seconds, 0.0, 0) for seconds in own],
        timing.BYTES: [make(seconds, producing, nbytes) for seconds in ours],
        timing.RAW: [make(0.01, 0.02, 10 * nbytes) for _ in own],
    }


def test_ratios_are_taken_within_a_prompt(timing):
    answers = some_answers(timing)
    found = {(row["side"], row["measure"]): row for row in timing.rows_of(answers, length=10)}
    assert found[timing.BYTES, "first token"]["ratio"] == 3.5, "of 2 and 5"
    assert (found[timing.BYTES, "first token"]["value"], found[timing.BYTES, "first token"]["unit"]) == (1_000_000, "bytes")
    assert found[timing.BYTES, "producer"]["time_ms"] == 10
    assert (timing.OWN, "producer") not in found


def test_breaking_even_is_where_both_take_as_long(script, timing):
    # 150 ms for the consumer, 45 for codes of 8 Mb.
    assert script.break_even(some_answers(timing)) == f"codes beat the consumer's prefill (150.0 ms) from {0.008 / 0.105:.3g} Gb/s on"
    assert script.break_even(some_answers(timing, ours=(0.2, 0.3))).endswith("never, as they take 250.0 ms without the transfer")


def test_wrong_codes_are_not_timed(timing, small, monkeypatch):
    pair, sides, ids = small
    order = [sides[name] for name in (timing.OWN, timing.CODES, timing.BYTES, timing.RAW)]
    text, rows = timing.prove(order, [ids], "a model", trained=True)
    assert text.startswith("a model: a model's own keys and values as codes change nothing, to ")
    assert [row["side"] for row in rows] == [timing.CODES, timing.BYTES, timing.RAW]
    right = timing.SemanticCodes.from_bytes
    other = sides[timing.CODES].produce(ids)
    for part in other.parts:
        part.codes.bitwise_xor_(255)
    monkeypatch.setattr(timing.SemanticCodes, "from_bytes", staticmethod(lambda data: other))
    with pytest.raises(SystemExit, match="codes as bytes give other logits"):
        timing.prove(order, [ids], "a model", trained=True)
    monkeypatch.setattr(timing.SemanticCodes, "from_bytes", staticmethod(right))
    # Of one of the two models, which share their weights.
    pair.plain.lm_head.weight = torch.nn.Parameter(pair.plain.lm_head.weight.flip(0) * 9)
    with pytest.raises(SystemExit, match="change a model's logits"):
        timing.prove(order, [ids], "a model", trained=True)


def test_codes_that_are_no_better_than_raw_states_are_not_timed(timing, small):
    _, sides, ids = small
    raw, order = timing.Side(timing.RAW, sides[timing.RAW].producer, sides[timing.RAW].pair), []
    raw.produce = sides[timing.CODES].produce
    raw.codec = sides[timing.CODES].codec
    raw.model = sides[timing.CODES].model
    order = [sides[timing.OWN], sides[timing.CODES], sides[timing.BYTES], raw]
    with pytest.raises(SystemExit, match="raw keys and values by"):
        timing.prove(order, [ids], "a model", trained=True)
    timing.prove(order, [ids], "a model", trained=False)


@pytest.mark.parametrize(("ratio", "met"), [(8.0, True), (7.99, False)])
def test_the_bar_is_met_from_its_number_on(script, ratio, met):
    (bar,) = script.bars()
    row = {"section": "larger", "measure": "first token", "side": "codes as bytes", "length": 2048, "ratio": ratio}
    assert (": met (" in bar.verdict([row])) is met
    assert bar.verdict([row | {"side": "codes in hand"}]).endswith("not measured")
