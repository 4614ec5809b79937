"""How the work of `packed_block_attention` is cut: tiles, chunks of the prefix, and whether one launch does it all."""

from functools import lru_cache

import torch

from .tile_arithmetic import cdiv, next_power_of_2

PROCESSORS = 132  # of an H100 or H200; other GPUs have between 80 and 150


@lru_cache  # the same for all layers of a forward
def tile_sizes(rows: int, dim: int, dtype: torch.dtype, capability: int) -> tuple[int, int, int, int, int]:
    """Query rows, prefix keys and new keys per product, warps and pipeline stages: the largest that spill nothing.

    Before sm_90 the operands of a product live in registers, not in shared memory, so the tiles are smaller there.
    On Hopper and datacentre Blackwell three stages fit: one tile of keys and values is computed with, one is waited
    for and one stays in flight. With two stages each wait is for all that is on its way. From sm_120 on a program has
    99 KB of shared memory, which is two stages, as is what larger heads leave of Hopper's 227 KB.
    """
    if dtype == torch.float32:
        return 16, 32, 16, 8, 1
    tile = min(128, max(16, next_power_of_2(rows)))
    keys, own_keys = (64, 32) if capability >= 90 else (32, 16)
    stages = 3 if 90 <= capability < 120 and dim <= 128 else 2
    return tile, keys, own_keys, 8 if tile == 128 else 4, stages


@lru_cache  # the same for all layers of a forward
def chunk_size(programs_per_chunk: int, prefix: int) -> int:
    """Prefix positions per split: the longest that still makes two programs for each of about 132 processors.

    A split costs one write and one read of float32 partial results, so more of them than it takes to fill the machine
    is waste; below 512 positions a split is not worth its own partial results.
    """
    for chunk in (8192, 4096, 2048, 1024):
        if programs_per_chunk * cdiv(prefix, chunk) >= 2 * PROCESSORS:
            return chunk
    return 512


@lru_cache  # the same for all layers of a forward
def one_launch(programs: int, prefix: int, chunk: int) -> bool:
    """Whether each of `programs` walks the whole prefix by itself and there is nothing to combine.

    What counts is how many positions the busiest processor walks, one round of programs after another. Splitting is
    worth its second kernel (a few microseconds to start, another ten or more of Python where no graph replays it) and
    its partial results only if it saves more than the shortest chunk: 512 positions are some eight steps, which a
    lone program spends waiting for memory, about a microsecond each.
    """
    whole = cdiv(programs, PROCESSORS) * prefix
    split = cdiv(programs * cdiv(prefix, chunk), PROCESSORS) * min(chunk, prefix)
    return whole - split <= 512
