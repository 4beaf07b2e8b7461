"""calibrate writes artifacts for the models that it is given."""

import json

import pytest

from hf_kvcaches import CacheTranslator, KVCodec, SegmentPolicy, WarmStartGate
from hf_kvcaches.engines.engine_codec import EngineCodec
from tests import testbed
from tests.cli.running import BASE, run, succeed

TUNED = testbed.FOLDER / "tuned"
START = "The road was long and the day was cold. "


def test_a_codec_of_texts_from_files(capsys, tmp_path):
    (tmp_path / "a.txt").write_text(testbed.held_out()[:1200])
    (tmp_path / "b.jsonl").write_text(json.dumps(START))
    files = ("--texts", tmp_path / "a.txt", tmp_path / "b.jsonl")
    options = ("--bytes-ratio", 0.25, "--metric", "plain", "--length", 64)
    done = succeed(capsys, "calibrate", "codec", "--model", BASE, *files, *options, "--out", tmp_path / "codec")
    model, tokenizer = testbed.load()
    codec = KVCodec.from_pretrained(tmp_path / "codec", model=model, tokenizer=tokenizer)
    assert codec.bytes_ratio == pytest.approx(0.25, abs=0.01)
    assert (codec.settings.metric, codec.settings.block) == ("plain", 64)
    assert f"{codec}\n{codec.settings.tokens} tokens of" in done.out
    cache = f"SubspaceCache(KVCodec('{tmp_path / 'codec'}'))"
    succeed(capsys, "verify", "--model", BASE, "--cache", cache, "--prompt", START, "--max-new-tokens", 2)


@pytest.mark.parametrize(("engine", "rotation"), [("vllm", "aware"), ("lmcache", "post")])
def test_a_codec_for_an_engine_names_its_checkpoint(capsys, tmp_path, engine, rotation):
    (tmp_path / "a.txt").write_text(testbed.held_out()[:600])
    files = ("--model", BASE, "--texts", tmp_path / "a.txt", "--metric", "plain", "--length", 64, "--out", tmp_path / "codec")
    succeed(capsys, "calibrate", "codec", "--for", engine, *files)
    made = EngineCodec.load(tmp_path / "codec", engine)
    made.require_checkpoint(str(BASE))
    assert (made.codec.settings.rotation, made.codec.settings.recent) == (rotation, 0)


def test_what_an_engine_can_not_load_is_refused_before_calibrating(capsys, tmp_path):
    (tmp_path / "a.txt").write_text(START)
    files = ("--model", BASE, "--texts", tmp_path / "a.txt", "--out", tmp_path / "codec")
    done = run(capsys, "calibrate", "codec", "--for", "vllm", *files, "--rotation", "post")
    assert done.code == 2
    assert "--rotation" in done.err
    assert not (tmp_path / "codec").exists()


@pytest.mark.full
def test_a_policy_for_segments_of_prompts(capsys, tmp_path):
    parts = [f"{START * 3}Ann went {word}.\n\n" for word in ("home", "away", "out")]
    lines = [parts[index % 3] + parts[(index + 1) % 3] + "And then she" for index in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = ("--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "policy")
    done = succeed(capsys, "calibrate", "segments", "--model", BASE, *files, "--asked", 3)
    policy = SegmentPolicy.from_pretrained(tmp_path / "policy", model=testbed.load()[0])
    assert policy.measured
    assert f"written to {tmp_path / 'policy'}" in done.out


def test_a_gate_for_pairs_of_prompts(capsys, tmp_path):
    start = START * 6
    lines = [{"source": f"{start}Ann went {word} and the", "target": f"{start}Ann went, {word} and the"} for word in ("home", "away")]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ("--following", 4, "--out", tmp_path / "gate")
    done = succeed(capsys, "calibrate", "warmstart", "--model", BASE, "--pairs", tmp_path / "pairs.jsonl", *options)
    assert WarmStartGate.from_pretrained(tmp_path / "gate", model=testbed.load()[0]).bound == 0.02
    assert "reusable: " in done.out
    assert "2 pairs" in done.out


@pytest.mark.full
def test_a_translator_for_two_models(capsys, tmp_path):
    (tmp_path / "a.txt").write_text(testbed.held_out("verse")[:1500])
    pair = ("--producer", BASE, "--consumer", TUNED, "--texts", tmp_path / "a.txt", "--out", tmp_path / "pair")
    done = succeed(capsys, "calibrate", "translator", *pair, "--prefixes", 4, "--length", 64, "--metric", "plain", "--payload", 0.25)
    made = CacheTranslator.from_pretrained(tmp_path / "pair", producer=testbed.load()[0], consumer=testbed.load("tuned")[0])
    assert made.settings.payload == 0.25
    assert f"written to {tmp_path / 'pair'}" in done.out
