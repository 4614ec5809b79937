"""Torch twin of `lattice_states`: the specification of the kernel and the path on CPU. No host synchronisation."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .reveal_rule import MASKED, Policy, PositionStatistics

CHILD = 0x5851F42D4C957F2D  # turns the code of a finished state into the code of the state that rides along with it


class PackedStates(NamedTuple):
    """States of the rows, ready to be packed into one forward.

    Attributes:
        ids: `[rows, states, block]` int64, -1 at masked positions.
        start: `[rows, states]` int64, absolute position of the state's first token.
        step: `[rows, states]` int64, denoising steps done in its block.
        parent: `[rows, states]` int64, the finished state that it rides along with, -1 for none.
        alive: `[rows, states]` bool; dead states only pad the batch.
    """

    ids: Tensor
    start: Tensor
    step: Tensor
    parent: Tensor
    alive: Tensor


class DraftStatistics(NamedTuple):
    """Predicted statistics of the coming states, by depth.

    Attributes:
        choice: every field `[rows, depths, block]`; deeper states repeat the last.
        runner_up: `[rows, depths, block]` int64, the best other token.
        passes: how many of the depths come from a head pass of their own, at least 1.
    """

    choice: PositionStatistics
    runner_up: Tensor
    passes: int


class Perturbation(NamedTuple):
    """How far the backbone's statistics fall from the drafted ones, and the draws of every trajectory.

    Attributes:
        levels: `[bins - 1]` float32, ascending log-odds that part the drafted positions into bins.
        quantiles: `[passes, distances, bins, quantiles]` float32, of (backbone's - drafted) log-odds.
        flip_rates: `[passes, distances, bins]` float32: how often the runner-up is chosen instead.
        below: `[trajectories, block]` int64, index of the quantile below a trajectory's draw.
        fraction: `[trajectories, block]` float32, place of the draw between that quantile and the next.
        flips: `[trajectories, block]` float32, draws in [0, 1) that decide about the runner-up.
    """

    levels: Tensor
    quantiles: Tensor
    flip_rates: Tensor
    below: Tensor
    fraction: Tensor
    flips: Tensor

    def group(self, passes: int, depth: int) -> tuple[int, int]:
        """The table's pass and distance for the state `depth` reveals on, of a draft of so many head passes."""
        source = min(depth, passes - 1)
        return min(source, self.quantiles.shape[0] - 1), min(depth - source, self.quantiles.shape[1] - 1)


def lattice_states_torch(
    first: Tensor,
    start: Tensor,
    step: Tensor,
    drafted: Tensor,
    drafts: DraftStatistics,
    *,
    policy: Policy,
    depth: int,
    budget: int,
    multipliers: Tensor,
    perturbation: Perturbation | None = None,
) -> PackedStates:
    """See `lattice_states.lattice_states`."""
    trajectories = simulate(first, step, drafts, policy, depth, perturbation)
    finished = (first != MASKED).all(dim=1)
    slots = _Slots(first)
    _select(slots, trajectories, drafted & ~finished, finished, budget, multipliers)
    return slots.states(start, step)


def simulate(
    first: Tensor,
    step: Tensor,
    drafts: DraftStatistics,
    policy: Policy,
    depth: int,
    perturbation: Perturbation | None,
) -> Tensor:
    """Trajectories `[rows, trajectories, depth, block]` from the states `first` `[rows, block]`."""
    rows, block = first.shape
    count = 1 if perturbation is None else perturbation.below.shape[0]
    ids = first[:, None].expand(rows, count, block)
    steps = step[:, None].expand(rows, count)
    states: list[Tensor] = []
    # Deep states share their prediction and their calibration, so one perturbation serves them all.
    known: dict[tuple[int, tuple[int, int]], PositionStatistics] = {}
    for d in range(depth):
        index = min(d, drafts.runner_up.shape[1] - 1)
        group = (0, 0) if perturbation is None else perturbation.group(drafts.passes, d)
        if (index, group) not in known:
            known[index, group] = perturbed(drafts, index, group, perturbation)
        statistics = known[index, group]
        reveal = policy.select(statistics, ids == MASKED, steps + d)
        ids = torch.where(reveal, statistics.token, ids)
        states.append(ids)
    return torch.stack(states, dim=2)


def perturbed(
    drafts: DraftStatistics, index: int, group: tuple[int, int], perturbation: Perturbation | None
) -> PositionStatistics:
    """Statistics `[rows, trajectories, block]` as the backbone might give them where `index` was drafted."""
    choice = PositionStatistics(*(part[:, index] for part in drafts.choice))
    if perturbation is None:
        return PositionStatistics(*(part[:, None] for part in choice))
    level = torch.bucketize(choice.log_odds.contiguous(), perturbation.levels)
    quantiles = perturbation.quantiles[group][level]
    place = perturbation.below.expand(level.shape[0], -1, -1)
    spread = quantiles[:, None].expand(*place.shape, -1)
    low = spread.gather(3, place[..., None])[..., 0]
    high = spread.gather(3, place[..., None] + 1)[..., 0]
    log_odds = choice.log_odds[:, None] + torch.lerp(low, high, perturbation.fraction)
    flipped = perturbation.flips < perturbation.flip_rates[group][level][:, None]
    token = torch.where(flipped, drafts.runner_up[:, index, None], choice.token[:, None])
    probability = torch.sigmoid(log_odds)
    missed = ((1 - probability) / (1 - choice.probability[:, None]).clamp(min=1e-6)).clamp(max=10.0)
    return PositionStatistics(token, probability, log_odds, choice.entropy[:, None] * missed)


def _select(
    slots: "_Slots", states: Tensor, drafted: Tensor, finished: Tensor, budget: int, multipliers: Tensor
) -> None:
    """Best first: each round adds the state at which most trajectories wait.

    In rows whose certain state is finished, slot 1 holds the next block's first state; nothing is drafted there.
    """
    rows, _, depths, _ = states.shape
    codes, valid = _codes(states, multipliers)
    valid = valid & drafted[:, None, None]
    reach = torch.zeros_like(codes[..., :1])
    member = torch.zeros_like(valid)
    flat = states.flatten(1, 2)
    row = torch.arange(rows, device=states.device)
    offset = len(slots.ids)
    chosen: list[Tensor] = []
    while len(slots.ids) < budget:
        inside = reach.clamp(max=depths)
        waiting = codes.gather(2, inside)[..., 0]
        open_ = (valid.gather(2, inside) & (reach <= depths))[..., 0]
        votes = ((waiting[:, :, None] == waiting[:, None, :]) & open_[:, None, :]).sum(dim=2) * open_
        best = votes.argmax(dim=1)
        code, at, found = waiting[row, best], reach[row, best, 0], open_[row, best]
        before = flat[row, best * depths + (at - 1).clamp(0, depths - 1)]
        rides = (at > 0) & (before != MASKED).all(dim=1) & found
        state = flat[row, best * depths + at.clamp(max=depths - 1)]
        parent = torch.full_like(at, -1)
        if chosen:
            mother = torch.stack(chosen, dim=1) == (code - CHILD)[:, None]
            parent = torch.where(rides, offset + mother.int().argmax(dim=1), parent)
        else:
            rides, found, parent = rides | finished, found | finished, torch.where(finished, 0, parent)
        slots.add(torch.where(rides[:, None], MASKED, state), at + 1, parent, found)
        chosen.append(code)
        member = member | (codes == code[:, None, None])
        reach = (member & valid).int().cumprod(dim=2).sum(dim=2, keepdim=True)


def _codes(states: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
    """A 64-bit code per state `[rows, trajectories, depths + 1]`, the riding first state last, and which exist."""
    masked = states == MASKED
    codes = ((states + 2) * multipliers).masked_fill(masked, 0).sum(dim=3)
    unfinished = masked.any(dim=3)
    # A trajectory's states end with its first finished one; behind it comes the next block's first state.
    valid = torch.cat([torch.ones_like(unfinished[..., :1]), unfinished], dim=2)
    finished_before = torch.cat([torch.zeros_like(unfinished[..., :1]), ~unfinished], dim=2)
    child = finished_before & (finished_before.int().cumsum(dim=2) == 1)
    shifted = torch.cat([codes[..., :1], codes], dim=2)
    codes = torch.where(child, shifted + CHILD, torch.cat([codes, codes[..., -1:]], dim=2))
    exists = torch.cat([valid[..., :-1], torch.zeros_like(valid[..., :1])], dim=2)
    return codes, exists | child


class _Slots:
    """States under construction, slot by slot: lists of `[rows, block]` ids and `[rows]` depth, parent, alive."""

    def __init__(self, first: Tensor):
        self.ids = [first]
        self.depth = [torch.zeros_like(first[:, 0])]
        self.parent = [torch.full_like(first[:, 0], -1)]
        self.alive = [torch.ones_like(first[:, 0], dtype=torch.bool)]

    def add(self, ids: Tensor, depth: Tensor, parent: Tensor, alive: Tensor) -> None:
        self.ids.append(ids)
        self.depth.append(depth)
        self.parent.append(parent)
        self.alive.append(alive)

    def states(self, start: Tensor, step: Tensor) -> PackedStates:
        ids, depth, parent, alive = (torch.stack(part, dim=1) for part in self)
        rides = parent >= 0
        return PackedStates(
            ids,
            start[:, None] + ids.shape[2] * rides,
            torch.where(rides, 0, step[:, None] + depth),
            parent,
            alive,
        )

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter((self.ids, self.depth, self.parent, self.alive))
