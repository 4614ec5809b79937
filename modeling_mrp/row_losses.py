"""Losses of one row of logits against another, with their gradient: what `ResidualKL` sums in chunks.

Each function takes student and target logits `[rows, vocab]`, returns the loss `[rows]` and overwrites the student's
logits with its gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def reverse_kl_rows(student: Tensor, target: Tensor) -> Tensor:
    """KL(softmax(student) || softmax(target))."""
    work = torch.promote_types(student.dtype, torch.float32)
    log_student = student.to(work).log_softmax(dim=1)
    difference = log_student - target.to(work).log_softmax(dim=1)
    probability = log_student.exp()
    loss = torch.linalg.vecdot(probability, difference)
    student.copy_(probability * (difference - loss[:, None]))
    return loss


def certain_kl_rows(certainty: float) -> Callable[[Tensor, Tensor], Tensor]:
    """KL(softmax(target) || softmax(student)) + `certainty` Huber(l_student - l_target).

    l is the log-odds of the target's first token, log(p / (1 - p)). The KL hardly feels how certain a near-certain
    token is, but the order of reveals is made of it, and a draft is accepted or not by that order.
    """

    def rows(student: Tensor, target: Tensor) -> Tensor:
        work = torch.promote_types(student.dtype, torch.float32)
        log_student = student.to(work).log_softmax(dim=1)
        log_target = target.to(work).log_softmax(dim=1)
        p_target = log_target.exp()
        token = log_target.argmax(dim=1, keepdim=True)
        own, of_student = _log_odds(log_target, token)[0], _log_odds(log_student, token)
        difference = of_student[0] - own
        clipped = difference.clamp(-1, 1)
        loss = (p_target * (log_target - log_student)).sum(dim=1)
        loss += certainty * clipped * (difference - clipped / 2)
        # d l / d logits: 1 at the token, minus the softmax among the others elsewhere.
        others = (log_student - of_student[1][:, None]).exp().neg().scatter(1, token, 1.0)
        student.copy_(log_student.exp() - p_target + certainty * clipped[:, None] * others)
        return loss

    return rows


def _log_odds(log_probabilities: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """Log-odds `[rows]` of `token` `[rows, 1]`, and the logarithm of the others' mass `[rows]`."""
    others = log_probabilities.scatter(1, token, -torch.inf).logsumexp(dim=1)
    return log_probabilities.gather(1, token)[:, 0] - others, others
