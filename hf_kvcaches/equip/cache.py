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
from hf_kvcaches.core.refusal import Refusal
from hf_kvcaches.core.report import CacheReport, summarise
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip import blocks, editing
from hf_kvcaches.equip.axes import refuse_images
from hf_kvcaches.equip.budgets import resolve_budgets
from hf_kvcaches.equip.coded import CodedStore, FlatCodes, PagedCodes
from hf_kvcaches.equip.heads import of_layer, plain_head_budgets
from hf_kvcaches.equip.latent import LatentStore, hand_out_uncompiled, latent_modules, require_absorbable
from hf_kvcaches.equip.layer import EquipLayer
from hf_kvcaches.equip.paged import PagedStore
from hf_kvcaches.equip.pages import PagePool, open_book
from hf_kvcaches.equip.policies import Policy, PressPolicy, resolve_policy
from hf_kvcaches.equip.quantized import QuantizedStore
from hf_kvcaches.equip.ragged import RaggedStore
from hf_kvcaches.equip.reconstruction import reconstruct
from hf_kvcaches.equip.retrieval_heads import RetrievalHeads
from hf_kvcaches.equip.rotation import RotatingPass, Scheme, SlotRotation
from hf_kvcaches.equip.scoring import watch_inputs
from hf_kvcaches.equip.settings import EquipSettings
from hf_kvcaches.equip.store import FlatStore, RotatedKeysStore
from hf_kvcaches.errors import ConfigError, UnsupportedError, is_number, whole_number


@dataclass(frozen=True)
class EquipReport(CacheReport):
    """What an `EquipCache` holds, and how many tokens it may keep.

    Args:
        policy: The name of the policy.
        budget: Of each layer that is pruned: tokens, or before the prompt a share of it.
    """

    policy: str = ""
    budget: tuple[int | float, ...] = ()

    def _shown(self, name: str) -> str:
        return summarise(self.budget) if name == "budget" else super()._shown(name)


