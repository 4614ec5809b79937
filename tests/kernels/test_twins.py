"""The torch twins, which specify the kernels, against float64 formulas written as directly as possible."""

import pytest
import torch
from inputs import (
    ATTENTION_SHAPES,
    POLICIES,
    STRATEGIES,
    VERIFICATIONS,
    attention_inputs,
    inside_nan,
    lattice_inputs,
    logits_of,
    noise_of,
    policy_of,
    policy_with,
    verification_inputs,
)
from mrp_kernels import (
    gumbel_noise,
    lattice_states,
    mrp_input,
    packed_block_attention,
    qk_norm_rope,
    residual_kl,
    reveal_statistics,
    shortlist,
    shortlist_residual,
    split_host,
    verify_states,
    visibility_bits,
)

from benchmarks import kernel_references as reference
from benchmarks.lattice_reference import differing_share, lattice

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(5, 1003), (4, 16), (2, 151936)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask_token_id": 0},
        {"mask_token_id": -1, "residual_scale": 0.7},
        {"mask_token_id": 5, "temperature": 1.3},
        {"temperature": 0.8, "top_k": 3},
        {"temperature": 2.0, "top_p": 0.8, "residual_scale": -1.0},
        {"temperature": 3.0, "top_p": 0.7, "top_k": 9, "mask_token_id": 2},
    ],
)
def test_statistics(dtype, rows, vocab, options):
    options = dict(options)
    if "mask_token_id" in options:
        options["mask_token_id"] %= vocab
    if "temperature" in options:
        options["noise"] = noise_of(rows)
    logits = logits_of(rows, vocab, dtype)
    residual = inside_nan(torch.randn(rows, vocab).to(dtype)) if "residual_scale" in options else None
    found = reveal_statistics(logits, residual=residual, **options)
    choice = {name: options[name] for name in options if name not in ("residual_scale",)}
    scale = options.get("residual_scale", 1.0)
    expected = reference.statistics(logits, residual=residual, residual_scale=scale, chosen=found.token, **choice)
    for name in ("probability", "log_sum_exp", "entropy", "runner_up_probability"):
        torch.testing.assert_close(
            getattr(found, name).double(),
            getattr(expected, name),
            rtol=2e-5,
            atol=1e-6,
            msg=lambda text, n=name: n + text,
        )
    torch.testing.assert_close(found.log_odds.double(), expected.log_odds, rtol=1e-5, atol=2e-5)
    values = logits.double() if residual is None else logits.double() + scale * residual.double()
    keys = {"mask_token_id": None, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "noise": None}
    scores = reference.scores_of(values, *({**keys, **choice}[name] for name in keys))
    # In float32 the best two may swap where they are one rounding apart; the token must still be a best one.
    chosen = scores.gather(1, found.token[:, None])[:, 0]
    torch.testing.assert_close(chosen, scores.amax(dim=1), rtol=1e-6, atol=1e-5)
    assert options.get("mask_token_id") not in found.token.tolist() + found.runner_up.tolist()
    assert found.token.ne(found.runner_up).all()


def test_ties_go_to_the_lowest_index_on_both_sides_of_the_mask_token():
    logits = torch.zeros(3, 9)
    logits[1, [2, 6]] = 1.0
    logits[2, [6, 8]] = 1.0
    found = reveal_statistics(logits, mask_token_id=4)
    assert found.token.tolist() == [0, 2, 6]
    assert found.runner_up.tolist() == [1, 6, 8]


def test_log_odds_order_positions_whose_probability_rounds_to_one():
    gaps = torch.tensor([18.0, 25.0, 40.0, 80.0])
    logits = torch.zeros(4, 1003)
    logits[torch.arange(4), torch.arange(4)] = gaps
    found = reveal_statistics(logits)
    assert (found.probability == 1.0).sum() >= 3
    expected = gaps.double() - torch.tensor(1002.0, dtype=torch.float64).log()
    torch.testing.assert_close(found.log_odds.double(), expected, rtol=1e-6, atol=0)


def test_a_mask_token_that_would_win_counts_in_the_denominator():
    logits = torch.tensor([[1.0, 2.0, 30.0, 0.0]])
    found = reveal_statistics(logits, mask_token_id=2)
    assert found.token.item() == 1
    assert found.log_odds.item() == pytest.approx(-28.0, abs=1e-4)
    assert found.probability.item() == pytest.approx(torch.tensor(-28.0).exp().item(), rel=1e-5)


