"""What a cache changes: the same tokens through the full cache and through another one, the logits compared step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError, UnsupportedError, whole_number
from hf_kvcaches.evaluate.measures import agreement, cache_bytes, divergence
from hf_kvcaches.evaluate.runner import ModelRunner, Seconds, TextStep, evaluating


@dataclass(frozen=True)
class VerifyReport:
    """How far a cache's logits are from those of the full cache. Holds per-step numbers only, no tensors.

    A row of the batch takes part in a step until the step after its end-of-sequence token. Step 0 is the prompt's last token.

    Args:
        kl: For each step KL(full || cache) in nats, the mean over the rows that take part. Not-a-number counts as infinite.
        max_kl: The greatest KL of any one row at any step, so that a batch can't hide a bad row.
        agreement: Share of all (row, step) pairs with the same most likely token.
        first_divergence: The first step at which the most likely token of any row differs, None if there is no such step.
        max_logit_error: The greatest absolute difference of any logit.
        tokens: The greedy continuation under the full cache, one tuple per row, end-of-sequence token included.
        bytes: What the cache under test has allocated at the end.
        reference_bytes: What the full cache has allocated at the end.
        seconds: Time with the cache under test.
        reference_seconds: Time with the full cache, which runs first and so also pays for whatever warms up.
    """

    kl: tuple[float, ...]
    max_kl: float
    agreement: float
    first_divergence: int | None
    max_logit_error: float
    tokens: tuple[tuple[int, ...], ...]
    bytes: int
    reference_bytes: int
    seconds: Seconds
    reference_seconds: Seconds

    @property
    def steps(self) -> int:
        """How many next-token distributions were compared: `max_new_tokens`, or fewer when every row ended."""
        return len(self.kl)

    @property
    def mean_kl(self) -> float:
        """The mean of `kl` over the steps."""
        return sum(self.kl) / len(self.kl)

    def as_dict(self) -> dict[str, Any]:
        """Plain Python values, the derived ones included."""
        return {"steps": self.steps, "mean_kl": self.mean_kl, **asdict(self)}

    def __str__(self) -> str:
        share = f"{self.bytes / self.reference_bytes:.1%} of full" if self.reference_bytes else ""
        rows = [
            ("", "full cache", "cache", ""),
            ("bytes", f"{self.reference_bytes:,}", f"{self.bytes:,}", share),
            ("prefill s", f"{self.reference_seconds.prefill:.4f}", f"{self.seconds.prefill:.4f}", ""),
            ("decode s", f"{self.reference_seconds.decode:.4f}", f"{self.seconds.decode:.4f}", f"{self.steps} steps"),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {note}".rstrip() for a, b, c, note in rows]
        first = "never" if self.first_divergence is None else f"step {self.first_divergence}"
        lines.append(
            f"KL(full || cache) in nats: mean {self.mean_kl:.3g}, max {self.max_kl:.3g}; max logit error {self.max_logit_error:.3g}"
        )
        lines.append(f"same most likely token: {self.agreement:.2%}; first divergence: {first}")
        return "\n".join(lines)


@torch.no_grad()
def verify(
    model: Any,
    make_cache: Callable[[], Cache],
    inputs: Mapping[str, torch.Tensor] | torch.Tensor,
    max_new_tokens: int = 64,
    *,
    prefill_chunk_size: int | None = None,
    position_ids: bool = True,
) -> VerifyReport:
    """Compares a cache with the full cache, on what the model itself would write.

    First the model continues `inputs` greedily with a `DynamicCache`: the most likely token each time, no logits processors.
    Then the same tokens go through the cache under test, the prompt first and each token after it, and the logits of every
    step are compared. The model is called as `generate` calls it, so a cache that takes over the prefill does so here too.

    A row that meets the model's end-of-sequence token (from its generation config) is padded from then on and no longer
    compared; the run ends early once all rows have. Both runs see the same padding.

    The logits of the first run, `steps x batch x vocabulary` in the model's dtype, stay in memory until the second is done.
    The model's training modes are afterwards what they were before.

    Args:
        model: A decoder-only transformers model, bare or wrapped by PEFT.
        make_cache: Makes the empty cache under test. Called once, after the first run.
        inputs: A mapping with `input_ids` and perhaps `attention_mask` (padding on the left), or the ids alone, `(batch, seq)`
            or `(seq,)`.
        max_new_tokens: How many steps to compare at most.
        prefill_chunk_size: Feeds the prompt to the cache under test in pieces of this many tokens.
        position_ids: Whether both runs pass `position_ids`, as `generate` does. False checks a loop of your own that leaves them out: most
            models then number tokens by their slots in the cache, padding included.
    """
    _check_call(model, make_cache)
    most = whole_number("max_new_tokens", max_new_tokens, 1)
    chunk = None if prefill_chunk_size is None else whole_number("prefill_chunk_size", prefill_chunk_size, 1)
    runner = ModelRunner(model, *_checked_inputs(inputs), position_ids)
    with evaluating(runner.model):
        return _Reference(runner, most).compare(make_cache, chunk)


@torch.no_grad()
def verify_text(
    model: Any,
    make_caches: Mapping[str, Callable[[], Cache]],
    inputs: Mapping[str, torch.Tensor] | torch.Tensor,
    following: torch.Tensor,
) -> dict[str, VerifyReport]:
    """Compares caches with the full cache on a text as it is: `verify`, with the text's own tokens in place of the model's.

    Args:
        make_caches: By a name; each function is called once.
        inputs: The beginning of the text, as in `verify`.
        following: The tokens behind it, (batch, tokens). As many distributions are compared.
    """
    if not isinstance(following, torch.Tensor) or following.ndim != 2 or not following.shape[1]:
        got = tuple(following.shape) if isinstance(following, torch.Tensor) else following
        raise ConfigError.of("following", "token ids (batch, tokens)", got)
    for make_cache in make_caches.values():
        _check_call(model, make_cache)
    runner = ModelRunner(model, *_checked_inputs(inputs))
    if len(following) != len(runner.ids):
        raise ConfigError.of("following", f"as many rows as inputs, {len(runner.ids)}", len(following))
    with evaluating(runner.model):
        reference = _Reference(runner, following.shape[1], following)
        return {name: reference.compare(make_cache) for name, make_cache in make_caches.items()}


class _Reference:
    """The run with the full cache."""

    def __init__(self, runner: ModelRunner, most: int, following: torch.Tensor | None = None) -> None:
        cache = DynamicCache(config=runner.model.config)
        self.runner = runner
        self.steps, self.seconds = runner.steps(cache, most, following)
        self.bytes = cache_bytes(cache)

    def compare(self, make_cache: Callable[[], Cache], chunk: int | None = None) -> VerifyReport:
        """Run the same tokens with another cache."""
        cache = _empty_cache(make_cache)
        logits, prefill = self.runner.prefill(cache, chunk)
        compared, decode = [_compared(self.steps[0], logits)], 0.0
        for index, (before, step) in enumerate(zip(self.steps, self.steps[1:], strict=False), 1):
            logits, seconds = self.runner.decode(cache, before.token, index)
            decode += seconds
            compared.append(_compared(step, logits))
        kls, same, errors = zip(*compared, strict=True)
        rows = zip(*([step.token.tolist(), step.active.tolist()] for step in self.steps), strict=True)
        tokens, active = (list(zip(*part, strict=True)) for part in rows)
        return VerifyReport(
            kl=tuple(kl.mean().item() for kl in kls),
            max_kl=max(kl.max().item() for kl in kls),
            agreement=torch.cat(same).double().mean().item(),
            first_divergence=next((index for index, equal in enumerate(same) if not bool(equal.all())), None),
            max_logit_error=max(errors),
            tokens=tuple(tuple(token for token, on in zip(*row, strict=True) if on) for row in zip(tokens, active, strict=True)),
            bytes=cache_bytes(cache),
            reference_bytes=self.bytes,
            seconds=Seconds(prefill, decode),
            reference_seconds=self.seconds,
        )


def _compared(step: TextStep, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the divergence and agreement of each active row, and the greatest logit error."""
    full, other = step.logits[step.active], logits[step.active]
    # In one wide type, where the difference of equal infinities counts as 0.
    error = torch.where(full == other, 0.0, (full.double() - other.double()).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return divergence(full, other), agreement(full, other), error.max().item()


def _empty_cache(make_cache: Callable[[], Cache]) -> Cache:
    cache = make_cache()
    if not isinstance(cache, Cache):
        raise ConfigError.of("make_cache", "a function that returns a transformers Cache", type(cache).__name__)
    held = int(cache.get_seq_length())
    if held:
        raise ConfigError.of("make_cache", "a function that returns an empty cache", f"{held} tokens in it", "Make a new one in each call.")
    return cache


def _check_call(model: Any, make_cache: object) -> None:
    if compat.base_model(model).config.is_encoder_decoder:
        raise UnsupportedError(f"verify compares decoder-only models; {type(model).__name__} is an encoder-decoder.")
    if compat.has_learned_prompt(model):
        raise UnsupportedError("verify can't run a model whose PEFT adapter is a learned prompt: that fills the cache by itself.")
    if not callable(make_cache) or isinstance(make_cache, Cache):
        raise ConfigError.of("make_cache", "a function that makes a cache", make_cache, "Pass for example: lambda: GrowingCache(model).")


def _checked_inputs(inputs: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the ids and the mask, (batch, tokens)."""
    given = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
    if unknown := sorted(set(given) - {"input_ids", "attention_mask"}):
        raise ConfigError.of("inputs", "input_ids and attention_mask only", unknown, "Leave the others out.")
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.dtype == torch.bool or ids.ndim not in (1, 2):
        got = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise ConfigError.of("inputs", "token ids as an integer tensor (batch, seq)", got, "Tokenize with return_tensors='pt'.")
    if ids.numel() == 0:
        raise ConfigError.of("inputs", "at least one token", f"shape {tuple(ids.shape)}")
    ids = ids if ids.ndim == 2 else ids[None]
    if mask is None:
        return ids, None
    if not isinstance(mask, torch.Tensor):
        raise ConfigError.of("attention_mask", "a tensor", type(mask).__name__)
    mask = mask if mask.ndim == 2 else mask[None]
    if mask.shape != ids.shape:
        raise ConfigError.of("attention_mask", f"the shape of input_ids {tuple(ids.shape)}", tuple(mask.shape))
    if not bool(((mask == 0) | (mask == 1)).all()) or not bool(mask[:, -1].all()):
        values = sorted(set(mask.flatten().tolist()))[:5]
        raise ConfigError.of("attention_mask", "zeros and ones, a one at the end of every row", values, "Pad on the left.")
    return ids, mask
