"""From a known state to the next certain one: what a decoding mode commits after a backbone forward.

`none` and `speculative` commit what the policy reveals, which verification has found already. `direct` adds K picks of
the head. `remask` masks the doubtful reveals again. To add such a mode, add a class with `__call__` and its name in
`ADVANCES`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .generation_config_mrp import DecodingOptions
from .head_runner import HeadRunner
from .remask_rules import keep_by_confidence, keep_by_cross, keep_by_veto
from .reveal_policies import RevealPolicy, rank_of
from .reveal_rule import MASKED, PositionStatistics
from .token_statistics import DrawKey, TokenStatistics, token_statistics


@dataclass
class KnownState:
    """A state that the backbone has evaluated, `[rows, ...]`.

    Attributes:
        ids: `[rows, block]` int64, -1 at masked positions.
        start, step: `[rows]` int64.
        hidden: `[rows, block, hidden]`; logits: `[rows, block, vocab]`.
        choice: statistics of the logits at the state's own step, fields `[rows, block]`.
        following: `[rows, block]` int64: the state with what the policy reveals there.
        row_key: `[rows]` int64, the row part of the noise's key.
        longest, ragged: the largest start, and whether the starts differ (host values).
    """

    ids: Tensor
    start: Tensor
    step: Tensor
    hidden: Tensor
    logits: Tensor
    choice: PositionStatistics
    following: Tensor
    row_key: Tensor
    longest: int
    ragged: bool

    def keep(self, rows: Tensor, longest: int, ragged: bool) -> "KnownState":
        """Only the rows `rows` `[m]`, whose prefixes are `longest` at most and `ragged` or not."""
        choice = PositionStatistics(*(part[rows] for part in self.choice))
        tensors = {name: getattr(self, name)[rows] for name in _ROW_FIELDS}
        return KnownState(**tensors, choice=choice, longest=longest, ragged=ragged)


_ROW_FIELDS = ("ids", "start", "step", "hidden", "logits", "following", "row_key")


class NextState(NamedTuple):
    """The next certain state: ids and source `[rows, block]` int64 (0 backbone, k head step; `None`: all backbone)."""

    ids: Tensor
    source: Tensor | None = None


class Advance:
    """What a mode makes of the state that the policy leads to.

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
        """The next certain state; that of a finished block is the block itself."""
        raise NotImplementedError

    def statistics(self, logits: Tensor, known: KnownState, step: Tensor) -> TokenStatistics:
        """Statistics of corrected logits `[rows, block, vocab]` at step `step` `[rows]`."""
        positions = known.start[:, None] + torch.arange(logits.shape[1], device=logits.device)
        key = DrawKey(self.seed, known.row_key[:, None], positions, step[:, None])
        return token_statistics(logits, self.options, key, entropy=self.policy.uses_entropy)


class DirectAdvance(Advance):
    """Adds K unverified picks from the head's chain (from the backbone's own logits with the zero drafter)."""

    def __call__(self, known: KnownState) -> NextState:
        ids, logits, accumulated = known.following, known.logits, known.hidden[:, None]
        source = torch.zeros_like(ids)
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
        return NextState(ids, source)


class RemaskAdvance(Advance):
    """Masks again what the remask rule does not keep, by one head pass."""

    def __call__(self, known: KnownState) -> NextState:
        options, choice, runner = self.options, known.choice, self.runner
        assert runner is not None
        revealed = known.following != known.ids

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
        return NextState(torch.where(kept, choice.token, known.ids))


ADVANCES: dict[str, type[Advance]] = {
    "direct": DirectAdvance,
    "remask": RemaskAdvance,
}
