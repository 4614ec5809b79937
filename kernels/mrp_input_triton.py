"""Triton kernels of `mrp_input` and `qk_norm_rope`."""

import torch
from torch import Tensor

from .tile_arithmetic import cdiv, next_power_of_2

try:  # transformers' check of remote code tolerates a missing package only in a try block
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('kernels="triton" needs the package triton.') from error


@triton.jit
def _half(
    source,
    norm,
    projection,
    in_rows,
    columns,
    in_columns,
    hidden,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`norm(x) P^T` `[ROWS, COLUMNS]` for row pointers `source` and column pointers `projection`.

    A row's 1 / rms is one number, so it is applied to the product instead of to the input: the sum of squares and the
    product come from the same pass.
    """
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)  # added up once, after the loop: a sum crosses threads
    for start in range(0, hidden, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < hidden
        x = tl.load(source[:, None] + index[None, :], mask=in_rows[:, None] & inside[None, :], other=0.0)
        x = x.to(tl.float32)
        squares += x * x
        x = x * tl.load(norm + index, mask=inside, other=0.0).to(tl.float32)[None, :]
        p = tl.load(projection[:, None] + index[None, :], mask=in_columns[:, None] & inside[None, :], other=0.0)
        if UPCAST:
            p = p.to(tl.float32)
        product = tl.dot(x.to(p.dtype), tl.trans(p), acc=product, input_precision=PRECISION)
    return product * tl.rsqrt(tl.sum(squares, axis=1) / hidden + eps)[:, None]


@triton.jit
def _mrp_input_kernel(
    ids,
    state,
    embedding,
    embedding_norm,
    state_norm,
    projection,
    output,
    rows,
    hidden,
    out,
    state_stride,
    embedding_stride,
    projection_stride,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = row < rows
    in_columns = column < out
    token = tl.load(ids + row, mask=in_rows, other=0)
    weights = projection + column.to(tl.int64) * projection_stride
    states = state + row.to(tl.int64) * state_stride
    total = _half(
        embedding + token * embedding_stride, embedding_norm, weights, in_rows, column, in_columns, hidden, eps,
        ROWS, COLUMNS, BLOCK, UPCAST, PRECISION,
    )  # fmt: skip
    total += _half(
        states, state_norm, weights + hidden, in_rows, column, in_columns, hidden, eps,
        ROWS, COLUMNS, BLOCK, UPCAST, PRECISION,
    )  # fmt: skip
    target = output + row.to(tl.int64)[:, None] * out + column[None, :]
    tl.store(target, total.to(output.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


@triton.jit
def _rotate_heads(
    source, norm, cos, sin, output, head_stride, output_head, heads, eps, HEADS: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """One token's heads: norm, rotation, and the store in head-major order."""
    head = tl.arange(0, HEADS).to(tl.int64)[:, None]
    low = tl.arange(0, HALF)
    inside = low < DIM // 2
    high = low + DIM // 2
    load = (head < heads) & inside[None, :]
    first = tl.load(source + head * head_stride + low[None, :], mask=load, other=0.0).to(tl.float32)
    second = tl.load(source + head * head_stride + high[None, :], mask=load, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / DIM + eps)[:, None]
    first = first * scale * tl.load(norm + low, mask=inside, other=0.0).to(tl.float32)[None, :]
    second = second * scale * tl.load(norm + high, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_low = tl.load(cos + low, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + high, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + low, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + high, mask=inside, other=0.0).to(tl.float32)[None, :]
    kind = output.dtype.element_ty
    target = output + head * output_head
    tl.store(target + low[None, :], (first * cos_low - second * sin_low).to(kind), mask=load)
    tl.store(target + high[None, :], (second * cos_high + first * sin_high).to(kind), mask=load)


@triton.jit
def _copy_heads(
    source, output, head_stride, output_head, heads, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr
):
    """One token's heads as they are, in head-major order."""
    head = tl.arange(0, HEADS).to(tl.int64)[:, None]
    dim = tl.arange(0, 2 * HALF)[None, :]
    load = (head < heads) & (dim < DIM)
    x = tl.load(source + head * head_stride + dim, mask=load)
    tl.store(output + head * output_head + dim, x.to(output.dtype.element_ty), mask=load)


@triton.jit
def _qk_norm_rope_kernel(
    query,
    key,
    value,
    query_norm,
    key_norm,
    cos,
    sin,
    query_out,
    key_out,
    value_out,
    query_batch,
    query_token,
    query_head,
    key_batch,
    key_token,
    key_head,
    value_batch,
    value_token,
    value_head,
    out_batch,
    out_head,
    out_token,
    cos_batch,
    cos_token,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    """A program each for a token's query heads, key heads and, where there is a third, value heads.

    So none waits for what another loads.
    """
    part = tl.program_id(2)
    batch = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    cos += batch * cos_batch + token * cos_token
    sin += batch * cos_batch + token * cos_token
    place = batch * out_batch + token * out_token
    if part == 0:
        head_size = tl.num_programs(0).to(tl.int64) * DIM
        _rotate_heads(
            query + batch * query_batch + token * query_token, query_norm, cos, sin,
            query_out + batch * HEADS * head_size + token * DIM, query_head, head_size, HEADS, eps,
            PADDED_HEADS, DIM, HALF,
        )  # fmt: skip
    elif part == 1:
        _rotate_heads(
            key + batch * key_batch + token * key_token, key_norm, cos, sin,
            key_out + place, key_head, out_head, KV_HEADS, eps, PADDED_KV_HEADS, DIM, HALF,
        )  # fmt: skip
    else:
        _copy_heads(
            value + batch * value_batch + token * value_token, value_out + place, value_head, out_head, KV_HEADS,
            PADDED_KV_HEADS, DIM, HALF,
        )  # fmt: skip


def mrp_input_triton(
    ids: Tensor,
    state: Tensor,
    embedding: Tensor,
    embedding_norm: Tensor,
    state_norm: Tensor,
    projection: Tensor,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """See `mrp_input.mrp_input`."""
    hidden, out = embedding.shape[1], projection.shape[0]
    if embedding.stride(1) != 1 or projection.stride(1) != 1:
        raise ValueError("embedding and projection must be contiguous in their last dimension.")
    rows_in = state.reshape(-1, hidden)
    rows_in = rows_in if rows_in.stride(1) == 1 else rows_in.contiguous()
    rows = rows_in.shape[0]
    output = torch.empty(*state.shape[:-1], out, device=state.device, dtype=state.dtype)
    if output.numel() == 0:
        return output
    tile_rows, columns, block, warps, stages = tile_sizes(rows, projection.dtype)
    _mrp_input_kernel[(cdiv(out, columns), cdiv(rows, tile_rows))](
        ids.reshape(-1).contiguous(),
        rows_in,
        embedding,
        embedding_norm.contiguous(),
        state_norm.contiguous(),
        projection,
        output,
        rows,
        hidden,
        out,
        rows_in.stride(0),
        embedding.stride(0),
        projection.stride(0),
        eps,
        ROWS=tile_rows,
        COLUMNS=columns,
        BLOCK=block,
        # The interpreter, on CPU, cannot multiply bfloat16.
        UPCAST=state.device.type == "cpu" and projection.dtype == torch.bfloat16,
        PRECISION="ieee",
        num_warps=warps,
        num_stages=stages,
    )
    return output


def tile_sizes(rows: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Rows, columns and depth of a product's tile, warps and pipeline stages.

    Up to 32 rows the kernel is bound by reading the projection, so narrow column tiles spread it over the machine
    (2,560 columns make 160 programs) and each keeps three tiles of it, 8 KB, on their way: about as much as a Hopper
    GPU's memory delivers in the time that it takes to answer. Above, tiles grow to use the tensor cores.
    """
    if dtype == torch.float32:
        return 16, 32, 64, 4, 2
    if rows <= 32:
        return (16 if rows <= 16 else 32), 16, 256, 4, 4
    return 64, 64, 64, 4, 3


def qk_norm_rope_triton(
    query: Tensor,
    key: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    value: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """See `mrp_input.qk_norm_rope`."""
    batch, tokens, heads, dim = query.shape
    kv_heads = key.shape[2]
    if query.stride(3) != 1:
        query = query.contiguous()
    if key.stride(3) != 1:
        key = key.contiguous()
    cos_stride = cos.stride()
    if cos_stride[2] != 1 or sin.stride() != cos_stride:
        cos, sin = cos.contiguous(), sin.contiguous()
        cos_stride = cos.stride()
    query_out = torch.empty(batch, heads, tokens, dim, device=query.device, dtype=query.dtype)
    if out is None:
        key_out = value_out = torch.empty(batch, kv_heads, tokens, dim, device=key.device, dtype=key.dtype)
    else:
        key_out, value_out = out
    if value is None:
        value = key
    elif value.stride(3) != 1:
        value = value.contiguous()
    if batch * heads * tokens * dim == 0:
        return query_out, key_out
    # Constants go by position: a name costs 0.1 us, and there is a call for every layer.
    _qk_norm_rope_kernel[(tokens, batch, 2 if out is None else 3)](
        query,
        key,
        value,
        query_norm.contiguous(),
        key_norm.contiguous(),
        cos,
        sin,
        query_out,
        key_out,
        value_out,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *key_out.stride()[:3],
        cos_stride[0] if cos.shape[0] > 1 else 0,
        cos_stride[1],
        eps,
        heads,
        kv_heads,
        next_power_of_2(heads),
        next_power_of_2(kv_heads),
        dim,
        next_power_of_2(dim // 2),
        num_warps=4,
    )
    return query_out, key_out
