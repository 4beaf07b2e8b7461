"""`CacheTranslator`: what it is fitted to, what it sends, what it refuses, and that it is the same elsewhere."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, LlamaConfig

from hf_kvcaches import compat
from hf_kvcaches.errors import ArtifactError, ConfigError, FingerprintMismatch, UnsupportedError
from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.codes import SemanticCodes
from hf_kvcaches.translate.translator import CacheTranslator
from tests import testbed, tiny
from tests.translate.pairs import FAMILIES, HALF, TEXTS, changed, fit, fitted, last_layer, lossless, models, reference
from tests.warmstart.warm import answer, left_padded, logits_of, words

ROOT = Path(__file__).parents[2]
PROMPT = tiny.ids(1, 45, seed=1)
OTHER = tiny.ids(1, 31, seed=2)


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=atol, rtol=0)


def translated_logits(translator: CacheTranslator, pair: Any = None, ids: torch.Tensor = PROMPT, new: int = 3) -> torch.Tensor:
    producer, consumer = pair or models()
    cache = TranslatedCache(consumer, translator, translator.encode(producer, ids))
    got = logits_of(compat.base_model(consumer), ids, cache, new)
    assert cache.report().translated == ids.shape[1] - 1
    return got


def key_errors(translator: CacheTranslator, ids: torch.Tensor = PROMPT, pair: Any = None) -> list[float]:
    """Of each layer's keys and values, relative, against the consumer's own."""
    producer, consumer = pair or models()
    cache, own = TranslatedCache(consumer, translator, translator.encode(producer, ids)), DynamicCache(config=consumer.config)
    cache.prefill(ids)
    with torch.no_grad():
        consumer(input_ids=ids[:, :-1], past_key_values=own)
    found = []
    for layer, other in zip(cache.layers, own.layers, strict=True):
        made, true = (torch.cat([each.keys.flatten(), each.values.flatten()]) for each in (layer, other))
        found.append(float((made - true).norm() / true.norm()))
    return found


def decoded(translator: CacheTranslator, codes: SemanticCodes) -> list[torch.Tensor]:
    """The coefficients of each part, (tokens, rank)."""
    return [encoder.quantizer.decode(part.codes) for encoder, part in zip(translator.maps.encoders, codes, strict=True)]


# What is sent


def test_padding_is_not_sent() -> None:
    (producer, _), translator = models(), fitted()
    plain = translator.encode(producer, PROMPT)
    ids, mask = torch.nn.functional.pad(PROMPT, (13, 0)), torch.nn.functional.pad(torch.ones_like(PROMPT), (13, 0))
    assert translator.encode(producer, ids, mask).head == plain.head
    for one, other in zip(decoded(translator, translator.encode(producer, ids, mask)), decoded(translator, plain), strict=True):
        close(one, other, 1e-4)
    assert len(translator.encode(producer, ids, mask).to_bytes()) == len(plain.to_bytes())
    rows = [PROMPT, OTHER, OTHER[:, :2]]
    together = fitted().encode(producer, *left_padded(*rows))
    assert together.head.tokens == 44 + 30 + 1
    start = 0
    for row in rows:
        alone = fitted().encode(producer, row)
        for one, other in zip(decoded(fitted(), together), decoded(fitted(), alone), strict=True):
            stop = start + row.shape[1] - 1
            close(one[start:stop], other)
        start = stop


def test_a_producer_in_training_is_read_without_dropout() -> None:
    model = tiny.build(LlamaConfig(**{**tiny._SHAPE, "attention_dropout": 0.5}))
    translator = lossless(model)
    expected = translator.encode(model, PROMPT).to_bytes()
    model.train()
    assert translator.encode(model, PROMPT).to_bytes() == b"".join(translator.stream(model, PROMPT)) == expected
    assert all(module.training for module in model.modules())


def test_prompts_are_given_as_tensors_or_lists() -> None:
    (producer, _), translator = models(), fitted()
    expected = translator.encode(producer, PROMPT).to_bytes()
    for given in (PROMPT[0], PROMPT.tolist(), PROMPT[0].tolist(), PROMPT.int()):
        assert translator.encode(producer, given).to_bytes() == expected
    assert translator.encode(producer, PROMPT, torch.ones_like(PROMPT)).to_bytes() == expected
    for wrong in (PROMPT[:, :1], [[5]], PROMPT.float(), PROMPT[None], [], "a prompt", None, [[1, 2], [3]]):
        with pytest.raises(ConfigError, match="input_ids"):
            translator.encode(producer, wrong)
    with pytest.raises(ConfigError, match="attention_mask"):
        translator.encode(producer, PROMPT, torch.ones(1, 44))
    with pytest.raises(ConfigError, match="attention_mask"):
        translator.encode(producer, PROMPT, torch.ones(1, 45).tril(-1))


@pytest.mark.parametrize(
    "options", [{}, {"payload": 0.0}, {"method": "paper", "widths": 16, "ranks": (3, 5)}, {"layers_per_code": 4}], ids=str
)
def test_what_is_streamed_are_the_bytes_of_encode(options: dict[str, Any]) -> None:
    producer, translator = models()[0], fitted(**options)
    ids, mask = left_padded(PROMPT, OTHER)
    assert b"".join(translator.stream(producer, ids, mask)) == translator.encode(producer, ids, mask).to_bytes()


def test_a_part_is_streamed_before_the_producer_has_its_next_layer() -> None:
    producer, translator = tiny.llama(), fitted()
    go_on = [threading.Event() for _ in range(4)]
    reached: list[int] = []

    def wait(index: int) -> Any:
        def hook(*_: Any) -> None:
            reached.append(index)
            assert go_on[index].wait(20)

        return hook

    for index, layer in enumerate(producer.model.layers):
        layer.register_forward_pre_hook(tiny.observing(wait(index)))
    pieces = translator.stream(producer, PROMPT)
    got = [next(pieces)]  # The head is there before anything is run.
    assert reached == []
    go_on[0].set()
    go_on[1].set()
    got.append(next(pieces))
    assert 3 not in reached
    go_on[2].set()
    got.append(next(pieces))
    go_on[3].set()
    assert b"".join([*got, *pieces]) == translator.encode(models()[0], PROMPT).to_bytes()


def test_what_goes_wrong_in_the_producer_is_raised_where_the_stream_is_read() -> None:
    producer, translator = tiny.llama(), fitted()
    producer.model.layers[2].register_forward_pre_hook(tiny.observing(lambda *_: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        list(translator.stream(producer, PROMPT))


def test_the_producer_runs_no_layer_that_is_not_sent_and_keeps_nothing() -> None:
    producer = models()[0]
    with last_layer(producer) as seen:
        fitted(payload=0.0).encode(producer, PROMPT)
    assert seen == []
    ran: list[int] = []
    mlp = producer.model.layers[-1].mlp
    handle = mlp.register_forward_pre_hook(tiny.observing(lambda *_: ran.append(1)))
    fitted().encode(producer, PROMPT)
    handle.remove()
    assert ran == []  # Behind the last keys and values the pass ends.


# What it is fitted to


def test_more_is_better_and_what_is_sent_beats_what_is_known() -> None:
    errors = [sum(key_errors(fitted(payload=payload, metric="plain"))) for payload in (0.0, 0.1, 0.4, 2.0)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.7 * errors[0]


@pytest.mark.parametrize("run", [1, 2, 3])
def test_layers_that_the_consumer_runs_are_exact(run: int) -> None:
    options = {"payload": 0.15, "metric": "plain"}
    translator, without = fitted(recompute_layers=run, **options), fitted(**options)
    errors, before = key_errors(translator), key_errors(without)
    assert max(errors[: run + 1]) < 1e-5
    assert min([1.0, *errors[run + 1 :]]) > 1e-3
    assert all(one <= other for one, other in zip(errors, before, strict=True))
    assert translator.sent_layers == tuple(range(run + 1, 4))
    codes = translator.encode(models()[0], PROMPT)
    assert len(codes) == 3 - run
    assert codes.nbytes <= without.encode(models()[0], PROMPT).nbytes
    cache = TranslatedCache(models()[1], translator, codes)
    with last_layer(models()[1]) as seen:
        logits_of(models()[1], PROMPT, cache, 2)
    # With all layers its own, the last one's keys and values come of a pass that ends there.
    assert seen == [44, 1, 1] if run == 3 else [1, 1]
    assert cache.report().run_layers == run


@pytest.mark.parametrize("aligner", ["ridge", "mlp"])
@pytest.mark.parametrize("layers", [[1], [3], [1, 2, 3]])
def test_patched_layers_make_keys_and_values_of_their_own_input(layers: list[int], aligner: str) -> None:
    translator = fitted(patch_layers=tuple(layers), payload=2.0, aligner=aligner)
    assert translator.patched_layers == tuple(layers)
    producer, consumer = models()
    codes = translator.encode(producer, PROMPT)
    assert [each.kind for each in translator.maps.encoders] == ["input" if layer in layers else "states" for layer in (1, 2, 3)]
    cache = TranslatedCache(consumer, translator, codes)
    cache.prefill(PROMPT)
    lowest = consumer.model.layers[0].input_layernorm(consumer.model.embed_tokens(PROMPT[:, :-1]))[0]
    where = consumer.model.rotary_emb(lowest[None], torch.arange(44)[None])
    for coefficients, layer in zip(decoded(translator, codes), (1, 2, 3), strict=True):
        if layer not in layers:
            continue
        decoder = next(each for each in translator.maps.decoders if each.layer == layer)
        with torch.no_grad():
            made = decoder.apply(lowest, coefficients)[None]
            attention = consumer.model.layers[layer].self_attn
            own = DynamicCache(config=consumer.config)
            below = [own.update(torch.empty(1, 2, 0, 8), torch.empty(1, 2, 0, 8), index) for index in range(layer)]
            attention(made, where, None, past_key_values=own)
        assert len(below) == layer
        close(cache.layers[layer].keys, own.layers[layer].keys)
        close(cache.layers[layer].values, own.layers[layer].values)
    assert cache.report().patched == tuple(layers) == translator.patched_layers
    # Rows with padding, in another order.
    ids, mask = left_padded(OTHER, PROMPT)
    batch = TranslatedCache(consumer, translator, translator.encode(producer, *left_padded(PROMPT, OTHER)))
    got = logits_of(consumer, ids, batch, 3, attention_mask=mask)
    for number, row in enumerate((OTHER, PROMPT)):
        close(got[number : number + 1], translated_logits(translator, ids=row), 1e-3)


def test_patches_are_taken_where_they_help_and_only_there() -> None:
    translator = fit(*models(), TEXTS * 2, payload=0.2, layers_per_code=1, patch_layers="auto")
    measured = translator.settings.measured
    assert measured["with patches"] <= measured["reuse alone"] if translator.patched_layers else "with patches" not in measured
    assert set(translator.route.sensitivity) == {1, 2, 3}
    asked: list[tuple[int, ...]] = []

    def score(alone: torch.Tensor, found: torch.Tensor) -> float:
        asked.append(tuple(found.shape))
        return -float((alone - found).square().mean())

    fit(*models(), TEXTS, payload=0.2, layers_per_code=1, patch_layers="auto", score=score)
    assert {shape[1] for shape in asked} == {tiny.VOCABULARY}


@pytest.mark.parametrize("options", [{}, {"method": "paper"}, {"layers_per_code": 4}, {"widths": (4, 8)}], ids=str)
@pytest.mark.parametrize("payload", [0.1, 0.15, 0.3])
def test_payload_is_the_share_of_bytes_as_they_are_sent(payload: float, options: dict[str, Any]) -> None:
    translator = fitted(**{"widths": None, "payload": payload, "metric": "plain", **options})
    cache = TranslatedCache(models()[1], translator, codes := translator.encode(models()[0], PROMPT))
    cache.prefill(PROMPT)
    # 4 layers of 2 heads of 8 numbers, keys and values, 2 bytes each; what the head and the parts' headers take is for all tokens together.
    sent, parts = sum(part.codes.numel() for part in codes), len(codes)
    assert payload * 256 - 13 <= sent / 44 <= payload * 256
    assert codes.nbytes - sent < 300 + 120 * parts
    assert cache.report().payload_share == codes.nbytes / 44 / 256


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "qk_norm", "partial"])
@pytest.mark.parametrize("metric", ["loss", "attention"])
def test_other_families_are_translated_to_their_trained_selves(family: str, metric: str) -> None:
    producer, consumer = FAMILIES[family](), changed(FAMILIES[family](), 0.05)
    own = logits_of(consumer, PROMPT, None, 3)
    losses = []
    for payload in (0.0, 1.0):
        translator = fit(producer, consumer, payload=payload, metric=metric, layers_per_code=1)
        assert translator.settings.config.metric == metric
        losses.append(float((translated_logits(translator, (producer, consumer)) - own).square().mean()))
    assert losses[1] < losses[0]


def test_other_widths_are_translated_too() -> None:
    producer, consumer = tiny.llama(hidden_size=48, num_attention_heads=6, num_key_value_heads=3, head_dim=8), tiny.llama(seed=1)
    translator = fit(producer, consumer, **HALF)
    expected = logits_of(consumer, PROMPT, reference(translator, PROMPT, (producer, consumer)), 3)
    close(translated_logits(translator, (producer, consumer)), expected)


def test_both_models_are_left_as_they_were() -> None:
    producer, consumer = tiny.llama(), changed(tiny.llama()).train()
    consumer.model.layers[1].eval()
    producer.lm_head.weight.requires_grad_(False)

    def found() -> list[Any]:
        return [
            [
                [module.training for module in model.modules()],
                [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()],
                model.config._attn_implementation,
                [(parameter.requires_grad, parameter.grad, parameter._version) for parameter in model.parameters()],
                torch.is_grad_enabled(),
            ]
            for model in (producer, consumer)
        ]

    before = found()
    fit(producer, consumer, recompute_layers="auto")
    fit(producer, consumer, layers_per_code=1, patch_layers=(2,), recompute_layers=1)
    assert found() == before
    with pytest.raises(ConfigError):
        fit(producer, consumer, [[1, 2, 500]])
    assert found() == before


# What is refused


def test_another_model_is_refused_and_models_in_each_others_place() -> None:
    (producer, consumer), translator = models(), fitted()
    codes, third = translator.encode(producer, PROMPT), tiny.llama(seed=5)
    for model in (third, tiny.llama(num_hidden_layers=2)):
        with pytest.raises(FingerprintMismatch, match="translator's producer"):
            translator.encode(model, PROMPT)
        with pytest.raises(FingerprintMismatch, match="translator's consumer"):
            TranslatedCache(model, translator, codes)
    with pytest.raises(FingerprintMismatch, match="It is the consumer that the translator was fitted for"):
        translator.encode(consumer, PROMPT)
    with pytest.raises(FingerprintMismatch, match="It is the consumer that the translator was fitted for"):
        list(translator.stream(consumer, PROMPT))
    with pytest.raises(FingerprintMismatch, match="It is the producer that the translator was fitted for"):
        TranslatedCache(producer, translator, codes)
    # The same weights elsewhere are the same model.
    close(translated_logits(translator, (tiny.llama(), changed(tiny.llama()))), translated_logits(translator))


def test_codes_of_another_translator_are_refused() -> None:
    (producer, consumer), translator = models(), fitted()
    for other in (fitted(payload=0.25), fitted(widths=8), fitted(recompute_layers=1), fitted(layers_per_code=4)):
        with pytest.raises(FingerprintMismatch, match="another translator"):
            TranslatedCache(consumer, translator, other.encode(producer, PROMPT))


def test_weights_that_changed_since_are_refused() -> None:
    producer, consumer = tiny.llama(), changed(tiny.llama())
    translator = fit(producer, consumer, **HALF)
    codes = translator.encode(producer, PROMPT)
    cache = TranslatedCache(consumer, translator, codes)
    for model in (producer, consumer):
        with torch.no_grad():
            model.model.layers[2].mlp.down_proj.weight[3, 4] += 0.5
    with pytest.raises(FingerprintMismatch, match="translator's producer"):
        translator.encode(producer, PROMPT)
    with pytest.raises(FingerprintMismatch, match="translator's consumer"):
        TranslatedCache(consumer, translator, codes)
    with pytest.raises(FingerprintMismatch, match="translator's consumer"):
        answer(consumer, PROMPT, cache)
    assert cache.seen == 0


def adapted(seed: int = 0) -> Any:
    model, config = tiny.llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(seed)
    return get_peft_model(model, config).eval()


def test_adapters_belong_to_a_model() -> None:
    producer, consumer = tiny.llama(), adapted()
    translator = fit(producer, consumer, **HALF)
    codes = translator.encode(producer, PROMPT)
    cache = TranslatedCache(consumer, translator, codes)
    with consumer.disable_adapter():
        with pytest.raises(FingerprintMismatch, match="translator's consumer"):
            answer(consumer, PROMPT, cache)
        assert cache.seen == 0
        with pytest.raises(FingerprintMismatch):
            TranslatedCache(consumer, translator, codes)
    with pytest.raises(FingerprintMismatch):
        TranslatedCache(producer, translator, codes)
    with pytest.raises(FingerprintMismatch):
        TranslatedCache(adapted(1), translator, codes)
    with last_layer(compat.base_model(consumer)) as seen:
        answer(consumer, PROMPT, cache, 2)
    assert seen == [1, 1]
    assert cache.report().translated == 44


def test_tokenizers_that_differ_are_refused_with_what_differs() -> None:
    options: dict[str, Any] = {"progress": False}
    texts = [words().decode(text) for text in TEXTS[:4]]
    assert CacheTranslator.fit(*models(), (words(), words()), texts, **options).settings.tokens == 400
    with pytest.raises(FingerprintMismatch, match="producer's and the consumer's differ in"):
        CacheTranslator.fit(*models(), (words(), words(90)), texts, **options)
    with pytest.raises(ConfigError, match="tokenizer"):
        CacheTranslator.fit(*models(), (words(),), texts, **options)
    with pytest.raises(ConfigError, match="tokenizer"):
        fit(*models(), texts)
    with pytest.raises(FingerprintMismatch, match="has 96 tokens"):
        CacheTranslator.fit(models()[0], tiny.llama(vocab_size=90), words(), texts, **options)
    with pytest.raises(ConfigError, match="embeddings have different sizes"):
        fit(models()[0], tiny.llama(vocab_size=128))


def test_pairs_that_can_not_be_translated_are_refused() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    for pair in ((models()[0], tiny.llama(rope_parameters=dynamic)), (tiny.llama(rope_parameters=dynamic), models()[1])):
        with pytest.raises(UnsupportedError):
            fit(*pair)
    with pytest.raises(UnsupportedError, match="heads='each'"):
        fit(tiny.llama(num_key_value_heads=4), models()[1], method="paper", heads="each")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("method", "svd"),
        ("payload", 2.5),
        ("payload", True),
        ("payload", "1/8"),
        ("widths", 7),
        ("widths", ()),
        ("widths", "4"),
        ("widths", {"method": "paper", "widths": (4, 8)}),
        ("layers_per_code", 0),
        ("prefill_share", 1.5),
        ("patch_layers", {"layers_per_code": 1, "patch_layers": [0]}),
        ("patch_layers", {"layers_per_code": 1, "patch_layers": "all"}),
        ("patch_layers", {"layers_per_code": 1, "patch_layers": 2}),
        ("patch_layers", {"layers_per_code": 2, "patch_layers": [2]}),
        ("recompute_layers", 4),
        ("recompute_layers", -1),
        ("recompute_layers", "all"),
        ("metric", "kl"),
        ("heads", "each"),
        ("ranks", (3, 3)),
        ("ranks", {"method": "paper", "ranks": (3,)}),
        ("ranks", {"method": "paper", "ranks": (3, 0)}),
        ("ranks", {"method": "paper", "ranks": (3.0, 3)}),
        ("ranks", {"method": "paper", "ranks": 3}),
        ("ranks", {"method": "paper", "ranks": (3, 17)}),
        ("aligner", "cnn"),
        ("ridge", 0.0),
        ("max_length", 2),
    ],
)
def test_options_that_can_not_be_are_named(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        fit(*models(), TEXTS[:2], **(wrong if isinstance(wrong, dict) else {name: wrong}))


@pytest.mark.parametrize("texts", [[], [[5]], "a text", [5, 6], None])
def test_texts_that_are_none_are_refused(texts: Any) -> None:
    with pytest.raises(ConfigError, match="texts"):
        fit(*models(), texts)


def test_each_process_needs_a_text_that_is_not_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of eight texts one is kept apart, and a process with nothing to read would be waited for forever.
    monkeypatch.setattr(compat, "process", lambda: (0, 8))
    with pytest.raises(ConfigError, match=r"texts: expected at least 8.*got 7"):
        fit(*models(), TEXTS, recompute_layers="auto")


# Stored


@pytest.mark.parametrize(
    "options",
    [
        {"widths": None},
        {"method": "paper", "widths": None},
        {"layers_per_code": 4, "layer_map": (0, 1, 2, 3)},
        {"patch_layers": (1, 3)},
        {"patch_layers": (2,), "aligner": "mlp"},
        {"payload": 0.0},
        {"recompute_layers": 2, "widths": 16},
    ],
    ids=str,
)
def test_what_was_saved_makes_the_same_codes_and_keys(tmp_path: Path, options: dict[str, Any]) -> None:
    (producer, consumer), translator = models(), fitted(**options)
    translator.save_pretrained(tmp_path)
    loaded = CacheTranslator.from_pretrained(tmp_path, producer=producer, consumer=consumer)
    assert (loaded.settings, loaded.route, loaded.digest) == (translator.settings, translator.route, translator.digest)
    codes = translator.encode(producer, PROMPT)
    assert loaded.encode(producer, PROMPT).to_bytes() == codes.to_bytes()
    assert torch.equal(translated_logits(loaded), translated_logits(translator))
    # Codes of the one are read by the other.
    cache = TranslatedCache(consumer, loaded, SemanticCodes.from_bytes(codes.to_bytes()))
    assert torch.equal(logits_of(consumer, PROMPT, cache, 3), translated_logits(translator))


def test_what_is_loaded_is_compared_with_both_models(tmp_path: Path) -> None:
    (producer, consumer), translator = models(), fitted()
    translator.save_pretrained(tmp_path)
    for wrong in ({"producer": consumer}, {"consumer": producer}, {"consumer": tiny.llama(seed=4)}, {"producer": adapted()}):
        with pytest.raises(FingerprintMismatch):
            CacheTranslator.from_pretrained(tmp_path, **wrong)


def test_a_damaged_translator_is_refused(tmp_path: Path) -> None:
    fitted().save_pretrained(tmp_path)
    (tensors,) = tmp_path.glob("*.safetensors")
    content = tensors.read_bytes()
    for damaged in (content[:-100], content[:200] + bytes([content[200] ^ 1]) + content[201:], b""):
        tensors.write_bytes(damaged)
        with pytest.raises(ArtifactError):
            CacheTranslator.from_pretrained(tmp_path)
    tensors.write_bytes(content)
    CacheTranslator.from_pretrained(tmp_path)
    with pytest.raises(ArtifactError):
        CacheTranslator.from_pretrained(tmp_path / "elsewhere")


def test_a_card_says_how_it_was_made(tmp_path: Path) -> None:
    translator = fitted(patch_layers=(2,))
    lines = translator.describe_calibration().splitlines()
    assert lines[:2] == ["| | |", "|---|---|"]
    assert all(line.startswith("| ") and line.endswith(" |") and line.count("|") == 3 for line in lines[2:])
    told = translator.describe_calibration()
    for said in ("8, 800 tokens", "Patched layers | 2 |", "metric loss", "0.5 of bfloat16", "layer.1: ", "prefill"):
        assert said in told
    translator.save_pretrained(tmp_path)
    assert told in (tmp_path / "README.md").read_text()


# Several processes

FITS: list[dict[str, Any]] = [
    {"payload": 0.25, "widths": 24, "metric": "loss"},
    {"payload": 0.25, "widths": 24, "metric": "attention", "layers_per_code": 1},
    {"payload": 2.0, "widths": 24, "metric": "plain", "layers_per_code": 1, "patch_layers": [2]},
]
_WORKER = """
import json, sys
from accelerate import PartialState
from tests.translate.pairs import TEXTS, fit, models
PartialState(cpu=True)
for number, options in enumerate(json.loads(sys.argv[2])):
    fit(*models(), TEXTS[:5], **options).save_pretrained(f"{sys.argv[1]}/{number}")
