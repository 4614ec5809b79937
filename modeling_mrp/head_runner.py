"""Runs the MRP head beside the engine: over its own cache of the prefix, or over the current block alone.

The head caches the committed prefix as in training: clean tokens with their clean hidden states. A finished block is
not worth a call of its own: it waits, and rides along as the first segment of the next call.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .generation_config_mrp import DecodingOptions
from .packed_forward import PackedStack, each_itself, fill_masked, places


class _Waiting(NamedTuple):
    """Finished blocks not yet in the head's cache.

    Attributes:
        rows: `[rows]` bool, and `rows_host` the same in numpy: the rows that have one.
        prefix_host: `[rows]` numpy, how much of every row the cache holds.
        ids, hidden: of the blocks.
    """

    rows: Tensor
    rows_host: np.ndarray
    prefix_host: np.ndarray
    ids: Tensor
    hidden: Tensor


class HeadRunner:
    """The head, packed over ragged rows.

    Args:
        model: an `MRPForCausalLM`.
        options: of which `context`, `block_length` and the mask token are read.
        capacity: positions to allocate for the prefix.
    """

    def __init__(self, model: Any, options: DecodingOptions, capacity: int):
        self.model, self.options = model, options
        self.stack: PackedStack | None = None
        if options.context == "prefix":
            layers = model.config.num_nextn_predict_layers
            self.stack = PackedStack(model, options.block_length, capacity, options.kernels, layers)
        self.passes = 0
        # Whether any output was NaN or infinite; stays on the device until the engine's next look at it.
        self.broken: Tensor | None = None
        self.waiting: _Waiting | None = None

    def remember(
        self,
        finished: Tensor,
        finished_host: np.ndarray,
        ids: Tensor,
        hidden: Tensor,
        start: Tensor,
        start_host: np.ndarray,
    ) -> None:
        """Notes finished blocks, whose prefix is the rows' `start` `[rows]` (`start_host` in numpy).

        Args:
            finished: `[rows]` bool, rows that finished a block; finished_host: the same in numpy.
            ids: `[rows, block]` int64; hidden: `[rows, block, hidden]` of those blocks.
        """
        if self.stack is None:
            return
        if self.waiting is not None and (self.waiting.rows_host & finished_host).any():
            # The block before still waits, since no draft was worth a call in between.
            self.run(self.waiting.ids[:, None], self.waiting.hidden[:, None], start, int(start_host.max()), True)
        prefix_host = start_host
        if self.waiting is not None:
            prefix_host = np.where(self.waiting.rows_host, self.waiting.prefix_host, start_host)
            ids = torch.where(finished[:, None], ids, self.waiting.ids)
            hidden = torch.where(finished[:, None, None], hidden, self.waiting.hidden)
            finished, finished_host = self.waiting.rows | finished, self.waiting.rows_host | finished_host
        self.waiting = _Waiting(finished, finished_host, prefix_host, ids, hidden)

    def keep_rows(self, rows: Tensor, rows_host: list[int]) -> None:
        """Keeps only `rows` `[m]` (also on the host) of what waits; the engine orders the cache itself."""
        if self.waiting is not None:
            kept = (part[rows if isinstance(part, Tensor) else rows_host] for part in self.waiting)
            # After the last row nothing waits: a later call that reuses the cache reads that block again.
            self.waiting = _Waiting(*kept) if rows_host else None

    def run(self, ids: Tensor, accumulated: Tensor, start: Tensor, longest: int, ragged: bool) -> Tensor:
        """One head step on several states per row.

        Args:
            ids: `[rows, states, block]` int64, -1 at masked positions.
            accumulated: `[rows, states, block, hidden]`, acc_{k-1}.
            start: `[rows]` int64, start of the rows' current block, which is also the length of their prefix.
            longest, ragged: the largest start, and whether the starts differ.

        Returns:
            `[rows, states, block, hidden]`, acc_k.
        """
        self.passes += 1
        rows, states, block = ids.shape
        kernels = self.options.kernels
        if self.stack is None:
            positions = (start[:, None] + places(block, start.device)).repeat_interleave(states, 0)
            filled = fill_masked(ids, self.options.mask_token_id).flatten(0, 1)
            _, after = self.model.head(filled, accumulated.flatten(0, 1), positions, None, kernels=kernels)
            return self._watched(after.view(rows, states, block, -1))
        starts = start[:, None].expand(rows, states)
        visible = each_itself(states, ids.device).expand(rows, states, states)
        prefix = start
        if self.waiting is not None:
            ids, accumulated, starts, visible, prefix = _beside(self.waiting, ids, accumulated, starts, start)
            held = self.waiting.prefix_host
            longest, ragged = int(held.max()), bool((held != held[0]).any())
        filled = fill_masked(ids, self.options.mask_token_id).flatten(1)
        positions = self.stack.positions(starts)
        arguments = self.stack.arguments(visible, prefix, longest, ragged)
        _, after = self.model.head(filled, accumulated.flatten(1, 2), positions, kernels=kernels, **arguments)
        after = after.view(rows, -1, block, after.shape[-1])[:, -states:]
        if self.waiting is not None:
            stored = torch.from_numpy(np.flatnonzero(self.waiting.rows_host)).to(start.device)
            source = torch.full_like(stored, longest)
            self.stack.cache.commit(source, prefix[stored], stored, block)
            self.waiting = None
        return self._watched(after)

    def take_broken(self) -> Tensor | None:
        """Whether any output since the last call of this was NaN or infinite, bool `[]`; `None` if there was none."""
        broken, self.broken = self.broken, None
        return broken

    def _watched(self, after: Tensor) -> Tensor:
        # The largest magnitude is NaN if any is, and so not below infinity either.
        broken = ~(torch.linalg.vector_norm(after, torch.inf) < torch.inf)
        self.broken = broken if self.broken is None else self.broken | broken
        return after


def _beside(
    waiting: _Waiting, ids: Tensor, accumulated: Tensor, starts: Tensor, start: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Puts the waiting blocks in front of the states; where none waits, what stands there is seen by nothing."""
    prefix = start - waiting.rows * ids.shape[2]
    ids = torch.cat([waiting.ids[:, None], ids], dim=1)
    accumulated = torch.cat([waiting.hidden[:, None], accumulated], dim=1)
    starts = torch.cat([prefix[:, None], starts], dim=1)
    visible = each_itself(ids.shape[1], ids.device).repeat(ids.shape[0], 1, 1)
    visible[:, 1:, 0] = waiting.rows[:, None]
    return ids, accumulated, starts, visible, prefix
