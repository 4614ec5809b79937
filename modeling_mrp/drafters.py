"""Drafters: what will the backbone's logits be at the state that it evaluates next, and at the ones after that?

`head` predicts the move with the MRP head; `zero` predicts none (C = 0), which needs no trained head and is what
FreeDave does. Over a large vocabulary the head's correction is computed for a *shortlist* only, the best tokens of the
backbone's own logits A: C is small, so the winner of A + C is almost surely among them, and the walk stays lossless.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .advance import KnownState
from .generation_config_mrp import DecodingOptions
from .head_runner import HeadRunner
from .lattice_states_torch import DraftStatistics
from .packed_forward import places
from .philox_torch import NoiseKey
from .reveal_policies import RevealPolicy
from .reveal_rule import MASKED, PositionStatistics
from .shortlist_residual import shortlist, shortlist_residual
from .shortlist_residual_torch import Shortlist
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
        ids, masked, accumulated = first, first == MASKED, known.hidden[:, None]
        listed = self._shortlist(known)
        found: list[_Drafted] = []
        for d in range(depth):
            if d < passes and self.runner is not None:
                accumulated = self.runner.run(ids[:, None], accumulated, known.start, known.longest, known.ragged)
            elif d > 0 and not sampled:
                break
            at = step + d if d > 0 else step
            drafted = self._blended(known, self._drafted(known, accumulated[:, 0], at, listed), min(d, passes - 1))
            if found and not sampled:
                # Where the trajectory has revealed a position already, others may not have: keep what was known of it.
                drafted = _Drafted(*(torch.where(masked, *both) for both in zip(drafted, found[-1], strict=True)))
            found.append(drafted)
            if d + 1 < passes:
                reveal = self.policy.select(_choice(drafted), masked, at)
                ids = torch.where(reveal, drafted.token, ids)
                masked = ids == MASKED
        if len(found) == 1:  # no copies
            drafted = _Drafted(*(part[:, None] for part in found[0]))
        else:
            drafted = _Drafted(*(torch.stack(parts, dim=1) for parts in zip(*found, strict=True)))
        return DraftStatistics(_choice(drafted), drafted.runner_up, max(1, passes))

    def _blended(self, known: KnownState, drafted: "_Drafted", index: int) -> "_Drafted":
        """The log-odds of head pass `index` and the known state's own, where both name the same token."""
        weight = self.head_weights[min(index, len(self.head_weights) - 1)]
        if self.runner is None or weight == 1.0:
            return drafted
        before = known.choice
        mixed = torch.lerp(before.log_odds, drafted.log_odds, weight)
        log_odds = torch.where(before.token == drafted.token, mixed, drafted.log_odds)
        return drafted._replace(log_odds=log_odds, probability=torch.sigmoid(log_odds))

    def _drafted(self, known: KnownState, accumulated: Tensor, step: Tensor, listed: Shortlist | None) -> "_Drafted":
        """Fields `[rows, block]` of the drafted logits at denoising step `step` `[rows]`."""
        rows, block, _ = accumulated.shape
        options, sampled = self.options, self.options.temperature > 0
        positions = known.start[:, None] + places(block, accumulated.device)
        key = DrawKey(self.seed, known.row_key[:, None], positions, step[:, None])
        if listed is not None:
            parts = (part.expand(rows, block).reshape(-1) for part in key[1:])
            flat = shortlist_residual(
                listed,
                (accumulated - known.hidden).flatten(0, 1),
                self.model.lm_head.weight,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                noise=NoiseKey(self.seed, *parts) if sampled else None,
                kernels=options.kernels,
            )
            return _Drafted(*(getattr(flat, name).view(rows, block) for name in _Drafted._fields))
        logits = known.logits if self.runner is None else self.model.lm_head(accumulated)
        full = token_statistics(logits, options, key, runner_up=True, entropy=self.policy.uses_entropy)
        return _Drafted(*full.choice, full.runner_up)

    def _shortlist(self, known: KnownState) -> Shortlist | None:
        """The best tokens of the backbone's logits, once for all passes; `None` where drafts look at all tokens."""
        if self.runner is None or not self._can_shortlist(known.logits.shape[-1]):
            return None
        options = self.options
        return shortlist(
            known.logits.flatten(0, 1),
            options.draft_shortlist,
            mask_token_id=options.mask_token_id,
            kernels=options.kernels,
        )

    def _can_shortlist(self, vocabulary: int) -> bool:
        """Whether drafting over a shortlist is asked for and the LM head's rows can be read."""
        head = self.model.lm_head
        plain = type(head) is nn.Linear and not hasattr(head, "_hf_hook") and head.weight.device.type != "meta"
        residual = self.model.config.head_prediction == "residual"
        return residual and plain and 0 < self.options.draft_shortlist < vocabulary - 1


class _Drafted(NamedTuple):
    """`PositionStatistics` and the best other token, every field `[rows, block]`."""

    token: Tensor
    probability: Tensor
    log_odds: Tensor
    entropy: Tensor
    runner_up: Tensor


def _choice(drafted: _Drafted) -> PositionStatistics:
    return PositionStatistics(*drafted[:4])
