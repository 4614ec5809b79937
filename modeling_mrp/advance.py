"""From a known state to the next certain one: what each decoding mode commits after a backbone forward.

`none` and `speculative` commit what the policy reveals. `direct` adds K picks of the head. `remask` masks the doubtful
reveals again. To add a mode, add a class with `__call__` and its name in `ADVANCES`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .generation_config_mrp import DecodingOptions
from .head_runner import HeadRunner
from .packed_forward import MASKED
from .remask_rules import keep_by_confidence, keep_by_cross, keep_by_veto
from .reveal_policies import RevealPolicy, rank_of
from .reveal_rule import PositionStatistics
from .token_statistics import DrawKey, TokenStatistics, token_statistics


@dataclass
class KnownState:
    """A state that the backbone has evaluated, `[rows, ...]`.

    Attributes:
        ids: `[rows, block]` int64, -1 at masked positions.
        start, step: `[rows]` int64.
        hidden: `[rows, block, hidden]`; logits: `[rows, block, vocab]`.
        statistics: of the logits at the state's own step.
        row_key: `[rows]` int64, the row part of the noise's key.
        longest, ragged: the largest start, and whether the starts differ (host values).
    """

    ids: Tensor
    start: Tensor
    step: Tensor
    hidden: Tensor
    logits: Tensor
    statistics: TokenStatistics
    row_key: Tensor
    longest: int
    ragged: bool

    def keep(self, rows: Tensor, longest: int, ragged: bool) -> "KnownState":
        """Only the rows `rows` `[m]`, whose prefixes are `longest` at most and `ragged` or not."""
        choice = PositionStatistics(*(part[rows] for part in self.statistics.choice))
        rest: Any = (part[rows] for part in self.statistics[1:])
        tensors = {name: getattr(self, name)[rows] for name in _ROW_FIELDS}
        return KnownState(**tensors, statistics=TokenStatistics(choice, *rest), longest=longest, ragged=ragged)


_ROW_FIELDS = ("ids", "start", "step", "hidden", "logits", "row_key")


@dataclass
class NextState:
    """The next certain state: ids and source `[rows, block]` int64 (0 backbone, k head step), taken_back `[rows]`."""

    ids: Tensor
    source: Tensor
    taken_back: Tensor


class PolicyAdvance:
    """Commits what the policy reveals (`none`, `speculative`).

    Args:
        model: an `MRPForCausalLM`.
        options: resolved options.
        policy: the reveal policy.
        runner: the head, `None` where the mode has no use for it.
        seed: of the sampling noise.
    """

    def __init__(
        self, model: Any, options: DecodingOptions, policy: RevealPolicy, runner: HeadRunner | None, seed: int
    ):
        self.model, self.options, self.policy, self.runner, self.seed = model, options, policy, runner, seed

    def __call__(self, known: KnownState) -> NextState:
        choice = known.statistics.choice
        revealed = self.policy.select(choice, known.ids == MASKED, known.step)
        ids = torch.where(revealed, choice.token, known.ids)
        return NextState(ids, torch.zeros_like(ids), torch.zeros_like(known.start))

    def statistics(self, logits: Tensor, known: KnownState, step: Tensor) -> TokenStatistics:
        """Statistics of corrected logits `[rows, block, vocab]` at step `step` `[rows]`."""
        positions = known.start[:, None] + torch.arange(logits.shape[1], device=logits.device)
        key = DrawKey(self.seed, known.row_key[:, None], positions, step[:, None])
        return token_statistics(logits, self.options, key, entropy=self.policy.uses_entropy)


class DirectAdvance(PolicyAdvance):
    """Adds K unverified picks from the head's chain (from the backbone's own logits with the zero drafter)."""

    def __call__(self, known: KnownState) -> NextState:
        following = super().__call__(known)
        ids, source, accumulated = following.ids, following.source, known.hidden[:, None]
        logits = known.logits
        for k in range(1, self.options.steps + 1):
            if not bool((ids == MASKED).any()):
                break
            if self.runner is not None:
                accumulated = self.runner.run(ids[:, None], accumulated, known.start, known.longest, known.ragged)
                logits = self.model.lm_head(accumulated[:, 0])
            choice = self.statistics(logits, known, known.step + k).choice
            masked = ids == MASKED
            key = self.policy.order_key(choice).masked_fill(~masked, -torch.inf)
            picked = (rank_of(key) < self.options.direct_tokens) & masked
            ids, source = torch.where(picked, choice.token, ids), torch.where(picked, k, source)
        return NextState(ids, source, following.taken_back)


class RemaskAdvance(PolicyAdvance):
    """Masks again what the remask rule does not keep, by one head pass."""

    def __call__(self, known: KnownState) -> NextState:
        options, choice, runner = self.options, known.statistics.choice, self.runner
        assert runner is not None
        revealed = self.policy.select(choice, known.ids == MASKED, known.step)

        def head_pass(states: Tensor) -> Tensor:
            hidden = known.hidden[:, None].expand(-1, states.shape[1], -1, -1)
            return self.model.lm_head(runner.run(states, hidden, known.start, known.longest, known.ragged))

        rows = (known.ids, revealed, choice.token)
        if options.remask_rule == "veto":
            kept = keep_by_veto(*rows, known.logits, head_pass, options.remask_delta)
        elif options.remask_rule == "confidence":
            kept = keep_by_confidence(*rows, head_pass, options.threshold)
        else:
            kept = keep_by_cross(*rows, self.policy.order_key(choice), head_pass, options.threshold)
        ids = torch.where(kept, choice.token, known.ids)
        return NextState(ids, torch.zeros_like(ids), (revealed & ~kept).sum(dim=1))


ADVANCES: dict[str, type[PolicyAdvance]] = {
    "none": PolicyAdvance,
    "speculative": PolicyAdvance,
    "direct": DirectAdvance,
    "remask": RemaskAdvance,
}
