"""Tiny models, tokenizers and adapters, and what tells two fingerprints apart."""

from collections.abc import Callable

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_kvcaches.core.fingerprint import ModelFingerprint

Change = Callable[[torch.nn.Module], object]
COMPONENTS = ("weights", "adapters", "settings", "tokenizer")
TINY = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**TINY, "num_key_value_heads": 2, "head_dim": 8, **changes})).eval()


def tokenizer(size: int = 30) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    text = ["the sea and the shore", "the ship sails on the sea", "a sailor sees the shore"]
    backend.train_from_iterator(text, trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def lora(**changes: object) -> LoraConfig:
    return LoraConfig(**{"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8, "init_lora_weights": False, **changes})


def two_adapters() -> PeftModel:
    torch.manual_seed(1)
    model = get_peft_model(llama(), lora(), adapter_name="law")
    model.add_adapter("medical", lora())
    return model.eval()


def changed(before: ModelFingerprint, after: ModelFingerprint) -> set[str]:
    return {name for name in COMPONENTS if getattr(before, name) != getattr(after, name)}


def nudge(name: str) -> Change:
    def change(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter(name).view(-1)[5] += 0.5

    return change
