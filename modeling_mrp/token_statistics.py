"""From logits to what decoding reads: chosen token, confidence, entropy, runner-up, for any leading dimensions."""

from typing import NamedTuple

import torch
from torch import Tensor

from .generation_config_mrp import DecodingOptions
from .philox_torch import NoiseKey
from .reveal_rule import PositionStatistics
from .reveal_statistics import reveal_statistics


class DrawKey(NamedTuple):
    """Where noise comes from: it belongs to (seed, row, absolute position, denoising step), never to a call.

    Attributes:
        seed: 64-bit base seed.
        row: int64, the row part of the key; broadcasts against the positions.
        position: int64, absolute positions in the row.
        step: int64, denoising step within the block.
    """

    seed: int
    row: Tensor
    position: Tensor
    step: Tensor


class TokenStatistics(NamedTuple):
    """`PositionStatistics` plus the runner-up, every field `[..., block]`; `log_sum_exp` is NaN for broken logits."""

    choice: PositionStatistics
    runner_up: Tensor
    runner_up_probability: Tensor
    log_sum_exp: Tensor


def token_statistics(
    logits: Tensor, options: DecodingOptions, key: DrawKey, *, runner_up: bool = False, entropy: bool = False
) -> TokenStatistics:
    """Chooses a token at every position (greedy, or by the noise of `key`) and measures it.

    Args:
        logits: `[..., vocab]`.
        options: of which temperature, top_k, top_p, the mask token and `kernels` are read.
        key: fields that broadcast to `logits.shape[:-1]`.
    """
    shape = logits.shape[:-1]
    noise = None
    if options.temperature > 0:
        row, position, step = (part.expand(shape).reshape(-1) for part in key[1:])
        noise = NoiseKey(key.seed, row, position, step)
    statistics = reveal_statistics(
        logits.reshape(-1, logits.shape[-1]),
        mask_token_id=options.mask_token_id,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        noise=noise,
        runner_up=runner_up,
        entropy=entropy,
        kernels=options.kernels,
    )
    fields = {name: value.view(shape) for name, value in statistics._asdict().items()}
    choice = PositionStatistics(fields["token"], fields["probability"], fields["log_odds"], fields["entropy"])
    return TokenStatistics(choice, fields["runner_up"], fields["runner_up_probability"], fields["log_sum_exp"])


def probability_of(logits: Tensor, token: Tensor) -> Tensor:
    """Raw softmax probability `[...]` float32 of given tokens `[...]` under `logits` `[..., vocab]`."""
    values = logits.float()
    return (values.gather(-1, token[..., None])[..., 0] - values.logsumexp(dim=-1)).exp()


class BrokenLogitsError(FloatingPointError):
    """The model produced NaN or infinite logits."""


def raise_if_broken(log_sum_exp: Tensor) -> None:
    """Raises `BrokenLogitsError` if any row of logits holds a NaN or infinity (synchronises with the device)."""
    if not bool(torch.isfinite(log_sum_exp).all()):
        raise BrokenLogitsError(
            "the model produced NaN or infinite logits; allowed: finite numbers. Check the weights (backbone and MRP "
            "head), and use dtype=torch.bfloat16 or float32 if float16 overflows."
        )
