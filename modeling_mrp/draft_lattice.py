"""Drafting: which future states are worth a segment of the next forward?

A drafter predicts the statistics of the logits at the state that the backbone evaluates next. The policy itself, run
on these predictions, gives the most likely trajectory: the *chain*. Predictions are uncertain, mostly in their order,
so the *lattice* runs the policy on many perturbed copies of them, whose spread is calibrated on decoding traces
(`benchmarks/calibrate_drafts.py`), and takes the states that these trajectories visit, best first: each next state is
the one that lets most of the trajectories walk one state further. A state does not remember the order of its reveals,
so trajectories that differ only in order share states. Whatever is drafted, the walk stays lossless.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .packed_forward import MASKED, Segments
from .reveal_policies import PositionStatistics, RevealPolicy

_TRAJECTORIES = 96
_CHILD = 0x5851F42D4C957F2D  # turns the code of a finished state into the code of the state that rides along with it


@dataclass(frozen=True)
class DraftCalibration:
    """How far the backbone's log-odds fall from the drafter's, fitted by maximum likelihood.

    log-odds(backbone) = bias + slope * l + exp(spread + spread_slope * l) * (z_0 + drift * (z_1 + ... + z_d)), with
    l the drafted log-odds, z standard normal and d the depth; the drafted token is replaced by the runner-up with
    probability sigmoid(-(flip + flip_slope * l)).
    """

    bias: float = 0.0
    slope: float = 1.0
    spread: float = 0.0
    spread_slope: float = 0.0
    drift: float = 0.3
    flip: float = 0.5
    flip_slope: float = 0.9

    @classmethod
    def from_config(cls, values: dict[str, Any] | None) -> "DraftCalibration":
        """The calibration that a model config holds; unknown names are an error."""
        unknown = set(values or {}) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"draft_calibration has unknown entries {sorted(unknown)}; allowed: {asdict(cls())}.")
        return cls(**(values or {}))


class DraftStatistics:
    """Predicted statistics of the coming states, by depth: every field `[rows, depths, block]`.

    Depths beyond the last prediction repeat it.
    """

    def __init__(self, choice: PositionStatistics, runner_up: Tensor):
        self.choice, self.runner_up = choice, runner_up

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
        shape = (block + 1, _TRAJECTORIES, block)
        noise = torch.randn(shape, generator=generator)
        noise[1:] = noise[:1] + calibration.drift * noise[1:].cumsum(dim=0)
        # The first trajectory is the chain itself: without perturbation.
        noise[:, 0] = 0.0
        flips = torch.rand((_TRAJECTORIES, block), generator=generator)
        flips[0] = 1.0
        multipliers = torch.randint(-(2**62), 2**62, (block,), generator=generator) * 2 + 1
        self.noise, self.flips, self.multipliers = (part.to(device) for part in (noise, flips, multipliers))

    def chain(self, first: Tensor, step: Tensor, drafts: DraftStatistics, depth: int) -> Tensor:
        """The most likely trajectory `[rows, 1, depth, block]` from the state `first` `[rows, block]`."""
        return self._simulate(first, step, drafts, depth, 1)

    def lattice(self, first: Tensor, step: Tensor, drafts: DraftStatistics, depth: int) -> Tensor:
        """Perturbed trajectories `[rows, trajectories, depth, block]`."""
        return self._simulate(first, step, drafts, depth, _TRAJECTORIES)

    def _simulate(self, first: Tensor, step: Tensor, drafts: DraftStatistics, depth: int, count: int) -> Tensor:
        c = self.calibration
        rows, block = first.shape
        ids = first[:, None].expand(rows, count, block)
        steps = step[:, None].expand(rows, count)
        states = []
        for d in range(depth):
            choice, runner_up = drafts.at(d)
            mean = c.bias + c.slope * choice.log_odds
            spread = (c.spread + c.spread_slope * choice.log_odds).exp()
            flip = torch.sigmoid(-(c.flip + c.flip_slope * choice.log_odds))
            flipped = self.flips[:count] < flip[:, None]
            token = torch.where(flipped, runner_up[:, None], choice.token[:, None])
            log_odds = mean[:, None] + spread[:, None] * self.noise[d, :count]
            probability = torch.sigmoid(log_odds)
            missed = ((1 - probability) / (1 - choice.probability[:, None]).clamp(min=1e-6)).clamp(max=10.0)
            perturbed = PositionStatistics(token, probability, log_odds, choice.entropy[:, None] * missed)
            masked = ids == MASKED
            reveal = self.policy.select(perturbed, masked, steps + d)
            ids = torch.where(reveal, token, ids)
            states.append(ids)
        return torch.stack(states, dim=2)

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
        if companion:
            # It takes slot 1; in rows without one the slot stays dead unless a draft fills the next.
            slots.add(torch.where(finished[:, None], MASKED, first), 0, torch.where(finished, 0, -1), finished)
        if trajectories is not None and drafted is not None and budget > 1:
            self._select(slots, trajectories, drafted & ~finished, budget)
        ids, depth, parent, alive = (torch.stack(part, dim=1) for part in slots)
        rides = parent >= 0
        starts = start[:, None] + first.shape[1] * rides
        return Segments(ids, starts, torch.where(rides, 0, step[:, None] + depth), parent, alive)

    def _select(self, slots: "_Slots", states: Tensor, drafted: Tensor, budget: int) -> None:
        """Best first: each round adds the state at which most trajectories wait."""
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
