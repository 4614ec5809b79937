"""Philox against its authors' vectors, Gumbel draws against their distribution, sampling against its softmax."""

import math

import pytest
import torch
from mrp_kernels import NoiseKey, gumbel_noise, reveal_statistics
from mrp_kernels.philox_torch import gumbel_from_words, gumbel_noise_at, philox4x32


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    words = philox4x32(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in words) == expected


def test_gumbel_is_finite_and_precise_for_every_kind_of_word():
    words = torch.tensor([0, 1, 2, 1000, 2**31, 2**32 - 1000, 2**32 - 2, 2**32 - 1])
    draws = gumbel_from_words(words)
    # The definition rounds the word to float32: that costs the losing draws (v near 1) precision, not the winners.
    v = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
    torch.testing.assert_close(draws.double(), -torch.log(-torch.log1p(-v)), rtol=2e-6, atol=2e-6)


def test_gumbel_moments():
    draws = gumbel_noise(NoiseKey(3, torch.zeros(64).long(), torch.arange(64), torch.zeros(64).long()), 4001).double()
    error = 5 / math.sqrt(draws.numel())
    assert abs(draws.mean() - 0.5772156649) < error * math.pi / math.sqrt(6)
    assert abs(draws.var() - math.pi**2 / 6) < error * 4


def test_noise_belongs_to_the_key_and_not_to_the_call():
    key = NoiseKey(-5, torch.tensor([4, 9, 4]), torch.tensor([7, 7, 8]), torch.tensor([0, 0, 1]))
    alone = NoiseKey(torch.tensor(-5), *(word[1:2] for word in (key.row, key.position, key.step)))
    per_row = NoiseKey(torch.tensor([-5, -5, -5]), key.row, key.position, key.step)
    draws = gumbel_noise(key, 103)
    assert torch.equal(draws[1:2], gumbel_noise(alone, 103))
    assert torch.equal(draws, gumbel_noise(per_row, 103))
    assert torch.equal(draws[:, :50], gumbel_noise(key, 50))
    tokens = torch.tensor([[0, 102, 5], [3, 2, 1], [9, 9, 98]])
    assert torch.equal(draws.gather(1, tokens), gumbel_noise_at(key, tokens))
    assert draws[0].ne(draws[1]).all()
    assert draws[0].ne(draws[2]).all()


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [(0, 1.0, [0, 1, 2, 4, 5, 6, 7]), (3, 1.0, [0, 2, 5]), (0, 0.6, [0, 2]), (3, 0.9, [0, 2, 5])],
)
def test_sampling_follows_the_tempered_and_cut_softmax(top_k, top_p, kept):
    """Chi-square with the mask token (3, the likeliest) left out; the bound is the 1 - 1e-5 quantile."""
    rows, temperature = 20000, 1.5
    logits = torch.tensor([3.0, 0.5, 2.4, 9.0, -1.0, 1.5, 0.1, 0.0])
    order = torch.arange(rows)
    noise = NoiseKey(11, order % 7, order, order % 5)
    options = {"mask_token_id": 3, "temperature": temperature, "top_k": top_k, "top_p": top_p, "noise": noise}
    token = reveal_statistics(logits.expand(rows, -1), **options).token
    counts = torch.bincount(token, minlength=8)
    assert counts.sum() == counts[kept].sum()

    def statistic(temperature: float) -> float:
        expected = (logits[kept] / temperature).double().softmax(0) * rows
        return ((counts[kept] - expected) ** 2 / expected).sum().item()

    bound = {2: 19.5, 3: 23.0, 7: 33.1}[len(kept)]
    assert statistic(temperature) < bound
    # So many draws do tell a temperature that is off by a fifth.
    assert min(statistic(0.8 * temperature), statistic(1.2 * temperature)) > bound
