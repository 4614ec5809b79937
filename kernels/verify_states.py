"""Verification of one packed forward: one launch from the statistics of its segments to the state that is known."""

import torch
from torch import Tensor

from .kernel_dispatch import resolve_within
from .reveal_rule import Policy, PositionStatistics
from .verify_states_torch import VerifiedStates, verify_states_torch

MAX_SEGMENTS = 64
MAX_BLOCK = 64


def verify_states(
    ids: Tensor,
    step: Tensor,
    parent: Tensor,
    alive: Tensor,
    statistics: PositionStatistics,
    log_sum_exp: Tensor,
    policy: Policy,
    *,
    compare_steps: bool,
    kernels: str = "auto",
) -> VerifiedStates:
    """Runs the policy on every segment, walks from segment 0 while the next state is a segment, and takes the end.

    The policy leads from state i to T(i), which has the tokens that it reveals. The walk moves from segment i to the
    first alive segment j with `ids[j] == T(i)` and `parent[j] == parent[i]` (and `step[j] == step[i] + 1` where steps
    are compared); from a finished segment i to the first alive j with `parent[j] == i`. It ends after `block + 1`
    moves at the latest, at the first state of the next block, behind which no plan goes.

    Args:
        ids: `[rows, segments, block]` int64, -1 at masked positions. Segment 0 is certain.
        step: `[rows, segments]` int64, denoising steps done in the segment's block.
        parent: `[rows, segments]` int64: the finished segment that this one rides along with, -1 for none.
        alive: `[rows, segments]` bool; dead segments only pad the batch.
        statistics: of each segment's logits, fields `[rows, segments, block]`.
        log_sum_exp: float32 `[rows, segments, block]`, non-finite where the logits are broken.
        policy: what reveals; the kernel follows its `rule`, so `"auto"` takes the twin for a policy without one.
        compare_steps: whether the step is part of a state's identity (noise or an uneven schedule reads it).
        kernels: `"auto"`, `"torch"` or `"triton"`.

    Returns:
        `VerifiedStates`. Broken logits are no error here but a flag of the row, whose other fields then mean nothing
        (but indices are valid).

    Raises:
        ValueError: shapes or types that do not fit together, or `"triton"` for what the kernel cannot do: a policy
            without a rule, more than 64 segments or positions in a block.
    """
    _validate(ids, step, parent, alive, statistics, log_sum_exp)
    if resolve_within(kernels, ids.device, _limit(ids, policy)) == "triton":
        from .verify_states_triton import verify_states_triton as implementation
    else:
        implementation = verify_states_torch
    with torch.no_grad():
        return implementation(ids, step, parent, alive, statistics, log_sum_exp, policy, compare_steps)


def _limit(ids: Tensor, policy: Policy) -> str | None:
    """What the kernel cannot do, if anything."""
    if policy.rule is None:
        return f"verify with the policy {type(policy).__name__}, which has no rule"
    if ids.shape[1] > MAX_SEGMENTS or ids.shape[2] > MAX_BLOCK:
        return f"verify {ids.shape[1]} segments of {ids.shape[2]} positions; at most {MAX_SEGMENTS} of {MAX_BLOCK} fit"
    return None


def _validate(
    ids: Tensor, step: Tensor, parent: Tensor, alive: Tensor, statistics: PositionStatistics, log_sum_exp: Tensor
) -> None:
    if ids.ndim != 3 or 0 in ids.shape[1:]:
        raise ValueError(f"ids {list(ids.shape)} must be [rows, segments, block], one segment and position at least.")
    whole, counts = torch.int64, tuple(ids.shape[:2])
    expected = {
        "ids": (ids, whole, tuple(ids.shape)),
        "step": (step, whole, counts),
        "parent": (parent, whole, counts),
        "alive": (alive, torch.bool, counts),
        "statistics.token": (statistics.token, whole, tuple(ids.shape)),
        "log_sum_exp": (log_sum_exp, torch.float32, tuple(ids.shape)),
    }
    for name in ("probability", "log_odds", "entropy"):
        expected[f"statistics.{name}"] = (getattr(statistics, name), torch.float32, tuple(ids.shape))
    for name, (tensor, dtype, shape) in expected.items():
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} {tensor.dtype} {list(tensor.shape)} must be {dtype} {list(shape)}, as ids {list(ids.shape)} "
                "demand."
            )
