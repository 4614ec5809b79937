"""States for training the head: which positions a noisy copy masks, and which of them each step reveals.

Tokens are laid out by block, `[batch, blocks, block]`, so that every choice is a ranking inside the last dimension.
Randomness is keyed by (seed, draw, sample, position), never by a call: a sample is noised alike whatever it is packed
or padded with, on whatever rank, and a resumed run repeats the draws of the run that was killed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .philox_torch import philox4x32

_WORD = 0xFFFFFFFF
IGNORED = -100
# What a draw is for; the stream is part of the key, so that no two purposes share noise.
RATE_STREAM, MASK_STREAM, COUNT_STREAM, CHOICE_STREAM, SUPERVISE_STREAM = range(5)
_STREAMS = 8
# The published schedule: rate = 0.999 t + 0.001, so that its inverse is bounded.
_LOWEST_RATE = 0.001


@dataclass(frozen=True)
class NoiseSource:
    """Keyed uniform draws.

    Attributes:
        seed: 64-bit key of the run.
        draw: how often the data has been noised before, e.g. the optimizer step.
    """

    seed: int
    draw: int = 0

    def uniform(self, sample: Tensor, position: Tensor, stream: int, index: int = 0) -> Tensor:
        """Float32 in (0, 1) of the shape that `sample` and `position` (int64) broadcast to.

        `index` tells apart draws of one stream (copies, steps).
        """
        sample, position = torch.broadcast_tensors(sample, position)
        counter = (
            position & _WORD,
            torch.full_like(position, stream + _STREAMS * index),
            torch.full_like(position, self.draw & _WORD),
            sample & _WORD,
        )
        word = philox4x32(counter, (self.seed & _WORD, (self.seed >> 32) & _WORD))[0]
        # 24 bits: every value is exact in float32 and below 1.
        return ((word >> 8).to(torch.float32) + 0.5) * 2.0**-24


@dataclass(frozen=True)
class BlockGrid:
    """The tokens of a batch of (packed) samples, and their blocks of `block` positions.

    Attributes:
        ids, position, sample, block_index: `[batch, tokens]` int64; `sample` counts inside the row, -1 is padding;
            `block_index` counts inside the sample.
        key: `[batch, tokens]` int64, name of the sample for keyed noise.
        columns: `[batch, blocks, block]` int64, the token at each place of each kept block; 0 where there is none.
        valid: `[batch, blocks, block]` bool, whether there is one.
        supervised: `[batch, blocks, block]` bool, places that have a label and may be masked.
    """

    ids: Tensor
    position: Tensor
    sample: Tensor
    block_index: Tensor
    key: Tensor
    columns: Tensor
    valid: Tensor
    supervised: Tensor

    def take(self, values: Tensor, fill: int | float | bool = 0) -> Tensor:
        """`values` `[batch, tokens]` at the places of the blocks, `fill` where there is no token."""
        batch = values.shape[0]
        taken = values.gather(1, self.columns.view(batch, -1)).view(self.columns.shape)
        return taken.masked_fill(~self.valid, fill)


def block_grid(
    input_ids: Tensor,
    labels: Tensor,
    block_length: int,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    sample_keys: Tensor | None = None,
    *,
    all_blocks: bool = False,
) -> BlockGrid:
    """Cuts a batch into blocks. Blocks without a label are dropped, unless `all_blocks`.

    Args:
        input_ids, labels: `[batch, tokens]` int64; labels are -100 where nothing is supervised, elsewhere the token
            itself (there is no shift).
        block_length: positions per block, counted from each sample's first token.
        attention_mask: `[batch, tokens]`, 0 at padding.
        position_ids: `[batch, tokens]`; a 0 starts a new sample. Default: one sample per row.
        sample_keys: `[batch, tokens]` int64, constant inside a sample.

    Raises:
        ValueError: shapes that differ, positions that neither restart at 0 nor count on, or labels that are not the
            tokens themselves.
    """
    for name, value in {"labels": labels, "attention_mask": attention_mask, "position_ids": position_ids}.items():
        if value is not None and value.shape != input_ids.shape:
            raise ValueError(f"{name} {list(value.shape)} must have the shape of input_ids, {list(input_ids.shape)}.")
    shifted = (labels != IGNORED) & (labels != input_ids)
    if bool(shifted.any()):
        row, column = (int(index) for index in shifted.nonzero()[0])
        raise ValueError(
            f"labels[{row}, {column}]={int(labels[row, column])} is not the token there "
            f"({int(input_ids[row, column])}); a label is -100 or the token itself: position i predicts token i."
        )
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    position = (real.long().cumsum(1) - 1).clamp(min=0) if position_ids is None else position_ids
    position = position.masked_fill(~real, 0)
    starts = real & (position == 0)
    counts_on = torch.zeros_like(real)
    counts_on[:, 1:] = (position[:, 1:] == position[:, :-1] + 1) & real[:, :-1]
    if bool((real & ~starts & ~counts_on).any()):
        row, column = (int(index) for index in (real & ~starts & ~counts_on).nonzero()[0])
        raise ValueError(
            f"position_ids[{row}, {column}]={int(position[row, column])} neither starts a sample (0) nor follows "
            "the position before it; number every packed sample 0, 1, 2, ..."
        )
    sample = (starts.long().cumsum(1) - 1).masked_fill(~real, -1)
    if sample_keys is None:
        rows = torch.arange(input_ids.shape[0], device=input_ids.device)[:, None]
        sample_keys = rows * input_ids.shape[1] + sample
    columns, valid = _block_columns(real, position, (labels != IGNORED) & real, block_length, all_blocks)
    taken = labels.gather(1, columns.view(len(labels), -1)).view(columns.shape)
    return BlockGrid(
        input_ids, position, sample, position // block_length, sample_keys, columns, valid,
        (taken != IGNORED) & valid,
    )  # fmt: skip


def _block_columns(
    real: Tensor, position: Tensor, labelled: Tensor, block: int, all_blocks: bool
) -> tuple[Tensor, Tensor]:
    """Columns and validity of the kept blocks, left-aligned in every row; at least one (perhaps empty) block."""
    batch, tokens = real.shape
    opens = real & (position % block == 0)
    ordinal = (opens.long().cumsum(1) - 1).clamp(min=0)
    kept = torch.zeros((batch, tokens + 1), dtype=torch.bool, device=real.device)
    rows = torch.arange(batch, device=real.device)[:, None].expand_as(position)
    wanted = real if all_blocks else labelled
    kept[rows[wanted], ordinal[wanted]] = True
    place = kept.long().cumsum(1) - 1
    blocks = max(1, int(kept.sum(1).max()))
    columns = torch.zeros((batch, blocks, block), dtype=torch.int64, device=real.device)
    valid = torch.zeros_like(columns, dtype=torch.bool)
    chosen = real & kept.gather(1, ordinal)
    r, c = chosen.nonzero(as_tuple=True)
    slot = place[r, ordinal[r, c]]
    columns[r, slot, position[r, c] % block] = c
    valid[r, slot, position[r, c] % block] = True
    return columns, valid


@dataclass(frozen=True)
class Noise:
    """The noisy copies of a batch.

    Attributes:
        masked: `[copies, batch, blocks, block]` bool.
        rate: `[copies, batch, blocks, block]` float32 in (0, 1], the probability with which the place was masked.
    """

    masked: Tensor
    rate: Tensor


def draw_noise(
    grid: BlockGrid, source: NoiseSource, level: str, copies: int = 1, reveal_order: Tensor | None = None
) -> Noise:
    """Draws the first states.

    Args:
        grid: of the batch.
        source: of the randomness.
        level: `"sample"`: one rate t ~ U(0, 1) per sample, every labelled position masked with it (the published
            recipe); `"block"`: in every block a number of masked positions drawn uniformly from 1 to all, which is
            how often decoding meets each count; `"recorded"`: the same, but the unmasked positions are those that
            the backbone revealed first when it wrote the sample.
        copies: noisy copies of every sample.
        reveal_order: `[batch, tokens]` int64, rank of each token's reveal inside its block, for `"recorded"`.

    Raises:
        ValueError: `level` is unknown, or `"recorded"` without `reveal_order`.
    """
    key, position = grid.take(grid.key), grid.take(grid.position)
    masks, rates = [], []
    for copy in range(copies):
        if level == "sample":
            t = source.uniform(key, torch.zeros_like(position), RATE_STREAM, copy)
            rate = (1 - _LOWEST_RATE) * t + _LOWEST_RATE
            masks.append((source.uniform(key, position, MASK_STREAM, copy) < rate) & grid.supervised)
            rates.append(rate)
            continue
        if level == "block":
            score = source.uniform(key, position, MASK_STREAM, copy)
        elif level == "recorded":
            if reveal_order is None:
                raise ValueError(
                    'noise_level="recorded" needs the column reveal_order; write one with mrp-train record.'
                )
            score = grid.take(reveal_order).float()
        else:
            raise ValueError(f"noise_level={level!r} is unknown; use 'sample', 'block' or 'recorded'.")
        total = grid.supervised.sum(dim=-1, keepdim=True)
        # All places of a block share the draw of its first place, which every kept block has.
        shared = source.uniform(key[..., :1], position[..., :1], RATE_STREAM, copy)
        count = 1 + (shared * total).floor().long().minimum((total - 1).clamp(min=0))
        masks.append(highest(score, grid.supervised, count))
        rates.append((count / total.clamp(min=1)).expand_as(score))
    return Noise(torch.stack(masks), torch.stack(rates))


def highest(score: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """`[..., block]` bool: the `count` `[..., 1]` highest of `score` `among` the given places, ties from the left."""
    order = score.masked_fill(~among, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(score.shape[-1], device=score.device).expand_as(order)
    return (torch.zeros_like(order).scatter(-1, order, places) < count) & among


def reveal_counts(grid: BlockGrid, source: NoiseSource, bounds: tuple[int, int], step: int, copies: int) -> Tensor:
    """`[copies, batch, blocks, 1]` int64: positions that step `step` reveals in each block, uniform in `bounds`."""
    low, high = bounds
    shape = (copies, *grid.columns.shape[:2], 1)
    if low == high:
        return torch.full(shape, low, dtype=torch.int64, device=grid.columns.device)
    key, first = grid.take(grid.key)[..., :1], grid.take(grid.position)[..., :1]
    draws = [source.uniform(key, first, COUNT_STREAM, step * copies + copy) for copy in range(copies)]
    return low + (torch.stack(draws) * (high - low + 1)).floor().long().clamp(max=high - low)


def place_scores(grid: BlockGrid, source: NoiseSource, stream: int, step: int, copies: int) -> Tensor:
    """`[copies, batch, blocks, block]` float32 keyed uniform draws, one per place."""
    key, position = grid.take(grid.key), grid.take(grid.position)
    return torch.stack([source.uniform(key, position, stream, step * copies + copy) for copy in range(copies)])
