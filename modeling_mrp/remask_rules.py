"""Remask rules: which of the positions that were just revealed are masked again?

Each rule runs the head once, never the backbone, and returns the reveals to keep. At least one is always kept, so a
step never ends with fewer revealed positions than it began with plus one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .reveal_policies import rank_of
from .token_statistics import probability_of

# (ids [rows, states, block] with -1 at masked positions) -> logits of the correction's sum A + C, [.., block, vocab]
HeadPass = Callable[[Tensor], Tensor]


def keep_at_least_one(keep: Tensor, revealed: Tensor, score: Tensor) -> Tensor:
    """`keep` within `revealed`, and the best-scored reveal where nothing was kept; all `[..., block]`."""
    keep = keep & revealed
    best = score.masked_fill(~revealed, -torch.inf).argmax(dim=-1, keepdim=True)
    fallback = torch.zeros_like(keep).scatter_(-1, best, True) & revealed
    return torch.where(keep.any(dim=-1, keepdim=True), keep, fallback)


def keep_by_veto(
    before: Tensor, revealed: Tensor, token: Tensor, logits: Tensor, head_pass: HeadPass, delta: float
) -> Tensor:
    """The public code's rule: keep where |C[position, token]| <= delta, C predicted on the state before the reveals.

    Args:
        before: `[rows, block]` ids before the reveals, -1 at masked positions.
        revealed: `[rows, block]` bool, the proposed reveals.
        token: `[rows, block]` int64, the proposed tokens.
        logits: `[rows, block, vocab]`, the backbone's A.
        head_pass: gives A + C.
        delta: bound on the move of the chosen token's logit.
    """
    correction = (head_pass(before[:, None])[:, 0] - logits).gather(-1, token[..., None])[..., 0].abs().float()
    return keep_at_least_one(correction <= delta, revealed, -correction)


def keep_by_confidence(
    before: Tensor, revealed: Tensor, token: Tensor, head_pass: HeadPass, threshold: float
) -> Tensor:
    """The paper's rule: keep where the corrected confidence, conditioned on all fresh reveals, is above tau."""
    after = torch.where(revealed, token, before)
    confidence = probability_of(head_pass(after[:, None])[:, 0], token)
    return keep_at_least_one(confidence > threshold, revealed, confidence)


def keep_by_cross(
    before: Tensor, revealed: Tensor, token: Tensor, order_key: Tensor, head_pass: HeadPass, threshold: float
) -> Tensor:
    """Two halves of the reveals, each predicted again while only the other is revealed, in one packed head pass.

    The halves alternate in the order of confidence, so both hold trustworthy reveals. A single reveal has nothing to
    be checked against and stays.
    """
    rank = rank_of(order_key.masked_fill(~revealed, -torch.inf))
    first, second = revealed & (rank % 2 == 0), revealed & (rank % 2 == 1)
    states = torch.stack([torch.where(half, token, before) for half in (first, second)], dim=1)
    confidence = probability_of(head_pass(states), token[:, None].expand_as(states))
    crossed = torch.where(first, confidence[:, 1], confidence[:, 0])
    alone = revealed.sum(dim=-1, keepdim=True) < 2
    return keep_at_least_one((crossed > threshold) | alone, revealed, crossed)
