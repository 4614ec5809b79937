"""Trains a tiny head on recorded states: residual KL over K chained steps, or the direct-MTP control.

A step reveals what the backbone's own trajectory reveals next (one to three tokens at first, then one each), which are
the states that decoding meets; the loss is KL(softmax(B) || softmax(A + C)) over the positions still masked
(DESIGN section 1), with B from the recorded hidden state of the revealed state.
"""

from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .batches import ANSWER_BLOCKS, BLOCK, SEQUENCE
from .head_states import STATES, WIDTH, HeadStates, batches, copies_mask, positions_of

STEPS = 700
BATCH = 24
COPIES = 3
CHAIN = 3
CERTAINTY = 0.05
_MASKED = -1


def train_head(
    model: Any,
    states: HeadStates,
    steps: int = STEPS,
    seed: int = 0,
    chain: int = CHAIN,
    compile_step: bool = True,
    certainty: float = CERTAINTY,
) -> None:
    """Trains `model.mrp` in place; everything else stays frozen.

    Args:
        certainty: weight of a Huber loss on the log-odds of the teacher's first token. The KL hardly feels how certain
            a near-certain position is, but the order of reveals is made of it, and drafts need the order.
    """
    generator = torch.Generator().manual_seed(seed)
    head = list(model.mrp.parameters())
    matrices = [p for p in head if p.ndim == 2]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
        torch.optim.AdamW([p for p in head if p.ndim != 2], lr=5e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    model.eval().requires_grad_(False)
    for parameter in head:
        parameter.requires_grad_(True)
    run = torch.compile(_chain) if compile_step else _chain
    stream = batches(states, BATCH, seed)
    bar = tqdm(range(steps), desc="head", mininterval=5)
    for step in bar:
        factor = min(1.0, (step + 1) / 30) * max(0.02, 1.0 - max(0, step - 0.3 * steps) / (0.7 * steps))
        for rate, group in zip(rates, (g for o in optimizers for g in o.param_groups), strict=True):
            group["lr"] = rate * factor
        inputs, supervised, teacher = _draw(model, states, next(stream), chain, generator)
        loss = torch.zeros(())
        for accumulated, mask, target in zip(run(model, *inputs), supervised, teacher, strict=True):
            student = model.lm_head(accumulated[:, SEQUENCE:][mask]).float().log_softmax(-1)
            with torch.no_grad():
                truth = model.lm_head(target[mask].float()).log_softmax(-1)
                top = truth.argmax(-1, keepdim=True)
            divergence = nn.functional.kl_div(student, truth, reduction="batchmean", log_target=True)
            order = nn.functional.huber_loss(_log_odds(student, top), _log_odds(truth, top))
            loss = loss + (divergence + certainty * order) / chain
        loss.backward()
        nn.utils.clip_grad_norm_(head, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            bar.set_postfix(kl=f"{loss.item():.4f}", refresh=False)


def _log_odds(log_probabilities: Tensor, token: Tensor) -> Tensor:
    """log(p / (1 - p)) `[n]` of `token` `[n, 1]`, with 1 - p summed over the others."""
    others = log_probabilities.scatter(1, token, -torch.inf).logsumexp(-1)
    return log_probabilities.gather(1, token)[:, 0] - others


def _draw(
    model: Any, states: HeadStates, rows: Tensor, chain: int, generator: torch.Generator
) -> tuple[tuple[Any, ...], list[Tensor], list[Tensor]]:
    """Inputs of `_chain`, and per step the supervised positions `[rows, COPIES * WIDTH]` and the teacher's states."""
    size = len(rows)
    counts = states.counts[rows]
    ids, hidden = states.states[rows].long(), states.hidden[rows]
    clean, clean_hidden = states.clean[rows].long(), states.clean_hidden[rows].float()
    shape = (size, COPIES, ANSWER_BLOCKS)
    # Where each block of each copy stands, how much the first step reveals, then one reveal a step.
    at = (torch.rand(shape, generator=generator) * counts[:, None].clamp(min=1)).long()
    jump = 1 + (torch.rand(shape, generator=generator) > 0.6).long() + (torch.rand(shape, generator=generator) > 0.8)
    mask_id = model.config.mask_token_id

    def pick(source: Tensor, state: Tensor) -> Tensor:
        """`source` `[rows, STATES, WIDTH, ...]` at the state of each block: `[rows, COPIES * WIDTH, ...]`."""
        per_position = state.clamp(max=STATES - 1).repeat_interleave(BLOCK, dim=2)
        row = torch.arange(size)[:, None, None]
        column = torch.arange(WIDTH)[None, None]
        return source[row, per_position, column].flatten(1, 2)

    accumulated = torch.cat([clean_hidden, pick(hidden, at).float()], dim=1)
    step_ids, supervised, teacher = [], [], []
    for k in range(chain):
        state = at + jump + k
        now = pick(ids, torch.minimum(state, counts[:, None]))
        step_ids.append(torch.cat([clean, now.masked_fill(now == _MASKED, mask_id)], dim=1))
        valid = (state < counts[:, None]).repeat_interleave(BLOCK, dim=2).flatten(1)
        supervised.append(valid & (now == _MASKED))
        teacher.append(pick(hidden, state))
    positions = positions_of(states.first[rows])
    inside = states.real[rows].gather(1, positions)
    mask = copies_mask(states.real[rows], positions, inside, COPIES)
    additive = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill_(~mask, -1e9)[:, None]
    span = torch.arange(SEQUENCE).expand(size, -1)
    all_positions = torch.cat([span, positions.repeat(1, COPIES)], dim=1)
    return (torch.stack(step_ids), accumulated, all_positions, additive), supervised, teacher


def _chain(model: Any, ids: Tensor, accumulated: Tensor, positions: Tensor, mask: Tensor) -> list[Tensor]:
    """acc_1 .. acc_K `[rows, tokens, hidden]`; the clean half keeps its clean hidden states, as in decoding."""
    clean = accumulated[:, :SEQUENCE]
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        for step_ids in ids:
            embeddings = model.model.embed_tokens(step_ids)
            residual = model.mrp(embeddings, accumulated, positions, mask).float()
            if model.config.head_prediction == "direct":
                after = residual
            else:
                after = accumulated + model.config.residual_scale * residual
            found.append(after)
            accumulated = torch.cat([clean, after[:, SEQUENCE:]], dim=1)
    return found
