"""Triton kernel of `verify_states`: one program a row, everything of the row in registers.

The policy runs on all segments at once, as a tile; the walk is short and each of its moves is a comparison of one
state with that tile. A row with NaNs walks somewhere within its segments and stops after `depth` moves like any other.
"""

import torch
from torch import Tensor

from .reveal_rule import Policy, PositionStatistics
from .reveal_rule_triton import rule_arguments, select_reveals
from .verify_states_torch import VerifiedStates, walk_depth

try:  # transformers' check of remote code tolerates a missing package only in a try block
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('kernels="triton" needs the package triton.') from error


@triton.jit
def _entry(x, index, at):
    """Entry `at` of `x` `[N]`."""
    return tl.sum(tl.where(index == at, x, 0), axis=0)


@triton.jit
def _verify_kernel(
    ids,
    token,
    probability,
    log_odds,
    entropy,
    log_sum_exp,
    step,
    parent,
    alive,
    states,
    measures,
    scalars,
    continues,
    host,
    rows,
    segments,
    block,
    depth,
    quotient,
    remainder,
    steps,
    threshold,
    entropy_bound,
    resolution,
    COMPARE_STEPS: tl.constexpr,
    ORDER: tl.constexpr,
    ONE: tl.constexpr,
    COARSE: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BOUNDED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`states` `[4, rows, block]`: ids, following, finished ids, token; `measures` `[3, rows, block]`; `scalars`
    `[4, rows]`: last, finished, step, following step; the rest as in `VerifiedStates`."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, SEGMENTS)
    position = tl.arange(0, BLOCK)
    exists = segment < segments
    inside = position < block
    tile = exists[:, None] & inside[None, :]
    entry = row * segments + segment
    offset = entry[:, None] * block + position[None, :]

    # What pads is neither masked nor alive: it is never revealed, never walked to, and equal in all states.
    state = tl.load(ids + offset, mask=tile, other=0)
    masked = state == -1
    is_finished = tl.sum(masked.to(tl.int32), axis=1) == 0
    own_step = tl.load(step + entry, mask=exists, other=0)
    own_parent = tl.load(parent + entry, mask=exists, other=-1)
    is_alive = tl.load(alive + entry, mask=exists, other=0) != 0
    reveal = select_reveals(
        tl.load(log_odds + offset, mask=tile, other=0.0),
        tl.load(probability + offset, mask=tile, other=0.0),
        tl.load(entropy + offset, mask=tile, other=0.0),
        masked, own_step, position, quotient, remainder, steps, threshold, entropy_bound, resolution,
        ORDER, ONE, COARSE, THRESHOLD, BOUNDED, BLOCK,
    )  # fmt: skip
    following = tl.where(reveal, tl.load(token + offset, mask=tile, other=0), state)

    at = tl.zeros([], tl.int32)
    moving = _entry(is_alive.to(tl.int32), segment, 0) > 0
    finished = _entry(is_finished.to(tl.int32), segment, 0) - 1
    reached = is_alive.to(tl.int64) + (is_alive & (segment == 0)).to(tl.int64)
    if SEGMENTS > 1:
        left = tl.zeros([], tl.int32) + depth
        while moving & (left > 0):
            here = segment == at
            next_state = tl.sum(tl.where(here[:, None], following, 0), axis=0)
            differs = (state != next_state[None, :]).to(tl.int32)
            successor = (tl.sum(differs, axis=1) == 0) & (own_parent == _entry(own_parent, segment, at))
            if COMPARE_STEPS:
                successor = successor & (own_step == _entry(own_step, segment, at) + 1)
            rides = _entry(is_finished.to(tl.int32), segment, at) > 0
            successor = ((rides & (own_parent == at)) | ((rides == 0) & successor)) & is_alive
            target = tl.min(tl.where(successor, segment, SEGMENTS), axis=0)
            moving = target < SEGMENTS
            at = tl.where(moving, target, at)
            reached = tl.where(moving & (segment == at), 2, reached)
            arrived = moving & (_entry(is_finished.to(tl.int32), segment, at) > 0)
            finished = tl.where(arrived, at, finished)
            left -= 1

    finite = tl.abs(tl.load(log_sum_exp + offset, mask=tile, other=0.0)) < float("inf")
    is_broken = (tl.sum((finite == 0).to(tl.int32), axis=1) > 0) & (is_alive | (segment == at))
    finished_at = tl.maximum(finished, 0)
    stopped = (finished == at).to(tl.int64)
    known_step = _entry(own_step, segment, at)
    next_state = tl.sum(tl.where((segment == at)[:, None], following, 0), axis=0)
    known = (row * segments + at) * block + position
    finished_ids = tl.load(ids + (row * segments + finished_at) * block + position, mask=inside, other=0)

    place = row * block + position
    field = rows * block
    tl.store(states + place, tl.load(ids + known, mask=inside, other=0), mask=inside)
    tl.store(states + field + place, next_state, mask=inside)
    tl.store(states + 2 * field + place, finished_ids, mask=inside)
    tl.store(states + 3 * field + place, tl.load(token + known, mask=inside, other=0), mask=inside)
    tl.store(measures + place, tl.load(probability + known, mask=inside, other=0.0), mask=inside)
    tl.store(measures + field + place, tl.load(log_odds + known, mask=inside, other=0.0), mask=inside)
    tl.store(measures + 2 * field + place, tl.load(entropy + known, mask=inside, other=0.0), mask=inside)
    tl.store(scalars + row, at.to(tl.int64))
    tl.store(scalars + rows + row, finished.to(tl.int64))
    tl.store(scalars + 2 * rows + row, known_step)
    tl.store(scalars + 3 * rows + row, tl.where(stopped > 0, 0, known_step + 1))
    tl.store(continues + row, stopped == 0)

    host += row * (4 + 2 * block + 3 * segments)
    tl.store(host, (finished >= 0).to(tl.int64))
    tl.store(host + 1, stopped)
    tl.store(host + 2, tl.max(is_broken.to(tl.int64), axis=0))
    tl.store(host + 3, finished_at.to(tl.int64))
    tl.store(host + 4 + position, next_state, mask=inside)
    tl.store(host + 4 + block + position, finished_ids, mask=inside)
    host += 4 + 2 * block
    tl.store(host + segment, own_step, mask=exists)
    tl.store(host + segments + segment, own_parent, mask=exists)
    tl.store(host + 2 * segments + segment, reached, mask=exists)


def verify_states_triton(
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
    rule = policy.rule
    assert rule is not None  # the entry leaves other policies to the twin
    rows, segments, block = ids.shape
    inputs = [part.contiguous() for part in (ids, *statistics, log_sum_exp, step, parent, alive)]
    states = torch.empty(4, rows, block, device=ids.device, dtype=torch.int64)
    measures = torch.empty(3, rows, block, device=ids.device, dtype=torch.float32)
    scalars = torch.empty(4, rows, device=ids.device, dtype=torch.int64)
    continues = torch.empty(rows, device=ids.device, dtype=torch.bool)
    host = torch.empty(rows, 4 + 2 * block + 3 * segments, device=ids.device, dtype=torch.int64)
    if rows:
        numbers, constants = rule_arguments(rule)
        padded_segments, padded_block = triton.next_power_of_2(segments), triton.next_power_of_2(block)
        _verify_kernel[(rows,)](
            *inputs,
            states,
            measures,
            scalars,
            continues,
            host,
            rows,
            segments,
            block,
            walk_depth(segments, block),
            *numbers,
            COMPARE_STEPS=compare_steps,
            SEGMENTS=padded_segments,
            BLOCK=padded_block,
            num_warps=warps(padded_segments * padded_block),
            **constants,
        )
    known_ids, following, finished_ids, token = states
    last, finished, known_step, following_step = scalars
    choice = PositionStatistics(token, *measures)
    return VerifiedStates(
        last, finished, known_ids, known_step, choice, following, following_step, continues, finished_ids, host
    )


def warps(tile: int) -> int:
    """One warp while a thread holds few positions, since it then needs no barrier; more before registers run out."""
    return min(8, max(1, tile // 256))
