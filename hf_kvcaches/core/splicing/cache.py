"""The base of caches that fill in prompts from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.prefill import PrefillCall, Remaining
from hf_kvcaches.core.splicing.history import History
from hf_kvcaches.core.splicing.layer import SplicedLayer
from hf_kvcaches.core.splicing.placing import Loaded, like_stored, splice_row
from hf_kvcaches.core.splicing.rotation import Rotation, rotation_of
from hf_kvcaches.core.splicing.sparse import SparsePass
from hf_kvcaches.errors import ConfigError, UnsupportedError

Places = npt.NDArray[np.int64]


class SplicingCache(KVCache):
    """Keeps every token; what is known of a prompt is written into the layers where it stands, and the model runs the tokens between.

    A subclass writes `take_prefill`. The cache knows its tokens (`history`), how their keys are turned (`rotation`), and runs passes over
    tokens that do not follow each other.

    Args:
        model: A transformers model.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    takes_over_prefill = True
    own_layer_types = ("full_attention", "sliding_attention", "chunked_attention")

    def __init__(self, model: Any, *, offloading: bool = False) -> None:
        super().__init__(model, offloading=offloading)
        self.rotation: Rotation = rotation_of(self.config)
        self._check_layers()
        self.history = History()
        self._one_pass = self.exchanged = False

    @property
    def approximates(self) -> bool:
        """Whether tokens can stand behind another text with this model."""
        return self.rotation.turns and self.attention_enabled

    def make_layer(self, layer_idx: int) -> SplicedLayer:
        return SplicedLayer()

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Does by hand what `generate` does with a prompt: fills the cache with all tokens but the last.

        Args:
            input_ids: (batch, tokens), what follows the tokens in the cache.
            attention_mask: 1 where a token is real, (batch, tokens seen before + new ones), or None.

        Returns:
            How many tokens the cache has now. Go on with `model(input_ids[:, -1:], past_key_values=cache)` or `generate(input_ids, ...)`.
        """
        if input_ids.ndim != 2 or input_ids.shape[1] < 2:
            raise ConfigError.of("input_ids", "at least two tokens a row, (batch, tokens)", tuple(input_ids.shape))
        with torch.no_grad():
            self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=self, use_cache=True, logits_to_keep=1)
        self.crop(-1)
        return self.seen

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> None:
        super().observe(input_ids, attention_mask, position_ids)
        self.history.observe(input_ids, attention_mask, position_ids, self.seen)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        held = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._one_pass and layer_idx == len(self.layers) - 1 and not self.layers[-1].only_stores:
            self._end_pass()
        return held

    def begin_pass(self, running: SparsePass) -> Callable[[], AbstractContextManager[None]]:
        """The next pass through all layers runs the tokens of a sparse one, after which new tokens follow all others again.

        Args:
            running: The pass.

        Returns:
            As `begin_last`.
        """
        for layer in self.layers:
            layer.running = running
        return self.begin_last(running)

    def begin_last(self, running: SparsePass) -> Callable[[], AbstractContextManager[None]]:
        """In the next pass, the last layer answers for the last token alone.

        Args:
            running: The pass; its tokens may also be those that follow all others.

        Returns:
            For `Remaining`.
        """
        self._one_pass = True
        return partial(self.layers[-1].storing, running)

    @contextmanager
    def sparse(self, running: SparsePass) -> Iterator[None]:
        """While open, passes run the tokens of a sparse one.

        Args:
            running: The pass.
        """
        for layer in self.layers:
            layer.running = running
        try:
            yield
        finally:
            self._end_pass()

    def _end_pass(self) -> None:
        self._one_pass = False
        for layer in self.layers:
            layer.running = None

    def write(self, padding: Sequence[int], rows: Sequence[Sequence[Loaded]], total: int) -> None:
        """Makes room for all slots, and writes what is stored; does nothing where that is nothing.

        Args:
            padding: Slots at the start of each row that hold no token.
            rows: What to write into each row.
            total: How many slots there will be.
        """
        some = next((pieces[0] for pieces in rows if pieces), None)
        if some is None:
            return
        _, _, decoder = compat.decoder_layers(self.model)
        for layer, module, (keys, values) in zip(self.layers, decoder, like_stored(some, len(self.layers)), strict=True):
            device = compat.layer_device(module)
            layer.open(len(rows), total, keys.to(device), values.to(device))
        for number, (slots, pieces) in enumerate(zip(padding, rows, strict=True)):
            splice_row(self.layers, number, slots, pieces, self.rotation.layers)

    def behind(self, call: PrefillCall, taken: int, padding: Sequence[int], total: int) -> int | Remaining:
        """What remains of a prompt behind its first tokens, with as little of the last layer as the first new token needs.

        Args:
            call: The prompt.
            taken: How many of its tokens are in the cache.
            padding: Slots at the start of each row that hold no token.
            total: How many slots there will be.
        """
        ids, positions = call.input_ids, call.position_ids
        if not self.attention_enabled or ids.shape[1] - taken < 2:
            return taken
        slots = torch.arange(total - ids.shape[1] + taken, total, device=ids.device).expand(len(ids), -1)
        running = SparsePass(slots, torch.tensor(padding, device=ids.device), total)
        positions = running.positions if positions is None else positions[..., taken:]
        return Remaining(ids[:, taken:], positions, storing=self.begin_last(running))

    def between(self, call: PrefillCall, places: Sequence[Places], padding: Sequence[int], total: int) -> Remaining:
        """What remains of a prompt between pieces that are written.

        Args:
            call: The prompt.
            places: Of the tokens to run in each row, padding not counted, ascending; the last one is the row's last.
            padding: Slots at the start of each row that hold no token.
            total: How many slots there will be.
        """
        device, before = call.input_ids.device, total - call.input_ids.shape[1]
        # What only fills up comes first, because the last column is the one that generate looks at.
        slots = np.full((len(places), max(map(len, places))), total)
        for line, own, pad in zip(slots, places, padding, strict=True):
            line[len(line) - len(own) :] = own + pad
        running = SparsePass(torch.from_numpy(slots).to(device), torch.tensor(padding, device=device), total)
        ids = torch.cat([call.input_ids, call.input_ids[:, -1:]], dim=1).gather(1, running.slots - before)
        return Remaining(ids, running.positions, storing=self.begin_pass(running))

    def rows_change(self) -> None:
        """Called before rows are exchanged, repeated or dropped."""

    def reset(self) -> None:
        super().reset()
        self.history.reset()
        self._one_pass = self.exchanged = False

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.history.crop(self.seen)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.rows_change()
        super().reorder_cache(beam_idx)
        self._exchange(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows_change()
        super().batch_repeat_interleave(repeats)
        self._exchange(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.rows_change()
        super().batch_select_indices(indices)
        self._exchange(lambda tensor: tensor[indices.to(tensor.device) if isinstance(indices, torch.Tensor) else indices])

    def _exchange(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.exchanged = True
        self.history.map_rows(rows)

    def _check_layers(self) -> None:
        foreign = sorted({kind for kind, _ in compat.layer_plan(self.config) if kind not in self.own_layer_types})
        if foreign:
            raise UnsupportedError(f"model: layers of the types {foreign} keep no keys and values that could be reused. Use GrowingCache.")
        if self.rotation.refused:
            raise UnsupportedError(f"model: {self.rotation.why}. Use GrowingCache.")
        if self._learned_prompt:
            raise UnsupportedError("model: a learned prompt stands before every text, and is in no fingerprint. Use GrowingCache.")