def test_a_nan_shows_in_its_own_rows_log_sum_exp_only():
    logits = torch.randn(3, 40)
    logits[1, 17] = torch.nan
    for noise in (None, noise_of(3)):
        found = reveal_statistics(logits, temperature=1.0, noise=noise, mask_token_id=3)
        assert found.log_sum_exp.isnan().tolist() == [False, True, False]
        assert ((found.token >= 0) & (found.token < 40)).all()


def test_measures_do_not_depend_on_the_sampling():
    logits, noise = torch.randn(6, 50), noise_of(6)
    plain = reveal_statistics(logits)
    sampled = reveal_statistics(logits, temperature=5.0, top_k=20, top_p=0.9, noise=noise)
    torch.testing.assert_close(plain.log_sum_exp, sampled.log_sum_exp)
    expected = logits.softmax(1).gather(1, sampled.token[:, None])[:, 0]
    torch.testing.assert_close(sampled.probability, expected)


def test_what_was_not_asked_for_is_marked():
    found = reveal_statistics(torch.randn(2, 7), runner_up=False, entropy=False)
    assert found.runner_up.tolist() == [-1, -1]
    assert found.entropy.isnan().all()
    assert found.runner_up_probability.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ATTENTION_SHAPES)
def test_attention(dtype, shape):
    arguments, options = attention_inputs(*shape, dtype)
    segments, block, prefixes = shape[3], shape[4], shape[6]
    commit = torch.tensor([segments - 1, -1, 0][: shape[0]])
    before = {name: options[name].clone() for name in ("cache_key", "cache_value")}
    found = packed_block_attention(*arguments, commit=commit, **options)
    visible = options.pop("visibility")
    expected = reference.attention(*arguments, visible=visible, **{**options, **before})
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for name, new in zip(before, arguments[1:], strict=True):
        for row, length in enumerate(prefixes):
            start = int(commit[row]) * block
            if start >= 0:
                before[name][row, :, length : length + block] = new[row, :, start : start + block]
        assert torch.equal(options[name].nan_to_num(9.0), before[name].nan_to_num(9.0))
    bits = visibility_bits(visible)
    again = packed_block_attention(*arguments, visibility=bits, max_prefix_length=max(prefixes), **options)
    torch.testing.assert_close(again, found)


def test_attention_does_not_write_behind_the_capacity():
    arguments, options = attention_inputs(1, 2, 1, 1, 4, 16, [6], torch.float32, capacity=10)
    packed_block_attention(*arguments, commit=torch.tensor([-1]), **options)
    assert options["cache_key"][:, :, 6:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [None, 0, 7, 1002])
