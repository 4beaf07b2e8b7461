"""What the user asks of an `EquipCache`, and what does not go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.compat import decoder_config
from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.core.rope_families import head_sizes
from hf_kvcaches.equip.budgets import Limit, one_budget, slots_for
from hf_kvcaches.equip.calibrated import HeadBudgets
from hf_kvcaches.equip.coded import BITS
from hf_kvcaches.equip.pages import PagePool
from hf_kvcaches.equip.policies import Policy
from hf_kvcaches.errors import ConfigError, Refusal, UnsupportedError, require_choice, require_instance, whole_number
from hf_kvcaches.kernels.launch import BACKENDS, Backend

QUESTION_ADOPTED = (
    "question_start: a context is scored or refitted by its last queries, and those of a prompt from another cache are the question's. "
    "Take over the context alone and feed the question, or use 'keydiff' or 'streaming' without refit."
)


@dataclass(frozen=True)
class EquipSettings:
    """The checked arguments of an `EquipCache`; in a layer, `budget` is the layer's own."""

    policy: Policy
    budget: Any
    sinks: int
    recent: int | None
    decode_budget: int | float | None
    head_budgets: Any  # "global", "layer", None, or the shares of a `HeadBudgets`, {"layer index": [share of each KV head]}
    question_start: int | None
    positions: str
    backend: Backend
    page_size: int | None
    storage: Any
    codec: KVCodec | None = None
    refit: bool = False

    def __post_init__(self) -> None:
        require_choice("positions", self.positions, ("auto", "compact", "original"))
        require_choice("backend", self.backend, BACKENDS)
        require_choice("storage", self.storage, (*BITS, None))
        if not isinstance(self.refit, bool):
            raise ConfigError.of("refit", "True or False", self.refit)
        if self.codec is not None:
            require_instance("codec", self.codec, KVCodec, {"policy": self.policy}, "KVCodec.calibrate makes one for a model.")
        tokens = "a number of tokens, 0 or more"
        checks = ("sinks", 0, tokens), ("recent", 0, tokens), ("question_start", -(1 << 40), "the index of a token of the prompt")
        for name, least, what in checks:
            if (value := getattr(self, name)) is not None or name == "sinks":
                object.__setattr__(self, name, whole_number(name, value, least, what))  # NumPy's integers become plain ones
        if self.decode_budget is not None:
            object.__setattr__(self, "decode_budget", one_budget("decode_budget", self.decode_budget))

    def check(self, model: Any, *, latents: bool, offloading: bool) -> None:
        """Refuse what does not go together with the model, or its config; `latents` is whether it keeps these."""
        policy, paged, shared, codec = self.policy, self.page_size is not None, self.head_budgets is not None, self.codec
        joint, unpaged = self.head_budgets == "global", "Leave page_size and pool out"
        late = policy.deferred or self.decode_budget is not None or self.question_start is not None
        held = "this model keeps latents, which are held in its dtype"
        unread = f"refit: {policy.name!r} reads no queries, and keeps recent values as they are. Leave it out."
        at_once = "head_budgets: 'global' prunes all layers at once, and with offloading one alone is at hand. Pass head_budgets='layer'."
        asked = (
            "head_budgets: 'global' prunes when the last layer has read the prompt, and a question is read by each layer before. Feed "
            "the context in a call of its own, or pass head_budgets='layer'."
        )
        refusals: dict[str, Any] = {
            f"head_budgets: a page belongs to all heads of a layer. {unpaged}, or pass None.": paged and shared,
            "page_size, pool: pages are for one budget. Leave out decode_budget, question_start and 'kvzip'.": paged and late,
            f"page_size, pool: this model keeps latents, which are not kept on pages. {unpaged}.": paged and latents,
            "storage: pages hold the model's dtype, or codes. Leave storage out, or page_size and pool.": paged and self.storage,
            "offloading: pages stay on their pool's device. Leave offloading out, or page_size and pool.": paged and offloading,
            "storage, codec: slots are kept in one way. Leave one of them out.": codec and self.storage,
            "codec: codes are of keys before rotation. Leave positions='original' out.": codec and self.positions == "original",
            "codec: slots change their positions. Calibrate with rotation='aware'.": codec and codec.settings.rotation != "aware",
            "head_budgets: such heads are held in the model's dtype, or as codes. Leave storage out.": shared and self.storage,
            "head_budgets: latents are common to all heads. Pass None.": shared and latents,
            f"storage: {held}. Leave storage out.": latents and self.storage,
            f"codec: {held}. Leave codec out.": latents and codec,
            "refit: latents are keys and values at once. Leave refit out.": self.refit and latents,
            unread: self.refit and policy.order_only,
            "policy: it reads inputs of heads, and this model keeps latents. Use 'keydiff' or 'snapkv'.": latents and policy.reads_inputs,
            at_once: joint and offloading,
            asked: joint and self.question_start is not None,
        }
        if message := next((message for message, refused in refusals.items() if refused), None):
            raise UnsupportedError(message)
        if shared and (not policy.by_head or (policy.order_only and self.head_budgets in ("global", "layer"))):
            raise scores_alike(policy)
        if joint and not policy.comparable:
            what = "'layer', None, or a policy whose scores mean the same in all layers, as probabilities do ('future', 'kvzip')"
            raise ConfigError.of("head_budgets", what, f"'global' with {name_of(policy)!r}")
        if policy.mixes_heads:
            require_all_heads(model, f"The policy {policy.name!r}", "Use a policy that scores each head by itself: 'h2o' or 'snapkv'.")
        if latents:
            require_all_heads(model, "Pruning latents, which are common to all heads,", "Use DynamicCache.", any_plan=True)

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

    @property
    def queries_needed(self) -> int | None:
        """How many of a prompt's last queries the policy and a refit look at: 0 for none, None for all."""
        policy = self.policy
        read = (policy.interval or 64) if policy.reads_queries or self.refit else 0
        return None if policy.observes is None else max(policy.observes, read)

    def adopt_refused(self, with_queries: bool) -> Refusal | None:
        """Why a prompt can't be adopted, with its last queries or without."""
        needed = self.queries_needed
        if needed != 0 and self.question_start is not None:
            return Refusal(QUESTION_ADOPTED)
        if needed == 0 or (with_queries and needed is not None):
            return None
        whose, others = ("all queries", "'future', ") if needed is None else (f"a prompt's last {needed} queries", "")
        why = f"policy: {name_of(self.policy)!r}{' with refit' * self.refit} looks at {whose}, which stored keys and values don't have."
        return Refusal(f"{why} Use {others}'keydiff' or 'streaming'{' without refit' * self.refit}.")

    def slots_of(self, prompt: int) -> int:
        """How many tokens of a prompt of so many stay: at least what always stays and one new token."""
        return slots_for(self.budget, prompt, self.sinks + max(1, self.recent_of(self.sinks + 1)))

    def limit_of(self, prompt: int, beside: int = 0) -> Limit:
        """What a prompt, of so many tokens in its longest row, is pruned to; `beside` more tokens stay on top of a fraction."""
        slots = self.slots_of(prompt) + (beside if isinstance(self.budget, float) else 0)
        recent, sinks = whole_number("recent", self.recent_of(slots), 0), self.sinks
        # The token to come needs a slot that is not a sink's, whether or not it is to be protected afterwards.
        if slots < (least := sinks + max(recent, beside, 1)):
            why = f"{slots} tokens are too few for sinks={sinks} + recent={max(recent, beside)}"
            raise ConfigError(f"budget: {why}. Give at least {least}, or lower sinks or recent.")
        return Limit(slots, recent)


