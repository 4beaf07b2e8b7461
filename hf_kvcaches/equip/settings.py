"""What the user asks of an `EquipCache`, and what does not go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.equip.budgets import Limit, check_budget, one_budget, slots_for
from hf_kvcaches.equip.heads import scores_alike
from hf_kvcaches.equip.policies import Policy
from hf_kvcaches.equip.quantized import BITS
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_choice, require_instance, whole_number
from hf_kvcaches.kernels.launch import BACKENDS, Backend

ROPE = ("auto", "frames", "on_read", "rotated_keys")


@dataclass(frozen=True)
class EquipSettings:
    """The checked arguments of an `EquipCache`; in a layer, `budget` and `head_budgets` are the layer's own."""

    policy: Policy
    budget: Any
    sinks: int
    recent: int | None
    decode_budget: int | float | None
    head_budgets: Any
    question_start: int | None
    positions: str
    rope: Any
    backend: Backend
    page_size: int | None
    storage: Any
    codec: KVCodec | None = None

    def __post_init__(self) -> None:
        require_choice("positions", self.positions, ("compact", "original"))
        require_choice("rope", self.rope, ROPE)
        require_choice("backend", self.backend, BACKENDS)
        require_choice("storage", self.storage, (*BITS, None))
        if self.codec is not None:
            require_instance("codec", self.codec, KVCodec, {"policy": self.policy}, "KVCodec.calibrate makes one for a model.")
        # NumPy's integers become plain ones.
        plain: dict[str, Any] = {"sinks": whole_number("sinks", self.sinks, 0, "a number of tokens, 0 or more")}
        if self.recent is not None:
            plain["recent"] = whole_number("recent", self.recent, 0, "a number of tokens, 0 or more")
        if self.decode_budget is not None:
            plain["decode_budget"] = one_budget("decode_budget", self.decode_budget)
        if self.question_start is not None:
            plain["question_start"] = whole_number("question_start", self.question_start, -(1 << 40), "the index of a token of the prompt")
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def check(self, model: Any, *, latents: bool, offloading: bool) -> None:
        """Refuses what does not go together.

        Args:
            model: The model, or its config.
            latents: Whether the model keeps latents.
            offloading: Whether layers wait in CPU memory.
        """
        policy, rope, paged, shared = self.policy, self.rope, self.page_size is not None, self.head_budgets is not None
        two_limits = policy.deferred or self.decode_budget is not None or self.question_start is not None
        doubled, latent_heads = rope == "rotated_keys", latents and _reads_heads(policy)
        if self.positions == "original" and rope != "auto":
            raise ConfigError.of("rope", "'auto' where positions='original'", rope, "Keys with original positions are never rotated.")
        if (self.storage is not None or self.codec is not None) and rope not in ("auto", "on_read"):
            raise ConfigError.of("rope", "'auto' or 'on_read' with storage or codec", rope, "What is coded are keys before rotation.")
        if shared and (not policy.by_head or (policy.order_only and self.head_budgets == "adakv")):
            raise scores_alike(policy)
        refusals = (
            (paged and shared, "head_budgets: a page belongs to all heads of a layer. Leave page_size and pool out, or head_budgets."),
            (paged and two_limits, "page_size, pool: pages are for one budget. Leave out decode_budget, question_start and 'kvzip'."),
            (paged and latents, "page_size, pool: this model keeps latents, which are not kept on pages. Leave page_size and pool out."),
            (paged and self.storage, "storage: pages hold the model's dtype, or codes. Leave storage out, or page_size and pool."),
            (self.codec and self.storage, "storage, codec: slots are kept in one way. Leave one of them out."),
            (self.codec and self.positions == "original", "codec: codes are of keys before rotation. Leave positions='original' out."),
            (
                self.codec and self.codec.settings.rotation != "aware",
                "codec: slots change their positions. Calibrate with rotation='aware'.",
            ),
            (shared and self.codec, "head_budgets: such heads are held in the model's dtype. Leave codec out, or head_budgets."),
            (latents and self.codec, "codec: this model keeps latents, which are held in its dtype. Leave codec out."),
            (paged and offloading, "offloading: pages stay on their pool's device. Leave offloading out, or page_size and pool."),
            (shared and self.storage, "head_budgets: such heads are held in the model's dtype. Leave storage out, or head_budgets."),
            (latents and self.storage, "storage: this model keeps latents, which are held in its dtype. Leave storage out."),
            (shared and doubled, "head_budgets: the second cache of rotated keys has heads of one length. Pass rope='on_read'."),
            (paged and doubled, "rope: the second cache of rotated keys is not kept on pages. Pass rope='on_read'."),
            (latents and doubled, "rope: of latents there is no second cache of rotated keys. Pass rope='on_read'."),
            (latent_heads, "policy: it reads keys and values of heads, and this model keeps latents. Use 'keydiff' or 'snapkv'."),
        )
        for refused, message in refusals:
            if refused:
                raise UnsupportedError(message)
        for needed, what, instead in (
            (policy.mixes_heads, f"The policy {policy.name!r}", "Use a policy that scores each head by itself: 'h2o' or 'snapkv'."),
            (latents, "Pruning latents, which are common to all heads,", "Use DynamicCache."),
        ):
            if needed:
                require_all_heads(model, what, instead, any_plan=latents)

    def question_in(self, tokens: int) -> int:
        """How many of a first prompt's tokens are before its question."""
        if self.question_start is None:
            return tokens
        start = self.question_start + (tokens if self.question_start < 0 else 0)
        if not 0 < start < tokens:
            what = f"the index of one of the prompt's {tokens} tokens, and not of the first"
            raise ConfigError.of("question_start", what, self.question_start)
        return start

    def recent_of(self, slots: int) -> int:
        """How many of the newest tokens always stay in so many slots."""
        return self.policy.recent(slots, self.sinks) if self.recent is None else self.recent

    def limit_of(self, prompt: int, beside: int = 0) -> Limit:
        """What a prompt is pruned to.

        Args:
            prompt: Its tokens, in the longest row.
            beside: Tokens that stay besides, on top of a fraction.
        """
        slots = slots_for(self.budget, prompt) + (beside if isinstance(self.budget, float) else 0)
        recent = whole_number("recent", self.recent_of(slots), 0)
        check_budget(slots, self.sinks, max(recent, beside))
        return Limit(slots, recent)


def _reads_heads(policy: Any) -> bool:
    """Whether a policy, or one that it is made of, looks at the projections of heads."""
    return policy is not None and (policy.reads_inputs or policy.name == "critical" or _reads_heads(getattr(policy, "inner", None)))
