"""Triton kernel of `lattice_states`: one program a row runs the policy on all of its trajectories and picks states.

In torch this is some three hundred operations, and on a GPU a forward of a small batch is as long as a few hundred
launches. A trajectory is kept as the depth at which each position was revealed, and its token: any of its states can
be read off that. What has to be looked up by trajectory (codes of states, reveals of the winner) goes through a
scratch area of a few kilobytes a row, which stays in the L1 cache.
"""

from typing import Any

import torch
from torch import Tensor

from .lattice_states_torch import CHILD, DraftStatistics, PackedStates, Perturbation
from .reveal_rule import Policy
from .reveal_rule_triton import rule_arguments, select_reveals

try:  # transformers' check of remote code tolerates a missing package only in a try block
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('kernels="triton" needs the package triton.') from error

CHILD_CODE = tl.constexpr(CHILD)
MASK = tl.constexpr(-1)
NEVER = tl.constexpr(1 << 20)


@triton.jit
def _lattice_kernel(
    first,
    start,
    step,
    drafted,
    token,
    probability,
    log_odds,
    entropy,
    runner_up,
    levels,
    quantiles,
    flip_rates,
    below,
    fraction,
    flips,
    multipliers,
    codes,
    reveals,
    tokens,
    ids_out,
    numbers_out,
    alive_out,
    depth,
    depths,
    passes,
    budget,
    trajectories,
    table_passes,
    table_distances,
    bins,
    quantile_count,
    quotient,
    remainder,
    steps,
    threshold,
    entropy_bound,
    resolution,
    ORDER: tl.constexpr,
    ONE: tl.constexpr,
    COARSE: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BOUNDED: tl.constexpr,
    PERTURBED: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_BLOCK: tl.constexpr,
    TRAJECTORIES: tl.constexpr,
    STATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED_BLOCK)
    in_block = place < BLOCK
    path = tl.arange(0, TRAJECTORIES)
    in_paths = path < trajectories
    certain = tl.load(first + row * BLOCK + place, mask=in_block, other=0)
    factor = tl.load(multipliers + place, mask=in_block, other=0)
    at_step = tl.load(step + row)
    columns = depth + 1
    codes += row * trajectories * columns
    reveals += row * trajectories * BLOCK
    tokens += row * trajectories * BLOCK
    inside = in_paths[:, None] & in_block[None, :]
    cell = path[:, None] * BLOCK + place[None, :]

    # Simulation. `revealed`: after how many reveals a position is known, 0 for the certain ones.
    is_open = in_block & (certain == MASK)
    revealed = tl.zeros([TRAJECTORIES, PADDED_BLOCK], tl.int32) + tl.where(is_open, NEVER, 0)[None, :]
    known = tl.zeros([TRAJECTORIES, PADDED_BLOCK], tl.int64) + certain[None, :]
    code = tl.zeros([TRAJECTORIES], tl.int64) + tl.sum(tl.where(is_open, 0, (certain + 2) * factor), axis=0)
    # Bit d: state d exists; after the first finished one, which is followed by the state that rides along, none does.
    valid = tl.zeros([TRAJECTORIES], tl.int64)
    before_finished = tl.zeros([TRAJECTORIES], tl.int1)
    ended = tl.zeros([TRAJECTORIES], tl.int1)
    for d in range(depth):
        at = (row * depths + tl.minimum(d, depths - 1)) * BLOCK + place
        odds = tl.load(log_odds + at, mask=in_block, other=0.0)
        pick = tl.load(token + at, mask=in_block, other=0)
        share = tl.load(probability + at, mask=in_block, other=0.5)
        spread = tl.load(entropy + at, mask=in_block, other=0.0)
        if PERTURBED:
            level = tl.zeros([PADDED_BLOCK], tl.int32)
            for boundary in range(bins - 1):
                level += (odds > tl.load(levels + boundary)).to(tl.int32)
            source = tl.minimum(d, passes - 1)
            group = tl.minimum(source, table_passes - 1) * table_distances + tl.minimum(
                d - source, table_distances - 1
            )
            bin = group * bins + level
            quantile = bin[None, :] * quantile_count + tl.load(below + cell, mask=inside, other=0)
            low = tl.load(quantiles + quantile, mask=inside, other=0.0)
            high = tl.load(quantiles + quantile + 1, mask=inside, other=0.0)
            weight = tl.load(fraction + cell, mask=inside, other=0.0)
            # As torch.lerp rounds it.
            moved = tl.where(weight < 0.5, low + weight * (high - low), high - (high - low) * (1.0 - weight))
            path_odds = odds[None, :] + moved
            flipped = tl.load(flips + cell, mask=inside, other=1.0) < tl.load(flip_rates + bin, mask=in_block)[None, :]
            other = tl.load(runner_up + at, mask=in_block, other=0)
            path_pick = tl.where(flipped, other[None, :], pick[None, :])
            path_share = tl.sigmoid(path_odds)
            missed = (1.0 - path_share) / tl.maximum(1.0 - share, 1e-6)[None, :]
            path_spread = spread[None, :] * tl.minimum(missed, 10.0)
        else:
            shape = tl.zeros([TRAJECTORIES, PADDED_BLOCK], tl.float32)
            path_odds = shape + odds[None, :]
            path_pick = shape.to(tl.int64) + pick[None, :]
            path_share = shape + share[None, :]
            path_spread = shape + spread[None, :]
        reveal = select_reveals(
            path_odds, path_share, path_spread, revealed == NEVER, tl.zeros([TRAJECTORIES], tl.int64) + at_step + d,
            place, quotient, remainder, steps, threshold, entropy_bound, resolution,
            ORDER, ONE, COARSE, THRESHOLD, BOUNDED, BLOCK,
        )  # fmt: skip
        revealed = tl.where(reveal, d + 1, revealed)
        known = tl.where(reveal, path_pick, known)
        before = code
        code += tl.sum(tl.where(reveal, (path_pick + 2) * factor[None, :], 0), axis=1)
        rides = before_finished & (ended == 0)
        exists = (before_finished == 0) | rides
        valid |= exists.to(tl.int64) << d
        tl.store(codes + path * columns + d, tl.where(rides, before + CHILD_CODE, code), mask=in_paths)
        ended = before_finished
        before_finished = tl.max((revealed == NEVER).to(tl.int32), axis=1) == 0
    rides = before_finished & (ended == 0)
    valid |= rides.to(tl.int64) << depth
    tl.store(codes + path * columns + depth, tl.where(rides, code + CHILD_CODE, code), mask=in_paths)
    tl.store(reveals + cell, revealed, mask=inside)
    tl.store(tokens + cell, known, mask=inside)
    finished = tl.max(is_open.to(tl.int32), axis=0) == 0
    may_draft = (tl.load(drafted + row) != 0) & (finished == 0)
    valid = tl.where(in_paths & may_draft, valid, 0)
    tl.debug_barrier()  # what follows reads what other threads have written

    # Selection. `member`: bit d, the trajectory's state d is taken; `reach`: how many in a row from the first.
    slot = tl.arange(0, STATES)
    taken = tl.zeros([STATES], tl.int64)
    member = tl.zeros([TRAJECTORIES], tl.int64)
    reach = tl.zeros([TRAJECTORIES], tl.int32)
    block_start = tl.load(start + row)
    ids_out += row * budget * BLOCK
    numbers_out += row * 3 * budget
    alive_out += row * budget
    tl.store(ids_out + place, certain, mask=in_block)
    tl.store(numbers_out, block_start)
    tl.store(numbers_out + budget, at_step)
    tl.store(numbers_out + 2 * budget, -1)
    tl.store(alive_out, 1)
    for state in range(1, budget):
        at = tl.minimum(reach, depth)
        waiting = tl.load(codes + path * columns + at, mask=in_paths, other=0)
        waits = (((valid >> at) & 1) != 0) & (reach <= depth)
        same = (waiting[:, None] == waiting[None, :]) & waits[None, :]
        votes = tl.where(waits, tl.sum(same.to(tl.int32), axis=1), 0)
        best = tl.min(tl.where(votes == tl.max(votes, axis=0), path, TRAJECTORIES), axis=0)
        is_best = path == best
        code_best = tl.sum(tl.where(is_best, waiting, 0), axis=0)
        at_best = tl.sum(tl.where(is_best, reach, 0), axis=0)
        found = tl.sum((is_best & waits).to(tl.int32), axis=0) != 0
        when = tl.load(reveals + best * BLOCK + place, mask=in_block, other=0)
        what = tl.load(tokens + best * BLOCK + place, mask=in_block, other=0)
        full_before = tl.max((when > tl.maximum(at_best, 1)).to(tl.int32), axis=0) == 0
        rides_along = (at_best > 0) & full_before & found
        mother = tl.min(
            tl.where((taken == code_best - CHILD_CODE) & (slot < state) & (slot > 0), slot, STATES), axis=0
        )
        parent = tl.where(rides_along, tl.where(mother == STATES, 1, mother), MASK)
        if state == 1:
            rides_along = rides_along | finished
            found = found | finished
            parent = tl.where(finished, 0, MASK)
        ids = tl.where(when <= tl.minimum(at_best + 1, depth), what, MASK)
        tl.store(ids_out + state * BLOCK + place, tl.where(rides_along, MASK, ids), mask=in_block)
        tl.store(numbers_out + state, block_start + tl.where(rides_along, BLOCK, 0))
        tl.store(numbers_out + budget + state, tl.where(rides_along, 0, at_step + at_best + 1))
        tl.store(numbers_out + 2 * budget + state, parent)
        tl.store(alive_out + state, found)
        taken = tl.where(slot == state, code_best, taken)
        run = in_paths.to(tl.int32)
        reach = tl.zeros([TRAJECTORIES], tl.int32)
        for d in range(columns):
            here = tl.load(codes + path * columns + d, mask=in_paths, other=0) == code_best
            member |= here.to(tl.int64) << d
            run = run & ((member & valid) >> d).to(tl.int32) & 1
            reach += run


