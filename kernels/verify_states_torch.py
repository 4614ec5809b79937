"""Readable twin of the verification: select, follow state -> T(output[state], state), and take what the round needs.

That is verification. It works for chains and lattices, any policy, any temperature, and across block borders, and it
is lossless whatever was drafted: every transition it takes is the policy's own, on the backbone's own output.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .reveal_rule import MASKED, Policy, PositionStatistics


class HostStates(NamedTuple):
    """What the host reads of a round, numpy int64; `split_host` takes it apart.

    Attributes:
        committed: `[rows]`: 1 where the walk passed or stopped at a finished segment.
        stopped_finished: `[rows]`: 1 where it stopped there.
        broken: `[rows]`: 1 where an alive segment, or the one that the walk stopped at, has a non-finite log-sum-exp.
        finished_at: `[rows]`: that finished segment, 0 for none.
        following, finished_ids: `[rows, block]`, as in `VerifiedStates`.
        step, parent: `[rows, segments]`, as they came.
        reached: `[rows, segments]`: 0 for a dead segment, 1 for an evaluated one, 2 for one that the walk visited.
    """

    committed: Any
    stopped_finished: Any
    broken: Any
    finished_at: Any
    following: Any
    finished_ids: Any
    step: Any
    parent: Any
    reached: Any


class VerifiedStates(NamedTuple):
    """Where the walk led, and what stands there.

    Attributes:
        last: `[rows]` int64, the segment at which it stopped: the *known* state.
        finished: `[rows]` int64, the finished segment that it passed or stopped at, -1 for none.
        ids: `[rows, block]` int64, the known state's.
        step: `[rows]` int64, the known state's.
        choice: the known state's statistics, fields `[rows, block]`.
        following: `[rows, block]` int64: T(output, known state), -1 at masked positions.
        following_step: `[rows]` int64: steps done at the state after the known one: 0 behind a finished block.
        continues: `[rows]` bool: the known state is unfinished, so that what follows is in its block.
        finished_ids: `[rows, block]` int64, ids of the segment `finished`, of segment 0 where there is none.
        host: `[rows, 4 + 2 * block + 3 * segments]` int64: `HostStates`, side by side for one copy to the host.
    """

    last: Tensor
    finished: Tensor
    ids: Tensor
    step: Tensor
    choice: PositionStatistics
    following: Tensor
    following_step: Tensor
    continues: Tensor
    finished_ids: Tensor
    host: Tensor


class Walk(NamedTuple):
    """`last` and `finished` as in `VerifiedStates`; visited: `[rows, segments]` bool."""

    last: Tensor
    finished: Tensor
    visited: Tensor


def verify_states_torch(
    ids: Tensor,
    step: Tensor,
    parent: Tensor,
    alive: Tensor,
    statistics: PositionStatistics,
    log_sum_exp: Tensor,
    policy: Policy,
    compare_steps: bool,
) -> VerifiedStates:
    """See `verify_states.verify_states`."""
    reveal = policy.select(statistics, ids == MASKED, step)
    following = torch.where(reveal, statistics.token, ids)
    last, finished, visited = walk_states(ids, step, parent, alive, following, compare_steps)

    row = torch.arange(ids.shape[0], device=ids.device)
    committed, finished_at = finished >= 0, finished.clamp(min=0)
    stopped_finished = committed & (last == finished)
    finite = torch.isfinite(log_sum_exp).all(dim=2)
    broken = ~(finite | ~alive).all(dim=1) | ~finite[row, last]
    known_step, finished_ids, following = step[row, last], ids[row, finished_at], following[row, last]
    flags = torch.stack([committed, stopped_finished, broken, finished_at], dim=1)
    reached = alive.long() + visited
    return VerifiedStates(
        last,
        finished,
        ids[row, last],
        known_step,
        PositionStatistics(*(part[row, last] for part in statistics)),
        following,
        (known_step + 1).masked_fill(stopped_finished, 0),
        ~stopped_finished,
        finished_ids,
        torch.cat([flags, following, finished_ids, step, parent, reached], dim=1),
    )


def walk_states(
    ids: Tensor, step: Tensor, parent: Tensor, alive: Tensor, following: Tensor, compare_steps: bool
) -> Walk:
    """Follows the policy from segment 0, which is certain, while the next state is in the set.

    `following` is `[rows, segments, block]`: T(output, state) of each, -1 at masked positions.
    """
    # One reveal a state at least, and the next block's first state behind the last.
    depth = walk_depth(*ids.shape[1:])
    finished_segment = (ids != MASKED).all(dim=-1)
    successor = _successors(ids, step, parent, alive, following, finished_segment, compare_steps)
    found = successor.any(dim=-1)
    target = successor.int().argmax(dim=-1)
    at = torch.zeros_like(step[:, :1])
    moving = alive[:, :1]
    visited = torch.zeros_like(alive).scatter_(1, at, moving)
    finished = torch.where(finished_segment[:, :1], at, -1)
    for _ in range(depth):
        moving = moving & found.gather(1, at)
        at = torch.where(moving, target.gather(1, at), at)
        visited = visited.scatter(1, at, True)
        finished = torch.where(moving & finished_segment.gather(1, at), at, finished)
    return Walk(at[:, 0], finished[:, 0], visited & alive)


def walk_depth(segments: int, block: int) -> int:
    """Moves at most: a state reveals one position at least, and the next block's first state is behind the last."""
    return min(segments - 1, block + 1)


def _successors(
    ids: Tensor, step: Tensor, parent: Tensor, alive: Tensor, following: Tensor, finished: Tensor, compare_steps: bool
) -> Tensor:
    """`[rows, segments, segments]` bool: the policy leads from segment i to segment j.

    Behind a `finished` `[rows, segments]` segment comes the one that rides along with it.
    """
    same = (following[:, :, None] == ids[:, None]).all(dim=-1)
    same &= parent[:, :, None] == parent[:, None, :]
    if compare_steps:
        same &= step[:, :, None] + 1 == step[:, None, :]
    index = torch.arange(ids.shape[1], device=ids.device)
    rides_along = parent[:, None, :] == index[:, None]
    successor = torch.where(finished[:, :, None], rides_along, same)
    return successor & alive[:, None, :] & alive[:, :, None]


def split_host(host: Tensor, block: int) -> HostStates:
    """The parts of `VerifiedStates.host`, a copy of which has come to the CPU."""
    segments = (host.shape[1] - 4 - 2 * block) // 3
    flags, *parts = (part.numpy() for part in host.split([4, block, block, *3 * [segments]], dim=1))
    return HostStates(*flags.T, *parts)