PartialState().destroy_process_group()
"""


@pytest.mark.full
def test_two_processes_get_the_translators_of_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(tmp_path / str(rank)), json.dumps(FITS)],
            cwd=ROOT,
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
    for number, options in enumerate(FITS):
        first, second = (CacheTranslator.from_pretrained(tmp_path / str(rank) / str(number)) for rank in range(2))
        alone = fit(*models(), TEXTS[:5], **options)
        assert first.digest == second.digest
        assert first.part_heads == alone.part_heads
        assert (first.settings.tokens, first.patched_layers) == (alone.settings.tokens, alone.patched_layers)
        # Directions may be turned around; what comes of them is the same.
        close(translated_logits(first), translated_logits(alone), 1e-3)


# On models that have learned something


@pytest.fixture(scope="module")
def learned() -> Any:
    (base, tokenizer), (tuned, _), (lora, _) = (testbed.load(name) for name in ("base", "tuned", "lora"))
    text = tokenizer.encode(testbed.held_out("prose"))
    texts = [text[start : start + 256] for start in range(0, 12 * 256, 256)]
    prompts = [torch.tensor([text[start : start + 161]]) for start in (8000, 9000, 10000)]
    return base, tuned, lora, tokenizer, texts, prompts


@pytest.mark.parametrize("name", ["tuned", "lora"])
def test_a_trained_consumer_says_nearly_what_it_says_alone(learned: Any, name: str) -> None:
    base, tuned, lora, tokenizer, texts, prompts = learned
    consumer = tuned if name == "tuned" else lora
    translator = CacheTranslator.fit(base, consumer, tokenizer, texts, progress=False)
    inside, found = compat.base_model(consumer), {"own": 0.0, "raw": 0.0, "translated": 0.0}
    for prompt in prompts:
        own, raw = DynamicCache(config=inside.config), DynamicCache(config=inside.config)
        with torch.no_grad():
            true = inside(input_ids=prompt).logits[:, 128:].log_softmax(-1)
            inside(input_ids=prompt[:, :128], past_key_values=own)
            base(input_ids=prompt[:, :128], past_key_values=raw)
        cache = TranslatedCache(consumer, translator, translator.encode(base, prompt))
        cache.prefill(prompt)
        cache.crop(128 - 160)
        for side, held in (("own", own), ("raw", raw), ("translated", cache)):
            with torch.no_grad():
                logs = inside(input_ids=prompt[:, 128:], past_key_values=held).logits.log_softmax(-1)
            found[side] += float((true.exp() * (true - logs)).sum(-1).mean())
        assert cache.report().payload_share < 0.035
    assert found["own"] < 1e-5
    assert found["translated"] < found["raw"] / 4
