"""What the operations of `mrp_kernels` must give, in float64 and as directly as their formulas can be written."""

import math

import torch
import torch.nn.functional as F
from mrp_kernels import NoiseKey, PositionStatistics, RevealRule, RevealStatistics, Shortlist, gumbel_noise
from mrp_kernels.reveal_rule import Policy
from torch import Tensor


def log_odds(logits: Tensor, token: Tensor) -> Tensor:
    """`log(p / (1 - p))` of one token per row."""
    others = logits.scatter(1, token[:, None], -math.inf).logsumexp(dim=1)
    return logits.gather(1, token[:, None])[:, 0] - others


def statistics(
    logits: Tensor,
    *,
    residual: Tensor | None = None,
    residual_scale: float = 1.0,
    mask_token_id: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    noise: NoiseKey | None = None,
    chosen: Tensor | None = None,
) -> RevealStatistics:
    """`reveal_statistics`; with `chosen`, the measures of these tokens instead of its own choice."""
    values = logits.double()
    if residual is not None:
        values = values + residual_scale * residual.double()
    scores = scores_of(values, mask_token_id, temperature, top_k, top_p, noise)
    token = scores.argmax(dim=1) if chosen is None else chosen
    candidates = values.scatter(1, token[:, None], -math.inf)
    if mask_token_id is not None:
        candidates[:, mask_token_id] = -math.inf
    probabilities = values.softmax(dim=1)
    return RevealStatistics(
        token=token,
        probability=probabilities.gather(1, token[:, None])[:, 0],
        log_odds=log_odds(values, token),
        log_sum_exp=values.logsumexp(dim=1),
        entropy=torch.special.entr(probabilities).sum(dim=1),
        runner_up=candidates.argmax(dim=1),
        runner_up_probability=probabilities.gather(1, candidates.argmax(dim=1)[:, None])[:, 0],
    )


def scores_of(
    values: Tensor,
    mask_token_id: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    noise: NoiseKey | None,
) -> Tensor:
    """What the choice is the argmax of, `[rows, vocab]`: -inf where a token cannot be chosen."""
    scores = values.clone()
    if mask_token_id is not None:
        scores[:, mask_token_id] = -math.inf
    if noise is None or temperature == 0:
        return scores
    scores = scores / temperature
    order = scores.sort(dim=1, descending=True).values
    if 0 < top_k < scores.shape[1]:
        scores = scores.masked_fill(scores < order[:, top_k - 1 : top_k], -math.inf)
        order = scores.sort(dim=1, descending=True).values
    if top_p < 1:
        mass = order.softmax(dim=1)
        above = mass.cumsum(dim=1) - mass
        lowest = order.masked_fill(above >= top_p, math.inf).amin(dim=1, keepdim=True)
        scores = scores.masked_fill(scores < lowest, -math.inf)
    return scores + gumbel_noise(noise, scores.shape[1]).double()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cache_key: Tensor,
    cache_value: Tensor,
    prefix_length: Tensor,
    visible: Tensor,
    block: int,
    scaling: float | None = None,
) -> Tensor:
    """`packed_block_attention` row by row, with `visible` `[batch, segments, segments]` bool."""
    batch, heads, tokens, dim = query.shape
    group = heads // key.shape[1]
    segment = torch.arange(tokens, device=query.device) // block
    rows = []
    for b in range(batch):
        length = int(prefix_length[b])
        keys = torch.cat((cache_key[b, :, :length], key[b]), dim=1).double().repeat_interleave(group, dim=0)
        values = torch.cat((cache_value[b, :, :length], value[b]), dim=1).double().repeat_interleave(group, dim=0)
        own = visible[b][segment][:, segment] | (segment[:, None] == segment)
        allowed = torch.cat((own.new_ones(tokens, length), own), dim=1)
        scores = query[b].double() @ keys.transpose(1, 2) * (dim**-0.5 if scaling is None else scaling)
        rows.append(scores.masked_fill(~allowed, -math.inf).softmax(dim=-1) @ values)
    return torch.stack(rows).transpose(1, 2)


