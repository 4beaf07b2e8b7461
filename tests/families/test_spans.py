"""Which families run spans of a prompt between others, found out by a pass in which no layer computes: the list of `families.toml`."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.view import why_not_answering
from hf_kvcaches.reuse.partial import StandIn, run_module, with_layers
from hf_kvcaches.reuse.sparse import spans_refused
from tests.families.models import Family, build, families, special

PADDING, TOKENS = (3, 0), 8
ATTENTION = {"full_attention", "sliding_attention"}
# A layer that calls one of these computes with a length that is right for consecutive tokens only.
LENGTHS = frozenset({"get_seq_length", "get_mask_sizes"})


def recording(layer: nn.Module, calls: list[tuple[torch.Tensor, Any]]) -> StandIn:
    """Computes nothing, and records what the layer would be called with."""
    names = compat.parameter_names(type(layer))

    def record(*args: Any, **kwargs: Any) -> torch.Tensor:
        hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        calls.append((hidden, kwargs["attention_mask"] if "attention_mask" in kwargs else args[names.index("attention_mask")]))
        return hidden

    return StandIn(layer, record)


def names_in(kind: type[nn.Module]) -> set[str]:
    function = kind.forward
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return set(getattr(getattr(function, "__code__", None), "co_names", ()))


def visible(kind: str, layer: Any) -> torch.Tensor:
    """Which slots each token of the padded rows sees in a layer, as a sparse pass has it, (batch, 1, tokens, tokens)."""
    padding, slots = torch.tensor(PADDING)[:, None, None, None], torch.arange(TOKENS)
    queries, window = slots[:, None], getattr(layer, "sliding_window", None)
    found = (slots <= queries) & (slots >= padding)
    if kind == "sliding_attention":
        found = found & (slots > queries - window)
    return found


@torch.no_grad()
def runs_spans(model: PreTrainedModel) -> bool:
    """Whether each layer gets the hidden states alone, and the mask that a pass over some tokens would make for them."""
    config, calls = compat.decoder_config(model.config), list[tuple[torch.Tensor, Any]]()
    layers = decoder_layers(model)[2]
    if len(compat.layer_plan(config)) != len(layers) or any(LENGTHS & names_in(type(module)) for module in layers.modules()):
        return False
    twin = with_layers(model, [recording(layer, calls) for layer in layers])
    slots, padding = torch.arange(TOKENS).expand(2, -1), torch.tensor(PADDING)
    real = slots >= padding[:, None]
    run_module(twin, DynamicCache(config=model.config), torch.ones_like(slots), slots - padding[:, None], real.long())
    if len(calls) != len(layers):
        return False
    if {kind for kind, _ in compat.layer_plan(config)} - ATTENTION:
        return False
    for index, (hidden, mask) in enumerate(calls):
        allowed = visible(*compat.layer_plan(config)[index])
        alike = isinstance(mask, torch.Tensor) and mask.shape == allowed.shape
        if hidden.shape != (*slots.shape, config.hidden_size) or not alike:
            return False
        seen = mask if mask.dtype == torch.bool else mask == 0
        if bool(((seen != allowed)[:, 0] & real[..., None]).any()):  # queries of padding may see anything
            return False
    return True


@pytest.mark.full
@pytest.mark.parametrize("family", [each for each in families() if each.name not in special.LEFT_OUT], ids=lambda family: family.name)
def test_the_list_says_which_families_run_spans(family: Family) -> None:
    try:
        model = build(family)
    except Exception as error:  # what can't be built here is named by the suite of families
        pytest.skip(f"{type(error).__name__}: {str(error)[:80]}")
    if why_not_answering(model):
        assert spans_refused(model)
        return
    try:
        found = runs_spans(model)
    except Exception:  # a model may raise anything where it needs more than tokens
        found = False
    assert (spans_refused(model) is None) == found
