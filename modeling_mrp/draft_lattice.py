"""Drafting: which future states are worth a segment of the next forward?

A drafter predicts the statistics of the logits at the state that the backbone evaluates next. The policy itself, run
on these predictions, gives the most likely trajectory: the *chain*. Predictions are uncertain, mostly in their order,
so the *lattice* runs the policy on many perturbed copies of them, whose spread is calibrated on decoding traces
(`training/draft_traces.py`), and takes the states that these trajectories visit, best first: each next state is
the one that lets most of the trajectories walk one state further. A state does not remember the order of its reveals,
so trajectories that differ only in order share states. Whatever is drafted, the walk stays lossless.
"""

from typing import Any

import torch
from torch import Tensor

from .draft_calibration import TINY_CALIBRATION
from .lattice_states import lattice_states
from .lattice_states_torch import DraftStatistics, Perturbation
from .packed_forward import Segments
from .reveal_policies import RevealPolicy
from .reveal_rule import MASKED

_TRAJECTORIES = 96


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

    def perturbation(self, block: int, device: torch.device) -> Perturbation:
        """The tables beside the draws of every trajectory, for blocks of `block` positions."""
        # Low-discrepancy draws: with so few trajectories their plain noise would show in the ranking.
        uniform = torch.quasirandom.SobolEngine(2 * block, scramble=True, seed=0).draw(_TRAJECTORIES)
        place = uniform[:, :block].clamp(0, 1 - 1e-6) * (self.quantiles.shape[3] - 1)
        parts = (self.levels, self.quantiles, self.flips, place.long(), place - place.floor(), uniform[:, block:])
        return Perturbation(*(part.contiguous().to(device) for part in parts))


class LatticePlanner:
    """Chooses the segments of one forward.

    Args:
        policy: the reveal policy whose trajectories are drafted.
        calibration: of the perturbations.
        block: block length.
        device: where the states live.
        chain: draft the most likely trajectory alone.
        kernels: `auto`, `torch` or `triton`.
    """

    def __init__(
        self,
        policy: RevealPolicy,
        calibration: DraftCalibration,
        block: int,
        device: torch.device,
        chain: bool = False,
        kernels: str = "auto",
    ):
        self.policy, self.kernels = policy, kernels
        generator = torch.Generator().manual_seed(0)
        self.multipliers = (torch.randint(-(2**62), 2**62, (block,), generator=generator) * 2 + 1).to(device)
        self.perturbation = None if chain else calibration.perturbation(block, device)

    def segments(
        self,
        first: Tensor,
        start: Tensor,
        step: Tensor,
        companion: bool,
        budget: int = 1,
        drafts: DraftStatistics | None = None,
        depth: int = 0,
        drafted: Tensor | None = None,
    ) -> Segments:
        """Segment 0 is the certain state; behind it come drafted states, best first.

        The first state of the next block rides along with a finished state: always with a certain one, and as a draft
        of its own with a drafted one.

        Args:
            first: `[rows, block]` the certain next state, -1 at masked positions.
            start, step: `[rows]` of that state.
            companion: whether any certain state is finished.
            budget: segments per row, when something is drafted.
            drafts: predicted statistics of the states from `first` on; `None` to draft nothing.
            depth: drafted states of a trajectory.
            drafted: `[rows]` bool: rows whose drafts mean something.
        """
        if drafts is not None and drafted is not None and budget > 1:
            states = lattice_states(
                first,
                start,
                step,
                drafted,
                drafts,
                policy=self.policy,
                depth=depth,
                budget=budget,
                multipliers=self.multipliers,
                perturbation=self.perturbation,
                kernels=self.kernels,
            )
            return Segments(*states)
        ids, starts, steps = first[:, None], start[:, None], step[:, None]
        parent, alive = torch.full_like(starts, -1), torch.ones_like(starts, dtype=torch.bool)
        if companion:
            finished = (first != MASKED).all(dim=1, keepdim=True)
            ids = torch.stack([first, first.masked_fill(finished, MASKED)], dim=1)
            starts = torch.cat([starts, starts + first.shape[1] * finished], dim=1)
            steps = torch.cat([steps, steps.masked_fill(finished, 0)], dim=1)
            parent = torch.cat([parent, parent + finished], dim=1)
            alive = torch.cat([alive, finished], dim=1)
        return Segments(ids, starts, steps, parent, alive)