def test_shortlist(dtype, mask):
    rows, vocab, size, hidden = 5, 1003, 19, 48
    logits = logits_of(rows, vocab, dtype)
    if mask == 7:
        logits[:2, 7] = 60.0
    found = shortlist(logits, size, mask_token_id=mask)
    assert mask not in found.tokens.flatten().tolist()
    candidates = logits.float().clone()
    if mask is not None:
        candidates[:, mask] = -torch.inf
    assert torch.equal(found.logits, candidates.topk(size, dim=1).values)
    assert torch.equal(found.logits, logits.float().gather(1, found.tokens))
    rest, mean = reference.shortlist_rest(logits, found.tokens)
    torch.testing.assert_close(found.rest_log_sum_exp.double(), rest, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.rest_mean_logit.double(), mean, rtol=1e-4, atol=1e-4)

    residual = torch.randn(rows, hidden).to(dtype)
    weight = (torch.randn(vocab, hidden) * 0.2).to(dtype)
    chosen = shortlist_residual(found, residual, weight, residual_scale=0.5)
    values, total = reference.shortlist_corrected(found, residual, weight, 0.5)
    value = values.gather(1, (found.tokens == chosen.token[:, None]).int().argmax(1, keepdim=True))[:, 0]
    torch.testing.assert_close(value, values.amax(dim=1), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(chosen.log_sum_exp.double(), total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(chosen.probability.double(), (value - total).exp(), rtol=1e-4, atol=1e-7)
    assert chosen.token.ne(chosen.runner_up).all()


def test_a_shortlist_of_everything_is_the_whole_softmax():
    rows, vocab, hidden = 4, 60, 32
    logits, residual, weight = torch.randn(rows, vocab) * 3, torch.randn(rows, hidden), torch.randn(vocab, hidden)
    for options in ({}, {"temperature": 2.0, "noise": noise_of(rows), "top_k": 9, "top_p": 0.8}):
        whole = reveal_statistics(logits, residual=residual @ weight.T, **options)
        short = shortlist_residual(shortlist(logits, vocab), residual, weight, **options)
        for name in whole._fields:
            torch.testing.assert_close(getattr(short, name), getattr(whole, name), rtol=1e-4, atol=1e-5)


def test_a_shortlist_draws_with_the_noise_of_the_whole_vocabulary():
    rows, noise = 6, noise_of(6)
    logits = torch.randn(rows, 300)
    short = shortlist(logits, 40)
    found = shortlist_residual(short, torch.zeros(rows, 8), torch.zeros(300, 8), temperature=1.0, noise=noise)
    scores = short.logits + gumbel_noise(noise, 300).gather(1, short.tokens)
    assert torch.equal(found.token, short.tokens.gather(1, scores.argmax(1, keepdim=True))[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "out"), [(72, 40), (128, 128)])
def test_mrp_input(dtype, hidden, out):
    generator = torch.Generator().manual_seed(hidden)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    ids = torch.randint(30, (2, 5), generator=generator)
    arguments = (ids, draw(2, 5, hidden) * 20, draw(30, hidden), draw(hidden), draw(hidden), draw(out, 2 * hidden) / 8)
    tolerance = TOLERANCE[dtype] * hidden**0.5 / 2
    torch.testing.assert_close(
        mrp_input(*arguments).double(), reference.mrp_input(*arguments), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(5, 1, 16), (4, 2, 64), (2, 2, 128), (3, 1, 80)])
def test_qk_norm_rope(dtype, heads, kv_heads, dim):
    draw = lambda *shape: torch.randn(*shape).to(dtype)  # noqa: E731
    for rope_batch in (1, 2):
        arguments = (
            draw(2, 7, heads, dim),
            draw(2, 7, kv_heads, dim),
            draw(dim),
            draw(dim),
            draw(rope_batch, 7, dim).clamp(-1, 1),
            draw(rope_batch, 7, dim).clamp(-1, 1),
        )
        for found, expected in zip(qk_norm_rope(*arguments), reference.qk_norm_rope(*arguments), strict=True):
            tolerance = 3 * TOLERANCE[dtype]
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
def test_loss_value_and_gradient(chunk):
    student, target, weight = torch.randn(9, 24, requires_grad=True), torch.randn(9, 24), torch.randn(1003, 24) / 3
    weights = torch.arange(9.0)
    found = residual_kl(student, target, weight, chunk=chunk)
    (gradient,) = torch.autograd.grad((found * weights).sum(), student)
    expected = reference.residual_kl(student, target, weight)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), student)
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=2e-5, atol=2e-5)


def test_loss_gradient_by_finite_differences():
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    student, target, weight = draw(5, 8).requires_grad_(), draw(5, 8), draw(31, 8)
    assert torch.autograd.gradcheck(lambda x: residual_kl(x, target, weight, chunk=2), (student,))


