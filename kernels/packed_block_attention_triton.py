"""Triton kernels of `packed_block_attention`: one launch, or split over the prefix (flash decoding) and combined.

A program holds up to 128 query rows of one key head: all segments and all query heads that share the key head are rows
of one matrix product, so the prefix is read from memory once (row tiles beyond the first find it in the L2 cache).
Either it walks the new segments and the whole prefix and writes the result, or, where that would leave most of the
machine idle, split 0 is the new segments, split 1 + i the i-th chunk of the prefix, and a second kernel combines them.
"""

import torch
from torch import Tensor

from .kernel_dispatch import compute_capability
from .online_softmax_triton import attend_cached, attend_segments
from .packed_block_attention_sizes import chunk_size, one_launch, tile_sizes
from .packed_block_attention_torch import visibility_bits
from .tile_arithmetic import cdiv, next_power_of_2

try:  # transformers' check of remote code tolerates a missing package only in a try block
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('kernels="triton" needs the package triton.') from error

LOG2_E = 1.4426950408889634


@triton.jit
def _commit(
    key, value, key_token, value_token, cache_key, cache_value, cache_key_token, cache_value_token, chosen, prefix,
    capacity,
    BLOCK: tl.constexpr, PADDED_BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Writes segment `chosen` of `key` and `value` behind the cached `prefix`; all are pointers of one key head.

    Segments may be views of the cache that overlap the place they go to, so nothing is written before all is read.
    """
    dim = tl.arange(0, PADDED_DIM)[None, :]
    offset = tl.arange(0, PADDED_BLOCK)
    place = (prefix + offset).to(tl.int64)
    load = ((offset < BLOCK) & (place < capacity))[:, None] & (dim < DIM)
    source = (chosen * BLOCK + offset).to(tl.int64)[:, None]
    k = tl.load(key + source * key_token + dim, mask=load)
    v = tl.load(value + source * value_token + dim, mask=load)
    tl.debug_barrier()
    tl.store(cache_key + place[:, None] * cache_key_token + dim, k, mask=load)
    tl.store(cache_value + place[:, None] * cache_value_token + dim, v, mask=load)


@triton.jit
def _attention_kernel(
    query,
    key,
    value,
    cache_key,
    cache_value,
    prefix_length,
    visibility,
    commit,
    output,
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
    cache_value_batch,
    cache_value_head,
    scale,
    capacity,
    kv_heads,
    segments,
    CHUNK: tl.constexpr,
    CACHE_KEY_TOKEN: tl.constexpr,
    CACHE_VALUE_TOKEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    OWN_KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    COMMIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """`output` is the result if `WHOLE`, else the splits' partial results, see `_partial_places`."""
    pair = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    batch = (pair // kv_heads).to(tl.int64)
    kv_head = (pair % kv_heads).to(tl.int64)
    prefix = tl.load(prefix_length + batch).to(tl.int32)
    tokens = segments * BLOCK
    start = 0
    stop = prefix
    if not WHOLE:
        start = (split - 1) * CHUNK
        stop = tl.minimum(start + CHUNK, prefix)
        if split > 0 and start >= prefix:
            return

    dim = tl.arange(0, PADDED_DIM)
    row = tile * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    in_rows = token < tokens
    head = kv_head * GROUP + row % GROUP
    in_query = in_rows[:, None] & (dim < DIM)[None, :]
    q = tl.load(
        query + batch * query_batch + (head * query_head + token * query_token)[:, None] + dim[None, :],
        mask=in_query,
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    key += batch * key_batch + kv_head * key_head
    value += batch * value_batch + kv_head * value_head
    cache_key += batch * cache_key_batch + kv_head * cache_key_head
    cache_value += batch * cache_value_batch + kv_head * cache_value_head
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    if WHOLE or split == 0:
        bits = tl.load(visibility + batch * segments + token // BLOCK, mask=in_rows, other=0)
        row_max, row_sum, result = attend_segments(
            q, key, value, bits, token, in_rows, tokens, row_max, row_sum, result, scale, key_token, value_token,
            BLOCK, DIM, PADDED_DIM, OWN_KEYS, UPCAST,
        )  # fmt: skip
    if WHOLE or split > 0:
        row_max, row_sum, result = attend_cached(
            q, cache_key, cache_value, start, stop, row_max, row_sum, result, scale,
            CACHE_KEY_TOKEN, CACHE_VALUE_TOKEN, DIM, PADDED_DIM, KEYS, UPCAST,
        )  # fmt: skip

    if WHOLE:
        place = ((batch * tokens + token) * kv_heads * GROUP + head)[:, None] * DIM + dim[None, :]
        tl.store(output + place, (result / row_sum[:, None]).to(output.dtype.element_ty), mask=in_query)
        if COMMIT:
            chosen = tl.load(commit + batch)
            if chosen >= 0:
                _commit(
                    key, value, key_token, value_token, cache_key, cache_value, CACHE_KEY_TOKEN, CACHE_VALUE_TOKEN,
                    chosen, prefix, capacity, BLOCK, PADDED_BLOCK, DIM, PADDED_DIM,
                )  # fmt: skip
    else:
        rows = tokens * GROUP
        splits = tl.num_programs(2)
        place = (pair.to(tl.int64) * splits + split) * rows + row
        sums = tl.num_programs(0).to(tl.int64) * splits * rows
        maxima = output + sums * DIM
        tl.store(maxima + place, row_max * scale, mask=in_rows)
        tl.store(maxima + sums + place, row_sum, mask=in_rows)
        tl.store(output + place[:, None] * DIM + dim[None, :], result, mask=in_query)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    partial,
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
    cache_value_batch,
    cache_value_head,
    capacity,
    kv_heads,
    tokens,
    splits,
    CHUNK: tl.constexpr,
    CACHE_KEY_TOKEN: tl.constexpr,
    CACHE_VALUE_TOKEN: tl.constexpr,
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
    kv_head = (pair % kv_heads).to(tl.int64)
    rows = tokens * GROUP
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    dim = tl.arange(0, PADDED_DIM)
    load = in_rows[:, None] & (dim < DIM)[None, :]
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    sums = tl.num_programs(0).to(tl.int64) * splits * rows
    maxima = partial + sums * DIM
    prefix = tl.load(prefix_length + batch).to(tl.int32)
    used = 1 + tl.cdiv(prefix, CHUNK)
    for split in range(0, tl.minimum(used, splits)):
        place = (pair.to(tl.int64) * splits + split) * rows + row
        split_max = tl.load(maxima + place, mask=in_rows, other=0.0)
        new_max = tl.maximum(row_max, split_max)
        # Split 0 comes first and every row sees its own segment there, so no maximum is -inf from here on.
        old, new = tl.exp2(row_max - new_max), tl.exp2(split_max - new_max)
        row_sum = row_sum * old + tl.load(maxima + sums + place, mask=in_rows, other=1.0) * new
        part = tl.load(partial + place[:, None] * DIM + dim[None, :], mask=load, other=0.0)
        result = result * old[:, None] + part * new[:, None]
        row_max = new_max
    head = kv_head * GROUP + row % GROUP
    token = batch * tokens + row // GROUP
    target = (token * (kv_heads * GROUP) + head)[:, None] * DIM + dim[None, :]
    tl.store(output + target, (result / row_sum[:, None]).to(output.dtype.element_ty), mask=load)
    if COMMIT and tl.program_id(1) == 0:
        chosen = tl.load(commit + batch)
        if chosen >= 0:
            _commit(
                key + batch * key_batch + kv_head * key_head,
                value + batch * value_batch + kv_head * value_head,
                key_token,
                value_token,
                cache_key + batch * cache_key_batch + kv_head * cache_key_head,
                cache_value + batch * cache_value_batch + kv_head * cache_value_head,
                CACHE_KEY_TOKEN, CACHE_VALUE_TOKEN, chosen, prefix, capacity,
                BLOCK, PADDED_BLOCK, DIM, PADDED_DIM,
            )  # fmt: skip


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
    _, kv_heads, capacity, _ = cache_key.shape
    device = query.device
    group, segments = heads // kv_heads, tokens // block
    prefix = capacity if max_prefix_length is None else max_prefix_length
    query_stride, key_stride, value_stride = query.stride(), key.stride(), value.stride()
    key_cache_stride, value_cache_stride = cache_key.stride(), cache_value.stride()
    if query_stride[3] != 1:
        query = query.contiguous()
        query_stride = query.stride()
    if key_stride[3] != 1:
        key = key.contiguous()
        key_stride = key.stride()
    if value_stride[3] != 1:
        value = value.contiguous()
        value_stride = value.stride()
    if key_cache_stride[3] != 1 or value_cache_stride[3] != 1:
        raise ValueError("cache_key and cache_value must be contiguous in their last dimension.")
    bits = visibility_bits(visibility) if visibility.dtype == torch.bool else visibility.contiguous()
    output = torch.empty(batch, tokens, heads, dim, device=device, dtype=query.dtype)
    pairs = batch * kv_heads
    if pairs * tokens * dim == 0:
        return output
    rows, keys, own_keys, warps, stages = tile_sizes(group * tokens, dim, query.dtype, compute_capability(device))
    tiles = cdiv(group * tokens, rows)
    chunk = chunk_size(pairs * tiles, prefix)
    # Segments may be views of the cache that a commit writes into: where other programs still read them, it waits.
    whole = (commit is None or tiles == 1) and one_launch(pairs * tiles, prefix, chunk)
    splits = 1 if whole else 1 + cdiv(prefix, chunk)
    partial = output
    if not whole:
        partial = torch.empty(pairs * splits * group * tokens * (dim + 2), device=device, dtype=torch.float32)
    padded_dim, padded_block = max(16, next_power_of_2(dim)), next_power_of_2(block)
    # Constants go by position: a name costs 0.1 us, and there is a call for every layer.
    _attention_kernel[(pairs, tiles, splits)](
        query,
        key,
        value,
        cache_key,
        cache_value,
        prefix_length,
        bits,
        prefix_length if commit is None else commit,
        partial,
        *query_stride[:3],
        *key_stride[:3],
        *value_stride[:3],
        *key_cache_stride[:2],
        *value_cache_stride[:2],
        (dim**-0.5 if scaling is None else scaling) * LOG2_E,
        capacity,
        kv_heads,
        segments,
        0 if whole else chunk,
        key_cache_stride[2],
        value_cache_stride[2],
        group,
        block,
        dim,
        padded_dim,
        padded_block,
        rows,
        keys,
        own_keys,
        whole,
        commit is not None,
        _upcast(query),
        num_warps=warps,
        num_stages=stages,
    )
    if whole:
        return output
    combined_rows = 16
    _combine_kernel[(pairs, cdiv(group * tokens, combined_rows))](
        partial,
        prefix_length,
        output,
        key,
        value,
        cache_key,
        cache_value,
        prefix_length if commit is None else commit,
        *key_stride[:3],
        *value_stride[:3],
        *key_cache_stride[:2],
        *value_cache_stride[:2],
        capacity,
        kv_heads,
        tokens,
        splits,
        chunk,
        key_cache_stride[2],
        value_cache_stride[2],
        group,
        block,
        dim,
        padded_dim,
        padded_block,
        combined_rows,
        commit is not None,
        num_warps=4,
    )
    return output


def _upcast(tensor: Tensor) -> bool:
    """Whether products must be computed in float32: the interpreter, on CPU, cannot multiply bfloat16."""
    return tensor.dtype == torch.bfloat16 and tensor.is_cpu
