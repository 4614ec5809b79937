"""The Triton kernels that run a reveal policy, against their torch twins under Triton's interpreter.

Run as `interpreted.py` is, by `test_interpreter.py`.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
import triton
import triton.language as tl
from inputs import (
    POLICIES,
    STRATEGIES,
    VERIFICATIONS,
    lattice_inputs,
    policy_of,
    policy_with,
    statistics_of,
    verification_inputs,
)
from mrp_kernels import lattice_states, split_host, verify_states
from mrp_kernels.reveal_rule_triton import rule_arguments, select_reveals
from twins_and_kernels import both, fenced  # noqa: F401  (a fixture)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("block", "depth", "budget", "depths", "passes", "trajectories"),
    [(4, 3, 4, 1, 1, 11), (3, 3, 9, 3, 2, 20), (5, 4, 5, 2, 1, None), (16, 7, 8, 1, 1, 33)],
)
def test_lattice_states(policy, block, depth, budget, depths, passes, trajectories):
    arguments, options = lattice_inputs(block, depths, passes, trajectories)
    options |= {"policy": policy_with(block, **policy), "depth": depth, "budget": budget}
    twin, kernel = both(lattice_states, *arguments, **options)
    for name in twin._fields:
        assert torch.equal(getattr(twin, name), getattr(kernel, name)), name


def test_lattice_states_survives_broken_drafts():
    """NaN statistics (the engine raises, but later): indices stay inside, and every loop ends."""
    arguments, options = lattice_inputs(4, 1, 1, 5)
    first, start, step, drafted, drafts = arguments
    choice = drafts.choice._replace(
        probability=drafts.choice.probability * torch.nan, log_odds=drafts.choice.log_odds * torch.nan
    )
    options |= {"policy": policy_with(4), "depth": 3, "budget": 6}
    found = lattice_states(first, start, step, drafted, drafts._replace(choice=choice), kernels="triton", **options)
    assert found.ids.min() >= -1
    assert found.ids.max() < 60
    assert found.parent.max() < 6


def test_a_policy_that_only_torch_knows():
    class Own(type(policy_with(4))):
        rule = None

    arguments, options = lattice_inputs(4, 1, 1, None)
    policy = Own(policy_with(4).options)
    with pytest.raises(ValueError, match="cannot follow Own, which has no rule"):
        lattice_states(*arguments, policy=policy, depth=2, budget=3, kernels="triton", **options)
    lattice_states(*arguments, policy=policy, depth=2, budget=3, kernels="torch", **options)


@triton.jit
def _select_kernel(
    log_odds, probability, entropy, masked, step, output, block, quotient, remainder, steps, threshold, entropy_bound,
    resolution, ORDER: tl.constexpr, ONE: tl.constexpr, COARSE: tl.constexpr, THRESHOLD: tl.constexpr,
    BOUNDED: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    state, position = tl.arange(0, STATES), tl.arange(0, BLOCK)
    inside = (position < block)[None, :]
    at = state[:, None] * block + position[None, :]
    reveal = select_reveals(
        tl.load(log_odds + at, mask=inside, other=0.0), tl.load(probability + at, mask=inside, other=0.0),
        tl.load(entropy + at, mask=inside, other=0.0), tl.load(masked + at, mask=inside, other=0) != 0,
        tl.load(step + state), position, quotient, remainder, steps, threshold, entropy_bound, resolution,
        ORDER, ONE, COARSE, THRESHOLD, BOUNDED, BLOCK,
    )  # fmt: skip
    tl.store(output + at, reveal, mask=inside)


@pytest.mark.parametrize(
    ("strategy", "threshold"),
    [*((strategy, 0.5) for strategy in STRATEGIES), ("low_confidence_dynamic", 0.0), ("low_confidence_dynamic", 1.0)],
)
@pytest.mark.parametrize(("block", "steps"), [(1, 1), (3, 2), (4, 4), (7, 2), (16, 16), (16, 5), (16, 1)])
@pytest.mark.parametrize("resolution", [0.0, 0.25])
def test_a_rule_selects_as_its_policy(strategy, block, steps, resolution, threshold):
    """Guards ties, the schedule's remainder, thresholds met and missed, and states with all or nothing masked."""
    policy = policy_of(strategy, block, steps, resolution, threshold)
    states = 64
    generator = torch.Generator().manual_seed(block)
    statistics = statistics_of(states, block, generator=generator)
    for state, (probability, log_odds) in enumerate(((0.0, -torch.inf), (1.0, torch.inf)), start=2):
        statistics.probability[state], statistics.log_odds[state] = probability, log_odds
    masked = torch.rand(states, block, generator=generator) < torch.rand(states, 1, generator=generator)
    masked[0], masked[1] = False, True
    step = torch.randint(0, 2 * steps, (states,), generator=generator)
    numbers, constants = rule_arguments(policy.rule)
    found = torch.empty(states, block, dtype=torch.bool)
    measures = (statistics.log_odds, statistics.probability, statistics.entropy)
    _select_kernel[(1,)](
        *measures, masked, step, found, block, *numbers, STATES=states, BLOCK=triton.next_power_of_2(block),
        **constants,
    )  # fmt: skip
    assert torch.equal(found, policy.select(statistics, masked, step))


