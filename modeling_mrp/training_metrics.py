"""What a researcher reads while a head trains: the share of the move it explains, and what drafts gain."""

from typing import Any

import torch
from torch import Tensor

from .residual_kl_torch import default_chunk


@torch.no_grad()
def pick_tokens(model: Any, hidden: Tensor, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """Chosen token (never the mask token) and its log-odds under the raw softmax.

    Args:
        model: an `MRPForCausalLM`.
        hidden: `[places, hidden]`.
        chunk: places whose logits exist at a time.

    Returns:
        `[places]` int64 and `[places]` float32. Log-odds order like the confidence and do not saturate near 1.
    """
    tokens, odds = [], []
    for part in hidden.split(chunk or default_chunk(model.config.vocab_size)):
        logits = model.lm_head(part).float()
        mask_logit = logits[:, model.config.mask_token_id].clone()
        logits[:, model.config.mask_token_id] = -torch.inf
        top, token = logits.max(dim=-1)
        rest = logits.scatter(1, token[:, None], -torch.inf)
        rest[:, model.config.mask_token_id] = mask_logit
        tokens.append(token)
        odds.append(top - rest.logsumexp(dim=-1))
    if not tokens:
        return hidden.new_zeros(0, dtype=torch.int64), hidden.new_zeros(0, dtype=torch.float32)
    return torch.cat(tokens), torch.cat(odds)


@torch.no_grad()
def step_metrics(
    model: Any, k: int, chosen: Tensor, first: Tensor, target: Tensor, student: Tensor
) -> dict[str, Tensor]:
    """Metrics of step k over the places still masked.

    Args:
        chosen: `[copies, batch, blocks, block]` bool, the places.
        first, target, student: `[copies, batch, blocks, block, hidden]`: A, B and A + C (or C) in hidden space.

    Returns:
        `kl_before_k` KL(B || A), `kl_k` KL(B || A + C), `kl_explained_k` = 1 - kl_k / kl_before_k, `top1_before_k` and
        `top1_k` (share of places where A, or A + C, has B's first token), and `next_pick_before_k`, `next_pick_k`
        (share of blocks in which A, or A + C, would reveal the very place and token that B reveals next: the chance
        that one more draft is accepted).
    """
    a, b, s = first[chosen], target[chosen], student[chosen]
    sums = torch.zeros(2, device=a.device)
    chunk = default_chunk(model.config.vocab_size)
    for part_a, part_b, part_s in zip(a.split(chunk), b.split(chunk), s.split(chunk), strict=True):
        log_b = model.lm_head(part_b).float().log_softmax(-1)
        p = log_b.exp()
        for index, part in enumerate((part_a, part_s)):
            sums[index] += (p * (log_b - model.lm_head(part).float().log_softmax(-1))).sum()
    places = max(1, len(b))
    kl_before, kl_after = sums / places
    picks = [pick_tokens(model, part) for part in (a, b, s)]
    result = {
        f"kl_before_{k}": kl_before,
        f"kl_{k}": kl_after,
        f"kl_explained_{k}": 1 - kl_after / kl_before.clamp(min=1e-9),
    }
    blocks = chosen.any(dim=-1)
    next_picks = [_next_pick(chosen, *pick)[blocks] for pick in picks]
    for name, index in (("before_", 0), ("", 2)):
        same = (picks[index][0] == picks[1][0]).float()
        result[f"top1_{name}{k}"] = same.sum() / places
        result[f"next_pick_{name}{k}"] = (next_picks[index] == next_picks[1]).all(-1).float().sum() / max(
            1, len(next_picks[1])
        )
    return result


def _next_pick(chosen: Tensor, token: Tensor, log_odds: Tensor) -> Tensor:
    """`[copies, batch, blocks, 2]` int64: place and token of the most confident masked place of each block."""
    score = torch.full(chosen.shape, -torch.inf, device=chosen.device).masked_scatter(chosen, log_odds)
    place = score.argmax(dim=-1, keepdim=True)
    tokens = torch.zeros_like(chosen, dtype=torch.int64).masked_scatter(chosen, token)
    return torch.cat([place, tokens.gather(-1, place)], dim=-1)
