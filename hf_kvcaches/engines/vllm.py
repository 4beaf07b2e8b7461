"""`CodecConnector`: vLLM keeps prompts as a codec's codes in a store, where other instances find them.

The connector in the scheduler looks chunks of a prompt up and reads them, in a thread, before it promises anything; with each step it hands
blobs and block ids over. The one in a worker decodes blobs into blocks before the pass, and copies new chunks after it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hf_kvcaches.engines.chunks import BlockLayout, ChunkCoder, ChunkWriter, chain
from hf_kvcaches.engines.engine_codec import EngineCodec, require_version
from hf_kvcaches.errors import ConfigError, KVCacheError, UnsupportedError, whole_number
from hf_kvcaches.kernels.checksum import digest_of
from hf_kvcaches.stores.catalog import TIMEOUT, open_blobs

require_version("vllm", vllm.__version__)

_FORMAT = 1  # of blobs, and of what their keys are made of
_TOGETHER = 16  # chunks that are read or decoded together: more take no less time, and more memory
_LOOKUPS = 16  # prompts that are being read, or were and wait for blocks
_PATIENCE = 0.002  # seconds that the scheduler waits for a prompt that is being read

Blob = dict[str, torch.Tensor]
logger = init_logger(f"vllm.{__name__}")


@dataclass
class Transfers(KVConnectorMetadata):
    """What the workers do in a step, chunk by chunk."""

    loads: list[tuple[list[Blob], list[int], int, int]]  # blobs, the blocks that they fill, the first token's position, tokens to leave out
    saves: list[tuple[list[str], list[int], int]]  # keys in the store, blocks, the first token's position


@dataclass
class Lookup:
    """Blobs of a prompt from the chunk `start` on, and how many of its tokens vLLM has computed."""

    start: int
    blobs: Future[list[Blob]]
    computed: int = 0


class CodecConnector(KVConnectorBase_V1):
    """Full chunks of prompts as codes in a store: another instance decodes them, rotates their keys and skips the prefill.

    A failed or slow read is a miss; what was read until then is a hit. Under tensor parallelism codes are of all heads, so that instances
    of any size share them. Prompts with images, embeddings or LoRA adapters are left alone.

    **Refuses** hybrid models, windows, latents, quantized caches, layers of draft models, and pipeline or context parallelism.

    `kv_connector_extra_config` has:

    - `store`: `disk:FOLDER` or `redis://host:port/db?prefix=NAME`
    - `codec`: the folder that `hf-kvcaches calibrate codec --for vllm` wrote
    - `cap`: the most bytes of the store, beyond which the oldest blobs are deleted; without it there is no limit
    - `chunk`: tokens of a chunk, a multiple of 64 and of vLLM's block size (128)
    - `timeout`: seconds that all reads of a prompt may wait for the store (1)
    """

    requires_kv_delivery = False  # what is not stored is a later miss

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        model, self._block = vllm_config.model_config, vllm_config.cache_config.block_size
        defaults = {"cap": None, "chunk": math.lcm(128, self._block), "timeout": TIMEOUT}
        options = defaults | self._kv_transfer_config.kv_connector_extra_config
        if options.keys() != {"store", "codec", "cap", "chunk", "timeout"}:
            raise ConfigError.of("kv_connector_extra_config", "store, codec, and perhaps cap, chunk and timeout", sorted(options))
        self._chunk = whole_number("chunk", options["chunk"], 1)
        if self._chunk % self._block or self._chunk % 64:
            raise ConfigError.of("chunk", f"a multiple of 64 and of vLLM's block size, {self._block}", self._chunk)
        engine_codec = EngineCodec.load(options["codec"], "vllm")
        require_served(vllm_config, kv_cache_config, engine_codec)
        engine_codec.require_checkpoint(model.model, model.revision)
        self._store = open_blobs(options["store"], options["timeout"])
        if role is KVConnectorRole.SCHEDULER:
            # What keys and values depend on besides tokens, and codes besides these.
            facts = [_FORMAT, self._chunk, engine_codec.codec.digest, engine_codec.checkpoint, str(model.dtype), str(model.quantization)]
            self._root = digest_of([*facts, str(getattr(model.hf_text_config, "rope_parameters", None))]).encode()
            self._keys, self._blocks, self._lookups = dict[str, list[str]](), dict[str, list[int]](), dict[str, Lookup]()
            self._loads, self._reader = list[Any](), ThreadPoolExecutor(1, "hf-kvcaches-reader")
        else:
            self._spec, self._heads = kv_cache_config.kv_cache_groups[0].kv_cache_spec, model.get_total_num_kv_heads()
            self._layers, self._failed = list[tuple[torch.Tensor, BlockLayout]](), set[int]()
            self._coder = ChunkCoder(engine_codec.codec, model.hf_text_config, self._chunk)
            self._writer = ChunkWriter(self._store, self._coder, options["cap"], logger.warning)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        name, start = request.request_id, num_computed_tokens // self._chunk
        if name not in self._keys:
            # No chunks where keys and values depend on more than tokens.
            more = request.prompt_embeds is not None or request.mm_features or request.lora_request
            root, ids = self._root + (request.cache_salt or "").encode(), None if more else request.prompt_token_ids
            self._keys[name] = chain(root, ids or [], self._chunk)
        keys, lookup = self._keys[name], self._lookups.get(name)
        if lookup is None or lookup.start > start:
            if start >= len(keys) or request.skip_reading_prefix_cache or not self._kv_transfer_config.is_kv_consumer:
                return 0, False
            if lookup is None and len(self._lookups) >= _LOOKUPS:
                return None, False
            lookup = self._lookups[name] = Lookup(start, self._reader.submit(self._read, keys[start:]))
        lookup.computed = num_computed_tokens
        try:
            end = (lookup.start + len(lookup.blobs.result(_PATIENCE))) * self._chunk
        except TimeoutError:
            return None, False
        # The last token is computed in any case, for its logits.
        return max(0, min(end, request.num_tokens - 1) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        lookup = self._lookups.pop(request.request_id, None)
        if num_external_tokens and lookup is not None:
            chunk, blobs = lookup.computed // self._chunk, lookup.blobs.result()
            own = blocks.get_block_ids()[0][lookup.computed // self._block : (lookup.start + len(blobs)) * self._chunk // self._block]
            self._loads.append((blobs[chunk - lookup.start :], own, chunk * self._chunk, lookup.computed % self._chunk))

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        loads, self._loads, saves = self._loads, [], []
        for name, blocks, computed in self._scheduled(scheduler_output):
            keys, end = self._keys.get(name, []), computed + scheduler_output.num_scheduled_tokens[name]
            first, last = computed // self._chunk, min(end // self._chunk, len(keys))
            if first < last and self._kv_transfer_config.is_kv_producer:
                own = blocks[first * self._chunk // self._block : last * self._chunk // self._block]
                saves.append((keys[first:last], own, first * self._chunk))
        return Transfers(loads, saves)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        for known in (self._keys, self._blocks, self._lookups):
            known.pop(request.request_id, None)
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        modules, layouts = self._vllm_config.compilation_config.static_forward_context, dict[Any, BlockLayout]()
        for name, cache in sorted(kv_caches.items(), key=lambda item: extract_layer_index(item[0])):
            kind = type(modules[name].impl), cache.shape[1:], cache.dtype
            if kind not in layouts:
                write = functools.partial(modules[name].impl.do_kv_cache_update, modules[name])
                dims = self._spec.head_size, self._spec.head_size_v
                layouts[kind] = BlockLayout(cache, write, self._spec.num_kv_heads, dims, self._block)
            self._layers.append((cache, layouts[kind]))

    @torch.inference_mode()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        processes = get_tp_group()
        first_head = processes.rank_in_group * self._heads // processes.world_size
        own = slice(first_head, first_head + self._spec.num_kv_heads)
        for blobs, blocks, first, skip in self._get_connector_metadata().loads:
            try:
                for start in range(0, len(blobs), _TOGETHER):
                    group = blobs[start : start + _TOGETHER]
                    count = (len(group) * self._chunk - skip) // self._block
                    by_layer = self._coder.decode(group, first, skip, self._layers[0][0].device)
                    for (cache, layout), states in zip(self._layers, by_layer, strict=True):
                        layout.write(cache, blocks[:count], [side[own] for side in states])
                    first, skip, blocks = first + len(group) * self._chunk, 0, blocks[count:]
            except (KVCacheError, KeyError, RuntimeError) as error:
                logger.warning("Chunks of a prompt could not be decoded: %s", error)
                self._failed.update(blocks)

    @torch.inference_mode()
    def wait_for_save(self) -> None:
        group = get_tp_group()
        for keys, blocks, first in self._get_connector_metadata().saves:
            pairs = [layout.read(cache, blocks) for cache, layout in self._layers]
            sides = [torch.stack(side) for side in zip(*pairs, strict=True)]
            if group.world_size > 1:
                # Where there are fewer heads than processes, several processes have the same.
                sides = [group.all_gather(side, 1) for side in sides]
                sides = [side[:, :: side.shape[1] // self._heads] for side in sides]
            own_first, own_end = (rank * len(keys) // group.world_size for rank in (group.rank_in_group, group.rank_in_group + 1))
            for start in range(own_first, own_end, _TOGETHER):
                names = keys[start : min(start + _TOGETHER, own_end)]
                tokens = slice(start * self._chunk, (start + len(names)) * self._chunk)
                self._writer.submit(names, (sides[0][:, :, tokens], sides[1][:, :, tokens]), first + tokens.start)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: blocks are complete before the pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are copied after the pass."""

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.SCHEDULER:
            self._reader.shutdown(wait=False, cancel_futures=True)
        else:
            self._writer.close()

    def _scheduled(self, output: Any) -> Iterator[tuple[str, list[int], int]]:
        """Each request of a step, its blocks, and its tokens that were computed before."""
        for new in output.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[0])
            yield new.req_id, self._blocks[new.req_id], new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            known = [] if name in cached.resumed_req_ids else self._blocks.get(name, [])
            self._blocks[name] = known + (list(blocks[0]) if blocks else [])
            yield name, self._blocks[name], computed

    def _read(self, keys: list[str]) -> list[Blob]:
        """The blobs of the first of these chunks that are in the store, as far as it answers in time."""
        blobs: list[Blob] = []
        self._store.begin()
        for start in range(0, len(keys), _TOGETHER):
            group = keys[start : start + _TOGETHER]
            loaded = self._store.get_many(group)
            blobs += map(loaded.blobs.__getitem__, itertools.takewhile(loaded.blobs.__contains__, group))
            if loaded.error is not None:
                logger.warning("Prompts are computed where the store does not answer: %s", loaded.error)
            if len(blobs) < start + len(group):
                break
        return blobs


def require_served(vllm_config: Any, kv_cache_config: Any, engine_codec: EngineCodec) -> None:
    """Refuse what can't be coded, with the reason."""
    parallel, groups, layers = vllm_config.parallel_config, kv_cache_config.kv_cache_groups, engine_codec.codec.layer_count
    specs, names = [group.kv_cache_spec for group in groups], [name for group in groups for name in group.layer_names]
    plain = [type(spec) is FullAttentionSpec and not spec.sliding_window and not spec.attention_chunk_size for spec in specs]
    reasons = {
        "pipeline or context parallelism": parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1,
        "hybrid models, whose layers keep different things, windows and latents": plain != [True],
        "quantized caches": plain == [True] and specs[0].dtype not in (torch.bfloat16, torch.float16, torch.float32),
        f"{len(names)} layers of attention with a codec of {layers}": sorted(map(extract_layer_index, names)) != list(range(layers)),
    }
    if refused := [reason for reason, applies in reasons.items() if applies]:
        raise UnsupportedError(f"CodecConnector does not serve {refused[0]}. Use a connector that keeps keys and values as they are.")
