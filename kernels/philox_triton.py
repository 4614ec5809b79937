"""Triton side of `philox_torch`: the same words and the same Gumbel draws for the same key."""

try:  # transformers' check of remote code tolerates a missing package only in a try block
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('kernels="triton" needs the package triton.') from error


@triton.jit
def gumbel_from_words(words):
    """Gumbel draws from uint32 words: `-log(e)` with `e = -log(1 - v)`, see `philox_torch.gumbel_from_words`."""
    v = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    # A hardware logarithm has a fixed absolute error near 1, which would drown the small `e`, the draws that win.
    # There -log(1 - v) = 2 artanh(z), z = v / (2 - v) <= 1/3, and seven terms reach float32's precision.
    z = v / (2.0 - v)
    q = z * z
    series = 2.0 / 13.0 + q * (2.0 / 15.0)
    series = 2.0 / 11.0 + q * series
    series = 2.0 / 9.0 + q * series
    series = 2.0 / 7.0 + q * series
    series = 2.0 / 5.0 + q * series
    series = 2.0 / 3.0 + q * series
    e = tl.where(v < 0.5, z * (2.0 + q * series), -tl.log(1.0 - v))
    return -tl.log(e)


@triton.jit
def gumbel_block(seed, row, position, step, start, BLOCK: tl.constexpr):
    """`[BLOCK]` draws of the tokens from `start` on, which must be a multiple of 4; one Philox call gives four."""
    group = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(
        seed, group, zero + position.to(tl.uint32), zero + step.to(tl.uint32), zero + row.to(tl.uint32)
    )
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return gumbel_from_words(words)


@triton.jit
def gumbel_at(seed, row, position, step, tokens):
    """The draws of the int32 `tokens`, any shape of one dimension; one Philox call for each."""
    group = (tokens >> 2).to(tl.uint32)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(
        seed, group, zero + position.to(tl.uint32), zero + step.to(tl.uint32), zero + row.to(tl.uint32)
    )
    lane = tokens & 3
    return gumbel_from_words(tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3))))
