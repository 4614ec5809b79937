"""Online softmax in registers: a tile of query rows walks cached positions and segments, one product's keys at a time.

The running state of a tile is its rows' largest score `[ROWS]` (before the factor `scale`, which is positive), the sum
of their weights `[ROWS]` and the weighted sum of values `[ROWS, PADDED_DIM]`, all float32.
"""

try:  # transformers' check of remote code tolerates a missing package only in a try block
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('kernels="triton" needs the package triton.') from error


@triton.jit
def _attend(query, key, value, allowed, row_max, row_sum, output, scale, UPCAST: tl.constexpr):
    """One step with `query [M, D]`, `key [N, D]`, `value [N, D]`; `scale` takes scores to powers of two."""
    if UPCAST:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    scores = tl.where(allowed, scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # Rows that have seen nothing yet keep -inf as their maximum; 0 in its place makes their weights 0, not NaN.
    safe_max = tl.where(new_max == -float("inf"), 0.0, new_max) * scale
    # The factor costs nothing here: multiplication and subtraction are one instruction.
    weights = tl.exp2(scores * scale - safe_max[:, None])
    decay = tl.exp2(row_max * scale - safe_max)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    if not UPCAST:
        weights = weights.to(value.dtype)
    output = tl.dot(weights, value, acc=output * decay[:, None], input_precision="ieee")
    return new_max, row_sum, output


@triton.jit
def attend_cached(
    query, cache_key, cache_value, start, stop, row_max, row_sum, output, scale,
    KEY_TOKEN: tl.constexpr, VALUE_TOKEN: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    KEYS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The state after the cached positions `[start, stop)`, which all rows see.

    The strides of a position are constants, so that a tile's addresses are one pointer and immediate offsets. The last
    tile is masked like the others: as a step of its own its loads would not be pipelined.
    """
    lane = tl.arange(0, KEYS)
    dim = tl.arange(0, PADDED_DIM)
    for position in range(start, stop, KEYS):
        inside = lane < stop - position
        load = inside[:, None] & (dim < DIM)[None, :]
        key = cache_key + position * KEY_TOKEN + (lane * KEY_TOKEN)[:, None] + dim[None, :]
        value = cache_value + position * VALUE_TOKEN + (lane * VALUE_TOKEN)[:, None] + dim[None, :]
        k = tl.load(key, mask=load, other=0.0)
        v = tl.load(value, mask=load, other=0.0)
        row_max, row_sum, output = _attend(query, k, v, inside[None, :], row_max, row_sum, output, scale, UPCAST)
    return row_max, row_sum, output


@triton.jit
def attend_segments(
    query, key, value, bits, token, in_rows, tokens, row_max, row_sum, output, scale, key_token, value_token,
    BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, OWN_KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """The state after the row's new segments, of which bit j of `bits` `[ROWS]` shows segment j to a query row.

    `token` `[ROWS]` is the position of a query row among the new ones; every position sees its own segment.
    """
    dim = tl.arange(0, PADDED_DIM)
    segment = token // BLOCK
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
            row_max, row_sum, output = _attend(query, k, v, allowed, row_max, row_sum, output, scale, UPCAST)
    return row_max, row_sum, output
