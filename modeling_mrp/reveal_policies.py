"""Reveal policies: which masked positions does a denoising step reveal?

A policy is a pure function of the statistics of a state's logits, the state's masked positions and its step number.
It is batched over any leading dimensions and knows nothing of rows, caches or drafts. To add one: a subclass of
`RevealPolicy` with `order_key` (or `select`), and its name in `POLICIES`; with a `rule`, kernels follow it too.
"""

import torch
from torch import Tensor

from .generation_config_mrp import DecodingOptions
from .reveal_rule import PositionStatistics, RevealRule


class RevealPolicy:
    """Reveals the first n_t masked positions in an order of its own.

    Args:
        options: of which `block_length`, `denoising_steps`, `threshold`, `entropy_bound` and `resolution` are read.
    """

    uses_entropy = False

    def __init__(self, options: DecodingOptions):
        self.options = options
        counts = {options.reveals_at(step) for step in range(options.denoising_steps)}
        self.uniform_count = counts.pop() if len(counts) == 1 else None

    @property
    def rule(self) -> RevealRule | None:
        """What a kernel needs to select as `select` does; `None` for a policy that only `select` knows."""
        return self._rule("confidence")

    def _rule(self, order: str, **values: float) -> RevealRule:
        options = self.options
        return RevealRule(
            order, options.block_length, options.denoising_steps, resolution=options.resolution, **values
        )

    def order_key(self, statistics: PositionStatistics) -> Tensor:
        """`[..., block]` float32: positions with a larger key are revealed first, ties from the left."""
        if self.options.resolution > 0:
            return (statistics.probability / self.options.resolution).floor()
        return statistics.log_odds

    def scheduled_count(self, step: Tensor) -> Tensor:
        """`[...]` int64: n_t of the denoising schedule."""
        if self.uniform_count is not None:
            return torch.full_like(step, self.uniform_count)
        count, extra = divmod(self.options.block_length, self.options.denoising_steps)
        return (count + (step % self.options.denoising_steps < extra).long()).clamp(min=1)

    def select(self, statistics: PositionStatistics, masked: Tensor, step: Tensor) -> Tensor:
        """`[..., block]` bool: the masked positions that this step reveals; at least one where any is masked.

        Args:
            statistics: fields `[..., block]`.
            masked: `[..., block]` bool.
            step: `[...]` int64, denoising steps done in this block.
        """
        key = self.order_key(statistics).masked_fill(~masked, -torch.inf)
        if self.uniform_count == 1:
            first = key.argmax(dim=-1, keepdim=True)  # the first of equal maxima, by torch's contract
            return torch.zeros_like(masked).scatter_(-1, first, True) & masked
        return (rank_of(key) < self.scheduled_count(step)[..., None]) & masked


class LowConfidenceStatic(RevealPolicy):
    """The n_t most confident positions."""

    @property
    def rule(self) -> RevealRule | None:
        return self._rule("confidence")


class Sequential(RevealPolicy):
    """The n_t leftmost positions."""

    @property
    def rule(self) -> RevealRule | None:
        return self._rule("left")

    def order_key(self, statistics: PositionStatistics) -> Tensor:
        block = statistics.probability.shape[-1]
        leftness = -torch.arange(block, device=statistics.probability.device, dtype=torch.float32)
        return leftness.expand_as(statistics.probability)


class LowConfidenceDynamic(RevealPolicy):
    """All positions above the threshold if they are at least n_t, otherwise the n_t most confident."""

    @property
    def rule(self) -> RevealRule | None:
        return self._rule("confidence", threshold=self.options.threshold)

    def select(self, statistics: PositionStatistics, masked: Tensor, step: Tensor) -> Tensor:
        above = (statistics.probability > self.options.threshold) & masked
        enough = above.sum(dim=-1) >= torch.minimum(self.scheduled_count(step), masked.sum(dim=-1))
        return torch.where(enough[..., None], above, super().select(statistics, masked, step))


class EntropyBounded(RevealPolicy):
    """In order of entropy, while the running sum minus the largest entropy stays within the bound; at least one.

    The running sum without its largest term bounds the joint entropy's excess over independent draws
    (Ben-Hamu et al., "Accelerated sampling from masked diffusion models via entropy bounded unmasking", 2025).
    """

    uses_entropy = True

    @property
    def rule(self) -> RevealRule | None:
        return self._rule("entropy", entropy_bound=self.options.entropy_bound)

    def order_key(self, statistics: PositionStatistics) -> Tensor:
        if self.options.resolution > 0:
            return -(statistics.entropy / self.options.resolution).floor()
        return -statistics.entropy

    def select(self, statistics: PositionStatistics, masked: Tensor, step: Tensor) -> Tensor:
        key = self.order_key(statistics).masked_fill(~masked, -torch.inf)
        order = key.argsort(dim=-1, descending=True, stable=True)
        entropy = statistics.entropy.clamp(min=0).masked_fill(~masked, 0.0).gather(-1, order)
        excess = entropy.cumsum(dim=-1) - entropy.cummax(dim=-1).values
        within = (excess <= self.options.entropy_bound).cummin(dim=-1).values if excess.numel() else excess.bool()
        within[..., 0] = True
        return torch.zeros_like(masked).scatter(-1, order, within.bool()) & masked


POLICIES: dict[str, type[RevealPolicy]] = {
    "low_confidence_static": LowConfidenceStatic,
    "low_confidence_dynamic": LowConfidenceDynamic,
    "sequential": Sequential,
    "entropy_bounded": EntropyBounded,
}


def make_policy(options: DecodingOptions) -> RevealPolicy:
    """The policy that `options.strategy` names."""
    return POLICIES[options.strategy](options)


def rank_of(key: Tensor) -> Tensor:
    """`[..., block]` int64: rank of each position by descending key, ties from the left."""
    order = key.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(key.shape[-1], device=key.device).expand_as(order)
    return torch.zeros_like(order).scatter(-1, order, ranks)
