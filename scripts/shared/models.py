"""Models with random weights, for times."""

from __future__ import annotations

import copy
import itertools
import os
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SCORES_SPREAD = 3.0  # standard deviation of attention scores


def with_attention(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """A copy of a model with the same tensors, which attends with a registered function."""
    weights = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    other = copy.deepcopy(model, weights)
    other.set_attn_implementation(name)
    return other


@dataclass(frozen=True)
class Shape:
    """A Llama as large as Qwen3-0.6B, with a small vocabulary so that the head costs nothing."""

    hidden: int = 1024
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 3072
    vocabulary: int = 2048

    def labels(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("hidden", "layers", "heads", "kv_heads", "head_dim")}

    def random(self, device: torch.device, dtype: str = "float32", *, sharp: bool = False) -> PreTrainedModel:
        """Random weights, the same in each process; `sharp`: whose attention differs from token to token, as in a trained model."""
        torch.manual_seed(0)
        tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "max_position_embeddings": 131072}
        heads = {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim}
        sizes = {"vocab_size": self.vocabulary, "hidden_size": self.hidden, "intermediate_size": self.intermediate}
        with device:
            model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=self.layers, **sizes, **heads, **tokens))
        for layer in model.model.layers if sharp else ():
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                torch.nn.init.normal_(projection.weight, std=(SCORES_SPREAD / self.hidden) ** 0.5)
        return model.to(device, getattr(torch, dtype)).eval()


def random_ids(vocabulary: int, *shape: int, seed: int) -> torch.Tensor:
    """Token ids but for 0, which is padding."""
    return torch.randint(1, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """For a model with random weights: each token is a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocabulary)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


def bytes_free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    names = ("SC_AVPHYS_PAGES", "SC_PAGE_SIZE")
    return os.sysconf(names[0]) * os.sysconf(names[1]) if all(name in os.sysconf_names for name in names) else 2**62
