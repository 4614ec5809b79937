"""Triton kernels of `shortlist` and `shortlist_residual`.

The selection needs no sort of the vocabulary. The first kernel reads each logit once and keeps, of each small group,
the largest and the softmax sums relative to it. The `size` best logits lie in the `size` groups with the largest
maxima (whatever lies elsewhere has `size` logits above it), so the second, one program a row, picks these groups and
then the best of their few thousand logits. The rest of the softmax is what the other groups sum to plus what these
groups hold beside the list: summed without the list, not subtracted from the whole, which would lose a small rest to
rounding.
"""

from functools import lru_cache

import torch
from torch import Tensor

from .philox_torch import NoiseKey
from .philox_triton import gumbel_at
from .reveal_statistics_torch import RevealStatistics
from .reveal_statistics_triton import empty_statistics, noise_arguments
from .reveal_threshold_triton import from_sortable, sortable
from .shortlist_residual_torch import Shortlist
from .tile_arithmetic import cdiv, next_power_of_2

try:  # transformers' check of remote code tolerates a missing package only in a try block
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('kernels="triton" needs the package triton.') from error


@triton.jit
def _key(x, index):
    """int64 that orders by falling `x`, then by rising `index`; never equal for two indices."""
    return (sortable(x) << 32) | (0xFFFFFFFF - index)


@triton.jit
def _index(key):
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def _group_kernel(
    logits, partial, rows, vocab, groups, logits_stride, mask_token, GROUPS: tl.constexpr, WIDTH: tl.constexpr
):
    """`partial` `[fields, rows, groups]`: largest logit that may be listed, largest, sum of weights, weighted sum."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    index = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(logits + row * logits_stride + index, mask=index < vocab, other=-float("inf")).to(tl.float32)
    largest = tl.max(x, axis=1)
    shifted = x - tl.where(largest == -float("inf"), 0.0, largest)[:, None]
    weight = tl.exp(shifted)
    output = partial + row * groups + group
    field = rows.to(tl.int64) * groups
    inside = group < groups
    tl.store(output, tl.max(tl.where(index == mask_token, -float("inf"), x), axis=1), mask=inside)
    tl.store(output + field, largest, mask=inside)
    tl.store(output + 2 * field, tl.sum(weight, axis=1), mask=inside)
    # 0 * -inf would be NaN; a NaN is not lost here, it shows in the weight.
    tl.store(output + 3 * field, tl.sum(weight * tl.maximum(shifted, -104.0), axis=1), mask=inside)


@triton.jit
def _select_kernel(
    logits,
    partial,
    tokens,
    values,
    rest_log_sum_exp,
    rest_mean_logit,
    rows,
    vocab,
    groups,
    size,
    logits_stride,
    mask_token,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    source = partial + row * groups
    field = rows.to(tl.int64) * groups
    low = -float("inf")
    group = tl.arange(0, GROUPS)
    inside = group < groups
    group_key = _key(tl.load(source + group, mask=inside, other=low), group.to(tl.int64))
    picked = tl.topk(group_key, SIZE)
    is_picked = group_key >= tl.min(picked, axis=0)

    # A group beyond the last may have been picked where there are few: all of its indices are outside.
    index = _index(picked)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    exists = index < vocab
    x = tl.load(logits + index, mask=exists, other=low).to(tl.float32)
    key = tl.where(exists & (index != mask_token), _key(x, index), -0x8000000000000000)
    best = tl.topk(tl.reshape(key, [SIZE * WIDTH]), SIZE)
    at = tl.arange(0, SIZE)
    listed = at < size
    tl.store(tokens + row * size + at, _index(best), mask=listed)
    tl.store(values + row * size + at, from_sortable(best >> 32), mask=listed)
    is_rest = exists & (key < tl.min(tl.where(listed, best, 0x7FFFFFFFFFFFFFFF), axis=0))

    largest = tl.load(source + field + group, mask=inside, other=low)
    top = tl.max(largest, axis=0)
    shift = tl.maximum(largest - top, -104.0)
    scale = tl.where(is_picked, 0.0, tl.exp(shift))
    sums = tl.load(source + 2 * field + group, mask=inside, other=0.0)
    weighted = tl.load(source + 3 * field + group, mask=inside, other=0.0)
    # A group's sum of w (x - m), from its own largest logit m to the row's M: m - M is added to each x - m.
    rest = tl.sum(scale * sums, axis=0)
    mean = tl.sum(scale * (weighted + shift * sums), axis=0)
    shifted = x - top
    weight = tl.where(is_rest, tl.exp(shifted), 0.0)
    rest += tl.sum(tl.sum(weight, axis=1), axis=0)
    mean += tl.sum(tl.sum(weight * tl.maximum(shifted, -104.0), axis=1), axis=0)
    rest = tl.where(rest < 1.1754943508222875e-38, 1.1754943508222875e-38, rest)
    tl.store(rest_log_sum_exp + row, top + tl.log(rest))
    tl.store(rest_mean_logit + row, top + mean / rest)


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


@lru_cache
def group_width(size: int, vocab: int) -> tuple[int, int]:
    """The list's padded size, and how many logits make a group: the width whose larger search is the smallest.

    One program searches first the groups and then the logits of the picked ones, all in registers.
    """
    padded = next_power_of_2(size)

    def larger(width: int) -> int:
        return max(next_power_of_2(cdiv(vocab, width)), padded * width)

    return padded, min((8, 16, 32, 64, 128), key=larger)


def shortlist_triton(logits: Tensor, size: int, mask_token_id: int | None) -> Shortlist:
    """See `shortlist_residual.shortlist`."""
    rows, vocab = logits.shape
    device = logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    padded, width = group_width(size, vocab)
    groups = cdiv(vocab, width)
    together = min(4096 // width, next_power_of_2(groups))
    mask_token = -1 if mask_token_id is None else mask_token_id
    partial = torch.empty(4, rows, groups, device=device, dtype=torch.float32)
    tokens = torch.empty(rows, size, device=device, dtype=torch.int64)
    values = torch.empty(rows, size, device=device, dtype=torch.float32)
    rest_log_sum_exp, rest_mean_logit = torch.empty(2, rows, device=device, dtype=torch.float32).unbind()
    if rows:
        numbers = (logits.stride(0), mask_token)
        _group_kernel[(rows, cdiv(groups, together))](
            logits, partial, rows, vocab, groups, *numbers, GROUPS=together, WIDTH=width, num_warps=8
        )
        _select_kernel[(rows,)](
            logits,
            partial,
            tokens,
            values,
            rest_log_sum_exp,
            rest_mean_logit,
            rows,
            vocab,
            groups,
            size,
            *numbers,
            GROUPS=max(padded, next_power_of_2(groups)),
            WIDTH=width,
            SIZE=padded,
            num_warps=16,
        )
    return Shortlist(tokens, values, rest_log_sum_exp, rest_mean_logit)


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
    outputs = empty_statistics(rows, device)
    if rows == 0:
        return outputs
    # Four tokens a program: 16 positions with 64 tokens each make 256 programs.
    per_program = 4
    _correction_kernel[(rows, cdiv(size, per_program))](
        tokens,
        residual,
        weight,
        correction,
        size,
        hidden,
        residual.stride(0),
        weight.stride(0),
        TOKENS=per_program,
        BLOCK=min(1024, next_power_of_2(hidden)),
        num_warps=4,
    )
    sample = noise is not None and temperature > 0
    seed, seed_stride, noise_row, noise_position, noise_step = noise_arguments(noise if sample else None, tokens)
    padded = next_power_of_2(size)
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
