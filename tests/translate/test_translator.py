"""`CacheTranslator`: what it is fitted to, what it sends, what it refuses, and that it is the same elsewhere."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
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
from hf_kvcaches.translate.fit import TranslatorConfig
from hf_kvcaches.translate.states import Maps
from hf_kvcaches.translate.translator import CacheTranslator
from tests import testbed, tiny
from tests.translate import pairs
from tests.translate.pairs import HALF, TEXTS, changed, close, fit, fitted, last_layer, lossless, models, reference
from tests.warmstart.warm import answer, left_padded, logits_of, words

ROOT = Path(__file__).parents[2]
PROMPT = tiny.ids(1, 45, seed=1)
OTHER = tiny.ids(1, 31, seed=2)


def translated_logits(translator: CacheTranslator, pair: Any = None, ids: torch.Tensor = PROMPT, new: int = 3) -> torch.Tensor:
    producer, consumer = pair or models()
    cache = TranslatedCache(consumer, translator, translator.encode(producer, ids))
    got = logits_of(compat.base_model(consumer), ids, cache, new)
    assert cache.report().translated == ids.shape[1] - 1
    return got


# What is sent


def test_padding_is_not_sent() -> None:
    (producer, _), translator = models(), fitted(payload=0.25)
    ids, mask = torch.nn.functional.pad(PROMPT, (13, 0)), torch.nn.functional.pad(torch.ones_like(PROMPT), (13, 0))
    assert translator.encode(producer, ids, mask).head == translator.encode(producer, PROMPT).head
    assert translator.encode(producer, *left_padded(PROMPT, OTHER, OTHER[:, :2])).head.tokens == 40 + 26 + 0


def test_prompts_are_given_as_tensors_or_lists() -> None:
    (producer, _), translator = models(), fitted()
    expected = translator.encode(producer, PROMPT).to_bytes()
    for given in (PROMPT[0], PROMPT.tolist(), PROMPT[0].tolist(), PROMPT.int()):
        assert translator.encode(producer, given).to_bytes() == expected
    assert translator.encode(producer, PROMPT, torch.ones_like(PROMPT)).to_bytes() == expected
    for wrong in (PROMPT[:, :1], [[5]], None):
        with pytest.raises(ConfigError, match="input_ids"):
            translator.encode(producer, wrong)
    with pytest.raises(ConfigError, match="attention_mask"):
        translator.encode(producer, PROMPT, torch.ones(1, 44))


@pytest.mark.parametrize("options", [{}, {"payload": 0.0}, {"payload": 2.0}, {"layers_per_code": 4}], ids=str)
def test_what_is_streamed_are_the_bytes_of_encode(options: dict[str, Any]) -> None:
    producer, translator = models()[0], fitted(**options)
    ids, mask = left_padded(PROMPT, OTHER)
    assert b"".join(translator.stream(producer, ids, mask)) == translator.encode(producer, ids, mask).to_bytes()


def test_a_part_is_streamed_before_the_producer_has_its_next_layer() -> None:
    producer, translator = tiny.llama(), fitted()
    go_on, reached = [threading.Event() for _ in range(4)], list[int]()

    def wait(index: int) -> None:
        reached.append(index)
        assert go_on[index].wait(20)

    for index, layer in enumerate(producer.model.layers):
        layer.register_forward_pre_hook(tiny.observing(lambda *_, index=index: wait(index)))
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
    # What goes wrong in the producer is raised where the stream is read.
    producer.model.layers[2].register_forward_pre_hook(tiny.observing(lambda *_: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        list(translator.stream(producer, PROMPT))


def test_the_producer_runs_no_layer_that_is_not_sent_and_keeps_nothing() -> None:
    producer = models()[0]
    with last_layer(producer) as seen:
        fitted(payload=0.0).encode(producer, PROMPT)
    ran: list[int] = []
    handle = producer.model.layers[-1].mlp.register_forward_pre_hook(tiny.observing(lambda *_: ran.append(1)))
    fitted().encode(producer, PROMPT)
    handle.remove()
    assert seen == ran == []  # behind the last keys and values the pass ends


def test_a_process_that_only_encodes_needs_neither_the_consumer_nor_the_decoders(tmp_path: Path) -> None:
    (producer, consumer), translator = models(), fitted()
    translator.save_pretrained(tmp_path)
    encoder = pickle.loads(pickle.dumps(CacheTranslator.from_pretrained(tmp_path, producer=producer).encoder))
    assert encoder.encode(producer, PROMPT).to_bytes() == translator.encode(producer, PROMPT).to_bytes()
    assert b"".join(encoder.stream(producer, PROMPT)) == translator.encode(producer, PROMPT).to_bytes()
    with pytest.raises(FingerprintMismatch, match="It is the consumer"):
        encoder.encode(consumer, PROMPT)


def test_threads_encode_with_a_model_in_training_mode_at_a_time_without_dropout() -> None:
    model = tiny.build(LlamaConfig(**{**tiny._SHAPE, "attention_dropout": 0.5}))
    translator, prompts = lossless(model), [tiny.ids(1, 20 + length, seed=length) for length in range(8)]
    expected = [translator.encode(model, ids).to_bytes() for ids in prompts]
    model.train()
    with ThreadPoolExecutor(4) as executor:
        found = list(executor.map(lambda ids: translator.encode(model, ids).to_bytes(), prompts * 3))
        streamed = list(executor.map(lambda ids: b"".join(translator.stream(model, ids)), prompts))
    assert found == expected * 3
    assert streamed == expected
    assert all(module.training for module in model.modules())


def test_weights_of_encoders_and_decoders_are_placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (producer, consumer), translator = models(), fit(*models(), **HALF)
    found: list[Any] = []
    placed = Maps.placed
    monkeypatch.setattr(Maps, "placed", lambda *args: found.append(placed(*args)) or found[-1])
    for _ in range(3):
        TranslatedCache(consumer, translator, translator.encode(producer, PROMPT)).prefill(PROMPT)
    assert len(found) == 3 * (3 + 3)
    assert len({id(weights) for weights in found}) == 3 + 3


# What it is fitted to


@pytest.mark.parametrize("run", [1, 2, 3])
def test_layers_that_the_consumer_runs_are_exact(run: int) -> None:
    options = {"payload": 0.15, "metric": "plain"}
    translator, without = fitted(recompute_layers=run, **options), fitted(**options)
    own = [torch.cat(made[:2], 2)[0] for made in pairs.made_by(models()[1], PROMPT[:, :-1])]
    errors, before = (
        [pairs.error(torch.cat(states, 1), own[layer]) for layer, states in pairs.filled(each, *models(), PROMPT).items()]
        for each in (translator, without)
    )
    assert max(errors[: run + 1]) < 1e-5
    assert min([1.0, *errors[run + 1 :]]) > 1e-3
    assert all(one <= other for one, other in zip(errors, before, strict=True))
    codes = translator.encode(models()[0], PROMPT)
    assert len(codes) == 3 - run
    assert codes.nbytes <= without.encode(models()[0], PROMPT).nbytes
    cache = TranslatedCache(models()[1], translator, codes)
    with last_layer(models()[1]) as seen:
        logits_of(models()[1], PROMPT, cache, 2)
    # With all layers its own, the last one's keys and values come of a pass that ends there.
    # The first four tokens pass through all layers.
    assert seen == [44, 4, 1, 1] if run == 3 else [4, 1, 1]
    assert cache.report().run_layers == run


@pytest.mark.parametrize("options", [{}, {"layers_per_code": 4}, {"metric": "plain"}], ids=str)
@pytest.mark.parametrize("payload", [0.15, 0.3, 0.45])
def test_payload_is_the_share_of_bytes_as_they_are_sent(payload: float, options: dict[str, Any]) -> None:
    translator = fitted(**{"payload": payload, **options})
    ids = tiny.ids(1, 505, seed=3)
    cache = TranslatedCache(models()[1], translator, codes := translator.encode(models()[0], ids))
    cache.prefill(ids)
    # 4 layers of 2 heads of 8 numbers, keys and values, 2 bytes each; what the heads take is for all tokens together.
    sent, parts = sum(part.codes.numel() for part in codes), len(codes)
    assert sent / 500 / 256 == pytest.approx(payload, rel=0.1)
    assert codes.nbytes - sent < 300 + 300 * parts
    assert cache.report().payload_share == codes.nbytes / 504 / 256


def test_other_widths_are_translated_too() -> None:
    producer, consumer = tiny.llama(hidden_size=48, num_attention_heads=6, num_key_value_heads=3, head_dim=8), tiny.llama(seed=1)
    translator = fit(producer, consumer, **HALF | {"payload": 2.0})
    expected = logits_of(consumer, PROMPT, reference(translator, PROMPT, (producer, consumer)), 3)
    close(translated_logits(translator, (producer, consumer)), expected)


# What is refused


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_model_that_computes_no_numbers_is_refused(role: str) -> None:
    pair = {"producer": tiny.llama(), "consumer": tiny.llama(seed=1)}
    pair[role].model.layers[2].self_attn.k_proj.weight.data[3, 4] = torch.inf
    with pytest.raises(UnsupportedError, match=f"{role}: its layer 2 has infinities or NaN"):
        fit(*pair.values(), **HALF, metric="plain")


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


def test_another_model_is_refused_and_models_in_each_others_place() -> None:
    (producer, consumer), translator = models(), fitted()
    codes = translator.encode(producer, PROMPT)
    for model in (tiny.llama(seed=5), tiny.llama(num_hidden_layers=2)):
        with pytest.raises(FingerprintMismatch, match="translator's producer"):
            translator.encode(model, PROMPT)
        with pytest.raises(FingerprintMismatch, match="translator's consumer"):
            TranslatedCache(model, translator, codes)
    for encode in (translator.encode, lambda *prompt: list(translator.stream(*prompt))):
        with pytest.raises(FingerprintMismatch, match="It is the consumer that the translator was fitted for"):
            encode(consumer, PROMPT)
    with pytest.raises(FingerprintMismatch, match="It is the producer that the translator was fitted for"):
        TranslatedCache(producer, translator, codes)
    # The same weights elsewhere are the same model.
    close(translated_logits(translator, (tiny.llama(), changed(tiny.llama()))), translated_logits(translator))


def test_codes_of_another_translator_are_refused() -> None:
    (producer, consumer), translator = models(), fitted()
    for other in (fitted(payload=0.25), fitted(exact_tokens=0), fitted(recompute_layers=1), fitted(layers_per_code=4)):
        with pytest.raises(FingerprintMismatch, match="another translator"):
            TranslatedCache(consumer, translator, other.encode(producer, PROMPT))


def test_adapters_belong_to_a_model() -> None:
    producer, *consumers = (tiny.llama() for _ in range(3))  # whose making seeds what adapters are drawn from
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    consumer, other = (get_peft_model(model, config).eval() for model in consumers)
    translator = fit(producer, consumer, **HALF)
    codes = translator.encode(producer, PROMPT)
    for wrong in (producer, other):
        with pytest.raises(FingerprintMismatch):
            TranslatedCache(wrong, translator, codes)
    cache = TranslatedCache(consumer, translator, codes)
    with last_layer(compat.base_model(consumer)) as seen:
        answer(consumer, PROMPT, cache, 2)
    assert seen == [4, 1, 1]
    assert cache.report().translated == 44


def test_tokenizers_that_differ_are_refused_with_what_differs() -> None:
    (producer, consumer), texts = models(), [words().decode(text) for text in TEXTS[:4]]
    assert CacheTranslator.fit(producer, consumer, (words(), words()), texts, progress=False).settings.tokens == 400
    for other, tokenizer, error, match in (
        (consumer, (words(), words(90)), FingerprintMismatch, "producer's and the consumer's differ in"),
        (consumer, (words(),), ConfigError, "tokenizer"),
        (consumer, None, ConfigError, "tokenizer"),
        (tiny.llama(vocab_size=90), words(), FingerprintMismatch, "has 96 tokens"),
        (tiny.llama(vocab_size=128), None, ConfigError, "embeddings have different sizes"),
    ):
        with pytest.raises(error, match=match):
            CacheTranslator.fit(producer, other, tokenizer, texts, progress=False)


def test_pairs_that_can_not_be_translated_are_refused() -> None:
    dynamic = tiny.llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    for pair in ((models()[0], dynamic), (dynamic, models()[1])):
        with pytest.raises(UnsupportedError):
            fit(*pair)


WRONG: dict[str, tuple[Any, ...]] = {
    "payload": (0.8, 2.5, True, "1/8"),
    "memory": ("a lot", None, 1000),
    "recompute_layers": (4, -1, "all"),
    "layers_per_code": (0,),
    "prefill_share": (1.5,),
    "exact_tokens": (-1,),
    "metric": ("kl",),
    "ridge": (0.0,),
    "max_length": (2,),
}


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name, values in WRONG.items() for wrong in values])
def test_options_that_can_not_be_are_named(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        fit(*models(), TEXTS[:2], **{name: wrong})


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


OF_LAYERS: list[dict[str, Any]] = [{"layers_per_code": 4, "layer_map": (0, 1, 2, 3)}, {"recompute_layers": 2, "payload": 0.2}]


@pytest.mark.parametrize("options", [{}, {"payload": 2.0}, {"payload": 0.0}, *OF_LAYERS], ids=str)
def test_what_was_saved_makes_the_same_codes_and_keys(tmp_path: Path, options: dict[str, Any]) -> None:
    (producer, consumer), translator = models(), fitted(**options)
    translator.save_pretrained(tmp_path)
    loaded = CacheTranslator.from_pretrained(tmp_path, producer=producer, consumer=consumer)
    assert (loaded.settings, loaded.digest) == (translator.settings, translator.digest)
    codes = translator.encode(producer, PROMPT)
    assert loaded.encode(producer, PROMPT).to_bytes() == codes.to_bytes()
    assert torch.equal(translated_logits(loaded), translated_logits(translator))
    # Codes of the one are read by the other.
    cache = TranslatedCache(consumer, loaded, SemanticCodes.from_bytes(codes.to_bytes()))
    assert torch.equal(logits_of(consumer, PROMPT, cache, 3), translated_logits(translator))
    for wrong in ({"producer": consumer}, {"consumer": producer}, {"consumer": tiny.llama(seed=4)}):
        with pytest.raises(FingerprintMismatch):
            CacheTranslator.from_pretrained(tmp_path, **wrong)


def test_stored_maps_that_lack_a_part_or_are_in_another_order_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = fitted().maps
    tensors, metadata = maps.tensors(), maps.metadata()
    with pytest.raises(ArtifactError, match="don't fit each other"):
        Maps.restore(tensors, metadata | {"encoders": metadata["encoders"][::-1]})
    for missing in ("decoders.2.side", "decoders.2.codes", "decoders.2.bias", "encoders.1.shift", "coding.1.order", "coding.tables.shifts"):
        monkeypatch.setattr(Maps, "tensors", lambda _, missing=missing: {name: tensors[name] for name in tensors.keys() - {missing}})
        fitted().save_pretrained(tmp_path)
        with pytest.raises(ArtifactError):
            CacheTranslator.from_pretrained(tmp_path)


def test_a_card_says_how_it_was_made(tmp_path: Path) -> None:
    translator = fitted()
    told = translator.describe_calibration()
    assert told.splitlines()[:2] == ["| | |", "|---|---|"]
    assert all(line.startswith("| ") and line.endswith(" |") and line.count("|") == 3 for line in told.splitlines()[2:])
    for said in ("8, 800 tokens", "Metric | loss |", "0.5 of bfloat16", "layer.1: ", "in all", "bytes of a token"):
        assert said in told
    translator.save_pretrained(tmp_path)
    assert told in (tmp_path / "README.md").read_text()


def test_the_guide_has_every_option_with_its_default() -> None:
    guide, of_fit = (ROOT / "docs" / "translation.md").read_text(encoding="utf-8"), inspect.signature(CacheTranslator.fit).parameters
    assert len(of_fit) == 10
    for name in [*list(of_fit)[4:], *inspect.signature(TranslatorConfig).parameters]:
        assert name == "config" or re.search(rf"^\|.*`{name}`", guide, flags=re.MULTILINE), name
    assert f"| `payload` | {of_fit['payload'].default} |" in guide
    assert f"| `layers_per_code` | {TranslatorConfig().layers_per_code} |" in guide
    assert f"`config.prefill_share` ({TranslatorConfig().prefill_share})" in guide


# Several processes

FITS: list[dict[str, Any]] = [
    {"payload": 0.25, "metric": "loss"},
    {"payload": 0.25, "metric": "plain", "layers_per_code": 1},
    {"payload": 2.0, "metric": "plain", "layers_per_code": 1},
    {"payload": 0.25, "metric": "loss", "texts": [text[: 6 + 94 * (number % 2 == 0)] for number, text in enumerate(TEXTS[:5])]},
]
_WORKER = """
import json, sys
from accelerate import PartialState
from tests.translate.pairs import TEXTS, fit, models
PartialState(cpu=True)
for number, options in enumerate(json.loads(sys.argv[2])):
    fit(*models(), **{"texts": TEXTS[:5]} | options).save_pretrained(f"{sys.argv[1]}/{number}")
PartialState().destroy_process_group()
"""


@pytest.mark.full
def test_two_processes_get_the_translators_of_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    workers = []
    for rank in ("0", "1"):
        command = [sys.executable, "-c", _WORKER, str(tmp_path / rank), json.dumps(FITS)]
        environment = os.environ | world | {"RANK": rank, "LOCAL_RANK": rank}
        workers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
    for number, options in enumerate(FITS):
        first, second = (CacheTranslator.from_pretrained(tmp_path / str(rank) / str(number)) for rank in range(2))
        alone = fit(*models(), **{"texts": TEXTS[:5]} | options)
        assert first.digest == second.digest
        assert first.maps.names == alone.maps.names
        assert first.settings.tokens == alone.settings.tokens
        # Directions may be turned around; what comes of them is the same.
        close(translated_logits(first), translated_logits(alone), 1e-3 if options["payload"] == 2 else 0.05)


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
