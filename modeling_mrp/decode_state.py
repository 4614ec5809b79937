"""What the decode engine keeps of its rows between two forwards, and what it counts."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .advance import KnownState
from .generation_config_mrp import DecodingOptions
from .reveal_rule import MASKED
from .verify_states_torch import HostStates


@dataclass
class DecodeState:
    """The running rows; `[rows, ...]` tensors on the device, `*_host` copies in numpy.

    Attributes:
        index: `[rows]` numpy, each row's place in the batch that `generate` was given.
        row: `[rows]` int64: 0, 1, ..., for indexing.
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
    row: Tensor
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
            row=torch.arange(len(prompts), device=device),
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
        self.first_host, self.row = self.first_host[kept_host], self.row[: len(kept_host)]
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
        self.segments = np.zeros(rows, dtype=np.int64)
        self.reveals_taken_back = np.zeros(rows, dtype=np.int64)
        self.drafts_proposed = np.zeros((rows, depths), dtype=np.int64)
        self.drafts_accepted = np.zeros((rows, depths), dtype=np.int64)
        # step and source of every reveal, [2, rows, positions]
        self.reveals = torch.full((2, rows, trace_length), -1, device=device) if trace_length else None

    @classmethod
    def for_batch(cls, rows: int, options: DecodingOptions, longest: int, device: torch.device) -> "Counters":
        """Depths up to a whole block and the state that rides along; a trace only where it was asked for."""
        block = options.block_length
        trace_length = (-(-longest // block) + 1) * block if options.trace else 0
        return cls(rows, block + 1, trace_length, device)

    def count_forward(self, index: np.ndarray) -> None:
        self.total_forwards += 1
        self.backbone_forwards[index] += 1

    def count_states(self, index: np.ndarray, host: HostStates) -> None:
        """Evaluated segments, and drafts by depth: reveals beyond the certain first state.

        What rides along with a certain state is no draft.
        """
        alive = host.reached > 0
        self.segments[index] += alive.sum(axis=1)
        depth = host.step - host.step[:, :1]
        mother = np.take_along_axis(depth, host.parent.clip(min=0), axis=1)
        depth = np.where(host.parent >= 0, mother + 1, depth)
        row, at = np.nonzero(alive[:, 1:] & (host.parent[:, 1:] != 0))
        at += 1
        slot = (depth[row, at] - 1).clip(0, self.drafts_proposed.shape[1] - 1)
        proposed = np.zeros((len(index), self.drafts_proposed.shape[1]), dtype=bool)
        proposed[row, slot] = True
        self.drafts_proposed[index] += proposed
        np.add.at(self.drafts_accepted, (index[row], slot), host.reached[row, at] == 2)

    def count_taken_back(self, index: np.ndarray, revealed: np.ndarray, kept: np.ndarray) -> None:
        """Of two states `[rows, block]`: positions that the policy revealed and the mode has masked again."""
        self.reveals_taken_back[index] += ((revealed != MASKED) & (kept == MASKED)).sum(axis=1)

    def trace(self, state: DecodeState, finished: Tensor, ids: Tensor, first: Tensor, source: Tensor | None) -> None:
        """Records which tokens this forward revealed; `state` has its new prefix and still its old `first`.

        Args:
            finished: `[rows]` int64, -1 where no block was finished; ids: `[rows, block]` of those that were.
            first: `[rows, block]` int64, the new certain state; source: as in `NextState`.
        """
        if self.reveals is None:
            return
        committed = finished >= 0
        source = torch.zeros_like(first) if source is None else source
        span = torch.arange(state.block, device=first.device)
        rows = torch.from_numpy(state.index).to(first.device)[:, None]
        before = state.start - state.block * committed
        now = torch.where(committed[:, None], ids, first)
        parts = (
            (before, (state.first == MASKED) & (now != MASKED), source * ~committed[:, None]),
            (state.start, (first != MASKED) & committed[:, None], source),
        )
        for start, revealed, origin in parts:
            positions = start[:, None] + span
            step = torch.full_like(positions, self.total_forwards - 1)
            old = self.reveals[:, rows, positions]
            self.reveals[:, rows, positions] = torch.where(revealed, torch.stack([step, origin]), old)