def test_loss_at_the_full_vocabulary_and_without_a_gradient():
    student, target, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(151936, 8)
    expected = reference.residual_kl(student, target, weight)
    # torch's float32 log_softmax adds 151,936 terms one after the other on CPU, which costs a digit.
    torch.testing.assert_close(residual_kl(student, target, weight, chunk=2).double(), expected, rtol=1e-4, atol=1e-4)
    assert residual_kl(target, target, weight).abs().max() < 1e-5
    assert residual_kl(student[:0], target[:0], weight).shape == (0,)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("block", "depth", "budget", "depths", "passes", "trajectories"),
    [(4, 3, 4, 1, 1, 11), (5, 5, 16, 3, 2, 20), (4, 4, 5, 2, 1, None), (8, 7, 8, 2, 2, 33)],
)
def test_lattice_states(policy, block, depth, budget, depths, passes, trajectories):
    """Against sets and counts: order of choice, shared states, the state that rides along, depth by depth."""
    arguments, options = lattice_inputs(block, depths, passes, trajectories)
    options |= {"policy": policy_with(block, **policy), "depth": depth, "budget": budget}
    found = lattice_states(*arguments, **options)
    first, start, step, drafted, drafts = arguments
    expected = lattice(first, drafted, drafts, step=step, perturbation=options.pop("perturbation", None), **options)
    for row, states in enumerate(expected):
        assert found.alive[row].tolist() == [place < len(states) for place in range(budget)]
        alive = found.alive[row]
        assert [tuple(ids) for ids in found.ids[row, alive].tolist()] == [ids for ids, _, _ in states]
        assert found.parent[row, alive].tolist() == [-1 if mother is None else mother for _, mother, _ in states]
        rides = found.parent[row, alive] >= 0
        assert found.start[row, alive].tolist() == (start[row] + block * rides).tolist()
        steps = [0 if mother is not None else int(step[row]) + depth for _, mother, depth in states]
        assert found.step[row, alive].tolist() == steps
    assert differing_share(found, expected, start) == 0
    assert sum(map(len, expected)) > 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "depth=0 must be at least 1"),
        ({"budget": 1}, "budget=1 at least 2"),
        ({"multipliers": torch.ones(3, dtype=torch.int64)}, r"multipliers \[3\]"),
    ],
)
def test_lattice_states_refuses_what_does_not_fit(changes, message):
    arguments, options = lattice_inputs(4, 1, 1, None)
    options |= {"policy": policy_with(4), "depth": 3, "budget": 4} | changes
    with pytest.raises(ValueError, match=message):
        lattice_states(*arguments, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("segments", "block", "steps"), VERIFICATIONS)
@pytest.mark.parametrize("compare_steps", [False, True])
def test_verification(strategy, segments, block, steps, compare_steps):
    """Guards the order of ties, segments that are dead or ride along, steps, and what is taken at the walk's end."""
    policy = policy_of(strategy, block, steps)
    rows = 9
    arguments = verification_inputs(policy, rows, segments, block)
    ids, step, parent, alive, statistics, _ = arguments
    found = verify_states(*arguments, policy, compare_steps=compare_steps)
    host = split_host(found.host, block)
    wanted = reference.verified_states(*arguments, policy, compare_steps=compare_steps)
    for row, (path, finished, following, broken) in enumerate(wanted):
        last, at = path[-1], max(finished, 0)
        assert [int(x[row]) for x in (found.last, found.finished, host.finished_at)] == [last, finished, at]
        reached = [2 * (j in path) if alive[row, j] else 0 for j in range(segments)]
        assert host.reached[row].tolist() == [max(x, int(alive[row, j])) for j, x in enumerate(reached)]
        stops = finished == last
        flags = [host.committed[row], host.stopped_finished[row], host.broken[row], ~found.continues[row]]
        assert [bool(x) for x in flags] == [finished >= 0, stops, broken, stops]
        for part, value in zip((found.choice.token, *found.choice[1:]), statistics, strict=True):
            assert torch.equal(part[row], value[row, last])
        assert found.following[row].tolist() == host.following[row].tolist() == following
        assert found.finished_ids[row].tolist() == host.finished_ids[row].tolist() == ids[row, at].tolist()
        assert torch.equal(found.ids[row], ids[row, last])
        steps_done = int(step[row, last])
        assert [int(found.step[row]), int(found.following_step[row])] == [steps_done, 0 if stops else steps_done + 1]
    assert host.step.tolist() == step.tolist()
    assert host.parent.tolist() == parent.tolist()
    if segments == 16:  # or the test would test nothing
        lengths = [len(path) for path, *_ in wanted]
        assert max(lengths) > 3, lengths
        assert any(finished not in (-1, path[-1]) for path, finished, *_ in wanted) or block > 4


def test_a_policy_without_a_rule_is_verified_by_the_twin():
    policy = policy_of("sequential", 4, 4)
    arguments = verification_inputs(policy, 3, 5, 4)
    expected = verify_states(*arguments, policy, compare_steps=False)

    class Own:
        rule = None
        select = policy.select

    found = verify_states(*arguments, Own(), compare_steps=False)
    assert torch.equal(found.host, expected.host)
    with pytest.raises(ValueError, match="the policy Own, which has no rule"):
        verify_states(*arguments, Own(), compare_steps=False, kernels="triton")
    with pytest.raises(ValueError, match=r"parent torch.int64 \[3, 4\] must be torch.int64 \[3, 5\]"):
        verify_states(*arguments[:2], arguments[2][:, :4], *arguments[3:], policy, compare_steps=False)
