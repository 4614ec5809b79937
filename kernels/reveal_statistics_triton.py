"""Triton kernels of `reveal_statistics`: one pass over the logits, split over the vocabulary, and a small combine.

The first kernel reads each logit once and keeps of each chunk the largest logit and the sums relative to it, nothing
that costs more than a few instructions a logit: no indices, no exclusions. The second, one program a row, finds the
chunk that the chosen token is in and reads that chunk again (from the L2 cache) for its index and for the sum without
it; it does the same for the runner-up's chunk, and for the mask token's if that token would have won there.
With top-k or top-p a search for the row's threshold goes before them (`reveal_threshold_triton.py`).
"""

import torch
from torch import Tensor

from .philox_torch import NoiseKey
from .philox_triton import gumbel_block
from .reveal_statistics_torch import RevealStatistics
from .reveal_threshold_triton import reveal_threshold
from .tile_arithmetic import cdiv, next_power_of_2

try:  # transformers' check of remote code tolerates a missing package only in a try block
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('kernels="triton" needs the package triton.') from error

LOG2_E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _load_chunk(logits, residual, residual_scale, index, vocab, HAS_RESIDUAL: tl.constexpr, WHOLE: tl.constexpr):
    """float32 `logits + residual_scale * residual` at `index`, -inf beyond the vocabulary (`WHOLE`: none is)."""
    if WHOLE:
        x = tl.load(logits + index).to(tl.float32)
        if HAS_RESIDUAL:
            x += residual_scale * tl.load(residual + index).to(tl.float32)
    else:
        inside = index < vocab
        x = tl.load(logits + index, mask=inside, other=-float("inf")).to(tl.float32)
        if HAS_RESIDUAL:
            x += residual_scale * tl.load(residual + index, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _scores(
    x, index, start, row, threshold, seed, noise_row, noise_position, noise_step, seed_stride, inverse_temperature,
    vocab, mask_token, HAS_THRESHOLD: tl.constexpr, SAMPLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the choice is the argmax of: the logits, or their tempered and perturbed values; -inf if not choosable."""
    score = tl.where((index < vocab) & (index != mask_token), x, -float("inf"))
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
    return score


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
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`partial` `[fields, rows, splits]`: largest logit, sum of weights, best score, weighted sum, of each chunk."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    start = split * BLOCK
    index = start + tl.arange(0, BLOCK)
    logits += row * logits_stride
    residual += row * residual_stride
    if start + BLOCK <= vocab:
        x = _load_chunk(logits, residual, residual_scale, index, vocab, HAS_RESIDUAL, True)
    else:
        x = _load_chunk(logits, residual, residual_scale, index, vocab, HAS_RESIDUAL, False)
    largest = tl.max(x, axis=0)
    shifted = x - tl.where(largest == -float("inf"), 0.0, largest)
    weight = tl.exp2(shifted * LOG2_E)
    output = partial + row * splits + split
    field = rows.to(tl.int64) * splits
    tl.store(output, largest)
    tl.store(output + field, tl.sum(weight, axis=0))
    if SAMPLE:
        score = _scores(
            x, index, start, row, threshold, seed, noise_row, noise_position, noise_step, seed_stride,
            inverse_temperature, vocab, mask_token, HAS_THRESHOLD, SAMPLE, BLOCK,
        )  # fmt: skip
        tl.store(output + 2 * field, tl.max(score, axis=0))
    if ENTROPY:
        # 0 * -inf would be NaN; a NaN is not lost here, it shows in the weight.
        tl.store(output + 3 * field, tl.sum(weight * tl.maximum(shifted, -104.0), axis=0))


@triton.jit
def _combine_kernel(
    logits,
    residual,
    threshold,
    seed,
    noise_row,
    noise_position,
    noise_step,
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
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    low = -float("inf")
    logits += row * logits_stride
    residual += row * residual_stride
    lane = tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS)
    inside = split < splits
    source = partial + row * splits + split
    field = rows.to(tl.int64) * splits
    largest = tl.load(source, mask=inside, other=low)
    sums = tl.load(source + field, mask=inside, other=0.0)
    # The best logit of each chunk that may be chosen: the largest, unless the mask token may be it.
    best = largest
    if mask_token >= 0:
        at = mask_token // BLOCK
        x_mask = tl.load(logits + mask_token).to(tl.float32)
        if HAS_RESIDUAL:
            x_mask += residual_scale * tl.load(residual + mask_token).to(tl.float32)
        if x_mask >= tl.max(tl.where(split == at, largest, low), axis=0):
            index = at * BLOCK + lane
            x = _load_chunk(logits, residual, residual_scale, index, vocab, HAS_RESIDUAL, False)
            best = tl.where(split == at, tl.max(tl.where(index == mask_token, low, x), axis=0), best)
    score = best
    if SAMPLE:
        score = tl.load(source + 2 * field, mask=inside, other=low)
    top = tl.max(score, axis=0)
    # With a NaN in the row no chunk may be best; any chunk will do then.
    chunk = tl.min(tl.where(inside & (score == top), split, splits - 1), axis=0)

    start = chunk * BLOCK
    index = start + lane
    x = _load_chunk(logits, residual, residual_scale, index, vocab, HAS_RESIDUAL, False)
    if RUNNER_UP:
        # Whether it is needed shows only later, but two loads at once take no longer than one.
        is_elsewhere = inside & (split != chunk)
        elsewhere = tl.where(is_elsewhere, best, low)
        other = tl.max(elsewhere, axis=0)
        other_chunk = tl.min(tl.where(is_elsewhere & (elsewhere == other), split, NONE), axis=0)
        other_index = tl.minimum(other_chunk, splits - 1) * BLOCK + lane
        other_x = _load_chunk(logits, residual, residual_scale, other_index, vocab, HAS_RESIDUAL, False)
    choice = _scores(
        x, index, start, row, threshold, seed, noise_row, noise_position, noise_step, seed_stride,
        inverse_temperature, vocab, mask_token, HAS_THRESHOLD, SAMPLE, BLOCK,
    )  # fmt: skip
    choosable = (index < vocab) & (index != mask_token)
    token = tl.min(tl.where(choosable & (choice == tl.max(choice, axis=0)), index, NONE), axis=0)
    is_token = index == token

    row_largest = tl.max(largest, axis=0)
    shift = tl.maximum(largest - row_largest, -104.0)
    scale = tl.exp2(shift * LOG2_E)
    shifted = x - row_largest
    # The chosen token's own weight never enters this sum: 1 - p keeps its relative precision where p rounds to 1.
    own = tl.sum(tl.where(is_token, 0.0, tl.exp2(shifted * LOG2_E)), axis=0)
    others = tl.sum(tl.where(split == chunk, 0.0, scale * sums), axis=0) + own
    value = tl.max(tl.where(is_token, shifted, low), axis=0)
    weight = tl.exp2(value * LOG2_E)
    total = weight + others
    log_total = tl.log(total)
    tl.store(token_out + row, tl.minimum(token, vocab - 1).to(tl.int64))
    tl.store(probability_out + row, weight / total)
    floored = tl.where(others < 1.1754943508222875e-38, 1.1754943508222875e-38, others)
    tl.store(log_odds_out + row, value - tl.log(floored))
    tl.store(log_sum_exp_out + row, row_largest + log_total)
    if ENTROPY:
        # A chunk's sum of w (x - m), from its own largest logit m to the row's M: m - M is added to each x - m.
        weighted = tl.load(source + 3 * field, mask=inside, other=0.0)
        weighted = tl.sum(scale * (weighted + shift * sums), axis=0)
        tl.store(entropy_out + row, log_total - weighted / total)
    else:
        tl.store(entropy_out + row, float("nan"))
    if RUNNER_UP:
        rest = tl.where(choosable & (is_token == 0), x, low)
        runner = tl.max(rest, axis=0)
        runner_token = tl.min(tl.where(choosable & (is_token == 0) & (rest == runner), index, NONE), axis=0)
        if (other > runner) | ((other == runner) & (other_chunk < chunk)):
            other_choosable = (other_index < vocab) & (other_index != mask_token)
            rest = tl.where(other_choosable, other_x, low)
            runner = tl.max(rest, axis=0)
            runner_token = tl.min(tl.where(other_choosable & (rest == runner), other_index, NONE), axis=0)
        tl.store(runner_up_out + row, tl.minimum(runner_token, vocab - 1).to(tl.int64))
        tl.store(runner_up_probability_out + row, tl.exp2((runner - row_largest) * LOG2_E) / total)
    else:
        tl.store(runner_up_out + row, -1)
        tl.store(runner_up_probability_out + row, float("nan"))


def block_size(vocab: int, sample: bool) -> tuple[int, int]:
    """Logits per program and warps.

    A reduction costs a thread the same whatever its share, so it gets 32 logits where registers allow; 16 rows of
    151,936 still make 304 programs. Sampling needs the registers for its random words.
    """
    block = min(4096 if sample else 8192, max(128, next_power_of_2(vocab)))
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
    block, warps = block_size(vocab, sample)
    splits = cdiv(vocab, block)
    mask_token = -1 if mask_token_id is None else mask_token_id
    inverse_temperature = 1.0 / temperature if sample else 1.0
    threshold = None
    if sample and (0 < top_k < vocab or top_p < 1.0):
        threshold = reveal_threshold(logits, residual, residual_scale, mask_token, inverse_temperature, top_k, top_p)
    seed, seed_stride, noise_row, noise_position, noise_step = noise_arguments(noise if sample else None, logits)
    partial = torch.empty(4, rows, splits, device=device, dtype=torch.float32)
    outputs = empty_statistics(rows, device)
    if rows == 0:
        return outputs
    inputs = (
        logits,
        residual if residual is not None else logits,
        threshold if threshold is not None else logits,
        seed,
        noise_row,
        noise_position,
        noise_step,
    )
    numbers = (
        rows,
        vocab,
        splits,
        logits.stride(0),
        residual.stride(0) if residual is not None else 0,
        seed_stride,
        float(residual_scale),
        float(inverse_temperature),
        mask_token,
    )
    kinds: dict[str, int] = {
        "HAS_RESIDUAL": residual is not None,
        "HAS_THRESHOLD": threshold is not None,
        "SAMPLE": sample,
        "ENTROPY": entropy,
        "BLOCK": block,
    }
    _partial_kernel[(rows, splits)](*inputs, partial, *numbers, **kinds, num_warps=warps)
    _combine_kernel[(rows,)](
        *inputs,
        partial,
        *outputs,
        *numbers,
        RUNNER_UP=runner_up,
        SPLITS=next_power_of_2(splits),
        **kinds,
        num_warps=warps,
    )
    return outputs


def empty_statistics(rows: int, device: torch.device) -> RevealStatistics:
    """Memory for a kernel to write, in two allocations."""
    token, runner_up = torch.empty(2, rows, device=device, dtype=torch.int64).unbind()
    measures = torch.empty(5, rows, device=device, dtype=torch.float32).unbind()
    probability, log_odds, log_sum_exp, entropy, runner_up_probability = measures
    return RevealStatistics(token, probability, log_odds, log_sum_exp, entropy, runner_up, runner_up_probability)


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
