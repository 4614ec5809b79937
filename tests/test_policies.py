"""Each reveal policy and remask rule against a plain restatement in python, position by position."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.random_models import random_config, random_model, shared_model
from modeling_mrp.generation_config_mrp import resolve_options
from modeling_mrp.remask_rules import keep_by_confidence, keep_by_cross, keep_by_veto
from modeling_mrp.reveal_policies import make_policy
from modeling_mrp.reveal_rule import PositionStatistics

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None,
                    suppress_health_check=list(HealthCheck))  # fmt: skip
STRATEGIES = ("low_confidence_static", "low_confidence_dynamic", "sequential", "entropy_bounded")
RULES = ("cross", "confidence", "veto")


def options_for(**values):
    return resolve_options({"mrp_mode": "none"} | values, random_config())


def plain_policy(strategy, p, entropy, masked, step, block, steps, tau, bound, resolution):
    """The policy as DESIGN and the golden README say it; a set of positions."""
    places = [i for i in range(block) if masked[i]]
    count = block // steps + (step % steps < block % steps)
    floor = (lambda value: math.floor(value / resolution)) if resolution else (lambda value: value)
    by_confidence = sorted(places, key=lambda i: (-floor(p[i]), i))
    if strategy == "sequential":
        return set(places[:count])
    if strategy == "low_confidence_static":
        return set(by_confidence[:count])
    if strategy == "low_confidence_dynamic":
        above = {i for i in places if p[i] > tau}
        return above if len(above) >= min(count, len(places)) else set(by_confidence[:count])
    chosen, total, largest = set(), 0.0, 0.0
    for i in sorted(places, key=lambda i: (floor(entropy[i]), i)):
        total, largest = total + entropy[i], max(largest, entropy[i])
        if chosen and total - largest > bound:
            break
        chosen.add(i)
    return chosen


@st.composite
def situations(draw):
    block = draw(st.integers(2, 12))
    # Coarse numbers, so that ties and equality with the threshold occur; 2^-k sums are exact.
    grid = st.integers(1, 63).map(lambda n: n / 64)
    return {
        "block": block,
        "steps": draw(st.integers(1, block)),
        "p": draw(st.lists(grid, min_size=block, max_size=block)),
        "entropy": draw(st.lists(grid.map(lambda v: 2 * v), min_size=block, max_size=block)),
        "masked": draw(st.lists(st.booleans(), min_size=block, max_size=block)),
        "step": draw(st.integers(0, 2 * block)),
        "tau": draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])),
        "bound": draw(st.sampled_from([0.0, 0.25, 1.0, 4.0])),
        "resolution": draw(st.sampled_from([0.0, 0.125, 0.5])),
    }


def statistics_of(p, entropy):
    p, entropy = torch.tensor(p), torch.tensor(entropy)
    return PositionStatistics(torch.zeros(p.shape, dtype=torch.long), p, torch.logit(p.double()).float(), entropy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@SETTINGS
@given(situations())
def test_policy_equals_plain_restatement(strategy, s):
    """Guards the schedule's remainder, ties broken from the right, `>=` for `>`, the bound's largest term, positions
    that are not masked, and a step without a reveal."""
    options = options_for(
        block_length=s["block"], denoising_steps=s["steps"], remasking_strategy=strategy,
        confidence_threshold=s["tau"], entropy_bound=s["bound"], confidence_resolution=s["resolution"],
    )  # fmt: skip
    masked = torch.tensor(s["masked"])
    chosen = make_policy(options).select(statistics_of(s["p"], s["entropy"]), masked, torch.tensor(s["step"]))
    wanted = plain_policy(
        strategy, s["p"], s["entropy"], s["masked"], s["step"], s["block"], s["steps"], s["tau"], s["bound"],
        s["resolution"],
    )  # fmt: skip
    assert set(chosen.nonzero()[:, 0].tolist()) == wanted
    assert bool(chosen.any()) == bool(masked.any())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_policy_is_batched_over_any_dimensions(strategy):
    """Guards rows or segments that read each other's masks, counts or steps."""
    torch.manual_seed(0)
    policy = make_policy(options_for(block_length=7, denoising_steps=3, remasking_strategy=strategy))
    p, entropy = torch.rand(3, 5, 7), 2 * torch.rand(3, 5, 7)
    masked, step = torch.rand(3, 5, 7) < 0.7, torch.randint(0, 7, (3, 5))
    together = policy.select(statistics_of(p.tolist(), entropy.tolist()), masked, step)
    for i in range(3):
        for j in range(5):
            one = statistics_of(p[i, j].tolist(), entropy[i, j].tolist())
            assert torch.equal(policy.select(one, masked[i, j], step[i, j]), together[i, j])


def test_near_certain_positions_keep_their_order():
    """Guards an order by float32 probabilities, which are all 1 there: the log-odds still tell them apart."""
    policy = make_policy(options_for(block_length=4))
    log_odds = torch.tensor([20.0, 30.0, 25.0, 28.0])
    statistics = PositionStatistics(torch.zeros(4, dtype=torch.long), torch.ones(4), log_odds, torch.zeros(4))
    assert policy.select(statistics, torch.ones(4, dtype=torch.bool), torch.tensor(0)).tolist() == [0, 1, 0, 0]
    stable = make_policy(options_for(block_length=4, confidence_resolution=0.01))
    assert stable.select(statistics, torch.ones(4, dtype=torch.bool), torch.tensor(0)).tolist() == [1, 0, 0, 0]


