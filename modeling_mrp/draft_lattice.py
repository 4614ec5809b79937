"""Drafting: which future states are worth a segment of the next forward?

A drafter predicts the statistics of the logits at the state that the backbone evaluates next. The policy itself, run
on these predictions, gives the most likely trajectory: the *chain*. Predictions are uncertain, mostly in their order,
so the *lattice* runs the policy on many perturbed copies of them, whose spread is calibrated on decoding traces
(`training/draft_traces.py`), and takes the states that these trajectories visit, best first: each next state is
the one that lets most of the trajectories walk one state further. A state does not remember the order of its reveals,
so trajectories that differ only in order share states. Whatever is drafted, the walk stays lossless.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .draft_calibration import TINY_CALIBRATION
from .packed_forward import MASKED, Segments
from .reveal_policies import RevealPolicy
from .reveal_rule import PositionStatistics

_TRAJECTORIES = 96
_CHILD = 0x5851F42D4C957F2D  # turns the code of a finished state into the code of the state that rides along with it


class DraftCalibration:
    """How far the backbone's log-odds fall from the drafter's: quantiles of decoding traces, no formula.

    Args:
        levels: `[bins - 1]` ascending, log-odds that part the drafted positions into bins.
        quantiles: `[passes, distances, bins, quantiles]`: of (backbone's - drafted) log-odds at evenly spaced
            probabilities, for head pass 0, 1, ... of a draft and states 0, 1, ... reveals behind the one that the pass
            predicts. The last pass and the last distance stand for all further ones.
        flips: `[passes, distances, bins]`: how often the backbone chooses another token than the drafted one.
        head_weights: one per head pass of a draft: the drafted log-odds are this share of the head's and the rest of
            the known state's own, where both name the same token; by maximum likelihood of the position that is
            revealed next.
    """

    def __init__(
        self,
        levels: list[float],
        quantiles: list[list[list[list[float]]]],
        flips: list[list[list[float]]],
        head_weights: list[float],
    ):
        self.head_weights = head_weights
        self.levels, self.quantiles, self.flips = (torch.tensor(part) for part in (levels, quantiles, flips))
        bins = len(levels) + 1
        found = self.quantiles.shape
        if len(found) != 4 or found[2] != bins or self.flips.shape != found[:3] or len(head_weights) != found[0]:
            raise ValueError(
                f"draft_calibration: quantiles {list(found)}, flips {list(self.flips.shape)} and {len(head_weights)} "
                f"head_weights do not fit {len(levels)} levels; allowed: [passes, distances, {bins}, quantiles], "
                f"[passes, distances, {bins}] and one weight per pass. Write them with mrp-train calibrate."
            )

    @classmethod
    def from_config(cls, values: dict[str, Any] | None) -> "DraftCalibration":
        """The calibration that a model config holds, or the one fitted on the tiny model."""
        values = TINY_CALIBRATION if values is None else values
        if set(values) != {"levels", "quantiles", "flips", "head_weights"}:
            raise ValueError(
                f"draft_calibration has entries {sorted(values)}; allowed: levels, quantiles, flips, head_weights. "
                "Write them with mrp-train calibrate."
            )
        return cls(**values)


class DraftStatistics:
    """Predicted statistics of the coming states, by depth: every field `[rows, depths, block]`.

    Depths beyond the last prediction repeat it. `passes` of them come from a head pass of their own.
    """

    def __init__(self, choice: PositionStatistics, runner_up: Tensor, passes: int):
        self.choice, self.runner_up, self.passes = choice, runner_up, passes

    @property
    def depths(self) -> int:
        return self.runner_up.shape[1]

    def at(self, depth: int) -> tuple[PositionStatistics, Tensor]:
        index = min(depth, self.runner_up.shape[1] - 1)
        return PositionStatistics(*(part[:, index] for part in self.choice)), self.runner_up[:, index]


class LatticePlanner:
    """Chooses the segments of one forward.

    Args:
        policy: the reveal policy whose trajectories are drafted.
        calibration: of the perturbations.
        block: block length.
        device: where the states live.
    """

    def __init__(self, policy: RevealPolicy, calibration: DraftCalibration, block: int, device: torch.device):
        self.policy, self.calibration, self.block = policy, calibration, block
        generator = torch.Generator().manual_seed(0)
        # Low-discrepancy draws: with so few trajectories their plain noise would show in the ranking.
        uniform = torch.quasirandom.SobolEngine(2 * block, scramble=True, seed=0).draw(_TRAJECTORIES)
        multipliers = torch.randint(-(2**62), 2**62, (block,), generator=generator) * 2 + 1
        table = calibration.quantiles
        place = uniform[:, :block].clamp(0, 1 - 1e-6) * (table.shape[3] - 1)
        self.below = place.long().to(device)
        self.fraction = (place - place.floor()).to(device)
        self.flips = uniform[:, block:].contiguous().to(device)
        self.multipliers = multipliers.to(device)
        self.levels, self.table = calibration.levels.to(device), table.to(device)
        self.flip_rates = calibration.flips.to(device)

    def chain(self, first: Tensor, step: Tensor, drafts: DraftStatistics, depth: int) -> Tensor:
        """The most likely trajectory `[rows, 1, depth, block]` from the state `first` `[rows, block]`."""
        return self._simulate(first, step, drafts, depth, 1)

    def lattice(self, first: Tensor, step: Tensor, drafts: DraftStatistics, depth: int) -> Tensor:
        """Perturbed trajectories `[rows, trajectories, depth, block]`."""
        return self._simulate(first, step, drafts, depth, _TRAJECTORIES)

    def _simulate(self, first: Tensor, step: Tensor, drafts: DraftStatistics, depth: int, count: int) -> Tensor:
        rows, block = first.shape
        ids = first[:, None].expand(rows, count, block)
        steps = step[:, None].expand(rows, count)
        states: list[Tensor] = []
        # Deep states share their prediction and their calibration, so one perturbation serves them all.
        known: dict[tuple[int, tuple[int, int]], PositionStatistics] = {}
        for d in range(depth):
            key = (min(d, drafts.depths - 1), self._group(drafts, d))
            if key not in known:
                known[key] = self._perturbed(drafts, d) if count > 1 else _unsqueezed(drafts.at(d)[0])
            perturbed = known[key]
            reveal = self.policy.select(perturbed, ids == MASKED, steps + d)
            ids = torch.where(reveal, perturbed.token, ids)
            states.append(ids)
        return torch.stack(states, dim=2)

    def _group(self, drafts: DraftStatistics, depth: int) -> tuple[int, int]:
        """The calibration's head pass and distance for the state `depth` reveals on."""
        source = min(depth, drafts.passes - 1)
        passes, distances = self.table.shape[:2]
        return min(source, passes - 1), min(depth - source, distances - 1)

    def _perturbed(self, drafts: DraftStatistics, depth: int) -> PositionStatistics:
        """Statistics `[rows, trajectories, block]` as the backbone might give them, `depth` reveals on."""
        choice, runner_up = drafts.at(depth)
        group = self._group(drafts, depth)
        level = torch.bucketize(choice.log_odds.contiguous(), self.levels)
        quantiles = self.table[group][level]
        index = self.below.expand(level.shape[0], -1, -1)
        spread = quantiles[:, None].expand(*index.shape, -1)
        low = spread.gather(3, index[..., None])[..., 0]
        high = spread.gather(3, index[..., None] + 1)[..., 0]
        log_odds = choice.log_odds[:, None] + torch.lerp(low, high, self.fraction)
        flipped = self.flips < self.flip_rates[group][level][:, None]
        token = torch.where(flipped, runner_up[:, None], choice.token[:, None])
        probability = torch.sigmoid(log_odds)
        missed = ((1 - probability) / (1 - choice.probability[:, None]).clamp(min=1e-6)).clamp(max=10.0)
        return PositionStatistics(token, probability, log_odds, choice.entropy[:, None] * missed)

    def segments(
        self,
        first: Tensor,
        start: Tensor,
        step: Tensor,
        budget: int,
        companion: bool,
        trajectories: Tensor | None = None,
        drafted: Tensor | None = None,
    ) -> Segments:
        """Segment 0 is the certain state; behind it come drafted states, best first.

        The first state of the next block rides along with a finished state: always with a certain one, and as a draft
        of its own with a drafted one.

        Args:
            first: `[rows, block]` the certain next state, -1 at masked positions.
            start, step: `[rows]` of that state.
            budget: segments per row, when something is drafted.
            companion: whether any certain state is finished.
            trajectories: `[rows, trajectories, depth, block]`, or `None` to draft nothing.
            drafted: `[rows]` bool: rows whose trajectories mean something.
        """
        finished = (first != MASKED).all(dim=1)
        slots = _Slots(first)
        if trajectories is not None and drafted is not None and budget > 1:
            self._select(slots, trajectories, drafted & ~finished, finished, budget)
        elif companion:
            slots.add(torch.where(finished[:, None], MASKED, first), 0, torch.where(finished, 0, -1), finished)
        ids, depth, parent, alive = (torch.stack(part, dim=1) for part in slots)
        rides = parent >= 0
        starts = start[:, None] + first.shape[1] * rides
        return Segments(ids, starts, torch.where(rides, 0, step[:, None] + depth), parent, alive)

    def _select(self, slots: "_Slots", states: Tensor, drafted: Tensor, finished: Tensor, budget: int) -> None:
        """Best first: each round adds the state at which most trajectories wait.

        In rows whose certain state is finished, slot 1 holds the next block's first state; nothing is drafted there.
        """
        rows, _, depths, _ = states.shape
        codes, valid = self._codes(states)
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
                mother = torch.stack(chosen, dim=1) == (code - _CHILD)[:, None]
                parent = torch.where(rides, offset + mother.int().argmax(dim=1), parent)
            else:
                rides, found, parent = rides | finished, found | finished, torch.where(finished, 0, parent)
            slots.add(torch.where(rides[:, None], MASKED, state), at + 1, parent, found)
            chosen.append(code)
            member = member | (codes == code[:, None, None])
            reach = (member & valid).int().cumprod(dim=2).sum(dim=2, keepdim=True)

    def _codes(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """A 64-bit code per state `[rows, trajectories, depths + 1]`, the riding first state last, and which exist."""
        masked = states == MASKED
        codes = ((states + 2) * self.multipliers).masked_fill(masked, 0).sum(dim=3)
        unfinished = masked.any(dim=3)
        # A trajectory's states end with its first finished one; behind it comes the next block's first state.
        valid = torch.cat([torch.ones_like(unfinished[..., :1]), unfinished], dim=2)
        finished_before = torch.cat([torch.zeros_like(unfinished[..., :1]), ~unfinished], dim=2)
        child = finished_before & (finished_before.int().cumsum(dim=2) == 1)
        shifted = torch.cat([codes[..., :1], codes], dim=2)
        codes = torch.where(child, shifted + _CHILD, torch.cat([codes, codes[..., -1:]], dim=2))
        exists = torch.cat([valid[..., :-1], torch.zeros_like(valid[..., :1])], dim=2)
        return codes, exists | child


class _Slots:
    """Segments under construction, slot by slot: lists of `[rows, block]` ids and `[rows]` depth, parent, alive."""

    def __init__(self, first: Tensor):
        self.ids = [first]
        self.depth = [torch.zeros_like(first[:, 0])]
        self.parent = [torch.full_like(first[:, 0], -1)]
        self.alive = [torch.ones_like(first[:, 0], dtype=torch.bool)]

    def add(self, ids: Tensor, depth: Tensor | int, parent: Tensor, alive: Tensor) -> None:
        self.ids.append(ids)
        self.depth.append(torch.zeros_like(parent) + depth)
        self.parent.append(parent)
        self.alive.append(alive)

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter((self.ids, self.depth, self.parent, self.alive))


def _unsqueezed(statistics: PositionStatistics) -> PositionStatistics:
    return PositionStatistics(*(part[:, None] for part in statistics))
