"""`EquipCache`: token pruning as in-place replacement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch

from hf_kvcaches import compat
from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.holder import AnsweringCache
from hf_kvcaches.core.parallel import shard_of
from hf_kvcaches.core.report import CacheReport, summarise
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip import detours
from hf_kvcaches.equip.budgets import Assembly, Limit, resolve_budgets
from hf_kvcaches.equip.calibrated import HeadBudgets, KeepProbe
from hf_kvcaches.equip.coded import Coded, PagedCodes, QuantizedSlots
from hf_kvcaches.equip.layer import EquipLayer
from hf_kvcaches.equip.modules import TELLING, Latent, LatentView, keeps_latents, latent_modules
from hf_kvcaches.equip.pages import BlockTable, Paged, PagePool
from hf_kvcaches.equip.policies import Policy, PressPolicy, resolve_policy
from hf_kvcaches.equip.rotation import LONGEST, KeyRotation
from hf_kvcaches.equip.settings import EquipSettings, resolve_head_budgets, resolve_pool
from hf_kvcaches.equip.storage import Flat
from hf_kvcaches.errors import ConfigError, Refusal, UnsupportedError, whole_number


@dataclass(frozen=True)
class EquipReport(CacheReport):
    """What an `EquipCache` holds, and how many tokens it may keep.

    Args:
        policy: The name of the policy.
        budget: Of each layer that is pruned: tokens, or before the prompt a share of it.
        spread: How many tokens the head with the fewest and the one with the most keep.
    """

    policy: str = ""
    budget: tuple[int | float, ...] = ()
    spread: tuple[int, int] = (0, 0)

    def _shown(self, name: str) -> str:
        if name == "spread":
            return "{} to {} tokens a head".format(*self.spread)
        return summarise(self.budget) if name == "budget" else super()._shown(name)


class EquipCache(AnsweringCache):
    """Keeps a fixed number of tokens: a new one is written over the one that a policy gives up, and nothing is moved.

    EQUIP: EQUivariant preserving In-Place updates for Efficient token-pruning (Ramachandran et al.). Attention does not care in which
    order keys and values lie, so evicting and inserting are one write.

    **Departs from the paper**: rotary positions need no second cache of rotated keys. Several tokens at once attend to all that was kept
    and to each other, and are pruned then. Heads and layers share their slots.

    **Refuses**: cropping tokens that were not recorded (`activate_past_recording`); masks that differ by head; what does not go together.

    **Memory per token**: that of keys and values, for `budget` tokens of each head in the mean and no more, and 8 to 20 bytes a slot and
    key head. `storage` holds keys and values in 0.53 ("int8") or 0.30 ("int4") of half precision's bytes at a head size of 64; `codec` in
    `codec.bytes_ratio`; while a layer runs, its keys and values are there in the model's dtype too.

    Args:
        model: A transformers model, or its config; with a config, what needs attention weights or padding is refused.
        policy: "future", "kvzip", "snapkv", "compactor", "expected_attention", "keydiff", "h2o", "tova", "streaming", or an object.
        budget: Tokens to keep in each head, in the mean: a number, a fraction of the (longest) prompt, or one of these for each layer. The
            prompt is what the first call brings: with `prefill_chunk_size` the first chunk, so give a number there.
        sinks: First tokens of each row that always stay.
        recent: Newest tokens that always stay; None for the policy's own number.
        decode_budget: Tokens to keep while decoding, a number or a fraction of the prompt, where these are more than `budget`.
        head_budgets: How heads share the slots by their scores: "global" over all heads and layers, "layer" within a layer, `HeadBudgets`
            by shares that were measured once, None: each head has as many; "auto": as suits the policy.
        question_start: The index of the first prompt's token at which its question begins, negative to count from the end. What is
            before it is pruned before the question is read, and fractions are of it. None: nothing is a question.
        positions: "original": as they were in the text; "compact": counted within the cache, as in StreamingLLM; "auto": original until the
            text outgrows the window that the model was trained with, compact from then on, and always with "streaming" and a codec.
        backend: Of the kernels: "auto", "torch" or "triton".
        page_size: Keep slots in pages of so many, taken as rows fill them; None for one buffer, or the pool's.
        pool: The pages, shared with other caches, all with the same codec or all without; None for pages of the cache's own.
        storage: Keep keys and values in fewer bits: "int8", "int4", or None for the model's dtype.
        codec: Keep slots as its codes, but for the sinks; positions are compact then, and keys are rotated at each step.
        refit: Have the kept values of a prompt fitted to what queries of the context get of all values.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA. Slots are then shared within a layer at most.
    """

    takes_latents = True
    codec_class = KVCodec
    unmasked = False  # whether the running pass came without a mask, whatever the model makes of that for its attention
    refuses_images = False  # whether tokens with a position for each axis are refused

    def __init__(
        self,
        model: Any,
        policy: str | Policy | KeepProbe = "future",
        budget: int | float | Sequence[int | float] = 512,
        *,
        sinks: int = 4,
        recent: int | None = None,
        decode_budget: int | float | None = None,
        head_budgets: Literal["auto", "global", "layer"] | HeadBudgets | None = "auto",
        question_start: int | None = None,
        positions: Literal["auto", "compact", "original"] = "auto",
        backend: Literal["auto", "torch", "triton"] = "auto",
        page_size: int | None = None,
        pool: PagePool | None = None,
        storage: Literal["int8", "int4"] | None = None,
        codec: KVCodec | None = None,
        refit: bool = False,
        offloading: bool = False,
    ) -> None:
        policy = resolve_policy(policy)  # where model and policy are swapped, this says so
        base, config = compat.split_model(model)
        self._latents = base is not None and keeps_latents(base, config)
        self.pool, self._shard = resolve_pool(config, page_size, pool), shard_of(model)
        apart = self.pool is None and storage is None and not self._latents
        self._in_one_buffer = apart and codec is None
        heads = resolve_head_budgets(head_budgets, policy, apart, question_start is not None or offloading)
        pages = None if self.pool is None else self.pool.page_size
        limits = (policy, resolve_budgets(budget, config), sinks, recent, decode_budget, heads, question_start)
        self._settings = EquipSettings(*limits, positions, backend, pages, storage, codec, refit)
        self._settings.check(model, latents=self._latents, offloading=offloading)
        self._rotations: list[KeyRotation] = []
        self._tables: list[BlockTable] = []
        self._assembly = Assembly(self._shard)
        self._shared_codec = codec if codec is None else codec.of_heads(self._shard)
        super().__init__(model, offloading=offloading)
        self._assembly.expected = len(self._pruned)
        if codec is not None:
            codec.require_model(model)
        self.refuses_images = any(layer.geometry.axes and layer.rotation.moves for layer in self._pruned)
        if base is not None and self._pruned:
            TELLING.add(base, self)
        # For caches that can be compiled `generate` makes masks ahead, which some models do in another way than their forward.
        self._masks_differ = self._model is not None and hasattr(self.model, "create_masks_for_generate")

    @property
    def policy(self) -> Policy:
        """Which tokens stay."""
        return self._settings.policy

    @property
    def codec(self) -> KVCodec | None:
        return self._settings.codec

    @property
    def _pruned(self) -> list[EquipLayer]:
        return [layer for layer in self.layers if isinstance(layer, EquipLayer)]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        layer: Any = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        block = key_states.shape[2] > 1
        if torch.compiler.is_compiling() and (self._latents or (self.is_compileable and (block or layer.table.clock is None))):
            return _update_uncompiled(self, key_states, value_states, layer_idx, *args, **kwargs)
        if not self._latents or not isinstance(layer, EquipLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        tokens, _ = super().update(torch.cat([value_states, key_states], -1), key_states, layer_idx, *args, **kwargs)
        TELLING.add(self.model, self)  # where it was pickled
        view = LatentView(latent_modules(self.model)[layer_idx], tokens)
        return view, view

    def make_layer(self, layer_idx: int) -> EquipLayer:
        settings = replace(self._settings, budget=self._settings.budget[layer_idx])
        if isinstance(settings.budget, int):  # of a fraction we know more when the prompt is there
            settings.limit_of(0)
        geometry = RotaryGeometry.from_config(self.config, layer_idx=layer_idx, latents=self._latents)
        compared = self._shard is not None or settings.policy.asks_all_heads or settings.head_budgets is not None
        config = self.config.per_layer_config[layer_idx]
        heads = getattr(config, "num_key_value_heads", None) if compared and not self._latents else None
        rotation, storage = self._make_rotation(geometry), self._make_storage(settings, layer_idx)
        return EquipLayer(settings, geometry, rotation, self.passes, storage, self._assembly, layer_idx, heads)

    def _make_storage(self, settings: EquipSettings, layer_idx: int) -> Flat:
        codec, backend = self._shared_codec, settings.backend
        if codec is not None:
            of_layer = (codec, layer_idx, settings.sinks, backend)
            return Coded(*of_layer) if self.pool is None else PagedCodes(*of_layer, self.pool, self._tables, settings.slots_of)
        if self.pool is not None:
            return Paged(backend, self.pool, self._tables, settings.slots_of)
        if self._latents:
            sizes: Any = self.config.per_layer_config[layer_idx]
            return Latent(backend, sizes.qk_rope_head_dim, sizes.kv_lora_rank)
        return Flat(backend) if settings.storage is None else QuantizedSlots(backend, settings.storage)

    def _make_rotation(self, geometry: RotaryGeometry) -> KeyRotation:
        settings = self._settings
        if settings.positions == "original" or geometry.kind in ("learned", "none"):
            return KeyRotation()
        auto = settings.positions == "auto" and not settings.policy.order_only and settings.codec is None
        window: int | None = getattr(compat.decoder_config(self.config), "max_position_embeddings", None)
        fixed = geometry.refusal is not None or geometry.axes
        known = self._model is not None or not fixed  # a config does not tell of latents, nor when tokens are an image's
        if auto and known and (window is None or geometry.changes_at is not None or fixed):
            return KeyRotation()
        if geometry.changes_at is not None:
            geometry = geometry.at(0)  # until the first pass shows how far the text reaches
        images = "without the model nothing tells text from image tokens, which have a position for each axis"
        if (why := images if geometry.axes and self._model is None else geometry.refusal) is not None:
            raise UnsupportedError(f"positions='compact': {why}. Pass positions='original'.")
        rotation = next((known for known in self._rotations if known.geometry.rotates_like(geometry)), None)
        if rotation is None:  # shared with its tables
            self._rotations.append(rotation := KeyRotation(geometry))
        if auto and window is not None:
            return KeyRotation(otherwise=rotation, window=window)
        streams = settings.policy.order_only and settings.head_budgets is None and self._in_one_buffer
        return KeyRotation(otherwise=rotation, window=LONGEST, streams=True) if streams else rotation

    def report(self) -> EquipReport:
        """What the cache holds, measured, its budget, and how far heads differ."""
        layers = self._pruned
        budgets = tuple((0 if layer.waiting else layer.slots) or layer.settings.budget for layer in layers)
        counts = [layer.table.kept() for layer in layers if layer.table.positions is not None]
        spread = (min(int(count.min()) for count in counts), max(int(count.max()) for count in counts)) if counts else (0, 0)
        return EquipReport(**self._report_fields(), policy=self.policy.name, budget=budgets, spread=spread)

    def settings(self) -> dict[str, Any]:
        own = {"policy": self.policy.settings(), "budget": list(self._settings.budget), "codec": None}
        # The kernels are a matter of the machine.
        return {name: value for name, value in vars(self._settings).items() if name != "backend"} | own

    @classmethod
    def from_press(cls, press: Any, model: Any, budget: int | float | Sequence[int | float] | None = None, **options: Any) -> Self:
        """A cache that keeps what a press of kvpress would keep.

        Args:
            press: An object with `score(module, hidden_states, keys, values, attentions, kwargs)`; the package itself is not needed.
            model: As for the constructor; not a config.
            budget: As for the constructor; None for what the press's `compression_ratio` leaves.
            **options: As for the constructor.
        """
        policy = PressPolicy(press)
        return cls(model, policy, policy.share_left() if budget is None else budget, **options)

    @property
    def adopt_window(self) -> int | None:
        return self._settings.queries_needed

    def adopt_refused(self, with_queries: bool = False) -> Refusal | None:
        if self._latents:
            return Refusal("model: EquipCache prunes latents as the model makes them, and takes none over. Feed it the text.")
        return self._settings.adopt_refused(with_queries)

    def kept_positions(self, layer_idx: int) -> torch.Tensor:
        """Whose the slots are: for each sequence, KV head and slot the index of its token among the tokens seen; -1: empty.

        Args:
            layer_idx: A layer with full attention.
        """
        layer = self.layers[layer_idx]
        if not isinstance(layer, EquipLayer):
            raise ConfigError.of("layer_idx", "a layer with full attention", layer_idx, f"It is a {type(layer).__name__} of transformers.")
        return layer.kept_positions()

    def compress(self, model: Any = None, *, upto: int | None = None, input_ids: torch.Tensor | None = None) -> None:
        """Prune what is held to `budget` now; with "kvzip", which waits for it, once, after the model has read the context again.

        Args:
            model: The model that filled the cache, or a wrapper of it; None for the one that the cache was made with.
            upto: Where the context ends, among the tokens seen: what follows stays and is not looked at. A fraction is then of the context.
                None: everything is context.
            input_ids: The context, (rows, tokens), for "kvzip" where it was not `generate` that fed it.
        """
        seen, layers = self.seen, self._pruned
        if not seen:
            raise ConfigError.of("compress", "a cache that holds a context", "an empty one", "Feed it the context first.")
        context = seen if upto is None else whole_number("upto", upto, 1, f"a position from 1 to the {seen} tokens seen", most=seen)
        behind = seen - context
        if behind and self.policy.observes != 0:
            raise UnsupportedError(
                f"upto: {self.policy.name!r} scores by attention, and has seen that of the tokens behind upto. Make the cache with "
                "question_start, feed the question after compress, or use 'compactor', 'keydiff' or 'kvzip'."
            )
        prompts = [context if layer.table.counts is None else int(layer.table.counts.max()) - behind for layer in layers]
        limits = [layer.settings.limit_of(prompt, behind) for layer, prompt in zip(layers, prompts, strict=True)]
        attention: list[Any] = [None] * len(layers)
        if self.policy.deferred:
            attention = detours.reconstruct(self, self.model if model is None else model, layers, input_ids, context)
        with layers[0].storage.rewriting():
            for layer, limit, prompt in zip(layers, limits, prompts, strict=True):
                layer.set_limits(limit, prompt)
            for layer, limit, received in zip(layers, limits, attention, strict=True):
                with self.at_hand(layer):
                    layer.arrive(None, Limit(limit.slots, max(limit.recent, behind)), behind, received)
            for layer in layers:
                layer.make_final()

    def evict(self, positions: Sequence[int] | torch.Tensor) -> None:
        """Forget tokens in all layers, rows and heads that still have them; others keep their positions among the tokens seen.

        Their slots are free for what comes next. With compact positions the gap closes. Layers with a sliding window forget by themselves:
        beside them, tokens that every window has passed can be evicted.

        Args:
            positions: Indices among the tokens seen.
        """
        detours.evict(self, self._pruned, torch.as_tensor(positions, dtype=torch.long).reshape(-1))

    def edit(self, model: Any, start: int, stop: int, new_ids: Sequence[int] | torch.Tensor) -> None:
        """Replace tokens of a text that is in the cache: the new ones are computed, what follows is only moved.

        What follows keeps the keys and values that it had with the old text before it. If anything fails, the cache is as it was.

        Args:
            model: The model, or a wrapper of it.
            start: The first position to replace, among the tokens seen.
            stop: The one after the last; `start` to insert only.
            new_ids: Token ids, (tokens,) or (rows, tokens); none to delete only.
        """
        ids = torch.as_tensor(new_ids, dtype=torch.long, device=compat.base_model(model).device)
        if ids.ndim not in (1, 2):
            raise ConfigError.of("new_ids", "token ids, (tokens,) or (rows, tokens)", tuple(ids.shape))
        detours.edit(self, model, self._pruned, start, stop, ids[None] if ids.ndim == 1 else ids)
        self.log.crop(start)

    @property
    def is_compileable(self) -> bool:
        """Whether `torch.compile(fullgraph=True)` can take single tokens."""
        model = self.living_model
        if self.offloading or self._masks_differ or self._latents or model is None or not compat.compiles(model.device):
            return False
        return all(isinstance(layer, EquipLayer) and layer.is_compileable for layer in self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        # Asked between forward passes: the chance for what compiled ones can't do.
        layer = self.layers[layer_idx]
        if not torch.compiler.is_compiling() and isinstance(layer, EquipLayer) and layer.table.stale:
            for pruned in self._pruned:
                pruned.table.catch_up()
                pruned.own()
                if pruned.seen >= pruned.rotation.window:
                    pruned.unrotate(0)
                    pruned.make_final()
        return super().get_seq_length(layer_idx)


_update_uncompiled = torch.compiler.disable(EquipCache.update, reason="EquipCache compiles single tokens behind an uncompiled prompt")
