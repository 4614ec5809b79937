"""What a reveal policy looks at, and the policies' rules as numbers that a kernel can follow."""

from typing import NamedTuple, Protocol

from torch import Tensor

ORDERS = ("confidence", "left", "entropy")
MASKED = -1  # among the ids of a state: a position that is not revealed yet


class PositionStatistics(NamedTuple):
    """What a policy may look at, every field `[..., block]`.

    Attributes:
        token: int64, the chosen token.
        probability: float32, its raw softmax probability, the *confidence*.
        log_odds: float32, log(p / (1 - p)) with full precision near p = 1; orders like the confidence.
        entropy: float32, nats, of the raw softmax.
    """

    token: Tensor
    probability: Tensor
    log_odds: Tensor
    entropy: Tensor


class RevealRule(NamedTuple):
    """A built-in policy in numbers: the first `count(step)` masked positions in an order, or more.

    Attributes:
        order: `"confidence"`, `"left"` or `"entropy"` (the lowest first); ties from the left.
        block, steps: step t reveals `block // steps` positions, one more if `t % steps < block % steps`, at least one.
        threshold: reveal all positions whose confidence is above it, if they are at least that many; `None` without.
        entropy_bound: reveal in order while the running sum of the entropies minus the largest stays within it, one
            at least, whatever the count; `None` without.
        resolution: width of the bins that the order does not look into, 0 for none.
    """

    order: str
    block: int
    steps: int
    threshold: float | None = None
    entropy_bound: float | None = None
    resolution: float = 0.0

    @property
    def one_at_a_time(self) -> bool:
        """Whether every step's count is one."""
        return self.block <= self.steps


class Policy(Protocol):
    """What the operations here ask of a reveal policy."""

    @property
    def rule(self) -> RevealRule | None:
        """The rule that `select` follows; `None`: only `select` knows it, and no kernel can run it."""

    def select(self, statistics: PositionStatistics, masked: Tensor, step: Tensor) -> Tensor:
        """`[..., block]` bool: the masked positions that step `step` `[...]` reveals."""
