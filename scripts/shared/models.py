"""Models with random weights, for times, and their memory."""

from __future__ import annotations

import copy
import itertools
import os
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SCORES_SPREAD = 3.0  # standard deviation of attention scores


def random_llama(device: torch.device, **sizes: int) -> LlamaForCausalLM:
    """A Llama with random weights, the same in each process.

    Args:
        **sizes: Of `LlamaConfig`.
    """
    torch.manual_seed(0)
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    with device:
        return LlamaForCausalLM(LlamaConfig(max_position_embeddings=65536, **tokens, **sizes))


@dataclass(frozen=True)
class Shape:
    """A Llama."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def kv_heads(self, kv: str) -> int:
        """Of multi-head attention (`mha`), or with four query heads to a key head (`gqa`)."""
        return self.heads if kv == "mha" else max(1, self.heads // 4)


@dataclass(frozen=True)
class Pair:
    """The same weights twice: with the model's attention as it is, and as caches of this package switch it."""

    plain: PreTrainedModel
    switched: PreTrainedModel

    @classmethod
    def of(cls, model: PreTrainedModel, device: torch.device) -> Pair:
        model = model.to(device).eval()
        weights = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
        return cls(model, copy.deepcopy(model, weights))

    @classmethod
    def random(cls, shape: Shape, kv: str, device: torch.device, dtype: str = "float32", *, sharp: bool = False) -> Pair:
        """A Llama with random weights; `sharp`: whose attention differs from token to token, as in a trained model."""
        sizes = {"vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "intermediate_size": shape.intermediate}
        heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads(kv), "head_dim": shape.head_dim}
        model = random_llama(device, num_hidden_layers=shape.layers, **sizes, **heads)
        for layer in model.model.layers if sharp else ():
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                torch.nn.init.normal_(projection.weight, std=(SCORES_SPREAD / shape.hidden) ** 0.5)
        return cls.of(model.to(getattr(torch, dtype)), device)

    @property
    def device(self) -> torch.device:
        return self.plain.device


def random_ids(vocabulary: int, *shape: int, seed: int) -> torch.Tensor:
    """Token ids but for 0, which is padding."""
    return torch.randint(1, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """For a model with random weights: each token is a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocabulary)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0")


def bytes_free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    names = ("SC_AVPHYS_PAGES", "SC_PAGE_SIZE")
    return os.sysconf(names[0]) * os.sysconf(names[1]) if all(name in os.sysconf_names for name in names) else 2**62