def shortlist_rest(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """log-sum-exp and mean, under their own softmax, of the logits beside `tokens`."""
    rest = logits.double().scatter(1, tokens, -math.inf)
    share = rest.softmax(dim=1)
    return rest.logsumexp(dim=1), (share * rest.masked_fill(rest == -math.inf, 0.0)).sum(dim=1)


def shortlist_corrected(
    shortlist: Shortlist, residual: Tensor, weight: Tensor, residual_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Corrected logits of the list `[rows, size]`, and the log-sum-exp of everything."""
    state = residual.to(weight.dtype).double()
    correction = torch.einsum("rsh,rh->rs", weight[shortlist.tokens].double(), state)
    values = shortlist.logits.double() + residual_scale * correction
    return values, torch.cat((values, shortlist.rest_log_sum_exp.double()[:, None]), dim=1).logsumexp(dim=1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.double()


def mrp_input(
    ids: Tensor,
    state: Tensor,
    embedding: Tensor,
    embedding_norm: Tensor,
    state_norm: Tensor,
    projection: Tensor,
    eps: float = 1e-6,
) -> Tensor:
    """`P [ norm_e(embed(ids)) ; norm_h(acc) ]`."""
    halves = rms_norm(embedding[ids], embedding_norm, eps), rms_norm(state, state_norm, eps)
    return torch.cat(halves, dim=-1) @ projection.double().T


def qk_norm_rope(
    query: Tensor, key: Tensor, query_norm: Tensor, key_norm: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Norm and rotation per head, heads first."""

    def rotate(x: Tensor, weight: Tensor) -> Tensor:
        x = rms_norm(x, weight, eps).transpose(1, 2)
        half = x.shape[-1] // 2
        return x * cos.double()[:, None] + torch.cat((-x[..., half:], x[..., :half]), -1) * sin.double()[:, None]

    return rotate(query, query_norm), rotate(key, key_norm)


def residual_kl(student: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """`KL( softmax(W target) || softmax(W student) )` per token; differentiable."""
    log_student = F.log_softmax(student.double() @ weight.double().T, dim=-1)
    log_target = F.log_softmax(target.double() @ weight.double().T, dim=-1)
    return (log_target.exp() * (log_target - log_student)).sum(dim=-1)


def revealed(rule: RevealRule, statistics: PositionStatistics, masked: Tensor, step: int) -> list[int]:
    """The positions that a rule reveals in one state, fields and `masked` `[block]`."""
    places = masked.nonzero()[:, 0].tolist()
    probability, log_odds, entropy = (part.tolist() for part in statistics[1:])
    key = {"left": [0.0] * len(entropy), "entropy": entropy, "confidence": [-x for x in log_odds]}[rule.order]
    if rule.resolution:
        key = [-math.floor(p / rule.resolution) for p in probability] if rule.order == "confidence" else key
        key = [math.floor(h / rule.resolution) for h in entropy] if rule.order == "entropy" else key
    order = sorted(places, key=lambda b: (key[b], b))
    if rule.entropy_bound is not None:
        first = [entropy[b] for b in order]
        excess = [sum(first[: n + 1]) - max(first[: n + 1]) for n in range(len(first))]
        beyond = [n for n, value in enumerate(excess) if n and value > rule.entropy_bound]
        return order[: min(beyond, default=len(order))]
    count = max(1, rule.block // rule.steps + (step % rule.steps < rule.block % rule.steps))
    above = [b for b in places if rule.threshold is not None and probability[b] > rule.threshold]
    return above if rule.threshold is not None and len(above) >= min(count, len(places)) else order[:count]


def verified_states(
    ids: Tensor,
    step: Tensor,
    parent: Tensor,
    alive: Tensor,
    statistics: PositionStatistics,
    log_sum_exp: Tensor,
    policy: Policy,
    *,
    compare_steps: bool,
) -> list[tuple[list[int], int, list[int], bool]]:
    """Of each row: the segments walked through, the finished one (-1), what follows the last, and if it is broken."""
    assert policy.rule is not None
    found = []
    for row in range(ids.shape[0]):
        following = ids[row].clone()
        for at in range(ids.shape[1]):
            own = PositionStatistics(*(part[row, at] for part in statistics))
            chosen = revealed(policy.rule, own, ids[row, at] == -1, int(step[row, at]))
            following[at, chosen] = own.token[chosen]

        def follows(j: int, at: int, row: int = row, following: Tensor = following) -> bool:
            if not (alive[row, j] and alive[row, at]):
                return False
            if (ids[row, at] != -1).all():
                return bool(parent[row, j] == at)
            same = torch.equal(ids[row, j], following[at]) and parent[row, j] == parent[row, at]
            return bool(same and (not compare_steps or step[row, j] == step[row, at] + 1))

        path = [0]
        while len(path) < ids.shape[2] + 2 and (after := [j for j in range(ids.shape[1]) if follows(j, path[-1])]):
            path.append(after[0])
        passed = [at for at in path if (ids[row, at] != -1).all()]
        finite = log_sum_exp[row].isfinite().all(dim=1)
        broken = not finite[alive[row]].all() or not finite[path[-1]]
        found.append((path, passed[-1] if passed else -1, following[path[-1]].tolist(), broken))
    return found
