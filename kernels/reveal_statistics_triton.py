"""Triton kernels of `reveal_statistics`: one pass over the logits, split over the vocabulary, and a small combine.

The first kernel reads each logit once and keeps eight numbers per (row, split); the second merges the splits of a row.
With top-k or top-p a search for the row's threshold goes before them (`reveal_threshold_triton.py`).
"""

import torch
from torch import Tensor

from .philox_torch import NoiseKey
from .philox_triton import gumbel_block
from .reveal_statistics_torch import RevealStatistics
from .reveal_threshold_triton import reveal_threshold

try:  # transformers' check of remote code tolerates a missing package only in a try block
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('kernels="triton" needs the package triton.') from error

# Fields of the partial results [fields, rows, splits]; tokens travel bit-cast, so one allocation holds all.
FIELDS = 8


@triton.jit
def corrected_logits(logits, residual, residual_scale, offsets, inside, HAS_RESIDUAL: tl.constexpr):
    """float32 `logits + residual_scale * residual`, -inf outside."""
    x = tl.load(logits + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    if HAS_RESIDUAL:
        x += residual_scale * tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _partial_kernel(
    logits,
    residual,
    threshold,
    seed,
    noise_row,
    noise_position,
    noise_step,
    partial,
    rows,
    vocab,
    splits,
    logits_stride,
    residual_stride,
    seed_stride,
    residual_scale,
    inverse_temperature,
    mask_token,
    HAS_RESIDUAL: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    SAMPLE: tl.constexpr,
    RUNNER_UP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    start = split * BLOCK
    index = start + tl.arange(0, BLOCK)
    inside = index < vocab
    x = corrected_logits(
        logits + row * logits_stride, residual + row * residual_stride, residual_scale, index, inside, HAS_RESIDUAL
    )
    candidate = inside & (index != mask_token)
    score = tl.where(candidate, x, -float("inf"))
    if SAMPLE:
        if HAS_THRESHOLD:
            score = tl.where(x >= tl.load(threshold + row), score, -float("inf"))
        score = score * inverse_temperature + gumbel_block(
            tl.load(seed + row * seed_stride),
            tl.load(noise_row + row),
            tl.load(noise_position + row),
            tl.load(noise_step + row),
            start,
            BLOCK,
        )
    best = tl.max(score, axis=0)
    # A token of no row stands for "none here": the split holds nothing but the mask token, or a NaN.
    token = tl.min(tl.where(candidate & (score == best), index, 0x7FFFFFFF), axis=0)
    is_token = index == token
    largest = tl.max(x, axis=0)
    shifted = x - tl.where(largest == -float("inf"), 0.0, largest)
    shifted = tl.where(shifted < -104.0, -104.0, shifted)
    weight = tl.exp(shifted)
    output = partial + row * splits + split
    field = rows.to(tl.int64) * splits
    tl.store(output, largest)
    tl.store(output + field, tl.sum(tl.where(is_token | (inside == 0), 0.0, weight), axis=0))
    tl.store(output + 2 * field, best)
    tl.store(output + 3 * field, tl.max(tl.where(is_token, x, -float("inf")), axis=0))
    tl.store(output + 4 * field, token.to(tl.float32, bitcast=True))
    if ENTROPY:
        tl.store(output + 5 * field, tl.sum(weight * shifted, axis=0))
    if RUNNER_UP:
        other = tl.where(candidate & (is_token == 0), x, -float("inf"))
        second = tl.max(other, axis=0)
        second_token = tl.min(tl.where(candidate & (is_token == 0) & (other == second), index, 0x7FFFFFFF), axis=0)
        tl.store(output + 6 * field, second)
        tl.store(output + 7 * field, second_token.to(tl.float32, bitcast=True))


@triton.jit
def _combine_kernel(
    partial,
    token_out,
    probability_out,
    log_odds_out,
    log_sum_exp_out,
    entropy_out,
    runner_up_out,
    runner_up_probability_out,
    rows,
    vocab,
    splits,
    RUNNER_UP: tl.constexpr,
    ENTROPY: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    inside = split < splits
    source = partial + row * splits + split
    field = rows.to(tl.int64) * splits
    low = -float("inf")
    largest = tl.load(source, mask=inside, other=low)
    others = tl.load(source + field, mask=inside, other=0.0)
    score = tl.load(source + 2 * field, mask=inside, other=low)
    value = tl.load(source + 3 * field, mask=inside, other=low)
    token = tl.load(source + 4 * field, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    token = tl.where(inside, token, 0x7FFFFFFF)

    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == best, token, 0x7FFFFFFF), axis=0)
    is_winner = inside & (token == winner)
    row_largest = tl.max(largest, axis=0)
    shift = tl.maximum(largest - row_largest, -104.0)
    scale = tl.exp(shift)
    weight = tl.exp(value - row_largest)
    mass = tl.sum(scale * others + tl.where(is_winner, 0.0, weight), axis=0)
    winner_value = tl.max(tl.where(is_winner, value, low), axis=0) - row_largest
    winner_weight = tl.exp(winner_value)
    total = winner_weight + mass
    log_total = tl.log(total)
    tl.store(token_out + row, tl.minimum(winner, vocab - 1).to(tl.int64))
    tl.store(probability_out + row, winner_weight / total)
    floored = tl.where(mass < 1.1754943508222875e-38, 1.1754943508222875e-38, mass)
    tl.store(log_odds_out + row, winner_value - tl.log(floored))
    tl.store(log_sum_exp_out + row, row_largest + log_total)
    if ENTROPY:
        weighted = tl.load(source + 5 * field, mask=inside, other=0.0)
        # sum of e^(x - M) (x - M) over a split, from its own largest value m to the row's M: the shift m - M is added.
        chosen = tl.where(value > low, tl.exp(tl.maximum(value - largest, -104.0)), 0.0)
        weighted = tl.sum(scale * (weighted + shift * (others + chosen)), axis=0)
        tl.store(entropy_out + row, log_total - weighted / total)
    if RUNNER_UP:
        second = tl.load(source + 6 * field, mask=inside, other=low)
        second_token = tl.load(source + 7 * field, mask=inside, other=0.0).to(tl.int32, bitcast=True)
        second_token = tl.where(inside, second_token, 0x7FFFFFFF)
        value = tl.where(is_winner, low, value)
        token = tl.where(is_winner, 0x7FFFFFFF, token)
        runner = tl.maximum(tl.max(second, axis=0), tl.max(value, axis=0))
        runner_token = tl.minimum(
            tl.min(tl.where(second == runner, second_token, 0x7FFFFFFF), axis=0),
            tl.min(tl.where(value == runner, token, 0x7FFFFFFF), axis=0),
        )
        tl.store(runner_up_out + row, tl.minimum(runner_token, vocab - 1).to(tl.int64))
        tl.store(runner_up_probability_out + row, tl.exp(runner - row_largest) / total)


def block_size(vocab: int) -> tuple[int, int]:
    """Logits per program and warps: 16 rows of 151,936 make 608 programs of 16 logits a thread.

    Twice as many a thread would take 180 registers, and one program would be all that a multiprocessor holds.
    """
    block = min(4096, max(128, triton.next_power_of_2(vocab)))
    return block, max(1, min(8, block // 512))


def reveal_statistics_triton(
    logits: Tensor,
    *,
    residual: Tensor | None = None,
    residual_scale: float = 1.0,
    mask_token_id: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    noise: NoiseKey | None = None,
    runner_up: bool = True,
    entropy: bool = True,
) -> RevealStatistics:
    """See `reveal_statistics.reveal_statistics`."""
    rows, vocab = logits.shape
    device = logits.device
    logits = _rows_of(logits)
    residual = _rows_of(residual) if residual is not None else None
    sample = noise is not None and temperature > 0
    block, warps = block_size(vocab)
    splits = triton.cdiv(vocab, block)
    mask_token = -1 if mask_token_id is None else mask_token_id
    inverse_temperature = 1.0 / temperature if sample else 1.0
    threshold = None
    if sample and (0 < top_k < vocab or top_p < 1.0):
        threshold = reveal_threshold(logits, residual, residual_scale, mask_token, inverse_temperature, top_k, top_p)
    seed, seed_stride, noise_row, noise_position, noise_step = noise_arguments(noise if sample else None, logits)
    partial = torch.empty(FIELDS, rows, splits, device=device, dtype=torch.float32)
    tokens = torch.empty(2, rows, device=device, dtype=torch.int64)
    measures = torch.empty(5, rows, device=device, dtype=torch.float32)
    if not runner_up:
        tokens[1].fill_(-1)
        measures[4].fill_(float("nan"))
    if not entropy:
        measures[3].fill_(float("nan"))
    outputs = RevealStatistics(tokens[0], measures[0], measures[1], measures[2], measures[3], tokens[1], measures[4])
    if rows == 0:
        return outputs
    _partial_kernel[(rows, splits)](
        logits,
        residual if residual is not None else logits,
        threshold if threshold is not None else logits,
        seed,
        noise_row,
        noise_position,
        noise_step,
        partial,
        rows,
        vocab,
        splits,
        logits.stride(0),
        residual.stride(0) if residual is not None else 0,
        seed_stride,
        float(residual_scale),
        float(inverse_temperature),
        mask_token,
        HAS_RESIDUAL=residual is not None,
        HAS_THRESHOLD=threshold is not None,
        SAMPLE=sample,
        RUNNER_UP=runner_up,
        ENTROPY=entropy,
        BLOCK=block,
        num_warps=warps,
    )
    _combine_kernel[(rows,)](
        partial,
        *outputs,
        rows,
        vocab,
        splits,
        RUNNER_UP=runner_up,
        ENTROPY=entropy,
        SPLITS=triton.next_power_of_2(splits),
        num_warps=1,
    )
    return outputs


def _rows_of(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def noise_arguments(noise: NoiseKey | None, unused: Tensor) -> tuple[Tensor, int, Tensor, Tensor, Tensor]:
    """Seed, its stride, row, position and step as kernels take them; `unused` stands in where there is no noise."""
    if noise is None:
        return unused, 0, unused, unused, unused
    device = unused.device
    row, position, step = (
        word.to(device=device, dtype=torch.int64).contiguous() for word in (noise.row, noise.position, noise.step)
    )
    if isinstance(noise.seed, Tensor):
        seed = noise.seed.to(device=device, dtype=torch.int64).reshape(-1).contiguous()
        return seed, int(seed.numel() > 1), row, position, step
    signed = (noise.seed + 2**63) % 2**64 - 2**63
    return torch.full((1,), signed, device=device, dtype=torch.int64), 0, row, position, step
