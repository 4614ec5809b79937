"""Which future states are worth a segment of the next forward: a policy run on perturbed drafts, best states first."""

import torch
from torch import Tensor

from .kernel_dispatch import resolve_within
from .lattice_states_torch import DraftStatistics, PackedStates, Perturbation, lattice_states_torch
from .reveal_rule import Policy

MAX_STATES = 64
MAX_BLOCK = 64


def lattice_states(
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
    kernels: str = "auto",
) -> PackedStates:
    """The certain state of every row, and behind it the drafted states that most trajectories walk through.

    A trajectory is what the policy reveals, step by step, on the drafted statistics; under a perturbation there are
    many, each on statistics moved by draws of its own, and without one there is the most likely one alone. A state
    does not remember the order of its reveals, so trajectories share states. Each further state is the one at which
    most trajectories wait: those whose earlier states are all taken. The first state of the next block rides along
    with a finished state: at once with a certain one, and as a draft of its own with a drafted one.

    Args:
        first: `[rows, block]` int64, the certain states; -1 at masked positions.
        start, step: `[rows]` int64: the states' first position and denoising step.
        drafted: `[rows]` bool: rows for which `drafts` mean something; the others get no drafted states.
        drafts: predicted statistics of the states from `first` on, by depth.
        policy: of the reveals. A kernel follows its `rule`; where that is `None`, `auto` takes the twin.
        depth: states of a trajectory behind `first`, at least 1; in the kernel at most 63.
        budget: states of a row, at least 2, the certain one included; in the kernel at most 64.
        multipliers: `[block]` int64, odd: a state's code is the sum of `(token + 2) * multiplier`, modulo 2^64.
        perturbation: how far the backbone's statistics fall from the drafted ones; `None` for one trajectory.
        kernels: `"auto"`, `"torch"` or `"triton"`.

    Returns:
        `PackedStates` with `budget` states a row; rows with fewer end with dead ones, whose ids mean nothing.

    Raises:
        ValueError: shapes that do not fit together, or `"triton"` for what the kernel cannot do: a policy without a
            rule, more states, or more than 64 positions in a block.
    """
    rows, block = first.shape
    if depth < 1 or budget < 2:
        raise ValueError(f"depth={depth} must be at least 1, and budget={budget} at least 2.")
    if start.shape != (rows,) or step.shape != (rows,) or drafted.shape != (rows,) or multipliers.shape != (block,):
        raise ValueError(
            f"start {list(start.shape)}, step {list(step.shape)} and drafted {list(drafted.shape)} must be [{rows}], "
            f"and multipliers {list(multipliers.shape)} [{block}]."
        )
    shape = drafts.runner_up.shape
    if len(shape) != 3 or shape[0] != rows or shape[2] != block or any(part.shape != shape for part in drafts.choice):
        raise ValueError(f"every field of drafts must be [{rows}, depths, {block}]; runner_up is {list(shape)}.")
    if perturbation is not None and perturbation.below.shape[1] != block:
        raise ValueError(f"the draws {list(perturbation.below.shape)} must be [trajectories, {block}].")
    if resolve_within(kernels, first.device, _limit(block, policy, depth, budget)) == "triton":
        from .lattice_states_triton import lattice_states_triton as implementation
    else:
        implementation = lattice_states_torch
    with torch.no_grad():
        return implementation(
            first,
            start,
            step,
            drafted,
            drafts,
            policy=policy,
            depth=depth,
            budget=budget,
            multipliers=multipliers,
            perturbation=perturbation,
        )


def _limit(block: int, policy: Policy, depth: int, budget: int) -> str | None:
    """What the kernel cannot do, if anything."""
    if policy.rule is None:
        return f"follow {type(policy).__name__}, which has no rule"
    if depth >= MAX_STATES or budget > MAX_STATES or block > MAX_BLOCK:
        return (
            f"plan {budget} states, trajectories of {depth} and blocks of {block}; at most {MAX_STATES}, "
            f"{MAX_STATES - 1} and {MAX_BLOCK} fit"
        )
    return None
