"""Which future states are worth a segment of the next forward: a policy run on perturbed drafts, best states first."""

import torch
from torch import Tensor

from .kernel_dispatch import resolve_kernels
from .lattice_states_torch import DraftStatistics, PackedStates, Perturbation, lattice_states_torch
from .reveal_rule import Policy

MAX_STATES = 64


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
        depth: states of a trajectory behind `first`, 1 to 63.
        budget: states of a row, 2 to 64, the certain one included.
        multipliers: `[block]` int64, odd: a state's code is the sum of `(token + 2) * multiplier`, modulo 2^64.
        perturbation: how far the backbone's statistics fall from the drafted ones; `None` for one trajectory.
        kernels: `"auto"`, `"torch"` or `"triton"`.

    Returns:
        `PackedStates` with `budget` states a row; rows with fewer end with dead ones, whose ids mean nothing.

    Raises:
        ValueError: shapes that do not fit together, or a policy without a rule with `kernels="triton"`.
    """
    rows, block = first.shape
    if not 1 <= depth < MAX_STATES or not 2 <= budget <= MAX_STATES:
        raise ValueError(
            f"depth={depth} must be between 1 and {MAX_STATES - 1}, and budget={budget} between 2 and {MAX_STATES}."
        )
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
    if _chosen(kernels, policy, first.device) == "triton":
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


def _chosen(kernels: str, policy: Policy, device: torch.device) -> str:
    """`resolve_kernels`, but the twin for a policy that no kernel can follow."""
    chosen = resolve_kernels(kernels, device)
    if chosen == "triton" and policy.rule is None:
        if kernels == "triton":
            raise ValueError(
                f'kernels="triton" cannot follow {type(policy).__name__}, which has no rule; give it a RevealRule, or '
                'use kernels="auto" or "torch".'
            )
        return "torch"
    return chosen
