"""Packed forward: one call evaluates several block-sized segments per row over that row's own committed prefix.

A segment is one state of a block. It sees the row's prefix, itself, and the one finished segment that it names as its
parent (the first state of the next block rides along with the finished state before it). Candidates of the same block
do not see each other.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .packed_attention import PACKED_ATTENTION
from .packed_block_attention_torch import visibility_bits
from .packed_cache import PackedCache
from .reveal_rule import MASKED


@dataclass
class Segments:
    """States to evaluate, padded to one count per row.

    Attributes:
        ids: `[rows, segments, block]` int64, -1 at masked positions.
        start: `[rows, segments]` int64, absolute position of the segment's first token.
        step: `[rows, segments]` int64, denoising steps done in the segment's block.
        parent: `[rows, segments]` int64, the finished segment that this one also sees, -1 for none.
        alive: `[rows, segments]` bool; dead segments only pad the batch.
    """

    ids: Tensor
    start: Tensor
    step: Tensor
    parent: Tensor
    alive: Tensor

    @property
    def visible(self) -> Tensor:
        """`[rows, segments, segments]` bool: segment i sees segment j."""
        count, device = self.ids.shape[1], self.ids.device
        if count == 1:
            return torch.ones_like(self.alive)[..., None]
        return each_itself(count, device) | (self.parent[..., None] == places(count, device))


@dataclass(frozen=True)
class PackedLayout:
    """What a packed-attention kernel needs instead of a mask; travels to the attention function as `packed_layout`.

    Attributes:
        prefix_length: `[rows]` int64, committed positions of each row.
        scratch: offset of the segments in the cache.
        visible: `[rows, segments]` int64, bit j of entry i: segment i sees segment j.
        block: positions per segment.
        cache: the storage, `[rows, kv_heads, capacity, head_dim]` per layer.
        kernels: `auto`, `torch` or `triton`.
    """

    prefix_length: Tensor
    scratch: int
    visible: Tensor
    block: int
    cache: PackedCache
    kernels: str


class PackedStack:
    """Runs one stack of layers, backbone or head, packed over its own cache.

    Args:
        model: an `MRPForCausalLM`.
        block: positions per segment.
        capacity: positions to allocate.
        kernels: `auto`, `torch` or `triton`.
        layers: of the stack; they share their storage.
    """

    def __init__(self, model: Any, block: int, capacity: int, kernels: str = "auto", layers: int = 1):
        self.model, self.block, self.kernels = model, block, kernels
        several_devices = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
        self.cache = PackedCache(capacity, 1 if several_devices else layers)

    def arguments(self, segments_visible: Tensor, prefix_length: Tensor, longest: int, ragged: bool) -> dict[str, Any]:
        """Mask, cache and layout of a packed call.

        Args:
            segments_visible: `[rows, segments, segments]` bool.
            prefix_length: `[rows]` int64.
            longest: the largest of them.
            ragged: whether any of them is shorter.
        """
        rows, count, _ = segments_visible.shape
        self.cache.scratch, self.cache.rows = longest, rows
        if self.model.config._attn_implementation == PACKED_ATTENTION:
            bits = visibility_bits(segments_visible)
            layout = PackedLayout(prefix_length, longest, bits, self.block, self.cache, self.kernels)
            return {"mask": None, "cache": self.cache, "packed_layout": layout}
        if count == 1 and not ragged:
            return {"mask": None, "cache": self.cache}
        prefix = torch.arange(longest, device=prefix_length.device) < prefix_length[:, None]
        tokens = count * self.block
        inside = segments_visible.repeat_interleave(self.block, 1).repeat_interleave(self.block, 2)
        allowed = torch.cat([prefix[:, None].expand(rows, tokens, longest), inside], dim=2)
        return {"mask": self.model.attention_mask(allowed), "cache": self.cache}

    def positions(self, start: Tensor) -> Tensor:
        """`[rows, segments * block]` absolute positions of segments that start at `start` `[rows, segments]`."""
        return (start[..., None] + places(self.block, start.device)).flatten(1)


def select_segment(values: Tensor, row: Tensor, at: Tensor) -> Tensor:
    """Segment `at` `[rows]` of every row: `[rows, segments, ...]` -> `[rows, ...]`; `row` counts the rows."""
    return values[:, 0] if values.shape[1] == 1 else values[row, at]


# Constants of a call, kept: made anew they would be launches in every round.
@lru_cache(maxsize=128)
def places(count: int, device: torch.device) -> Tensor:
    """`[count]` int64, 0 to count - 1; not to be changed."""
    with torch.inference_mode(False):
        return torch.arange(count, device=device)


@lru_cache(maxsize=128)
def each_itself(count: int, device: torch.device) -> Tensor:
    """`[count, count]` bool: every segment sees itself alone; not to be changed."""
    with torch.inference_mode(False):
        return torch.eye(count, dtype=torch.bool, device=device)


def fill_masked(ids: Tensor, mask_token_id: int) -> Tensor:
    """Ids as the model reads them: the mask token at masked positions."""
    return ids.masked_fill(ids == MASKED, mask_token_id)