@SETTINGS
@given(st.integers(2, 8), st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 0.6, 1.0]))
def test_remask_rules_equal_plain_restatement(block, seed, tau):
    """Guards halves that see themselves, a veto on logits instead of their move, and steps without progress."""
    generator = torch.Generator().manual_seed(seed)
    vocab = 6
    before = torch.where(torch.rand(block, generator=generator) < 0.6, -1, 3)
    before[0] = -1
    revealed = (torch.rand(block, generator=generator) < 0.7) & (before == -1)
    revealed[0] = True
    token = torch.randint(0, vocab, (block,), generator=generator)
    key = torch.randn(block, generator=generator)
    logits = torch.randn(block, vocab, generator=generator)

    def head_pass(states):
        # Any function of the state alone, different at every place.
        code = (states.float() * torch.arange(1, block + 1)).sum(-1)[..., None, None]
        place, word = torch.arange(block)[:, None], torch.arange(vocab)
        return 3 * torch.sin(code * (1 + word) + 2.3 * place + word)

    def confidence(state, i):
        return float(head_pass(state[None, None])[0, 0, i].softmax(-1)[token[i]])

    def keep(score, wanted):
        kept = {i for i in places if wanted(score[i])}
        return kept or {max(places, key=lambda i: score[i])}

    def as_set(kept):
        return set(kept[0].nonzero()[:, 0].tolist())

    places = revealed.nonzero()[:, 0].tolist()
    rows = (before[None], revealed[None], token[None])
    after = torch.where(revealed, token, before)
    assert as_set(keep_by_confidence(*rows, head_pass, tau)) == keep(
        {i: confidence(after, i) for i in places}, lambda c: c > tau
    )

    move = {i: -abs(float(head_pass(before[None, None])[0, 0, i, token[i]] - logits[i, token[i]])) for i in places}
    delta = 2 * tau
    assert as_set(keep_by_veto(*rows, logits[None], head_pass, delta)) == keep(move, lambda c: -c <= delta)

    ranked = sorted(places, key=lambda i: -float(key[i]))
    halves = (set(ranked[0::2]), set(ranked[1::2]))
    crossed = {}
    for own, other in (halves, halves[::-1]):
        state = before.clone()
        for i in other:
            state[i] = token[i]
        crossed |= {i: confidence(state, i) for i in own}
    wanted = keep(crossed, lambda c: c > tau) if len(places) > 1 else set(places)
    assert as_set(keep_by_cross(*rows, key[None], head_pass, tau)) == wanted


def uniform_model():
    """All logits equal, everywhere."""
    model = random_model(0)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    return model


@pytest.mark.parametrize("arguments", [
    {"mrp_mode": "none", "remasking_strategy": "low_confidence_dynamic"},
    {"mrp_mode": "none", "remasking_strategy": "entropy_bounded", "entropy_bound": 0.0},
    {"mrp_mode": "speculative", "draft_states": 8},
    {"mrp_mode": "direct"},
    *({"mrp_mode": "remask", "remask_rule": rule} for rule in RULES),
])  # fmt: skip
def test_certainty_that_never_comes_still_ends(arguments):
    """Guards a stuck step: tau = 1 and uniform logits take at most one step per position."""
    prompt = torch.tensor([[5, 6, 7]])
    out = uniform_model().generate(
        prompt, max_new_tokens=13, block_length=8, confidence_threshold=1.0, return_dict_in_generate=True, **arguments
    )
    assert out.new_tokens.tolist() == [13]
    assert out.total_forwards <= 13
    assert not (out.sequences == 63).any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0])
def test_remasking_makes_progress(rule, tau):
    """Guards a step that ends with no more revealed than it began with."""
    out = shared_model(3).generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=21, block_length=8, mrp_mode="remask", remask_rule=rule,
        remask_delta=0.0, confidence_threshold=tau, return_dict_in_generate=True, output_trace=True,
    )  # fmt: skip
    steps = out.reveal_step[0, 3:]
    assert sorted(set(steps.tolist())) == list(range(out.total_forwards))


@pytest.mark.parametrize("temperature", [1e-6, 0.1, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (20, 1.0), (0, 0.1), (20, 0.1)])
def test_confidence_is_the_raw_softmax(temperature, top_k, top_p):
    """Guards an order that depends on temperature, top-k or top-p (a public report): the first reveal of a block is
    the position whose drawn token has the largest raw probability."""
    model = shared_model(4)
    prompt = torch.tensor([[9, 8, 7, 6]])
    out = model.generate(
        prompt, max_new_tokens=4, mrp_mode="none", do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p,
        seed=11, return_dict_in_generate=True, output_trace=True,
    )  # fmt: skip
    from modeling_mrp.token_statistics import DrawKey, token_statistics

    ids = torch.cat([prompt, torch.full((1, 4), 63)], dim=1)
    with torch.no_grad():
        logits = model(ids, block_length=4).logits[0, 4:]
    options = options_for(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    key = DrawKey(11, torch.tensor(0), torch.arange(4, 8), torch.tensor(0))
    token = token_statistics(logits, options, key).choice.token
    raw = logits.softmax(-1).gather(1, token[:, None])[:, 0]
    assert int(out.reveal_step[0, 4:].argmin()) == int(raw.argmax())
    assert int(out.sequences[0, 4 + int(raw.argmax())]) == int(token[raw.argmax()])


def test_temperature_zero_is_greedy():
    """Guards a division by zero; lm_eval passes do_sample=True with temperature 0."""
    model, prompt = shared_model(4), torch.tensor([[9, 8, 7]])
    greedy = model.generate(prompt, max_new_tokens=9)
    assert torch.equal(model.generate(prompt, max_new_tokens=9, do_sample=True, temperature=0.0), greedy)
    assert torch.equal(model.generate(prompt, max_new_tokens=9, do_sample=False, temperature=0.7), greedy)
    assert torch.equal(model.generate(prompt, max_new_tokens=9, do_sample=True, top_k=1, temperature=0.5), greedy)
