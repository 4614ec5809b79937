"""Drafters: what will the backbone's logits be at the state that it evaluates next, and at the ones after that?

`head` predicts the move with the MRP head; `zero` predicts none (C = 0), which needs no trained head and is what
FreeDave does. Over a large vocabulary the head's correction is computed for a *shortlist* only, the best tokens of the
backbone's own logits A: C is small, so the winner of A + C is almost surely among them, and the walk stays lossless.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .advance import KnownState
from .generation_config_mrp import DecodingOptions
from .head_runner import HeadRunner
from .lattice_states_torch import DraftStatistics
from .packed_forward import MASKED
from .philox_torch import NoiseKey
from .reveal_policies import RevealPolicy
from .reveal_rule import PositionStatistics
from .reveal_statistics_torch import RevealStatistics
from .shortlist_residual import shortlist, shortlist_residual
from .token_statistics import DrawKey, token_statistics


class Drafter:
    """Predicts statistics by depth.

    Args:
        model: an `MRPForCausalLM`.
        options: of which draft_shape, steps, draft_shortlist, sampling and `kernels` are read.
        policy: the reveal policy, which leads the head's chain from state to state.
        runner: the head, or `None` for the zero drafter.
        seed: of the sampling noise.
        head_weights: share of the head in the drafted log-odds, by pass; see `DraftCalibration`.
    """

    def __init__(
        self,
        model: Any,
        options: DecodingOptions,
        policy: RevealPolicy,
        runner: HeadRunner | None,
        seed: int,
        head_weights: Sequence[float] = (1.0,),
    ):
        self.head_weights = head_weights
        self.model, self.options, self.policy, self.runner, self.seed = model, options, policy, runner, seed

    @property
    def passes(self) -> int:
        """Head passes so far."""
        return 0 if self.runner is None else self.runner.passes

    def predict(self, known: KnownState, first: Tensor, step: Tensor, depth: int) -> DraftStatistics:
        """Statistics at the state `first` and at the states behind it.

        The head runs K = `options.steps` times along its own most likely trajectory (a lattice needs one pass as a
        rule), each pass conditioned on one more reveal; deeper states repeat the last prediction. Under sampling every
        depth has draws of its own, since noise belongs to the step.

        Args:
            known: the state before, with the backbone's logits.
            first: `[rows, block]` int64, -1 at masked positions; step: `[rows]` int64 of it.
            depth: states to predict for, at least 1.
        """
        passes = 0 if self.runner is None else max(1, min(self.options.steps, depth))
        sampled = self.options.temperature > 0
        ids, accumulated = first, known.hidden[:, None]
        found: list[RevealStatistics] = []
        for d in range(depth):
            if d < passes and self.runner is not None:
                accumulated = self.runner.run(ids[:, None], accumulated, known.start, known.longest, known.ragged)
            elif d > 0 and not sampled:
                break
            statistics = self._blended(known, self._statistics(known, accumulated[:, 0], step + d), min(d, passes - 1))
            if found and not sampled:
                # Where the trajectory has revealed a position already, others may not have: keep what was known of it.
                kept = (torch.where(ids == MASKED, new, old) for new, old in zip(statistics, found[-1], strict=True))
                statistics = RevealStatistics(*kept)
            found.append(statistics)
            if d + 1 < passes:
                choice = _choice(statistics)
                reveal = self.policy.select(choice, ids == MASKED, step + d)
                ids = torch.where(reveal, choice.token, ids)
        stacked = [torch.stack(parts, dim=1) for parts in zip(*found, strict=True)]
        statistics = RevealStatistics(*stacked)
        return DraftStatistics(_choice(statistics), statistics.runner_up, max(1, passes))

    def _blended(self, known: KnownState, statistics: RevealStatistics, index: int) -> RevealStatistics:
        """The log-odds of head pass `index` and the known state's own, where both name the same token."""
        weight = self.head_weights[min(index, len(self.head_weights) - 1)]
        if self.runner is None or weight == 1.0:
            return statistics
        before = known.choice
        mixed = torch.lerp(before.log_odds, statistics.log_odds, weight)
        log_odds = torch.where(before.token == statistics.token, mixed, statistics.log_odds)
        return statistics._replace(log_odds=log_odds, probability=torch.sigmoid(log_odds))

    def _statistics(self, known: KnownState, accumulated: Tensor, step: Tensor) -> RevealStatistics:
        """Fields `[rows, block]` of the drafted logits at denoising step `step` `[rows]`."""
        rows, block, _ = accumulated.shape
        options = self.options
        positions = known.start[:, None] + torch.arange(block, device=accumulated.device)
        key = DrawKey(self.seed, known.row_key[:, None], positions, step[:, None])
        if self.runner is not None and self._can_shortlist(known.logits.shape[-1]):
            parts = (part.expand(rows, block).reshape(-1) for part in key[1:])
            flat = shortlist_residual(
                shortlist(
                    known.logits.flatten(0, 1),
                    options.draft_shortlist,
                    mask_token_id=options.mask_token_id,
                    kernels=options.kernels,
                ),
                (accumulated - known.hidden).flatten(0, 1),
                self.model.lm_head.weight,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                noise=NoiseKey(self.seed, *parts) if options.temperature > 0 else None,
                kernels=options.kernels,
            )
            return RevealStatistics(*(part.view(rows, block) for part in flat))
        logits = known.logits if self.runner is None else self.model.lm_head(accumulated)
        full = token_statistics(logits, options, key, runner_up=True, entropy=self.policy.uses_entropy)
        choice = full.choice
        return RevealStatistics(
            choice.token, choice.probability, choice.log_odds, full.log_sum_exp, choice.entropy, full.runner_up,
            full.runner_up_probability,
        )  # fmt: skip

    def _can_shortlist(self, vocabulary: int) -> bool:
        """Whether drafting over a shortlist is asked for and the LM head's rows can be read."""
        head = self.model.lm_head
        plain = type(head) is nn.Linear and not hasattr(head, "_hf_hook") and head.weight.device.type != "meta"
        residual = self.model.config.head_prediction == "residual"
        return residual and plain and 0 < self.options.draft_shortlist < vocabulary - 1


def _choice(statistics: RevealStatistics) -> PositionStatistics:
    return PositionStatistics(statistics.token, statistics.probability, statistics.log_odds, statistics.entropy)
