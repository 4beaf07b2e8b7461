"""The rows of the matrix in which the model is not a plain one: wrapped, spread, compiled, trained."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from tests.conformance import models
from tests.conformance.driving import close, feed, generate, reference, tokens
from tests.conformance.entries import Entry

PROMPT = tokens(9, seed=1)
PARTLY_ON_DISK = {
    **dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "model.layers.0", "lm_head"), models.DEVICE.type),
    "model.layers.1": "disk",
}


def _with_lora(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    wrapped = get_peft_model(models.build(family, dtype), LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return wrapped.eval()


def peft_wrapped(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """The cache is built from the wrapper or from what it wraps; the wrapper generates."""
    family, prompt = models.family_of(model), PROMPT
    wrapped, untouched = _with_lora(family, dtype), _with_lora(family, dtype)
    for source in (wrapped, wrapped.get_base_model()):
        output = generate(wrapped, prompt, entry.make(source))
        plain = (untouched, DynamicCache(config=untouched.config)) if entry.lossless else (wrapped, entry.make(wrapped))
        expected = generate(plain[0], prompt, plain[1])
        assert output.sequences.tolist() == expected.sequences.tolist()
        close(entry, dtype, torch.stack(output.logits, 1), torch.stack(expected.logits, 1))
    with wrapped.disable_adapter(), torch.no_grad():
        without = wrapped(prompt).logits[:, -1]
    assert not torch.allclose(without, output.logits[0], atol=0.1), "the adapter changes nothing, so the row shows nothing"


def device_map(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Loaded in one place, and with a layer that lives on disk and only visits."""
    for placement in ({"": models.DEVICE.type}, PARTLY_ON_DISK):
        with tempfile.TemporaryDirectory() as folder:
            models.twin_of(model).save_pretrained(folder)
            offload = Path(folder) / "offload"
            loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=placement, offload_folder=offload, dtype=dtype)
            loaded.generation_config = model.generation_config
            plain, other = reference(entry, model)
            output, expected = generate(loaded, PROMPT, entry.make(loaded)), generate(plain, PROMPT, other)
            assert output.sequences.tolist() == expected.sequences.tolist()
            close(entry, dtype, torch.stack(output.logits, 1), torch.stack(expected.logits, 1))


def device_map_and_saving(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """A cache that was saved comes back to a model one of whose layers lives on disk."""
    text, more = tokens(9, seed=1), tokens(4, seed=2)
    with tempfile.TemporaryDirectory() as folder:
        models.twin_of(model).save_pretrained(folder)
        offload = Path(folder) / "offload"
        loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=PARTLY_ON_DISK, offload_folder=offload, dtype=dtype)
        cache = entry.make(loaded)
        feed(loaded, cache, text, [9])
        cache.save(Path(folder) / "cache.safetensors")
        again = type(getattr(cache, "holder", None) or cache).load(Path(folder) / "cache.safetensors", loaded)
        plain, other = reference(entry, model)
        close(entry, dtype, feed(loaded, again, more), feed(plain, other, torch.cat([text, more], dim=1), [9, 1, 1, 1, 1])[:, 1:])


def compiled_forward(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """The forward pass compiled in place, for `generate` and then in inference mode. One layer, because compiling is slow."""
    torch.compiler.reset()
    own, untouched = (models.build(models.family_of(model), dtype, num_hidden_layers=1) for _ in range(2))
    plain, other = (untouched, DynamicCache(config=untouched.config)) if entry.lossless else (untouched, entry.make(untouched))
    expected = generate(plain, PROMPT, other, new=4)
    own.forward = torch.compile(own.forward, backend="eager", dynamic=True)
    try:
        cache = entry.make(own)
        with torch.inference_mode():
            output = generate(own, PROMPT, cache, new=4)
        assert output.sequences.tolist() == expected.sequences.tolist()
        close(entry, dtype, torch.stack(output.logits, 1), torch.stack(expected.logits, 1))
        more = tokens(3, seed=2)
        close(entry, dtype, feed(own, cache, more), feed(plain, other, more), "logits outside inference mode")
    finally:
        torch.compiler.reset()


def _gradients(model: PreTrainedModel, cache: Any, trained: str) -> dict[str, torch.Tensor]:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    text, start, loss = tokens(12, seed=3), 0, torch.zeros((), device=models.DEVICE)
    for span in (5, 3, 2, 2):
        logits = model(input_ids=text[:, start : start + span], past_key_values=cache, use_cache=True).logits
        loss = loss + logits.float().log_softmax(-1)[..., 7].sum()
        start += span
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def gradients(entry: Entry, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Training through a text in pieces: all weights, and only queries, as an adapter might."""
    family = models.family_of(model)
    for trained in ("", "q_proj"):
        own = models.build(family, dtype)
        actual = _gradients(own, entry.make(own), trained)
        other = models.build(family, dtype)
        expected = _gradients(other, DynamicCache(config=other.config) if entry.lossless else entry.make(other), trained)
        assert actual.keys() == expected.keys() != set()
        assert any(float(gradient.abs().max()) > 0.1 for gradient in expected.values())
        for name, gradient in expected.items():
            close(entry, dtype, actual[name] / (1 + gradient.abs().max()), gradient / (1 + gradient.abs().max()), f"gradient of {name}")


MODEL = (peft_wrapped, device_map, device_map_and_saving, compiled_forward, gradients)
