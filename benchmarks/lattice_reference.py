"""`lattice_states` restated in plain python and float64: tuples, sets and counts instead of tensors."""

from collections import Counter
from typing import Any

import torch
from mrp_kernels import DraftStatistics, PackedStates, Perturbation, PositionStatistics
from mrp_kernels.reveal_rule import MASKED
from torch import Tensor

State = tuple[int, ...]
Chosen = tuple[State, int | None, int]


def lattice(
    first: Tensor, drafted: Tensor, drafts: DraftStatistics, *, policy: Any, depth: int, budget: int,
    step: Tensor, perturbation: Perturbation | None, **_: Any,
) -> list[list[Chosen]]:  # fmt: skip
    """For every row its states, best first: ids, index of the finished state that it rides along with, depth."""
    found = []
    for row in range(len(first)):
        certain = tuple(first[row].tolist())
        if MASKED not in certain:
            found.append([(certain, None, 0), ((MASKED,) * len(certain), 0, 0)])
        elif not drafted[row]:
            found.append([(certain, None, 0)])
        else:
            count = 1 if perturbation is None else len(perturbation.below)
            paths = [_path(certain, int(step[row]), row, t, drafts, policy, depth, perturbation) for t in range(count)]
            found.append(_best_first(certain, paths, budget))
    return found


def _path(
    certain: State, step: int, row: int, trajectory: int, drafts: DraftStatistics, policy: Any, depth: int,
    perturbation: Perturbation | None,
) -> list[tuple[State, bool]]:  # fmt: skip
    """The states that one trajectory visits; behind a finished one, the state that rides along with it (`True`)."""
    path: list[tuple[State, bool]] = []
    ids = certain
    for d in range(depth):
        if MASKED not in ids:
            break
        statistics = _moved(row, trajectory, d, drafts, perturbation)
        masked = torch.tensor([token == MASKED for token in ids])
        reveal = policy.select(statistics, masked, torch.tensor(step + d)).tolist()
        ids = tuple(int(new) if r else old for r, new, old in zip(reveal, statistics.token, ids, strict=True))
        path.append((ids, False))
    return path if MASKED in ids else [*path, (ids, True)]


def _moved(
    row: int, trajectory: int, d: int, drafts: DraftStatistics, perturbation: Perturbation | None
) -> PositionStatistics:
    """Statistics `[block]` in float64 as this trajectory sees them `d` reveals on."""
    index = min(d, drafts.runner_up.shape[1] - 1)
    token, p, odds, entropy = (part[row, index].cpu() for part in drafts.choice)
    if perturbation is None:
        return PositionStatistics(token, p, odds, entropy)
    levels, quantiles, flip_rates, below, fraction, flips = (part.cpu() for part in perturbation)
    group = perturbation.group(drafts.passes, d)
    moved, tokens = [], []
    for i in range(len(token)):
        level = int((levels < odds[i]).sum())
        low, high = quantiles[group][level].double()[below[trajectory, i] :][:2]
        moved.append(odds[i].double() + low + (high - low) * fraction[trajectory, i].double())
        flip = flips[trajectory, i] < flip_rates[group][level]
        tokens.append(drafts.runner_up[row, index, i] if flip else token[i])
    log_odds = torch.stack(moved)
    q = log_odds.sigmoid()
    missed = ((1 - q) / (1 - p.double()).clamp(min=1e-6)).clamp(max=10)
    return PositionStatistics(torch.stack(tokens).cpu(), q, log_odds, entropy.double() * missed)


def _best_first(certain: State, paths: list[list[tuple[State, bool]]], budget: int) -> list[Chosen]:
    taken, depths = [(certain, False)], [0]
    while len(taken) < budget:
        waits = [next(((d, s) for d, s in enumerate(path, 1) if s not in taken), None) for path in paths]
        votes = Counter(wait[1] for wait in waits if wait is not None)
        if not votes:
            break
        # The first trajectory that waits at a state with the most votes.
        depth, state = next(wait for wait in waits if wait is not None and votes[wait[1]] == max(votes.values()))
        taken.append(state)
        depths.append(depth)
    return [
        ((MASKED,) * len(certain), taken.index((ids, False)), 0) if rides else (ids, None, depth)
        for (ids, rides), depth in zip(taken, depths, strict=True)
    ]


def differing_share(found: PackedStates, expected: list[list[Chosen]], start: Tensor) -> float:
    """Share of the expected states that `found` lacks or has too many of, over all rows; 1 for a wrong start."""
    wrong = total = 0
    for row, states in enumerate(expected):
        alive = found.alive[row].tolist()
        ids, parents = found.ids[row].tolist(), found.parent[row].tolist()
        got = {(tuple(i), None if p < 0 else tuple(ids[p])) for i, p, a in zip(ids, parents, alive, strict=True) if a}
        wanted = {(i, None if p is None else states[p][0]) for i, p, _ in states}
        wrong += len(got ^ wanted)
        total += len(wanted)
        block = len(ids[0])
        starts = [int(start[row]) + block * (p >= 0) for p in parents]
        if found.start[row].tolist() != starts:
            return 1.0
    return wrong / total
