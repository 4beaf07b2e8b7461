"""Which models let a cache answer their queries, read off the code of their attention."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any

from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.errors import UnsupportedError

# Layers whose memory has a bound of its own, so that a cache which bounds or compresses the others may leave them to transformers.
_BOUNDED = frozenset({"sliding_attention", "chunked_attention", "hybrid_sliding", "linear_attention", "conv", "dummy"})
# With which attention modules make keys and values of the latents that a cache returns.
EXPANSION = "expand_kv"


def require_plain_decoder(model: PreTrainedModel, what: str) -> None:
    """Refuses a model with an encoder, and one that runs layers in loops.

    Args:
        what: What can't be used with it, as the subject of the message.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{what} needs a decoder-only model, and {type(model).__name__} is an encoder-decoder, whose cross-attention keeps keys of "
            "another text. Use GrowingCache, or leave past_key_values out."
        )
    if getattr(compat.decoder_config(model.config), "n_recurrent_loops", 1) > 1:
        raise UnsupportedError(
            f"{what} needs a model that runs each layer once, and {type(model).__name__} runs some in loops, with keys of each loop. Use "
            "GrowingCache, or leave past_key_values out."
        )


def require_answering(model: PreTrainedModel, what: str, *, latents: bool = False) -> None:
    """Refuses a model whose queries a cache can't answer.

    Args:
        latents: Whether it can where keys and values are expanded from what it holds (multi-head latent attention).
    """
    require_plain_decoder(model, what)
    reason = why_not_answering(model, latents=latents)
    if reason is not None:
        raise UnsupportedError(f"{what} needs a cache that answers the model's queries, which is not possible: {reason}. Use DynamicCache.")


def why_not_answering(model: PreTrainedModel, *, latents: bool = False) -> str | None:
    """Why a cache can't answer a model's queries in place of its attention; None where it can.

    Args:
        latents: As in `require_answering`.
    """
    name, config = type(model).__name__, compat.decoder_config(model.config)
    if not compat.can_switch_attention(model):
        return f"{name} computes attention itself instead of looking it up in transformers' AttentionInterface"
    unbounded = sorted({kind for kind, _ in compat.layer_plan(config)} - _BOUNDED - {"full_attention"})
    if unbounded:
        return f"{name} has layers of the types {unbounded}, which keep tokens in a form of their own"
    if getattr(config, "num_kv_shared_layers", 0) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        return f"{name} has layers that attend to the keys of other layers"
    if getattr(config, "cross_attention_layers", None):
        return f"{name} has layers of cross-attention in its cache"
    decoder = compat.modules_of(model.get_decoder())
    kinds: set[Any] = {type(module) for module in decoder if hasattr(module, "layer_idx")}
    return next((reason for kind in sorted(kinds, key=lambda kind: kind.__name__) if (reason := _why_not(kind, latents))), None)


@cache
def _why_not(kind: Any, latents: bool) -> str | None:
    """Why a cache can't answer the queries of modules of this class; None where it can, or where they have no keys."""
    try:
        forward = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError):  # defined in a shell, say
        return None
    returned = _names_from(forward, ("update", EXPANSION) if latents else ("update",))
    if not returned:
        return None
    if not any(isinstance(node, ast.Attribute) and node.attr == "get_interface" for node in ast.walk(forward)):
        return f"{kind.__name__} computes attention itself instead of looking it up in transformers' AttentionInterface"
    if any(_compares_implementation(node) for node in ast.walk(forward)):
        return f"{kind.__name__} makes a mask of its own for some implementations of attention"
    # What `update` returns may be given to the attention function and to nothing else.
    allowed = {
        id(name)
        for node in ast.walk(forward)
        if _is_attention_call(node) or _keeps_for_other_layers(node) or (latents and _is_call_of(node, (EXPANSION,)))
        for name in ast.walk(node)
    }
    line = min(line for _, line in returned)
    names = {name for name, _ in returned}
    for node in ast.walk(forward):
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and node.id in names
            and node.lineno > line
            and id(node) not in allowed
        ):
            return f"{kind.__name__} computes with keys and values after they are in the cache"
    return None


def _is_call_of(node: ast.AST, methods: tuple[str, ...]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods


def _names_from(forward: ast.AST, methods: tuple[str, ...]) -> list[tuple[str, int]]:
    """The variables that take what some methods return, such as a cache's `update`, with the last line of the call."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(forward):
        if isinstance(node, ast.Assign) and _is_call_of(node.value, methods):
            targets = [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            found += [(name, node.end_lineno or 0) for name in targets]
    return found


def _is_attention_call(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return name == "attention_interface" or name.endswith("_attn")


def _keeps_for_other_layers(node: ast.AST) -> bool:
    """Whether this puts keys and values into a dict, from which layers take them that share them: where a config has such layers."""
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript) and isinstance(node.value, ast.Tuple)


def _compares_implementation(node: ast.AST) -> bool:
    """Whether this asks if the name of the implementation is one of several: how models ask if they have to mask themselves."""
    return (
        isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Attribute)
        and node.left.attr == "_attn_implementation"
        and isinstance(node.ops[0], ast.In | ast.NotIn)
    )