def resolve_pool(config: Any, page_size: int | None, pool: PagePool | None) -> PagePool | None:
    """The pages of a cache, which it shares with others or has alone; None for one buffer a row."""
    if pool is None:
        return None if page_size is None else PagePool(config, 64, page_size, grows=True)
    if page_size not in (None, pool.page_size):
        raise ConfigError.of("page_size", f"that of the pool, {pool.page_size}, or None", page_size)
    (heads, size), others = _head_shape(config), _head_shape(pool.config)
    if None not in (heads, size, *others) and others != (heads, size):
        raise ConfigError.of("pool", f"one made for {heads} key heads of size {size}", pool, "Make a pool with this model.")
    return pool


def _head_shape(config: Any) -> tuple[int | None, int | None]:
    """Key heads and their size as far as a config tells."""
    config = decoder_config(config)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    return heads, (head_sizes(config, 0) or (None,))[0]


def resolve_head_budgets(head_budgets: Any, policy: Policy, possible: bool, alone: bool) -> Any:
    """As plain values; "auto" lets heads keep different numbers of tokens where `possible`, within a layer where each is `alone`."""
    if isinstance(head_budgets, HeadBudgets):
        return head_budgets.as_settings()
    if isinstance(head_budgets, str):
        require_choice("head_budgets", head_budgets, ("auto", "global", "layer"), also=", HeadBudgets, or None")
        if head_budgets == "auto":
            return None if not possible or policy.head_budgets is None else "layer" if alone else policy.head_budgets
    elif head_budgets is not None and not (isinstance(head_budgets, dict) and all(isinstance(x, list) for x in head_budgets.values())):
        raise ConfigError.of("head_budgets", "'auto', 'global', 'layer', HeadBudgets, or None", head_budgets)
    return head_budgets  # a dict is from a file


def name_of(policy: Policy) -> str:
    return policy.name or type(policy).__name__


def scores_alike(policy: Policy) -> ConfigError:
    """The error for a policy whose heads all keep the same tokens."""
    hint = "Its heads all keep the same tokens: use another policy, or leave head_budgets out."
    return ConfigError.of("head_budgets", "a policy that scores each head by itself", name_of(policy), hint)
