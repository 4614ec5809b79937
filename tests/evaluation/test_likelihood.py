"""The likelihood against full enumeration: of tokens (it is a distribution), of orders, and of sampling runs."""

import itertools
import math

import pytest
import torch
from evaluation_models import make_model

from modeling_mrp.evaluation.likelihood import BlockLikelihood

VOCAB, MASK = 6, 5
CONTEXT = [1, 2, 3, 0, 4, 1]  # one whole block of 4, and half of the next


@pytest.fixture(scope="module")
def model():
    return make_model(VOCAB, MASK, block_size=4)


def log_p(model, tokens, known, position, block_length=4):
    """log p(token at `position` | positions `known`), by one plain forward over the blocks up to the position's."""
    end = (position // block_length + 1) * block_length
    start = end - block_length
    ids = [tokens[i] if i < start or i in known else MASK for i in range(end)]
    logits = model(torch.tensor([ids]), block_length=block_length).logits[0, position].double()
    logits[MASK] = -torch.inf
    return float(logits.log_softmax(-1)[tokens[position]])


def by_order(model, context, continuation, orders_of_block, block_length=4):
    """The mean over orders, block by block, as the definition says it."""
    tokens = context + continuation
    total = 0.0
    places = range(len(context), len(tokens))
    for _, group in itertools.groupby(places, lambda place: place // block_length):
        group = list(group)
        start = group[0] // block_length * block_length
        given = set(range(start, group[0]))
        values = []
        for order in orders_of_block(group):
            values.append(
                sum(log_p(model, tokens, given | set(order[:k]), order[k], block_length) for k in range(len(order)))
            )
        total += sum(values) / len(values)
    return total


@torch.no_grad()
@pytest.mark.parametrize("continuation", [[3], [0, 2], [4, 1, 1, 0, 2]])
def test_random_order_is_the_mean_over_all_orders(model, continuation):
    exact = BlockLikelihood(model, samples=64).estimate(CONTEXT, continuation)
    wanted = by_order(model, CONTEXT, continuation, lambda group: list(itertools.permutations(group)))
    assert exact.value == pytest.approx(wanted, abs=1e-4)
    assert exact.standard_error == 0.0
    assert exact.samples == 0


@torch.no_grad()
def test_sequential_is_the_left_to_right_product(model):
    continuation = [4, 1, 1, 0, 2]
    estimate = BlockLikelihood(model, order="sequential").estimate(CONTEXT, continuation)
    wanted = by_order(model, CONTEXT, continuation, lambda group: [group])
    assert estimate.value == pytest.approx(wanted, abs=1e-4)
    assert estimate.standard_error == 0.0


@torch.no_grad()
def test_sequential_probabilities_sum_to_one(model):
    """Over every continuation of three real tokens: it is a distribution, and the mask token has no share in it."""
    likelihood = BlockLikelihood(model, order="sequential")
    total = sum(
        math.exp(likelihood.estimate(CONTEXT, list(tokens)).value)
        for tokens in itertools.product([t for t in range(VOCAB) if t != MASK], repeat=3)
    )
    assert total == pytest.approx(1.0, abs=1e-4)


@torch.no_grad()
def test_the_bound_is_below_the_mixture_over_orders(model):
    """mean over orders of log p <= log of the mean over orders of p, and the latter sums to one over continuations."""
    likelihood = BlockLikelihood(model, samples=64)
    total = 0.0
    for tokens in itertools.product([t for t in range(VOCAB) if t != MASK], repeat=2):
        sequence = CONTEXT + list(tokens)
        orders = [
            sum(log_p(model, sequence, {4, 5, *order[:k]}, order[k]) for k in range(2))
            for order in itertools.permutations([6, 7])
        ]
        mixture = math.log(sum(map(math.exp, orders)) / len(orders))
        assert likelihood.estimate(CONTEXT, list(tokens)).value <= mixture + 1e-5
        total += math.exp(mixture)
    assert total == pytest.approx(1.0, abs=1e-4)


@torch.no_grad()
def test_sampled_estimate_is_within_its_error_and_the_error_is_honest():
    """A block of 8 (255 subsets) with few samples, against the exact sum: z-scores over many seeds behave."""
    model = make_model(VOCAB, MASK, block_size=8, seed=3)
    context, continuation = [1, 2], [0, 4, 3, 1, 2, 0]
    exact = BlockLikelihood(model, samples=256).estimate(context, continuation)
    assert exact.samples == 0
    scores = []
    for seed in range(60):
        estimate = BlockLikelihood(model, samples=4, seed=seed).estimate(context, continuation)
        assert estimate.samples == 4
        scores.append((estimate.value - exact.value, estimate.standard_error))
    errors = [error for error, _ in scores]
    assert abs(sum(errors) / 60) < 4 * (sum(e * e for e in errors) / 60 / 60) ** 0.5
    ratio = (sum(e * e for e in errors) / 60) / (sum(s * s for _, s in scores) / 60)
    assert 0.5 < ratio < 2.0
    tight = BlockLikelihood(model, samples=10).estimate(context, continuation)
    assert tight.samples == 10
    assert abs(tight.value - exact.value) < 4 * tight.standard_error


@torch.no_grad()
def test_deterministic_given_the_seed_and_independent_of_batching(model):
    wide = make_model(VOCAB, MASK, block_size=8, seed=3)
    requests = [([1, 2], [0, 4, 3, 1, 2, 0]), ([1, 2], [0, 4, 3]), ([3] * 20, [1, 1, 2, 0, 4, 3, 2, 1, 0, 1])]
    one = BlockLikelihood(wide, samples=4, seed=7, batch_size=1)
    many = BlockLikelihood(wide, samples=4, seed=7, batch_size=64)
    first = [one.estimate(*request) for request in requests]
    second = [many.estimate(*request) for request in reversed(requests)][::-1]
    for a, b in zip(first, second, strict=True):
        assert a.value == pytest.approx(b.value, abs=1e-4)
        assert a.standard_error == pytest.approx(b.standard_error, abs=1e-4)
    again = BlockLikelihood(wide, samples=4, seed=7, batch_size=1)
    assert [again.estimate(*request) for request in requests] == first
    other = BlockLikelihood(wide, samples=4, seed=8).estimate(*requests[0])
    assert other.value != first[0].value


@torch.no_grad()
def test_long_contexts_are_read_in_chunks(model, monkeypatch):
    context, continuation = [i % 5 for i in range(50)], [1, 2, 3]
    whole = BlockLikelihood(model).estimate(context, continuation)
    monkeypatch.setattr("modeling_mrp.evaluation.likelihood._PREFILL_TOKENS", 8)
    assert BlockLikelihood(model).estimate(context, continuation).value == pytest.approx(whole.value, abs=1e-4)


def test_an_empty_context_and_the_mask_token(model):
    assert BlockLikelihood(model).estimate([], [1, 2]).value < 0
    assert BlockLikelihood(model).estimate([1], [MASK]).value == -math.inf


def test_wrong_arguments_are_named(model):
    with pytest.raises(ValueError, match=r"likelihood_order='any'.*random, sequential"):
        BlockLikelihood(model, order="any")
    with pytest.raises(ValueError, match="likelihood_samples=1; allowed: an integer from 2"):
        BlockLikelihood(model, samples=1)
    with pytest.raises(ValueError, match="likelihood_samples='many'; allowed: an integer from 2"):
        BlockLikelihood(model, samples="many")
    with pytest.raises(ValueError, match=r"likelihood_seed=0\.5; allowed: an integer"):
        BlockLikelihood(model, seed=0.5)
    for length in (0, -3, 257, "4"):
        with pytest.raises(ValueError, match=f"likelihood_block_length={length!r}; allowed: an integer from 1 to 256"):
            BlockLikelihood(model, block_length=length)
    with pytest.raises(ValueError, match="continuation is empty"):
        BlockLikelihood(model).estimate([1], [])