def verify_both(arguments: tuple, policy, compare_steps: bool) -> tuple:
    return both(verify_states, *arguments, policy, compare_steps=compare_steps)


def assert_identical(twin, kernel) -> None:
    for name, part in twin._asdict().items():
        for x, y in zip(part, getattr(kernel, name), strict=True):
            torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("segments", "block", "steps"), VERIFICATIONS)
@pytest.mark.parametrize("compare_steps", [False, True])
def test_verification(strategy, segments, block, steps, compare_steps):
    policy = policy_of(strategy, block, steps)
    arguments = verification_inputs(policy, 9, segments, block)
    assert_identical(*verify_both(arguments, policy, compare_steps))


def test_verification_at_the_limits():
    policy = policy_of("low_confidence_dynamic", 64, 23)
    assert_identical(*verify_both(verification_inputs(policy, 2, 64, 64), policy, True))
    wide = policy_of("sequential", 65, 65)
    with pytest.raises(ValueError, match="2 segments of 65 positions; at most 64 of 64 fit"):
        verify_both(verification_inputs(wide, 1, 2, 65), wide, True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("steps", [4, 3])
def test_a_nan_breaks_its_row_only(strategy, steps):
    """Guards indices outside the row, and a walk without end, since nothing is revealed where nothing compares."""
    policy = policy_of(strategy, 4, steps)
    ids, step, parent, alive, statistics, log_sum_exp = verification_inputs(policy, 6, 5, 4)
    for row, where in ((2, slice(None)), (3, 0), (5, slice(1, None))):
        for part in (*statistics[1:], log_sum_exp):
            part[row, where] = torch.nan
    alive[2] = True
    twin, kernel = verify_both((ids, step, parent, alive, statistics, log_sum_exp), policy, False)
    broken = split_host(kernel.host, 4).broken
    assert broken.tolist() == split_host(twin.host, 4).broken.tolist()
    assert broken[[2, 3]].all()
    good = [0, 1, 4]
    for x, y in zip((*twin, *twin.choice), (*kernel, *kernel.choice), strict=True):
        if isinstance(x, torch.Tensor):
            assert torch.equal(x[good], y[good])
    for field, low in ((kernel.last, 0), (kernel.finished, -1)):
        assert ((field >= low) & (field < 5)).all()


def test_a_plan_beyond_the_kernel():
    """The twin has no limits; the kernel says what it cannot do."""
    arguments, options = lattice_inputs(4, 1, 1, None)
    options |= {"policy": policy_with(4), "depth": 4, "budget": 65}
    with pytest.raises(ValueError, match="cannot plan 65 states, trajectories of 4 and blocks of 4; at most 64, 63"):
        lattice_states(*arguments, kernels="triton", **options)
    assert lattice_states(*arguments, kernels="torch", **options).alive.shape == (6, 65)
