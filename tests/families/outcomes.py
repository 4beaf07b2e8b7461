"""Runs a family through all caches and scenarios, and says what came of it."""

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvcaches.errors import KVCacheError
from tests.families.models import Family, build
from tests.families.scenarios import KINDS, PROMPT, SCENARIOS, SINKS, Kind, Logits, Oracle, pruned

# Of logits, as a share of their spread. Rounding is a hundredth of it, a wrong position or a forgotten token a hundred times it.
TOLERANCE = 1e-3
# A phrase in a refusal, and the cache that it recommends.
RECOMMENDED = {
    "GrowingCache": "growing",
    "positions='original'": "equip_original",
    "rotation='post'": "subspace_post",
    "mode='exact'": "segments",
}
# Refusals that follow an error of our own, and say nothing of the reason.
MISLEADING = ("a forward pass or a crop failed",)


@dataclass(frozen=True)
class Outcome:
    """What came of one scenario, or of the "model": equal, refused, wrong, error, or absent if a `DynamicCache` can't do it either."""

    family: str
    cache: str
    scenario: str
    verdict: str
    detail: str = ""

    @property
    def fails(self) -> bool:
        return self.verdict in ("wrong", "error")


def outcomes(family: Family, kinds: Iterable[Kind] = KINDS) -> list[Outcome]:
    """All of a family."""
    kinds = list(kinds)
    model = build(family)
    reach = _reach(model)
    assert reach > 10 * TOLERANCE, f"{family.name}: early tokens change nothing ({reach:.1e}), so nothing can be seen"
    expected = _expected(model, {scenario for kind in kinds for scenario in kind.scenarios})
    before = _state(model)
    found: list[Outcome] = []
    for kind in kinds:
        found += _of_kind(family.name, kind, model, expected)
        found.append(Outcome(family.name, kind.name, "model", *_effect(model, before)))
        _restore(model, before["attention"])
    return [*found, *_bad_advice(found)]


def _expected(model: PreTrainedModel, scenarios: Iterable[str]) -> dict[str, Logits | str]:
    """What a `DynamicCache` gives, or why it gives nothing."""
    wanted = {name: scenario for name, scenario in SCENARIOS.items() if name in scenarios and name != "pruned"}
    if "pruned" in scenarios:
        wanted |= {f"pruned {sinks}": lambda bench, sinks=sinks: pruned(bench, sinks) for sinks in (0, SINKS)}
    found: dict[str, Logits | str] = {}
    for name, scenario in wanted.items():
        _forget_requests(model)
        try:
            found[name] = scenario(Oracle(model))
        except Exception as error:  # Whatever it is, nothing can be compared.
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _forget_requests(model: PreTrainedModel) -> None:
    """Takes away what models for images keep of the request before, which is in the way of another batch size with any cache."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


def _of_kind(family: str, kind: Kind, model: PreTrainedModel, expected: dict[str, Logits | str]) -> list[Outcome]:
    found = []
    bench = kind.bench(model)
    for scenario in kind.scenarios:
        name = f"pruned {bench.settings.get('sinks', 0)}" if scenario == "pruned" else scenario
        wanted = expected[name]
        if isinstance(wanted, str):
            found.append(Outcome(family, kind.name, scenario, "absent", wanted))
            continue
        found.append(Outcome(family, kind.name, scenario, *_verdict(bench, scenario, wanted)))
    return found


def _verdict(bench: Any, scenario: str, wanted: Logits) -> tuple[str, str]:
    stored = bench.stored()
    _forget_requests(bench.model)
    try:
        actual = SCENARIOS[scenario](bench)
    except KVCacheError as error:
        bench.settle()
        if bench.stored() != stored and scenario not in ("second", "moved"):
            return "wrong", f"refused after something was stored: {error}"
        return "wrong" if any(phrase in str(error) for phrase in MISLEADING) else "refused", str(error)
    except Exception as error:  # What a user would see.
        return "error", _said(error)
    distance = _distance(actual, wanted)
    return ("equal", f"{distance:.1e}") if distance <= TOLERANCE else ("wrong", f"{distance:.1e}")


def _distance(actual: Logits, wanted: Logits) -> float:
    """The largest difference of logits, as a share of their spread, up to where the texts part."""
    worst = 0.0
    if len(actual) != len(wanted):
        return float("inf")
    for mine, theirs in zip(actual, wanted, strict=True):
        if mine.shape != theirs.shape:
            return float("inf")
        finite = torch.isfinite(theirs)
        if not torch.equal(finite, torch.isfinite(mine)):
            return float("inf")
        worst = max(worst, float((mine - theirs)[finite].abs().max() / theirs[finite].std()))
    return worst


@torch.no_grad()
def _reach(model: PreTrainedModel) -> float:
    """How much the first four tokens change what comes behind the last."""
    other = PROMPT.clone()
    other[:, :4] = (PROMPT[:, :4] + 7) % 90 + 3
    first, second = (model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -1:] for ids in (PROMPT, other))
    return _distance([second], [first])


@torch.no_grad()
def _state(model: PreTrainedModel) -> dict[str, Any]:
    """What a cache must leave as it is."""
    configs = {id(config): config for config in _configs(model)}
    return {
        "attention": [(config, config._attn_implementation) for config in configs.values()],
        "state_dict": list(model.state_dict()),
        "logits": model(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), use_cache=False).logits,
    }


def _effect(model: PreTrainedModel, before: dict[str, Any]) -> tuple[str, str]:
    """The verdict on what a cache has done to its model."""
    try:
        after = _state(model)
    except Exception as error:  # What a user would see.
        return "error", _said(error)
    changed = [name for name, value in after.items() if not _same(value, before[name])]
    return ("wrong", f"changed: {', '.join(changed)}") if changed else ("equal", "")


def _said(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename.split('site-packages/')[-1]}:{place.lineno})"


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    return [module.config for module in model.modules() if isinstance(getattr(module, "config", None), PreTrainedConfig)]


def _same(value: Any, before: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return _distance([value], [before]) <= TOLERANCE
    return bool(value == before)


def _restore(model: PreTrainedModel, attention: list[tuple[PreTrainedConfig, str | None]]) -> None:
    """Gives the model back what a cache has taken, so that the next one is judged by itself."""
    for config, implementation in attention:
        config._attn_implementation_internal = implementation


def _bad_advice(found: list[Outcome]) -> list[Outcome]:
    """A refusal must not recommend what does not work."""
    bad = []
    for outcome in found:
        if outcome.verdict != "refused":
            continue
        for phrase, cache in RECOMMENDED.items():
            results = [other for other in found if other.cache == cache and other.scenario != "model"]
            if phrase in outcome.detail and cache != outcome.cache and any(o.verdict not in ("equal", "absent") for o in results):
                detail = f"recommends {phrase}, which fails too: {outcome.detail}"
                bad.append(Outcome(outcome.family, outcome.cache, outcome.scenario, "wrong", detail))
    return bad