class EquipCache(AnsweringCache):
    """Keeps a fixed number of tokens: a new one is written over the one that a policy gives up, and nothing is moved.

    EQUIP: EQUivariant preserving In-Place updates for Efficient token-pruning (Ramachandran et al.). Attention does not care in which order
    keys and values lie, so evicting and inserting are one write.

    **Departs from the paper**: rotary positions need neither a second cache of rotated keys nor a rotation of all keys a step. Queries are
    rotated instead of keys (`rotation.py`), in the memory of keys and values alone; the paper's way is `rope="rotated_keys"`. A
    prompt attends densely and is pruned when it has been read. Several tokens at once attend to all that was kept and to each other,
    and are pruned then.

    **Refuses**: what needs attention weights or padding, with a model that does not ask this package's attention; cropping
    tokens that were not recorded (`activate_past_recording`); ready masks that differ by head; on pages, gradients and
    offloading; with `head_budgets`, pages, gradients and policies whose heads all keep the same tokens; with latent attention, what is in
    `docs/equip.md`.

    **Memory per token**: that of keys and values, for `budget` tokens and no more, or that of the latent and the rotated part of the key
    (`latent.py`); with a policy that scores, another 8 to 16 bytes a slot and key head. On pages, rows take no more than they fill, rounded
    up to whole pages. `storage` holds keys and values in 0.53 ("int8") or 0.30 ("int4") of half precision's bytes at a head size of 64;
    `codec` in `codec.bytes_ratio`; while a layer runs, its own are there in the model's dtype too.

    Args:
        model: A transformers model, or its config; with a config, what needs attention weights or padding is refused.
        policy: "compactor", "leverage", "cur", "keydiff", "expected_attention", "kvzip", "streaming", "h2o", "tova", "snapkv", "lagkv",
            "knorm", "random", "chunk", "block", "critical", or a `Policy`.
        budget: Tokens to keep: a number, a fraction of the (longest) prompt, or one of these for each layer. The prompt is what the first
            call brings: with `prefill_chunk_size` the first chunk, so give a number there.
        sinks: First tokens of each row that always stay.
        recent: Newest tokens that always stay; None for the policy's own number.
        decode_budget: Tokens to keep while decoding, where these are more than `budget`: a number, or a fraction of the prompt. None: as
            many as of the prompt.
        head_budgets: "adakv" shares the slots of a layer among its heads by their scores; `RetrievalHeads`: some heads keep all tokens, the
            others `budget`; None: each head has as many.
        question_start: The index of the first prompt's token at which its question begins, negative to count from the end. What is
            before it is pruned before the question is read, and fractions are of it. None: nothing is a question.
        positions: "compact": counted within the cache, as in StreamingLLM; "original": as they were in the text.
        rope: How compact positions are kept: "frames", "on_read" (keys are rotated at each step), "rotated_keys" (the paper's), or "auto".
        backend: Of the kernels: "auto", "torch", "triton" or "reference".
        page_size: Keep slots in pages of so many, taken as rows fill them; None for one buffer, or the pool's.
        pool: The pages, shared with other caches, all with the same codec or all without; None for pages of the cache's own, of which there
            are as many as it needs.
        storage: Keep keys and values in fewer bits: "int8", "int4", or None for the model's dtype. Keys are kept without rotation then, and
            with original positions as the model rotated them.
        codec: Keep slots as its codes, but for the sinks; positions are compact then, and keys are rotated at each step.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    pass_class = RotatingPass
    takes_latents = True
    codec_class = KVCodec

    def __init__(
        self,
        model: Any,
        policy: str | Policy = "compactor",
        budget: int | float | Sequence[int | float] = 512,
        *,
        sinks: int = 4,
        recent: int | None = None,
        decode_budget: int | float | None = None,
        head_budgets: Literal["adakv"] | RetrievalHeads | None = None,
        question_start: int | None = None,
        positions: Literal["compact", "original"] = "compact",
        rope: Literal["auto", "frames", "on_read", "rotated_keys"] = "auto",
        backend: Literal["auto", "torch", "triton", "reference"] = "auto",
        page_size: int | None = None,
        pool: PagePool | None = None,
        storage: Literal["int8", "int4"] | None = None,
        codec: KVCodec | None = None,
        offloading: bool = False,
    ) -> None:
        policy = resolve_policy(policy)  # where model and policy are swapped, this says so
        base, config = compat.split_model(model)
        self._latents = base is not None and bool(getattr(config, "kv_lora_rank", None) and latent_modules(base))
        self._book = open_book(config, page_size, pool)
        self._settings = EquipSettings(
            policy,
            resolve_budgets(budget, len(compat.layer_plan(config))),
            sinks,
            recent,
            decode_budget,
            plain_head_budgets(head_budgets),
            question_start,
            positions,
            rope,
            backend,
            None if self._book is None else self._book.pool.page_size,
            storage,
            codec,
        )
        self._settings.check(model, latents=self._latents, offloading=offloading)
        for module in latent_modules(base).values() if self._latents else ():
            require_absorbable(module)
        self._rotations: list[SlotRotation] = []
        self._shard = shard_of(model)
        self._own_codec = codec if codec is None else codec.of_heads(self._shard)
        super().__init__(model, offloading=offloading)
        if codec is not None:
            codec.require_model(model)
        self._watch_model()
        # For caches that can be compiled `generate` makes masks ahead, which some models do in another way than their forward.
        self._masks_differ = self._model is not None and hasattr(self.model, "create_masks_for_generate")

    @property
    def policy(self) -> Policy:
        """Which tokens stay."""
        return self._settings.policy

    def _watch_model(self) -> None:
        """Has the model's modules tell this cache what its layers can't see, for as long as it lives."""
        if (model := self.living_model) is None:
            return
        if self.policy.reads_inputs:
            watch_inputs(model, self)
        if any(layer.geometry.axes and layer.rotation.compact for layer in self._own_layers):
            refuse_images(model, self, "Pass positions='original'.")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        module = latent_modules(self.model).get(layer_idx) if self._latents else None
        if module is None or layer_idx >= len(self.layers) or not isinstance(self.layers[layer_idx], EquipLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        require_absorbable(module)
        keys = torch.cat([value_states, key_states], -1)
        view, _ = super().update(keys, key_states, layer_idx, *args, **kwargs)
        return hand_out_uncompiled(view, module)

    def make_layer(self, layer_idx: int) -> EquipLayer:
        head_budgets = of_layer(self._settings.head_budgets, layer_idx, self._shard)
        settings = replace(self._settings, budget=self._settings.budget[layer_idx], head_budgets=head_budgets)
        if isinstance(settings.budget, int):  # of a fraction we know more when the prompt is there
            settings.limit_of(0)
        geometry = RotaryGeometry.from_config(self.config, layer_idx=layer_idx, latents=self._latents)
        rotation = self._make_rotation(geometry)
        compared = self._shard is not None or settings.policy.asks_all_heads or settings.head_budgets is not None
        config = self.config.per_layer_config[layer_idx]
        heads = getattr(config, "num_key_value_heads", None) if compared and not self._latents else None
        store = self._make_store(rotation, settings, layer_idx)
        return EquipLayer(settings, geometry, rotation, self.passes, store, self._shard, heads)

    def _make_store(self, rotation: SlotRotation, settings: EquipSettings, layer_idx: int) -> FlatStore:
        codec, backend, book = self._own_codec, settings.backend, self._book
        if codec is not None:
            paged = None if book is None else PagedCodes(rotation, backend, book, settings.budget, codec, layer_idx)
            return CodedStore(rotation, backend, codec, layer_idx, settings.sinks, paged or FlatCodes(rotation, backend))
        if book is not None:
            return PagedStore(rotation, backend, book, settings.budget)
        if self._latents:
            sizes: Any = self.config.per_layer_config[layer_idx]
            return LatentStore(rotation, backend, sizes.qk_rope_head_dim, sizes.kv_lora_rank)
        if settings.storage is not None:
            return QuantizedStore(rotation, backend, settings.storage)
        if settings.head_budgets is not None:
            return RaggedStore(rotation, backend)
        return (RotatedKeysStore if rotation.scheme == "rotated_keys" else FlatStore)(rotation, backend)

    def _make_rotation(self, geometry: RotaryGeometry) -> SlotRotation:
        if self._settings.positions == "original" or geometry.kind in ("learned", "none"):
            return SlotRotation("given")
        if geometry.changes_at is not None:
            geometry = geometry.at(0)  # until the first pass shows how far the text reaches
        if geometry.axes and self._model is None:
            raise UnsupportedError(
                "positions='compact': this model gives image tokens a position for each axis, which a cache that is built with a config "
                "can't tell from text. Build the cache with the model, or pass positions='original'."
            )
        if geometry.refusal is not None:
            raise UnsupportedError(f"positions='compact': {geometry.refusal}. Pass positions='original'.")
        scheme: Scheme = self._settings.rope
        if self._settings.rope == "auto":
            # A policy that evicts anywhere has kept keys rotated again and again, and in half precision each time rounds them. On an
            # accelerator a kernel rotates keys while it reads them; elsewhere that takes longer than all the rest.
            in_kernel = not self._latents and _rotates_on_read(self.living_model)
            unrotated = self._settings.storage is not None or self._settings.codec is not None
            scheme = "on_read" if unrotated or (in_kernel and not self.policy.order_only) else "frames"
        for known in self._rotations:  # shared with their tables
            if known.geometry is not None and known.geometry.rotates_like(geometry):
                return known
        self._rotations.append(SlotRotation(scheme, geometry))
        return self._rotations[-1]

    @property
    def codec(self) -> KVCodec | None:
        return self._settings.codec

    def report(self) -> EquipReport:
        """What the cache holds, measured, and its budget."""
        decided = ((layer, 0 if layer.state.deferring else layer.state.slots) for layer in self._own_layers)
        budgets = tuple(slots or layer.settings.budget for layer, slots in decided)
        return EquipReport(**self._report_fields(), policy=self.policy.name, budget=budgets)

    def settings(self) -> dict[str, Any]:
        # What "auto" came to depends on the device, and stored keys are rotated as it was.
        schemes = {layer.rotation.scheme for layer in self._own_layers} - {"given"}
        rope = schemes.pop() if schemes else self._settings.rope
        own = {"rope": rope, "policy": self.policy.settings(), "budget": list(self._settings.budget), "codec": None}
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
        if budget is None:
            ratio: Any = getattr(press, "compression_ratio", None)
            if not is_number(ratio) or not 0 <= ratio < 1:
                raise ConfigError.of("budget", "a budget, where the press has no compression_ratio from 0 to 1", ratio)
            budget = 1.0 - ratio
        return cls(model, policy, budget, **options)

    @property
    def adopt_window(self) -> int | None:
        observes = self.policy.observes
        return None if observes is None else max(observes, self.policy.queries)

    def adopt_refused(self, with_queries: bool = False) -> Refusal | None:
        if self._latents:
            return Refusal(
                "model: EquipCache prunes latents as the model makes them, and takes none over. Feed the text to the EquipCache."
            )
        needed, name = self.adopt_window, self.policy.name or type(self.policy).__name__
        if needed == 0 or (with_queries and needed is not None):
            return None
        whose, others = ("all queries", "'snapkv', ") if needed is None else (f"a prompt's last {needed} queries", "")
        return Refusal(
            f"policy: {name!r} scores by {whose}, which stored keys and values don't have. "
            f"Use {others}'leverage', 'keydiff', 'lagkv' or 'streaming'."
        )

    @property
    def pool(self) -> PagePool | None:
        """Where the pages are from; None for the flat layout."""
        return None if self._book is None else self._book.pool

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
        """Prunes what is held to `budget` now; with "kvzip", which waits for it, after the model has read the context once more.

        Args:
            model: The model that filled the cache, or a wrapper of it; None for the one that the cache was made with.
            upto: Where the context ends, among the tokens seen: what follows stays and is not looked at. A fraction is then of the context.
                None: everything is context.
            input_ids: The context, (rows, tokens), for "kvzip" where it was not `generate` that fed it.
        """
        seen = self.seen
        end = seen if upto is None else whole_number("upto", upto, 1, f"a position from 1 to the {seen} tokens seen", most=max(1, seen))
        if not seen:
            raise ConfigError.of("compress", "a cache that holds a context", "an empty one", "Feed it the context first.")
        if end < seen and self.policy.observes != 0:
            raise UnsupportedError(
                f"upto: {self.policy.name!r} scores by attention, and has seen that of the tokens behind upto. Make the cache with "
                "question_start, feed the question after compress, or use 'compactor', 'leverage' or 'kvzip'."
            )
        layers, behind = self._own_layers, seen - end
        limits = []
        for layer in layers:
            context = layer.seen - behind - (0 if layer.state.first is None else int(layer.state.first.min()))
            limits.append((layer.settings.limit_of(context, behind), context))
        received: Sequence[torch.Tensor | None] = [None] * len(layers)
        if self.policy.deferred:
            base = self.model if model is None else model
            ids = self._context(input_ids, end).to(compat.base_model(base).device)
            received = reconstruct(self, base, layers, ids, self.policy.deferred)
        for layer, (limit, context), reconstruction in zip(layers, limits, received, strict=True):
            layer.take_limits(limit, context)
            blocks.compress(layer, limit, layer.seen - behind, reconstruction)
            layer.make_final()

    def _context(self, input_ids: torch.Tensor | None, tokens: int) -> torch.Tensor:
        """The token ids of the context, (rows, tokens)."""
        ids = self.log.ids if input_ids is None else input_ids.reshape(-1, input_ids.shape[-1])
        rows = max(layer.store.shape[0] for layer in self._own_layers)
        if ids.shape[0] != rows or ids.shape[1] < tokens:
            what = f"the ids of the {tokens} tokens of the context in {rows} rows"
            raise ConfigError.of("input_ids", what, tuple(ids.shape), "Pass compress(model, input_ids=...), padding included.")
        return ids[:, :tokens]

    def evict(self, positions: Sequence[int] | torch.Tensor) -> None:
        """Forgets tokens in all layers, rows and heads that still have them; others keep their positions among the tokens seen.

        Their slots are free for what comes next. With compact positions the gap closes. Layers with a sliding window forget by themselves:
        beside them, tokens that every window has passed can be evicted.

        Args:
            positions: Indices among the tokens seen.
        """
        editing.evict(self, self._own_layers, torch.as_tensor(positions, dtype=torch.long).reshape(-1))

    def edit(self, model: Any, start: int, stop: int, new_ids: Sequence[int] | torch.Tensor) -> None:
        """Replaces tokens of a text that is in the cache: the new ones are computed, what follows is only moved.

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
        editing.edit(self, model, self._own_layers, start, stop, ids[None] if ids.ndim == 1 else ids)
        self.log.crop(start)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = super().__deepcopy__(memo)
        copied._watch_model()
        return copied

    @property
    def is_compileable(self) -> bool:
        """Whether `torch.compile(fullgraph=True)` can take single tokens: see `graphs.py`."""
        if self.offloading or self._masks_differ or self._latents:
            return False
        return all(isinstance(layer, EquipLayer) and layer.is_compileable for layer in self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        # Asked between forward passes: the chance for what compiled ones can't do.
        layer = self.layers[layer_idx]
        if not torch.compiler.is_compiling() and isinstance(layer, EquipLayer) and layer.state.stale:
            for own in self._own_layers:
                own.state.catch_up()
                own.own(False)
        return super().get_seq_length(layer_idx)

    @property
    def _own_layers(self) -> list[EquipLayer]:
        """The layers with full attention."""
        return [layer for layer in self.layers if isinstance(layer, EquipLayer)]


def _rotates_on_read(model: Any) -> bool:
    """Whether a kernel rotates keys on the way, and they are too short to be rotated more than once."""
    return model is not None and model.device.type == "cuda" and model.dtype in (torch.float16, torch.bfloat16)
