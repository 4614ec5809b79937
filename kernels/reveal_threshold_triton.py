"""Triton search for the lowest logit that top-k and top-p keep: bisection over float32's sortable bits, no sort.

"How many lie above t" and "how much mass lies above t" both fall as t rises, so the lowest kept logit is found in at
most 32 passes over a row that stays in the L2 cache (300 kB at 151,936 bfloat16 logits).
"""

import torch
from torch import Tensor

from .tile_arithmetic import next_power_of_2

try:  # transformers' check of remote code tolerates a missing package only in a try block
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('kernels="triton" needs the package triton.') from error


@triton.jit
def sortable(x):
    """int64 whose order is that of the float32 scalar `x`; its own inverse on the low 32 bits."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def from_sortable(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scores(
    logits, residual, residual_scale, start, vocab, mask_token, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    index = start + tl.arange(0, BLOCK)
    candidate = (index < vocab) & (index != mask_token)
    x = tl.load(logits + index, mask=candidate, other=-float("inf")).to(tl.float32)
    if HAS_RESIDUAL:
        x += residual_scale * tl.load(residual + index, mask=candidate, other=0.0).to(tl.float32)
    return x


@triton.jit
def _measure_above(
    logits,
    residual,
    residual_scale,
    vocab,
    mask_token,
    bound,
    floor,
    largest,
    inverse_temperature,
    MASS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count (or tempered mass, relative to the largest) of the logits that are > `bound` and >= `floor`."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        x = _scores(logits, residual, residual_scale, start, vocab, mask_token, HAS_RESIDUAL, BLOCK)
        above = (x > bound) & (x >= floor)
        if MASS:
            total += tl.where(above, tl.exp((x - largest) * inverse_temperature), 0.0)
        else:
            total += tl.where(above, 1.0, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _threshold_kernel(
    logits,
    residual,
    threshold,
    vocab,
    logits_stride,
    residual_stride,
    residual_scale,
    inverse_temperature,
    mask_token,
    top_k,
    top_p,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    residual += row * residual_stride
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        x = _scores(logits, residual, residual_scale, start, vocab, mask_token, HAS_RESIDUAL, BLOCK)
        highest = tl.maximum(highest, x)
        lowest = tl.minimum(lowest, tl.where(x > -float("inf"), x, float("inf")))
    largest = tl.max(highest, axis=0)
    floor = tl.minimum(tl.min(lowest, axis=0), largest)
    if TOP_K:
        low = sortable(floor)
        high = sortable(largest)
        while low < high:
            middle = (low + high) >> 1
            count = _measure_above(
                logits, residual, residual_scale, vocab, mask_token, from_sortable(middle), floor, largest,
                inverse_temperature, False, HAS_RESIDUAL, BLOCK,
            )  # fmt: skip
            kept = count < top_k
            high = tl.where(kept, middle, high)
            low = tl.where(kept, low, middle + 1)
        floor = from_sortable(low)
    if TOP_P:
        limit = top_p * _measure_above(
            logits, residual, residual_scale, vocab, mask_token, -float("inf"), floor, largest,
            inverse_temperature, True, HAS_RESIDUAL, BLOCK,
        )  # fmt: skip
        low = sortable(floor)
        high = sortable(largest)
        while low < high:
            middle = (low + high) >> 1
            mass = _measure_above(
                logits, residual, residual_scale, vocab, mask_token, from_sortable(middle), floor, largest,
                inverse_temperature, True, HAS_RESIDUAL, BLOCK,
            )  # fmt: skip
            kept = mass < limit
            high = tl.where(kept, middle, high)
            low = tl.where(kept, low, middle + 1)
        floor = from_sortable(low)
    tl.store(threshold + row, floor)


def reveal_threshold(
    logits: Tensor,
    residual: Tensor | None,
    residual_scale: float,
    mask_token: int,
    inverse_temperature: float,
    top_k: int,
    top_p: float,
) -> Tensor:
    """`[rows]` float32: the lowest corrected logit that top-k, then top-p, keep; equal logits share their fate."""
    rows, vocab = logits.shape
    threshold = torch.empty(rows, device=logits.device, dtype=torch.float32)
    block = min(4096, max(128, next_power_of_2(vocab)))
    if rows:
        _threshold_kernel[(rows,)](
            logits,
            residual if residual is not None else logits,
            threshold,
            vocab,
            logits.stride(0),
            residual.stride(0) if residual is not None else 0,
            float(residual_scale),
            float(inverse_temperature),
            mask_token,
            top_k,
            float(top_p),
            TOP_K=0 < top_k < vocab,
            TOP_P=top_p < 1.0,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=max(1, min(16, block // 256)),
        )
    return threshold