def lattice_states_triton(
    first: Tensor,
    start: Tensor,
    step: Tensor,
    drafted: Tensor,
    drafts: DraftStatistics,
    *,
    policy: Policy,
    depth: int,
    budget: int,
    multipliers: Tensor,
    perturbation: Perturbation | None = None,
) -> PackedStates:
    """See `lattice_states.lattice_states`."""
    rows, block = first.shape
    device = first.device
    trajectories = 1 if perturbation is None else perturbation.below.shape[0]
    ids = torch.empty(rows, budget, block, device=device, dtype=torch.int64)
    numbers = torch.empty(rows, 3, budget, device=device, dtype=torch.int64)
    alive = torch.empty(rows, budget, device=device, dtype=torch.bool)
    states = PackedStates(ids, numbers[:, 0], numbers[:, 1], numbers[:, 2], alive)
    if rows == 0 or policy.rule is None:
        return states
    codes = torch.empty(rows, trajectories, depth + 1, device=device, dtype=torch.int64)
    tokens = torch.empty(rows, trajectories, block, device=device, dtype=torch.int64)
    reveals = torch.empty(rows, trajectories, block, device=device, dtype=torch.int32)
    choice = drafts.choice
    drawn: tuple[Any, ...] = (choice.log_odds,) * 6
    table = (1, 1, 1, 1)
    if perturbation is not None:
        drawn = tuple(part.contiguous() for part in perturbation)
        table = tuple(perturbation.quantiles.shape)
    rule_numbers, rule_constants = rule_arguments(policy.rule)
    padded_block = max(2, triton.next_power_of_2(block))
    _lattice_kernel[(rows,)](
        first.contiguous(),
        start.contiguous(),
        step.contiguous(),
        drafted.contiguous(),
        choice.token.contiguous(),
        choice.probability.contiguous(),
        choice.log_odds.contiguous(),
        choice.entropy.contiguous(),
        drafts.runner_up.contiguous(),
        *drawn,
        multipliers,
        codes,
        reveals,
        tokens,
        ids,
        numbers,
        alive,
        depth,
        drafts.runner_up.shape[1],
        drafts.passes,
        budget,
        trajectories,
        *table,
        *rule_numbers,
        **rule_constants,
        PERTURBED=perturbation is not None,
        BLOCK=block,
        PADDED_BLOCK=padded_block,
        TRAJECTORIES=max(2, triton.next_power_of_2(trajectories)),
        STATES=triton.next_power_of_2(budget),
        num_warps=2 if trajectories <= 16 else 8 if padded_block <= 32 else 16,
    )
    return states
