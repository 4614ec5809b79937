"""Triton kernels of `packed_block_attention`: split over the prefix (flash decoding), then a combine.

A program holds up to 128 query rows of one key head: all segments and all query heads that share the key head are rows
of one matrix product, so the prefix is read from memory once (row tiles beyond the first find it in the L2 cache).
Split 0 is the new segments, split 1 + i the i-th chunk of the prefix. The commit is the combine's: every program that
reads the cache has ended by then.
"""

import torch
from torch import Tensor

from .kernel_dispatch import compute_capability
from .packed_block_attention_torch import visibility_bits

try:  # transformers' check of remote code tolerates a missing package only in a try block
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('kernels="triton" needs the package triton.') from error

LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    query, key, value, allowed, row_max, row_sum, output, scale, UPCAST: tl.constexpr, PRECISION: tl.constexpr
):
    """One online-softmax step with `query [M, D]`, `key [N, D]`, `value [N, D]`; scores in powers of two."""
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    scores = tl.where(allowed, scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # Rows that have seen nothing yet keep -inf as their maximum; 0 in its place makes their weights 0, not NaN.
    safe_max = tl.where(new_max == -float("inf"), 0.0, new_max)
    weights = tl.exp2(scores - safe_max[:, None])
    decay = tl.exp2(row_max - safe_max)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    if not UPCAST:
        weights = weights.to(value.dtype)
    output = tl.dot(weights, value, acc=output * decay[:, None], input_precision=PRECISION)
    return new_max, row_sum, output


@triton.jit
def _split_kernel(
    query,
    key,
    value,
    cache_key,
    cache_value,
    prefix_length,
    visibility,
    partial_output,
    partial_max,
    partial_sum,
    query_batch,
    query_head,
    query_token,
    key_batch,
    key_head,
    key_token,
    value_batch,
    value_head,
    value_token,
    cache_key_batch,
    cache_key_head,
    cache_key_token,
    cache_value_batch,
    cache_value_head,
    cache_value_token,
    scale,
    kv_heads,
    segments,
    splits,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    OWN_KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pair = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    batch = (pair // kv_heads).to(tl.int64)
    kv_head = (pair % kv_heads).to(tl.int64)
    prefix = tl.load(prefix_length + batch).to(tl.int32)
    tokens = segments * BLOCK
    start = (split - 1) * CHUNK
    if split > 0 and start >= prefix:
        return

    dim = tl.arange(0, PADDED_DIM)
    row = tile * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    in_rows = token < tokens
    head = kv_head * GROUP + row % GROUP
    q = tl.load(
        query + batch * query_batch + (head * query_head + token * query_token)[:, None] + dim[None, :],
        mask=in_rows[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    if split > 0:
        cache_key += batch * cache_key_batch + kv_head * cache_key_head
        cache_value += batch * cache_value_batch + kv_head * cache_value_head
        stop = tl.minimum(start + CHUNK, prefix)
        for position in range(start, stop, KEYS):
            index = position + tl.arange(0, KEYS)
            inside = index < stop
            load = inside[:, None] & (dim < DIM)[None, :]
            far = index[:, None]
            k = tl.load(cache_key + far * cache_key_token + dim[None, :], mask=load, other=0.0)
            v = tl.load(cache_value + far * cache_value_token + dim[None, :], mask=load, other=0.0)
            if UPCAST:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            row_max, row_sum, output = _attend(
                q, k, v, inside[None, :], row_max, row_sum, output, scale, UPCAST, PRECISION
            )
    else:
        key += batch * key_batch + kv_head * key_head
        value += batch * value_batch + kv_head * value_head
        segment = token // BLOCK
        bits = tl.load(visibility + batch * segments + segment, mask=in_rows, other=0)
        for position in range(0, tokens, OWN_KEYS):
            index = position + tl.arange(0, OWN_KEYS)
            # At most 32 keys belong to at most 32 segments: from the first of them on, 32 bits of the 64 suffice.
            first = position // BLOCK
            near = (bits >> first).to(tl.int32)
            other = index // BLOCK
            allowed = ((near[:, None] >> (other - first)[None, :]) & 1) != 0
            allowed = (allowed | (segment[:, None] == other[None, :])) & (index < tokens)[None, :] & in_rows[:, None]
            if tl.max(tl.max(allowed.to(tl.int32), axis=1), axis=0) > 0:
                load = (index < tokens)[:, None] & (dim < DIM)[None, :]
                far = index[:, None]
                k = tl.load(key + far * key_token + dim[None, :], mask=load, other=0.0)
                v = tl.load(value + far * value_token + dim[None, :], mask=load, other=0.0)
                if UPCAST:
                    k = k.to(tl.float32)
                    v = v.to(tl.float32)
                row_max, row_sum, output = _attend(
                    q, k, v, allowed, row_max, row_sum, output, scale, UPCAST, PRECISION
                )

    # Laid out [batch * kv_heads, splits, rows of the key head, dim].
    place = (pair.to(tl.int64) * splits + split) * (tokens * GROUP) + row
    tl.store(partial_max + place, row_max, mask=in_rows)
    tl.store(partial_sum + place, row_sum, mask=in_rows)
    tl.store(
        partial_output + place[:, None] * DIM + dim[None, :], output, mask=in_rows[:, None] & (dim < DIM)[None, :]
    )


@triton.jit
def _combine_kernel(
    partial_output,
    partial_max,
    partial_sum,
    prefix_length,
    output,
    key,
    value,
    cache_key,
    cache_value,
    commit,
    key_batch,
    key_head,
    key_token,
    value_batch,
    value_head,
    value_token,
    cache_key_batch,
    cache_key_head,
    cache_key_token,
    cache_value_batch,
    cache_value_head,
    cache_value_token,
    capacity,
    kv_heads,
    tokens,
    splits,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COMMIT: tl.constexpr,
):
    pair = tl.program_id(0)
    batch = (pair // kv_heads).to(tl.int64)
    kv_head = pair % kv_heads
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rows = row < tokens * GROUP
    dim = tl.arange(0, PADDED_DIM)
    load = in_rows[:, None] & (dim < DIM)[None, :]
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    prefix = tl.load(prefix_length + batch).to(tl.int32)
    used = 1 + tl.cdiv(prefix, CHUNK)
    for split in range(0, tl.minimum(used, splits)):
        place = (pair.to(tl.int64) * splits + split) * (tokens * GROUP) + row
        split_max = tl.load(partial_max + place, mask=in_rows, other=0.0)
        new_max = tl.maximum(row_max, split_max)
        # Split 0 comes first and every row sees its own segment there, so no maximum is -inf from here on.
        old, new = tl.exp2(row_max - new_max), tl.exp2(split_max - new_max)
        row_sum = row_sum * old + tl.load(partial_sum + place, mask=in_rows, other=1.0) * new
        part = tl.load(partial_output + place[:, None] * DIM + dim[None, :], mask=load, other=0.0)
        result = result * old[:, None] + part * new[:, None]
        row_max = new_max
    head = kv_head * GROUP + row % GROUP
    token = batch * tokens + row // GROUP
    target = (token * (kv_heads * GROUP) + head)[:, None] * DIM + dim[None, :]
    tl.store(output + target, (result / row_sum[:, None]).to(output.dtype.element_ty), mask=load)
    if COMMIT and tl.program_id(1) == 0:
        chosen = tl.load(commit + batch)
        if chosen >= 0:
            offset = tl.arange(0, PADDED_BLOCK)
            place = (prefix + offset).to(tl.int64)
            load = ((offset < BLOCK) & (place < capacity))[:, None] & (dim < DIM)[None, :]
            source = (chosen * BLOCK + offset).to(tl.int64)[:, None]
            cache_key += batch * cache_key_batch + kv_head.to(tl.int64) * cache_key_head
            cache_value += batch * cache_value_batch + kv_head.to(tl.int64) * cache_value_head
            key += batch * key_batch + kv_head.to(tl.int64) * key_head
            value += batch * value_batch + kv_head.to(tl.int64) * value_head
            k = tl.load(key + source * key_token + dim[None, :], mask=load)
            tl.store(cache_key + place[:, None] * cache_key_token + dim[None, :], k, mask=load)
            v = tl.load(value + source * value_token + dim[None, :], mask=load)
            tl.store(cache_value + place[:, None] * cache_value_token + dim[None, :], v, mask=load)


def packed_block_attention_triton(
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
) -> Tensor:
    """See `packed_block_attention.packed_block_attention`."""
    batch, heads, tokens, dim = query.shape
    kv_heads, capacity = cache_key.shape[1:3]
    group, segments = heads // kv_heads, tokens // block
    prefix = capacity if max_prefix_length is None else max_prefix_length
    query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    if cache_key.stride(3) != 1 or cache_value.stride(3) != 1:
        raise ValueError("cache_key and cache_value must be contiguous in their last dimension.")
    bits = visibility_bits(visibility) if visibility.dtype == torch.bool else visibility
    output = torch.empty(batch, tokens, heads, dim, device=query.device, dtype=query.dtype)
    if output.numel() == 0:
        return output
    rows, keys, own_keys, warps, stages = tile_sizes(group * tokens, query.dtype, compute_capability(query.device))
    tiles = triton.cdiv(group * tokens, rows)
    chunk = chunk_size(batch * kv_heads * tiles, prefix)
    splits = 1 + triton.cdiv(prefix, chunk)
    place = (batch * kv_heads, splits, group * tokens)
    partial_output = torch.empty(*place, dim, device=query.device, dtype=torch.float32)
    partial_max, partial_sum = torch.empty(2, *place, device=query.device, dtype=torch.float32)
    padded_dim = max(16, triton.next_power_of_2(dim))
    _split_kernel[(batch * kv_heads, tiles, splits)](
        query,
        key,
        value,
        cache_key,
        cache_value,
        prefix_length,
        bits.contiguous(),
        partial_output,
        partial_max,
        partial_sum,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *cache_key.stride()[:3],
        *cache_value.stride()[:3],
        (dim**-0.5 if scaling is None else scaling) * LOG2_E,
        kv_heads,
        segments,
        splits,
        CHUNK=chunk,
        GROUP=group,
        BLOCK=block,
        DIM=dim,
        PADDED_DIM=padded_dim,
        ROWS=rows,
        KEYS=keys,
        OWN_KEYS=own_keys,
        UPCAST=_upcast(query),
        PRECISION="ieee",
        num_warps=warps,
        num_stages=stages,
    )
    combined_rows = 16
    _combine_kernel[(batch * kv_heads, triton.cdiv(group * tokens, combined_rows))](
        partial_output,
        partial_max,
        partial_sum,
        prefix_length,
        output,
        key,
        value,
        cache_key,
        cache_value,
        commit if commit is not None else prefix_length,
        *key.stride()[:3],
        *value.stride()[:3],
        *cache_key.stride()[:3],
        *cache_value.stride()[:3],
        capacity,
        kv_heads,
        tokens,
        splits,
        CHUNK=chunk,
        GROUP=group,
        BLOCK=block,
        DIM=dim,
        PADDED_DIM=padded_dim,
        PADDED_BLOCK=triton.next_power_of_2(block),
        ROWS=combined_rows,
        COMMIT=commit is not None,
        num_warps=4,
    )
    return output


def tile_sizes(rows: int, dtype: torch.dtype, capability: int) -> tuple[int, int, int, int, int]:
    """Query rows, prefix keys and new keys per product, warps and pipeline stages: the largest that spill nothing.

    Before sm_90 the operands of a product live in registers, not in shared memory, so the tiles are smaller there.
    """
    if dtype == torch.float32:
        return 16, 32, 16, 8, 1
    tile = min(128, max(16, triton.next_power_of_2(rows)))
    keys, own_keys = (64, 32) if capability >= 90 else (32, 16)
    return tile, keys, own_keys, 8 if tile == 128 else 4, 2


def chunk_size(programs_per_chunk: int, prefix: int) -> int:
    """Prefix positions per split: the longest that still makes two programs for each of about 132 processors.

    A split costs one write and one read of float32 partial results, so more of them than it takes to fill the machine
    is waste; below 512 positions a split is not worth its own partial results.
    """
    for chunk in (8192, 4096, 2048, 1024):
        if programs_per_chunk * triton.cdiv(prefix, chunk) >= 264:
            return chunk
    return 512


def _upcast(tensor: Tensor) -> bool:
    """Whether products must be computed in float32: the interpreter, on CPU, cannot multiply bfloat16."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16
