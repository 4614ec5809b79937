"""Noise is a property of the sample, and states are counted as decoding counts them."""

import pytest
import torch
from training_models import BLOCK, sample

from modeling_mrp.noising import NoiseSource, block_grid, draw_noise, highest, reveal_counts
from modeling_mrp.training.data import Collator


def grid_of(*samples, **kwargs):
    batch = Collator(0)(list(samples))
    order = batch.pop("reveal_order", None)
    return block_grid(
        batch["input_ids"], batch["labels"], BLOCK, batch["attention_mask"], batch["position_ids"],
        batch["sample_keys"], **kwargs,
    ), order  # fmt: skip


def test_uniform_draws_are_uniform_and_keyed():
    source = NoiseSource(3, 1)
    keys, positions = torch.arange(200)[:, None], torch.arange(200)
    draws = source.uniform(keys, positions, 1)
    assert draws.min() > 0
    assert draws.max() < 1
    assert abs(draws.mean().item() - 0.5) < 0.005
    assert torch.equal(draws[7, 9], source.uniform(torch.tensor(7), torch.tensor(9), 1))
    for other in (NoiseSource(3, 2), NoiseSource(4, 1)):
        assert not torch.equal(draws, other.uniform(keys, positions, 1))
    assert not torch.equal(draws, source.uniform(keys, positions, 2))


def test_blocks_without_labels_are_dropped():
    grid, _ = grid_of(sample(14, 6, 1))
    assert grid.columns.tolist() == [[[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 0, 0]]]
    assert grid.supervised.tolist()[0] == [[False, False, True, True], [True] * 4, [True, True, False, False]]
    everything, _ = grid_of(sample(14, 6, 1), all_blocks=True)
    assert everything.columns.shape == (1, 4, BLOCK)


@pytest.mark.parametrize("level", ["sample", "block", "recorded"])
def test_only_labelled_places_are_masked(level):
    grid, _ = grid_of(sample(30, 5, 1), sample(7, 2, 2))
    order = torch.arange(30).expand(2, -1)
    for draw in range(20):
        noise = draw_noise(grid, NoiseSource(0, draw), level, 3, order)
        assert not (noise.masked & ~grid.supervised).any()
        assert ((noise.rate > 0) & (noise.rate <= 1)).all()
        if level != "sample":
            assert (noise.masked.any(-1) == grid.supervised.any(-1)).all()


def test_every_count_of_masked_places_is_equally_likely():
    grid, _ = grid_of(*(sample(BLOCK, 0, key) for key in range(400)))
    counts = torch.cat([draw_noise(grid, NoiseSource(0, d), "block").masked.sum(-1).flatten() for d in range(10)])
    frequency = torch.bincount(counts, minlength=BLOCK + 1) / len(counts)
    assert frequency[0] == 0
    assert (frequency[1:] - 1 / BLOCK).abs().max() < 0.03


def test_recorded_noise_masks_what_was_revealed_last():
    grid, _ = grid_of(sample(BLOCK, 0, 1))
    order = torch.tensor([[2, 0, 3, 1]])
    for draw in range(10):
        masked = draw_noise(grid, NoiseSource(0, draw), "recorded", 1, order).masked[0, 0, 0]
        assert order[0][masked].min() > (order[0][~masked].max() if (~masked).any() else -1)


def test_highest_takes_so_many_and_breaks_ties_from_the_left():
    score = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    among = torch.tensor([[True, True, True, False]])
    assert highest(score, among, torch.tensor([[1]])).tolist() == [[False, True, False, False]]
    assert highest(score, among, torch.tensor([[9]])).tolist() == among.tolist()


def test_counts_are_drawn_within_their_bounds():
    grid, _ = grid_of(*(sample(BLOCK, 0, key) for key in range(200)))
    counts = reveal_counts(grid, NoiseSource(0), (1, 3), 1, 2)
    assert sorted(counts.unique().tolist()) == [1, 2, 3]
    assert (reveal_counts(grid, NoiseSource(0), (2, 2), 1, 1) == 2).all()
