"""Counter-based noise: a draw belongs to (seed, row, position, step, token), never to a call.

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): ten rounds over a counter of
four 32-bit words under a 64-bit key. Token ``v`` takes word ``v % 4`` of the counter
``(v // 4, position, step, row)``. Torch has no unsigned 32-bit arithmetic, so words live in int64; a product of two
words wraps modulo 2^64, which leaves both of its halves intact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


@dataclass(frozen=True)
class NoiseKey:
    """What a row's noise depends on.

    Args:
        seed: 64-bit key, an int or an int64 tensor of shape `[]` or `[rows]`.
        row: `[rows]` int64, the sequence that the row belongs to (its low 32 bits count, as below).
        position: `[rows]` int64, the absolute position in that sequence.
        step: `[rows]` int64, the denoising step.
    """

    seed: int | Tensor
    row: Tensor
    position: Tensor
    step: Tensor


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int | Tensor, int | Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words, as int64 in [0, 2^32), for int64 counter and key words that broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (product1 >> 32).bitwise_and_(_WORD).bitwise_xor(c1).bitwise_xor(k0)
        c2 = (product0 >> 32).bitwise_and_(_WORD).bitwise_xor(c3).bitwise_xor(k1)
        c1, c3 = product1.bitwise_and_(_WORD), product0.bitwise_and_(_WORD)
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def gumbel_from_words(words: Tensor) -> Tensor:
    """Standard Gumbel draws, float32, from 32-bit words held as int64.

    `v = min((float32(word) + 0.5) * 2^-32, 1 - 2^-24)` lies in (0, 1) and `u = 1 - v` is the uniform draw;
    `g = -log(-log(u)) = -log(-log1p(-v))`. The large draws, which decide who wins, come from small `v`, where float32
    keeps all 32 bits; the rounding of `1 - v` would have left 24 of them.
    """
    v = words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def gumbel_noise(noise: NoiseKey, vocab_size: int) -> Tensor:
    """`[rows, vocab_size]` float32 Gumbel draws of the key; the same key gives the same draws in every call."""
    groups = torch.arange((vocab_size + 3) // 4, device=noise.row.device)[None]
    words = torch.stack(torch.broadcast_tensors(*_words(noise, groups)), dim=-1)
    return gumbel_from_words(words.flatten(1)[:, :vocab_size])


def gumbel_noise_at(noise: NoiseKey, tokens: Tensor) -> Tensor:
    """`[rows, n]` float32: the draws of the tokens `[rows, n]` alone, `gumbel_noise(...).gather(1, tokens)`."""
    words = torch.stack(_words(noise, tokens >> 2), dim=-1)
    return gumbel_from_words(words.gather(-1, (tokens & 3)[..., None])[..., 0])


def _words(noise: NoiseKey, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of each token group, `groups` `[rows or 1, n]` int64."""
    key: tuple[int | Tensor, int | Tensor]
    if isinstance(noise.seed, Tensor):
        seed = noise.seed.to(groups.device).reshape(-1, 1)
        key = (seed & _WORD, (seed >> 32) & _WORD)
    else:
        key = (noise.seed & _WORD, (noise.seed >> 32) & _WORD)
    position, step, row = (word.to(torch.int64)[:, None] & _WORD for word in (noise.position, noise.step, noise.row))
    return philox4x32((groups, position, step, row), key)
