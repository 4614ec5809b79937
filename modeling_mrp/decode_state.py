"""What the decode engine keeps of its rows between two forwards, and what it counts."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .advance import KnownState, NextState
from .generation_config_mrp import DecodingOptions
from .packed_forward import MASKED, Segments
from .token_statistics import TokenStatistics
from .walk import Walk


@dataclass
class DecodeState:
    """The running rows; `[rows, ...]` tensors on the device, `*_host` copies in numpy.

    Attributes:
        index: `[rows]` numpy, each row's place in the batch that `generate` was given.
        row_key: `[rows]` int64, the row part of the noise's key.
        first: `[rows, block]` int64: the certain next state, -1 at masked positions.
        start: `[rows]` int64: its first position, which is also the length of the row's committed prefix.
        step: `[rows]` int64: denoising steps done in the block.
        basis: the known state that `first` follows, with its logits; `None` before the first forward.
        has_basis: `[rows]` bool: whether `basis` belongs to the same block as `first`.
        committed: `[batch]` numpy, prefix lengths of rows that have ended.
        places: `[batch]` numpy, which row of the batch each row of the caches holds.
        any_basis: whether any row has one (host).
    """

    index: np.ndarray
    row_key: Tensor
    first: Tensor
    first_host: np.ndarray
    start: Tensor
    start_host: np.ndarray
    step: Tensor
    block: int
    basis: KnownState | None
    has_basis: Tensor
    committed: np.ndarray
    places: np.ndarray
    any_basis: bool = False

    @classmethod
    def start_of(cls, prompts: list[Tensor], row_key: Tensor, block: int) -> "DecodeState":
        """All rows at the first state of the block that holds their prompt's tail."""
        device = prompts[0].device
        starts = [len(prompt) // block * block for prompt in prompts]
        first = torch.full((len(prompts), block), MASKED, device=device)
        for row, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
            first[row, : len(prompt) - start] = prompt[start:]
        start = torch.tensor(starts, device=device)
        return cls(
            index=np.arange(len(prompts)),
            row_key=row_key,
            first=first,
            first_host=first.cpu().numpy(),
            start=start,
            start_host=np.array(starts),
            step=torch.zeros_like(start),
            block=block,
            basis=None,
            has_basis=torch.zeros_like(start, dtype=torch.bool),
            committed=np.zeros(len(prompts), dtype=np.int64),
            places=np.arange(len(prompts)),
        )

    @property
    def rows(self) -> int:
        return len(self.index)

    @property
    def longest(self) -> int:
        """Length of the longest committed prefix."""
        return int(self.start_host.max())

    @property
    def ragged(self) -> bool:
        """Whether the rows' prefixes differ in length."""
        return bool((self.start_host != self.start_host[0]).any())

    def add_block(self, committed: Tensor, committed_host: np.ndarray) -> None:
        """Lengthens the prefix of the rows that committed a block."""
        self.start = self.start + self.block * committed
        self.start_host = self.start_host + self.block * committed_host

    def keep(self, kept: Tensor, kept_host: list[int]) -> None:
        """Keeps only the rows `kept` `[m]`, in that order."""
        self.index, self.start_host = self.index[kept_host], self.start_host[kept_host]
        self.first_host = self.first_host[kept_host]
        self.row_key, self.first, self.start = self.row_key[kept], self.first[kept], self.start[kept]
        self.step, self.has_basis = self.step[kept], self.has_basis[kept]
        if self.basis is not None and kept_host:
            # The next drafts are made from it, over the prefixes of the rows that are left.
            self.basis = self.basis.keep(kept, self.longest, self.ragged)


class Counters:
    """Exact counts of one call, per row of the batch (`[rows]` int64 unless said otherwise).

    See `MRPGenerateOutput` for the meaning of each.
    """

    def __init__(self, rows: int, depths: int, trace_length: int, device: torch.device):
        self.prefill_forwards = 0
        self.total_forwards = 0
        self.streamed = 0
        self.backbone_forwards = np.zeros(rows, dtype=np.int64)
        self.head_passes = np.zeros(rows, dtype=np.int64)
        self.segments = torch.zeros(rows, dtype=torch.int64, device=device)
        self.reveals_taken_back = torch.zeros_like(self.segments)
        self.drafts_proposed = torch.zeros(rows, depths, dtype=torch.int64, device=device)
        self.drafts_accepted = torch.zeros_like(self.drafts_proposed)
        # step and source of every reveal, [2, rows, positions]
        self.reveals = torch.full((2, rows, trace_length), -1, device=device) if trace_length else None

    @classmethod
    def for_batch(cls, rows: int, options: DecodingOptions, longest: int, device: torch.device) -> "Counters":
        """Depths up to a whole block and the state that rides along; a trace only where it was asked for."""
        block = options.block_length
        trace_length = (-(-longest // block) + 1) * block if options.trace else 0
        return cls(rows, block + 1, trace_length, device)

    def count_forward(self, index: np.ndarray, alive: Tensor) -> None:
        self.total_forwards += 1
        self.backbone_forwards[index] += 1
        rows = torch.from_numpy(index).to(alive.device)
        self.segments.index_add_(0, rows, alive.sum(dim=1))

    def count_walk(self, index: np.ndarray, segments: Segments, walk: Walk) -> None:
        """Drafts by depth: reveals beyond the certain first state; what rides with a certain state is no draft."""
        if segments.ids.shape[1] < 2:
            return
        depth = segments.step - segments.step[:, :1]
        mother = depth.gather(1, segments.parent.clamp(min=0))
        depth = torch.where(segments.parent >= 0, mother + 1, depth)
        draft = segments.alive & (segments.parent != 0)
        draft[:, 0] = False
        rows = torch.from_numpy(index).to(depth.device)
        slot = depth.sub(1).clamp(0, self.drafts_proposed.shape[1] - 1)
        counts = torch.zeros((depth.shape[0], self.drafts_proposed.shape[1]), dtype=torch.int64, device=depth.device)
        self.drafts_proposed.index_add_(0, rows, counts.scatter_add(1, slot, draft.long()).clamp(max=1))
        self.drafts_accepted.index_add_(0, rows, counts.scatter_add(1, slot, (draft & walk.visited).long()))

    def count_taken_back(self, index: np.ndarray, following: NextState) -> None:
        rows = torch.from_numpy(index).to(following.taken_back.device)
        self.reveals_taken_back.index_add_(0, rows, following.taken_back)

    def trace(
        self, state: DecodeState, finished: Tensor, committed: Tensor, first: Tensor, source: Tensor, fresh: Tensor
    ) -> None:
        """Records which tokens this forward revealed; `state` has its new prefix and still its old `first`."""
        if self.reveals is None:
            return
        span = torch.arange(state.block, device=first.device)
        rows = torch.from_numpy(state.index).to(first.device)[:, None]
        before = state.start - state.block * committed
        now = torch.where(committed[:, None], finished, first)
        parts = (
            (before, (state.first == MASKED) & (now != MASKED), source * ~committed[:, None]),
            (state.start, (first != MASKED) & committed[:, None], source),
        )
        for start, revealed, origin in parts:
            positions = start[:, None] + span
            step = torch.full_like(positions, self.total_forwards - 1)
            old = self.reveals[:, rows, positions]
            self.reveals[:, rows, positions] = torch.where(revealed, torch.stack([step, origin]), old)


def select_segment(statistics: TokenStatistics, row: Tensor, at: Tensor) -> TokenStatistics:
    """The statistics `[rows, block]` of segment `at` `[rows]` of every row."""
    choice = type(statistics.choice)(*(part[row, at] for part in statistics.choice))
    rest: Any = (part[row, at] for part in statistics[1:])
    return TokenStatistics(choice, *rest)
