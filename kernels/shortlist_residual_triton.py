"""Triton kernels of `shortlist` and `shortlist_residual`.

The selection itself is `torch.topk` (a radix select); what a kernel adds is the rest of the softmax in one pass,
summed without the list instead of subtracted from the whole, which would lose a small rest to rounding.
"""

import torch
from torch import Tensor

from .philox_torch import NoiseKey
from .philox_triton import gumbel_at
from .reveal_statistics_torch import TINY, RevealStatistics
from .reveal_statistics_triton import noise_arguments
from .shortlist_residual_torch import Shortlist, best_tokens

try:  # transformers' check of remote code tolerates a missing package only in a try block
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('kernels="triton" needs the package triton.') from error


@triton.jit
def _rest_kernel(
    logits, lowest, largest, partial, rows, vocab, splits, logits_stride, mask_token, BLOCK: tl.constexpr
):
    """Per (row, split): mass below the list's lowest logit, its weighted sum, and the tokens that tie with it.

    The mask token is never in the list, so it counts as below it, whatever its logit.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    index = split * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab
    x = tl.load(logits + row * logits_stride + index, mask=inside, other=-float("inf")).to(tl.float32)
    bound = tl.load(lowest + row)
    is_mask = index == mask_token
    shifted = x - tl.load(largest + row)
    shifted = tl.where(shifted < -104.0, -104.0, shifted)
    # "not >=" instead of "<", so that a NaN is counted, and shows.
    weight = tl.where(inside & (is_mask | ((x >= bound) == 0)), tl.exp(shifted), 0.0)
    output = partial + row * splits + split
    field = rows.to(tl.int64) * splits
    tl.store(output, tl.sum(weight, axis=0))
    tl.store(output + field, tl.sum(weight * shifted, axis=0))
    tl.store(output + 2 * field, tl.sum(tl.where((x == bound) & (is_mask == 0), 1.0, 0.0), axis=0))


@triton.jit
def _correction_kernel(
    tokens,
    residual,
    weight,
    correction,
    size,
    hidden,
    residual_stride,
    weight_stride,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`correction[row, j] = weight[tokens[row, j]] . residual[row]` for a few tokens of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = at < size
    token = tl.load(tokens + row * size + at, mask=inside, other=0)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        index = start + tl.arange(0, BLOCK)
        load = index < hidden
        r = tl.load(residual + row * residual_stride + index, mask=load, other=0.0)
        # The twin rounds the residual to the weight's dtype first.
        r = r.to(weight.dtype.element_ty).to(tl.float32)
        w = tl.load(
            weight + token[:, None] * weight_stride + index[None, :], mask=inside[:, None] & load[None, :], other=0.0
        ).to(tl.float32)
        total += w * r[None, :]
    tl.store(correction + row * size + at, tl.sum(total, axis=1), mask=inside)


@triton.jit
def _choose_kernel(
    tokens,
    logits,
    correction,
    rest_log_sum_exp,
    rest_mean_logit,
    seed,
    noise_row,
    noise_position,
    noise_step,
    token_out,
    probability_out,
    log_odds_out,
    log_sum_exp_out,
    entropy_out,
    runner_up_out,
    runner_up_probability_out,
    size,
    seed_stride,
    residual_scale,
    inverse_temperature,
    top_k,
    top_p,
    SAMPLE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    inside = at < size
    low = -float("inf")
    none = 0x7FFFFFFF
    token = tl.load(tokens + row * size + at, mask=inside, other=none).to(tl.int32)
    value = tl.load(logits + row * size + at, mask=inside, other=low)
    value += residual_scale * tl.load(correction + row * size + at, mask=inside, other=0.0)
    score = value
    if SAMPLE:
        score = value * inverse_temperature
        above = score[None, :] > score[:, None]
        kept = inside
        if TOP_K:
            kept = kept & (tl.sum(above.to(tl.int32), axis=1) < top_k)
        if TOP_P:
            mass = tl.where(kept, tl.exp(score - tl.max(score, axis=0)), 0.0)
            # The mass of the pairs' second members is needed along axis 1; a transposed sum brings it there.
            spread = tl.where(score[:, None] > score[None, :], mass[:, None], 0.0)
            kept = kept & (tl.sum(spread, axis=0) < top_p * tl.sum(mass, axis=0))
        noise = gumbel_at(
            tl.load(seed + row * seed_stride),
            tl.load(noise_row + row),
            tl.load(noise_position + row),
            tl.load(noise_step + row),
            token,
        )
        score = tl.where(kept, score + noise, low)
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(inside & (score == best), token, none), axis=0)
    is_winner = token == winner
    rest = tl.load(rest_log_sum_exp + row)
    largest = tl.maximum(tl.max(value, axis=0), rest)
    shifted = value - largest
    shifted = tl.where(shifted < -104.0, -104.0, shifted)
    weight = tl.where(inside, tl.exp(shifted), 0.0)
    rest_weight = tl.exp(rest - largest)
    weighted = tl.sum(weight * shifted, axis=0) + rest_weight * (tl.load(rest_mean_logit + row) - largest)
    winner_value = tl.max(tl.where(is_winner, value, low), axis=0) - largest
    winner_weight = tl.exp(winner_value)
    others = tl.sum(tl.where(is_winner, 0.0, weight), axis=0) + rest_weight
    total = winner_weight + others
    log_total = tl.log(total)
    second = tl.where(is_winner, low, value)
    runner = tl.max(second, axis=0)
    runner_token = tl.min(tl.where(inside & (is_winner == 0) & (second == runner), token, none), axis=0)
    # After a NaN there may be no winner; the entry promises a valid index nevertheless.
    first = tl.load(tokens + row * size)
    tl.store(token_out + row, tl.where(winner == none, first, winner.to(tl.int64)))
    tl.store(probability_out + row, winner_weight / total)
    floored = tl.where(others < 1.1754943508222875e-38, 1.1754943508222875e-38, others)
    tl.store(log_odds_out + row, winner_value - tl.log(floored))
    tl.store(log_sum_exp_out + row, largest + log_total)
    tl.store(entropy_out + row, log_total - weighted / total)
    tl.store(runner_up_out + row, tl.where(runner_token == none, first, runner_token.to(tl.int64)))
    tl.store(runner_up_probability_out + row, tl.exp(runner - largest) / total)


def shortlist_triton(logits: Tensor, size: int, mask_token_id: int | None) -> Shortlist:
    """See `shortlist_residual.shortlist`."""
    rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    values, tokens = best_tokens(logits, size, mask_token_id)
    largest, lowest = values[:, 0], values[:, -1].contiguous()
    if mask_token_id is not None:
        largest = torch.maximum(largest, logits[:, mask_token_id].float())
    largest = largest.contiguous()
    block = min(4096, max(128, triton.next_power_of_2(vocab)))
    splits = triton.cdiv(vocab, block)
    partial = torch.empty(3, rows, splits, device=logits.device, dtype=torch.float32)
    if rows:
        _rest_kernel[(rows, splits)](
            logits,
            lowest,
            largest,
            partial,
            rows,
            vocab,
            splits,
            logits.stride(0),
            -1 if mask_token_id is None else mask_token_id,
            BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
        )
    below, weighted, ties = partial.sum(dim=2)
    shifted = lowest - largest
    left_out = (ties - (values == lowest[:, None]).sum(dim=1)) * shifted.exp()
    rest = (below + left_out).clamp(min=TINY)
    mean = (weighted + left_out * shifted) / rest
    return Shortlist(tokens, values, largest + rest.log(), largest + mean)


def shortlist_residual_triton(
    shortlist: Shortlist,
    residual: Tensor,
    weight: Tensor,
    *,
    residual_scale: float = 1.0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    noise: NoiseKey | None = None,
) -> RevealStatistics:
    """See `shortlist_residual.shortlist_residual`."""
    rows, size = shortlist.tokens.shape
    hidden = weight.shape[1]
    device = residual.device
    residual = residual if residual.stride(1) == 1 else residual.contiguous()
    if weight.stride(1) != 1:
        raise ValueError(
            "weight must be contiguous in its last dimension: a copy of the LM head is not made silently."
        )
    tokens, logits = shortlist.tokens.contiguous(), shortlist.logits.contiguous()
    correction = torch.empty(rows, size, device=device, dtype=torch.float32)
    chosen = torch.empty(2, rows, device=device, dtype=torch.int64)
    measures = torch.empty(5, rows, device=device, dtype=torch.float32)
    outputs = RevealStatistics(chosen[0], measures[0], measures[1], measures[2], measures[3], chosen[1], measures[4])
    if rows == 0:
        return outputs
    # Four tokens a program: 16 positions with 64 tokens each make 256 programs.
    per_program = 4
    _correction_kernel[(rows, triton.cdiv(size, per_program))](
        tokens,
        residual,
        weight,
        correction,
        size,
        hidden,
        residual.stride(0),
        weight.stride(0),
        TOKENS=per_program,
        BLOCK=min(1024, triton.next_power_of_2(hidden)),
        num_warps=4,
    )
    sample = noise is not None and temperature > 0
    seed, seed_stride, noise_row, noise_position, noise_step = noise_arguments(noise if sample else None, tokens)
    padded = triton.next_power_of_2(size)
    _choose_kernel[(rows,)](
        tokens,
        logits,
        correction,
        shortlist.rest_log_sum_exp.contiguous(),
        shortlist.rest_mean_logit.contiguous(),
        seed,
        noise_row,
        noise_position,
        noise_step,
        *outputs,
        size,
        seed_stride,
        float(residual_scale),
        1.0 / temperature if sample else 1.0,
        top_k,
        float(top_p),
        SAMPLE=sample,
        TOP_K=0 < top_k < size,
        TOP_P=top_p < 1.0,
        SIZE=padded,
        num_warps=4 if padded > 64 and (top_k or top_p < 1.0) else 2,
    )
    return outputs
