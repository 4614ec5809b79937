"""One pass over logits gives what a reveal policy needs: token, confidence, entropy, runner-up."""

import math

from torch import Tensor

from .kernel_dispatch import resolve_kernels
from .philox_torch import NoiseKey
from .reveal_statistics_torch import RevealStatistics, reveal_statistics_torch


def reveal_statistics(
    logits: Tensor,
    *,
    residual: Tensor | None = None,
    residual_scale: float = 1.0,
    mask_token_id: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    noise: NoiseKey | None = None,
    runner_up: bool = True,
    entropy: bool = True,
    kernels: str = "auto",
) -> RevealStatistics:
    """Chooses a token per row and measures it, writing nothing of vocabulary size (the Triton path).

    The logits are `l = logits + residual_scale * residual`. With `temperature` 0, or without `noise`, the choice is
    the argmax of `l` (the lowest index wins ties); otherwise it is the Gumbel-max draw `argmax(l / temperature + g)`
    over the tokens that top-k and then top-p, on the tempered distribution, leave. The mask token is never chosen. All
    measures are those of the raw softmax of `l` over all tokens, whatever the sampling: with `m` the largest logit,
    `p = exp(l_c - m) / sum_v exp(l_v - m)` and `log_odds = (l_c - m) - log sum_{v != c} exp(l_v - m)`.

    Args:
        logits: `[rows, vocab]`, float32, float16 or bfloat16; computed in float32.
        residual: added to the logits, `[rows, vocab]`, of any of these types.
        residual_scale: its factor.
        mask_token_id: the token that must not be chosen, `None` for none.
        temperature: 0 for greedy.
        top_k: keep the k best tokens (and those that tie with the last of them); 0 keeps all.
        top_p: keep the best tokens until their mass reaches this share (and those that tie with the last); 1 keeps
            all.
        noise: the key of the draws.
        runner_up: measure the best other token.
        entropy: measure the entropy.
        kernels: `"auto"`, `"torch"` or `"triton"`.

    Returns:
        `RevealStatistics`. A row with a NaN is not an error here: its `log_sum_exp` is NaN, so one `isnan` over
        `[rows]` finds it, and its other fields mean nothing (but `token` is a valid index).

    Raises:
        ValueError: a shape or an option is out of range.
    """
    _validate(logits, residual, mask_token_id, temperature, top_k, top_p, noise)
    if resolve_kernels(kernels, logits.device) == "triton":
        from .reveal_statistics_triton import reveal_statistics_triton as implementation
    else:
        implementation = reveal_statistics_torch
    return implementation(
        logits,
        residual=residual,
        residual_scale=residual_scale,
        mask_token_id=mask_token_id,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        noise=noise,
        runner_up=runner_up,
        entropy=entropy,
    )


def _validate(
    logits: Tensor,
    residual: Tensor | None,
    mask_token_id: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    noise: NoiseKey | None,
) -> None:
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be a floating point tensor [rows, vocab], not {logits.dtype} {list(logits.shape)}."
        )
    rows, vocab = logits.shape
    if residual is not None and residual.shape != logits.shape:
        raise ValueError(f"residual {list(residual.shape)} must have the shape of logits {list(logits.shape)}.")
    if mask_token_id is not None and not 0 <= mask_token_id < vocab:
        raise ValueError(f"mask_token_id={mask_token_id} is outside the vocabulary [0, {vocab}).")
    if vocab - (mask_token_id is not None) < 2:
        raise ValueError(f"a vocabulary of {vocab} leaves fewer than two tokens to choose from.")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be finite and at least 0 (0 is greedy).")
    if top_k < 0:
        raise ValueError(f"top_k={top_k} must be at least 0 (0 keeps all tokens).")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be in (0, 1] (1 keeps all tokens).")
    if noise is not None:
        for name in ("row", "position", "step"):
            shape = getattr(noise, name).shape
            if shape != (rows,):
                raise ValueError(f"noise.{name} {list(shape)} must have one entry for each of the {rows} rows.")
