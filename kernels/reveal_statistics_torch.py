"""Torch twin of `reveal_statistics`: the specification of the kernel and the path on CPU.

No host synchronisation and no float64; the arguments are validated by the entry in `reveal_statistics.py`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .philox_torch import NoiseKey, gumbel_noise

# exp(LOWEST) is 0 in float32, and 0 * LOWEST is 0 where 0 * -inf would be NaN.
LOWEST = -104.0
TINY = torch.finfo(torch.float32).tiny


class RevealStatistics(NamedTuple):
    """What a reveal policy needs of each row, every field `[rows]`.

    Attributes:
        token: int64, the chosen token.
        probability: float32, its probability under the raw softmax over all tokens.
        log_odds: float32, `log(p / (1 - p))` of that probability, precise also where `p` rounds to 1; at most 87.34
            (the others' mass is bounded from below by the smallest normal float32).
        log_sum_exp: float32, of the raw logits. NaN exactly if the row holds a NaN or +inf, or nothing but -inf.
        entropy: float32, of the raw softmax, in nats; NaN if it was not asked for.
        runner_up: int64, the best token beside the chosen one; -1 if it was not asked for.
        runner_up_probability: float32, its raw probability; NaN if it was not asked for.
    """

    token: Tensor
    probability: Tensor
    log_odds: Tensor
    log_sum_exp: Tensor
    entropy: Tensor
    runner_up: Tensor
    runner_up_probability: Tensor


def reveal_statistics_torch(
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
    with torch.no_grad():
        values = logits.float()
        if residual is not None:
            values = torch.add(values, residual.float(), alpha=residual_scale)
        best, token, largest = _argmax_without(values, mask_token_id)
        if noise is not None and temperature > 0:
            token = _sample(values, mask_token_id, temperature, top_k, top_p, noise)
            best = values.gather(1, token[:, None])[:, 0]

        shifted = values - largest[:, None]
        weights = shifted.clamp_(min=LOWEST).exp()
        weighted = torch.linalg.vecdot(weights, shifted) if entropy else None
        chosen = (best - largest).exp()
        # The chosen token's own weight never enters this sum: 1 - p keeps its relative precision where p rounds to 1.
        others = weights.scatter_(1, token[:, None], 0.0).sum(dim=1)
        total = chosen + others
        log_total = total.log()
        second, second_probability = (
            token.new_full((), -1).expand_as(token),
            total.new_full((), math.nan).expand_as(total),
        )
        if runner_up:
            shifted.copy_(values).scatter_(1, token[:, None], -math.inf)
            second_value, second, _ = _argmax_without(shifted, mask_token_id)
            second_probability = (second_value - largest).exp() / total
        return RevealStatistics(
            token=token,
            probability=chosen / total,
            log_odds=(best - largest) - others.clamp(min=TINY).log(),
            log_sum_exp=largest + log_total,
            entropy=total.new_full((), math.nan).expand_as(total)
            if weighted is None
            else log_total - weighted / total,
            runner_up=second,
            runner_up_probability=second_probability,
        )


def _argmax_without(values: Tensor, excluded: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Best value and its lowest index among the columns beside `excluded`, and the largest of all, `[rows]` each.

    Two views around the excluded column, so nothing of vocabulary size is copied or written.
    """
    if excluded is None:
        best, token = values.max(dim=1)
        return best, token, best
    parts = []
    for start, stop in ((0, excluded), (excluded + 1, values.shape[1])):
        if start < stop:
            best, token = values[:, start:stop].max(dim=1)
            parts.append((best, token + start))
    best, token = parts[0]
    if len(parts) == 2:
        right = parts[1][0] > best
        token = torch.where(right, parts[1][1], token)
        best = torch.maximum(best, parts[1][0])
    return best, token, torch.maximum(best, values[:, excluded])


def _sample(
    values: Tensor, excluded: int | None, temperature: float, top_k: int, top_p: float, noise: NoiseKey
) -> Tensor:
    """Gumbel-max draw `[rows]` from softmax(values / temperature), cut to top-k and then to top-p."""
    scores = values * (1.0 / temperature)
    if excluded is not None:
        scores[:, excluded] = -math.inf
    if 0 < top_k < scores.shape[1] or top_p < 1.0:
        scores.masked_fill_(scores < _threshold(scores, top_k, top_p), -math.inf)
    return scores.add_(gumbel_noise(noise, scores.shape[1])).argmax(dim=1)


def _threshold(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """`[rows, 1]`: the lowest score kept. All tokens that tie with it are kept.

    top-k keeps scores >= the k-th largest. top-p then keeps a score if the mass strictly above it, as a share of what
    top-k left, is below `top_p`: the smallest set of best tokens that reaches `top_p`.
    """
    count = top_k if 0 < top_k < scores.shape[1] else scores.shape[1]
    ordered = scores.topk(count, dim=1).values
    lowest = ordered[:, -1:]
    if top_p >= 1.0:
        return lowest
    largest = ordered[:, :1]
    kept = scores.masked_fill(scores < lowest, -math.inf)
    total = (kept - largest).exp_().sum(dim=1, keepdim=True)
    above = (ordered - largest).exp_().cumsum(dim=1).roll(1, dims=1)
    above[:, 0] = 0.0
    # The first of a group of ties has the mass strictly above the group; the later ones only have more.
    return ordered.masked_fill(above >= top_p * total, math.inf).amin(dim=1, keepdim=True)
