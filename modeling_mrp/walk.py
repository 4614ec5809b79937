"""The walk: over a set of evaluated states, follow state -> T(output[state], state) while the next is in the set.

That is verification. It works for chains and lattices, any policy, any temperature, and across block borders, and it
is lossless whatever was drafted: every transition it takes is the policy's own, on the backbone's own output.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .packed_forward import MASKED, Segments


class Walk(NamedTuple):
    """Where the walk led, every field `[rows]` int64 unless said otherwise.

    Attributes:
        last: segment at which it stopped: the new known state.
        finished: the finished segment that it passed or stopped at, -1 for none.
        length: states visited, at least 1.
        visited: `[rows, segments]` bool.
    """

    last: Tensor
    finished: Tensor
    length: Tensor
    visited: Tensor


def match_successors(segments: Segments, following: Tensor, compare_steps: bool) -> Tensor:
    """`[rows, segments, segments]` bool: the policy leads from segment i to segment j.

    Args:
        segments: the evaluated states.
        following: `[rows, segments, block]`: T(output, state) of each, -1 at masked positions.
        compare_steps: whether the step number is part of a state's identity (noise or an uneven schedule use it).
    """
    same = (following[:, :, None] == segments.ids[:, None]).all(dim=-1)
    same &= segments.parent[:, :, None] == segments.parent[:, None, :]
    if compare_steps:
        same &= segments.step[:, :, None] + 1 == segments.step[:, None, :]
    index = torch.arange(segments.ids.shape[1], device=following.device)
    rides_along = segments.parent[:, None, :] == index[:, None]
    finished = (segments.ids != MASKED).all(dim=-1)
    successor = torch.where(finished[:, :, None], rides_along, same)
    return successor & segments.alive[:, None, :] & segments.alive[:, :, None]


def walk_states(segments: Segments, following: Tensor, compare_steps: bool) -> Walk:
    """Follows the policy from segment 0, which is certain, while the next state is in the set.

    Arguments as for `match_successors`.
    """
    # One reveal a state at least, and the next block's first state behind the last.
    depth = min(segments.ids.shape[1] - 1, segments.ids.shape[2] + 1)
    successor = match_successors(segments, following, compare_steps)
    found = successor.any(dim=-1)
    target = successor.int().argmax(dim=-1)
    finished_segment = (segments.ids != MASKED).all(dim=-1)
    rows = segments.ids.shape[0]
    at = torch.zeros(rows, 1, dtype=torch.int64, device=following.device)
    moving = segments.alive[:, :1]
    visited = torch.zeros_like(segments.alive).scatter_(1, at, moving)
    finished = torch.where(finished_segment[:, :1], at, -1)
    length = moving.long()
    for _ in range(depth):
        moving = moving & found.gather(1, at)
        at = torch.where(moving, target.gather(1, at), at)
        visited = visited.scatter(1, at, True)
        finished = torch.where(moving & finished_segment.gather(1, at), at, finished)
        length = length + moving
    return Walk(at[:, 0], finished[:, 0], length[:, 0], visited & segments.alive)
