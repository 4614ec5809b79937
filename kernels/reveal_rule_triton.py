"""Triton side of the reveal policies: `RevealRule` on a tile of states, for kernels that run a policy themselves."""

from typing import Any

from .reveal_rule import ORDERS, RevealRule

try:  # transformers' check of remote code tolerates a missing package only in a try block
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('kernels="triton" needs the package triton.') from error


@triton.jit
def _column(x, position, at):
    """Column `at` of `x` `[N, B]`, `[N]`."""
    return tl.sum(tl.where(position[None, :] == at, x, 0), axis=1)


@triton.jit
def _ranks(key, position, BLOCK: tl.constexpr):
    """`[N, B]` int32: rank of each position by descending `key`, ties from the left."""
    rank = tl.zeros(key.shape, tl.int32)
    for other in range(BLOCK):
        theirs = _column(key, position, other)[:, None]
        before = (theirs > key) | ((theirs == key) & (other < position)[None, :])
        rank += before.to(tl.int32)
    return rank


@triton.jit
def _within_bound(entropy, rank, position, bound, BLOCK: tl.constexpr):
    """`[N, B]` bool: the running sum minus the running maximum, up to here in the order, stays within `bound`."""
    total = tl.zeros(entropy.shape, tl.float32)
    largest = tl.zeros(entropy.shape, tl.float32)
    for other in range(BLOCK):
        counted = _column(rank, position, other)[:, None] <= rank
        theirs = _column(entropy, position, other)[:, None]
        total += tl.where(counted, theirs, 0.0)
        largest = tl.where(counted, tl.maximum(largest, theirs), largest)
    beyond = (total - largest <= bound) == 0
    first_beyond = tl.min(tl.where(beyond, rank, BLOCK), axis=1)
    return (rank == 0) | (rank < first_beyond[:, None])


@triton.jit
def select_reveals(
    log_odds, probability, entropy, masked, step, position, quotient, remainder, steps, threshold, entropy_bound,
    resolution, ORDER: tl.constexpr, ONE: tl.constexpr, COARSE: tl.constexpr, THRESHOLD: tl.constexpr,
    BOUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The masked positions that a step reveals, `[N, B]` bool.

    `log_odds`, `probability`, `entropy`, `masked` are `[N, B]`, `step` is `[N]`, `position` is `arange(B)`, and B is
    `BLOCK` padded to a power of two; what is padded must not be masked. The rest is `rule_arguments`.
    """
    low = -float("inf")
    if ORDER == 0:
        key = log_odds
        if COARSE:
            key = tl.floor(tl.div_rn(probability, tl.zeros(probability.shape, tl.float32) + resolution))
    elif ORDER == 1:
        key = tl.zeros(masked.shape, tl.float32) - position[None, :].to(tl.float32)
    else:
        key = -entropy
        if COARSE:
            key = -tl.floor(tl.div_rn(entropy, tl.zeros(entropy.shape, tl.float32) + resolution))
    key = tl.where(masked, key, low)
    if BOUNDED:
        rank = _ranks(key, position, BLOCK)
        reveal = _within_bound(tl.where(masked, tl.maximum(entropy, 0.0), 0.0), rank, position, entropy_bound, BLOCK)
    else:
        count = tl.maximum(quotient + (step % steps < remainder).to(tl.int32), 1)
        if ONE:
            best = key == tl.max(key, axis=1)[:, None]
            reveal = position[None, :] == tl.min(tl.where(best, position[None, :], BLOCK), axis=1)[:, None]
        else:
            reveal = _ranks(key, position, BLOCK) < count[:, None]
        if THRESHOLD:
            above = masked & (probability > threshold)
            enough = tl.sum(above.to(tl.int32), axis=1) >= tl.minimum(count, tl.sum(masked.to(tl.int32), axis=1))
            reveal = (enough[:, None] & above) | ((enough == 0)[:, None] & reveal)
    return reveal & masked


def rule_arguments(rule: RevealRule) -> tuple[tuple[int | float, ...], dict[str, Any]]:
    """`select_reveals`' numbers from `quotient` on, and its constants without `BLOCK`."""
    bounded = rule.entropy_bound is not None
    numbers = (
        rule.block // rule.steps,
        rule.block % rule.steps,
        rule.steps,
        float(rule.threshold or 0.0),
        float(rule.entropy_bound or 0.0),
        float(rule.resolution),
    )
    constants = {
        "ORDER": ORDERS.index(rule.order),
        "ONE": rule.one_at_a_time,
        "COARSE": rule.resolution > 0 and rule.order != "left",
        "THRESHOLD": rule.threshold is not None and not bounded,
        "BOUNDED": bounded,
    }
    return numbers, constants
