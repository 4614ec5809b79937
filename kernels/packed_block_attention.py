"""Attention of several block-sized segments per row to that row's cached prefix and to one another."""

import torch
from torch import Tensor

from .kernel_dispatch import resolve_kernels
from .packed_block_attention_torch import packed_block_attention_torch

MAX_SEGMENTS = 64


def packed_block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cache_key: Tensor,
    cache_value: Tensor,
    prefix_length: Tensor,
    visibility: Tensor,
    block: int,
    scaling: float | None = None,
    commit: Tensor | None = None,
    max_prefix_length: int | None = None,
    kernels: str = "auto",
) -> Tensor:
    """Softmax attention without a mask tensor and without joining the prefix and the new keys.

    Position i of segment s attends to the first `prefix_length[b]` entries of its row's cache, to all of its own
    segment, and to all of each segment j that `visibility` lets s see. There is no gradient.

    Args:
        query: `[batch, heads, segments * block, dim]`, float32, float16 or bfloat16, any strides.
        key, value: of the new segments, `[batch, kv_heads, segments * block, dim]`; `heads` is a multiple of
            `kv_heads`, and query head h uses key head `h // (heads // kv_heads)`.
        cache_key, cache_value: preallocated, `[batch, kv_heads, capacity, dim]`. Only `[:prefix_length[b]]` is read.
        prefix_length: `[batch]` int32 or int64.
        visibility: `[batch, segments, segments]` bool, or the same as bits, `[batch, segments]` int64 (bit j of entry
            s: s may see j; `visibility_bits` makes them, once for all layers). A segment always sees itself.
        block: positions in a segment.
        scaling: positive factor of the scores; `dim ** -0.5` by default.
        commit: `[batch]` int64, the segment whose key and value are written into the row's cache at
            `[prefix_length[b] : prefix_length[b] + block]`, -1 for none. The caller sees to the capacity: what lies
            beyond is not written. Reading is not affected: the cache counts as it was before.
        max_prefix_length: no row's prefix is longer; the host's knowledge, which saves work. `capacity` by default.
        kernels: `"auto"`, `"torch"` or `"triton"`.

    Returns:
        `[batch, segments * block, heads, dim]`, contiguous, in the query's dtype: what transformers' attention
        functions return.

    Raises:
        ValueError: shapes that do not fit together, more than 64 segments, or a scaling that is not positive.
    """
    _validate(
        query, key, value, cache_key, cache_value, prefix_length, visibility, block, scaling, commit, max_prefix_length
    )
    if resolve_kernels(kernels, query.device) == "triton":
        from .packed_block_attention_triton import packed_block_attention_triton as implementation
    else:
        implementation = packed_block_attention_torch
    return implementation(
        query,
        key,
        value,
        cache_key=cache_key,
        cache_value=cache_value,
        prefix_length=prefix_length,
        visibility=visibility,
        block=block,
        scaling=scaling,
        commit=commit,
        max_prefix_length=max_prefix_length,
    )


def _validate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache_key: Tensor,
    cache_value: Tensor,
    prefix_length: Tensor,
    visibility: Tensor,
    block: int,
    scaling: float | None,
    commit: Tensor | None,
    max_prefix_length: int | None,
) -> None:
    if query.ndim != 4 or key.ndim != 4 or cache_key.ndim != 4:
        raise ValueError(
            f"query, key and cache_key must have four dimensions, not {query.ndim}, {key.ndim}, {cache_key.ndim}."
        )
    batch, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    if block < 1 or tokens % block:
        raise ValueError(f"{tokens} new positions do not make whole segments of block={block}.")
    segments = tokens // block
    if not 1 <= segments <= MAX_SEGMENTS:
        raise ValueError(f"{segments} segments per row; between 1 and {MAX_SEGMENTS} are possible.")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads evenly.")
    capacity = cache_key.shape[2]
    bits = visibility.dtype == torch.int64
    if not bits and visibility.dtype != torch.bool:
        raise ValueError(f"visibility must be bool or int64 bits, not {visibility.dtype}.")
    new, cached, rows = (batch, kv_heads, tokens, dim), (batch, kv_heads, capacity, dim), (batch,)
    seen = (batch, segments) if bits else (batch, segments, segments)
    if not (
        key.shape == new
        and value.shape == new
        and cache_key.shape == cached
        and cache_value.shape == cached
        and prefix_length.shape == rows
        and (commit is None or commit.shape == rows)
        and visibility.shape == seen
    ):
        raise ValueError(
            _misfit(
                ("key", key, new),
                ("value", value, new),
                ("cache_key", cache_key, cached),
                ("cache_value", cache_value, cached),
                ("prefix_length", prefix_length, rows),
                ("commit", prefix_length if commit is None else commit, rows),
                ("visibility", visibility, seen),
            )
        )
    if scaling is not None and not scaling > 0:
        raise ValueError(f"scaling={scaling} must be positive.")
    if max_prefix_length is not None and not 0 <= max_prefix_length <= capacity:
        raise ValueError(f"max_prefix_length={max_prefix_length} must be between 0 and the capacity {capacity}.")


def _misfit(*expected: tuple[str, Tensor, tuple[int, ...]]) -> str:
    """What the first tensor with another shape than expected is told; a call that fits never builds it."""
    name, tensor, shape = next(entry for entry in expected if entry[1].shape != entry[2])
    return f"{name} {list(tensor.shape)} must have the shape {list(shape)}."
