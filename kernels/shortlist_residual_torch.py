"""Torch twins of `shortlist` and `shortlist_residual`: the specification of the kernels and the path on CPU."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .philox_torch import NoiseKey, gumbel_noise_at
from .reveal_statistics_torch import LOWEST, TINY, RevealStatistics


class Shortlist(NamedTuple):
    """The best tokens of each row of the backbone's logits `A`, and what is left of its softmax.

    Attributes:
        tokens: `[rows, size]` int64, by falling logit; never the mask token.
        logits: `[rows, size]` float32, theirs.
        rest_log_sum_exp: `[rows]` float32, of all other logits, the mask token's among them.
        rest_mean_logit: `[rows]` float32, the mean of the other logits under their own softmax (for the entropy).
    """

    tokens: Tensor
    logits: Tensor
    rest_log_sum_exp: Tensor
    rest_mean_logit: Tensor


def best_tokens(logits: Tensor, size: int, mask_token_id: int | None) -> tuple[Tensor, Tensor]:
    """The `size` largest logits of each row and their tokens, `[rows, size]` each, without the mask token's."""
    if mask_token_id is None:
        values, tokens = logits.topk(size, dim=1)
        return values.float(), tokens
    values, tokens = logits.topk(size + 1, dim=1)
    # One more than asked for, and then the mask token, or else the last one, is left out: no copy of the vocabulary.
    kept = (tokens == mask_token_id).to(torch.int8).argsort(dim=1, stable=True)[:, :size]
    return values.gather(1, kept).float(), tokens.gather(1, kept)


def shortlist_torch(logits: Tensor, size: int, mask_token_id: int | None) -> Shortlist:
    """See `shortlist_residual.shortlist`."""
    with torch.no_grad():
        values, tokens = best_tokens(logits, size, mask_token_id)
        largest = values[:, :1]
        if mask_token_id is not None:
            largest = torch.maximum(largest, logits[:, mask_token_id : mask_token_id + 1].float())
        shifted = (logits.float() - largest).clamp_(min=LOWEST)
        weights = shifted.exp().scatter_(1, tokens, 0.0)
        rest = weights.sum(dim=1).clamp_(min=TINY)
        mean = torch.linalg.vecdot(weights, shifted) / rest
        return Shortlist(tokens, values, largest[:, 0] + rest.log(), largest[:, 0] + mean)


def shortlist_residual_torch(
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
    with torch.no_grad():
        tokens = shortlist.tokens
        # Rounded to the weight's dtype, as a linear layer would see it, and summed in float32.
        state = residual.to(weight.dtype).float()
        correction = torch.bmm(weight[tokens].float(), state[:, :, None])[:, :, 0]
        values = torch.add(shortlist.logits, correction, alpha=residual_scale)
        scores = values
        if noise is not None and temperature > 0:
            scores = values * (1.0 / temperature)
            kept = _kept(scores, top_k, top_p)
            scores = scores.masked_fill(~kept, -math.inf) + gumbel_noise_at(noise, tokens)
        token, at = _best(scores, tokens)
        value = values.gather(1, at)[:, 0]

        largest = torch.maximum(values.amax(dim=1), shortlist.rest_log_sum_exp)
        shifted = (values - largest[:, None]).clamp_(min=LOWEST)
        weights = shifted.exp()
        rest = (shortlist.rest_log_sum_exp - largest).exp()
        weighted = torch.linalg.vecdot(weights, shifted) + rest * (shortlist.rest_mean_logit - largest)
        chosen = (value - largest).exp()
        others = weights.scatter_(1, at, 0.0).sum(dim=1) + rest
        total = chosen + others
        runner_up, runner_at = _best(values.scatter(1, at, -math.inf), tokens)
        return RevealStatistics(
            token=token,
            probability=chosen / total,
            log_odds=(value - largest) - others.clamp(min=TINY).log(),
            log_sum_exp=largest + total.log(),
            entropy=total.log() - weighted / total,
            runner_up=runner_up,
            runner_up_probability=(values.gather(1, runner_at)[:, 0] - largest).exp() / total,
        )


def _best(scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The token of the largest score (the lowest wins ties) `[rows]`, and its column `[rows, 1]`."""
    tied = scores == scores.amax(dim=1, keepdim=True)
    candidates = tokens.masked_fill(~tied, torch.iinfo(torch.int64).max)
    at = candidates.argmin(dim=1, keepdim=True)
    return tokens.gather(1, at)[:, 0], at


def _kept(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """`[rows, size]` bool: what top-k and then top-p leave; by counting pairs, since a shortlist is short."""
    above = scores[:, None, :] > scores[:, :, None]
    kept = torch.ones_like(scores, dtype=torch.bool)
    if top_k > 0:
        kept = above.sum(dim=2) < top_k
    if top_p < 1.0:
        mass = (scores - scores.amax(dim=1, keepdim=True)).exp() * kept
        kept = kept & ((above * mass[:, None, :]).sum(dim=2) < top_p * mass.sum(dim=1, keepdim=True))
    return kept
